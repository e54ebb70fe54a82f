"""What torch's own schema says of an op: randomness, mutation, aliasing, argument names.

Derived, never written by hand, so a new torch version cannot leave it stale. Ops of other vocabularies have no
schema and answer False: whoever registers a namespace keeps its functions pure.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch._ops import OpOverloadPacket

from hotfuse.ir.graph import Arg, Node
from hotfuse.ops.table import resolve

_TRAIN_FLAGS = ("train", "training")
_DROP_RATES = ("dropout_p", "dropout", "p")


def _overload(op: str) -> Any:
    found = resolve(op)
    if isinstance(found, OpOverloadPacket):
        names = found.overloads()
        return getattr(found, "default" if "default" in names else names[0])
    return found


@cache
def schema_of(op: str) -> Any:
    """The torch schema of an op, or None; an op named without overload takes its only or its first one."""
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


@cache
def argument_names(op: str) -> tuple[str, ...]:
    """The names of the op's arguments, in order."""
    schema = schema_of(op)
    return () if schema is None else tuple(a.name for a in schema.arguments)


def argument(node: Node, name: str, default: Arg = None) -> Arg:
    """A node's argument by the schema's name, however it was passed; the schema's own default is left to the caller."""
    for attr, value in node.attrs:
        if attr == name:
            return value
    names = argument_names(node.op)
    at = names.index(name) if name in names else len(node.args)
    return node.args[at] if at < len(node.args) else default


def draws_random(node: Node) -> bool:
    """Whether this node draws random numbers: dropout outside training, or with rate 0, does not."""
    if not is_random(node.op):
        return False
    names = argument_names(node.op)
    if any(argument(node, n, False) is False for n in _TRAIN_FLAGS if n in names):
        return False
    rates = [argument(node, n, 0.0) for n in _DROP_RATES if n in names]
    sized_by_rate = "dropout" in node.op or "attention" in node.op or any(n in names for n in _TRAIN_FLAGS)
    return not (sized_by_rate and rates and all(r == 0 for r in rates))
