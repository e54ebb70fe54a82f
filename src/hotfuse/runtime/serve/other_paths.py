"""Calls that take another path through a model's code than its graph has: what they cost, and when not to try.

A call that takes a path which nobody traced computes the graph in vain, and the model's own code answers it (decision 160). Whether
that pays is counted: `n` calls of which `missed` did so are served in `n * plan + missed * (own + lost)` seconds, against `n * own`
without a graph. `lost` is what passes between the check that failed and the own code: an exception takes longer than small graphs.
Where that is more, the model's own code answers for a while, twice as long each time.

While the model's own code answers because it is faster, nobody sees which path calls take. Then kept calls show it before plans are
proven on them (`PathBalance.vetted`), and a few calls that are looked at are recorded, to find one of another path.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from hotfuse.backends.protocol import Run
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.frontends.paths.reads import TRUTH, WHOLE, Path
from hotfuse.machine.device_stream import in_own_stream

WINDOW = 32
"""Calls that are weighed together."""
MAX_DOUBLED = 6
MIN_ANSWERED = 1 / 8
"""Part of its first calls that a graph answers at least, if its paths are some of few."""
FIRST_MISSES, MIN_PART = 3, 1 / 16
"""Misses, and which part of the calls of late, from which on a further path is worth a capture."""
NOTHING = nullcontext()
RECORDED_CALLS = 16
"""Calls that are recorded to find one of another path, where kept calls took one: one in `1 / MIN_PART` does."""


@dataclass(slots=True)
class PathBalance:
    """The balance of one entry. Takes no lock: a lost update moves one rest."""

    traced: int = 1
    """That the graph has."""
    paths: tuple[Path, ...] = ()
    """Them, as a process recorded them: a further path is traced together with these."""
    missed: int = 0
    """Calls that took another one, in all."""
    rested: int = 0
    """Calls that the model's own code answered because that is better."""
    begin: int = 0
    """The call that the window begins with."""
    in_window: int = 0
    own_s: float = 0.0
    """What the model's own code took for those, in all."""
    lost_s: float = 0.0
    """And what passed for them beside the graph and the own code."""
    doubled: int = 0
    want_at: int = FIRST_MISSES
    """Misses from which on the next further path is asked for."""
    latest: tuple[int, ...] = ()
    """The calls that missed last."""
    weighed: bool = False
    """Whether it was asked how many of its first calls the graph answered."""
    unmet: int = 0
    """Calls that are still to be recorded because kept ones took another path."""

    def miss(self, calls: int, own_s: float, plan_s: float, lost_s: float) -> int:
        """A call took another path, the model's own code `own_s`, and getting there `lost_s`; a call in the plan takes `plan_s`.
        How many calls the model's own code is to answer from here on."""
        self.missed += 1
        self.latest = (*self.latest[1 - FIRST_MISSES :], calls)
        self.in_window += 1
        self.own_s += own_s
        self.lost_s += lost_s
        count = calls - self.begin
        if count < WINDOW and self.in_window < WINDOW // 2:
            return 0
        each = self.own_s / self.in_window
        pays = count * plan_s + self.own_s + self.lost_s < count * each
        self.begin, self.in_window, self.own_s, self.lost_s = calls, 0, 0.0, 0.0
        if pays:
            self.doubled = 0
            return 0
        rest = WINDOW << self.doubled
        self.doubled = min(self.doubled + 1, MAX_DOUBLED)
        self.rested += rest
        return rest

    def wants_another(self, calls: int) -> bool:
        """Whether another path should be captured: at the third miss, the sixth, ... where they are not rare. Asked of calls that
        no plan was tried for, they would always seem rare: how close the latest ones are is what counts."""
        return self.missed >= self.want_at and MIN_PART * (calls - self.latest[0]) <= FIRST_MISSES

    def answered_hardly_any(self, calls: int) -> bool:
        """Whether nearly all of so many calls took another path."""
        return calls - self.missed < MIN_ANSWERED * calls

    def asked(self) -> None:
        """Another path is being captured: the next one after twice as many misses."""
        self.want_at, self.unmet = 2 * max(self.missed, self.want_at), 0

    def vetted(self, fit: int, strayed: int) -> None:
        """Note how many kept calls that the model's own code answered take a path that the graph has, and how many another one."""
        if strayed >= MIN_PART * (fit + strayed) and strayed:
            self.unmet = RECORDED_CALLS

    def has(self, path: Path) -> bool | None:
        """Whether the graph has the path of a call that read this; None where only what was asked of the numbers tells."""
        if any(p == path for p in self.paths):
            return True
        return None if not self.paths or any(_decided_alike(p, path) for p in self.paths) else False

    def text(self, calls: int) -> str:
        """What became of it, for `explain()`; empty where every call took a path that the graph has."""
        if not self.missed:
            return ""
        rested = f", {self.rested} more were not tried, since that would have cost more than it saved" if self.rested else ""
        return (f"{self.missed} of {calls} calls took another path through code that reads their data than the {self.traced} "
                f"that the graph has, and the model's own code answered them{rested}")  # fmt: skip


def fits(run: Run, inputs: Sequence[torch.Tensor], computing: AbstractContextManager[None] = NOTHING) -> bool:
    """Whether a call takes a path that a graph has: runs it. What sizes that data decide make operators raise counts as another."""
    with torch.no_grad(), in_own_stream(inputs), computing:
        try:
            run(*inputs)
        except Exception:
            return False
    return True


def _decided_alike(a: Path, b: Path) -> bool:
    """Whether two calls read the same but for numbers and sizes that code may have computed with and not decided by."""
    return len(a) == len(b) and all(x == y or (x[0] == y[0] and x[0] not in (TRUTH, WHOLE)) for x, y in zip(a, b, strict=True))
