"""Predicting what comes next, and keeping score: speculation rests on proven predictability.

Three predictors look at a stream of outcomes (a branch, a shape, a class of sparsity): the most frequent outcome of late, the last
one, and the one that most often followed the last. Before every event each says what it expects; the event scores all of
them. What the stream's best predictor expects now is the prediction, and its recent accuracy is how much to trust it.
"""

from __future__ import annotations

from dataclasses import field

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.profile.stats import DECAY, Outcomes

FREQUENT, LAST, FOLLOWS = "most frequent", "same as last", "follows the last"
MAX_STATES = 64


@dataclass(frozen=True, slots=True)
class Guess:
    """What is expected next, by whom, how often that was right of late, and over how many predictions."""

    value: int
    accuracy: float
    n: int
    by: str


@dataclass(slots=True)
class _Score:
    right: float = 0.0
    weight: float = 0.0

    def add(self, *, hit: bool) -> None:
        self.right = DECAY * self.right + hit
        self.weight = DECAY * self.weight + 1

    @property
    def accuracy(self) -> float:
        return self.right / self.weight if self.weight else 0.0


@dataclass(slots=True)
class StreamPredictor:
    """A stream's three predictors and their scores."""

    n: int = 0
    """Predictions scored."""
    last: int | None = None
    all: Outcomes = field(default_factory=Outcomes)
    after: dict[int, Outcomes] = field(default_factory=dict[int, Outcomes])
    scores: dict[str, _Score] = field(default_factory=lambda: {FREQUENT: _Score(), LAST: _Score(), FOLLOWS: _Score()})

    def expect(self) -> dict[str, int]:
        """What each predictor says of the next event; nothing before the first one."""
        if self.last is None:
            return {}
        frequent = _most(self.all)
        follows = _most(self.after[self.last]) if self.last in self.after else frequent
        return {FREQUENT: frequent, LAST: self.last, FOLLOWS: follows}

    def see(self, outcome: int) -> None:
        """An event: score what was predicted, then learn it."""
        if self.last is not None:
            for name, value in self.expect().items():
                self.scores[name].add(hit=value == outcome)
            self.n += 1
            if self.last not in self.after and len(self.after) >= MAX_STATES:
                del self.after[next(iter(self.after))]
            self.after.setdefault(self.last, Outcomes()).add(outcome)
        self.all.add(outcome)
        self.last = outcome

    def guess(self) -> Guess | None:
        """The best predictor's expectation; None before anything was seen."""
        expected = self.expect()
        if not expected:
            return None
        by = max(expected, key=lambda name: self.scores[name].accuracy)
        return Guess(expected[by], self.scores[by].accuracy, self.n, by)


def _most(outcomes: Outcomes) -> int:
    return max(outcomes.weights, key=lambda k: outcomes.weights[k])


CLASSES = ("none", "below a half", "below nine tenths", "nearly all", "all")
ALL = 4
"""The class of all of them."""


def class_of(fraction: float) -> int:
    """A fraction as one of five classes, which are what a specialization could be made for."""
    if fraction <= 0:
        return 0
    return 1 if fraction < 0.5 else 2 if fraction < 0.9 else 3 if fraction < 1 else 4
