"""Rows of a batch that come twice are computed once, as a layer of a plan (`specialize` and `runtime.serve.distinct_rows`)."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import torch

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.dims import Sym
from hotfuse.ir.graph import Graph
from hotfuse.runtime.plan import BetCount, Plan
from hotfuse.runtime.serve.distinct_rows import DistinctRows, DistinctRowsRun, distinct_rows
from hotfuse.runtime.tierup.layers.layer import Call, Composer, Layer, composed
from hotfuse.runtime.tierup.packing_share import break_even_share
from hotfuse.runtime.tierup.padding import least_times
from hotfuse.simplify import simplify
from hotfuse.specialize.distinct_rows import batch_of, rowwise
from hotfuse.specialize.row_demands import CannotPack
from hotfuse.specialize.table import DUPLICATES, AttemptKey, row

MAX_DISTINCT = 1 - row(DUPLICATES).share
"""The mean share of distinct rows above which nobody tries."""


def distinct_share(graph: Graph, calls: Sequence[Call]) -> float:
    """The mean share of distinct rows in kept calls; 1 where they have no batch."""
    batch = batch_of(graph)
    at = [i for i, v in enumerate(graph.inputs) if _begins_with(v.type, batch)]
    if batch is None or not at or not calls:
        return 1.0
    shares: list[float] = []
    for call in calls:
        given = [call[i] for i in at]
        rows = given[0].shape[0]
        found = distinct_rows(given, rows) if rows > 1 else None
        shares.append(len(found.first) / rows if found is not None else 1.0)
    return statistics.fmean(shares)


def _begins_with(t: Any, batch: object) -> bool:
    return bool(getattr(t, "shape", ())) and t.shape[0] == batch


@dataclass(frozen=True, slots=True)
class DistinctRowsLayer(Layer):
    """Batches with rows that come twice."""

    @property
    def key(self) -> AttemptKey:
        """There is one of it."""
        return AttemptKey(DUPLICATES)

    def build(self, graph: Graph, calls: Sequence[Call], inner: tuple[Layer, ...], composer: Composer) -> Plan:
        """Distinct rows alone up to the share of them that is measured to pay; a graph whose rows depend on each other stays."""
        try:
            found = rowwise(graph, composer.weights)
        except CannotPack:
            return composer.plan(graph, calls, inner)
        other = composer.plan(graph, calls, inner)
        run = DistinctRowsRun(found.inputs, found.outputs, other.run, other.run)
        call, kinds = next(((c, k) for c in calls if (k := run.kinds(c)) is not None), (None, None))
        if call is None or kinds is None:
            return other
        some = other  # a graph for any number of rows is there already
        if not isinstance(found.batch, Sym):
            few = [call[i].detach()[list(kinds.first)] if i in found.inputs else call[i] for i in range(len(call))]
            some = composer.plan(simplify(found.graph)[0], [few], inner)
        run.some = some.run
        run.limit = _paying_share(run, call, kinds)
        said = (f"rows of a batch that come twice are computed once where at most {run.limit:.0%} are distinct "
                f"({len(kinds.first)} of {len(kinds.which)} were); else as before")  # fmt: skip

        def counters() -> dict[str, int]:
            return {"distinct_calls": run.held, "distinct_missed": run.missed, "distinct_unread": run.unread}

        rows = tuple(graph.inputs[i].name for i in found.inputs)
        return composed(graph, run, "distinct rows", said, (some, other), counters=counters, begin=run.begin,
                        counts=(self.key, lambda: BetCount(run.held, run.missed + run.unread, values=rows)))  # fmt: skip


def _paying_share(run: DistinctRowsRun, call: Call, kinds: DistinctRows) -> float:
    """The share of distinct rows up to which it pays, by the ends of the line: a call as it came, and with all rows distinct."""
    rows = len(kinds.which)
    everything = DistinctRows(tuple(range(rows)), tuple(range(rows)))
    with torch.no_grad():
        before, some, whole = least_times(
            [lambda: run.whole(*call), lambda: run.run(call, kinds), lambda: run.run(call, everything)]
        )
    return break_even_share(before, some, whole, len(kinds.first) / rows)
