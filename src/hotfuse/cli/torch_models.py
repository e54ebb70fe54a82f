"""PyTorch models for the command line: `package.module:name`, imported from the current folder or the environment.

    def small():                                  returns a module, or (module, example inputs)
        return Encoder().eval(), (torch.zeros(2, 16),)

    hotfuse show mymodels:small                   runs the user's own code, which is what was asked for
    hotfuse show mymodels:encoder --input 2?x16   a module or a factory of one, with inputs made here

An input is sizes joined by `x`, with `?` behind those that calls may change, and `:int64` (float32 unless said) behind them all.
"""

from __future__ import annotations

import importlib
import re
import sys
import traceback
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hotfuse
from hotfuse.base.errors import HotfuseError, InputError, ModelError
from hotfuse.base.faults import error_text
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.base.passes import run
from hotfuse.base.settings import Settings

if TYPE_CHECKING:
    import torch

    from hotfuse.frontends.captured import Captured

_OURS = Path(hotfuse.__file__).parent
_NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_INPUT = re.compile(r"(?P<sizes>(\d+\??(x\d+\??)*)?)(:(?P<dtype>\w+))?")


def is_torch_name(text: str) -> bool:
    """Whether an argument names something to import rather than a file; raises InputError for what can be neither."""
    if _NAME.fullmatch(text):
        return not Path(text).exists()
    path = Path(text)
    if path.suffix == ".py":
        hint = f"{path.stem}:NAME, from its folder; NAME is the model, or a function that returns it"
        raise InputError(f"{text} is a Python file, no model", hint=hint)
    if re.fullmatch(r"[\w.]+", text) and path.suffix != ".onnx" and not path.exists():
        raise InputError(f"there is no file {text}", hint="an ONNX file, or package.module:name of a PyTorch model")
    return False


@contextmanager
def owning_errors(name: str) -> Generator[None]:
    """What the user's model raises is told in our four parts; what our own code raises is our fault, and shows its traceback."""
    try:
        yield
    except HotfuseError:
        raise
    except Exception as e:
        innermost = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(e.__traceback__)][-1]
        if Path(innermost).is_relative_to(_OURS):
            raise
        hint = "sizes, dtypes and values of its inputs: --input, or what its function returns beside it"
        raise ModelError(f"{name} fails when it is called", because=error_text(e), hint=hint) from e


def load_torch(name: str, inputs: Sequence[str]) -> tuple[Any, tuple[Any, ...], list[set[int]]]:
    """A module or function, the arguments of an example call, and which dims of its tensors are left open."""
    import torch

    found = _called(name, _imported(name))
    model, given = found if isinstance(found, tuple) and len(found) == 2 else (found, None)  # type: ignore[misc]
    if not callable(model):
        raise ModelError(f"{name} gives {type(model).__name__}, no module or function", hint="return (module, inputs)")
    if given is not None and inputs:
        raise InputError(f"{name} brings its own inputs", hint="leave --input out")
    if given is None and not inputs:
        raise InputError(f"{name} gives no example inputs", hint="return (module, inputs), or add --input 2x16 for each of them")
    if given is not None:
        args: tuple[Any, ...] = (given,) if isinstance(given, torch.Tensor) else tuple(given)
        return model, args, []
    parsed = [_input(text) for text in inputs]
    return model, tuple(t for t, _ in parsed), [opened for _, opened in parsed]


def _imported(name: str) -> Any:
    module_name, _, path = name.partition(":")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module_name)
    except ImportError as e:
        raise ModelError(f"{module_name} cannot be imported", because=str(e), hint="run from its folder, or set PYTHONPATH") from e
    for part in path.split("."):
        try:
            found = getattr(found, part)
        except AttributeError as e:
            public = ", ".join(n for n in vars(found) if not n.startswith("_"))[:200] if hasattr(found, "__dict__") else ""
            raise ModelError(f"{module_name} has no {path}", hint=public and f"it has {public}") from e
    return found


def _called(name: str, found: Any) -> Any:
    """A module or (module, inputs) as it is; what else can be called is a factory."""
    from torch import nn

    if isinstance(found, nn.Module | tuple) or not callable(found):
        return found
    try:
        return found()
    except HotfuseError:
        raise
    except Exception as e:
        hint = "name a module, or a function without arguments that returns one"
        raise ModelError(f"{name}() fails", because=f"{type(e).__name__}: {e}", hint=hint) from e


def _input(text: str) -> tuple[Any, set[int]]:
    """A tensor of these sizes, and the dims that are left open."""
    import torch

    match = _INPUT.fullmatch(text)
    dtype = getattr(torch, (match["dtype"] if match else None) or "float32", None)
    if match is None or not isinstance(dtype, torch.dtype):
        raise InputError(f"--input {text} is no shape", hint="--input 2x16, --input 8?x128:int64, --input :float32 for a number")
    sizes = match["sizes"].split("x") if match["sizes"] else []
    opened = {i for i, s in enumerate(sizes) if s.endswith("?")}
    shape = [int(s.removesuffix("?")) for s in sizes]
    if any(shape[i] < 2 for i in opened):
        raise InputError(f"--input {text} leaves a dim of size 0 or 1 open", hint="2 or more: smaller ones may broadcast")
    return (torch.randn(shape).to(dtype) if dtype.is_floating_point else torch.zeros(shape, dtype=dtype)), opened


@dataclass(frozen=True, slots=True)
class CapturedModel:
    """A model's graph as a worker captures it, the sizes it was looked at with, and its weights."""

    captured: Captured
    shapes: list[tuple[int, ...]]
    weights: Mapping[str, torch.Tensor]


def capture_torch(model: Any, args: tuple[Any, ...], opened: list[set[int]]) -> CapturedModel:
    """The graph as a worker captures it for serving, and the sizes it was looked at with."""
    from hotfuse.base.structure import take_call
    from hotfuse.compile.captured_answers import captured_from
    from hotfuse.compile.request_bodies import TorchCapture
    from hotfuse.compile.workers import wire
    from hotfuse.compile.workers.service import ask
    from hotfuse.frontends.captured import CallSpec
    from hotfuse.frontends.ship import ship
    from hotfuse.pipeline import BIND
    from hotfuse.runtime.call_group import specs_of

    taken = take_call(args, {})
    leaves, spec = taken.leaves, taken.spec
    specs = specs_of(leaves, opened or [set() for _ in leaves])
    request = TorchCapture(wire.call_to_json(CallSpec(tuple(specs))))
    shipment = ship(model, spec)
    found = captured_from(ask(request, [shipment.blob], Settings()))
    return CapturedModel(found, [s.shape for s in specs], run(BIND, found, shipment.tensors).weights)
