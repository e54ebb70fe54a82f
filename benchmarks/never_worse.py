# pyright: reportPrivateUsage=false
"""Never worse, and noticed when it is: what becomes of bad candidates, of modules too small to improve, and of cold starts.

    python -m benchmarks.never_worse [--only bad,small,cold] [--threads 1,2] [--trials 20] [--processes 10] [--json]

| part | what is done | aim |
| --- | --- | --- |
| bad | a candidate that runs tier 0 three times, or does so only on threads that call | deployed: < 1%; forced in: < 200 calls |
| small | single modules through `hotfuse.jit`, in turns with eager | at least 0.95x, or 2 us |
| cold | so many processes, each with an empty store, to their final speed | spread at most 5% |

What the audit and watching cost together: `python -m benchmarks.watching`. The last line of output is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

import hotfuse
from benchmarks.timing import calls_for
from hotfuse import Settings
from hotfuse.api import TorchModel
from hotfuse.base.events import Action, EventLog, Why
from hotfuse.ir.graph import Graph
from hotfuse.pipeline import compile_tier0
from hotfuse.runtime.engine import Engine
from hotfuse.runtime.plan import Plan
from hotfuse.runtime.site import Entry
from hotfuse.runtime.tierup.attempt import exchange

SLOWER = 3
MAX_S = 30.0
"""For one trial."""
BLOCK_S, BLOCKS = 0.05, 15


def mlp() -> tuple[nn.Module, torch.Tensor]:
    """Two layers of a size at which a call takes some hundred microseconds."""
    return nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)).eval(), torch.randn(32, 256)


# --- bad candidates -----------------------------------------------------------------------------------------------------


class Bad:
    """A served model whose candidates for tier 1 take three times as long as tier 0."""

    def __init__(self, caller_only: bool) -> None:
        self.settings = Settings(hot_calls=2, record=False, idle=False)
        self.model, self.x = mlp()
        self.jobs: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self.caller_only = caller_only
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()
        captured = TorchModel(self.model, self.settings.with_(capture="inline"))
        self.engine = Engine(captured, lambda g, w: compile_tier0(g, w, self.settings), self.jobs.put, self.settings, EventLog(),
                             self.candidate)  # type: ignore[arg-type]

    def _work(self) -> None:
        while (job := self.jobs.get()) is not None:
            job()

    def candidate(
        self, graph: Graph, weights: Mapping[str, torch.Tensor], _sample: Sequence[torch.Tensor], /, **_more: Any
    ) -> Plan:
        """Tier 0, three times; `caller_only`: once where it is looked at beside."""
        plan = compile_tier0(graph, weights, self.settings)

        def run(*args: Any) -> Any:
            beside = self.caller_only and threading.current_thread() is self.thread
            for _ in range(0 if beside else SLOWER - 1):
                plan.run(*args)
            return plan.run(*args)

        return replace(plan, tier=1, run=run)

    @property
    def entry(self) -> Entry | None:
        return next((e for site in self.engine.sites.values() for e in site.entries), None)

    def decided(self) -> bool:
        """Whether the candidate was deployed or refused."""
        return any(d.evidence.get("tier") == 1 and d.action in (Action.DEPLOY, Action.REFUSE) for d in self.engine.log.decisions)

    def close(self) -> None:
        self.engine.close()
        self.jobs.put(None)
        self.thread.join(60)


@contextmanager
def calling(served: Bad, callers: int) -> Generator[None]:
    """Other threads that call all the time, besides the one that measures."""
    stop = threading.Event()

    def call() -> None:
        with torch.no_grad():
            while not stop.is_set():
                served.engine(served.x)

    threads = [threading.Thread(target=call) for _ in range(callers - 1)]
    for t in threads:
        t.start()
    try:
        yield
    finally:
        stop.set()
        for t in threads:
            t.join()


def _spin() -> None:
    while True:
        sum(range(10_000))


@contextmanager
def load(processes: int) -> Generator[None]:
    """Processes that never rest."""
    made = [multiprocessing.get_context("spawn").Process(target=_spin, daemon=True) for _ in range(processes)]
    for p in made:
        p.start()
    try:
        yield
    finally:
        for p in made:
            p.kill()
            p.join()


def bad(trials: int, callers: int, caller_only: bool) -> dict[str, Any]:
    """Chance of deployment, live calls that met the candidate, and calls until it was gone again when it was forced in."""
    deployed, met, gone = 0, list[int](), list[int]()
    for _ in range(trials):
        served = Bad(caller_only)
        try:
            with calling(served, callers):
                end = time.monotonic() + MAX_S
                while not served.decided() and time.monotonic() < end:
                    served.engine(served.x)
                log = served.engine.log
                deployed += any(d.action is Action.DEPLOY and d.evidence.get("tier") == 1 for d in log.decisions)
                met.append(served.engine.counts()["tier1_calls"])
                if (entry := served.entry) is None:
                    raise RuntimeError("nothing was captured")
                while entry.own_ratio is None and time.monotonic() < end:
                    served.engine(served.x)
                exchange(entry, served.candidate(entry.baseline.graph, entry.weights, ()))
                before = entry.calls
                while entry.plan is not entry.baseline and time.monotonic() < end:
                    served.engine(served.x)
                dropped = [d for d in log.decisions if d.why is Why.REGRESSED and d.evidence.get("tier") == 1]
                gone.append(int(dropped[-1].evidence["calls"] or 0) - before if dropped else 1 << 30)
        finally:
            served.close()
    return {"trials": trials, "deployed": deployed, "met": max(met), "until_withdrawn": sorted(gone)[len(gone) // 2],
            "until_withdrawn_worst": max(gone)}  # fmt: skip


# --- small modules ------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Self-attention of one short text."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(64, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x, x, x, need_weights=False)[0]


def modules() -> dict[str, tuple[nn.Module, torch.Tensor]]:
    """Those that a graph can hardly improve."""
    torch.manual_seed(0)
    return {
        "relu": (nn.ReLU(), torch.randn(16)),
        "linear": (nn.Linear(64, 64), torch.randn(8, 64)),
        "linear 768": (nn.Linear(768, 768), torch.randn(32, 768)),
        "layer norm": (nn.LayerNorm(64), torch.randn(8, 64)),
        "attention": (Attention(), torch.randn(1, 16, 64)),
        "small MLP": (nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)), torch.randn(4, 64)),
    }


def small(name: str) -> dict[str, Any]:
    """One module over eager, in blocks that take turns."""
    module, x = modules()[name]
    module.eval()
    with hotfuse.jit(module, settings=Settings(record=False)) as fast:
        for _ in range(4):
            calls_for(lambda: fast(x), 1.0)
            fast.wait(60)
        times = {"eager": list[float](), "hotfuse": list[float]()}
        for i in range(BLOCKS):
            for which in ("eager", "hotfuse") if i % 2 else ("hotfuse", "eager"):
                times[which].append(calls_for(lambda c=module if which == "eager" else fast: c(x), BLOCK_S))
        eager, ours = (statistics.median(times[w]) * 1e6 for w in ("eager", "hotfuse"))
        entry = next(e for site in fast._engine.sites.values() for e in site.entries)
        serves = "own code" if entry.own and entry.plan is entry.baseline else f"tier {entry.plan.tier}"
        return {"eager_us": round(eager, 2), "hotfuse_us": round(ours, 2), "over_eager": round(eager / ours, 3),
                "added_us": round(ours - eager, 2), "serves": serves}  # fmt: skip


# --- cold starts --------------------------------------------------------------------------------------------------------


def cold_start(threads: int) -> dict[str, Any]:
    """In a process of its own: the speed that a model comes to, over eager's in turns with it."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    module, x = nn.Sequential(*[nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True) for _ in range(2)]).eval(), None
    x = torch.randn(1, 64, 256)
    with torch.no_grad(), hotfuse.jit(module) as fast:
        for _ in range(6):
            calls_for(lambda: fast(x), 1.0)
            fast.wait(120)
        pairs = [(calls_for(lambda: module(x), 0.1), calls_for(lambda: fast(x), 0.1)) for _ in range(15)]
        entry = next(e for site in fast._engine.sites.values() for e in site.entries)
        return {"over_eager": statistics.median(a / b for a, b in pairs), "us": statistics.median(b for _, b in pairs) * 1e6,
                "tier": entry.plan.tier, "refused": sorted(map(str, entry.refused))}  # fmt: skip


