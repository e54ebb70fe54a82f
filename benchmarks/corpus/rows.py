"""A row a model and number of threads, as a JSON line; and what many of them come to."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from benchmarks.corpus.causes import kind_of

OURS = "hotfuse"
Status = Literal["ok", "wrong", "absent", "crashed", "late"]
COLD_S = 5.0


@dataclass(slots=True)
class Row:
    """What one model's run gave."""

    model: str
    family: str
    kind: str
    threads: int
    seconds: float = 0.0
    status: Status = "ok"
    why: str = ""
    ms: dict[str, float] = field(default_factory=dict[str, float])
    """Median milliseconds a call, in turns."""
    ratios: dict[str, float] = field(default_factory=dict[str, float])
    """Each one's time over ours, round by round."""
    absent: dict[str, str] = field(default_factory=dict[str, str])
    errors: dict[str, float] = field(default_factory=dict[str, float])
    """Of everybody, against float64 where the model has torch code; else against ONNX Runtime without optimizations."""
    float64: bool = False
    tier: int | None = None
    tiers_s: dict[str, float] = field(default_factory=dict[str, float])
    """Seconds from the beginning of loading until a tier answered first."""
    best_s: float | None = None
    settled_s: float | None = None
    """Seconds without calls, behind the traffic, until nothing was being compiled; None where nobody waited, or in vain."""
    first_ms: dict[str, float] = field(default_factory=dict[str, float])
    load_s: dict[str, float] = field(default_factory=dict[str, float])
    worst_ms: float | None = None
    cold_calls: int = 0
    """Ours in the first five seconds, loading included."""
    grown: dict[str, int] = field(default_factory=dict[str, int])
    causes: list[str] = field(default_factory=list[str])
    measured_with: str = ""

    @property
    def best(self) -> tuple[str, float] | None:
        """The fastest of the others, and its time over ours."""
        others = {n: r for n, r in self.ratios.items() if n != OURS}
        return min(others.items(), key=lambda pair: pair[1]) if others else None

    @property
    def tier1_s(self) -> float | None:
        """Until tier 1 or a higher one answered."""
        return min((s for t, s in self.tiers_s.items() if t in ("1", "2")), default=None)

    @property
    def cold(self) -> float | None:
        """Our calls in the first five seconds over those of ONNX Runtime, whose calls take as long from the first to the last."""
        if "ort" not in self.ms or "ort" not in self.load_s:
            return None
        theirs = max(0.0, COLD_S - self.load_s["ort"] - self.first_ms["ort"] / 1e3) * 1e3 / self.ms["ort"] + 1
        return self.cold_calls / theirs

    @property
    def lost_ms(self) -> float:
        """How much longer a call takes than the best of the others'."""
        found = self.best
        return self.ms[OURS] * (1 - found[1]) if found and found[1] < 1 and OURS in self.ms else 0.0

    def line(self) -> str:
        """For the terminal."""
        if self.status not in ("ok", "wrong"):
            return f"{self.model:<32} {self.threads}  {self.status}: {self.why}"
        best = f"{self.best[1]:5.2f}x {self.best[0]}" if self.best else "no peer"
        timed = f"{self.ms[OURS]:9.3f} ms {best:<16}" if OURS in self.ms else "not timed"
        tier1 = f"tier 1 after {self.tier1_s:.1f} s" if self.tier1_s is not None else "never tier 1"
        parts = [timed, tier1, f"error {self.errors.get(OURS, math.nan):.0e}"]
        grown = {n: f"{b / 1e6:.0f}" for n, b in self.grown.items()}
        parts.append(f"grown {grown} MB")
        why = f"  [{self.causes[0]}]" if self.causes and (self.lost_ms or self.tier1_s is None) else ""
        wrong = f"  WRONG: {self.why}" if self.status == "wrong" else ""
        return f"{self.model:<32} {self.threads}  {', '.join(parts)}{why}{wrong}"


def read(path: Path) -> list[Row]:
    """All rows of a file; of the same model and threads the last one counts. A torn last line is a row that is not there."""
    found: dict[tuple[str, int], Row] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            row = Row(**json.loads(line))
        except json.JSONDecodeError:
            continue
        found[row.model, row.threads] = row
    return list(found.values())


