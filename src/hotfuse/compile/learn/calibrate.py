"""Calibration: draw problems, have workers compile their kernels, measure those while nothing compiles, learn.

Batches: while one is measured no worker has work. Every batch is in the store before the next begins, so an interrupted
calibration loses at most one, and the next one goes on behind it.
"""

from __future__ import annotations

import itertools
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import field

import torch

from hotfuse.base.errors import CaptureError, HotfuseError
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.compile.answer_bodies import KernelAnswer, received
from hotfuse.compile.compilation import Executor
from hotfuse.compile.host import Host, this_host
from hotfuse.compile.learn import measure
from hotfuse.compile.learn.measure import BoundCall, CompiledCandidate, Shelf, bind, timed
from hotfuse.compile.workers import wire
from hotfuse.compile.workers.task import Task
from hotfuse.hpm import calibrate as rows
from hotfuse.hpm import fleet
from hotfuse.hpm.drawn_problems import Problem, calibrated, remembered
from hotfuse.hpm.model import PerformanceModel
from hotfuse.hpm.row_cache import RowCache
from hotfuse.hpm.work import Candidate
from hotfuse.ir.subgraph import extract
from hotfuse.lower.cpu.tiling import Core
from hotfuse.profile.store import Store

BATCH = 40
"""Kernels compiled before they are measured together."""
MAX_BYTES = 384 << 20
"""Data of a batch."""
MAX_IDLE_BYTES = 96 << 20
"""The same for what is measured in idle time, beside a model that serves."""
OTHER_TILES, OTHER_VECTORS = 0.6, 0.9
"""How often a problem is measured in other tilings, with and without a product: tilings are only told apart by those."""
TRAIN_S = 16.0
"""What is kept of the budget for training."""
COMPILE_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Item:
    """One kernel to compile, and the calls to measure it at; `core` None is the library."""

    problem: Problem
    core: Core | None


@dataclass(slots=True)
class Report:
    """What a calibration did."""

    measured: int = 0
    compiled: int = 0
    skipped: int = 0
    """Measured by an earlier one."""
    refused: Counter[str] = field(default_factory=Counter[str])
    seconds: float = 0.0
    interrupted: bool = False
    model: PerformanceModel | None = None


Progress = Callable[[float, Report], None]
"""Told how much of the budget is used, 0 to 1."""


