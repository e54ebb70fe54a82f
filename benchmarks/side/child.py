"""One contender in a process of its own: commands come as JSON lines, every answer is one JSON line.

    {"do": "prepare"}              import torch, build the model: nobody's merit, not timed
    {"do": "load", "onnx": path, "settle_s": 40}
                                   load, first call, settle for so long at most; answers times and where the outputs lie
    {"do": "round", "ms": 20}      calls for about so long; answers milliseconds a call
    {"do": "serve", "seconds": 2}  goes on with the traffic; answers [begin, milliseconds] of each call
    {"do": "about"}                what served

What libraries print goes to standard error. A process that dies has answered too: its status says how.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.side.cases import Case, Model, find
from benchmarks.side.contenders import CONTENDERS, IMPORTS, Absent, Job, Loaded, export
from benchmarks.side.traffic import Trace
from hotfuse.compile.workers.worker import end_with_parent

REST_S = 0.01
"""At the beginning of a turn, so that nobody's threads are still spinning."""


class Contender:
    """What the commands act on."""

    def __init__(self, case: Case, name: str, threads: int, folder: Path, seconds: float) -> None:
        self.case, self.name, self.threads, self.folder, self.seconds = case, name, threads, folder, seconds
        self.model: Model | None = None
        self.example: Any = None
        self.work: dict[str, Any] = {}
        self.loaded: Loaded | None = None
        self.feed: Any = None
        self.calls_ms = 0.0
        self.trace: Trace | None = None
        self.served_s = 0.0

    def prepare(self) -> dict[str, Any]:
        """Building the model is nobody's merit and not counted; neither is torch's own start."""
        import torch

        torch.set_num_threads(self.threads)
        self.model, self.example = self.case.build(), self.case.feed()
        torch.nn.functional.linear(torch.randn(128, 256), torch.randn(256, 256))
        if self.name == "eager":
            self.work = _work(self.model, self.example)
        return {}

    def load(self, onnx: str | None, settle_s: float) -> dict[str, Any]:
        """Ready to be timed."""
        assert self.model is not None
        file = self.model.path if onnx is None else Path(onnx)
        start = time.perf_counter()
        for module in IMPORTS.get(self.name, ()):
            importlib.import_module(module)
        imported = time.perf_counter() - start
        start = time.perf_counter()
        self.loaded = CONTENDERS[self.name](Job(self.case, self.model, self.example, self.threads, file))
        made = time.perf_counter()
        self.feed = self.loaded.prepare(self.example)
        called = time.perf_counter()
        result = self.loaded.call(self.feed)
        first = time.perf_counter()
        worst, done = 0.0, True

        def call() -> None:
            nonlocal worst
            begin = time.perf_counter()
            self.loaded.call(self.feed)  # type: ignore[union-attr]
            worst = max(worst, time.perf_counter() - begin)

        if self.case.suite == "startup":
            settled = first
        elif not self.case.trace:
            done = self.loaded.settle(call, settle_s)
            settled = time.perf_counter()
            for _ in range(2):
                call()
            start_ms = time.perf_counter()
            result = self.loaded.call(self.feed)
            self.calls_ms = (time.perf_counter() - start_ms) * 1e3
        else:
            settled = first
            self.trace, self.served_s = self.case.traffic(), (made - start) + (first - called)
        outputs = self.folder / f"{self.name}.npz"
        np.savez(outputs, *self.loaded.arrays(result))
        return {"load_s": made - start, "first_s": (made - start) + (first - called), "settled_s": settled - start,
                "settled": done, "worst_ms": worst * 1e3, "import_s": imported, "outputs": str(outputs), **self.work}

    def round(self, ms: float) -> dict[str, Any]:
        """Milliseconds a call."""
        assert self.loaded is not None
        inner = max(1, int(ms / max(self.calls_ms, 1e-3)))
        call, feed = self.loaded.call, self.feed
        time.sleep(REST_S)
        if self.calls_ms < 500:
            call(feed)
        start = time.perf_counter()
        for _ in range(inner):
            call(feed)
        taken = (time.perf_counter() - start) * 1e3 / inner
        self.calls_ms = taken
        return {"ms": taken, "calls": inner}

    def serve(self, seconds: float) -> dict[str, Any]:
        """Requests for so long; pauses count as time, preparing a request does not."""
        assert self.loaded is not None and self.trace is not None
        calls: list[tuple[float, float]] = []
        spent = 0.0
        while spent < seconds:
            request = self.trace.next(min((self.served_s + spent) / self.seconds, 0.999))
            feed = self.loaded.prepare(request.feed)
            if request.pause_s:
                time.sleep(request.pause_s)
            begin = time.perf_counter()
            self.loaded.call(feed)
            taken = time.perf_counter() - begin
            calls.append((self.served_s + spent + request.pause_s, taken * 1e3))
            spent += taken + request.pause_s
        self.served_s += spent
        return {"calls": calls, "spent_s": spent}

    def about(self) -> dict[str, Any]:
        return {} if self.loaded is None else {"about": self.loaded.about()}


def _work(model: Model, example: Any) -> dict[str, Any]:
    """Operations of a call, and the bytes it has to read and write at least: weights, inputs and outputs once."""
    import torch
    from torch.utils import _pytree as pytree
    from torch.utils.flop_counter import FlopCounterMode

    tensors = {n: torch.from_numpy(v) for n, v in example.items()}
    with FlopCounterMode(display=False) as counter:
        result = model.module(**tensors)
    moved = [*model.module.parameters(), *tensors.values(), *pytree.tree_flatten(result)[0]]
    return {"flops": counter.get_total_flops(),
            "bytes": sum(t.numel() * t.element_size() for t in moved if isinstance(t, torch.Tensor))}


def main() -> int:
    """Answer commands until there are none."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", required=True)
    parser.add_argument("--case", required=True)
    parser.add_argument("--contender", required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=10.0)
    options = parser.parse_args()
    end_with_parent()  # it is stopped most of the time, and would stay so if the coordinator were killed
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    case = find(options.suite, options.case)
    one = Contender(case, options.contender, options.threads, options.folder, options.seconds)

    def exported() -> dict[str, Any]:
        return {"path": str(export(case, options.folder))}

    known: dict[str, Callable[..., dict[str, Any]]] = {
        "prepare": one.prepare, "load": one.load, "round": one.round, "serve": one.serve, "about": one.about, "export": exported,
    }  # fmt: skip
    import torch

    with torch.inference_mode():
        for line in sys.stdin:
            command = json.loads(line)
            try:
                gc.collect()
                gc.freeze()  # or each collection would go through all of torch again
                gc.disable()
                answer = known[command.pop("do")](**command)
            except Absent as e:
                answer = {"absent": str(e)}
            except Exception as e:  # whatever goes wrong in a contender is its line in the report
                text = str(e).strip().splitlines()
                answer = {"absent": f"{type(e).__name__}: {text[0] if text else ''}"[:300]}
            finally:
                gc.enable()
            print(json.dumps(answer), file=answers)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
