"""One form of a graph on its way to a plan with generated kernels: its groups are asked for, tried, exchanged and put together."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch

from hotfuse.analysis.liveness import last_uses
from hotfuse.backends import registry
from hotfuse.backends.device_code import device_kernel
from hotfuse.backends.library import meaning
from hotfuse.backends.protocol import Run
from hotfuse.backends.pycode import flat_function
from hotfuse.base.errors import CaptureError, HotfuseError, InternalError
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.base.settings import Settings
from hotfuse.cache.address import digest
from hotfuse.compile.answer_bodies import DevicePlanAnswer, DeviceUnitAnswer, MadeDeviceKernel, received
from hotfuse.compile.device.described import described, untaught
from hotfuse.compile.device.folding import FOLDED as FOLDED_OPS
from hotfuse.compile.device.launch import GeneratedKernel, generated, observed_strides
from hotfuse.compile.device.pace import RESTS, RestingPace, idle
from hotfuse.compile.device.remembered import STAYS, remembered_kernels
from hotfuse.compile.device.trial import BEFORE_CALLS, DeviceTrial, Differ, tried
from hotfuse.compile.device.tried_groups import (
    DeviceCandidate,
    DevicePart,
    LoadedLater,
    TriedGroup,
    rounded_moments,
    written_rows,
)
from hotfuse.compile.device.tuning import Choice, alternatives, descended
from hotfuse.compile.parts import GeneratedPlan
from hotfuse.compile.request_bodies import (
    DeviceKernelTime,
    DevicePlanRequest,
    DeviceTimesRequest,
    DeviceUnitRequest,
    RequestBody,
    request_of,
)
from hotfuse.compile.requests import Here
from hotfuse.compile.value import FIRST_PLAN_GAIN
from hotfuse.compile.workers import wire
from hotfuse.compile.workers.service import sized
from hotfuse.compile.workers.task import Task
from hotfuse.ir.graph import Graph, Kind, Node, output_values, sources
from hotfuse.ir.normal import normalized
from hotfuse.ir.subgraph import extract
from hotfuse.ir.text import parse, show
from hotfuse.lower.common.codec import from_json
from hotfuse.machine.device_clock import DeviceTimer
from hotfuse.machine.device_stream import in_own_stream
from hotfuse.ops.table import Access, lookup, packet

TRIALS_S = 60.0
"""Seconds that compiling the kernels of one graph may take, and as many that trying them may, rests between trials not counted."""
MARGIN = 0.97
"""A kernel must take less than this part of the library's time."""
MAX_PLACES = 12
"""Places in the model whose weights a trial goes through."""
TUNING_S, MAX_TUNING_S = 4.0, 45.0
"""Seconds for choosing kernels inside the whole plan, that are measured and with the rests between."""
NORMS, FOLDED = "layer norms", "folded"
"""What is kept of them, where products took them in; else `STAYS`."""
DONE_S = 0.05
LEARNING_GAIN = 0.0
"""What is expected of learning: everything else goes first."""
SHARES = 5
"""Requests that the tilings of one group are divided into, for workers that would be idle."""

Strides = Mapping[str, tuple[int, ...]]


def tf32_allowed() -> bool:
    """Whether torch's setting lets products of fp32 round their operands; where both of its names were used, the older raises."""
    try:
        return bool(torch.backends.cuda.matmul.allow_tf32)
    except RuntimeError:
        return torch.backends.cuda.matmul.fp32_precision == "tf32"


@dataclass(frozen=True, slots=True)
class DeviceJob:
    """What kernels are wanted for."""

    graph: Graph
    weights: Mapping[str, torch.Tensor]
    sample: Sequence[torch.Tensor]
    settings: Settings
    device: torch.device
    differ: Differ
    stop: Callable[[], bool]
    few: bool = False
    """Whether a plan is wanted soon."""


