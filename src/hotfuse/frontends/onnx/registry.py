"""One row per ONNX operator: a function over torch tensors that *is* its meaning.

The same function is called at run time by the interpreter, and traced into ATen ops when the model is
captured; where it cannot be traced (its result shape depends on data) the op stays whole in the graph and the
function runs there. A row serves all opset versions from `since` up to the next row of the same name.

A function takes the context, then the node's inputs in order (None for an absent optional one), then the
node's attributes by name, and returns one value or a tuple of them:

    @onnx_op("Softmax", since=13)
    def softmax(ctx, x, *, axis=-1): return torch.softmax(x, axis)

Attributes are Python numbers, strings and lists of them (never to be changed in place) or values, one per name.
Values are torch tensors; strings and element types torch lacks (int4, float4, ...) are NumPy arrays; sequences are
lists; an empty optional is None. Numbers that come in as tensors (axes, shapes, pads) are read with `ctx.ints(t)`,
never with `.tolist()`, and tensors made of sizes are built with `ctx.tensor(numbers)`, so that shape arithmetic stays
symbolic while tracing. Sizes in `x.shape` may be symbolic: compute with them, avoid branching on them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from hotfuse.base.errors import InternalError
from hotfuse.base.lazy_dataclass import dataclass


class DataDependent(Exception):
    """Raised while tracing by an op that needs numbers only the data can give: it then stays whole."""


class Ctx(Protocol):
    """What an op function may ask about the node it runs for."""

    @property
    def opset(self) -> int:
        """The model's opset version of the node's domain."""
        ...

    @property
    def n_outputs(self) -> int:
        """How many outputs the node declares (trailing absent ones not counted)."""
        ...

    @property
    def traced(self) -> bool:
        """Whether a graph is being made: what follows from constants alone is then computed once, not in every call."""
        ...

    def ints(self, t: torch.Tensor) -> list[Any]:
        """The numbers in an integer tensor, flat; symbolic while tracing; raises DataDependent if unknown."""
        ...

    def tensor(self, numbers: Any, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """A 1-d tensor of numbers that may be symbolic; one number alone gives a 0-d tensor."""
        ...

    def known(self, t: torch.Tensor) -> bool:
        """Whether `ints(t)` would succeed."""
        ...


OpFn = Callable[..., Any]


class Varies:
    """Stands for an input that is not a constant, where an operator is prepared."""


VARIES = Varies()


@dataclass(frozen=True, slots=True)
class Prepared:
    """A node's function after what every call would do with its constants was done once."""

    call: OpFn
    """Takes the node's inputs."""
    bytes: int
    """Memory it holds."""
    note: str = ""
    """What a reader should know of it."""


Prepare = Callable[[Ctx, Sequence[Any], Mapping[str, Any]], Prepared | None]
"""`prepare(ctx, inputs, attrs)`, with `VARIES` in place of what only a call knows; None where there is nothing to prepare."""


@dataclass(frozen=True, slots=True)
class OnnxRow:
    """One operator from one opset version on."""

    name: str
    domain: str
    since: int
    fn: OpFn
    prepare: Prepare | None = None


_ROWS: dict[tuple[str, str], list[OnnxRow]] = {}


def onnx_op(*names: str, since: int = 1, domain: str = "", prepare: Prepare | None = None) -> Callable[[OpFn], OpFn]:
    """Register a function for one or more operators from opset `since` on."""

    def add(fn: OpFn) -> OpFn:
        for name in names:
            versions = _ROWS.setdefault((domain, name), [])
            if any(r.since == since for r in versions):
                raise InternalError(f"ONNX operator {domain}::{name} has two rows from version {since}")
            versions.append(OnnxRow(name, domain, since, fn, prepare))
            versions.sort(key=lambda r: r.since)
        return fn

    return add


def find(domain: str, name: str, opset: int) -> OnnxRow | None:
    """The row in force at an opset version; None where there is no mapping."""
    domain = "" if domain == "ai.onnx" else domain
    versions = _ROWS.get((domain, name), [])
    at = bisect_right([r.since for r in versions], opset)
    return versions[at - 1] if at else None
