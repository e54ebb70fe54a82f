"""The coordinator: contenders in processes of their own, one running at a time, the others stopped.

Two thread pools that spin on the same processors measure each other. So every contender (with the workers it started) is a process
group that is stopped outside its turn, rounds go through all of them, and the order turns round.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.arrays import difference
from benchmarks.side.budget import LOAD_S, MIN_ROUNDS, Clock, allowance, starts
from benchmarks.side.cases import Case
from benchmarks.side.contenders import PACKAGES
from benchmarks.side.records import PER_REQUEST, Record, finish, parts
from benchmarks.side.stats import of_blocks
from hotfuse.machine.peaks import MachinePeaks

RTOL = 1e-4
TURN_MS = 20.0
ANSWER_S = 60.0
SETTLING = 0.85
"""Of the time to get ready, for what compiles beside calls: the calls themselves have to end too."""
ROOT = Path(__file__).resolve().parents[2]
Say = Callable[[str], None]


class Gone(Exception):
    """A contender's process ended."""


class Late(Gone):
    """It does not answer in the time it was given; it is ended."""


class Process:
    """One contender; started stopped-able, that is, as a group of its own."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115  (read when the process has ended)
        self.child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True,
                                      cwd=ROOT, env=dict(env), start_new_session=True)

    def ask(self, limit_s: float, **command: Any) -> dict[str, Any]:
        """One command, one answer; the process runs meanwhile and is stopped afterwards."""
        self.begin(**command)
        return self.answer(limit_s)

    def begin(self, **command: Any) -> None:
        """Give a command; the process runs until its answer is taken."""
        assert self.child.stdin is not None
        self._signal(signal.SIGCONT)
        try:
            self.child.stdin.write(json.dumps(command) + "\n")
            self.child.stdin.flush()
        except BrokenPipeError as e:
            raise Gone(self.ended()) from e

    def answer(self, limit_s: float) -> dict[str, Any]:
        """The answer to the command before; the process is stopped afterwards."""
        assert self.child.stdout is not None
        ready, _, _ = select.select([self.child.stdout], [], [], limit_s)
        if not ready:
            self.close()
            raise Late(f"no answer after {limit_s:.0f} s")
        line = self.child.stdout.readline()
        if not line:
            raise Gone(self.ended())
        self._signal(signal.SIGSTOP)
        return json.loads(line)

    def ended(self) -> str:
        """How the process ended, in words, with the last line it wrote."""
        status = self.child.wait(30)
        how = f"died of {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        self.errors.seek(0)
        said = self.errors.read().decode(errors="replace").strip().splitlines()
        return how + (f": {said[-1][:200]}" if said else "")

    def close(self) -> None:
        """End the group, whatever it does."""
        self._signal(signal.SIGCONT)
        self._signal(signal.SIGKILL)
        self.child.wait(30)
        for pipe in (self.child.stdin, self.child.stdout):
            if pipe is not None:
                pipe.close()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # gone already, with all its children
            os.killpg(self.child.pid, number)


def environment(threads: int, folder: Path) -> dict[str, str]:
    """The same for everybody; nobody finds what an earlier run compiled."""
    number = str(threads)
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TVM_NUM_THREADS")
    return {**os.environ, **dict.fromkeys(names, number), "PYTHONWARNINGS": "ignore", "TOKENIZERS_PARALLELISM": "false",
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "HOTFUSE_PROFILES": str(folder / "profiles.sqlite"),
            "HOTFUSE_CACHE": str(folder / "code"),
            "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3",
            "XLA_FLAGS": f"--xla_cpu_multi_thread_eigen={'true' if threads > 1 else 'false'}"}


def missing(contender: str) -> str:
    """Why a contender cannot be here at all, or nothing."""
    package = PACKAGES.get(contender)
    if package is not None:
        try:
            importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return f"{package} is not installed"
    return ""


def outputs(path: str) -> list[np.ndarray[Any, Any]]:
    with np.load(path) as found:
        return [found[name] for name in found.files]


class Table:
    """One case: its contenders' processes and what became of them."""

    def __init__(self, case: Case, threads: int, contenders: Sequence[str], *, rounds: int, seconds: float, say: Say,
                 peaks: MachinePeaks | None = None, limit_s: float = LOAD_S, clock: Clock = time.monotonic) -> None:  # fmt: skip
        self.case, self.threads, self.rounds, self.seconds, self.say, self.peaks = case, threads, rounds, seconds, say, peaks
        self.records = {n: Record(case.suite, case.name, n, threads) for n in contenders}
        self.processes: dict[str, Process] = {}
        self.answers: dict[str, dict[str, Any]] = {}
        self.onnx: Path | None = None
        self.time = allowance(case, contenders, limit_s, rounds, seconds, clock)

    def measure(self) -> list[Record]:
        """Everything: load, compare, take turns, ask what served."""
        with tempfile.TemporaryDirectory(prefix="hotfuse-bench-") as temporary:
            try:
                self._measure(Path(temporary))
            finally:
                for process in self.processes.values():
                    process.close()
        records = list(self.records.values())
        finish(records)
        self._roofline(records)
        return records

    def _measure(self, folder: Path) -> None:
        exporting = self._exporter(folder)
        if self.case.suite in ("startup", "compile"):
            self._starts(folder, exporting)
            return
        self._prepare(list(self.records), folder)
        self._export(exporting)
        for i, name in enumerate(waiting := list(self.processes)):
            self._load(name, waiting[i + 1 :])
        self._compare()
        (self._serve if self.case.trace else self._rounds)()
        for name in list(self.processes):
            if (answer := self._ask(name, ANSWER_S, do="about")) is not None:
                self.records[name].extra |= answer

    # --- processes

    def _start(self, name: str, folder: Path) -> Process:
        command = [sys.executable, "-m", "benchmarks.side.child", "--suite", self.case.suite, "--case", self.case.name,
                   "--contender", name, "--threads", str(self.threads), "--folder", str(folder), "--seconds", str(self.seconds)]
        return Process(command, environment(self.threads, folder))

    def _exporter(self, folder: Path) -> Process | None:
        """Once for everybody who reads ONNX; beside the others' preparations, which nobody's time counts either."""
        if self.case.kind != "torch" or not set(self.records) & {"ort", "openvino", "iree", "tvm", "tinygrad"}:
            return None
        process = self._start("eager", folder)
        process.begin(do="export")
        return process

    def _export(self, process: Process | None) -> None:
        """The exported file; why there is none is told by those who need it."""
        if process is None:
            return
        try:
            answer = process.answer(self.time.to_prepare(list(self.records)))
            if "path" in answer:
                self.onnx = Path(answer["path"])
            else:
                self.say(f"  no ONNX file of {self.case.name}: {answer['absent']}")
        except Gone as e:
            self.say(f"  no ONNX file of {self.case.name}: {e}")
        finally:
            process.close()

    def _prepare(self, names: Sequence[str], folder: Path) -> None:
        """Processes with torch imported and the model built, side by side: nobody's time counts yet."""
        for name in names:
            if why := missing(name):
                self._out(name, "absent", why)
            else:
                self.processes[name] = self._start(name, folder)
                self.processes[name].begin(do="prepare")
        for name in [n for n in names if n in self.processes]:
            self._took(name, self.time.to_prepare(names))

    def _load(self, name: str, behind: Sequence[str]) -> None:
        """Ready to be timed. Who compiles beside its calls is told when to come as it is; others are ended then."""
        limit = self.time.to_load(name, behind)
        onnx = str(self.onnx) if self.onnx else None
        if (answer := self._ask(name, limit, do="load", onnx=onnx, settle_s=limit * SETTLING)) is not None:
            self.answers[name] = answer
            kept = ("import_s", "load_s", "first_s", "settled_s", "settled", "worst_ms", "flops", "bytes")
            self.records[name].extra |= {k: answer[k] for k in kept if k in answer}

    def _ask(self, name: str, limit_s: float, **command: Any) -> dict[str, Any] | None:
        try:
            self.processes[name].begin(**command)
        except Gone as e:
            self._out(name, "crashed", str(e))
            return None
        return self._took(name, limit_s)

    def _took(self, name: str, limit_s: float) -> dict[str, Any] | None:
        """The answer to what was asked; none, and the contender is out, where it cannot take part or is gone."""
        try:
            answer = self.processes[name].answer(limit_s)
        except Late as e:
            self._out(name, "late", str(e))
            return None
        except Gone as e:
            self._out(name, "crashed", str(e))
            return None
        if "absent" in answer:
            self._out(name, "absent", answer["absent"])
            return None
        return answer

    def _out(self, name: str, status: Any, why: str) -> None:
        record = self.records[name]
        record.status, record.why, record.times = status, why, []
        self.say(f"  {name}: {status}: {why}")
        if (process := self.processes.pop(name, None)) is not None:
            process.close()

    # --- comparing and timing

    def _compare(self) -> None:
        """Outputs against the reference's; who answers something else is not timed."""
        order = ("eager", "ort", "openvino", *self.answers)
        reference = next((n for n in order if n in self.processes and n in self.answers), None)
        if reference is None:
            return
        want = outputs(self.answers[reference]["outputs"])
        for name in list(self.processes):
            error = difference(outputs(self.answers[name]["outputs"]), want)
            self.records[name].error = error if np.isfinite(error) else None
            if not error <= RTOL:
                self._out(name, "wrong", f"answers differ from {reference}'s by {error:.1e}")

    def _rounds(self) -> None:
        i, began, last_s = 0, self.time.clock(), 0.0
        while i <= self.rounds and self.time.another(i - 1, MIN_ROUNDS, last_s):
            names = list(self.processes)
            for name in names if i % 2 else reversed(names):
                answer = self._ask(name, ANSWER_S, do="round", ms=TURN_MS)
                if answer is not None and i:  # the first round wakes everybody up
                    self.records[name].times.append(answer["ms"])
            i, began, last_s = i + 1, (now := self.time.clock()), now - began

    def _serve(self) -> None:
        """Slices of traffic in turns. Loading and the first call are part of the serving time: a user waits for them."""
        slice_s = min(2.0, self.seconds / 4)
        served = {n: self.answers[n]["first_s"] for n in self.processes}
        for name, first in served.items():
            self.records[name].extra["calls"] = [[0.0, first * 1e3]]
        while any(served[n] < self.seconds for n in self.processes):
            for name in list(self.processes):
                if served[name] >= self.seconds:
                    continue
                answer = self._ask(name, LOAD_S, do="serve", seconds=min(slice_s, self.seconds - served[name]))
                if answer is None:
                    continue
                served[name] += answer["spent_s"]
                self.records[name].extra["calls"].extend(answer["calls"])
        for name in self.processes:
            record = self.records[name]
            taken = [ms for _, ms in record.extra["calls"]]
            record.unit, record.time = PER_REQUEST, of_blocks(taken)
            record.extra |= parts(record.extra["calls"], self.seconds)
            record.extra |= {"stream_s": self.seconds, "requests": len(taken), "per_s": 1e3 * len(taken) / sum(taken),
                             "worst_ms": max(taken),
                             "p50_ms": float(np.quantile(taken, 0.5)), "p99_ms": float(np.quantile(taken, 0.99))}

    def _starts(self, folder: Path, exporting: Process | None) -> None:
        """First results, or the time until the best serves: every sample is a fresh process with nothing kept."""
        figure = "first_s" if self.case.suite == "startup" else "settled_s"
        i, began, last_s = 0, self.time.clock(), 0.0
        while i < starts(self.rounds) and self.time.another(i, 1, last_s):
            fresh = folder / f"{i}"
            fresh.mkdir(exist_ok=True)
            self._prepare([n for n, record in self.records.items() if record.status == "ok"], fresh)
            if i == 0:
                self._export(exporting)
            for j, name in enumerate(waiting := list(self.processes)):
                self._load(name, waiting[j + 1 :])
                if name in self.processes and figure == "settled_s" and not self.answers[name].get("settled", True):
                    self._out(name, "late", f"still compiling after {self.answers[name]['settled_s']:.0f} s")
                elif name in self.processes:
                    self.records[name].times.append(self.answers[name][figure] * 1e3)
                    self.processes.pop(name).close()
            i, began, last_s = i + 1, (now := self.time.clock()), now - began

    def _roofline(self, records: Sequence[Record]) -> None:
        work = next((r.extra for r in records if "flops" in r.extra), None)
        if work is None or self.peaks is None or self.case.suite not in ("kernels", "models"):
            return
        least = roof_ms(self.peaks, work["flops"], work["bytes"], self.threads)
        for r in records:
            if r.time is not None and least is not None:
                r.roofline = least / r.time.median


def roof_ms(peaks: MachinePeaks, flops: float, moved: float, threads: int) -> float | None:
    """The least time for so many operations and bytes: bytes come from the smallest level that holds them all."""
    rate = peaks.rate("f32", threads)
    sizes = {b.level: b.bytes for b in peaks.bandwidths if b.direction == "read" and b.threads == threads}
    level = next((n for n in ("L1", "L2", "L3") if n in sizes and moved <= sizes[n]), "memory")
    width = peaks.bandwidth(level, "read", threads)
    if not rate or not width:
        return None
    return max(flops / rate, moved / width) * 1e3
