"""The audit: a deployed plan stays on trial against what it replaced, for as long as it serves.

Now and then a call goes to the reference, the model's own code or whatever else the plan took the place of, and the call beside it
to the plan: a round, as in a race on live calls. Three detectors weigh the rounds that the plan lost. Each is a sum of bets
(Shiryaev and Roberts): one begins at every round, on "it loses so many of all rounds" against "it loses half of them". While the
plan is not slower, the mean of the three is expected to grow by at most one per round. So false alarms are RUN rounds apart on
average, however often one looks and however long the plan was fast before. A plan that loses every round by a little is withdrawn
after some sixteen. What a plan costs while it stays grows with how much slower it is, and chance seldom shows large ratios in
nearly all of the last rounds; so beyond `MUCH_SLOWER` less evidence is asked for: nine rounds if seven times as slow.

A round costs what the reference takes longer, twice because its first call only warms caches up, and four looks at calls. That is
paid from `BUDGET` of the calls' time, so a plan that is much faster is looked at seldom. While it seems slower, a call of the
reference costs nothing, and rounds follow each other, on all threads at the same time (decision 101). Looks at calls of a few
microseconds take longer than the calls: while a plan seems slower they may cost what it costs to keep it. Which of both is slower
is asked there of calls that nothing held up (decision 112): beside other programs a median of a few is of those that were.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from math import isfinite
from statistics import median
from typing import Any

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.base.settings import Settings
from hotfuse.runtime.samples import Signature
from hotfuse.runtime.tierup.race import ALPHA, growth
from hotfuse.runtime.tierup.turns import MAX_KEYS, NEW, OLD, Key, Round, Turns

BUDGET = 0.005
"""The part of the calls' time that rounds may cost."""
FIRST, FIRST_GAP = 4, 4
"""Rounds right behind a deployment, so many calls apart at least."""
FIRST_BUDGET = 0.05
"""What these may cost. A plan that is not much faster has them at once; four rounds of one that is four times as fast would take a
fifth of the first half minute."""
GAP = 64
"""Calls between two rounds of a plan that nothing speaks against, at least."""
PATIENCE = 8
"""Calls looked at because a round waits for its other half; where sizes are many, a later round of its kind completes it."""
STALE_S = 1.0
"""A half of a round that waited longer is forgotten: the machine may have another speed by now."""
RUN = 10_000.0
"""Rounds between two false alarms, at least, on average."""
MUCH_SLOWER, RUN_AT_LEAST = 2.0, 50.0
"""From how many times as slow on less evidence is asked for, and how much of it at least."""
LOSING = (0.6, 0.75, 0.95)
"""Parts of its rounds that a plan loses if it is slower: a little in much noise, or clearly."""
SUSPECT, SEEMS_SLOWER = 20.0, 1.1
"""Evidence, or a ratio in the last rounds, at which rounds follow each other as fast as their cost allows."""
KEPT = 64
"""Rounds that the running ratio is of."""
USUAL_MEMORY = 16
"""Calls over which a kind's usual time is averaged."""
MAX_USUAL_TIMES = 32
"""Kinds of calls whose usual time is kept."""


def why_not(settings: Settings) -> str:
    """Why plans are not audited under these settings; empty where they are."""
    if settings.capture == "inline":
        return "what is captured inline, for tools and tests, stays as it was decided"
    if settings.objective == "energy":
        return "what a single call takes in energy is not measured"
    return "the weights that what it replaced reads give their memory back" if settings.release_weights else ""


