"""What depends on repeated inputs alone is kept, as a layer of a plan (`specialize.repeats`, `runtime.serve.kept_results`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hotfuse.analysis.shapes import Mismatch, bind
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.graph import Graph
from hotfuse.ir.types import TensorType
from hotfuse.runtime.observe.repeats import InputRepeats
from hotfuse.runtime.plan import BetCount, Plan
from hotfuse.runtime.serve.kept_results import RepeatedInputs
from hotfuse.runtime.tierup.layers.layer import Call, Composer, Layer, composed
from hotfuse.specialize.repeats import kept_part, work_saved
from hotfuse.specialize.table import REPEATED, AttemptKey, row

MIN_SHARE = row(REPEATED).share
"""Part of the calls in which inputs must come again."""
MIN_WORK = 0.04
"""Part of the work that must depend on them alone."""
TRIED_ON = 4
"""Kept calls that the rest is tried on."""


@dataclass(frozen=True, slots=True)
class RepeatedLayer(Layer):
    """Inputs that come again while others change."""

    names: tuple[str, ...]

    @property
    def key(self) -> AttemptKey:
        """The inputs."""
        return AttemptKey(REPEATED, ", ".join(self.names))

    def build(self, graph: Graph, calls: Sequence[Call], inner: tuple[Layer, ...], composer: Composer) -> Plan:
        """What depends on them and is kept, the rest with the other layers, and the whole for calls that bring others each time."""
        cut = kept_part(graph, self.names)
        if cut is None:
            return composer.plan(graph, calls, inner)
        names = [v.name for v in graph.inputs]
        takes = tuple(names.index(v.name) for v in cut.kept.inputs)
        first, some = composer.plain(cut.kept), calls[:TRIED_ON]
        with torch.no_grad():
            rest_calls = [[*c, *first.run(*[c[i] for i in takes])] for c in some]
        kept = composer.plan(cut.kept, [[c[i] for i in takes] for c in some], ())
        rest = composer.plan(cut.rest, rest_calls, inner)
        whole = composer.plan(graph, calls, inner)
        run = RepeatedInputs(takes, kept.run, rest.run, whole.run)
        said = (f"keeps what depends on {self.key.about} alone: {len(cut.kept.nodes)} of {len(graph.nodes)} nodes run where"
                " these inputs change")  # fmt: skip

        def counted() -> BetCount:
            return BetCount(run.hits, run.misses + run.passed, run.saved_s, values=self.names)

        return composed(graph, run, "kept results", said, (kept, rest, whole), counters=run.counters, begin=run.begin,
                        counts=(self.key, counted))


@dataclass(frozen=True, slots=True)
class Repeats:
    """Inputs worth a layer."""

    layer: RepeatedLayer
    share: float
    work: float
    pairs: int


def repeated_inputs(graph: Graph, seen: InputRepeats, call: Call) -> Repeats | None:
    """The inputs that come again whose results, if they were kept, would save most."""
    shares = {i: s for i, v in enumerate(graph.inputs) if isinstance(v.type, TensorType) and (s := seen.share((i,))) >= MIN_SHARE}
    sizes = bind(graph, [tuple(t.shape) for t in call])
    if not shares or isinstance(sizes, Mismatch):
        return None
    order, best = sorted(shares, key=lambda i: -shares[i]), None
    for n in range(1, len(order) + 1):
        share = seen.share(order[:n])
        if n == len(graph.inputs) or share < MIN_SHARE:
            break
        names = tuple(graph.inputs[i].name for i in sorted(order[:n]))
        work = work_saved(graph, names, sizes)
        if work >= MIN_WORK and (best is None or share * work > best.share * best.work):
            best = Repeats(RepeatedLayer(names), share, work, seen.pairs)
    return best
