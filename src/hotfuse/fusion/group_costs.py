"""What groups of a graph take: as calls measured them, else as predicted over the sizes that calls have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from hotfuse.fusion.candidates import FusionCandidate
from hotfuse.fusion.closed import Key, UseIndex
from hotfuse.fusion.forecast import Predictor
from hotfuse.fusion.groups import Group
from hotfuse.fusion.kinds import GroupKind
from hotfuse.fusion.seen_costs import SeenCosts, correction, masked, served
from hotfuse.fusion.worth import NOTHING, PredictedCost, cost
from hotfuse.hpm.work import Candidate as Question
from hotfuse.hpm.work import CoreShape
from hotfuse.profile.traffic import MeasuredPiece

UNKNOWN = PredictedCost(float("nan"), 0.0, float("nan"), 0)


class GroupCosts:
    """The costs of one planning; groups that look alike are predicted once."""

    def __init__(self, predict: Predictor, core: CoreShape, threads: int, seen: SeenCosts) -> None:
        self._predict, self._core, self._threads, self._seen = predict, core, threads, seen
        self.predictions = 0
        self._costs: dict[tuple[Key, bool], PredictedCost] = {}
        """As predicted, over the sizes of calls."""
        self._by_size: dict[tuple[Key, bool], tuple[float, ...]] = {}
        """Predicted seconds at each of those sizes, where there are several."""
        self._measured: dict[tuple[Key, bool], tuple[MeasuredPiece, float]] = {}
        """What served, with the seconds that were predicted of it."""

    def begin(self) -> None:
        """Predict anew for another graph; what calls measured stays."""
        self._costs.clear()
        self.predictions = 0

    def foresee_all(self, index: UseIndex, candidates: Iterable[FusionCandidate]) -> None:
        """Predict everything that candidates would build, in one batch for each graph."""
        here: list[Group] = []
        for c in candidates:
            if c.rewritten is None:
                here += c.new
            else:
                self.foresee(UseIndex(c.rewritten.graph, index.sizes), c.new)
        self.foresee(index, here)

    def foresee(self, index: UseIndex, groups: Sequence[Group]) -> None:
        """Predict groups that were not predicted so far, in one batch, at every size that calls have."""
        missing: dict[tuple[Key, bool], Group] = {}
        for g in groups:
            key = (index.key(g.nodes), g.kind == GroupKind.LIBRARY)
            if key not in self._costs:
                missing.setdefault(key, g)
        if not missing:
            return
        mix = [(dict(index.sizes), 1.0)] if not self._seen.seen.mix else self.mix(index.sizes)
        asks = [
            Question(index.closed(g.nodes), sizes, None if k[1] else self._core, self._threads)
            for k, g in missing.items()
            for sizes, _ in mix
        ]
        found = self._predict(asks)
        self.predictions += len(asks)
        weights = np.array([share for _, share in mix])
        exposed = found.exposed if len(found.exposed) else np.zeros(len(asks))
        columns = (found.seconds, found.low_s, found.high_s, found.joules, exposed)
        for n, (key, g) in enumerate(missing.items()):
            each = slice(n * len(mix), (n + 1) * len(mix))
            seconds, low, high, joules, hidden = (float(weights @ column[each]) for column in columns)
            if not np.isfinite(seconds):
                self._costs[key] = UNKNOWN
                continue
            part = None if key[1] else self._seen.open_keys(index, g.nodes)
            predicted = cost(seconds, low, high, joules, index.stored(g.nodes) or 0, hidden)
            self._costs[key] = predicted if part is None else masked(predicted, part)
            if len(mix) > 1:
                self._by_size[key] = tuple(map(float, found.seconds[each]))
            elif (piece := self._seen.measured(index, g.nodes, library=key[1])) is not None:
                self._measured[key] = piece, self._costs[key].seconds

    def mix(self, sizes: Mapping[str, int]) -> list[tuple[dict[str, int], float]]:
        """The sizes that calls have, with their shares."""
        mix = self._seen.seen.mix
        whole = sum(m.share for m in mix)
        return [({**sizes, **m.dims}, m.share / whole) for m in mix]

    def cost(self, index: UseIndex, g: Group) -> PredictedCost:
        """What a group takes: as measured where it served, else as predicted, corrected by how far predictions were off there."""
        key = (index.key(g.nodes), g.kind == GroupKind.LIBRARY)
        predicted = self._costs.get(key, UNKNOWN)
        if (found := self._measured.get(key)) is not None and predicted.known:
            return served(predicted, found[0])
        return predicted if key[1] or not self._measured else predicted.times(self.off())

    def off(self, groups: Sequence[Group] = (), index: UseIndex | None = None) -> float:
        """How far predictions of kernels were off: of these groups, or of all that served."""
        kernels = {k: pair for k, pair in self._measured.items() if not k[1]}
        if index is not None:
            wanted = {(index.key(g.nodes), False) for g in groups}
            kernels = {k: pair for k, pair in kernels.items() if k in wanted} or kernels
        return correction(kernels.values())

    def total(self, index: UseIndex, groups: Sequence[Group]) -> PredictedCost:
        """The sum over groups whose cost is known."""
        total = NOTHING
        for g in groups:
            if (one := self.cost(index, g)).known:
                total = total + one
        return total

    def is_measured(self, index: UseIndex, g: Group) -> bool:
        """Whether calls measured a group, or one that looks like it."""
        return (index.key(g.nodes), g.kind == GroupKind.LIBRARY) in self._measured

    @property
    def measured(self) -> bool:
        """Whether calls measured anything."""
        return bool(self._measured)

    def at_each_size(self, index: UseIndex, groups: Sequence[Group]) -> list[float] | None:
        """Predicted seconds of groups at each size that calls have; None where they were not predicted so."""
        found = [self._by_size.get((index.key(g.nodes), g.kind == GroupKind.LIBRARY)) for g in groups]
        known = [seconds for seconds in found if seconds is not None]
        return None if not self._by_size or len(known) < len(found) else [sum(each) for each in zip(*known, strict=True)]
