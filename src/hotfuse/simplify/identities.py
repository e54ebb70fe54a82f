"""Nodes that give back what they were given.

    %y = aten.detach.default(%x)    ->    readers of %y read %x

None of these fires where an output of the graph could tell the difference (`escapes`): an output that was a view of an
input stays one, an output that was the input itself stays it, and one that was a copy stays a copy.
"""

from __future__ import annotations

from collections.abc import Callable

from hotfuse.ir.graph import Node, Token, Value
from hotfuse.ir.rewrite import Context, Replacement, Rule
from hotfuse.ir.types import DType, TensorType
from hotfuse.ops.schema import argument
from hotfuse.ops.table import packet
from hotfuse.simplify.facts import escapes, is_dense, is_pure, mutates

_INTEGERS = frozenset({DType.I64, DType.I32, DType.I16, DType.I8, DType.U64, DType.U32, DType.U16, DType.U8})
_NOTE = "one node less"


def _ops(names: str) -> frozenset[str]:
    return frozenset(f"aten.{name}" for name in names.split())


_TRANSPOSES = _ops("t transpose permute")


def _identity(name: str, ops: str, holds: Callable[[Node, Value, Context], bool]) -> Rule:
    """A rule that replaces the result by the first argument when the types agree and `holds` says it is the same."""

    def rewrite(node: Node, context: Context) -> Replacement | None:
        if len(node.outs) != 1 or not node.args or not is_pure(node):
            return None
        x, y = node.args[0], node.outs[0]
        if not isinstance(x, Value) or not isinstance(x.type, TensorType) or x.type != y.type:
            return None
        if not holds(node, x, context) or context.fact(mutates) or escapes(y, context):
            return None
        return Replacement(values={y.name: x})

    return Rule(name, rewrite, _NOTE, ops=_ops(ops))


def _always(_node: Node, _x: Value, _context: Context) -> bool:
    return True


def _stays(node: Node, _x: Value, _context: Context) -> bool:
    """`to` gives its input back unless a copy or a memory format is asked for; dtype and device are in the type."""
    return argument(node, "copy", default=False) is False and _keeps_format(node)


def _needless_copy(node: Node, x: Value, context: Context) -> bool:
    """A copy of a dense tensor has its strides; a copy of a strided one would be laid out anew."""
    return _keeps_format(node) and is_dense(x, context)


def _keeps_format(node: Node) -> bool:
    return argument(node, "memory_format") in (None, Token("memory_format", "preserve_format"))


def _evaluates(node: Node, _x: Value, _context: Context) -> bool:
    return argument(node, "train") is False


def _adds_nothing(node: Node, x: Value, context: Context) -> bool:
    """Integers only: -0.0 + 0 is 0.0."""
    return _is_integer(x) and _is_number(node, 0) and is_dense(x, context)


def _multiplies_by_one(node: Node, x: Value, context: Context) -> bool:
    return _is_integer(x) and _is_number(node, 1) and is_dense(x, context)


def _is_integer(x: Value) -> bool:
    return isinstance(x.type, TensorType) and x.type.dtype in _INTEGERS


def _is_number(node: Node, number: int) -> bool:
    other = argument(node, "other")
    return type(other) is int and other == number


def _order(node: Node, rank: int) -> tuple[int, ...] | None:
    """The dimension order that a transposing node with constant arguments gives."""
    order = list(range(rank))
    match node.op.split(".")[1], node.args[1:]:
        case "t", ():
            order.reverse()
        case "transpose", (int(a), int(b)) if -rank <= min(a, b) and max(a, b) < rank:
            order[a], order[b] = order[b], order[a]
        case "permute", (tuple(by),):
            order = [d % rank for d in by if isinstance(d, int)]
        case _:
            return None
    return tuple(order) if sorted(order) == list(range(rank)) else None


def _undo_transpose(node: Node, context: Context) -> Replacement | None:
    """`transpose(transpose(x, 1, 2), 1, 2)` is x: both are views, and the strides come back."""
    y = node.args[0] if node.args else None
    first = context.producer(y) if isinstance(y, Value) else None
    if first is None or packet(first.op) not in _TRANSPOSES or not is_pure(node):
        return None
    x = first.args[0] if first.args else None
    if not isinstance(x, Value) or not isinstance(x.type, TensorType) or x.type != node.outs[0].type:
        return None
    rank = len(x.type.shape)
    one, two = _order(first, rank), _order(node, rank)
    if one is None or two is None or any(one[d] != i for i, d in enumerate(two)):
        return None
    if context.fact(mutates) or escapes(node.outs[0], context):
        return None
    return Replacement(values={node.outs[0].name: x})


RULES = (
    _identity("drop-alias", "detach alias lift lift_fresh", _always),
    # Equal shapes make these the identity: each gives a view that starts at the first element and keeps the strides.
    _identity("drop-same-shape-view", "view reshape expand expand_as view_as reshape_as flatten squeeze slice narrow",
              _always),
    _identity("drop-same-type-cast", "to type_as", _stays),
    _identity("drop-dropout", "dropout feature_dropout alpha_dropout feature_alpha_dropout", _evaluates),
    _identity("drop-copy", "clone _to_copy lift_fresh_copy detach_copy alias_copy", _needless_copy),
    _identity("drop-add-zero", "add sub", _adds_nothing),
    _identity("drop-mul-one", "mul", _multiplies_by_one),
    Rule("undo-transpose", _undo_transpose, _NOTE, ops=_TRANSPOSES),
)
