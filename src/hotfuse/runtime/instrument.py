"""The instrumented variant of a plan: the same partitions, with looks at values, clocks and branches in between.

A variant is built in the background and run on sampled calls only. Where partitions are library calls, every node can be looked
behind: its graph is made into one flat function again, whose chosen nodes are wrapped. Where they are kernels, looks are taken
between them; a native run writes down which way its branches went, and some of its calls go through kernels that count what they
store (`tile.instrument`), which nobody else sees. What neither shows (branches on a side without native code,
loops in the library) is now and then sampled in the baseline instead.

What watching adds (looks, records) is measured on the way and taken out of the times. A look that fails is counted and
never touches the call.
"""

from __future__ import annotations

import math
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from hotfuse.analysis.cost import Cost
from hotfuse.analysis.shapes import Mismatch, bind
from hotfuse.backends.library import control_meaning, meaning
from hotfuse.backends.llvm.run import CLOCK, COUNTS, OUTCOMES
from hotfuse.backends.protocol import Run
from hotfuse.backends.pycode import flat_function
from hotfuse.ir.branches import control_name, inside
from hotfuse.ir.dims import evaluate, symbols
from hotfuse.ir.graph import Kind, Node, Value, output_values, values_in
from hotfuse.ir.types import TensorType
from hotfuse.ops.control import truth
from hotfuse.profile.names import Names
from hotfuse.profile.records import Batch, Flag, Subject
from hotfuse.runtime.meters import Meters, part_of
from hotfuse.runtime.on_paper import known, of_partition
from hotfuse.runtime.plan import Plan, Unit, chained
from hotfuse.runtime.points import Point, choose
from hotfuse.tile.instrument import FLOATS, ranges
from hotfuse.tile.probe import DTYPES
from hotfuse.tile.program import Kernel

if TYPE_CHECKING:
    from hotfuse.backends.llvm.abi import NativeKernel
    from hotfuse.backends.llvm.enter import NativeRun

MAX_CONTROL = 32
"""Outcomes of control nodes noted in one call; a loop around a branch could give any number."""
CLOCKED = 4
"""Of a native run of several partitions, one sample in so many is timed inside: that takes an arena of its own each time."""
COUNT_AFTER = 16
"""Samples of a plan before kernels that count are compiled for it."""
MAX_COSTS = 64
"""Signatures whose flops and bytes are worked out."""
_COUNTED = struct.Struct("<7q3d")
"""What a probe would write (`profile.records`); -1 for what is not known."""
_now = time.perf_counter_ns
_meters = Meters()


class Look(Protocol):
    """Adds a value's record to a batch: `backends.llvm.probe.Probes.look`."""

    def __call__(self, t: Any, batch: Batch, s: Subject, item: int, flags: int = 0, keep: int = 1) -> bool:
        """False for what cannot be looked at."""
        ...


@dataclass(slots=True)
class _Sample:
    """One sampled call while it runs."""

    batch: Batch
    subject: Subject
    times: list[int]
    """Nanoseconds per partition, -1 for one that did not run."""
    clocked: bool = True
    """Whether native runs are timed inside."""
    counting: bool = False
    """Whether native runs count what they store."""
    cost: int = 0
    outcomes: int = 0
    began: int = 0
    cost_before: int = 0


class _Here(threading.local):
    sample: _Sample | None = None


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a sampled call gave."""

    outs: tuple[Any, ...]
    ns: int
    """The call's own time."""
    cost_ns: int
    """What watching is known to have added."""
    signature: int


