"""Several kernels for one group, in the worker: predicted to cross, built, found right on both sides, measured around the crossing.

A group whose sizes only a call tells has several variants (`compile.variants.alternatives`). Nothing is built unless two of them
are predicted to be best at sizes that calls may bring. What is built then has to agree with the library and to be faster where
it is meant to serve; measured breakpoints replace predicted ones and correct the next prediction.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace

from hotfuse.analysis.resources import CorePeaks
from hotfuse.base.errors import HotfuseError
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.compile.learn import measure
from hotfuse.compile.learn.measure import CompiledCandidate
from hotfuse.compile.request_context import kernels
from hotfuse.compile.variants import breakpoints
from hotfuse.compile.variants.alternatives import (
    ANY_SIZE,
    LIBRARY,
    ONE_THREAD,
    SizeRange,
    VariantQuestion,
    allowed,
    variant_question,
)
from hotfuse.compile.variants.served_threads import as_served
from hotfuse.compile.variants.trial import attempt
from hotfuse.compile.variants.variant_table import LIBRARY as NO_KERNEL
from hotfuse.compile.variants.variant_table import VariantTable, variant_text
from hotfuse.fusion.crossover import MARGIN, Crossovers, Interval, Shifts, Variant, crossovers, refined
from hotfuse.fusion.forecast import Predictor
from hotfuse.hpm.work import Candidate
from hotfuse.ir.dims import Dim, show, substitute
from hotfuse.ir.graph import Graph
from hotfuse.lower import Core
from hotfuse.tile.serial import one_thread
from hotfuse.tile.text import show as show_kernel

PASSES = 5
POINT_S = 0.08
"""Most seconds for measuring all variants at one size."""
BUDGET_S = 0.25
"""Seconds that a plan waits for a group's question: what is not built by then is left out, and sizes that are not measured are
judged by the nearest that is."""
MAX_POINTS = 5
"""Sizes that are measured to find a breakpoint."""
LIBRARY_MARGIN, LIBRARY_US = 0.1, 20.0
"""By how much the library must be better: a call that it serves leaves the native run, and every other kernel is entered alone."""
Measure = Callable[[Variant, int], float]
"""Seconds of a variant at a size."""


@dataclass(slots=True)
class VariantDecision:
    """What came of a group: the decision, the kernels it needs besides the one that there is, and what was decided against."""

    variants: VariantTable | None = None
    kernels: list[CompiledCandidate] = field(default_factory=list[CompiledCandidate])
    """In the decision these are the kernels 1, 2, ...; 0 is the one that there is."""
    notes: list[str] = field(default_factory=list[str])


shifts = Shifts()
"""How far measured breakpoints lay from predicted ones, in this process."""


@dataclass(slots=True)
class VariantSearch:
    """One group."""

    graph: Graph
    general: CompiledCandidate
    sizes: Mapping[str, int]
    core: Core
    peaks: CorePeaks
    predict: Predictor
    guards: Sequence[Dim] = ()
    """What the graph around promises about its sizes."""
    meaning: Mapping[str, Dim] = field(default_factory=dict[str, Dim])
    """The group's own sizes in those of the graph around it."""
    measure: Measure | None = None
    """For tests: instead of running kernels."""
    threads: int = 1
    """That calls have."""
    also: Sequence[Core] = ()
    """The same core with other instructions for products."""
    until: float = math.inf
    """When (perf_counter) to build and to measure no more: a plan waits for the answer."""
    kernels: dict[str, CompiledCandidate | None] = field(default_factory=dict[str, "CompiledCandidate | None"])
    times: dict[int, dict[str, float]] = field(default_factory=dict[int, dict[str, float]])
    lost: set[str] = field(default_factory=set[str])
    """Variants that were slower than the kernel for any size wherever they were predicted to be faster."""
    notes: list[str] = field(default_factory=list[str])

    def decide(self) -> VariantDecision:
        """Predict, build, check, measure, decide: for the threads that calls have, or for one where cores are busy."""
        if self.measure is not None:
            return self._decide()
        with as_served(self.threads) as threads:
            if threads < self.threads:
                self.notes.append(f"other sizes were measured on {threads} of {self.threads} threads: cores are busy")
            self.threads = threads
            return self._decide()

    def _decide(self) -> VariantDecision:
        others = (*measure.core_variants(self.core), *self.also)
        question = variant_question(self.graph, self.core, others, self.sizes, self.peaks, self.threads)
        if isinstance(question, str):
            return VariantDecision()
        outside = substitute(question.size, self.meaning)
        within = allowed(outside, self.guards, self.sizes)
        if within.most < 1:
            return VariantDecision()
        self.kernels[ANY_SIZE] = self.general  # all others are measured against it, also where it is predicted to serve nowhere
        variants, predicted = self._buildable(question, question.variants, within)
        if predicted.single and variants[predicted.intervals[0].variant].name == ANY_SIZE:
            return VariantDecision(notes=self.notes)
        names = tuple(variants[i.variant].name for i in predicted.intervals)
        before = variant_text(question.size, _ends(predicted.intervals), names)
        try:
            while (decided := self._decided(question, variants, predicted, within, before)) is None:
                left = [w for w in variants if w.name not in self.lost]
                variants, predicted = self._buildable(question, left, within)
        except HotfuseError as e:
            return VariantDecision(notes=[*self.notes, f"cannot be measured at other sizes: {e.because or e.what}"])
        return decided

    def _buildable(
        self, question: VariantQuestion, variants: Sequence[Variant], within: SizeRange
    ) -> tuple[list[Variant], Crossovers]:
        """The variants without those that have no kernel where they are predicted to be best, and the prediction for the rest."""
        found = list(variants)
        predicted = self._predicted(question, found, within)
        while dropped := [
            w for w in {i.variant for i in predicted.intervals} if not self._built(question, found[w], predicted, w)
        ]:
            found = [w for n, w in enumerate(found) if n not in dropped]
            predicted = self._predicted(question, found, within)
        return found, predicted

    def _predicted(self, question: VariantQuestion, variants: Sequence[Variant], within: SizeRange) -> Crossovers:
        points = within.points(*question.turns)
        found = crossovers(variants, show(question.size), points, self.sizes, self.predict, self.threads, question.env)
        return breakpoints.remembered(shifts).corrected(found, [w.name for w in variants])

    # --- building ----------------------------------------------------------------------------------------------------

    def _built(self, question: VariantQuestion, variant: Variant, predicted: Crossovers, number: int) -> bool:
        """Whether a variant has a kernel of its own that is right wherever it is meant to serve."""
        if variant.name == LIBRARY:
            self.kernels[LIBRARY] = None
            return True
        if variant.name in self.kernels:
            return True
        if time.perf_counter() > self.until:
            self.notes.append(f"{variant.name}: no time was left to build it")
            return False
        ((graph, core),) = variant.pieces
        assert isinstance(core, Core)
        try:
            made = self._alone() if variant.name == ONE_THREAD else self._made(variant.name, graph, core)
            if made is None:
                return False
            for i in predicted.intervals:
                for n in {max(1, i.first), i.last or 2 * max(1, i.first)} if i.variant == number else ():
                    env = {**self.sizes, **question.env(n)}
                    attempt(self.graph, made.lowered, made.compiled, env, float("inf"))
        except HotfuseError as e:
            self.notes.append(f"{variant.name}: {e.because or e.what}")
            return False
        self.kernels[variant.name] = made
        return True

    def _alone(self) -> CompiledCandidate | None:
        """The kernel that there is, on the calling thread; None where it never shares its work."""
        kernel = one_thread(self.general.lowered.kernel)
        if kernel is None:
            return None
        return CompiledCandidate(replace(self.general.lowered, kernel=kernel), kernels().compile_kernel(kernel))

    def _made(self, name: str, graph: Graph, core: Core) -> CompiledCandidate | None:
        lowered = kernels().lower(graph, core)
        if show_kernel(lowered.kernel) == show_kernel(self.general.lowered.kernel):
            return None  # the same loops
        named = f"{lowered.kernel.name}_{'_'.join(name.replace(',', '').split())}"
        lowered = replace(lowered, kernel=replace(lowered.kernel, name=named))
        return CompiledCandidate(lowered, kernels().compile_kernel(lowered.kernel))

    # --- measuring ---------------------------------------------------------------------------------------------------

    def _timed(self, question: VariantQuestion, variants: Sequence[Variant], n: int) -> dict[str, float]:
        """Seconds of all variants at a size, taken in turns."""
        if any(w.name not in self.times.get(n, {}) for w in variants):
            near = [m for m, seen in self.times.items() if all(w.name in seen for w in variants)]
            if near and time.perf_counter() > self.until:
                return self.times[min(near, key=lambda m: abs(m - n))]
            if self.measure is not None:
                self.times[n] = {w.name: self.measure(w, n) for w in variants}
            else:
                env = {**self.sizes, **question.env(n)}
                batch = [self._bound(w, env) for w in variants]
                measure.timed(batch, PASSES, time.perf_counter() + POINT_S)
                self.times[n] = {w.name: b.figure()[0] for w, b in zip(variants, batch, strict=True)}
        return self.times[n]

    def _bound(self, variant: Variant, env: Mapping[str, int]) -> measure.BoundCall:
        core = None if variant.name == LIBRARY else variant.pieces[0][1]
        candidate = Candidate(self.graph, env, core, variant.threads or self.threads)
        return measure.bind(candidate, variant.name, self.kernels[variant.name])

    # --- deciding ----------------------------------------------------------------------------------------------------

    def _decided(
        self, question: VariantQuestion, variants: Sequence[Variant], predicted: Crossovers, within: SizeRange, before: str
    ) -> VariantDecision | None:
        """The measured decision; None where a variant lost wherever it was meant to serve, and the others have to be asked anew."""
        used = sorted({i.variant for i in predicted.intervals} | {n for n, w in enumerate(variants) if w.name == ANY_SIZE})
        some = [variants[n] for n in used]
        better = refined(
            predicted, lambda v, n: self._timed(question, some, max(1, n))[variants[v].name], MAX_POINTS, within.most
        )
        intervals = self._paying(question, variants, some, better.intervals, within)
        chosen, paying = ({variants[i.variant].name for i in found} for found in (better.intervals, intervals))
        if lost := chosen - paying - {ANY_SIZE}:
            self.lost |= lost
            return None
        for (a, b), (old, _) in zip(
            itertools.pairwise(better.intervals), itertools.pairwise(predicted.intervals), strict=True
        ):
            if a.last is not None and old.last is not None:
                breakpoints.learn(shifts, (variants[a.variant].name, variants[b.variant].name), old.last, a.last)
        names = tuple(variants[i.variant].name for i in intervals)
        if set(names) in ({ANY_SIZE}, {LIBRARY}):  # a choice of the library alone has no kernel, and this one won its trial
            shown = "; ".join(
                f"{n}: " + ", ".join(f"{k} {t * 1e6:.1f} us" for k, t in us.items()) for n, us in self.times.items()
            )
            return VariantDecision(notes=[*self.notes, f"one kernel for all sizes: predicted {before}, measured {shown}"])
        extra = [n for n in dict.fromkeys(names) if n not in (ANY_SIZE, LIBRARY)]
        numbers = {ANY_SIZE: 0, LIBRARY: NO_KERNEL, **{n: k for k, n in enumerate(extra, 1)}}
        points = tuple((n, tuple(us.get(name) for name in names)) for n, us in sorted(self.times.items()))
        rounded = tuple((n, tuple(None if t is None else round(t * 1e6, 2) for t in us)) for n, us in points)
        made = [m for n in extra if (m := self.kernels[n]) is not None]
        decision = VariantTable(question.size, _ends(intervals), tuple(numbers[n] for n in names), names, before, rounded)
        return VariantDecision(decision, made, self.notes)

    def _paying(
        self,
        question: VariantQuestion,
        variants: Sequence[Variant],
        some: Sequence[Variant],
        intervals: Sequence[Interval],
        within: SizeRange,
    ) -> list[Interval]:
        """Intervals whose variant measured faster than the kernel for any size; the others are that kernel's."""
        general = next(n for n, w in enumerate(variants) if w.name == ANY_SIZE)
        kept: list[Interval] = []
        for i in intervals:
            variant = variants[i.variant].name
            if variant != ANY_SIZE:
                last = within.most if i.last is None else min(i.last, within.most)
                inside = [n for n in self.times if max(1, i.first) <= n <= last]
                if not inside and max(1, i.first) <= last:
                    inside = [(max(1, i.first) + last) // 2]
                rows = [self._timed(question, some, n) for n in inside]
                saved = [r[ANY_SIZE] - r[variant] for r in rows]
                need = LIBRARY_MARGIN if variant == LIBRARY else MARGIN
                pays = bool(rows) and sum(saved) > need * sum(r[ANY_SIZE] for r in rows)
                if variant == LIBRARY:
                    pays = pays and min(saved) > LIBRARY_US * 1e-6
                i = i if pays else replace(i, variant=general)
            if kept and kept[-1].variant == i.variant:
                kept[-1] = replace(kept[-1], last=i.last)
            else:
                kept.append(i)
        return self._without_gaps(kept, [v.name for v in variants])

    def _without_gaps(self, intervals: Sequence[Interval], names: Sequence[str]) -> list[Interval]:
        """Intervals without those of the kernel for any size that lie inside one variant and lost to it wherever measured."""
        made, n = list(intervals), 1
        while n + 1 < len(made):
            before, gap, after = made[n - 1 : n + 2]
            rows = [times for size, times in self.times.items() if gap.first <= size <= (gap.last or 0)]
            lost = all(times.get(names[before.variant], math.inf) < times[names[gap.variant]] for times in rows)
            if before.variant == after.variant and names[gap.variant] == ANY_SIZE and rows and lost:
                made[n - 1 : n + 2] = [replace(before, last=after.last)]
            else:
                n += 1
        return made


def _ends(intervals: Sequence[Interval]) -> tuple[int, ...]:
    return tuple(i.last for i in intervals if i.last is not None)