def items(problems: Iterable[Problem], core: Core) -> Iterator[Item]:
    """What is made of each problem: its kernel, often also in other tilings, in two parts, and by the library."""
    for problem in problems:
        r = random.Random(problem.key)
        yield Item(problem, core)
        anchor = problem.family in ("contraction", "convolution")
        for other in measure.core_variants(core)[1:] if anchor and r.random() < OTHER_TILES else ():
            yield Item(problem, other)
        if not anchor and problem.family != "attention" and r.random() < OTHER_VECTORS:
            yield Item(problem, Core(max(4, core.lanes // 2), core.registers, core.l1, core.l2))
        if r.random() < 0.5:
            yield Item(problem, None)
        if len(problem.graph.nodes) > 1 and r.random() < 0.3:
            yield from (Item(part, core) for part in parts(problem, r))


def parts(problem: Problem, r: random.Random) -> list[Problem]:
    """A group cut in two at a random place."""
    at, n = r.randrange(1, len(problem.graph.nodes)), len(problem.graph.nodes)
    heads = "reduction" if problem.family == "reduction" else "pointwise"
    kinds = (problem.family, "pointwise") if problem.family in ("contraction", "convolution") else (heads, heads)
    made = zip((range(at), range(at, n)), kinds, strict=True)
    return [Problem(kind, extract(problem.graph, nodes, "group"), problem.sizes) for nodes, kind in made]


class Calibration:
    """One run; `step` does a batch."""

    def __init__(
        self, store: Store, at: Host, executor: Executor, *, seed: int = 0, problems: Iterable[Problem] | None = None
    ) -> None:
        self.store, self.host, self.executor = store, at, executor
        self.report = Report()
        self.row_cache = RowCache(measure.tile_of)
        self._known = rows.measured_before(store, at.machine)
        own = itertools.chain(remembered(store.problems()), calibrated(seed)) if problems is None else problems
        self.items = items(own, at.core)

    def step(self, kernels: int = BATCH, passes: int = measure.PASSES, until: float | None = None) -> int:
        """A batch: compile, measure, keep; how many rows it added. `until` (perf_counter) shortens it."""
        made = self._compiled(kernels, until)
        batch: list[BoundCall] = []
        shelf = Shelf()
        added = held = 0
        for item, kernel in made:
            for sizes in item.problem.sizes:
                candidate = Candidate(item.problem.graph, sizes, item.core, self.host.at.threads)
                if self._name(item, candidate) in self._known:
                    continue
                size = _bytes(self.row_cache, candidate)
                if batch and held + size > MAX_BYTES:
                    added += self._measured(batch, passes, until)
                    batch, shelf, held = [], Shelf(), 0
                try:
                    batch.append(bind(candidate, item.problem.key, kernel, shelf))
                    held += size
                except HotfuseError as e:
                    self.report.refused[e.because or e.what] += 1
        return added + self._measured(batch, passes, until)

    def unknown(self, item: Item) -> list[Candidate]:
        """The calls of an item that nobody has measured."""
        every = [Candidate(item.problem.graph, s, item.core, self.host.at.threads) for s in item.problem.sizes]
        new = [c for c in every if self._name(item, c) not in self._known]
        self.report.skipped += len(every) - len(new)
        return new

    def _name(self, item: Item, candidate: Candidate) -> str:
        return rows.kernel_name(item.problem.key, candidate.sizes, item.core, self.host.at.threads)

    def _compiled(self, kernels: int, until: float | None) -> list[tuple[Item, CompiledCandidate | None]]:
        """The next items that are not known yet, compiled."""
        flying: list[tuple[Item, Future[wire.Message] | None]] = []
        for item in self.items:
            names = {rows.kernel_name(item.problem.key, s, item.core, self.host.at.threads) for s in item.problem.sizes}
            if names <= self._known:
                self.report.skipped += len(names)
                continue
            asked = None
            if item.core is not None:
                task = Task(
                    "a kernel to measure", measure.request(item.problem.graph, item.core), timeout=COMPILE_TIMEOUT_S
                )
                asked = self.executor.submit(task)
            flying.append((item, asked))
            if len(flying) >= kernels:
                break
        made: list[tuple[Item, CompiledCandidate | None]] = []
        for item, asked in flying:
            try:
                if asked is None:
                    made.append((item, None))
                elif until is not None and time.perf_counter() > until and not asked.done() and asked.cancel():
                    continue
                else:
                    made.append((item, measure.candidate_from(*received(asked.result(), KernelAnswer))))
                    self.report.compiled += 1
            except CaptureError as e:
                self.report.refused[e.because or e.what] += 1
        return made

    def _measured(self, batch: Sequence[BoundCall], passes: int, until: float | None) -> int:
        if not batch:
            return 0
        timed(batch, passes, until)
        return self.keep(batch)

    def keep(self, batch: Sequence[BoundCall]) -> int:
        """Put what was timed into the store."""
        table = self.row_cache.rows([b.candidate for b in batch])
        figures = [b.figure() for b in batch]
        names = [rows.kernel_name(b.group, b.candidate.sizes, _core(b), b.candidate.threads) for b in batch]
        found = rows.measurements(names, table, [s for s, _ in figures], [n for _, n in figures], self.host.at.threads)
        self.store.record_measurements(found, self.host.machine)
        self._known.update(names)
        self.report.measured += len(found)
        return len(found)


def _core(b: BoundCall) -> Core | None:
    return b.candidate.core if isinstance(b.candidate.core, Core) else None


def _bytes(row_cache: RowCache, candidate: Candidate) -> int:
    return int(row_cache.rows([candidate])[0, _EDGES].sum() * 2)


_EDGES = [rows.NAMES.index(n) for n in ("bytes_in", "bytes_const", "bytes_out")]


def calibrate(
    store: Store, budget_s: float = 60.0, *, executor: Executor, threads: int = 1, progress: Progress | None = None, seed: int = 0,
    problems: Iterable[Problem] | None = None,
) -> Report:  # fmt: skip
    """Measure for so long, then train a new version; an interrupt ends it early with what there is."""
    start = time.perf_counter()
    until = start + max(budget_s - min(TRAIN_S, budget_s / 4), 0.5)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    run: Calibration | None = None
    try:
        run = Calibration(store, this_host(store, threads), executor, seed=seed, problems=problems)
        while time.perf_counter() < until:
            left = (until - time.perf_counter()) / max(until - start, 1e-9)
            if not run.step(BATCH if left > 0.25 else BATCH // 2, until=until) and problems is not None:
                break
            if progress is not None:
                progress(min(1.0, (time.perf_counter() - start) / budget_s), run.report)
    except KeyboardInterrupt:
        if run is None:
            raise
        run.report.interrupted = True
    finally:
        torch.set_num_threads(before)
    others = fleet.support(fleet.machines(store, without=run.host.machine))
    run.report.model = rows.train(store, run.host.machine, run.host.at, others)
    run.report.seconds = time.perf_counter() - start
    return run.report


class Slice:
    """Calibration in idle time: `step()` does a piece of work, some 50 ms or one kernel's compilation; False where none is left.

    It may be stopped anywhere in between. Measuring goes one turn of one kernel at a time, and of several turns the least counts,
    so a turn that was held up does no harm.
    """

    def __init__(
        self,
        store: Store,
        at: Host,
        executor: Executor,
        *,
        slice_s: float = 0.04,
        kernels: int = 8,
        seed: int = 1,
        problems: Iterable[Problem] | None = None,
    ) -> None:
        self._run = Calibration(store, at, executor, seed=seed, problems=problems)
        self._executor, self._slice_s, self._kernels = executor, slice_s, kernels
        self._flying: list[tuple[Item, Future[wire.Message] | None]] = []
        self._batch: list[BoundCall] = []
        self._held = 0
        self._turns: Iterator[BoundCall] = iter(())

    @property
    def report(self) -> Report:
        """What was done so far."""
        return self._run.report

    def step(self) -> bool:
        """Some work."""
        if self._flying:
            self._bind()
            return True
        if self._batch:
            self._measure(time.perf_counter() + self._slice_s)
            return True
        return self._ask()

    def _ask(self) -> bool:
        """Have a few kernels compiled that nobody has measured."""
        for item in self._run.items:
            if not self._run.unknown(item):
                continue
            asked = None
            if item.core is not None:
                task = Task("a kernel to measure", measure.request(item.problem.graph, item.core), priority=-math.inf,
                            timeout=COMPILE_TIMEOUT_S)  # fmt: skip
                asked = self._executor.submit(task)
            self._flying.append((item, asked))
            if len(self._flying) >= self._kernels:
                break
        return bool(self._flying)

    def _bind(self) -> None:
        item, future = self._flying.pop()
        try:
            made = None if future is None else measure.candidate_from(*received(future.result(), KernelAnswer))
            self._run.report.compiled += made is not None
            for candidate in self._run.unknown(item):
                size = _bytes(self._run.row_cache, candidate)
                if self._held + size > MAX_IDLE_BYTES:
                    self._run.report.refused["too much memory for idle time"] += 1
                    continue
                with torch.no_grad():
                    self._batch.append(bind(candidate, item.problem.key, made))
                    self._batch[-1].choose_repeats()
                self._held += size
        except (HotfuseError, RuntimeError) as e:
            self._run.report.refused[
                (e.because or e.what) if isinstance(e, HotfuseError) else str(e).splitlines()[0][:200]
            ] += 1
        if not self._flying:
            self._turns = itertools.chain.from_iterable(itertools.repeat(self._batch, measure.PASSES))

    def _measure(self, until: float) -> None:
        with torch.no_grad():
            for b in self._turns:
                b.turn()
                if time.perf_counter() > until:
                    return
        self._run.keep(self._batch)
        self._batch, self._held = [], 0
