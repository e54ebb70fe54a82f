"""What happened while serving: calls, what was looked at, and figures read off them."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from typing import Any

WINDOW_S = 3.0
TIERS = {
    "module": "the model as it is, operator by operator",
    "0": "tier 0: the captured graph on library kernels",
    "1": "tier 1: fused kernels, compiled beside the traffic",
    "2": "tier 2: fused kernels, specialized to what the traffic showed",
}


@dataclass(frozen=True, slots=True)
class Baseline:
    """What somebody else needs, by kind of line, in milliseconds."""

    name: str
    ms: dict[str, float]


@dataclass(frozen=True, slots=True)
class Served:
    """One call."""

    begin: float
    seconds: float
    kind: str


@dataclass(slots=True)
class Run:
    """A run; times are seconds since it began."""

    seconds: float
    baselines: list[Baseline]
    shift: float
    calls: list[Served] = field(default_factory=list[Served])
    decisions: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    stats: dict[str, Any] = field(default_factory=dict[str, Any])
    serving: dict[str, int] = field(default_factory=dict[str, int])
    """Calls by tier between the last two looks."""
    begun: float = field(default_factory=time.perf_counter)

    def elapsed(self) -> float:
        return time.perf_counter() - self.begun

    def add(self, call: Served) -> None:
        self.calls.append(call)

    def look(self, session: Any) -> None:
        """Counters; and decisions, where the counters say that there are new ones."""
        stats = session.stats()
        if stats["events"] != self.stats.get("events"):
            self.decisions = session.explain().to_dict()["decisions"]
        before: dict[str, int] = self.stats.get("calls_per_tier", {})
        fresh = {tier: n - before.get(tier, 0) for tier, n in stats["calls_per_tier"].items()}
        self.serving = fresh if any(fresh.values()) else self.serving
        self.stats = stats

    def recent(self, begin: float, end: float) -> list[Served]:
        return [c for c in self.calls if begin <= c.begin < end]

    def per_s(self, begin: float, end: float) -> float:
        """Lines a second while calls ran in that time."""
        found = self.recent(begin, end)
        return len(found) / sum(c.seconds for c in found) if found else 0.0

    def against(self, baseline: Baseline, begin: float, end: float) -> float | None:
        """How many times faster than the baseline, on the very kinds of lines that came."""
        found = self.recent(begin, end)
        if not found:
            return None
        return sum(baseline.ms[c.kind] for c in found) / 1e3 / sum(c.seconds for c in found)

    def now(self) -> tuple[float, float]:
        end = self.elapsed()
        return max(0.0, end - WINDOW_S), end

    def tier(self) -> str:
        """What serves, in words."""
        if not self.serving:
            return "starting"
        most = max(self.serving, key=lambda tier: self.serving[tier])
        share = self.serving[most] / sum(self.serving.values())
        return f"{TIERS[most]} ({share:.0%} of the calls)"

    def events(self, last: int) -> list[str]:
        """The latest swaps and refusals, newest last."""
        words = {"deploy": "swapped in", "refuse": "not taken", "drop": "withdrawn", "capture": "captured",
                 "specialize": "specializing"}
        found = [d for d in self.decisions if d["action"] in words]
        return [f"{d['at']:6.1f} s  {words[d['action']]}{_evidence(d['evidence'])}: {d['why']}" for d in found[-last:]]

    def verdict(self) -> str:
        """The run in a few lines."""
        if not self.calls:
            return "no line was read"
        last = max(self.seconds * 0.75, 0.0)
        out = [f"{len(self.calls)} lines read in {self.seconds:g} s; the first answer took {self.calls[0].seconds * 1e3:.0f} ms, "
               f"the slowest {max(c.seconds for c in self.calls) * 1e3:.0f} ms, "
               f"the median {statistics.median(c.seconds for c in self.calls) * 1e3:.1f} ms"]  # fmt: skip
        for b in self.baselines:
            begin, end = self.against(b, 0.0, self.seconds / 10), self.against(b, last, float("inf"))
            if begin is not None and end is not None:
                out.append(f"against {b.name}: {begin:.2f}x at the beginning, {end:.2f}x in the last quarter")
        return "\n".join(out)


def _evidence(found: dict[str, Any]) -> str:
    """What a decision rested on, as far as it fits a line."""
    if "us_before" in found:
        return f" tier {found['tier']}, {found['us_before'] / 1e3:.1f} -> {found['us_after'] / 1e3:.1f} ms a call"
    if "tier" in found:
        return f" tier {found['tier']}"
    if "sizes" in found:
        return f" for {found['sizes']}"
    return ""
