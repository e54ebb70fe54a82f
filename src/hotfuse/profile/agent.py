"""Which calls are sampled, and what that may cost.

Each captured graph has a `Sampler`, and a call asks one question of it: has the call's number reached `at`? A sample is followed
by a plain call that is only timed: the difference between the two is what the sample cost, all of it, whatever it was spent
on. Then `at` moves on by an interval:

    new, or changed    1 call in 4, doubling after every few samples, up to `watch_rate` (1 in 64)
    slow models        not less than a few samples a second: where a call takes long, few calls are all there are
    fast models        when steady, not more than the analyzer has use for
    in any case        not more than `BUDGET` of the calls' time; a cost that drowns in noise counts by what it may be

The interval varies by a quarter, so that traffic with a period of its own is seen at all its phases.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

DENSE = 4
"""Calls between samples of what is new."""
STEP = 8
"""Samples after which the interval doubles."""
PER_SECOND, MAX_PER_SECOND = 8, 128
"""Samples a second that a slow model gets all the same, while they are cheap; and those that are enough for any."""
BUDGET = 0.005
"""The part of the time that samples may take: half of what is promised, because some costs show elsewhere."""
FREE = 4
"""First samples that are taken before their cost is known."""
MEMORY = 16
"""Samples over which costs and times are averaged."""
_NEVER = 1 << 62


class Sampler:
    """When one captured graph is sampled next. Made for many threads without a lock: a lost update moves one sample."""

    __slots__ = (
        "_compared", "_rate", "_seed", "_spread", "at", "call_ns", "cost_ns", "inside_ns", "interval", "last", "sampled_ns",
        "since", "taken", "total_cost_ns", "total_ns",
    )  # fmt: skip

    def __init__(self, rate: int, seed: int = 1) -> None:
        self._rate = max(1, rate)
        self._seed = seed * 2654435761 % 2**32 | 1
        self.at = DENSE
        """The number of the call that is due next: for a sample, or for comparison with the one before. The first calls decide
        whether a plan is compiled; what sampling needs from the workers comes behind that."""
        self.taken = 0
        self.since = 0
        """Samples since the graph was new or changed."""
        self.interval = DENSE
        self.last = 0
        """The number of the call that was sampled last."""
        self.sampled_ns = 0
        """What the sampled call took that still wants a plain one to compare with; 0 when none does."""
        self._compared = 0
        self._spread = 0.0
        """Variance of what single samples seemed to cost."""
        self.call_ns = 0.0
        """What a call takes without a sample, of late."""
        self.cost_ns = 0.0
        """What a sample costs on top, of late."""
        self.inside_ns = 0.0
        """What of it was seen from inside: the cost is not less."""
        self.total_cost_ns = 0.0
        self.total_ns = 0.0
        """Time of the calls these samples stand for."""

    def took(self, number: int, ns: int, inside_ns: int) -> None:
        """A sample was taken at that call: what the call took in all, and what watching is known to have added."""
        self.taken += 1
        self.since += 1
        if self.taken <= FREE:
            self.inside_ns = inside_ns if self.taken == 1 else min(inside_ns, self.inside_ns)
        else:
            self.inside_ns += (min(inside_ns, 4 * self.inside_ns) - self.inside_ns) / MEMORY
        if not self._compared:
            self.call_ns = max(1, ns - inside_ns)
            self.cost_ns = inside_ns
        self.total_ns += self.call_ns * max(1, number - self.last)
        self.last = number
        self.sampled_ns = ns
        self.at = number + 1

    def compared(self, number: int, ns: int) -> None:
        """The plain call behind a sample took so long."""
        self._compared += 1
        weight = max(1 / MEMORY, 1 / self._compared)
        self.call_ns += weight * (max(1, ns) - self.call_ns) if self._compared > 1 else max(1, ns) - self.call_ns
        cost = self.sampled_ns - ns
        self.total_cost_ns += cost
        if self._compared <= FREE:  # the first samples find everything cold
            self.cost_ns = cost if self._compared == 1 else min(cost, self.cost_ns)
        else:  # what is far off, either way, was the machine's doing: cutting one side only would hide a cost in the noise
            most = max(4 * self.inside_ns, 4 * abs(self.cost_ns), self.call_ns / 4)
            weight = max(1 / MEMORY, 1 / (self._compared - FREE))
            off = max(-most, min(most, cost)) - self.cost_ns
            self.cost_ns += weight * off
            self._spread = (1 - weight) * (self._spread + weight * off * off)
        self.sampled_ns = 0
        self.interval = self._next()
        self.at = number + self._jittered(self.interval)

    def _next(self) -> int:
        wanted = min(self._rate, DENSE << min(16, (self.since - 1) // STEP))
        wanted = max(1, min(wanted, int(1e9 / (PER_SECOND * self.call_ns))))
        if self.since <= FREE:
            return wanted
        unsure = (self._spread / MEMORY) ** 0.5
        paid = int(max(self.inside_ns, self.cost_ns + unsure) / (BUDGET * self.call_ns)) + 1
        steady = self.since > 4 * STEP
        return max(wanted, paid, int(1e9 / (MAX_PER_SECOND * self.call_ns)) if steady else 1)

    def _jittered(self, interval: int) -> int:
        self._seed = (self._seed * 1664525 + 1013904223) % 2**32
        spread = interval // 4
        return interval if not spread else interval - spread + (self._seed >> 8) % (2 * spread + 1)

    def later(self, number: int) -> None:
        """A sample was due and could not be taken yet: the longer that lasts, the less often it is asked for."""
        self.at = number + max(self.interval, min(self._rate, (number - self.last) // 8))

    def changed(self, number: int) -> None:
        """The traffic changed: look closely again, as far as that is affordable."""
        self.since = min(self.since, FREE + 1)  # what a sample costs is known, and the budget holds
        self.interval = self._next() if self.taken else DENSE
        self.at = min(self.at, number + self.interval)

    def off(self) -> None:
        """Nothing is due any more."""
        self.at = _NEVER

    @property
    def overhead(self) -> float:
        """The part of all time that went into watching, as measured."""
        return max(0.0, self.total_cost_ns) / max(1.0, self.total_ns)


class Agent:
    """The samplers of one model, by the key of the captured graph."""

    def __init__(self, rate: int, *, on: bool = True) -> None:
        self._rate = rate
        self.on = on
        self._samplers: dict[int, Sampler] = {}
        self._past = [0.0, 0.0, 0.0]
        self._lock = threading.Lock()

    def sampler(self, key: int) -> Sampler:
        """The sampler of a captured graph; one that is never due when watching is switched off."""
        with self._lock:
            found = self._samplers.get(key)
            if found is None:
                found = self._samplers[key] = Sampler(self._rate, key + 1)
                if not self.on:
                    found.off()
            return found

    def due(self, key: int, number: int) -> bool:
        """Whether that call is sampled; the call path compares with `sampler(key).at` itself."""
        return number >= self.sampler(key).at

    def changed(self, key: int, number: Callable[[], int]) -> None:
        """Drift was signalled."""
        sampler = self._samplers.get(key)
        if sampler is not None and self.on:
            sampler.changed(number())

    def forget(self, key: int) -> None:
        """A captured graph is gone; what it cost still counts."""
        with self._lock:
            if (gone := self._samplers.pop(key, None)) is not None:
                for i, n in enumerate((gone.taken, gone.total_cost_ns, gone.total_ns)):
                    self._past[i] += n

    def off(self) -> None:
        """Take no more samples."""
        self.on = False
        with self._lock:
            for sampler in self._samplers.values():
                sampler.off()

    def after_fork(self) -> None:
        """In a forked child: no more samples, and a lock that nobody holds."""
        self._lock = threading.Lock()
        self.off()

    def stats(self) -> dict[str, int | float]:
        """Counters."""
        with self._lock:
            now = list(self._samplers.values())
        taken = self._past[0] + sum(s.taken for s in now)
        cost = self._past[1] + sum(s.total_cost_ns for s in now)
        total = self._past[2] + sum(s.total_ns for s in now)
        return {"samples": int(taken), "watching_ns": int(cost), "overhead": round(max(0.0, cost) / max(1.0, total), 6)}
