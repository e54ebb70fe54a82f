"""Weights that are one number become numbers in the graph, where the plan is withdrawn when a weight changes.

    %y = aten.mul.Tensor(%x, %half)            ->     %y = aten.mul.Tensor(%x, 0.5)
    %y = aten.pow.Tensor_Tensor(%x, %two)      ->     %y = aten.pow.Tensor_Scalar(%x, 2.0)

Exporters store every constant as a tensor. A kernel that knows the number needs no load, squares instead of raising to a
power, and attention can tell a scale or a mask of -inf from any other tensor. Only numbers that meet tensors of their own type, so
that nothing changes in how an operator computes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from hotfuse.ir.graph import Arg, Graph, Node, Value
from hotfuse.ir.rewrite import READS, Context, Replacement, Rule, apply, without_unused_params
from hotfuse.ir.types import DType, TensorType

Weights = Mapping[str, torch.Tensor]
_REALS = frozenset({DType.F32, DType.F64})
_MAX_ELEMENTS = 1 << 16
"""Elements of the largest weight that is looked through."""
_Rewritten = tuple[str, tuple[Arg, ...]] | None


def _second(op: str) -> Callable[[tuple[Arg, ...]], _Rewritten]:
    """The number is the second operand."""
    return lambda args: (op, args) if isinstance(args[0], Value) and isinstance(args[1], float) else None


def _either(op: str) -> Callable[[tuple[Arg, ...]], _Rewritten]:
    """Operands may change places."""

    def rewritten(args: tuple[Arg, ...]) -> _Rewritten:
        if isinstance(args[0], float) and isinstance(args[1], Value):
            return op, (args[1], args[0])
        return (op, args) if isinstance(args[1], float) and isinstance(args[0], Value) else None

    return rewritten


def _difference(args: tuple[Arg, ...]) -> _Rewritten:
    if isinstance(args[0], float) and isinstance(args[1], Value):
        return "aten.rsub.Scalar", (args[1], args[0])
    return _second("aten.sub.Tensor")(args)


def _choice(args: tuple[Arg, ...]) -> _Rewritten:
    numbers = (isinstance(args[1], float), isinstance(args[2], float))
    forms = {(True, True): "Scalar", (True, False): "ScalarSelf", (False, True): "ScalarOther"}
    return (f"aten.where.{forms[numbers]}", args) if numbers in forms else None


_OPS: dict[str, Callable[[tuple[Arg, ...]], _Rewritten]] = {
    "aten.add.Tensor": _either("aten.add.Tensor"),
    "aten.mul.Tensor": _either("aten.mul.Tensor"),
    "aten.div.Tensor": _second("aten.div.Tensor"),
    "aten.sub.Tensor": _difference,
    "aten.pow.Tensor_Tensor": _second("aten.pow.Tensor_Scalar"),
    "aten.where.self": _choice,
}


def with_numbers(graph: Graph, weights: Weights) -> Graph:
    """The graph with its one-number weights written into the nodes that read them."""
    numbers = {p.value.name: _number(p.value, weights[p.key]) for p in graph.params}
    known = {n: x for n, x in numbers.items() if x is not None}
    if not known:
        return graph
    found, steps = apply(graph, rules(known))
    return without_unused_params(found) if steps else graph


def rules(numbers: Mapping[str, float]) -> tuple[Rule, ...]:
    """One rule for weights whose numbers are known, by name; inside branches the same name may be another value."""

    def write(node: Node, context: Context) -> Replacement | None:
        made = _with_numbers(node, {v.name: numbers[v.name] for v in node.ins if v.name in numbers and context.is_param(v)})
        return None if made is node else Replacement((made,))

    return (Rule("write-number", write, "one value less is read", READS),)


def _number(v: Value, weight: torch.Tensor) -> float | None:
    """The one number that a weight holds, once or over and over (zero points of 0, say)."""
    if not isinstance(v.type, TensorType) or v.type.dtype not in _REALS or not 0 < weight.numel() <= _MAX_ELEMENTS:
        return None
    first = weight.reshape(-1)[0]
    return float(first.item()) if weight.numel() == 1 or bool((weight == first).all()) else None


def _with_numbers(node: Node, numbers: Mapping[str, float]) -> Node:
    if node.op not in _OPS or node.attrs or len(node.outs) != 1:
        return node
    out = node.outs[0].type
    args = tuple(numbers.get(a.name, a) if isinstance(a, Value) and _alike(a, out) else a for a in node.args)
    if args == node.args:
        return node
    made = _OPS[node.op](args)
    if made is None or not _keeps_type(node, made[1]):
        return node
    return replace(node, op=made[0], args=made[1])


def _alike(a: Value, out: object) -> bool:
    return isinstance(a.type, TensorType) and isinstance(out, TensorType) and a.type.dtype is out.dtype


def _keeps_type(node: Node, args: tuple[Arg, ...]) -> bool:
    """Whether what is left of the operands still has the result's shape and element type."""
    out = node.outs[0].type
    left = [a.type for a in args if isinstance(a, Value)]
    if not isinstance(out, TensorType) or out.dtype not in _REALS:
        return False
    tensors = [t for t in left if isinstance(t, TensorType)]
    numbers = [t for t in tensors if t.dtype is not DType.BOOL]
    if not numbers and out.dtype is not DType.F32:
        return False
    fits = [t for t in tensors if t.shape == out.shape]
    return all(t.dtype is out.dtype for t in numbers) and bool(fits)
