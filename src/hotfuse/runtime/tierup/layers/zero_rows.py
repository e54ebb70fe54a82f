"""Kernels that leave zeros out (rows, or steps within rows), as a layer of a plan: the innermost, as data decide in the kernels."""

from __future__ import annotations

from collections.abc import Sequence

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.compile.request_context import EVERY, value_of
from hotfuse.compile.variants.skips import SKIP
from hotfuse.ir.graph import Graph
from hotfuse.runtime.plan import Plan
from hotfuse.runtime.tierup.layers.layer import Call, Composer, Layer
from hotfuse.runtime.tierup.skipping import all_finite
from hotfuse.specialize.table import ZERO_ROWS, AttemptKey


@dataclass(frozen=True, slots=True)
class ZeroRowsLayer(Layer):
    """Products with a side that leaves zeros out."""

    focus: tuple[str, ...]
    """They, in the entry's own graph, as workers call them."""
    what: str = SKIP
    """Which zeros: rows of them, or some within rows."""

    @property
    def key(self) -> AttemptKey:
        """There is one of it."""
        return AttemptKey(ZERO_ROWS)

    @property
    def values(self) -> tuple[str, ...]:
        """What those products multiply; nothing where any of them may be meant."""
        return tuple(value_of(f) for f in self.focus if f != EVERY)

    def build(self, graph: Graph, calls: Sequence[Call], inner: tuple[Layer, ...], composer: Composer) -> Plan:
        """The products that were seen; in pieces and for sizes any of them, since groups have other names there."""
        if composer.owns(graph):
            return composer.skipping(",".join(self.focus), self.what).plan(graph, calls, inner)
        if not all_finite(composer.weights):
            return composer.plan(graph, calls, inner)
        return composer.skipping(EVERY, self.what).plan(graph, calls, inner)
