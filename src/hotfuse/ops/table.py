"""One row per op: how it touches memory and what it costs. What is absent is visible.

An op is named as torch names it, `aten.linear.default`; a row is named without the overload, `aten.linear`, and
serves all of them. The torch operator itself is the row's reference. An op without a row still runs: `lookup`
gives it the opaque row, and `resolve` its torch operator.

Other vocabularies (ONNX operators that stay whole) join through `register_namespace`, so that back ends
resolve every name in one place.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from functools import cache
from typing import Any

import torch
from torch._ops import OpOverloadPacket

from hotfuse.base.errors import InternalError
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.dims import Dim
from hotfuse.ir.graph import Node


class Access(StrEnum):
    """How an op reads its inputs to make one output element."""

    POINTWISE = "pointwise"
    REDUCTION = "reduction"
    CONTRACTION = "contraction"
    CONVOLUTION = "convolution"
    ATTENTION = "attention"
    MOVEMENT = "movement"
    INDEXING = "indexing"
    RECURRENT = "recurrent"
    CONTROL = "control"
    HOST = "host"
    """Numbers of the host only, such as a size: no tensor is read."""
    OPAQUE = "opaque"


FlopFn = Callable[[Node], Dim]


@dataclass(frozen=True, slots=True)
class OpRow:
    """What is known of an op besides its torch operator."""

    name: str
    access: Access
    flops: FlopFn
    view: bool = False
    """A result may share memory with an input, and then no bytes move."""


_ROWS: dict[str, OpRow] = {}
_NAMESPACES: dict[str, Callable[[str], Callable[..., Any]]] = {}


def no_flops(_node: Node) -> Dim:
    """The cost of an op that only moves data."""
    return 0


OPAQUE = OpRow("opaque", Access.OPAQUE, no_flops)


def defop(name: str, access: Access, flops: FlopFn = no_flops, *, view: bool = False) -> OpRow:
    """Add a row; a second row of the same name is a mistake of ours."""
    if name in _ROWS:
        raise InternalError(f"op {name} has two rows")
    row = _ROWS[name] = OpRow(name, access, flops, view)
    return row


def defops(names: str, access: Access, flops: FlopFn = no_flops, *, view: bool = False) -> None:
    """One row for each of the ATen ops named, which all read and cost alike."""
    for name in names.split():
        defop(f"aten.{name}", access, flops, view=view)


def rows() -> dict[str, OpRow]:
    """Every row by name."""
    return dict(_ROWS)


def packet(op: str) -> str:
    """`aten.add.Tensor` -> `aten.add`."""
    return ".".join(op.split(".")[:2])


def lookup(op: str) -> OpRow:
    """The row of an op; the opaque row where there is none."""
    return _ROWS.get(packet(op), OPAQUE)


def register_namespace(prefix: str, resolver: Callable[[str], Callable[..., Any]]) -> None:
    """Let `resolver(op)` give the callable for every op named `prefix.…`."""
    _NAMESPACES[prefix] = resolver


def resolve(op: str) -> Callable[..., Any]:
    """The callable that is the op's reference meaning."""
    prefix, _, rest = op.partition(".")
    if prefix in _NAMESPACES:
        return _NAMESPACES[prefix](op)
    name, _, overload = rest.partition(".")
    try:
        found = getattr(getattr(torch.ops, prefix), name)
        return getattr(found, overload) if overload else found
    except (AttributeError, RuntimeError) as e:
        raise InternalError(f"no operator {op}", because=str(e)) from e


# --- what torch's own schema says: derived, never written by hand -----------------------------------------------------


def _overload(op: str) -> Any:
    """The operator of one schema; an op named without overload takes its default or its first one."""
    found = resolve(op)
    if isinstance(found, OpOverloadPacket):
        names = found.overloads()
        return getattr(found, "default" if "default" in names else names[0])
    return found


@cache
def schema_of(op: str) -> Any:
    """The torch schema of an op; None for ops of other vocabularies, which are pure by promise."""
    return getattr(_overload(op), "_schema", None)


@cache
def is_random(op: str) -> bool:
    """Whether the op may draw from a random generator; `draws_random` knows about a particular node."""
    return torch.Tag.nondeterministic_seeded in getattr(_overload(op), "tags", ())


@cache
def is_mutating(op: str) -> bool:
    """Whether the op writes into one of its arguments."""
    schema = schema_of(op)
    return schema is not None and bool(schema.is_mutable)


@cache
def is_view(op: str) -> bool:
    """Whether the schema lets a result share memory with an argument that is not written."""
    schema = schema_of(op)
    return schema is not None and any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
