"""Results as JSON lines: one of the run (machine, versions, peaks), then one per case and contender; and comparing two runs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from benchmarks.side.stats import Estimate, estimate, quotient, ratios

OURS = "hotfuse"
MARGIN = 0.03
"""A change smaller than this is nobody's concern, however certain."""

PER_REQUEST = "ms a request"
"""The unit of traffic: all the time a stream took, loading and the first call included, by its requests."""

COLD_S = 5.0
PARTS = {"cold_ms": f"the first {COLD_S:g} s", "warm_ms": "the last third"}
"""Parts of a stream that are told apart, in `Record.extra`: a mean hides how one starts and how fast one gets."""

Status = Literal["ok", "absent", "wrong", "crashed", "late"]


@dataclass(slots=True)
class Record:
    """One contender on one case."""

    suite: str
    case: str
    contender: str
    threads: int
    status: Status = "ok"
    why: str = ""
    """Why there are no times."""
    unit: str = "ms"
    times: list[float] = field(default_factory=list[float])
    """Per round, in milliseconds; none of traffic, which has `extra["calls"]`."""
    time: Estimate | None = None
    ratio: Estimate | None = None
    """Its time over Hotfuse's, round by round: above 1 Hotfuse is faster."""
    error: float | None = None
    """Largest difference from the reference's outputs, relative to the largest output."""
    roofline: float | None = None
    """The least time the machine's measured peaks allow, as a part of what was taken."""
    extra: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def key(self) -> tuple[str, str, str, int]:
        return self.suite, self.case, self.contender, self.threads

    def to_dict(self) -> dict[str, Any]:
        return {"record": "result", **asdict(self)}


def finish(records: Sequence[Record]) -> None:
    """Fill in estimates and ratios of one case's records."""
    for r in records:
        if r.times:
            r.time = estimate(r.times)
    ours = next((r for r in records if r.contender == OURS and r.time is not None), None)
    for r in records:
        if ours is not None and ours.time is not None and r.time is not None:
            r.ratio = ratios(r.times, ours.times) if r.times and ours.times else quotient(r.time, ours.time)


def parts(calls: Sequence[Sequence[float]], seconds: float) -> dict[str, float]:
    """Milliseconds a request, of calls [begin, milliseconds] that began in the first seconds (with loading) and in the last third.

    Somebody whose only call of a part began before it has no figure there; a stream that is hardly longer has no first seconds.
    """
    cold = [ms for begin, ms in calls if begin < COLD_S] if seconds >= 2 * COLD_S else []
    warm = [ms for begin, ms in calls if begin >= seconds * 2 / 3]
    return {name: sum(found) / len(found) for name, found in (("cold_ms", cold), ("warm_ms", warm)) if found}


def part_ratios(records: Iterable[Record], part: str) -> dict[str, float]:
    """Per contender, its time of a part over Hotfuse's: above 1 Hotfuse is faster. Empty where Hotfuse has no figure."""
    found = {r.contender: float(r.extra[part]) for r in records if r.time is not None and part in r.extra}
    return {n: ms / found[OURS] for n, ms in found.items() if n != OURS} if found.get(OURS) else {}


def best(records: Iterable[Record]) -> Record | None:
    """The fastest of the others on one case, by the ratio."""
    others = [r for r in records if not r.contender.startswith(OURS) and r.ratio is not None]
    return min(others, key=lambda r: r.ratio.median if r.ratio else 0.0, default=None)


def cases(records: Iterable[Record]) -> dict[tuple[str, str, int], list[Record]]:
    """Records by case, in the order they came."""
    found: dict[tuple[str, str, int], list[Record]] = {}
    for r in records:
        found.setdefault((r.suite, r.case, r.threads), []).append(r)
    return found


def write(path: Path, run: dict[str, Any], records: Iterable[Record]) -> None:
    """A whole run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for line in ({"record": "run", **run}, *(r.to_dict() for r in records)):
            print(json.dumps(line), file=file)


def read(path: Path) -> tuple[dict[str, Any], list[Record]]:
    """A whole run; damaged lines are the caller's error."""
    run: dict[str, Any] = {}
    found: list[Record] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        data = json.loads(line)
        kind = data.pop("record")
        if kind == "run":
            run = data
            continue
        for name in ("time", "ratio"):
            if data[name] is not None:
                data[name] = Estimate(**data[name])
        found.append(Record(**data))
    return run, found


@dataclass(frozen=True, slots=True)
class Change:
    """How Hotfuse did on a case against an earlier run; above 1 it became slower."""

    case: tuple[str, str, int]
    factor: float
    noise: float
    against: str
    """What both runs are held against, or `time` where nobody else took part in both."""

    @property
    def verdict(self) -> str:
        if self.factor > 1 + max(MARGIN, self.noise):
            return "REGRESSION"
        return "faster" if 1 / self.factor > 1 + max(MARGIN, self.noise) else "same"


def compare(old: Sequence[Record], new: Sequence[Record]) -> list[Change]:
    """Case by case: Hotfuse against the contenders that are in both runs, so that a machine of another mood does not count.

    The noise of a comparison is that of both medians together. Where a case had Hotfuse and has it no more, the factor is
    infinite.
    """
    before, after, out = cases(old), cases(new), list[Change]()
    for case, was in before.items():
        if case not in after:
            continue
        a = {r.contender: r for r in was}
        b = {r.contender: r for r in after[case]}
        if OURS not in a or a[OURS].time is None:
            continue
        if OURS not in b or b[OURS].time is None:
            out.append(Change(case, float("inf"), 0.0, b[OURS].why if OURS in b else "not measured"))
            continue
        shared = [n for n in a if not n.startswith(OURS) and n in b and a[n].ratio is not None and b[n].ratio is not None]
        # The steadiest of the others is the yardstick.
        name = min(shared, key=lambda n: _noise(a[n]) + _noise(b[n]), default="")
        if name:
            x, y = a[name].ratio, b[name].ratio
            assert x is not None and y is not None
            factor, noise = x.median / y.median, x.noise + y.noise
        else:
            t, u = a[OURS].time, b[OURS].time
            assert t is not None and u is not None
            factor, noise = u.median / t.median, t.noise + u.noise
        out.append(Change(case, factor, noise, name or "time"))
    return out


def _noise(r: Record) -> float:
    return r.ratio.noise if r.ratio is not None else float("inf")
