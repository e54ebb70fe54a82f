"""In which order the library hands a run its images: what a graph's types say holds for kernels, and torch goes by its inputs.

    %h: f32[1, 128, 14, 14] channels last = conv2d(%x: row-major)     stays with the library, which gives it row-major
    %y = a run that reads %h

A region of a graph is laid out with channels innermost before anybody knows which of its nodes the library is faster at. A
convolution of torch gives channels last only where its input has them. A run that believed the types found another layout in every
call, and left every call to the chain of single partitions; the first layer of most image transformers (patches of 16 by 16) was
such a case. Every call still checks the layout of its inputs, so a wrong prediction costs no more than that chain.
"""

from __future__ import annotations

from dataclasses import replace

from hotfuse.compile.run.run_steps import LevelParts
from hotfuse.ir.graph import Value
from hotfuse.ir.types import ROW_MAJOR, TensorType
from hotfuse.ops.table import packet

_CONVERT = frozenset({"aten.contiguous", "aten.clone", "aten.to", "aten._to_copy"})
"""Ops that say themselves how their results lie."""


class GivenOrders:
    """What the library gives to the runs of one graph; looked at where a run reads an image that is not row-major."""

    def __init__(self, level: LevelParts) -> None:
        self._level = level
        self._other: frozenset[str] | None = None

    def given(self, v: Value) -> Value:
        """The value as it comes; its type is another one where the library made it in another order than the graph has it."""
        if not isinstance(v.type, TensorType) or not _ordered(v):
            return v
        if self._other is None:
            self._other = frozenset(_row_major(self._level))
        return replace(v, type=replace(v.type, layout=ROW_MAJOR)) if v.name in self._other else v


def _row_major(level: LevelParts) -> set[str]:
    """Results of the library that are row-major though their types have another order."""
    params = {p.value.name for p in level.graph.params}
    found: set[str] = set()
    for i in (i for begin, end, kernel in level.parts if kernel < 0 for i in range(begin, end)):
        node = level.graph.nodes[i]
        if packet(node.op) in _CONVERT:
            continue
        for v in filter(_ordered, node.outs):
            read = [x for x in node.ins if x.name not in params and _rank(x) == _rank(v)]
            if read and not any(_ordered(x) and x.name not in found for x in read):
                found.add(v.name)
    return found


def _ordered(v: Value) -> bool:
    """Whether a value is dense, and not row-major."""
    return isinstance(v.type, TensorType) and not v.type.layout.strided and v.type.layout.order is not None


def _rank(v: Value) -> int:
    return len(v.type.shape) if isinstance(v.type, TensorType) else -1
