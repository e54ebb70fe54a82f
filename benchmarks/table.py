"""Tables of a run of `hotfuse bench`: wins and losses as they came. docs/benchmarks.md is written by `benchmarks.page`.

    python -m benchmarks.table build/bench/latest.jsonl
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.side.records import OURS, PER_REQUEST, Record, best, cases, read
from benchmarks.side.stats import geomean

TITLES = {
    "kernels": "kernels, ms a call", "models": "models in steady state, ms a call", "overhead": "small work, ms a call",
    "startup": "from loading to the first result, ms", "compile": "from loading until the best serves, ms",
    "traffic": "traffic, ms a request, loading and compiling included",
}  # fmt: skip


def cell(record: Record | None) -> str:
    """A ratio over Hotfuse, in bold where Hotfuse lost beyond noise; or why there is none."""
    if record is None:
        return ""
    if record.ratio is None:
        return {"absent": "–", "wrong": "wrong", "crashed": "crashed", "late": "late"}.get(record.status, "–")
    text = f"{record.ratio.median:.2f}×"
    return f"**{text}**" if record.ratio.high < 1 else text


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def suite_lines(suite: str, records: Sequence[Record]) -> list[str]:
    """One table of one suite."""
    names = [n for n in dict.fromkeys(r.contender for r in records if r.ratio is not None) if n != OURS]
    several = len({r.threads for r in records}) > 1
    out = [_row(TITLES[suite], "hotfuse", *names), "| --- " * (len(names) + 2) + "|"]
    over: list[float] = []
    for (_, case, threads), found in cases(records).items():
        by = {r.contender: r for r in found}
        ours = by.get(OURS)
        if ours is None or ours.time is None:
            out.append(_row(case, ours.why if ours else "not measured", *("" for _ in names)))
            continue
        label = case + (f", {threads} threads" if several else "")
        out.append(_row(label, f"{ours.time.median:.3g}", *(cell(by.get(n)) for n in names)))
        rival = best(found)
        if rival is not None and rival.ratio is not None:
            over.append(rival.ratio.median)
    if over:
        out += ["", f"Over the best of the others in each row: geomean {geomean(over):.2f}×, worst {min(over):.2f}×."]
    return out


def render(run: dict[str, Any], records: Sequence[Record]) -> str:
    """All tables, with the machine they are of."""
    tuning, versions = run["machine"]["tuning"], run["versions"]
    packages = ", ".join(f"{n} {v}" for n, v in versions.items() if n != "hotfuse" and v != "not installed")
    lines = [f"{tuning.get('cpu', 'a processor')}, {tuning['usable_cpus']} processors; {packages}. Numbers under a contender say "
             "how many times faster Hotfuse was; bold ones are losses beyond noise.", ""]  # fmt: skip
    for suite in dict.fromkeys(r.suite for r in records):
        lines += [*suite_lines(suite, [r for r in records if r.suite == suite]), ""]
    absent = {f"{r.contender}: {r.why}" for r in records if r.status in ("crashed", "wrong", "late")}
    lines += [f"- {text}" for text in sorted(absent)]
    requests = [r for r in records if r.unit == PER_REQUEST and r.contender == OURS and r.time]
    if requests:
        lines += ["", "Worst request of Hotfuse under traffic: "
                  + ", ".join(f"{r.case} {r.extra['worst_ms']:.0f} ms" for r in requests) + "."]  # fmt: skip
    return "\n".join(lines).strip() + "\n"


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    print(render(*read(parser.parse_args().results)), end="")


if __name__ == "__main__":
    main()
