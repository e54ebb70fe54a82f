"""Where the interpreter keeps what candidates hold: found by looking at one whose contents are known.

Native loops over candidates read frozen objects in place, because asking for their attributes one by one takes longer than all
arithmetic. Nothing is assumed about the interpreter: a field is where a known object's address is seen. Where something is not
seen (another interpreter) there are no fields, and `hpm.row_cache` asks objects in Python.
"""

from __future__ import annotations

import ctypes

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.base.once import once
from hotfuse.hpm.work import Candidate
from hotfuse.ir.graph import Graph, Kind, Loc, Node, Param, Value
from hotfuse.ir.types import DType, TensorType

_LENGTH = 1009
"""Of a tuple that is looked at: no count of references, no address."""
_HEAD = 2
"""Words behind a tuple's own size that are looked at: its first elements."""


class _Unseen(Exception):
    """A field is not in an object's own memory, or not there alone."""


@dataclass(frozen=True, slots=True)
class _Core:
    lanes: int = 16
    registers: int = 32
    l2: int = 1 << 20


@dataclass(frozen=True, slots=True)
class Sort:
    """A class: the word of an object that names its class, the class's address, and the words of fields."""

    word: int
    address: int
    field: dict[str, int]


@dataclass(frozen=True, slots=True)
class Fields:
    """All that loops over candidates read."""

    candidate: Sort
    graph: Sort
    node: Sort
    tuples: Sort
    """`length`, and `first` element."""


def _words(thing: object, more: int = 0) -> list[int]:
    count = type(thing).__basicsize__ // 8 + more
    return list((ctypes.c_uint64 * count).from_address(id(thing)))


def _seen(words: list[int], value: int) -> int:
    if words.count(value) != 1:
        raise _Unseen
    return words.index(value)


def _sort(thing: object, *names: str) -> Sort:
    words, kind = _words(thing), type(thing)
    return Sort(_seen(words, id(kind)), id(kind), {n: _seen(words, id(getattr(thing, n))) for n in names})


def _tuples() -> Sort:
    first = object()
    words = _words((first, *[None] * (_LENGTH - 1)), _HEAD)
    return Sort(_seen(words, id(tuple)), id(tuple), {"length": _seen(words, _LENGTH), "first": _seen(words, id(first))})


@once
def fields() -> Fields | None:
    """Where they are; None where the interpreter keeps them elsewhere."""
    t = TensorType(DType.F32, (3,))
    x, y = Value("x", t), Value("y", t)
    node = Node(Kind.OPERATOR, "aten.relu.default", (x, 1), (y,), (("seen", 1),), (), Loc("seen"))
    graph = Graph("seen", (x,), (Param(x, "p"),), (node,), (y, y))
    candidate = Candidate(graph, {"n": 3}, _Core())
    try:
        return Fields(
            _sort(candidate, "graph", "core"), _sort(graph, "inputs", "params", "nodes", "outputs"),
            _sort(node, "ins", "outs"), _tuples(),
        )  # fmt: skip
    except _Unseen:
        return None