class Generation:
    """One graph on its way."""

    def __init__(self, job: DeviceJob, *, folded: bool = False, before: Mapping[str, TriedGroup] | None = None) -> None:
        """`folded`: products take in the layer norms between them. `before` has groups that were tried already."""
        graph, settings, device = job.graph, job.settings, job.device
        self.weights, self.sample, self.settings, self.device = job.weights, job.sample, settings, device
        self.differ, self.stop = job.differ, job.stop
        self.before = before or {}
        self.target = registry.device_kernels().target(device)
        self.executor = Here() if settings.capture == "inline" else sized(settings).pool
        self.until = time.monotonic() + TRIALS_S
        self.spent: dict[str, float] = {}
        """Seconds by what they were spent on, for a reader."""
        self.chosen_by: dict[str, bool] = {}
        """Who said which tilings are worth compiling."""
        self.teaching: Future[wire.Message] | None = None
        self.units: dict[str, TriedGroup] = {}
        self.given = graph
        self.name = torch.cuda.get_device_name(device)
        self.kept = remembered_kernels(show(graph), f"{self.name} {self.target.arch}", settings, tf32=tf32_allowed())
        self.few = job.few and not self.kept.tilings
        self.pace = RestingPace(0.0 if job.few else RESTS)
        with self._phase("grouping"):
            planned, _ = received(self._ask(DevicePlanRequest(show(graph), folded)).result(), DevicePlanAnswer)
        self.foldable = planned.foldable and not folded
        self.graph = parse(planned.graph)
        self.parts: list[DevicePart] = []
        at = 0
        for count, kind in planned.groups:
            self.parts.append(DevicePart(range(at, at + count), "" if kind == "library" else "?"))
            at += count
        with self._phase("looking how data lie"):
            self.strides = self._observed()

    @contextmanager
    def _phase(self, name: str) -> Generator[None]:
        begin = time.monotonic()
        try:
            yield
        finally:
            self.spent[name] = self.spent.get(name, 0.0) + time.monotonic() - begin

    def _ask(self, body: RequestBody, gain: float = FIRST_PLAN_GAIN) -> Future[wire.Message]:
        task = Task(body.kind, request_of(body, self.settings).header(), timeout=self.settings.unit_timeout_s, gain=gain,
                    threads=1)  # calls keep one thread of the host busy, however many torch would use there
        answer: Future[wire.Message] = self.executor.submit(task)
        return answer

    def plan(self) -> GeneratedPlan:
        """Compile, try, put together."""
        self.compile_and_try()
        return self.assembled()

    def compile_and_try(self) -> None:
        """All groups, in workers and on the device."""
        with self._phase("compiling"):
            for part in self.parts:
                self._request(part)
            while (waiting := [p for p in self.parts if p.key and self._pending(p)]) and time.monotonic() < self.until:
                if self.stop():
                    raise CaptureError("the kernels are no longer needed")
                for part in waiting:
                    self._absorb(part)
                idle(DONE_S)
        with self._phase("trials"):
            self._trials()
        self._teach()

    def _teach(self) -> None:
        """What kernels took, for the model of this device (`compile.learn.device_times`): nobody waits for that."""
        units = [(digest(k), u, u.trial) for k, u in self.units.items() if u.trial is not None and k not in self.before]
        times = [DeviceKernelTime(problem, c.work, us * 1e-6) for problem, u, trial in units
                 for c, us in zip(u.candidates, trial.us, strict=True) if us is not None]  # fmt: skip
        if times and self.settings.record:
            shape, arch = described(self.device, self.target, self.settings).to_dict(), f"{self.target.backend} {self.target.arch}"
            self.teaching = self._ask(DeviceTimesRequest(self.name, arch, shape, tuple(times)), LEARNING_GAIN)

    def alone_us(self) -> float:
        """What the kernels of all groups took by themselves, where they were tried; infinite where a group that takes norms in
        could not be."""
        total = 0.0
        for unit in (self.units[p.key] for p in self.parts if p.key in self.units):
            if unit.trial is not None:
                total += unit.trial.chosen_us(unit.chosen)
            elif any(packet(n.op) in FOLDED_OPS for n in unit.graph.nodes):
                return float("inf")
        return total

    # -- compiling

    def _request(self, part: DevicePart) -> None:
        if not part.key:
            return
        piece = extract(self.graph, part.nodes, "group")
        normal = normalized(piece)
        if all(lookup(n.op).access is Access.MOVEMENT for n in piece.nodes):  # views cost nothing with the library
            part.key = ""
            return
        alike = zip(sources(normal), sources(piece), strict=True)
        strides = {n.name: self.strides[v.name] for n, v in alike if v.name in self.strides}
        text = show(normal)
        part.key = f"{text}\n{sorted(strides.items())}"
        unit = self.units.get(part.key)
        if unit is None and (old := self.before.get(part.key)) is not None:
            unit = self.units[part.key] = replace(old, uses=0)
        if unit is None:
            ops = "_".join(dict.fromkeys(packet(n.op).partition(".")[2] for n in normal.nodes))[:60]
            unit = self.units[part.key] = TriedGroup(normal, strides, ops)
            target = (self.target.backend, self.target.arch, self.target.warp)
            chosen = self.kept.tiling(part.key)
            wanted, shares = (chosen, 1) if chosen not in ("", STAYS) else ("", SHARES)
            asked = DeviceUnitRequest(text, strides, target, tf32_allowed(), (0, shares), self.name, wanted=wanted)
            unit.futures = [self._ask(replace(asked, share=(i, shares))) for i in range(1 if self.few else shares)]
        unit.uses += 1

    def _pending(self, part: DevicePart) -> bool:
        unit = self.units[part.key]
        return bool(unit.futures) or (not unit.candidates and len(part.nodes) > 1)

    def _absorb(self, part: DevicePart) -> None:
        """Take a unit's answer in, if it is there; a group without a kernel goes on as two halves."""
        unit = self.units[part.key]
        if unit.futures:
            if not all(f.done() for f in unit.futures):
                return
            for future in unit.futures:
                try:
                    answer, codes = received(future.result(), DeviceUnitAnswer)
                    unit.because = unit.because or answer.because
                    self.chosen_by[answer.by] = True
                    unit.candidates += [self._candidate(unit, k, code) for k, code in zip(answer.kernels, codes, strict=True)]
                except HotfuseError as e:
                    unit.because = unit.because or e.because or e.what
            unit.futures = []
            self._recall(part.key, unit)
        if not unit.candidates and len(part.nodes) > 1:
            middle = part.nodes[len(part.nodes) // 2]
            second = DevicePart(range(middle, part.nodes.stop), "?")
            self.parts.insert(self.parts.index(part) + 1, second)
            part.nodes, part.key = range(part.nodes.start, middle), "?"
            for half in (part, second):
                self._request(half)

    def _recall(self, key: str, unit: TriedGroup) -> None:
        """What an earlier process chose is the only candidate."""
        tiling = self.kept.tiling(key)
        if tiling == STAYS:
            unit.chosen_before = unit.tried = True
            unit.because = "the library's kernels were faster in an earlier process"
        elif found := [c for c in unit.candidates if c.tiling == tiling]:
            unit.chosen_before, unit.candidates = True, found

    def _candidate(self, unit: TriedGroup, made: MadeDeviceKernel, code: bytes) -> DeviceCandidate:
        function = LoadedLater(device_kernel(code, made.built), self.device)
        kernel = generated(unit.graph, from_json(dict(made.lowered)), unit.strides, function, self.device)
        return DeviceCandidate(kernel, made.tiling, made.work)

    # -- on the device

    def _observed(self) -> Strides:
        """How values lie that lie otherwise than their types say, from one run of the library's kernels."""
        found: dict[str, tuple[int, ...]] = {}

        def look(env: Mapping[str, Any], nodes: range) -> None:
            values = [v for i in nodes for v in self.graph.nodes[i].outs]
            found.update(observed_strides(values, env))

        found.update(observed_strides(sources(self.graph), self._begin()))
        self._walk(look)
        return found

    def _begin(self) -> dict[str, Any]:
        env: dict[str, Any] = {v.name: t for v, t in zip(self.graph.inputs, self.sample, strict=True)}
        return env | {p.value.name: self.weights[p.key] for p in self.graph.params}

    def _walk(
        self, after: Callable[[Mapping[str, Any], range], None],
        before: Callable[[DevicePart, Mapping[str, Any]], None] | None = None,
    ) -> None:  # fmt: skip
        """The library's kernels, part by part; tensors are dropped after their last use."""
        env, dead = self._begin(), last_uses(self.graph)
        with torch.no_grad(), in_own_stream(self.sample):
            for part in self.parts:
                if before is not None:
                    before(part, env)
                piece = extract(self.graph, part.nodes, "part")
                run, _ = flat_function(piece, meaning, self.weights)
                outs = run(*(env[v.name] for v in piece.inputs))
                env.update({v.name: t for v, t in zip(output_values(piece), outs, strict=True)})
                after(env, part.nodes)
                for i in part.nodes:
                    for v in dead[i]:
                        env.pop(v.name, None)

    def _trials(self) -> None:
        def one(part: DevicePart, env: Mapping[str, Any]) -> None:
            unit = self.units.get(part.key)
            if unit is None or unit.tried or not unit.candidates:
                return
            if self.pace.busy_s > TRIALS_S or self.stop():
                unit.because = unit.because or "no time was left for a trial"
                return
            self._try(part, unit, env)

        self._walk(lambda _env, _nodes: None, one)

    def _try(self, part: DevicePart, unit: TriedGroup, env: Mapping[str, Any]) -> None:
        unit.tried = True
        alike = [part, *(p for p in self.parts if p.key == part.key and p is not part)][:MAX_PLACES]
        pieces = [extract(self.graph, p.nodes, "part") for p in alike]
        libraries = [flat_function(piece, meaning, self.weights)[0] for piece in pieces]
        inputs = [env[v.name] for v in pieces[0].inputs]
        every = [[*inputs, *(self.weights[p.key] for p in piece.params)] for piece in pieces]
        wanted, moments = written_rows(pieces[0], env), rounded_moments(pieces[0])
        try:
            found: DeviceTrial = tried(
                [lambda run=run: wanted(run(*inputs)) for run in libraries],
                [[lambda k=k, given=given: wanted(k(*given)) for given in every] for k, *_ in unit.candidates],
                lambda got, want: self.differ(moments(got), moments(want)), self.device, self.pace,
            )  # fmt: skip
        except (HotfuseError, RuntimeError) as e:
            unit.because = str(e).splitlines()[0][:200]
            return
        if found.wrong:
            unit.because = f"of a kernel: {found.wrong}"
        at = found.best
        if at < 0:
            return
        unit.trial, us = found, found.us[at]
        assert us is not None
        if us < MARGIN * found.library_us:
            unit.chosen = at
        else:
            unit.because = f"its best kernel takes {unit.timing(at)}"

    def before_calls(self) -> AbstractContextManager[None]:
        """A stream that goes before those of calls, done at the end."""
        return before_calls(self.device)

    def timer(self, run: Run) -> DeviceTimer:
        """For what a whole plan takes on the device."""
        return DeviceTimer(lambda: run(*self.sample), self.device)

    def chosen(self) -> dict[str, str]:
        """By group, the kernel that serves."""
        return {k: STAYS if u.kernel is None else u.candidates[u.chosen].tiling for k, u in self.units.items() if u.tried}

    def keep(self, more: Mapping[str, str]) -> None:
        """What was chosen, and more, for the next process."""
        norms = self.kept.tiling(NORMS)
        self.kept.keep({**({NORMS: norms} if norms else {}), **self.chosen(), **more})

    def _tune(self) -> str:
        """Kernels by what the whole plan takes; what came of it, in words."""
        tried = {k: (u, u.trial) for k, u in self.units.items() if u.trial is not None}
        if self.few:
            return "of each group the likeliest kernels alone were made; the others follow"
        if all(u.chosen_before for u, _ in tried.values()):
            return "its kernels are those that an earlier process chose in the whole plan"
        order = sorted(tried, key=lambda k: -tried[k][0].uses * tried[k][1].library_us)
        others = {k: alternatives(t.us, u.chosen, t.library_us) for k in order for u, t in [tried[k]]}
        until, at_last = self.pace.busy_s + TUNING_S, time.monotonic() + MAX_TUNING_S
        made: dict[tuple[int, ...], DeviceTimer] = {}
        with torch.no_grad(), self.before_calls():

            def measure(choice: Choice) -> float:
                at = tuple(choice[k] for k in order)
                if at not in made:
                    for k in order:
                        self.units[k].chosen = choice[k]
                    run = self._outlined()[0]
                    run(*self.sample)  # code is loaded
                    made[at] = self.timer(run)
                return self.pace(made[at].seconds)

            def over() -> bool:
                return self.stop() or self.pace.busy_s > until or time.monotonic() > at_last

            first = {k: self.units[k].chosen for k in order}
            try:
                found = descended(first, others, measure, over)
            except (HotfuseError, RuntimeError) as e:  # what the trials chose serves all the same
                for k in order:
                    self.units[k].chosen = first[k]
                return f"kernels were not exchanged in the whole plan: {str(e).splitlines()[0][:200]}"
        for k in order:
            self.units[k].chosen = found.chosen[k]
        ended = "" if found.complete else ", until the time for that was over"
        return (f"in the whole plan {found.exchanged} kernels were exchanged for others{ended}: "
                f"{found.before_us:.1f} us before, {found.after_us:.1f} us after")  # fmt: skip

    # -- the plan

    def _outlined(self) -> tuple[Run, str, Mapping[str, GeneratedKernel], int, int]:
        """The plan with the kernels that are chosen now: its run and text, its kernels by group, how many calls of those and of the
        library."""
        runs: dict[str, Run] = {}
        nodes: list[Node] = []
        kernels: dict[str, GeneratedKernel] = {}
        for part in self.parts:
            unit = self.units.get(part.key)
            if unit is None or unit.kernel is None:
                nodes.extend(self.graph.nodes[i] for i in part.nodes)
                continue
            piece = extract(self.graph, part.nodes, "part")
            op = f"generated.k{len(runs)}"
            runs[op] = kernels[part.key] = unit.kernel
            outs = tuple(dict.fromkeys(output_values(piece)))
            nodes.append(Node(Kind.OPERATOR, op, sources(piece), outs, loc=self.graph.nodes[part.nodes[0]].loc))
        outline = Graph(self.graph.name, self.graph.inputs, self.graph.params, tuple(nodes), self.graph.outputs)
        run, source = flat_function(outline, lambda n: (runs[n.op], True) if n.op in runs else meaning(n), self.weights)
        return run, source, kernels, len(runs), len(nodes) - len(runs)

    def assembled(self) -> GeneratedPlan:
        """One function of the kernels that won, after exchanges in the whole plan; raises InternalError where none did."""
        units = self.units.values()
        if all(u.kernel is None for u in units):
            raise InternalError("no generated kernel beat the library's on the device", because="; ".join(self._stays())[:500])
        with self._phase("tuning"):
            tuned = self._tune()
        run, source, kernels, calls, library = self._outlined()
        tried = sum(len(u.candidates) for u in units)
        took = ", ".join(f"{k} {v:.1f}" for k, v in self.spent.items())
        spent = f"{tried} kernels of {len(self.units)} groups, chosen by {' and '.join(self.chosen_by)}; seconds: {took}"
        notes = [f"{u.uses} x {u.ops}: {u.timing(u.chosen)}" for u in units if u.kernel is not None]
        head = f"{calls} calls of {len(kernels)} generated kernels on {self.device}, {library} library calls"
        said = (head, tuned, f"{spent}{untaught(self.teaching)}", *notes, *self._stays())
        untried = sum(bool(u.candidates) for u in units) if self.few else 0
        return GeneratedPlan(self.given, run, source, tuple(kernels.values()), said, untried)

    def _stays(self) -> list[str]:
        """Groups that stay with the library, and why."""
        return [f"{u.uses} x {u.ops} stays with the library: {u.because}" for u in self.units.values()
                if u.kernel is None and u.because and (u.tried or len(u.graph.nodes) == 1)]  # fmt: skip


@contextmanager
def before_calls(device: torch.device) -> Generator[None]:
    """A stream that goes before those of calls, done at the end."""
    with torch.cuda.stream(torch.cuda.Stream(device, priority=BEFORE_CALLS)), in_own_stream([torch.empty(0, device=device)]):
        yield
