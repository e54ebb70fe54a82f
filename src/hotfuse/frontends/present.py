# pyright: reportPrivateUsage=false
# Torch keeps what a front end needs private.
"""A model that is captured where it is: in a fork, which has it already, or in the process that serves it.

Not every model can be pickled: one holds a lock, a file or a tokenizer, another is a graph too deep to walk recursively, a third
computes its weights from others (`torch.nn.utils.parametrizations`) and forbids it. Nothing of that has to travel to be traced.
What is needed is which tensors and modules the model is made of, to watch them, and a twin of its modules with fake weights, so
that tracing neither computes anything nor exchanges parameters under a thread that serves.
"""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hotfuse.base.errors import CaptureError
from hotfuse.base.events import Why
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.base.structure import Spec
from hotfuse.frontends.captured import CallSpec, Captured

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode

MAX_OBJECTS = 200_000
"""Objects that are looked through for tensors and modules."""
_TENSORS = (torch.Tensor, nn.Parameter, nn.Buffer)


@dataclass(frozen=True, slots=True)
class PresentModel:
    """A model that stays where it is, and what it is made of."""

    target: Any
    spec: Spec
    tensors: tuple[torch.Tensor, ...]
    modules: tuple[nn.Module, ...]


_held: dict[int, PresentModel] = {}
"""By number; a fork inherits it."""
_numbers = itertools.count()


def hold(target: Any, spec: Spec) -> PresentModel:
    """What a model is made of; raises CaptureError where that has no end."""
    tensors: dict[int, torch.Tensor] = {}
    modules: dict[int, nn.Module] = {}
    seen: set[int] = set()
    left: list[Any] = [target]
    while left:
        obj = left.pop()
        if id(obj) in seen:
            continue
        seen.add(id(obj))
        if len(seen) > MAX_OBJECTS:
            raise CaptureError("the model cannot be looked through", because=f"it holds more than {MAX_OBJECTS} objects",
                               why=Why.NOT_SENDABLE)  # fmt: skip
        if isinstance(obj, torch.Tensor):
            if type(obj) in _TENSORS:
                tensors[id(obj)] = obj
            continue
        if isinstance(obj, nn.Module):
            modules[id(obj)] = obj
        left.extend(_parts(obj))
    return PresentModel(target, spec, tuple(tensors.values()), tuple(modules.values()))


def _parts(obj: Any) -> Iterator[Any]:
    """The objects that one refers to and that may lead to tensors or modules."""
    if isinstance(obj, dict):
        yield from obj.values()
    elif isinstance(obj, list | tuple | set | frozenset):
        yield from obj
    elif isinstance(obj, types.FunctionType):
        for cell in obj.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:  # not assigned yet
                continue
        yield from (obj.__globals__[n] for n in obj.__code__.co_names if isinstance(obj.__globals__.get(n), _LEADING))
        yield from obj.__defaults__ or ()
    elif isinstance(obj, types.MethodType):
        yield from (obj.__self__, obj.__func__)
    elif isinstance(obj, functools.partial):
        yield from (obj.func, obj.args, obj.keywords)
    elif isinstance(obj, nn.Module) or not (
        isinstance(obj, type | types.ModuleType) or type(obj).__module__.partition(".")[0] in ("torch", "builtins")
    ):
        yield from getattr(obj, "__dict__", {}).values()


_LEADING = (nn.Module, torch.Tensor, types.FunctionType)


def keep(held: PresentModel) -> int:
    """A number by which a fork that begins from here on, or this process, knows the model."""
    number = next(_numbers)
    _held[number] = held
    return number


def release(number: int) -> None:
    """No request names it any more."""
    _held.pop(number, None)


def capture_present(number: int, call: CallSpec) -> Captured:
    """Capture a model that is kept here."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # and sympy behind it: by those alone who trace
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    from hotfuse.frontends.nested import without_nested_tensors
    from hotfuse.frontends.packed_sequences import over_padded_sequences
    from hotfuse.frontends.torch_module import capture

    held = _held[number]
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    fakes: dict[int, torch.Tensor] = {}
    target = held.target
    if isinstance(target, nn.Module):
        target = _twin(target, mode, fakes, {})
        without_nested_tensors(target)
        over_padded_sequences(target)
    return capture(target, held.spec, held.tensors, call, mode, [fakes.get(id(t), t) for t in held.tensors])


def _twin(module: nn.Module, mode: FakeTensorMode, fakes: dict[int, torch.Tensor], done: dict[int, nn.Module]) -> nn.Module:
    """The same modules with fake parameters and buffers; everything else is shared."""
    if id(module) in done:
        return done[id(module)]
    try:
        made = object.__new__(type(module))
    except TypeError as e:
        raise CaptureError(f"a {type(module).__name__} cannot be traced beside its use", because=str(e)) from e
    done[id(module)] = made
    made.__dict__.update(module.__dict__)

    def fake(t: torch.Tensor | None) -> torch.Tensor | None:
        if t is None or type(t) not in _TENSORS:
            return t
        if id(t) not in fakes:
            with mode:
                empty = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
                fakes[id(t)] = nn.Parameter(empty, requires_grad=t.requires_grad) if isinstance(t, nn.Parameter) else empty
        return fakes[id(t)]

    for kind in ("_parameters", "_buffers"):
        made.__dict__[kind] = {name: fake(t) for name, t in module.__dict__[kind].items()}
    made.__dict__["_modules"] = {n: None if m is None else _twin(m, mode, fakes, done) for n, m in module._modules.items()}
    return made
