"""The idea in two minutes: a real model starts at once, is watched, compiled beside the traffic and swapped while it serves.

    make demo        or        python examples/demo.py [--seconds 120] [--threads 1] [--out build/demo]

A text recognizer (PP-OCRv4, an ONNX model of 2023) reads lines of print of all widths, one after another. First the same lines go
through ONNX Runtime, and through torch operator by operator, to have something to compare with. Then Hotfuse serves them. Half-way
the traffic changes: the lines get longer. A live view shows what serves, how fast, and what was just swapped in and why. At the end
`explain()` tells everything, and a report with pictures lies in the folder `--out`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for the zoo and the views, which are not installed

import numpy as np
import torch

import hotfuse
from benchmarks import zoo
from benchmarks.show import report
from benchmarks.show.lines import LONG, SHORT, Line, reader, text_lines
from benchmarks.show.run import Baseline, Run, Served
from benchmarks.show.view import Plain, View, live_view
from hotfuse.base.settings import Settings

SHIFT = 0.5
"""After this part of the time the lines get longer."""
BASELINE_S = 4.0

Answer = Callable[[Line], Any]


def say(text: str = "") -> None:
    """Print at once, so that the order on a slow machine is the order of events."""
    print(text, flush=True)


def paced(answer: Answer, lines: list[Line], seconds: float) -> float:
    """Milliseconds a line: every line once to warm up, then in turns for so long."""
    for line in lines[:4]:
        answer(line)
    start, count = time.perf_counter(), 0
    while (taken := time.perf_counter() - start) < seconds or count < 2:
        answer(lines[count % len(lines)])
        count += 1
    return taken * 1e3 / count


def baselines(path: Path, threads: int, seconds: float, pools: dict[str, list[Line]]) -> list[Baseline]:
    """What others need for a short and for a long line, measured before Hotfuse begins."""
    found: list[Baseline] = []
    answers: dict[str, Answer] = {}
    try:
        import onnxruntime
    except ImportError as e:
        say(f"ONNX Runtime is not installed, so it is not compared with: {e}")
    else:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads, options.log_severity_level = threads, 1, 3
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        answers["ONNX Runtime"] = lambda line: session.run(None, {"x": line.image})
    plain = hotfuse.InferenceSession(path, settings=Settings().with_(capture="off", threads=threads))
    answers["torch, op by op"] = lambda line: plain.run(None, {"x": line.image})
    for name, answer in answers.items():
        ms = {kind: paced(answer, pool, seconds) for kind, pool in pools.items()}
        found.append(Baseline(name, ms))
        say(f"  {name}: " + ", ".join(f"{1e3 / v:.0f} {kind} lines a second" for kind, v in ms.items()))
    plain.close()
    return found


def traffic(pools: dict[str, list[Line]], run: Run) -> Iterator[Line]:
    """Seeded: short lines, after half of the time long ones."""
    rng = np.random.default_rng(0)
    while (passed := run.elapsed()) < run.seconds:
        pool = pools[SHORT if passed < SHIFT * run.seconds else LONG]
        yield pool[int(rng.integers(len(pool)))]


def serve(session: Any, pools: dict[str, list[Line]], run: Run, view: View) -> None:
    """Until the time is up; the view is told after every call, and looks when it likes."""
    read = reader(session)
    for line in traffic(pools, run):
        begin = run.elapsed()
        (scores,) = session.run(None, {"x": line.image})
        run.add(Served(begin, run.elapsed() - begin, line.kind))
        if view.due(run):
            run.look(session)
            view.show(run, line.text, read(scores))
    run.look(session)


def main() -> int:
    """The demonstration."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0, help="how long to serve")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("build/demo"))
    parser.add_argument("--plain", action="store_true", help="lines instead of a live view")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    try:
        (path,) = zoo.fetch("ppocr-v4-rec")
        pools = {kind: text_lines(kind) for kind in (SHORT, LONG)}
    except (zoo.ZooUnavailable, ImportError) as e:
        say(f"The demonstration needs its model and Pillow.\n{e}")
        return 2
    say(f"A text recognizer reads {sum(map(len, pools.values()))} lines of print, on {options.threads} thread(s).")
    say("Without Hotfuse:")
    found = baselines(path, options.threads, min(BASELINE_S, options.seconds / 10), pools)
    say(f"\nNow Hotfuse serves the same lines for {options.seconds:g} s. Nothing was prepared: it begins with its first call.")
    session = hotfuse.InferenceSession(path, settings=Settings().with_(threads=options.threads))
    run = Run(options.seconds, found, SHIFT)
    with Plain(say) if options.plain or not sys.stdout.isatty() else live_view() as view:
        serve(session, pools, run, view)
    explanation = session.explain()
    say(f"\n{run.verdict()}")
    say("\nWhat runs now, and every decision that led there (session.explain(full=True)):\n")
    say(explanation.text(full=True))
    say(f"\nreport: {report.write(options.out, run, explanation)}")
    session.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