def cold(processes: int, threads: int) -> dict[str, Any]:
    """All of them, one after another."""
    found: list[dict[str, Any]] = []
    for _ in range(processes):
        with tempfile.TemporaryDirectory() as home:
            code = f"import json; from benchmarks.never_worse import cold_start; print(json.dumps(cold_start({threads})))"
            env = {**os.environ, "HOTFUSE_CACHE_DIR": home}
            out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
            found.append(json.loads(out.splitlines()[-1]))
    ratios = sorted(f["over_eager"] for f in found)
    middle = statistics.median(ratios)
    within = sum(abs(r / middle - 1) <= 0.03 for r in ratios)
    return {"processes": processes, "over_eager": round(middle, 3), "least": round(ratios[0], 3), "most": round(ratios[-1], 3),
            "spread": round((ratios[-1] - ratios[0]) / middle, 4), "within_3_percent": within,
            "tiers": sorted(f["tier"] for f in found)}  # fmt: skip


def main() -> None:
    """Measure what was asked for, a line each, then one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="bad,small,cold")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--processes", type=int, default=10)
    parser.add_argument("--modules", default=",".join(modules()))
    parser.add_argument("--json", action="store_true", help="only the JSON line")
    options = parser.parse_args()
    parts, report = options.only.split(","), dict[str, Any](benchmark="never_worse", torch=torch.__version__)

    def add(name: str, found: dict[str, Any]) -> None:
        report[name] = found
        if not options.json:
            print(f"{name:<44}", ", ".join(f"{k} {v}" for k, v in found.items()), flush=True)

    for threads in map(int, options.threads.split(",")):
        torch.set_num_threads(threads)
        with torch.no_grad():
            for busy in (0, 2) if "bad" in parts else ():
                for callers in (1, 2):
                    for caller_only in (False, True):
                        with ExitStack() as stack:
                            stack.enter_context(load(busy))
                            how = f"bad{', slow for callers only' if caller_only else ''}"
                            add(f"{how}: threads {threads}, callers {callers}, load {busy}",
                                bad(options.trials, callers, caller_only))  # fmt: skip
            for name in options.modules.split(",") if "small" in parts else ():
                add(f"small: {name}, threads {threads}", small(name))
        if "cold" in parts:
            add(f"cold: threads {threads}", cold(options.processes, threads))
    print(json.dumps(report))


if __name__ == "__main__":
    main()