@dataclass(frozen=True, slots=True)
class AuditState:
    """What the audit knows of a plan now."""

    rounds: int
    ratio: float
    """The plan's time over the reference's, the median of the last rounds."""
    low: float
    high: float
    """Medians that these rounds do not rule out, by the test that decides races."""
    plan_us: float
    reference_us: float
    cost: float
    """The part of the calls' time that the rounds took in all."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {"rounds": self.rounds, "ratio": round(self.ratio, 3), "low": round(self.low, 3),
                "high": round(self.high, 3) if isfinite(self.high) else None, "plan_us": round(self.plan_us, 1),
                "reference_us": round(self.reference_us, 1),
                "cost": round(max(0.0, self.cost), 5)}  # fmt: skip


class Audit:
    """One plan on trial. Any number of threads tell it their times; what comes while another one is judged is passed over."""

    def __init__(
        self, plan: object, version: Signature | None, begin: int, allowed: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._plan, self.version = weakref.ref(plan), version
        """Not held: a call that was in a plan when it was exchanged may begin its trial once more, and none may ever end that."""
        self.at = begin + FIRST_GAP
        """The number of the call that begins the next round, or completes one."""
        self._allowed = allowed
        """How many times as long a plan may take: more than once where memory is what counts."""
        self._clock = clock
        self._turns = Turns(begin + 1, deployed=True)
        self._key: Key | None = None
        """Whose round is under way."""
        self._waiting = 0
        self._suspect = False
        """Whether something speaks against the plan: every thread has its round then."""
        self._half_at: dict[Key, float] = {}
        """When a key's round was begun or went on."""
        self._rounds: deque[Round] = deque(maxlen=KEPT)
        self._looks: deque[float] = deque(maxlen=4 * FIRST)
        self._times: tuple[deque[float], deque[float]] = (deque(maxlen=4 * FIRST), deque(maxlen=4 * FIRST))
        """Seconds of the reference's and of the plan's last calls in rounds, those that warm caches up among them."""
        self._evidence = [0.0] * len(LOSING)
        self._extra_s = self._total_s = 0.0
        self._unpaid_s = 0.0
        """Time that calls must take before the next round is paid for."""
        self._not_before = 0
        self._usual: dict[Signature, tuple[float, int]] = {}
        """Seconds of a kind of calls, of late, and how many were timed."""
        self._judging = threading.Lock()
        self.rounds = 0

    def is_of(self, plan: object) -> bool:
        """Whether this plan is the one on trial."""
        return self._plan() is plan

    # --- the call path ---------------------------------------------------------------------------

    def note(self, number: int, signature: Signature, seconds: float, calls: int) -> None:
        """The plan answered so many calls up to that one, which was looked at. Where they take longer than they did, the next round
        is paid for sooner.
        """
        self._total_s += seconds * calls
        self._unpaid_s -= seconds * calls
        if self._unpaid_s <= 0 and self.rounds:
            self.at = min(self.at, max(number + 1, self._not_before))
        usual, timed = self._usual.get(signature, (0.0, 0))
        if timed or len(self._usual) < MAX_USUAL_TIMES:  # the first finds everything cold, and weighs no more than others
            self._usual[signature] = (usual + (seconds - usual) / min(timed + 1, USUAL_MEMORY), timed + 1)

    def due(self, number: int, key: Key) -> bool:
        """Whether a call is part of a round. One is under way at a time: sixteen threads and three sizes would have 48 rounds open,
        and with one of them always waiting for its other half every call would be part of one. Where something speaks against the
        plan that is what is wanted: else a plan lasts sixteen times as many calls if sixteen threads call.
        """
        if number < self.at:
            return False
        held = self._key
        if held is None or held == key or self._suspect:
            return True
        if self._clock() - self._half_at.get(held, 0.0) > STALE_S:
            self._key = None
            return True
        if held[0] == key[0]:
            self._wait(number, 4 * PATIENCE)
        return False

    def turn(self, key: Key) -> int:
        """Who answers a call that is due."""
        now = self._clock()
        if self._turns.half(key) and now - self._half_at.get(key, 0.0) > STALE_S:
            self._turns.forget(key)
        if self._key != key:
            self._key = key
            self._goes_on(key, now)
        return self._turns.next(key)

    def _goes_on(self, key: Key, now: float) -> None:
        if len(self._half_at) >= MAX_KEYS and key not in self._half_at:
            self._half_at.clear()
        self._half_at[key] = now

    def took(self, number: int, key: Key, side: int, seconds: float, look_s: float) -> bool:
        """A call was answered, looking at which took so long besides; whether the plan has to go."""
        self._extra_s += look_s
        self._looks.append(look_s)
        self._times[side].append(seconds)
        if side == OLD and (usual := self._usual.get(key[1])) is not None:
            self._extra_s += seconds - usual[0]  # of either sign: noise must not count as cost
        ended = self._turns.took(key, side, seconds)
        if ended is None:
            self._goes_on(key, self._clock())
            self.at = number + 1
            self._wait(number, PATIENCE)
            return False
        if not self._judging.acquire(blocking=False):
            self._key = None
            return False
        try:
            alarm = self._judge(ended)
        finally:
            self._judging.release()
        self._plan_next(number)
        return alarm

    def _wait(self, number: int, patience: int) -> None:
        """A round has waited for one more call."""
        self._waiting += 1
        if self._waiting > patience:
            self._plan_next(number)

    def _judge(self, ended: Round) -> bool:
        reference, plan = ended
        self.rounds += 1
        self._rounds.append(ended)
        lost = plan > self._allowed * reference
        for i, p in enumerate(LOSING):
            self._evidence[i] = (1.0 + self._evidence[i]) * 2 * (p if lost else 1 - p)
        by_far = self._late_ratios()[:3][-1] / (MUCH_SLOWER * self._allowed)  # nearly all are above it; two rounds are too few
        return self.evidence >= max(RUN_AT_LEAST, RUN / max(1.0, by_far) ** 3)

    def _late_ratios(self) -> list[float]:
        """The plan's time over the reference's in the last rounds, the least first."""
        return sorted(plan / max(reference, 1e-9) for reference, plan in list(self._rounds)[-2 * FIRST :])

    @property
    def evidence(self) -> float:
        """That the plan is slower; `RUN` of it withdraws a plan that is so by a little."""
        return sum(self._evidence) / len(self._evidence)

    def _plan_next(self, number: int) -> None:
        """When the next round begins: as its cost allows, and not sooner than anybody has use for."""
        self._waiting, self._key = 0, None
        if not self.rounds:
            self.at = number + FIRST_GAP
            return
        late = list(self._rounds)[-2 * FIRST :]
        reference, plan = median(r[0] for r in late), median(r[1] for r in late)
        undisturbed = _undisturbed(self._times[NEW]) / max(_undisturbed(self._times[OLD]), 1e-9)
        slower = max(median(self._late_ratios()), undisturbed) > SEEMS_SLOWER * self._allowed
        self._suspect = slower or self.evidence >= SUSPECT
        early, soon = self.rounds < FIRST, self._suspect or self.rounds < 2 * FIRST
        dearer = min(0.0, reference - plan) if undisturbed >= 1 else reference - plan
        paid = FIRST_BUDGET if early else BUDGET
        if slower:  # a plan that stays costs that much; knowing may cost as much
            paid = max(paid, 1 - self._allowed / max(median(self._late_ratios()), self._allowed))
        self._unpaid_s = (2 * dearer + 4 * median(self._looks)) / paid
        self._not_before = number + (FIRST_GAP if early else 2 if soon else GAP)
        self.at = max(self._not_before, number + int(self._unpaid_s / max(plan, 1e-9)))

    def reopen(self, number: int) -> None:
        """Circumstances changed: the next rounds come soon, and what was seen before says nothing."""
        if (plan := self._plan()) is not None:
            self.__init__(plan, self.version, number, self._allowed, self._clock)

    # --- what is known ---------------------------------------------------------------------------

    def typical_us(self) -> float | None:
        """What a call takes in the plan, of the kind of calls seen first."""
        return next((s * 1e6 for s, _ in list(self._usual.values())), None)

    def state(self) -> AuditState | None:
        """The running ratio with its interval; None before the first round."""
        rounds = list(self._rounds)
        if not rounds:
            return None
        ratios = sorted(plan / max(reference, 1e-9) for reference, plan in rounds)
        low, high = interval(ratios)
        reference, plan = (median(r[side] for r in rounds) * 1e6 for side in (0, 1))
        cost = self._extra_s / max(self._total_s, 1e-9)
        return AuditState(self.rounds, median(ratios), low, high, plan, reference, cost)


def _undisturbed(times: Iterable[float]) -> float:
    """What a call takes that nothing held up: the first quartile of a few. Beside other programs one call in five waits for a core
    for milliseconds; two of three such references made the next round wait for hundreds of calls of a plan three times as slow.
    """
    ordered = sorted(times)
    return ordered[(len(ordered) - 1) // 4]


def interval(ratios: list[float]) -> tuple[float, float]:
    """The interval of medians that sorted ratios do not rule out by how many of them lie on either side, at `ALPHA` each."""
    n = len(ratios)
    out = next((k for k in range(n // 2 + 1) if growth(n - k, n) < 1 / ALPHA), n // 2)  # with k below it, a median is possible
    return (ratios[out - 1] if out else 0.0, ratios[n - out] if out else float("inf"))