class Variant:
    """A plan, instrumented."""

    def __init__(self, plan: Plan, weights: Mapping[str, Any], graph: int, names: Names, look: Look) -> None:
        self.plan = plan
        """Kept, so that nobody takes another plan for this one."""
        self.failed = 0
        """Looks that raised an error."""
        self._graph, self._names, self._look = graph, names, look
        self._here = _Here()
        self._batches: list[Batch] = []
        """Memory for records that no call is in."""
        self._taken = 0
        self._costs: dict[int, tuple[tuple[int, int], ...]] = {}
        self._working_out: set[int] = set()
        """Signatures whose costs were asked for."""
        self._parts = [names.item(graph, f"{'' if plan.tier == 0 else f'tier {plan.tier} '}partition {p.index}")
                       for p in plan.partitioning.parts]
        in_library = plan.tier == 0 and all(p.key in weights for p in plan.graph.params)
        between = {v.name for u in plan.units for v in u.outputs} | {v.name for v in output_values(plan.graph)}
        stored = dict(_stored(plan))
        self.points = choose(plan.partitioning, visible=None if in_library else between | stored.keys())
        values = {v.name: v for n in plan.graph.nodes for v in n.outs}
        self._inside = {p.value: (names.item(graph, p.value), p, values[p.value]) for p in self.points
                        if p.value in stored and p.value not in between}
        """Values that only counting kernels see."""
        self._kernels = {stored[name] for name in self._inside}
        self.asked = False
        """Whether somebody is at making counting kernels for it."""
        self._counting = False
        self._extents: dict[int, dict[str, tuple[int, ...]]] = {}
        """The sizes of those values, by signature."""
        self._plain_ns = 0
        self.uncounted = 0
        """Values that kernels do not store element by element, once each."""
        self._at = {p.value: (names.item(graph, p.value), p) for p in self.points}
        self._inputs = [(i, self._at[v.name]) for i, v in enumerate(plan.graph.inputs) if v.name in self._at]
        self._outputs: list[tuple[int, tuple[int, Point]]] = []
        self.hidden = False
        """Whether there are control nodes whose outcome this variant cannot see."""
        self._run = self._flat(weights) if in_library else self._chain()

    # --- building --------------------------------------------------------------------------------

    def _flat(self, weights: Mapping[str, Any]) -> Run:
        """Every node its own call again; the first and last node of a partition carry its clock."""
        parts = self.plan.partitioning.parts
        first = {p.first: p.index for p in parts}
        last = {p.last - 1: p.index for p in parts}
        at = {id(n): i for i, n in enumerate(self.plan.graph.nodes)}

        def wrapped(node: Node) -> tuple[Callable[..., Any], bool]:
            fn, several = self._meaning(node, "")
            i = at[id(node)]
            points = [(k, self._at[v.name]) for k, v in enumerate(node.outs) if v.name in self._at]
            if points or i in first or i in last:
                fn = self._around(fn, points, first.get(i), last.get(i), several or len(node.outs) > 1)
            return fn, several

        return flat_function(self.plan.graph, wrapped, weights)[0]

    def _meaning(self, node: Node, path: str) -> tuple[Callable[..., Any], bool]:
        """A node's callable; control nodes tell which way they went, at every depth."""
        if node.kind is not Kind.CONTROL:
            return meaning(node)
        name = control_name(node, path)
        item = self._names.item(self._graph, name)
        bodies = [
            flat_function(g, lambda n, inner=path: self._meaning(n, inner), {})[0]
            for g, path in ((g, inside(name, i)) for i, g in enumerate(node.graphs))
        ]
        if node.op == "control.if":
            then, other = bodies
            return control_meaning(node, [self._told(then, item, 1), self._told(other, item, 0)]), True
        return self._counted(node, bodies, item), True

    def _told(self, body: Run, item: int, outcome: int) -> Run:
        def run(*args: Any) -> tuple[Any, ...]:
            self._outcome(item, outcome, loop=False)
            return body(*args)

        return run

    def _counted(self, node: Node, bodies: Sequence[Run], item: int) -> Run:
        """A loop that counts its trips; the count is the call's own, so calls from many threads do not meet."""
        local = threading.local()
        (body,) = bodies

        def counting(*args: Any) -> tuple[Any, ...]:
            local.trips += 1
            return body(*args)

        loop = control_meaning(node, [counting])

        def run(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
            outer = getattr(local, "trips", 0)  # a loop may run inside itself only through another one
            local.trips = 0
            try:
                outs = loop(*args, **kwargs)
                self._outcome(item, local.trips, loop=True)
            finally:
                local.trips = outer
            return outs

        return run

    def _chain(self) -> Run:
        """The plan's units one by one, each timed inside where it can be; a plan that is one unit runs as it is."""
        plan, graph = self.plan, self.plan.graph
        if not plan.units:
            run = plan.run
            if plan.bet is None:
                self.hidden = any(n.kind is Kind.CONTROL for n in graph.nodes)
            else:
                item = self._names.item(self._graph, plan.bet.name)
                run = plan.bet.telling(lambda outcome: self._outcome(item, int(outcome), loop=False))
            if all(isinstance(o, Value) for o in graph.outputs):
                inputs = {v.name for v in graph.inputs}
                self._outputs = [(k, self._at[v.name]) for k, v in enumerate(output_values(graph))
                                 if v.name in self._at and v.name not in inputs]
            return self._around(run, (), 0, 0, True) if self._parts else run
        return chained(graph, [replace(u, run=self._unit(u)) for u in plan.units], plan.weights)

    def _unit(self, unit: Unit) -> Run:
        taken = {v.name: i for i, v in enumerate(unit.inputs)}
        run = unit.run if unit.native is None else self._native(unit.run, unit.native, unit.parts)
        told = set(unit.native.code.branches if unit.native is not None else ())
        parts = self.plan.partitioning.parts
        for node in (n for p in unit.parts for n in self.plan.graph.nodes[parts[p].first : parts[p].last]):
            if node.kind is not Kind.CONTROL:
                continue
            if (name := control_name(node)) in told:  # of those in it that are not, some are in a side without native code
                self.hidden |= not _inside(node) <= told
                continue
            cond = next((taken.get(v.name) for v in values_in(node.args[0])), None) if node.op == "control.if" else None
            if cond is None or any(n.kind is Kind.CONTROL for g in node.graphs for n in g.nodes):
                self.hidden = True
            if cond is not None:
                run = self._asked(run, self._names.item(self._graph, name), cond)
        points = [(k, self._at[v.name]) for k, v in enumerate(unit.outputs) if v.name in self._at]
        part = unit.parts[0] if unit.parts and unit.native is None else None
        return self._around(run, points, part, part, True)

    def _native(self, plain: Run, native: NativeRun, parts: Sequence[int]) -> Run:
        """A native run: its branches tell every time, its partitions are clocked now and then."""
        branches = [self._names.item(self._graph, name) for name in native.code.branches]
        loops = [name in native.code.loops for name in native.code.branches]
        always = OUTCOMES if branches else 0

        def run(*args: Any) -> tuple[Any, ...]:
            s = self._here.sample
            want = 0 if s is None else always | (CLOCK if s.clocked else 0) | (COUNTS if s.counting else 0)
            if s is None or not want:
                return plain(*args)
            outs, told = native.watched(want, *args)
            for part, ns in zip(parts, told.ns, strict=False):  # a call that left native code shows no times
                s.times[part] = ns or -1
            for item, loop, outcome in zip(branches, loops, told.outcomes, strict=True):
                if loop and outcome:
                    self._outcome(item, outcome - 1, loop=True)
                for side in () if loop else (side for side in (0, 1) if outcome & (1 << side)):
                    self._outcome(item, side, loop=False)
            for name, counters in told.counted.items():
                self._counted_inside(s, name, counters)
            return outs

        return run

    def _asked(self, run: Run, item: int, cond: int) -> Run:
        def asked(*args: Any) -> tuple[Any, ...]:
            outs = run(*args)
            self._outcome(item, int(truth(args[cond])), loop=False)
            return outs

        return asked

    def _around(
        self, fn: Callable[..., Any], points: Sequence[tuple[int, tuple[int, Point]]], begin: int | None, end: int | None,
        several: bool,
    ) -> Callable[..., Any]:
        """A call with the clock of a partition around it, and looks at what it gives."""
        here = self._here

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
                    self._see(s, out[k] if several else out, item, point)
                s.cost += _now() - done
            return out

        return call

    # --- running ---------------------------------------------------------------------------------

    def __call__(self, number: int, inputs: Sequence[Any], publish: Callable[[Batch], None]) -> Sampled:
        """Serve a call and publish what it showed; errors of the plan are the caller's, as without watching."""
        start = _now()
        shapes = tuple([tuple(t.shape) for t in inputs])
        signature = self._names.signature(self._graph, shapes)
        batch = self._batch()
        subject = Subject(self._graph, signature, number, time.time_ns())
        turn = self._taken % CLOCKED
        counting = self._counting and turn == CLOCKED // 2
        s = _Sample(batch, subject, [-1] * len(self._parts), turn == 0, counting)
        self._taken += 1
        for i, (item, point) in self._inputs:
            self._see(s, inputs[i], item, point)
        self._here.sample = s
        _meters.start()
        before = _now()
        s.cost = 0
        try:
            outs = self._run(*inputs)
        finally:
            self._here.sample = None
        after = _now()
        counted, timed = _meters.stop(), sum(ns for ns in s.times if ns > 0)
        for k, (item, point) in self._outputs:
            self._see(s, outs[k], item, point)
        costs = self._costs.get(signature)
        for i, ns in enumerate(s.times):
            if ns >= 0:
                moved, flops = costs[i] if costs is not None else (-1, -1)
                batch.partition(subject, self._parts[i], ns, moved, flops, part_of(counted, ns, timed))
        own = max(1, after - before - s.cost)
        inside = s.cost
        shown = self._plain_ns if counting and self._plain_ns else own  # counting takes time that calls do not take
        self._plain_ns = shown
        batch.call(subject, self.plan.tier, shown, before - start + inside)
        publish(batch)
        self._batches.append(batch)
        return Sampled(outs, own, before - start + inside + _now() - after, signature)

    def _batch(self) -> Batch:
        """Room for the records of a call; who publishes them has copied them when it comes back."""
        try:
            batch = self._batches.pop()
        except IndexError:  # so many calls at the same time
            return Batch(len(self._at) + len(self._parts) + MAX_CONTROL + 1)
        batch.clear()
        return batch

    def _see(self, s: _Sample, value: Any, item: int, point: Point) -> None:
        try:
            self._look(value, s.batch, s.subject, item, point.flags, point.keep)
        except Exception:  # whatever went wrong is no reason to fail a call that needs none of this; it is counted
            self.failed += 1

    def _outcome(self, item: int, outcome: int, loop: bool) -> None:
        s = self._here.sample
        if s is not None and s.outcomes < MAX_CONTROL:
            s.outcomes += 1
            s.batch.control(s.subject, item, outcome, loop)

    # --- inside native runs ----------------------------------------------------------------------

    def wants(self) -> dict[int, Kernel]:
        """The kernels that would have to count, by number: asked once there were samples enough to make it worth the compile."""
        if self.asked or self._taken < COUNT_AFTER:
            return {}
        return {n: self.plan.kernels[n] for n in self._kernels if n in self.plan.kernels}

    def count_with(self, kernels: Mapping[int, NativeKernel]) -> None:
        """Counting kernels there are now; some sampled calls enter them from here on."""
        self._counting = True
        for unit in self.plan.units:
            if unit.native is not None and kernels:
                unit.native.count_with({n: k.address for n, k in kernels.items()}, tuple(kernels.values()))

    def _counted_inside(self, s: _Sample, name: str, counters: tuple[int, ...]) -> None:
        found = self._inside.get(name)
        shape = self._extents.get(s.subject.signature, {}).get(name)
        if found is None or shape is None:
            return
        item, point, value = found
        n, zeros, odd, top, bottom = counters
        if n != math.prod(shape) or not isinstance(value.type, TensorType):
            self.uncounted += 1
            return
        dtype = value.type.dtype
        exact = dtype not in FLOATS  # what a mask lets through is known of whole numbers only
        cols = math.prod(shape[max(0, len(shape) - point.keep) :])
        flags = point.flags if exact else point.flags & ~Flag.MASK
        at = s.batch.value(s.subject, item, DTYPES.index(dtype), shape, n // cols if cols else 0, cols, flags)
        low, high = ranges(dtype, top, bottom)
        most = max(abs(low), abs(high)) if low <= high else 0.0
        s.batch.write(at, _COUNTED.pack(zeros, -1, -1, odd, -1, n - zeros if exact else -1, -1, low, high, most))

    # --- on paper --------------------------------------------------------------------------------

    def needs_costs(self, signature: int) -> bool:
        """Whether a signature's flops and bytes are to be worked out: who is told so does it."""
        if signature in self._costs or signature in self._working_out or len(self._working_out) >= MAX_COSTS:
            return False
        self._working_out.add(signature)  # once: the job may wait for long behind others
        return True

    def work_out(self, signature: int, shapes: Sequence[Sequence[int]]) -> None:
        """Flops and bytes per partition, in the background; lets go of the interpreter after every node."""
        graph = self.plan.graph
        env = bind(graph, list(shapes))
        found: list[tuple[int, int]] = []
        for part in self.plan.partitioning.parts:
            total = Cost(None, None) if isinstance(env, Mismatch) else of_partition(self.plan, part.index, env)
            found.append((known(total.bytes), known(total.flops)))
        if not isinstance(env, Mismatch):
            types = {name: v.type for name, (_, _, v) in self._inside.items()}
            self._extents[signature] = {name: tuple(evaluate(d, env) for d in t.shape) for name, t in types.items()
                                        if isinstance(t, TensorType) and all(symbols(d) <= env.keys() for d in t.shape)}
        self._costs[signature] = tuple(found)


def _stored(plan: Plan) -> Iterator[tuple[str, int]]:
    """The values that kernels inside the plan's native runs store, with the kernel's number."""
    for unit in plan.units:
        if unit.native is not None:
            code = unit.native.code
            yield from ((name, code.words[word].kernel) for word, names in code.made for name in names if name)


def _inside(node: Node, path: str = "") -> set[str]:
    """The names of a control node and of those in it."""
    name = control_name(node, path)
    bodies = [(n, inside(name, i)) for i, g in enumerate(node.graphs) for n in g.nodes if n.kind is Kind.CONTROL]
    return {name}.union(*(_inside(n, p) for n, p in bodies))
