"""One contender on one model, in a process of its own: commands are JSON lines, every answer is one JSON line.

    {"do": "prepare"}                     import, build the model, its inputs
    {"do": "load"}                        ready for calls; first call; answers seconds and where the outputs lie
    {"do": "serve", "seconds": 8}         calls, one after another; when which tier began (ours), memory grown
    {"do": "settle", "seconds": 25}       no calls until nothing is being compiled, then a second of them
    {"do": "burst", "warm_s": …, "turn_s": …}
    {"do": "about"}                       outputs of now, what serves and what was decided (ours)
    {"do": "exact"}                       outputs in float64 (a torch model's own code), or of ONNX Runtime without optimizations
    {"do": "defined", "seed": 0}          outputs of an ONNX file by ONNX's own definitions of its operators
    {"do": "fresh", "seeds": [1, 2]}      other inputs of the same sizes: outputs of ours, exact ones, and the library's plain ones
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.arrays import flat
from benchmarks.corpus.entries import find
from benchmarks.peers import PEERS, Absent, Call, first_line
from benchmarks.timing import burst
from benchmarks.zoo import ZooModel

LOOK_S = 0.05
"""Between two looks at the counters while serving."""
OURS = "hotfuse"


class Contender:
    """What the commands act on."""

    def __init__(self, name: str, who: str, threads: int, folder: Path) -> None:
        self.name, self.who, self.threads, self.folder = name, who, threads, folder
        self.model: ZooModel | None = None
        self.inputs: dict[str, Any] = {}
        self.fast: Any = None
        self.call: Call = lambda: None
        self._served: Callable[[dict[str, Any]], Any] = lambda _feed: None
        self.began = 0.0
        self.bytes = 0

    def prepare(self) -> dict[str, Any]:
        """Nobody's merit: imports, the model, a first operator of torch."""
        import torch

        torch.set_num_threads(self.threads)
        self.model = find(self.name).load()
        self.inputs = self.model.inputs()
        torch.nn.functional.linear(torch.randn(128, 256), torch.randn(256, 256))
        if self.who == OURS:
            import hotfuse.session  # noqa: F401
        elif self.who == "ort":
            import onnxruntime  # noqa: F401
        return {}

    def load(self) -> dict[str, Any]:
        assert self.model is not None
        self.bytes = grown_bytes()
        self.began = time.perf_counter()
        self.call = self._ours() if self.who == OURS else self._inductor() if self.who == "inductor" else PEERS[self.who](
            self.model, self.inputs, self.threads)  # fmt: skip
        loaded = time.perf_counter()
        result = self.call()
        first = time.perf_counter()
        return {"load_s": loaded - self.began, "first_ms": (first - loaded) * 1e3, "outputs": self._kept(result)}

    def _ours(self) -> Call:
        import hotfuse

        assert self.model is not None
        inputs = self.inputs
        if self.model.path is not None:
            options = hotfuse.SessionOptions()  # and the environment, as every version of the package reads it
            options.intra_op_num_threads = self.threads
            session = self.fast = hotfuse.InferenceSession(self.model.path, options)
            self._served = lambda feed: session.run(None, feed)
            return lambda: session.run(None, inputs)
        fast = self.fast = hotfuse.jit(self.model.module, threads=self.threads)
        self._served = lambda feed: fast(**feed)
        return lambda: fast(**inputs)

    def _inductor(self) -> Call:
        import torch
        import torch._inductor.config as config

        assert self.model is not None
        if self.model.module is None:
            raise Absent("an ONNX model has no torch code")
        config.freezing = True
        compiled, inputs = torch.compile(self.model.module), self.inputs
        compiled(**inputs)
        return lambda: compiled(**inputs)

    def serve(self, seconds: float, until_tier1: bool = False, behind_s: float | None = None) -> dict[str, Any]:
        """Calls for so long; of ours, when each tier answered first and when the last plan was exchanged. A check whose question is
        whether compiled code is made, and right, calls while nothing is being compiled, and ends when compiled code has answered.
        `behind_s`: no longer than so many seconds behind the last exchange of plans, once compiled code has answered.
        """
        calls, cold, worst = 0, 0, 0.0
        tiers: dict[str, float] = {}
        swaps, swapped = 0, None
        end = limit = time.perf_counter() + seconds
        look = 0.0
        while (now := time.perf_counter()) < end:
            self.call()
            calls += 1
            taken = (after := time.perf_counter()) - now
            worst, cold = max(worst, taken), cold + (after - self.began <= 5.0)
            if self.fast is not None and after >= look:
                stats, look = self.fast.stats(), after + LOOK_S
                for tier, count in stats["calls_per_tier"].items():
                    if count and tier not in tiers:
                        tiers[tier] = after - self.began
                if stats["swaps"] != swaps:
                    swaps, swapped = stats["swaps"], after - self.began
                    if behind_s is not None and tiers.keys() & {"1", "2"}:
                        end = min(limit, after + behind_s)
                if until_tier1 and self.fast.wait(end - after) and tiers.keys() & {"1", "2"}:
                    break
        grown = grown_bytes() - self.bytes
        return {"calls": calls, "cold_calls": cold, "worst_ms": worst * 1e3, "tiers_s": tiers, "best_s": swapped, "grown": grown}

    def settle(self, seconds: float) -> dict[str, Any]:
        """Whether all plans were made within the time; workers that compile would run in its turns otherwise."""
        begun = time.perf_counter()
        drained = self.fast is None or self.fast.wait(seconds)
        waited, end = time.perf_counter() - begun, time.perf_counter() + 1.0
        while time.perf_counter() < end:
            self.call()
        return {"drained": drained, "waited_s": waited}

    def burst(self, warm_s: float, turn_s: float) -> dict[str, Any]:
        return {"seconds": burst(self.call, warm_s, turn_s)}

    def about(self) -> dict[str, Any]:
        """What answers now, and everything that was decided on the way."""
        found: dict[str, Any] = {"outputs": self._kept(self.call())}
        if self.fast is not None:
            stats = self.fast.stats()
            found |= {"explained": self.fast.explain().to_dict(), "calls_per_tier": stats["calls_per_tier"],
                      "idle_bytes": grown_bytes() - self.bytes}  # fmt: skip
        return found

    def exact(self) -> dict[str, Any]:
        """What others are held against, and whether that is float64."""
        return self._exact(self.inputs)

    def _exact(self, inputs: dict[str, Any]) -> dict[str, Any]:
        import torch

        assert self.model is not None
        if self.model.module is None:
            return {"outputs": self._kept(self._ort(inputs, optimized=False)), "float64": False}

        def wide(v: Any) -> Any:
            return v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v

        plain = self.model.module(**inputs)
        try:
            exact = copy.deepcopy(self.model.module).double()(**{n: wide(v) for n, v in inputs.items()})
        except Exception as e:  # models that insist on float32 somewhere are held against their own code
            return {"outputs": self._kept(plain), "float64": False, "why": first_line(e)}
        if not all(np.isfinite(w).all() or not np.isfinite(own).all() for w, own in zip(flat(exact), flat(plain), strict=True)):
            # Masks of float32's least number times two are infinite there and finite nowhere else: no judge of anybody.
            return {"outputs": self._kept(plain), "float64": False, "why": "not finite in float64"}
        return {"outputs": self._kept(exact), "float64": True}

    def _ort(self, inputs: dict[str, Any], optimized: bool) -> Any:
        import onnxruntime as ort

        assert self.model is not None
        options, level = ort.SessionOptions(), ort.GraphOptimizationLevel
        options.graph_optimization_level = level.ORT_ENABLE_ALL if optimized else level.ORT_DISABLE_ALL
        options.log_severity_level, options.intra_op_num_threads = 3, self.threads
        return ort.InferenceSession(str(self.model.path), options, providers=["CPUExecutionProvider"]).run(None, inputs)

    def defined(self, seed: int) -> dict[str, Any]:
        """A judge that shares no kernel with anybody; slow, so it is asked where ONNX Runtime and we disagree."""
        import onnx
        from onnx.reference import ReferenceEvaluator

        assert self.model is not None
        if self.model.path is None:
            raise Absent("a torch model has no ONNX operators")
        inputs = self.model.inputs() if not seed else self.model.inputs(seed)
        return {"outputs": self._kept(ReferenceEvaluator(onnx.load(str(self.model.path))).run(None, inputs))}

    def fresh(self, seeds: list[int]) -> dict[str, Any]:
        """Data that no plan has seen, in this process alone: eager, or ONNX Runtime as it comes, is the spread that is allowed."""
        assert self.model is not None
        found: list[dict[str, Any]] = []
        for seed in seeds:
            self.inputs = inputs = self.model.inputs(seed)
            ours = self._kept(self._served(inputs))
            plain = self.model.module(**inputs) if self.model.module is not None else self._ort(inputs, optimized=True)
            found.append({**self._exact(inputs), "seed": seed, "plain": self._kept(plain), "ours": ours})
        return {"calls": found}

    def _kept(self, result: Any) -> str:
        path = self.folder / f"{self.who}-{time.monotonic_ns()}.npz"
        np.savez(path, *flat(result))
        return str(path)


def grown_bytes() -> int:
    """Resident memory of this process, and what its children have of their own."""
    me = psutil.Process()
    return int(me.memory_info().rss) + sum(_own(c) for c in me.children(recursive=True))


def _own(process: psutil.Process) -> int:
    try:
        return int(process.memory_full_info().uss)
    except psutil.Error:  # it ended between two looks
        return 0


def main() -> int:
    """Answer commands until there are none."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--who", required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is not an answer
    import torch

    one = Contender(options.model, options.who, options.threads, options.folder)
    known: dict[str, Callable[..., dict[str, Any]]] = {
        "prepare": one.prepare, "load": one.load, "serve": one.serve, "burst": one.burst, "settle": one.settle,
        "about": one.about, "exact": one.exact,
        "fresh": one.fresh, "defined": one.defined,
    }  # fmt: skip
    with torch.inference_mode():
        for line in sys.stdin:
            command = json.loads(line)
            gc.collect()
            try:
                answer = known[command.pop("do")](**command)
            except Exception as e:  # whatever goes wrong in a contender is its part of the row
                answer = {"absent": str(e).splitlines()[0] if isinstance(e, Absent) else first_line(e)}
            print(json.dumps(answer, default=str), file=answers)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
