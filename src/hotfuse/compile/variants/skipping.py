"""Rows of zeros, in the worker: a product that leaves them out is built, checked, and measured at some shares of such rows.

    rows of zeros: skipped from 31% on; predicted 12%; measured 0%: 210 / 245 us, 25%: 211 / 200 us, ...

The share from which on leaving out pays is predicted first, from what the product takes and what looking at and gathering rows
does. Measured times of both sides at a few shares replace it; what predictions were off by is remembered like other breakpoints.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from hotfuse.analysis.cost import value_bytes
from hotfuse.analysis.resources import CorePeaks
from hotfuse.backends.library import LibraryBackend
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.compile.learn import measure
from hotfuse.compile.learn.measure import CompiledCandidate, Shelf
from hotfuse.compile.request_context import kernels
from hotfuse.compile.variants import breakpoints
from hotfuse.compile.variants.skips import SKIP, Skips
from hotfuse.compile.variants.trial import RTOL, agree
from hotfuse.fusion.crossover import MARGIN, Shifts
from hotfuse.fusion.forecast import Predictor
from hotfuse.hpm.work import Candidate
from hotfuse.ir.graph import Graph, Value
from hotfuse.lower.common.errors import CannotLower
from hotfuse.lower.common.lowered import Lowered, PackArgument, StateArgument
from hotfuse.lower.common.operands import tensor
from hotfuse.lower.cpu.gemm.product_group import lower_contraction
from hotfuse.lower.cpu.tiling import Core
from hotfuse.lower.run.constants import Constants
from hotfuse.lower.run.kernel_state import NEVER, ROWS_TOGETHER, WHOLE
from hotfuse.ops.contract import is_contraction
from hotfuse.ops.table import packet

SHARES = (0, 250, 500, 750, 950)
"""Thousandths of rows that are zero where both sides are measured."""
PASSES, POINT_S = 5, 0.08
NOISE = 20
"""Breakpoints below this share are as good as none, and teach no more than that."""
_SIDES = ("all rows", "rows of zeros left out")
Measured = Callable[[int], tuple[float, float]]
"""Seconds of a call with all rows and with those of zeros left out, at a share."""
shifts = Shifts()


_OPERAND = {"aten.linear": "input", "aten.addmm": "mat1"}


def left(graph: Graph) -> Value:
    """The activation that a group's products share; raises CannotLower where there is none."""
    for node in graph.nodes:
        if is_contraction(node):
            return tensor(node, _OPERAND.get(packet(node.op), "self"))
    raise CannotLower("there is no product in the group")


def multiplied(graph: Graph, nodes: Sequence[int]) -> Iterator[str]:
    """What the products among some nodes multiply weights by."""
    for node in (graph.nodes[i] for i in nodes):
        if is_contraction(node):
            yield tensor(node, _OPERAND.get(packet(node.op), "self")).name


def expected(
    graph: Graph, sizes: Mapping[str, int], core: Core, peaks: CorePeaks, predict: Predictor, panels: int, threads: int = 1
) -> int:
    """The share from which on leaving rows out is predicted to pay, in thousandths.

    With a share z of zero rows it saves z of the product's time, and takes as long as gathering the others does: for every panel
    of columns they are read and written once.
    """
    whole = float(predict([Candidate(graph, sizes, core, threads)]).seconds[0])
    copied = 2 * panels * (value_bytes(left(graph), sizes) or 0) / peaks.cache_bytes_per_s / threads
    if not whole > 0:
        return WHOLE
    share = round(WHOLE * copied / (whole + copied))
    return max(1, min(WHOLE, round(share * breakpoints.remembered(shifts).factor(_SIDES))))


def break_even(points: list[tuple[int, float, float]]) -> int:
    """The least share from which on the second side is faster wherever it was measured; between two shares, where lines cross."""
    limit = NEVER
    for n in range(len(points) - 1, -1, -1):
        share, dense, skipping = points[n]
        if skipping > dense * (1 - MARGIN):
            if limit > WHOLE:
                return limit
            upper, there, better = points[n + 1]
            lost, won = skipping - dense * (1 - MARGIN), there * (1 - MARGIN) - better
            return max(1, round(share + (upper - share) * lost / max(lost + won, 1e-12)))
        limit = share
    return max(1, limit)


