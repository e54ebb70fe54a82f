"""Arguments by the names torch's schema gives them, and what follows from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from hotfuse.ir.graph import Arg, Node
from hotfuse.ops.table import is_random, schema_of

_TRAIN_FLAGS = ("train", "training")
_RATES = ("dropout_p", "dropout", "p")


@cache
def argument_names(op: str) -> tuple[str, ...]:
    """The names of the op's arguments, in order."""
    schema = schema_of(op)
    return () if schema is None else tuple(a.name for a in schema.arguments)


def argument(node: Node, name: str, default: Arg = None) -> Arg:
    """A node's argument by the schema's name, however it was passed; a schema's default is left to the caller."""
    return _find(node.op, node.args, dict(node.attrs), name, default)


def _find(op: str, args: Sequence[Any], kwargs: Mapping[str, Any], name: str, default: Any) -> Any:
    if name in kwargs:
        return kwargs[name]
    names = argument_names(op)
    at = names.index(name) if name in names else len(args)
    return args[at] if at < len(args) else default


def draws_random(op: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether this call draws random numbers: dropout does only in training and at a rate above 0."""
    if not is_random(op):
        return False
    names = argument_names(op)
    flags = [n for n in _TRAIN_FLAGS if n in names]
    rates = [n for n in _RATES if n in names]
    if any(_find(op, args, kwargs, n, default=False) is False for n in flags):
        return False
    if flags or "dropout_p" in rates:  # elsewhere `p` may be a probability to draw with, as for bernoulli
        return not (rates and all(_find(op, args, kwargs, n, 0.0) == 0 for n in rates))
    return True