def append(path: Path, row: Row) -> None:
    """One line more."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        print(json.dumps(asdict(row)), file=file)


def geomean(values: Iterable[float]) -> float:
    several = [v for v in values if v > 0]
    return math.exp(sum(map(math.log, several)) / len(several)) if several else math.nan


def summary(rows: Sequence[Row]) -> list[str]:
    """By family, by cause, and the whole, as Markdown."""
    out: list[str] = []
    for threads in sorted({r.threads for r in rows}):
        of = [r for r in rows if r.threads == threads]
        out += [f"### {threads} thread{'s' if threads > 1 else ''}: {len(of)} models", "", *_whole(of), "", *_families(of), "",
                *_by_cause(of), ""]  # fmt: skip
    return out


def _whole(rows: Sequence[Row]) -> list[str]:
    timed = [r for r in rows if r.best and r.status == "ok"]
    tier1 = sorted(r.tier1_s for r in rows if r.tier1_s is not None)
    never = [r.model for r in rows if r.status in ("ok", "wrong") and r.tier1_s is None]
    worst = min(timed, key=lambda r: r.best[1] if r.best else 0.0, default=None)
    quantized = [r.ratios["ort"] for r in timed if r.family.startswith("int8") and "ort" in r.ratios]
    cold = [c for r in timed if (c := r.cold) is not None]
    grown = [r.grown[OURS] / max(r.grown["ort"], 1) for r in rows if OURS in r.grown and r.grown.get("ort", 0) > 0]
    lines = [
        ("right", f"{sum(r.status == 'ok' for r in rows)} of {len(rows)}; " + ("; ".join(
            f"{r.model}: {r.status}, {r.why}" for r in rows if r.status != "ok") or "all")),
        ("over the best of the others, geomean", f"{geomean(r.best[1] for r in timed if r.best):.2f}× of {len(timed)}"),
        ("worst", f"{worst.best[1]:.2f}× ({worst.model})" if worst and worst.best else "–"),
        ("below 0.97×", str(sum(1 for r in timed if r.best and r.best[1] < 0.97))),
        ("int8 over ONNX Runtime: geomean; worst; below 0.95×", f"{geomean(quantized):.2f}×; {min(quantized):.2f}×; "
            f"{sum(q < 0.95 for q in quantized)} of {len(quantized)}" if quantized else "–"),
        ("seconds until tier 1: median; worst", f"{tier1[len(tier1) // 2]:.1f}; {tier1[-1]:.1f}" if tier1 else "–"),
        ("never tier 1 within the traffic", ", ".join(never) or "none"),
        ("first 5 s over ONNX Runtime, geomean", f"{geomean(cold):.2f}×" if cold else "–"),
        ("memory grown over ONNX Runtime's, median", f"{sorted(grown)[len(grown) // 2]:.1f}×" if grown else "–"),
    ]  # fmt: skip
    return ["| measure | |", "| --- | --- |", *(f"| {a} | {b} |" for a, b in lines)]


def _families(rows: Sequence[Row]) -> list[str]:
    out = ["| family | models | geomean | worst | tier 1, s (median) |", "| --- | --- | --- | --- | --- |"]
    for family in sorted({r.family for r in rows}):
        of = [r for r in rows if r.family == family]
        timed = {r.model: r.best[1] for r in of if r.best}
        tier1 = sorted(r.tier1_s for r in of if r.tier1_s is not None)
        worst = min(timed, key=lambda n: timed[n], default="")
        out.append(f"| {family} | {len(of)} | {geomean(timed.values()):.2f}× | "
                   + (f"{timed[worst]:.2f}× {worst}" if worst else "–") + f" | {tier1[len(tier1) // 2]:.1f} |" if tier1 else
                   f"| {family} | {len(of)} | {geomean(timed.values()):.2f}× | {worst} | never |")  # fmt: skip
    return out


def _by_cause(rows: Sequence[Row]) -> list[str]:
    """Lost time is a share of the model's call, so that a slow model is not all that counts."""
    lost: dict[str, list[tuple[float, str]]] = {}
    for r in rows:
        if r.lost_ms and r.causes:
            lost.setdefault(kind_of(r.causes[0]), []).append((r.lost_ms / r.ms[OURS], r.model))
    out = ["| cause of loss | calls' time lost, added up | models |", "| --- | --- | --- |"]
    for cause, several in sorted(lost.items(), key=lambda pair: -sum(s for s, _ in pair[1])):
        names = ", ".join(f"{n} {1 - s:.2f}×" for s, n in sorted(several, reverse=True))
        out.append(f"| {cause} | {sum(s for s, _ in several):.2f} | {names} |")
    return out


def key_of(row: Row) -> tuple[str, int]:
    return row.model, row.threads

