"""A run as people read it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchmarks.side.records import OURS, PARTS, PER_REQUEST, Change, Record, best, cases, part_ratios
from benchmarks.side.stats import Estimate, geomean


def figure(e: Estimate) -> str:
    """A time with its interval."""
    digits = 1 if e.median >= 100 else 2 if e.median >= 10 else 3 if e.median >= 1 else 4
    return f"{e.median:.{digits}f} ms ({e.low:.{digits}f} – {e.high:.{digits}f})"


def case_lines(records: Sequence[Record]) -> list[str]:
    """One case: who took how long, and how many times faster Hotfuse was."""
    first, rival = records[0], best(records)
    ours = next((r for r in records if r.contender == OURS), None)
    verdict = "nothing to compare with"
    if rival is not None and rival.ratio is not None:
        verdict = f"{rival.ratio.median:.2f}x the best of the others ({rival.contender})"
    elif ours is not None and ours.status != "ok":
        verdict = f"hotfuse {ours.status}: {ours.why}"
    out = [f"{first.suite} | {first.case} | threads {first.threads}: {verdict}"]
    for r in records:
        if r.time is None:
            out.append(f"    {r.contender:<18} {r.status}: {r.why}")
            continue
        cells = f"    {r.contender:<18} {figure(r.time):<34}"
        if r.ratio is not None:
            cells += f" {r.ratio.median:6.2f}x ({r.ratio.low:.2f} – {r.ratio.high:.2f})"
        if r.roofline is not None:
            cells += f"  roofline {r.roofline:.0%}"
        if r.unit == PER_REQUEST:
            cells += f"  {r.extra['per_s']:.1f}/s, p99 {r.extra['p99_ms']:.1f} ms, worst {r.extra['worst_ms']:.0f} ms"
            cells += "".join(f"; {_part(r, part, records)} in {words}" for part, words in PARTS.items() if part in r.extra)
        if r.suite == "compile":  # who compiles beside the traffic and who makes it wait
            cells += f"  the longest wait of a call {max(r.extra['first_s'] * 1e3, r.extra['worst_ms']):.0f} ms"
        if not r.extra.get("settled", True):
            cells += "  still compiling"
        if r.error:
            cells += f"  error {r.error:.0e}"
        out.append(cells)
    return out


def _part(r: Record, part: str, records: Sequence[Record]) -> str:
    """A contender's time in a part of a stream, and how many times faster Hotfuse was there."""
    ratio = part_ratios(records, part).get(r.contender)
    return f"{r.extra[part]:.4g} ms" + (f" ({ratio:.2f}x)" if ratio is not None else "")


def _parts(all_of: Sequence[Sequence[Record]]) -> list[str]:
    """How Hotfuse did against the best of the others while everything was new, and once that was over."""
    out: list[str] = []
    for part, words in PARTS.items():
        over_best = {f[0].case: min(found.values()) for f in all_of if (found := part_ratios(f, part))}
        if over_best:
            worst = min(over_best, key=lambda n: over_best[n])
            out.append(f"    in {words}: geomean {geomean(list(over_best.values())):.2f}x the best of the others over "
                       f"{len(over_best)} cases, worst {over_best[worst]:.2f}x ({worst})")  # fmt: skip
    return out


def summary(records: Iterable[Record]) -> list[str]:
    """Geomeans per suite: over the best of the others, and over each of them."""
    grouped: dict[tuple[str, int], list[list[Record]]] = {}
    for (suite, _, threads), found in cases(records).items():
        grouped.setdefault((suite, threads), []).append(found)
    out: list[str] = []
    for (suite, threads), all_of in grouped.items():
        over_best = {f[0].case: b.ratio.median for f in all_of if (b := best(f)) is not None and b.ratio is not None}
        if not over_best:
            out.append(f"{suite}, threads {threads}: nothing to compare")
            continue
        worst = min(over_best, key=lambda n: over_best[n])
        per: dict[str, list[float]] = {}
        for r in (r for f in all_of for r in f):
            if r.ratio is not None and not r.contender.startswith(OURS):
                per.setdefault(r.contender, []).append(r.ratio.median)
        each = ", ".join(f"{n} {geomean(v):.2f}x of {len(v)}" for n, v in per.items())
        out.append(f"{suite}, threads {threads}: geomean {geomean(list(over_best.values())):.2f}x the best of the others over "
                   f"{len(over_best)} of {len(all_of)} cases, worst {over_best[worst]:.2f}x ({worst}); {each}")  # fmt: skip
        out += _parts(all_of)
    return out


def changes(found: Sequence[Change]) -> list[str]:
    """A comparison of two runs."""
    if not found:
        return ["no case is in both runs"]
    return [
        f"{c.verdict:<11} {c.factor:6.3f} of its former time (noise {c.noise:.1%}, against {c.against}): "
        f"{c.case[0]} | {c.case[1]} | threads {c.case[2]}"
        for c in sorted(found, key=lambda c: -c.factor)
    ]
