"""`hotfuse bench`: all suites side by side.

    python -m benchmarks.side [SUITE ...] [--quick] [--threads 1 2] [--contenders a,b] [--cases TEXT] [--rounds N] [--out FILE]
                              [--plots FOLDER] [--compare OLD.jsonl] [--json]

Every contender runs in a process of its own, with the same threads, dtype and inputs; they take turns round by round while the
others are stopped. Outputs are compared before anybody is timed. Who cannot take part, crashes or answers something else is a line
that says so. Cases share a time budget (20 minutes, 3 with --quick) so that each has its part of it: who is not ready in
that time is a line too.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import sys
import time
from collections.abc import Container
from pathlib import Path
from typing import Any

from benchmarks.side import plots, records, report
from benchmarks.side.budget import Purse, need_s, traffic_s
from benchmarks.side.cases import CASES, SUITES, Case
from benchmarks.side.contenders import CONTENDERS
from benchmarks.side.turns import Table
from hotfuse.machine.fingerprint import fingerprint
from hotfuse.machine.peaks import MachinePeaks

QUICK = ("hotfuse", "hotfuse-tier0", "eager", "ort", "openvino")
BUDGET_S, QUICK_BUDGET_S = 1130.0, 150.0
"""For one number of threads; cases share it (`benchmarks.side.budget`)."""
EXIT_REGRESSION = 1


def measured_peaks() -> MachinePeaks | None:
    """The machine's limits, measured now: whatever mood it is in, it is in for the whole run."""
    from hotfuse.backends.llvm.peak_kernels import measure

    return measure()


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("hotfuse", "torch", "onnxruntime", "openvino", "jax", "iree-base-compiler", "apache-tvm", "tinygrad"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def chosen(options: argparse.Namespace) -> list[Case]:
    """Cases in the order of the suites."""
    wanted: list[str] = options.suites or list(SUITES)
    return [c for s in SUITES if s in wanted for c in CASES
            if c.suite == s and (c.quick or not options.quick) and options.cases.lower() in c.name.lower()]


def contenders(options: argparse.Namespace) -> Container[str]:
    """Who may take part: who was asked for, or as many as the time is for."""
    if options.contenders:
        return options.contenders.split(",")
    return QUICK if options.quick else CONTENDERS


def run(options: argparse.Namespace) -> tuple[dict[str, Any], list[records.Record], MachinePeaks | None]:
    """Measure; lines appear as cases end."""
    say = (lambda text: print(text, file=sys.stderr, flush=True)) if options.json else (lambda text: print(text, flush=True))
    begin = time.monotonic()
    budget = options.budget or (QUICK_BUDGET_S if options.quick else BUDGET_S) * len(options.threads)
    rounds, seconds = options.rounds or (7 if options.quick else 11), options.seconds or (14.0 if options.quick else 16.0)
    peaks = None if options.quick else measured_peaks()
    head = {"machine": fingerprint().to_dict(), "versions": versions(), "quick": options.quick, "at": time.time(),
            "peaks": None if peaks is None else peaks.to_dict(), "case_s": []}
    asked, found = contenders(options), list[records.Record]()
    work = [(case, [n for n in case.contenders if n in asked], threads) for threads in options.threads for case in chosen(options)]
    purse = Purse([need_s(case, names, rounds, seconds) for case, names, _ in work], budget - (time.monotonic() - begin))
    for case, names, threads in work:
        started, allowed = time.monotonic(), purse.next()
        length = traffic_s(seconds, allowed, need_s(case, names, rounds, 0.0), len(names)) if case.trace else seconds
        result = Table(case, threads, names, say=say, peaks=peaks, limit_s=allowed, rounds=rounds, seconds=length).measure()
        found += result
        head["case_s"].append({"suite": case.suite, "case": case.name, "threads": threads, "allowed_s": round(allowed, 1),
                               "spent_s": round(time.monotonic() - started, 1)})  # fmt: skip
        say("\n".join(report.case_lines(result)))
    head["seconds"] = time.monotonic() - begin
    return head, found, peaks


def pictures_of(out: Path) -> Path:
    """The folder of pictures for a file of results: its name without the suffix, if it has one."""
    return out.with_suffix("") if out.suffix else out.with_name(f"{out.name}-pictures")


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, write, compare."""
    parser = argparse.ArgumentParser(
        prog="hotfuse bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=", ".join(SUITES) + "; all by default")
    parser.add_argument("--quick", action="store_true", help="few cases and contenders: three minutes")
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--contenders", default="", help="comma-separated: " + ", ".join(CONTENDERS))
    parser.add_argument("--cases", default="", help="only cases whose name holds this text")
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=0.0, help="of traffic, per contender")
    parser.add_argument("--budget", type=float, default=0.0, help="seconds for everything")
    parser.add_argument("--out", type=Path, default=Path("build/bench/latest.jsonl"))
    parser.add_argument("--plots", type=Path, default=None, help="folder for pictures; beside the results by default")
    parser.add_argument("--compare", type=Path, help="an earlier run; a regression beyond noise makes the exit status 1")
    parser.add_argument("--json", action="store_true", help="the last line of output is a JSON summary, and the only one")
    options = parser.parse_args(arguments)
    if unknown := [s for s in options.suites if s not in SUITES]:
        parser.error(f"no suite {unknown[0]!r}; one of {', '.join(SUITES)}")
    if unknown := [n for n in options.contenders.split(",") if n and n not in CONTENDERS]:
        parser.error(f"no contender {unknown[0]!r}; one of {', '.join(CONTENDERS)}")
    earlier = records.read(options.compare)[1] if options.compare else None  # before it may be overwritten
    head, found, peaks = run(options)
    records.write(options.out, head, found)
    lines = ["", *report.summary(found), f"{head['seconds']:.0f} s; written to {options.out}"]
    try:
        pictures = plots.draw(found, peaks, options.plots or pictures_of(options.out))
        lines.append(f"{len(pictures)} pictures in {options.plots or pictures_of(options.out)}")
    except ImportError as e:
        lines.append(f"no pictures: {e} (pip install hotfuse[plots])")
    worse: list[records.Change] = []
    if earlier is not None:
        compared = records.compare(earlier, found)
        worse = [c for c in compared if c.verdict == "REGRESSION"]
        lines += ["", f"against {options.compare}: {len(worse)} regressions", *report.changes(compared)]
    if options.json:
        print(json.dumps({"out": str(options.out), "summary": report.summary(found), "regressions": len(worse)}))
    else:
        print("\n".join(lines), flush=True)
    return EXIT_REGRESSION if worse else 0


if __name__ == "__main__":
    raise SystemExit(main())
