"""A condition on single integers, asked in Python: `sr == 16000` of a call's tensor takes a tenth of what torch's operators take.

    %c: bool[] = aten.eq.Tensor(%sr, %rate)      ->      lambda i0, i1, i2: i2.item() == k0.item()

Only comparisons and logic of integers and truth values, where Python's answer is torch's: no number is rounded, nothing overflows.
Weights are read on every call, as an operator would.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hotfuse.ir.graph import Arg, Graph, Node, Value, output_values
from hotfuse.ir.types import DType, TensorType
from hotfuse.runtime.serve.speculate import Ask

MAX_NODES = 16
"""Beyond that torch's operators are not slower."""
_INTEGERS = {DType.I64: 63, DType.I32: 31, DType.I16: 15, DType.I8: 7}
"""With the bits that a number may have."""
_COMPARES = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_LOGIC = {"logical_and": "and", "logical_or": "or", "bitwise_and": "and", "bitwise_or": "or"}
_NOT = ("logical_not", "bitwise_not")


def scalar_condition(graph: Graph, condition: int, names: tuple[str, ...], weights: Mapping[str, Any]) -> Ask | None:
    """The output `condition` of a graph as a function of the inputs `names`, of which the graph reads some; None where it is
    anything but logic of single integers."""
    if not 0 < len(graph.nodes) <= MAX_NODES:
        return None
    bound = {p.value.name: weights[p.key] for p in graph.params if _single(p.value)}
    given = [*graph.inputs, *(p.value for p in graph.params)]
    text = {v.name: f"i{names.index(v.name)}.item()" for v in graph.inputs if _single(v)}
    text |= {name: f"k{n}.item()" for n, name in enumerate(bound)}
    if any(v.name not in text for v in given):
        return None
    for node in graph.nodes:
        made = _expression(node, text)
        if made is None:
            return None
        text[node.outs[0].name] = made
    outcome = output_values(graph)[condition]
    if not _truth(outcome):
        return None
    source = f"lambda {', '.join(f'i{n}' for n in range(len(names)))}: bool({text[outcome.name]})"
    return eval(source, {f"k{n}": w for n, w in enumerate(bound.values())} | {"bool": bool})


def _single(v: Value) -> bool:
    """One integer or truth value, in the host's memory."""
    t = v.type
    return (isinstance(t, TensorType) and t.device == "cpu" and all(d == 1 for d in t.shape)
            and (t.dtype in _INTEGERS or t.dtype is DType.BOOL))  # fmt: skip


def _truth(v: Value) -> bool:
    return isinstance(v.type, TensorType) and v.type.dtype is DType.BOOL


def _expression(node: Node, text: Mapping[str, str]) -> str | None:
    if node.attrs or node.graphs or len(node.outs) != 1 or not _single(node.outs[0]) or not _truth(node.outs[0]):
        return None
    name, _, kind = node.op.removeprefix("aten.").partition(".")
    args = node.args
    if name in _NOT and kind == "default" and len(args) == 1 and _is_truth(args[0]):
        return f"(not {_number(args[0], args[0], text)})"
    if len(args) != 2:
        return None
    left, right = (_number(a, args[0], text) for a in args)
    if left is None or right is None:
        return None
    if name in _COMPARES and kind in ("Tensor", "Scalar"):
        return f"({left} {_COMPARES[name]} {right})"
    if name in _LOGIC and kind in ("default", "Tensor") and all(map(_is_truth, args)):
        return f"({left} {_LOGIC[name]} {right})"
    return None


def _is_truth(a: Arg) -> bool:
    return isinstance(a, Value) and _truth(a)


def _number(a: Arg, compared: Arg, text: Mapping[str, str]) -> str | None:
    """An argument as Python; a literal only where the type of what it is compared with holds it."""
    if isinstance(a, Value):
        return text.get(a.name)
    if isinstance(a, bool) or not isinstance(a, int):
        return None
    if not isinstance(compared, Value) or not isinstance(compared.type, TensorType):
        return None
    bits = _INTEGERS.get(compared.type.dtype)
    return f"({a})" if bits is not None and -(1 << bits) <= a < 1 << bits else None
