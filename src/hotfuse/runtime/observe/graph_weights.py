"""Weights of a graph: what its partitions took while they served, kept beside it through every exchange of plans.

    examined     sampled calls of the plan that serves, or the call that it was raced on (`runtime.observe.examine`)
    read         whenever the graph is planned (`runtime.observe.traffic`): also what partitions took that serve no longer, so that
                 a planner compares one measured grouping with another
    moved        when shares of the time differ from what the plan was made by, the graph is planned again

Shares and not times are compared: where everything became slower alike, another plan would be no better.
"""

from __future__ import annotations

from collections.abc import Sequence

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.profile.traffic import MeasuredPiece

MAX_KEPT = 96
"""Partitions whose times are kept, of all plans of a graph: twice as many as are told of one."""
MIN_SAMPLES = 8
"""Samples without which a weight is not planned by once more."""

PieceKey = tuple[str, tuple[tuple[str, int], ...], bool]


def key_of(piece: MeasuredPiece) -> PieceKey:
    """What a partition is known by: what it computes, at which sizes, by whom."""
    return piece.graph, tuple(sorted(piece.dims.items())), piece.library


@dataclass(frozen=True, slots=True)
class GraphWeights:
    """What was measured of one graph's partitions; a value that is exchanged whole."""

    serving: tuple[MeasuredPiece, ...] = ()
    """Of the plan that serves, as last examined."""
    before: tuple[MeasuredPiece, ...] = ()
    """Of plans that served before it, the newest first."""

    def updated(self, pieces: Sequence[MeasuredPiece]) -> GraphWeights:
        """The plan that serves was examined once more; partitions that it no longer has are remembered."""
        if not pieces:
            return self
        now = {key_of(p) for p in pieces}
        older = tuple(p for p in (*self.serving, *self.before) if key_of(p) not in now)
        return GraphWeights(tuple(pieces), older[: max(0, MAX_KEPT - len(pieces))])

    def exchanged(self) -> GraphWeights:
        """Another plan serves, which nobody has examined."""
        return GraphWeights((), (*self.serving, *self.before)[:MAX_KEPT])

    def pieces(self) -> tuple[MeasuredPiece, ...]:
        """All of them, for a planner."""
        return (*self.serving, *self.before)

    def coarse(self) -> str:
        """What a plan made by them is kept under: eighths of the time, or no two processes would share one."""
        total = sum(p.us for p in self.serving)
        return repr([(key_of(p), round(8 * p.us / total)) for p in self.serving if 16 * p.us > total]) if total > 0 else ""

    def steady(self) -> bool:
        """Whether the plan that serves was seen often enough to be planned by."""
        return bool(self.serving) and min(p.n for p in self.serving) >= MIN_SAMPLES

    def moved(self, planned_by: Sequence[MeasuredPiece]) -> float:
        """The part of the serving plan's time that lies elsewhere than what it was planned by says: 0 to 1. What was not measured
        then counts wholly.
        """
        then = {key_of(p): p.us for p in planned_by}
        known = [(p.us, then[key_of(p)]) for p in self.serving if key_of(p) in then]
        total, was, now = sum(p.us for p in self.serving), sum(b for _, b in known), sum(a for a, _ in known)
        if total <= 0:
            return 0.0
        unknown = (total - now) / total
        shifted = sum(abs(a / now - b / was) for a, b in known) / 2 if now > 0 and was > 0 else 0.0
        return min(1.0, unknown + (1 - unknown) * shifted)

    def lines(self, planned_by: Sequence[MeasuredPiece]) -> list[str]:
        """These weights as lines of text."""
        if not self.serving:
            return []
        n, us = min(p.n for p in self.serving), sum(p.us for p in self.serving)
        moved = f"{self.moved(planned_by):.0%} of the time lies elsewhere than it was planned by"
        how = moved if planned_by else "planned by predictions"
        also = f"; {len(self.before)} of earlier plans" if self.before else ""
        return [f"weights: {len(self.serving)} partitions as measured, {us:.1f} us in {n} samples or more, {how}{also}"]
