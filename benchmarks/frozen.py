"""Inductor with frozen weights as a contender in a process of its own, which may take its time to compile and no longer.

    python -m benchmarks.frozen --model bert-base --threads 1          reads commands, one JSON object a line; answers likewise

It compiles for minutes, with a C++ compiler, and leaves thread pools behind: in the others' process it would disturb them.
Between its turns the process is stopped.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers import Absent, first_line
from benchmarks.side.turns import Gone, Process, environment, outputs
from benchmarks.timing import burst

LIMIT_S, LATE_S = 600.0, 60.0


class Frozen:
    """The parent's side: what the process answered, and how long its calls take."""

    def __init__(self, model: str, threads: int, *, reduced: bool, limit_s: float = LIMIT_S) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="hotfuse-frozen-")
        folder = Path(self._folder.name)
        command = [
            sys.executable,
            "-m",
            "benchmarks.frozen",
            "--model",
            model,
            "--threads",
            str(threads),
            "--folder",
            str(folder),
        ]
        self._process = Process([*command, *(["--reduced"] if reduced else [])], environment(threads, folder))
        try:
            answer = self._process.ask(limit_s, do="load")
        except Gone as e:
            self.close()
            raise Absent(f"compiling: {e}") from e
        if "absent" in answer:
            self.close()
            raise Absent(answer["absent"])
        self.seconds = float(answer["seconds"])
        self.answered = outputs(answer["outputs"])

    def burst(self, warm_s: float, turn_s: float) -> float:
        """Seconds a call takes, in a turn of this length."""
        try:
            return float(self._process.ask(LATE_S, do="burst", warm_s=warm_s, turn_s=turn_s)["seconds"])
        except Gone as e:
            raise Absent(str(e)) from e

    def close(self) -> None:
        """End the process and forget what it compiled."""
        self._process.close()
        self._folder.cleanup()


class _Child:
    def __init__(self, name: str, folder: Path, *, reduced: bool) -> None:
        from benchmarks import zoo

        self.model, self.folder = zoo.load(name, reduced=reduced), folder
        self.inputs = self.model.inputs(seed=0, variant=self.model.timed)
        self.compiled: Any = None

    def load(self) -> dict[str, Any]:
        import torch
        import torch._inductor.config as config

        from benchmarks.arrays import flat

        if self.model.module is None:
            return {"absent": "an ONNX model has no torch code"}
        config.freezing = True
        start = time.perf_counter()
        self.compiled = torch.compile(self.model.module)
        result = self.compiled(**self.inputs)
        self.compiled(**self.inputs)
        seconds = time.perf_counter() - start
        path = self.folder / "outputs.npz"
        np.savez(path, *flat(result))
        return {"seconds": seconds, "outputs": str(path)}

    def burst(self, warm_s: float, turn_s: float) -> dict[str, Any]:
        return {"seconds": burst(lambda: self.compiled(**self.inputs), warm_s, turn_s)}


def main() -> int:
    """Answer until nobody asks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--reduced", action="store_true")
    options = parser.parse_args()
    import torch

    torch.set_num_threads(options.threads)
    answers, sys.stdout = sys.stdout, sys.stderr  # what libraries print is not an answer
    child: _Child | None = None
    with torch.inference_mode():
        for line in sys.stdin:
            command = json.loads(line)
            try:
                if command["do"] == "load":
                    child = _Child(options.model, options.folder, reduced=options.reduced)
                    answer = child.load()
                else:
                    assert child is not None
                    answer = child.burst(command["warm_s"], command["turn_s"])
            except Exception as e:  # whatever a compiler raises is the reason it takes no part
                answer = {"absent": first_line(e)}
            print(json.dumps(answer), file=answers, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
