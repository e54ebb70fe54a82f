"""Idle time in a worker: kernels of the user's models are measured first, then drawn ones; the model is trained again when it pays.

The request of kind `idle` works for some seconds and answers what it did. Everything that was measured is in the store then; what
is begun (kernels compiled, half their turns taken) is kept for the next request. The server stops the process where it stands
whenever calls come, and lets it go on later.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import replace

import torch

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.compile import request_context
from hotfuse.compile.answer_bodies import Answered, IdleAnswer, ModelFacts
from hotfuse.compile.compilation import Executor
from hotfuse.compile.host import this_host
from hotfuse.compile.learn.calibrate import Slice
from hotfuse.compile.learn.learned import SERVING, Notes, notes
from hotfuse.compile.request_bodies import IdleRequest
from hotfuse.compile.variants.served_threads import apart
from hotfuse.hpm import calibrate as rows
from hotfuse.hpm import fleet, model
from hotfuse.hpm.drawn_problems import draws, remembered
from hotfuse.hpm.model import PerformanceModel
from hotfuse.hpm.trust import Trust, judged

MAX_DRAWN_ROWS = 2000
"""Measurements of drawn kernels after which more of them teach little; groups of the user's models are measured all the same."""
FIRST = 300
"""Rows of the first model: one of fewer predicts what it has not seen no better than rooflines do."""
FIRST_SUPPORTED = 20
"""The same where rows of other machines support it."""
TRAIN_AFTER = 0.2
"""The part of the rows that must be new before a model is trained again."""
SEED = 1


@dataclass(slots=True)
class _Work:
    """What was begun for a store."""

    slice: Slice
    problems: frozenset[str]
    """Groups it knew of."""
    in_vain: int = 0
    """New rows when a model was last trained that was no better than rooflines."""


_begun: dict[tuple[str, int], _Work] = {}


def handle(request: IdleRequest, executor: Executor) -> Answered:
    """Work for `seconds`; answers what was measured for the threads that calls have, and the version of a model trained."""
    return apart(request_context.threads(), lambda: _handle(request.seconds, executor))


def _handle(seconds: float, executor: Executor) -> Answered:
    kept = notes()
    if kept is None or not kept.place.record:
        return IdleAnswer(0, left=False, because="there is no store to write to"), []
    threads = kept.host.at.threads
    torch.set_num_threads(threads)
    until = time.perf_counter() + seconds
    kept.flush()
    kept.host = this_host(kept.store, threads)  # measures the machine's peaks, where nobody has
    work = _work(kept, executor)
    before, left = work.slice.report.measured, True
    while left and time.perf_counter() < until:
        left = work.slice.step()
    made = _trained(kept, work, last=not left)
    return IdleAnswer(
        work.slice.report.measured - before, left, None if made is None else made.version, None if made is None else _plain(made),
        dict(work.slice.report.refused),
    ), []  # fmt: skip


def _work(kept: Notes, executor: Executor) -> _Work:
    """What goes on, or begins where calls have brought groups that it does not know of."""
    own = kept.store.problems()
    names = frozenset(f"{text} {sorted(sizes.items())}" for text, sizes in own)
    place = (kept.place.path, kept.host.at.threads)
    begun = _begun.get(place)
    if begun is None or not names <= begun.problems:
        known = len(rows.measured_before(kept.store, kept.host.machine))
        drawn = itertools.takewhile(lambda _: known + made.report.measured < MAX_DRAWN_ROWS, draws(SEED))
        made = Slice(kept.store, kept.host, executor, problems=itertools.chain(remembered(own), drawn))
        begun = _begun[place] = _Work(made, names)
    return begun


def _trained(kept: Notes, work: _Work, *, last: bool) -> PerformanceModel | None:
    """A new version, where enough is new and it predicts better than rooflines alone; `last`: there is nothing left to measure."""
    dates = kept.store.model_dates(model.named(kept.host.at.threads), kept.host.machine)
    at, facts = dates[max(dates)] if dates else (0.0, {})
    new = len(kept.store.measurements(machine=kept.host.machine, source=("calibrate", *SERVING), since=at))
    have = int(facts.get("samples", 0))
    alone = sum(not m.is_device for m in kept.store.machines()) < 2
    first = (model.MIN_SAMPLES if last else FIRST) if alone else FIRST_SUPPORTED
    if new < max(first if not have else model.MIN_SAMPLES, TRAIN_AFTER * have, (1 + TRAIN_AFTER) * work.in_vain):
        return None
    samples = rows.samples(kept.store, kept.host.machine, kept.host.at.threads)
    others = None if alone else fleet.support(fleet.machines(kept.store, without=kept.host.machine))
    if len(samples) < (model.MIN_SAMPLES if others is None else FIRST_SUPPORTED):
        return None
    made = model.best_fit(samples, kept.host.at, others)
    if judged(made.facts).trust is Trust.ASIDE:
        work.in_vain = new
        return None
    version = model.save(kept.store, made, kept.host.machine)
    if others is not None:
        _train_fleet(kept)
    kept.read()
    return replace(made, version=version)


def _train_fleet(kept: Notes) -> None:
    """The model of all machines, where their rows have become enough more: what a machine that nobody saw begins with."""
    dates = kept.store.model_dates(fleet.NAME)
    have = int(dates[max(dates)][1].get("samples", 0)) if dates else 0
    if have < fleet.MAX_ROWS and sum(len(p.rows) for p in fleet.machines(kept.store)) > (1 + TRAIN_AFTER) * have:
        fleet.train(kept.store)


def _plain(made: PerformanceModel) -> ModelFacts:
    score = made.facts["held_out"]
    return ModelFacts(int(made.facts["samples"]), round(float(score["mape"]), 4), str(made.facts["kind"]))
