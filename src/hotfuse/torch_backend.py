"""`torch.compile(model, backend="hotfuse")`: Dynamo finds the graphs and guards them; Hotfuse runs them.

A graph serves only after its first real call agreed with Dynamo's own; what cannot be converted runs as Dynamo gave it. Both
show in `explain_compiled()`.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from hotfuse.base.errors import CaptureError, HotfuseError
from hotfuse.base.events import Action, EventLog, Why
from hotfuse.base.settings import from_env
from hotfuse.explain import Explanation, explain_plan
from hotfuse.frontends.dynamo import capture_dynamo
from hotfuse.frontends.varlen import packed_for_varlen
from hotfuse.ir.verify import verify
from hotfuse.pipeline import compile_tier0
from hotfuse.runtime.plan import Plan
from hotfuse.runtime.verify import disagreement
from hotfuse.simplify import simplify

_numbers = itertools.count()
_graphs: weakref.WeakSet[CompiledGraph] = weakref.WeakSet()
_log = EventLog()


class CompiledGraph:
    """One of Dynamo's graphs, served."""

    def __init__(self, gm: fx.GraphModule, name: str) -> None:
        self.name = name
        self.calls = 0
        self.graph_calls = 0
        self.plan: Plan | None = None
        self.refused = ""
        packed_for_varlen(gm)  # torch cannot run it on the CPU, and the first call runs Dynamo's own graph
        self._own: Callable[..., Any] = gm.forward
        self._settings = from_env()
        self._proven = False
        self._lock = threading.Lock()
        try:
            done = capture_dynamo(gm, name)
            graph, _ = simplify(verify(done.graph))
            self._grad_regions = done.grad_regions
            self.plan = compile_tier0(graph, done.constants, self._settings)
        except HotfuseError as e:
            self._refuse(e.why if isinstance(e, CaptureError) else Why.NOT_CAPTURABLE, str(e))

    def __call__(self, *args: Any) -> Any:
        """Run the plan, or Dynamo's graph where there is none."""
        self.calls += 1
        plan = self.plan
        if plan is None or (self._grad_regions and torch.is_grad_enabled()):
            return self._own(*args)
        if not self._proven:
            return self._prove(plan, args)
        self.graph_calls += 1
        return plan.run(*args)

    def _prove(self, plan: Plan, args: Sequence[Any]) -> Any:
        """The first real call: both run, and must agree."""
        want = self._own(*args)
        try:
            with torch.no_grad():
                difference = disagreement(plan.run(*args), list(want), self._settings.rtol)
        except Exception as e:
            difference = f"{type(e).__name__}: {e}"
        with self._lock:
            if difference:
                self._refuse(Why.MISMATCH, difference)
            elif not self._proven:
                self._proven = True
                _log.decide(Action.DEPLOY, Why.VERIFIED, self.name, nodes=len(plan.graph.nodes))
        return want

    def _refuse(self, why: Why, text: str) -> None:
        self.plan = None
        self.refused = text
        self._grad_regions = False
        _log.decide(Action.REFUSE, why, self.name, because=text.splitlines()[0])


def hotfuse_backend(gm: fx.GraphModule, example_inputs: Sequence[Any], **_options: Any) -> Callable[..., Any]:
    """The backend that the entry point `torch_dynamo_backends` registers."""
    del example_inputs  # the graph's own placeholders carry the fake ones
    compiled = CompiledGraph(gm, f"graph{next(_numbers)}")
    _graphs.add(compiled)
    return compiled


def explain_compiled() -> Explanation:
    """Every graph that `torch.compile` gave us in this process and that is still in use."""
    graphs = sorted(_graphs, key=lambda g: g.name)
    return Explanation(
        {
            "model": "torch.compile",
            "counts": {"calls": sum(g.calls for g in graphs), "graph_calls": sum(g.graph_calls for g in graphs),
                       "module_calls": sum(g.calls - g.graph_calls for g in graphs)},
            "sites": [
                {"call": g.name, "pending": False, "dispatch": [], "refused": [g.refused] if g.refused else [],
                 "plans": [explain_plan(g.plan, g.graph_calls)] if g.plan is not None else []}
                for g in graphs
            ],
            "fallbacks": {},
            "watching": "",
            "idle": {"state": "graphs of torch.compile stay at tier 0"},
            "workers": {},
            "background": {},
            "background_faults": {},
            "concurrency": {},
            "decisions": [d.to_dict() for d in _log.decisions],
        }
    )
