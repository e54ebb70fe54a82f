"""Who decides between a plan that serves and one that was proven: live calls, or rounds in the background while nobody calls.

| calls | what decides |
| --- | --- |
| come one after another | a contest on them (`runtime.tierup.contest`) |
| pause | rounds on a kept call, with the machine to themselves; those during which somebody called do not count |
| never pause, for too long to decide anything | nothing: the new plan is refused, to be tried again later |

Screening on a kept call, in the background, keeps plans off live calls that take more than twice as long: they have to win while
nobody calls. It accepts nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.base.settings import Settings
from hotfuse.compile.workers.background_priority import background_priority
from hotfuse.compile.workers.service import service
from hotfuse.runtime.plans import Plans
from hotfuse.runtime.site import THREADS, Entry
from hotfuse.runtime.tierup.contest import BADLY, PlanContest
from hotfuse.runtime.tierup.lull import POLL_S, Computing, Lull
from hotfuse.runtime.tierup.objective import Race
from hotfuse.runtime.tierup.own_code import decided
from hotfuse.runtime.tierup.race import HALVED, MARGIN, MIN_RACE_ROUNDS, Trial
from hotfuse.specialize.table import PLACED

LIVE_S, MAX_LIVE_S, MIN_ROUNDS = 20.0, 120.0, 8
"""Seconds that live calls have to decide; slow ones have longer, until there are a few rounds."""
RARE_S, RARE_SHARE = 1.0, 0.25
"""Where calls have decided nothing after so many seconds and took no more than such a part of them, they are rare, and other jobs
of the model run while they are awaited: a prompt comes once a text, and the plan for the steps behind it waits to be made."""
SUSPECT_S = 5.0
"""Seconds that what is kept off live calls waits for a pause."""
LONG_S = 0.1
"""Seconds of a call from which on what its proof took is enough to screen by."""
SCREENED_S, SCREENED_ROUNDS = 0.01, 3
"""Seconds of a call from which on so many calls of a proof are enough: the first one warms both up, and others show that."""
WAIT_S = 0.02
"""Between two looks at whether calls pause."""
PAUSE_S = 0.5
"""Longest wait for another pause between two rounds beside."""
BASELINE_S = 2.0
"""Seconds that the race between tier 0 and the model's own code may go on when a better plan waits for it."""
BASELINE_ROUNDS = MIN_RACE_ROUNDS
"""Rounds of that race after which a better plan waits no longer. Two that are equally fast would never be told apart, and it makes
no difference then which of them the better plan has to beat."""