@dataclass(slots=True)
class Skipping:
    """One group."""

    graph: Graph
    sizes: Mapping[str, int]
    core: Core
    peaks: CorePeaks
    predict: Predictor
    threads: int = 1
    what: str = SKIP
    """Rows of zeros, or steps of K at which a few rows are zero."""
    measure: Measured | None = None
    """For tests: instead of running kernels."""

    def build(self) -> tuple[CompiledCandidate, Skips]:
        """The kernel with both sides, and where it changes; raises a HotfuseError where rows are never worth leaving out."""
        rows = self.what == SKIP
        lowered = lower_contraction(self.graph, self.core, skipping=rows, sparse=0 if rows else ROWS_TOGETHER)
        named = replace(lowered, kernel=replace(lowered.kernel, name=f"{lowered.kernel.name}_skipping"))
        made = CompiledCandidate(named, kernels().compile_kernel(named.kernel))
        self._check(made)
        # Rows are read and written for every panel; steps that rows have something at are found once.
        panels = sum(a.spec.panels for a in lowered.arguments if isinstance(a, PackArgument)) if rows else 1
        predicted = expected(self.graph, self.sizes, self.core, self.peaks, self.predict, panels, self.threads)
        times = [(s, *(self.measure or self._timed(made))(s)) for s in SHARES]
        limit = break_even(times)
        points = tuple((s, round(a * 1e6, 2), round(b * 1e6, 2)) for s, a, b in times)
        if limit > WHOLE:
            raise CannotLower(f"{self.what} are not worth leaving out: {Skips(limit, predicted, points, self.what)}")
        if rows:
            breakpoints.learn(shifts, _SIDES, predicted, max(limit, NOISE))
        return CompiledCandidate(at_limit(named, limit), made.compiled), Skips(limit, predicted, points, self.what)

    def _check(self, made: CompiledCandidate) -> None:
        """Both sides against the library, with half of the rows zero."""
        data, weights, _ = Zeroed(500, steps=self.what != SKIP).of(Candidate(self.graph, self.sizes, self.core, self.threads), "")
        inputs = [data[v.name] for v in self.graph.inputs]
        kernel = kernels().load_kernel(made.compiled)
        with torch.no_grad():
            want = LibraryBackend().compile(self.graph, weights).run(*inputs)
            for limit in (0, NEVER):
                run = kernels().glue(self.graph, at_limit(made.lowered, limit), kernel, Constants(weights))
                for got, expected in zip(run(*inputs), want, strict=True):
                    agree(got, expected, None, RTOL)

    def _timed(self, made: CompiledCandidate) -> Measured:
        def seconds(share: int) -> tuple[float, float]:
            shelf = Zeroed(share, steps=self.what != SKIP)
            asked = Candidate(self.graph, self.sizes, self.core, self.threads)
            # Both look at the rows.
            sides = [CompiledCandidate(at_limit(made.lowered, limit), made.compiled) for limit in (WHOLE, 0)]
            batch = [measure.bind(asked, "rows", side, shelf) for side in sides]
            measure.timed(batch, PASSES, time.perf_counter() + POINT_S)
            dense, skipping = (b.figure()[0] for b in batch)
            return dense, skipping

        return seconds


@dataclass(slots=True)
class Zeroed(Shelf):
    """Made-up data in which a share of the rows of whatever the products' left operand is made from is zero, evenly spread; or of
    the steps of all rows.
    """

    share: int = 0
    steps: bool = False

    def __init__(self, share: int, *, steps: bool = False) -> None:
        Shelf.__init__(self)
        self.share, self.steps = share, steps

    def of(self, candidate: Candidate, group: str) -> tuple[dict[str, Any], dict[str, torch.Tensor], list[Any]]:
        """As elsewhere, with zeros."""
        data, weights, results = Shelf.of(self, candidate, group)
        for name in _behind(candidate.graph):
            t = data[name]
            if isinstance(t, torch.Tensor) and t.dim() > 1:
                flat = torch.arange(t.shape[-1] if self.steps else t.numel() // max(1, t.shape[-1]))
                zero = (flat + 1) * self.share // WHOLE > flat * self.share // WHOLE
                if self.steps:
                    t[..., zero] = 0
                else:
                    t[zero.reshape(t.shape[:-1])] = 0
        return data, weights, results


def _behind(graph: Graph) -> set[str]:
    """Inputs of the group that its left operand is made from."""
    made = {v.name: n for n in graph.nodes for v in n.outs}
    waiting, found = [left(graph)], set[str]()
    while waiting:
        v = waiting.pop()
        if v.name in made:
            waiting += made[v.name].ins
        else:
            found.add(v.name)
    return found & {v.name for v in graph.inputs}


def at_limit(lowered: Lowered, limit: int) -> Lowered:
    """The same kernel with another limit to begin with."""
    return replace(lowered, arguments=tuple(
        replace(a, words=(limit, *a.words[1:])) if isinstance(a, StateArgument) else a for a in lowered.arguments
    ))  # fmt: skip
