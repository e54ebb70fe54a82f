"""Whether two neighbouring kernels should be tried as one: five criteria, each a reason with its figures.

    limits            one kernel has so many registers and so much fast memory, and one anchor
    locality          what passes between them saves a trip to memory only where it does not stay in the cache anyway
    complementarity   a kernel that waits for memory and one that waits for arithmetic can hide each other
    parallelism       the fused loop must not have fewer iterations than there are threads
    predictability    what passes is about as much in most calls as it is planned for (`fusion.seen_costs`)

The verdict says whether a trial is worth its compile; the trial decides. An estimate that cannot be made is a reason to refuse.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from enum import StrEnum

from hotfuse.analysis.resources import Bound, CorePeaks, ResourceUse
from hotfuse.base.events import EvidenceValue
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.fusion.groups import MAX_NODES
from hotfuse.fusion.kinds import ANCHORS

SCRATCH = 256 << 10
"""Bytes of its own that a kernel may have before it pushes its operands out of the second-level cache."""


class Criterion(StrEnum):
    """What is looked at."""

    DEPENDENCE = "data dependence"
    LIMITS = "hardware limits"
    LOCALITY = "locality"
    COMPLEMENT = "resource complementarity"
    PARALLEL = "parallelism"
    OVERLAP = "computational overlap"
    PREDICTABLE = "predictability"
    LOWERING = "lowering"
    VALUE = "expected saving"


@dataclass(frozen=True, slots=True)
class Reason:
    """One criterion's answer."""

    criterion: Criterion
    holds: bool
    text: str
    evidence: Mapping[str, EvidenceValue] = field(default_factory=dict[str, EvidenceValue])

    def __str__(self) -> str:
        return f"{self.criterion.value}: {self.text}"


def holds(criterion: Criterion, text: str, **evidence: EvidenceValue) -> Reason:
    """A reason for."""
    return Reason(criterion, holds=True, text=text, evidence=evidence)


def fails(criterion: Criterion, text: str, **evidence: EvidenceValue) -> Reason:
    """A reason against."""
    return Reason(criterion, holds=False, text=text, evidence=evidence)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether to try, what it may save, and every reason."""

    accepted: bool
    saving_us: float
    reasons: tuple[Reason, ...]

    @property
    def because(self) -> str:
        """The reasons that decided it."""
        deciding = [str(r) for r in self.reasons if r.holds is self.accepted]
        return "; ".join(deciding)


@dataclass(frozen=True, slots=True)
class FusionSide:
    """One of the two kernels."""

    kind: str
    use: ResourceUse


def judge(
    first: FusionSide, second: FusionSide, between: int, threads: int, peaks: CorePeaks, predictable: Reason | None = None
) -> Verdict:
    """Whether a producer and its consumer should be tried as one kernel; `between` bytes pass from one to the other.

    `predictable`: what calls showed of sizes there that only data tell; None where there are no such.
    """
    limits = _limits(first, second, peaks.registers)
    locality, from_memory = _locality(between, peaks)
    complement, hidden = _complement(first.use, second.use, peaks)
    parallel = _parallel(first.use, second.use, threads)
    saving = peaks.call_s * 1e6 + from_memory + hidden
    apart = first.use.us + second.use.us
    worth = saving > 0.01 * apart
    value = Reason(Criterion.VALUE, worth, f"{saving:.1f} us of {apart:.1f}", {"saving_us": round(saving, 2)})
    steady = predictable or holds(Criterion.PREDICTABLE, "no size that passes depends on data")
    reasons = (limits, locality, complement, parallel, steady, value)
    return Verdict(limits.holds and parallel.holds and steady.holds and worth, saving, reasons)


def _limits(a: FusionSide, b: FusionSide, registers: int) -> Reason:
    anchors = [s.kind for s in (a, b) if s.kind in ANCHORS]
    nodes = a.use.work.nodes + b.use.work.nodes
    vectors, scratch = a.use.vectors + b.use.vectors, a.use.scratch + b.use.scratch
    evidence: dict[str, EvidenceValue] = {"nodes": nodes, "vectors": vectors, "scratch": scratch}
    if len(anchors) == 2:
        return fails(Criterion.LIMITS, f"{anchors[0]} and {anchors[1]} each need the registers for themselves", **evidence)
    if nodes > MAX_NODES:
        return fails(Criterion.LIMITS, f"{nodes} nodes, at most {MAX_NODES}", **evidence)
    if not anchors and vectors > registers:
        return fails(Criterion.LIMITS, f"{vectors} vectors at once, {registers} registers", **evidence)
    if scratch > SCRATCH:
        return fails(Criterion.LIMITS, f"{scratch} bytes of scratch, at most {SCRATCH}", **evidence)
    return holds(Criterion.LIMITS, "they fit one kernel", **evidence)


def _locality(between: int, peaks: CorePeaks) -> tuple[Reason, float]:
    """What passes is written and read again: from memory where it outgrows half the cache, else at the cache's pace."""
    fits = between <= peaks.l2 // 2
    saved = 2 * between / peaks.bytes_per_s * 1e6 * (0.125 if fits else 1.0)
    text = f"{between} bytes pass and {'stay in' if fits else 'outgrow'} the second-level cache"
    evidence: dict[str, EvidenceValue] = {"bytes": between, "saves_us": round(saved, 2)}
    return Reason(Criterion.LOCALITY, holds=not fits, text=text, evidence=evidence), saved


def _complement(a: ResourceUse, b: ResourceUse, peaks: CorePeaks) -> tuple[Reason, float]:
    """What the one may move while the other computes: as much as memory is idle then. Trials tell how much of it comes true."""
    if {a.bound, b.bound} == {Bound.COMPUTE, Bound.MEMORY}:
        computing, moving = (a, b) if a.bound is Bound.COMPUTE else (b, a)
        busy = (computing.work.traffic or 0) / peaks.bytes_per_s * 1e6
        hidden = min(moving.us, max(0.0, computing.us - busy))
        text = "one waits for memory, the other for arithmetic"
        return holds(Criterion.COMPLEMENT, text, hides_us=round(hidden, 2)), hidden
    return fails(Criterion.COMPLEMENT, f"{a.bound.value} and {b.bound.value}"), 0.0


def _parallel(a: ResourceUse, b: ResourceUse, threads: int) -> Reason:
    before, after = max(a.parallel, b.parallel), min(a.parallel, b.parallel)
    evidence: dict[str, EvidenceValue] = {"before": before, "after": after, "threads": threads}
    if after < threads <= before:
        return fails(Criterion.PARALLEL, f"{after} iterations left for {threads} threads", **evidence)
    return holds(Criterion.PARALLEL, f"{after} iterations for {threads} threads", **evidence)