@dataclass(frozen=True, slots=True)
class Judge:
    """Decides for the plans of one model; in the background."""

    plans: Plans

    def between(
        self, entry: Entry, contest: PlanContest, begin: Callable[[PlanContest], bool], in_background: Race,
        old: Callable[..., Any], new: Callable[..., Any], call: Sequence[torch.Tensor], budget_s: float, lull: Lull,
        seen: Sequence[tuple[float, float]] = (), **how: Any,
    ) -> Trial:
        """A race as `runtime.tierup.objective` wants one. `begin` opens the contest unless the model changed; `in_background` is
        the race for when nobody calls; `seen` are seconds that both took on calls beside. Another clock than wall time (`how`) is
        of the whole process, which live calls share.
        """
        found = Trial(0.0, 0.0, 0, won=False, decided=False, by="nothing: calls never paused")
        # what a device replays is recorded by calls, not beside (`backends.cuda`)
        here = PLACED not in contest.new.layers and not any(t.is_cuda for t in call)
        live = "clock" not in how and not (here and self._badly(entry, contest, screen(old, new, call, seen, lull.computing)))
        handicap, begun = _handicap(entry, contest), time.monotonic()
        while not self.plans.closed and not _late(contest, begun, live=live):
            if here and lull.lasts():
                lull.disturbed = 0
                with served_threads(entry, self.plans.settings):
                    found = in_background(old, new, call, budget_s, pause=lambda _spent: self._pause(lull),
                                   undisturbed=lull.undisturbed, handicap=handicap, **how)  # fmt: skip
                found = replace(found, by="rounds while nobody called")
                if found.decided or not lull.disturbed:
                    return self._doubted(entry, found, handicap)
            elif not live:
                with background_priority.waiting():
                    time.sleep(POLL_S)
            elif not begin(contest) or not self._on_calls(entry, contest, lull, begun):
                return replace(found, by="nothing: the model changed meanwhile")
            elif contest.trial is not None:
                return contest.trial
        return contest.give_up() if contest.rounds else found

    def _on_calls(self, entry: Entry, contest: PlanContest, lull: Lull, begun: float) -> bool:
        """Have calls decide until they pause or it is late; False where what serves was exchanged meanwhile."""
        rare = (
            not self._await_calls(entry, contest, lull, begun, time.monotonic() + RARE_S)
            and contest.answered_s < RARE_SHARE * RARE_S
        )
        with service().others_meanwhile() if rare else nullcontext():
            self._await_calls(entry, contest, lull, begun, float("inf"))
            same = entry.contest is contest or contest.trial is not None
            entry.close(contest)
        return same

    def _await_calls(self, entry: Entry, contest: PlanContest, lull: Lull, begun: float, until: float) -> bool:
        """Until calls have decided, pause, or have had their time; False where nothing of that came by `until`."""
        while not _decided_soon(contest) and entry.contest is contest:
            if self.plans.closed or lull.lasts() or _late(contest, begun, live=True):
                break
            if time.monotonic() >= until:
                return False
        return True

    def _pause(self, lull: Lull) -> None:
        if self.plans.settings.capture != "inline":
            lull.await_one(PAUSE_S)

    def _badly(self, entry: Entry, contest: PlanContest, took: tuple[float, float]) -> bool:
        """Whether the new one seems to take more than twice as long as what answers calls.

        Where it does so only beside the model's own code, the ratio of that to tier 0 is all that speaks against it. A few rounds
        under load, or tier 0's first calls of their sizes, get that ten times wrong: calls show it once more before it is believed.
        """
        old, new = took
        if new > BADLY * old or not contest.own:
            return new > BADLY * old
        if new > BADLY * _handicap(entry, contest) * old and entry.contest is None:
            again = PlanContest(entry.baseline, entry.baseline, own=True)
            entry.open(again)
            self._show(entry, again)
            entry.close(again)
            entry.own_ratio = again.ratio or entry.own_ratio
        return new > BADLY * _handicap(entry, contest) * old

    def _doubted(self, entry: Entry, found: Trial, handicap: float) -> Trial:
        """What rounds while nobody called found; undecided where all that speaks against the new one is the ratio of the model's
        own code to tier 0. That was not among these rounds, and a few calls on a busy machine may have got it ten times wrong:
        calls decide it once more, and what they say then is believed.
        """
        if found.won or not found.new_us < MARGIN * found.old_us / handicap or entry.own_doubted or entry.contest is not None:
            return found
        entry.own_doubted = True
        entry.open(PlanContest(entry.baseline, entry.baseline, own=True))
        return replace(found, decided=False)

    def baseline(self, entry: Entry, seen: Sequence[tuple[float, float]] = ()) -> None:
        """A plan that must beat the better of tier 0 and the model's own code waits until calls have shown which that is. Where it
        takes less than half of tier 0's time on calls that take long, it makes no difference which of them that is.
        """
        contest = entry.contest
        if contest is None or contest.new is not entry.baseline:
            return
        if not seen or any(new < LONG_S or new > HALVED * old for old, new in seen):
            self._show(entry, contest)
        if entry.contest is contest and contest.trial is None:
            decided(entry, contest, contest.give_up(), self.plans.log, self.plans.model.name)

    def _show(self, entry: Entry, contest: PlanContest) -> None:
        """Until calls have shown something of tier 0 and the model's own code, pause, or have had their time."""
        lull, until = Lull(), time.monotonic() + BASELINE_S
        while entry.contest is contest and not self.plans.closed:
            enough = contest.rounds >= BASELINE_ROUNDS or _decided_soon(contest)
            if enough or lull.lasts() or time.monotonic() >= until:
                break


def _decided_soon(contest: PlanContest) -> bool:
    """Whether calls have decided, after a short wait."""
    with background_priority.waiting():
        return contest.over.wait(WAIT_S)


def _late(contest: PlanContest, begun: float, *, live: bool) -> bool:
    """Whether calls have had their time."""
    gone = time.monotonic() - begun
    return gone >= (SUSPECT_S if not live else MAX_LIVE_S if contest.rounds < MIN_ROUNDS else LIVE_S)


def _handicap(entry: Entry, contest: PlanContest) -> float:
    """The part of tier 0's time in which the model's own code answers, where that is what has to be beaten."""
    return min(1.0, entry.own_ratio or 1.0) if contest.own else 1.0


def screen(
    old: Callable[..., Any], new: Callable[..., Any], call: Sequence[torch.Tensor], seen: Sequence[tuple[float, float]],
    computing: Computing = nullcontext,
) -> tuple[float, float]:  # fmt: skip
    """Seconds of both, beside whatever goes on: each has run before. Calls that take long need not run once more to show it."""
    took = [min((s[side] for s in seen), default=float("inf")) for side in (0, 1)]
    if seen and max(took) >= (SCREENED_S if len(seen) >= SCREENED_ROUNDS else LONG_S):
        return took[0], took[1]
    took = [float("inf"), float("inf")]
    with torch.no_grad(), computing():
        for side in (0, 1, 1, 0):
            begin = time.perf_counter()
            (old, new)[side](*call)
            took[side] = min(took[side], time.perf_counter() - begin)
    return took[0], took[1]


@contextmanager
def served_threads(entry: Entry, settings: Settings) -> Generator[None]:
    """As many threads of torch's as calls are served with: the background thread may be older than the last change of them."""
    before, wanted = torch.get_num_threads(), entry.stamp[THREADS] if entry.stamp else 0
    if not wanted or wanted == before:
        yield
        return
    torch.set_num_threads(wanted)
    try:
        yield
    finally:
        if settings.threads is not None:  # else it is what the whole process was told
            torch.set_num_threads(before)
