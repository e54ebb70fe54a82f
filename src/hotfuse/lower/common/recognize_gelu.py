"""Functions that exporters write out in single operators, and that have an expansion of their own.

    %d = div(%x, 1.4142135)   %e = erf(%d)   %a = add(%e, 1.0)   %m = mul(%x, %a)   %y = mul(%m, 0.5)     ->     %y = gelu(%x)

The same in real numbers. Written out, it divides, and computes an error function near zero that the sum with 1 rounds away
again; x times the share of a normal distribution below x needs neither, and keeps digits for negative x that the sum loses.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from hotfuse.ir.graph import Arg, Graph, Node, Value
from hotfuse.ir.rewrite import Context, Replacement, Rule, apply, without_unused_params
from hotfuse.ir.types import DType, TensorType
from hotfuse.ops.table import packet
from hotfuse.simplify.redundant import DROP_DEAD

_REALS = frozenset({DType.F32, DType.F64})
_CLOSE = 1e-7
"""A constant that fp32 has rounded is off by half of this at most."""


def recognized(graph: Graph) -> Graph:
    """The group with what is written out in its short form; intermediate values that others want stay."""
    found, steps = apply(graph, RULES)
    return without_unused_params(found) if any(s.rule == RECOGNIZE_GELU.name for s in steps) else graph


def _gelu(node: Node, context: Context) -> Replacement | None:
    """A product x (1 + erf(x / sqrt 2)) / 2, in whatever order it is multiplied, is gelu(x)."""
    if not _plain(node):
        return None
    factors = list(_factors(node, context))
    numbers = [f for f in factors if isinstance(f, float)]
    values = [f for f in factors if isinstance(f, Value)]
    if numbers != [0.5] or len(values) != 2 or len(factors) != 3:
        return None
    for x, share in (values, values[::-1]):
        if _same(x, node.outs[0]) and _is_share(share, x, context):
            return Replacement((replace(node, op="aten.gelu.default", args=(x,), attrs=()),))
    return None


def _factors(node: Node, context: Context) -> Iterator[Arg]:
    """What is multiplied, through one product inside another."""
    for a in node.args:
        inner = context.producer(a) if isinstance(a, Value) else None
        if inner is not None and packet(inner.op) == "aten.mul" and _plain(inner):
            yield from inner.args
        else:
            yield a


def _is_share(value: Value, x: Value, context: Context) -> bool:
    """Whether a value is 1 + erf(x / sqrt 2)."""
    total = context.producer(value)
    if total is None or packet(total.op) != "aten.add" or not _plain(total):
        return False
    error = next((context.producer(a) for a in total.args if isinstance(a, Value)), None)
    if 1.0 not in total.args or error is None or packet(error.op) != "aten.erf":
        return False
    scaled = context.producer(error.ins[0])
    if scaled is None or not _plain(scaled) or scaled.args[0] != x or not isinstance(scaled.args[1], float):
        return False
    factor = {"aten.div": math.sqrt(2), "aten.mul": math.sqrt(0.5)}.get(packet(scaled.op))
    return factor is not None and math.isclose(scaled.args[1], factor, rel_tol=_CLOSE)


def _plain(node: Node) -> bool:
    """Two operands, and nothing else that could change what an operator does."""
    return len(node.args) == 2 and not node.attrs and len(node.outs) == 1


def _same(x: Value, y: Value) -> bool:
    a, b = x.type, y.type
    if not isinstance(a, TensorType) or not isinstance(b, TensorType):
        return False
    return a.dtype in _REALS and a.dtype is b.dtype and a.shape == b.shape


RECOGNIZE_GELU = Rule("recognize-gelu", _gelu, "one argument less", ops=frozenset({"aten.mul"}))
RULES = (RECOGNIZE_GELU, DROP_DEAD)
