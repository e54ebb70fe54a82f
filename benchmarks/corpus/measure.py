"""One row: all contenders on a model, each in a process of its own, one running at a time and the others stopped."""

from __future__ import annotations

import contextlib
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.arrays import difference
from benchmarks.corpus.causes import causes
from benchmarks.corpus.entries import Entry
from benchmarks.corpus.rows import OURS, Row, Status
from benchmarks.side.turns import Gone, Late, Process, environment, missing, outputs
from benchmarks.timing import WARM_S

PEER_NAMES = ("eager", "inductor", "ort", "openvino")
RTOL = 1e-4
SPREAD = 4.0
"""An answer may be so many times as far off as the worst of the peers: sums in another order differ by that much."""
STEPS = 0.05
"""The same of integer models, relative to the largest output: a value that rounds the other way is a whole step off, and steps
of several layers add up. What is really wrong is off by the outputs' own size.
"""
TURN_S = 0.02
FRESH_SEEDS = (1, 2)
"""Of the inputs that a quick check asks with; calls before had seed 0."""
PREPARE_S, LOAD_S, COMPILE_S, ANSWER_S = 90.0, 60.0, 150.0, 30.0


class Table:
    """The processes of one row."""

    def __init__(self, entry: Entry, threads: int, peers: Sequence[str], seconds: float, rounds: int, *, quick: bool = False,
                 behind_s: float | None = None, settle_s: float = 0.0) -> None:
        self.entry, self.threads, self.seconds, self.rounds, self.quick = entry, threads, seconds, rounds, quick
        self.behind_s, self.settle_s = behind_s, settle_s
        self.peers = [p for p in peers if p not in ("eager", "inductor") or entry.kind == "torch"]
        self.row = Row(entry.name, entry.family, entry.kind, threads, seconds)
        self.processes: dict[str, Process] = {}
        self.answers: dict[str, str] = {}

    def measure(self) -> Row:
        """Whatever happens to a process is part of the row."""
        with tempfile.TemporaryDirectory(prefix="hotfuse-corpus-") as folder:
            try:
                self._measure(Path(folder))
            finally:
                for process in self.processes.values():
                    process.close()
        return self.row

    def _measure(self, folder: Path) -> None:
        names = [OURS, *(p for p in self.peers if not self._missing(p))]
        for name in names:
            self.processes[name] = Process(
                [sys.executable, "-m", "benchmarks.corpus.child", "--model", self.entry.name, "--who", name,
                 "--threads", str(self.threads), "--folder", str(folder)], environment(self.threads, folder))  # fmt: skip
        self._prepare(names)
        for name in [n for n in names if n in self.processes]:
            limit = COMPILE_S if name == "inductor" else LOAD_S
            if (answer := self._ask(name, limit, do="load")) is not None:
                self.row.load_s[name], self.row.first_ms[name] = round(answer["load_s"], 4), round(answer["first_ms"], 3)
                self.answers[name] = answer["outputs"]
                seconds = self.seconds if name == OURS else 0.5
                served = self._ask(name, seconds + LOAD_S, do="serve", seconds=seconds, until_tier1=self.quick,
                                   behind_s=self.behind_s)
                if served is not None:
                    self._served(name, served)
        if OURS not in self.processes:
            return
        if self.quick:
            self._compare_fresh()
        else:
            if self.settle_s and (settled := self._ask(OURS, self.settle_s + LOAD_S, do="settle", seconds=self.settle_s)):
                self.row.settled_s = round(settled["waited_s"], 2) if settled["drained"] else None
            self._compare()
            if self.row.status == "ok":
                self._turns()
                self._compare_fresh()
        self._explained()

    def _prepare(self, names: Sequence[str]) -> None:
        """Side by side, since nobody is timed yet; files one after another: the first makes what the others find."""
        if self.entry.kind == "torch":
            for name in names:
                with contextlib.suppress(Gone):  # its answer, asked for below, says so
                    self.processes[name].begin(do="prepare")
        for name in names:
            if self.entry.kind == "torch":
                self._answer(name, "prepare", lambda process: process.answer(PREPARE_S))
            else:
                self._ask(name, PREPARE_S, do="prepare")

    def _served(self, name: str, served: dict[str, Any]) -> None:
        self.row.grown[name] = served["grown"]
        if name == OURS:
            self.row.tiers_s = {t: round(s, 2) for t, s in served["tiers_s"].items()}
            self.row.best_s, self.row.worst_ms = served["best_s"], round(served["worst_ms"], 3)
            self.row.cold_calls = served["cold_calls"]

    def _missing(self, name: str) -> bool:
        if why := missing(name):
            self.row.absent[name] = why
        return bool(why)

    def _ask(self, name: str, limit_s: float, **command: Any) -> dict[str, Any] | None:
        """The answer; none, and the contender is out, where it cannot take part, is late or died."""
        return self._answer(name, command["do"], lambda process: process.ask(limit_s, **command))

    def _answer(self, name: str, asked: str, take: Callable[[Process], dict[str, Any]]) -> dict[str, Any] | None:
        try:
            answer = take(self.processes[name])
        except Late as e:
            return self._out(name, "late", f"{asked}: {e}")
        except Gone as e:
            return self._out(name, "crashed", f"{asked}: {e}")
        if "absent" in answer:
            return self._out(name, "absent", f"{asked}: {answer['absent']}")
        return answer

    def _out(self, name: str, status: Status, why: str) -> None:
        self.row.absent[name] = f"{status}: {why}"
        if name == OURS:
            self.row.status, self.row.why = status, why
        with contextlib.suppress(KeyError):
            self.processes.pop(name).close()

    def _compare(self) -> None:
        """Everybody against the exact answer; ours may be as far off as the peers are, in order of magnitude."""
        judge = next((n for n in ("eager", "ort") if n in self.processes), None)
        asked = OURS if self.entry.kind == "torch" and judge != "eager" else judge
        exact = self._ask(asked, LOAD_S, do="exact") if asked else None
        about = self._ask(OURS, LOAD_S, do="about")
        if exact is None or about is None:
            return
        self.row.float64 = exact["float64"]
        want = outputs(exact["outputs"])
        for name, path in self.answers.items():
            self.row.errors[name] = difference(list(outputs(path)), list(want))
        first, now = self.row.errors.pop(OURS), difference(list(outputs(about["outputs"])), list(want))
        self.row.errors[OURS] = max(first, now)
        spread = max((e for n, e in self.row.errors.items() if n != OURS and e < float("inf")), default=0.0)
        if not self.row.errors[OURS] <= self._allowed(spread):
            told = f"off by {first:.1e} at first and {now:.1e} at the end, the others by {spread:.1e}"
            self._judged([self.answers[OURS], about["outputs"]], 0, told)

    def _allowed(self, spread: float) -> float:
        return max(RTOL, SPREAD * spread, STEPS if self.entry.family.startswith("int8") else 0.0)

    def _by_definition(self, path: str, inputs: int) -> float | None:
        """How far an answer is off what ONNX's own definitions of the operators give, for inputs of a seed; None where they give
        nothing in time. ONNX Runtime's sigmoid is off by parts of 1, not of the result: 1.14739e-05 for 1.14522e-05.
        """
        if self.entry.kind != "onnx" or self.row.float64:
            return None
        try:
            answer = self.processes[OURS].ask(LOAD_S, do="defined", seed=inputs)
        except (Late, Gone):
            return None
        return None if "absent" in answer else difference(list(outputs(path)), list(outputs(answer["outputs"])))

    def _compare_fresh(self) -> None:
        """Answers to inputs that no plan has seen, held against the library's in the same process."""
        if (answer := self._ask(OURS, 2 * LOAD_S, do="fresh", seeds=list(FRESH_SEEDS))) is None:
            return
        for call in answer["calls"]:
            ours, plain, want = (outputs(call[k]) for k in ("ours", "plain", "outputs"))
            self.row.float64 = call["float64"]
            spread, off = (difference(list(got), list(want)) for got in (plain, ours))
            for name, error in ((OURS, off), ("library", spread)):
                self.row.errors[name] = max(error, self.row.errors.get(name, 0.0))
            if [(o.dtype, o.shape) for o in ours] != [(o.dtype, o.shape) for o in plain]:
                self.row.status, self.row.why = "wrong", "types or sizes of the outputs differ from the library's"
            elif not off <= self._allowed(spread):
                self._judged([call["ours"]], call["seed"], f"off by {off:.1e} on fresh inputs, the library by {spread:.1e}")

    def _judged(self, answers: Sequence[str], seed: int, told: str) -> None:
        """Answers far off ONNX Runtime's are wrong, unless they are what the operators' own definitions give."""
        found = [self._by_definition(path, seed) for path in answers]
        if all(error is not None and error <= RTOL for error in found):
            worst = max(error for error in found if error is not None)
            self.row.why = f"{told}; by ONNX's own definitions of the operators off by {worst:.1e}"
        else:
            self.row.status, self.row.why = "wrong", told

    def _turns(self) -> None:
        """Rounds of equal time; the first does not count."""
        found: dict[str, list[float]] = {}
        for i in range(self.rounds + 1):
            names = list(self.processes)
            for name in names if i % 2 else reversed(names):
                answer = self._ask(name, ANSWER_S, do="burst", warm_s=WARM_S, turn_s=TURN_S)
                if answer is not None and i:
                    found.setdefault(name, []).append(answer["seconds"])
        ours = found.get(OURS)
        for name, times in found.items():
            self.row.ms[name] = round(statistics.median(times) * 1e3, 5)
            if ours and len(ours) == len(times):
                self.row.ratios[name] = round(statistics.median(t / o for t, o in zip(times, ours, strict=True)), 4)

    def _explained(self) -> None:
        if OURS not in self.processes or (about := self._ask(OURS, LOAD_S, do="about")) is None:
            return
        plans = [p for site in about["explained"]["sites"] for p in site["plans"]]
        self.row.tier = max(plans, key=lambda p: p["calls"])["tier"] if plans else None
        self.row.causes = causes(about["explained"])
