"""Batch dims as one dimension of rows, where that costs nothing.

Rows are counted through when every other operand of a group either has all batch dims, in order and densely, or none; what only
counts the same rows in another way is then nothing at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.dims import Dim
from hotfuse.ir.graph import Graph, Value
from hotfuse.ir.retype import revalued
from hotfuse.ir.types import TensorType
from hotfuse.lower.common.algebra import product, same
from hotfuse.lower.common.products import Contraction, constants
from hotfuse.lower.ops.views import shape_of


@dataclass(frozen=True, slots=True)
class ProductRows:
    """The rows of a group's products, under the batch dims of their input."""

    batch: tuple[Dim, ...]
    number: Dim
    """How many there are: all batch dims multiplied."""

    def through(self, graph: Graph, found: Sequence[Contraction], strides: Mapping[str, tuple[int, ...]]) -> Graph | None:
        """The same group on matrices: types only, as nothing in it looks at batch dims. None where rows cannot be counted so."""
        weights = constants(found)
        plain = {v.name: v for n in graph.nodes for v in (*n.ins, *n.outs) if v.name not in weights}
        if not all(self._flat(v, strides) for v in plain.values() if isinstance(v.type, TensorType)):
            return None

        def matrix(v: Value) -> Value:
            t = v.type
            return replace(v, type=replace(t, shape=self._matrix(t.shape))) if v.name in plain and isinstance(t, TensorType) else v

        return revalued(graph, matrix)

    def _flat(self, value: Value, strides: Mapping[str, tuple[int, ...]]) -> bool:
        t, shape = value.type, shape_of(value)
        assert isinstance(t, TensorType)
        if self._matrix(shape) == shape:
            return True
        dense = not t.layout.strided and t.layout.order is None and value.name not in strides
        return dense and (self._has_rows(shape) or all(n == 1 for n in shape[:-1]))

    def _has_rows(self, shape: tuple[Dim, ...]) -> bool:
        """Whether all rows are there, under these batch dims or others: what is broadcast to as many rows has them itself."""
        if len(shape) == len(self.batch) + 1 and all(same(a, b) for a, b in zip(shape, self.batch, strict=False)):
            return True
        return len(shape) > 1 and same(product(shape[:-1]), self.number)

    def _matrix(self, shape: tuple[Dim, ...]) -> tuple[Dim, ...]:
        if self._has_rows(shape):
            return shape if len(shape) == 2 else (self.number, shape[-1])
        return shape[-1:]
