"""Nodes whose work is done elsewhere, is known beforehand, or is not wanted.

    %n: int(s0) = aten.sym_size.int(%x, 0)                          readers of %m read %n
    %m: int(s0) = aten.sym_size.int(%h, 0)                    ->
    %k: int(64) = aten.sym_size.int(%x, 1)                          readers of %k read 64

Types say of a size that data decide what torch asserts of it (`x[:, :n.item()] * z`: as many columns as `z` has). What such an
assertion reads stays what it is: with the type's word for it the assertion would hold in every call.
"""

from __future__ import annotations

from hotfuse.ir.graph import Arg, Kind, Node, Token, Value
from hotfuse.ir.rewrite import Context, Replacement, Rule
from hotfuse.ir.types import ScalarKind, ScalarType, TensorType
from hotfuse.ops.own.assume import ASSERTIONS
from hotfuse.ops.schema import argument
from hotfuse.simplify.facts import binds_symbols, escapes, is_pure, mutates

_NOTE = "one node less"


def _is_size(node: Node) -> bool:
    return node.op.startswith(("aten.sym_size.", "aten.sym_numel.", "sym.")) and len(node.outs) == 1


def _is_asserted(node: Node, context: Context) -> bool:
    """Whether something is asserted of a size, or of what is computed from it."""
    left, seen = [node], {node.outs[0].name}
    while left:
        for reader in context.readers(left.pop().outs[0]):
            if reader.op in ASSERTIONS:
                return True
            if _is_size(reader) and reader.outs[0].name not in seen:
                seen.add(reader.outs[0].name)
                left.append(reader)
    return False


def _known_size(node: Node, context: Context) -> Replacement | None:
    """A size whose expression is a number is that number; what a transfer reads stays a value."""
    if not _is_size(node) or not is_pure(node) or any(r.kind is Kind.TRANSFER for r in context.readers(node.outs[0])):
        return None
    t = node.outs[0].type
    if isinstance(t, ScalarType) and t.kind is ScalarKind.INT and isinstance(t.expr, int) and not _is_asserted(node, context):
        return Replacement(values={node.outs[0].name: t.expr})
    return None


def _same_size(node: Node, context: Context) -> Replacement | None:
    """Two sizes with one expression are one number."""
    if not _is_size(node) or not is_pure(node):
        return None
    t = node.outs[0].type
    if not isinstance(t, ScalarType) or t.kind is not ScalarKind.INT or t.expr is None:
        return None
    earlier = context.earlier_size(node)
    if earlier is None or _is_asserted(node, context):
        return None
    return Replacement(values={node.outs[0].name: earlier})


def _same_node(node: Node, context: Context) -> Replacement | None:
    """Two pure nodes with the same op and arguments; not where both results could be seen to be two tensors."""
    if not is_pure(node):
        return None
    twin = context.earlier_twin(node)
    if twin is None or context.fact(mutates):
        return None
    if any(escapes(a, context) and escapes(b, context) for a in node.outs for b in twin.outs):
        return None
    values: dict[str, Arg] = {old.name: new for old, new in zip(node.outs, twin.outs, strict=True)}
    return Replacement(values=values)


def _dead(node: Node, context: Context) -> Replacement | None:
    """A pure node that nothing reads; what binds a size that depends on data stays."""
    if any(context.is_used(v) for v in node.outs) or not is_pure(node) or binds_symbols(node, context):
        return None
    return Replacement()


def _proven(node: Node, _context: Context) -> Replacement | None:
    """A check of an element type and a device that the tensor's type has: `x.float()` leaves one behind in every exported graph."""
    x = argument(node, "a")
    if not isinstance(x, Value) or not isinstance(x.type, TensorType):
        return None
    if any(argument(node, name) is not None for name in ("size", "stride")):
        return None
    dtype, device, layout = (argument(node, name) for name in ("dtype", "device", "layout"))
    holds = (
        dtype in (None, x.type.dtype)
        and (device is None or device == Token("device", x.type.device))
        and (layout is None or layout == Token("layout", "strided"))
    )
    return Replacement() if holds else None


DROP_DEAD = Rule("drop-dead", _dead, _NOTE)
RULES = (
    DROP_DEAD,
    Rule("fold-known-size", _known_size, _NOTE),
    Rule("share-size", _same_size, _NOTE),
    Rule("share-node", _same_node, _NOTE),
    Rule("drop-proven-check", _proven, _NOTE, ops=frozenset({"aten._assert_tensor_metadata"})),
)
