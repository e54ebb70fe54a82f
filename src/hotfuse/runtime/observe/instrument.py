"""The instrumented variant of a plan: the same partitions, with looks at values, clocks and branches in between.

A variant is built in the background and run on sampled calls only. Its code is the plan's, wrapped
(`runtime.observe.instrumented_code`); kernels of its own count what kernels inside native runs store
(`runtime.observe.counted_values`). What neither shows (branches on a side without native code, loops in the library) is now and
then sampled in the baseline instead.

What watching adds (looks, records) is measured on the way and taken out of the times.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hotfuse.analysis.shapes import Mismatch, bind
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.graph import output_values
from hotfuse.profile.names import Names
from hotfuse.profile.records import Batch, Subject
from hotfuse.runtime.observe.call_notes import MAX_CONTROL, Noting, RecordValue, SampledCall
from hotfuse.runtime.observe.counted_values import RunProbes, stored
from hotfuse.runtime.observe.instrumented_code import Wrapped
from hotfuse.runtime.observe.meters import Meters, part_of
from hotfuse.runtime.observe.partition_cost import UNKNOWN, or_unknown, partition_cost
from hotfuse.runtime.observe.watch_points import choose
from hotfuse.runtime.plan import Plan
from hotfuse.tile.compressed import StoredKernels

if TYPE_CHECKING:
    from hotfuse.backends.protocol import LoadedKernel

CLOCKED = 4
"""Of a native run of several partitions, one sample in so many is timed inside: that takes an arena of its own each time."""
MAX_COSTS = 64
"""Signatures whose flops and bytes are worked out."""
_now = time.perf_counter_ns
_meters = Meters()


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a sampled call gave."""

    outs: tuple[Any, ...]
    ns: int
    """The call's own time."""
    cost_ns: int
    """What watching is known to have added."""
    signature: int


class InstrumentedPlan:
    """A plan, instrumented."""

    def __init__(self, plan: Plan, weights: Mapping[str, Any], graph: int, names: Names, look: RecordValue) -> None:
        self.plan = plan
        """Kept, so that nobody takes another plan for this one."""
        self.asked = False
        """Whether somebody is at making counting kernels for it."""
        self._graph, self._names = graph, names
        self._noting = Noting(look)
        self._batches: list[Batch] = []
        """Memory for records that no call is in."""
        self._taken = 0
        self._plain_ns = 0
        self._costs: dict[int, tuple[tuple[int, int], ...]] = {}
        self._working_out: set[int] = set()
        """Signatures whose costs were asked for."""
        self._parts = [names.item(graph, f"{'' if plan.tier == 0 else f'tier {plan.tier} '}partition {p.index}")
                       for p in plan.partitioning.parts]
        in_library = plan.tier == 0 and all(p.key in weights for p in plan.graph.params)
        between = {v.name for u in plan.units for v in u.outputs} | {v.name for v in output_values(plan.graph)}
        visible = None if in_library else between | {name for name, _ in stored(plan)}
        self.points = choose(plan.partitioning, visible=visible)
        self._at = {p.value: (names.item(graph, p.value), p) for p in self.points}
        self._inputs = [(i, self._at[v.name]) for i, v in enumerate(plan.graph.inputs) if v.name in self._at]
        self._inside = RunProbes(plan, self._at, between)
        made = Wrapped(plan, self._at, lambda name: names.item(graph, name), self._noting, self._inside,
                       weights if in_library else None)
        self._run, self._outputs = made.run, made.outputs
        self.hidden = made.hidden
        """Whether there are control nodes whose outcome this variant cannot see."""

    @property
    def failed(self) -> int:
        """Looks that raised an error."""
        return self._noting.failed

    @property
    def uncounted(self) -> int:
        """Values that kernels were to count and did not store element by element."""
        return self._inside.uncounted

    # --- running ---------------------------------------------------------------------------------

    def __call__(self, number: int, inputs: Sequence[Any], publish: Callable[[Batch], None]) -> Sampled:
        """Serve a call and publish what it showed; errors of the plan are the caller's, as without watching."""
        start = _now()
        noting = self._noting
        shapes = tuple([tuple(t.shape) for t in inputs])
        signature = self._names.signature(self._graph, shapes)
        batch = self._batch()
        subject = Subject(self._graph, signature, number, time.time_ns())
        turn = self._taken % CLOCKED
        counting = self._inside.counting and turn == CLOCKED // 2
        s = SampledCall(batch, subject, [-1] * len(self._parts), turn == 0, counting)
        self._taken += 1
        for i, (item, point) in self._inputs:
            noting.see(s, inputs[i], item, point)
        noting.here.sample = s
        _meters.start()
        before = _now()
        s.cost = 0
        try:
            outs = self._run(*inputs)
        finally:
            noting.here.sample = None
        after = _now()
        counted, timed = _meters.stop(), sum(ns for ns in s.times if ns > 0)
        for k, (item, point) in self._outputs:
            noting.see(s, outs[k], item, point)
        costs = self._costs.get(signature)
        for i, ns in enumerate(s.times):
            if ns >= 0:
                moved, flops = costs[i] if costs is not None else (UNKNOWN, UNKNOWN)
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

    # --- what it is to be given, in the background -----------------------------------------------

    def wants(self) -> StoredKernels:
        """The kernels that would have to count, by number: asked once there were samples enough to make it worth the compile."""
        return StoredKernels({}) if self.asked else self._inside.wants(self._taken)

    def count_with(self, kernels: Mapping[int, LoadedKernel]) -> None:
        """Counting kernels there are now; some sampled calls enter them from here on."""
        self._inside.count_with(kernels)

    def needs_costs(self, signature: int) -> bool:
        """Whether a signature's flops and bytes are to be worked out: the caller that is told so works them out."""
        if signature in self._costs or signature in self._working_out or len(self._working_out) >= MAX_COSTS:
            return False
        self._working_out.add(signature)  # once: the job may wait for long behind others
        return True

    def work_out(self, signature: int, shapes: Sequence[Sequence[int]]) -> None:
        """Flops and bytes per partition, in the background; lets go of the interpreter after every node."""
        parts = self.plan.partitioning.parts
        env = bind(self.plan.graph, list(shapes))
        if isinstance(env, Mismatch):
            self._costs[signature] = ((UNKNOWN, UNKNOWN),) * len(parts)
            return
        totals = [partition_cost(self.plan, p.index, env) for p in parts]
        self._inside.size(signature, env)
        self._costs[signature] = tuple((or_unknown(t.bytes), or_unknown(t.flops)) for t in totals)
