"""Looking into what serves: the partitions of a plan are examined beside inference, and what was found stays with the entry.

Races and sampled calls are the source (`runtime.observe.findings`). A worker makes sense of them and writes their times to the
profile store, where they correct the performance model; the diagnoses come back, for `explain()` and for the choice of what
to try next.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import replace

import torch

from hotfuse.base.errors import HotfuseError
from hotfuse.base.events import Action, EventLog, Why
from hotfuse.base.faults import error_text
from hotfuse.base.settings import Settings
from hotfuse.compile.answer_bodies import ProfileAnswer, received
from hotfuse.compile.request_bodies import ProfileRequest, Request
from hotfuse.compile.request_context import context_of, settings_of
from hotfuse.compile.workers import wire
from hotfuse.compile.workers.background_priority import background_priority
from hotfuse.compile.workers.service import sized
from hotfuse.compile.workers.task import Task
from hotfuse.runtime.observe.call_sampler import CallSampler
from hotfuse.runtime.observe.findings import MAX_PARTITIONS, PartitionQuestion, findings, questions, timed
from hotfuse.runtime.observe.record import Recorder
from hotfuse.runtime.observe.traffic import MAX_PIECES, piece, weigh
from hotfuse.runtime.plan import Plan
from hotfuse.runtime.site import Entry

FIRST_EXAMINED_EVERY, EXAMINED_EVERY = 32, 256
"""Calls looked at between two examinations: of a plan that was not examined so far, and of one that was."""
PRIORITY = -1.0
"""Compiling goes first."""


class Examiner:
    """Examines the plans of one model."""

    def __init__(self, settings: Settings, log: EventLog, recorder: Recorder, call_sampler: CallSampler) -> None:
        self._settings, self._log, self._recorder, self._call_sampler = settings, log, recorder, call_sampler

    def due(self, entry: Entry) -> bool:
        """Whether an entry should be examined after this look; for the call path."""
        if not self._settings.watch or entry.examining:  # questions must not pile up behind compiling
            return False
        if not self._recorder.on:  # nothing is kept for later processes, but what serves is weighed for this one
            return entry.samples.taken % (EXAMINED_EVERY if entry.weighed.steady() else FIRST_EXAMINED_EVERY) == 0
        fresh = bool(entry.findings) and entry.findings[0].tier == entry.plan.tier
        return entry.samples.taken % (EXAMINED_EVERY if fresh else FIRST_EXAMINED_EVERY) == 0

    def write(self, entry: Entry) -> None:
        """Put what was seen of an entry into the profile store."""
        if (known := self._call_sampler.known(entry.key)) is not None:
            number, seen, names = known
            self._recorder.seen(entry.baseline.graph, number, seen, names)

    def look(self, entry: Entry) -> None:
        """Examine an entry by what sampled calls showed; for the background."""
        asked = False
        try:
            weigh(self._call_sampler, entry)
            if not self._recorder.on:
                return
            self.write(entry)
            if (known := self._call_sampler.known(entry.key)) is not None:
                number, seen, names = known
                threads = torch.get_num_threads()
                asked = self._ask(entry, questions(entry.plan, seen, number, names, threads), threads)
        finally:
            if not asked:  # else the answer says so, which may have come already
                entry.examining = False

    def raced(self, entry: Entry, plan: Plan, call: Sequence[torch.Tensor]) -> None:
        """Examine a plan that has just won a race, before anybody sampled it; for the background."""
        if plan is not entry.plan or not (plan.units or self._recorder.on):  # one that is a single unit has no weights to compare
            return
        threads = torch.get_num_threads()
        try:
            asked = timed(plan, call, threads, MAX_PIECES)
            entry.weighed = entry.weighed.updated([piece(q) for q in asked])
        except Exception:  # the plan serves all the same, and sampled calls will show it
            self._log.count("examinations_failed")
            return
        if self._recorder.on:
            self._ask(entry, asked[:MAX_PARTITIONS], threads)

    def _ask(self, entry: Entry, asked: Sequence[PartitionQuestion], threads: int) -> bool:
        """Have a worker make sense of times; nobody waits for it. False where there is nothing to ask."""
        if not asked:
            return False
        asked_for, place = replace(settings_of(self._settings), threads=threads), context_of(self._settings)
        header = Request(ProfileRequest(tuple(q.times for q in asked)), asked_for, place).header()
        about = weakref.ref(entry)  # a question waits behind all compiling: it must not hold plans that were dropped meanwhile,
        log, recorder = self._log, self._recorder  # nor, through us, a whole model

        def answered(future: Future[wire.Message]) -> None:
            entry = about()
            if entry is not None:
                entry.examining = False
            try:
                answer, _ = received(future.result(), ProfileAnswer)
            except (HotfuseError, CancelledError):  # a worker that ended: the next examination asks again
                log.count("examinations_failed")
                return
            try:
                with background_priority():  # many objects: a full collection would stop every call for a quarter of a second
                    if (found := findings(asked, answer)) and entry is not None:
                        recorder.note_findings(entry.baseline.graph, found, asked)
                        log.count("examinations")
                        entry.findings = found  # published last: readers find them counted and kept
            except Exception as e:  # in a thread of the pool, which would print it
                log.count("examinations_failed")
                log.decide(Action.NOTICE, Why.BACKGROUND_FAILED, "what partitions took", error=error_text(e))

        entry.examining = True
        sized(self._settings).pool.submit(Task("what partitions took", header, priority=PRIORITY)).add_done_callback(
            answered
        )
        return True
