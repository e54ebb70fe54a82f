"""A plan's code with looks, clocks and branches in between: it does what the plan does, and notes what a sampled call shows.

Where partitions are library calls, every node can be looked behind: the graph is made into one flat function again, whose chosen
nodes are wrapped. Where they are kernels, looks are taken between them; a native run writes down which way its branches went.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from hotfuse.backends.protocol import Run
from hotfuse.backends.pycode import flat_function
from hotfuse.ir.control_bodies import control_name, inside
from hotfuse.ir.graph import Kind, Node, Value, output_values, values_in
from hotfuse.lower.run.description import CLOCK, COUNTS, OUTCOMES
from hotfuse.ops.control import truth
from hotfuse.runtime.observe.call_notes import Noting
from hotfuse.runtime.observe.control_outcomes import ToldOutcome, telling
from hotfuse.runtime.observe.counted_values import RunProbes
from hotfuse.runtime.observe.watch_points import Point
from hotfuse.runtime.plan import Plan, PlanUnit, chained

if TYPE_CHECKING:
    from hotfuse.backends.protocol import LoadedRun

_now = time.perf_counter_ns


class Wrapped:
    """The code of a plan, wrapped. Without `weights` partitions stay whole."""

    def __init__(
        self, plan: Plan, at: Mapping[str, tuple[int, Point]], item: Callable[[str], int], noting: Noting, within: RunProbes,
        weights: Mapping[str, Any] | None,
    ) -> None:
        self._plan, self._at, self._item, self._noting, self._within = plan, at, item, noting, within
        self.outputs: list[tuple[int, tuple[int, Point]]] = []
        """The plan's outputs that are still to be looked at when it has run."""
        self.hidden = False
        """Whether there are control nodes whose outcome cannot be seen."""
        self.run = self._flat(weights) if weights is not None else self._chain()

    # --- node by node ----------------------------------------------------------------------------

    def _flat(self, weights: Mapping[str, Any]) -> Run:
        """Every node its own call again; the first and last node of a partition carry its clock."""
        parts = self._plan.partitioning.parts
        first = {p.first: p.index for p in parts}
        last = {p.last - 1: p.index for p in parts}
        at = {id(n): i for i, n in enumerate(self._plan.graph.nodes)}

        def wrapped(node: Node) -> tuple[Callable[..., Any], bool]:
            fn, several = telling(node, "", self._outcome_listener)
            i = at[id(node)]
            points = [(k, self._at[v.name]) for k, v in enumerate(node.outs) if v.name in self._at]
            if points or i in first or i in last:
                fn = self._around(fn, points, first.get(i), last.get(i), several=several or len(node.outs) > 1)
            return fn, several

        return flat_function(self._plan.graph, wrapped, weights)[0]

    def _outcome_listener(self, name: str) -> ToldOutcome:
        return partial(self._noting.outcome, self._item(name))

    # --- unit by unit ----------------------------------------------------------------------------

    def _chain(self) -> Run:
        """The plan's units one by one, each timed inside where it can be; a plan that is one unit runs as it is."""
        plan, graph = self._plan, self._plan.graph
        if not plan.units:
            run = plan.run
            if plan.bet is None:
                self.hidden = any(n.kind is Kind.CONTROL for n in graph.nodes)
            else:
                item = self._item(plan.bet.name)
                run = plan.bet.telling(lambda outcome: self._noting.outcome(item, int(outcome), loop=False))
            if all(isinstance(o, Value) for o in graph.outputs):
                inputs = {v.name for v in graph.inputs}
                self.outputs = [(k, self._at[v.name]) for k, v in enumerate(output_values(graph))
                                if v.name in self._at and v.name not in inputs]
            return self._around(run, (), 0, 0, several=True) if plan.partitioning.parts else run
        return chained(graph, [replace(u, run=self._unit(u)) for u in plan.units], plan.weights)

    def _unit(self, unit: PlanUnit) -> Run:
        taken = {v.name: i for i, v in enumerate(unit.inputs)}
        run = unit.run if unit.native is None else self._native(unit.run, unit.native, unit.parts)
        told = set(unit.native.code.branches if unit.native is not None else ())
        parts = self._plan.partitioning.parts
        for node in (n for p in unit.parts for n in self._plan.graph.nodes[parts[p].first : parts[p].last]):
            if node.kind is not Kind.CONTROL:
                continue
            if (name := control_name(node)) in told:  # of those in it that are not, some are in a side without native code
                self.hidden |= not _inside(node) <= told
                continue
            cond = next((taken.get(v.name) for v in values_in(node.args[0])), None) if node.op == "control.if" else None
            if cond is None or any(n.kind is Kind.CONTROL for g in node.graphs for n in g.nodes):
                self.hidden = True
            if cond is not None:
                run = self._asked(run, self._item(name), cond)
        points = [(k, self._at[v.name]) for k, v in enumerate(unit.outputs) if v.name in self._at]
        part = unit.parts[0] if unit.parts and unit.native is None else None
        return self._around(run, points, part, part, several=True)

    def _native(self, plain: Run, native: LoadedRun, parts: Sequence[int]) -> Run:
        """A native run: its branches tell every time, its partitions are clocked now and then."""
        branches = [self._item(name) for name in native.code.branches]
        loops = [name in native.code.loops for name in native.code.branches]
        always = OUTCOMES if branches else 0
        noting = self._noting

        def run(*args: Any) -> tuple[Any, ...]:
            s = noting.here.sample
            want = 0 if s is None else always | (CLOCK if s.clocked else 0) | (COUNTS if s.counting else 0)
            if s is None or not want:
                return plain(*args)
            outs, told = native.watched(want, *args)
            for part, ns in zip(parts, told.ns, strict=False):  # a call that left native code shows no times
                s.times[part] = ns or -1
            for item, loop, outcome in zip(branches, loops, told.outcomes, strict=True):
                if loop and outcome:
                    noting.outcome(item, outcome - 1, loop=True)
                for side in () if loop else (side for side in (0, 1) if outcome & (1 << side)):
                    noting.outcome(item, side, loop=False)
            for name, counters in told.counted.items():
                self._within.counted(s, name, counters)
            return outs

        return run

    def _asked(self, run: Run, item: int, cond: int) -> Run:
        def asked(*args: Any) -> tuple[Any, ...]:
            outs = run(*args)
            self._noting.outcome(item, int(truth(args[cond])), loop=False)
            return outs

        return asked

    def _around(
        self, fn: Callable[..., Any], points: Sequence[tuple[int, tuple[int, Point]]], begin: int | None, end: int | None,
        *, several: bool,
    ) -> Callable[..., Any]:
        """A call with the clock of a partition around it, and looks at what it gives."""
        noting = self._noting
        here = noting.here

        def call(*args: Any, **kwargs: Any) -> Any:
            s = here.sample
            if s is None:
                return fn(*args, **kwargs)
            if begin is not None:
                s.cost_before = s.cost
                s.began = _now()
            out = fn(*args, **kwargs)
            done = _now()
            if end is not None:
                s.times[end] = done - s.began - (s.cost - s.cost_before)
            if points:
                for k, (item, point) in points:
                    noting.see(s, out[k] if several else out, item, point)
                s.cost += _now() - done
            return out

        return call


def _inside(node: Node, path: str = "") -> set[str]:
    """The names of a control node and of those in it."""
    name = control_name(node, path)
    bodies = [(n, inside(name, i)) for i, g in enumerate(node.graphs) for n in g.nodes if n.kind is Kind.CONTROL]
    return {name}.union(*(_inside(n, p) for n, p in bodies))
