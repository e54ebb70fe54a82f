"""A served model whose code takes as long as a test says, whatever the machine does: who is faster is known beforehand.

The own code, tier 0 and tier 1 each sleep before they compute. Capture is real and happens in the process; background work runs in
a thread of its own, so that calls are live while plans are made, proven and raced.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from hotfuse.api import TorchModel
from hotfuse.base.events import Action, Decision, EventLog, Why
from hotfuse.base.settings import Settings
from hotfuse.ir.graph import Graph
from hotfuse.pipeline import compile_tier0
from hotfuse.runtime.engine import Engine
from hotfuse.runtime.plan import Plan
from hotfuse.runtime.site import Entry

SETTINGS = Settings(hot_calls=2, record=False, watch=False, idle=False)
MAX_S = 60.0


class Sleepy(nn.Module):
    """A model whose own code takes its time; a graph captured from it does not."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.seconds and not torch.compiler.is_compiling():
            time.sleep(self.seconds)
        return self.inner(x)


def asleep(run: Callable[..., Any], seconds: Callable[[], float | Callable[[int], float]]) -> Callable[..., Any]:
    """Slower by so much, or by what a function says of a call's rows."""

    def slower(*args: Any) -> Any:
        told = seconds()
        if (wait := told(args[0].shape[0]) if callable(told) else told) > 0:
            time.sleep(wait)
        return run(*args)

    return slower


@dataclass
class Live:
    """The engine, and how long what it serves takes."""

    own_s: float = 0.0
    tier0_s: float | Callable[[int], float] = 0.0
    tier1_s: Callable[[], float | Callable[[int], float]] = lambda: 0.0
    settings: Settings = SETTINGS
    made: int = 0
    jobs: queue.Queue[Callable[[], None] | None] = field(default_factory=queue.Queue)

    def __post_init__(self) -> None:
        self.model = Sleepy(self.own_s).eval()
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()
        served = TorchModel(self.model, self.settings.with_(capture="inline"))
        self.engine = Engine(served, self._tier0, self.jobs.put, self.settings, EventLog(), self._tier1)

    def __enter__(self) -> Live:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.engine.close()
        self.jobs.put(None)
        self.thread.join(60)
        assert not self.thread.is_alive()

    def _work(self) -> None:
        while (job := self.jobs.get()) is not None:
            job()

    def _tier0(self, graph: Graph, weights: Mapping[str, torch.Tensor]) -> Plan:
        plan = compile_tier0(graph, weights, self.settings)
        return replace(plan, run=asleep(plan.run, lambda: self.tier0_s))

    def _tier1(
        self, graph: Graph, weights: Mapping[str, torch.Tensor], _sample: Sequence[torch.Tensor], /, **_more: Any
    ) -> Plan:
        self.made += 1
        kept = {k: w.clone() for k, w in weights.items()}  # as packed weights are: copies
        plan = compile_tier0(graph, kept, self.settings)
        return replace(plan, tier=1, run=asleep(plan.run, lambda: self.tier1_s()))

    def call(self, rows: int = 3) -> None:
        """One call; its answer is the model's."""
        x = torch.randn(rows, 4)
        torch.testing.assert_close(self.engine(x), self.model.inner(x))

    def calls_until(self, done: Callable[[], bool], rows: Sequence[int] = (3,), pause_s: float = 0.0) -> int:
        """Call until something is so; how many calls that took."""
        until, n = time.monotonic() + MAX_S, 0
        while not done():
            assert time.monotonic() < until, "\n".join(map(str, self.engine.log.decisions))
            self.call(rows[n % len(rows)])
            time.sleep(pause_s)
            n += 1
        return n

    @property
    def entry(self) -> Entry:
        return next(iter(self.engine.sites.values())).entries[0]

    @property
    def captured(self) -> bool:
        return any(site.entries for site in self.engine.sites.values())

    def said(self, action: Action, why: Why, tier: int) -> list[Decision]:
        return [d for d in self.engine.log.decisions if (d.action, d.why, d.evidence.get("tier")) == (action, why, tier)]
