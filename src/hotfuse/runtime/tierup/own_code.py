"""The model's own code is the baseline that every tier must beat, tier 0 too: live calls decide between the two.

A graph on library kernels may well be slower than the module it was captured from: one operator that the module calls directly.
Then the own code answers, and everything that a call of ours adds to it is one look-up and a count.
"""

from __future__ import annotations

from hotfuse.base.events import Action, EventLog, Why
from hotfuse.base.settings import Settings
from hotfuse.profile.agent import BUDGET
from hotfuse.runtime.site import Entry, Site
from hotfuse.runtime.tierup.contest import PlanContest
from hotfuse.runtime.tierup.lull import QUIET_S
from hotfuse.runtime.tierup.race import MARGIN, Trial

LONG_S = QUIET_S / 5
"""Calls that take longer are marked as calls under way, which costs nothing beside them."""


def compare(site: Site, entry: Entry, settings: Settings) -> None:
    """Have live calls decide between the model's own code and the baseline, once a captured graph is called often; and once more
    when a plan is found in native code, where the own code won while Python looked for it."""
    if entry.lost_by_dispatch and entry.contest is None and not entry.improving and entry.plan is entry.baseline:
        cache = site.cache(grad_mode=entry.grad_mode)
        if cache is not None and cache.table.native:
            entry.lost_by_dispatch = False
            entry.open(PlanContest(entry.baseline, entry.baseline, own=True))
        return
    recalled = entry.own and entry.improving  # the plan of an earlier process is about to race with the own code
    undecided = entry.own_ratio is None and entry.contest is None and entry.plan is entry.baseline and not recalled
    if undecided and settings.capture == "background" and entry.heat >= settings.hot_calls:
        entry.open(PlanContest(entry.baseline, entry.baseline, own=True))


def decided(entry: Entry, contest: PlanContest, trial: Trial, log: EventLog, name: str) -> None:
    """Calls have decided, or somebody could not wait for them any longer."""
    entry.close(contest)
    if (ratio := contest.ratio) is None:
        return
    entry.own = not (trial.won if trial.decided else trial.new_us < MARGIN * trial.old_us)
    entry.own_ratio = ratio
    seconds, native, _ = entry.dispatch_s
    entry.lost_by_dispatch = entry.own and not native and trial.new_us - seconds * 1e6 < trial.old_us
    action, why = (Action.REFUSE, Why.NOT_FASTER) if entry.own else (Action.KEEP, Why.FASTER)
    log.decide(action, why, name, tier=0, us_before=round(trial.old_us, 1), us_after=round(trial.new_us, 1), rounds=trial.rounds,
               race=trial.by, certain=trial.decided, against="the model's own code")  # fmt: skip


def rest(site: Site, entry: Entry, seconds: float) -> None:
    """After a look: until the next one, calls go straight to the model's own code if nothing of the site is faster than that."""
    calls = entry.next_look - entry.calls - 1
    if calls > 0 and seconds < LONG_S and all(e.own and e.plan is e.baseline and e.contest is None for e in site.entries):
        entry.calls += calls
        site.resting = calls


def later_than_own(entry: Entry, number: int) -> None:
    """A sample and the call it is compared with ran in the baseline: what that takes longer than the own code is paid for, too."""
    slower = max(0.0, 1 / entry.own_ratio - 1) if entry.own_ratio else 0.0
    entry.sampler.at = max(entry.sampler.at, number + int(2 * slower / BUDGET))
