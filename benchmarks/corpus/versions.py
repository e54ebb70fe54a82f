"""Two versions of the source on the same models, in turns: what a change of the whole code did to served calls.

Each version is a process of its own whose `hotfuse` comes from another tree; models, inputs and timing are of this one. Both begin
with empty stores and empty caches, serve the same seconds of calls, and then take turns of equal time with a third: eager, of ONNX
files ONNX Runtime.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.arrays import difference
from benchmarks.corpus.entries import Entry
from benchmarks.side.turns import ROOT, Gone, Process, environment, outputs
from benchmarks.timing import WARM_S

TURN_S, PREPARE_S, ANSWER_S = 0.02, 90.0, 60.0


class VersionRow:
    """One model: the versions' processes and the one that both are held against, one running at a time."""

    def __init__(self, entry: Entry, sources: dict[str, Path], threads: int) -> None:
        self.entry, self.sources, self.threads = entry, sources, threads
        self.processes: dict[str, Process] = {}
        self.other = "eager" if entry.kind == "torch" else "ort"

    def measure(self, seconds: float, behind_s: float, settle_s: float, rounds: int) -> str:
        """A line: milliseconds of each, ratios over eager, when compiled code came, and how far outputs are off the other's."""
        with tempfile.TemporaryDirectory(prefix="hotfuse-versions-") as folder:
            try:
                return self._measure(Path(folder), seconds, behind_s, settle_s, rounds)
            except Gone as e:
                return f"{self.entry.name:<20} {e}"
            finally:
                for process in self.processes.values():
                    process.close()

    def _start(self, name: str, folder: Path) -> Process:
        own = folder / name
        own.mkdir()
        env = environment(self.threads, own) | {"HOTFUSE_CACHE_DIR": str(own)}
        source = self.sources.get(name)
        env["PYTHONPATH"] = os.pathsep.join(str(p) for p in (source, ROOT) if p is not None)
        who = "hotfuse" if source is not None else name
        command = [sys.executable, "-m", "benchmarks.corpus.child", "--model", self.entry.name, "--who", who,
                   "--threads", str(self.threads), "--folder", str(own)]  # fmt: skip
        return Process(command, env)

    def _ask(self, name: str, **command: Any) -> dict[str, Any]:
        answer = self.processes[name].ask(ANSWER_S, **command)
        if "absent" in answer:
            raise Gone(f"{name}, {command['do']}: {answer['absent']}")
        return answer

    def _measure(self, folder: Path, seconds: float, behind_s: float, settle_s: float, rounds: int) -> str:
        names = [*self.sources, self.other]
        for name in names:
            self.processes[name] = self._start(name, folder)
            self.processes[name].begin(do="prepare")
        for name in names:
            if "absent" in (answer := self.processes[name].answer(PREPARE_S)):
                raise Gone(f"{name}: {answer['absent']}")
        compiled: dict[str, float | None] = {}
        for name in names:
            self._ask(name, do="load")
            served = self._ask(name, do="serve", seconds=seconds if name in self.sources else 0.5, behind_s=behind_s)
            compiled[name] = min((s for t, s in served["tiers_s"].items() if t in ("1", "2")), default=None)
            if name in self.sources:
                self._ask(name, do="settle", seconds=settle_s)
        times: dict[str, list[float]] = {name: [] for name in names}
        for i in range(rounds + 1):  # the first round does not count
            for name in names if i % 2 else reversed(names):
                taken = self._ask(name, do="burst", warm_s=WARM_S, turn_s=TURN_S)["seconds"]
                if i:
                    times[name].append(taken)
        want = outputs(self._ask(self.other, do="about")["outputs"])
        told = [f"{self.entry.name:<20} {self.other} {statistics.median(times[self.other]) * 1e3:9.4f} ms"]
        for name in self.sources:
            ratio = statistics.median(e / t for e, t in zip(times[self.other], times[name], strict=True))
            error = difference(outputs(self._ask(name, do="about")["outputs"]), want)
            came = f"{compiled[name]:.1f} s" if compiled[name] is not None else "none"
            told.append(f"{name} {statistics.median(times[name]) * 1e3:9.4f} ms {ratio:5.2f}x (compiled {came}, off {error:.0e})")
        return " · ".join(told)
