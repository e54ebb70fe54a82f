# pyright: reportPrivateUsage=false
# Torch keeps what a front end needs private.
"""A model that is captured where it is: in a fork, which has it already, or in the process that serves it.

Not every model can be pickled: one holds a lock, a file or a tokenizer, another is a graph too deep to walk recursively, a third
computes its weights from others (`torch.nn.utils.parametrizations`) and forbids it. Nothing of that has to travel to be traced.
What is needed is which tensors and modules the model is made of, to watch them, and a twin of its modules with fake weights, so
that tracing neither computes anything nor exchanges parameters under a thread that serves.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import nn

from hotfuse.base.errors import CaptureError
from hotfuse.frontends.captured import CallSpec, Captured
from hotfuse.frontends.model_parts import PLAIN_TENSORS, PresentModel

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode

_held: dict[int, PresentModel] = {}
"""By number; a fork inherits it."""
_numbers = itertools.count()


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

    from hotfuse.frontends.torch_module import capture, traced_as_in_eager

    held = _held[number]
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    fakes: dict[int, torch.Tensor] = {}
    twins: dict[int, nn.Module] = {}
    target = held.target
    if isinstance(target, nn.Module):
        try:
            target = _twin(target, mode, fakes, twins)
            traced_as_in_eager(target.modules())
            return capture(target, held.spec, held.tensors, call, mode, [fakes.get(id(t), t) for t in held.tensors])
        finally:
            _without_end(twins.values())
    if fused := next((m for m in held.modules if isinstance(m, (nn.MultiheadAttention, nn.TransformerEncoderLayer))), None):
        raise CaptureError(f"a function that leads to a {type(fused).__name__} cannot be traced beside its use",
                           because="its masks mean something else in a trace, and the module is the user's own")  # fmt: skip
    return capture(target, held.spec, held.tensors, call, mode)


def _without_end(twins: Iterable[nn.Module]) -> None:
    """What a class does when an object of it is deleted (closes a file, removes a folder) is the model's to do."""
    for twin in twins:
        if hasattr(type(twin), "__del__"):
            object.__setattr__(twin, "__class__", nn.Module)


def _twin(module: nn.Module, mode: FakeTensorMode, fakes: dict[int, torch.Tensor], done: dict[int, nn.Module]) -> nn.Module:
    """The same modules with fake parameters and buffers; everything else is shared."""
    if id(module) in done:
        return done[id(module)]
    if hasattr(type(module), "__del__") and type(module).__basicsize__ != nn.Module.__basicsize__:
        raise CaptureError(f"a {type(module).__name__} cannot be traced beside its use",
                           because="it does something when it is deleted")  # fmt: skip
    try:
        made = object.__new__(type(module))
    except TypeError as e:
        raise CaptureError(f"a {type(module).__name__} cannot be traced beside its use", because=str(e)) from e
    done[id(module)] = made
    made.__dict__.update(module.__dict__)

    def fake(t: torch.Tensor | None) -> torch.Tensor | None:
        if t is None or type(t) not in PLAIN_TENSORS:
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
