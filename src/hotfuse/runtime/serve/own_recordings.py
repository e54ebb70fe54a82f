"""The model's own kernels as recordings of a device: what serves a second after the first call, before anything is compiled.

A small model on a device spends most of a call on launching kernels, and a graph of its own kernels takes none of a capture, a
compile or a worker. So calls that the model's own code would answer are recorded once they recur, and replayed where
everything is as it was: the kind of call (`runtime.serve.own_kinds`) and the model (`runtime.weights.model_guard`). Weights are
read where they lie, so writing to them changes replays as it changes the model.

    met twice -> recorded in the third call -> compared with the next two -> raced on live calls -> replayed

Recording happens in a call (decision 34) and takes about as long as the call; comparing takes a replay more, so it is left to
other calls. `runtime.serve.own_run` says what is compared.
What wins stays on trial like any plan (`audit`).
What cannot be recorded, or does not win, is a decision with its reason, and is not tried again while the model is the same.

For the engine this is the model's own code: tier 0 races against it, tier 1 has to beat it, and audits refer to it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch

from hotfuse.backends import registry
from hotfuse.backends.device_protocol import RecordingDevice, too_large
from hotfuse.base.errors import CaptureError, HotfuseError, WrittenInput
from hotfuse.base.events import Action, EventLog, EvidenceValue, Why
from hotfuse.base.faults import error_text
from hotfuse.base.living import Living
from hotfuse.base.settings import Settings
from hotfuse.compile.workers.background_priority import background_priority
from hotfuse.compile.workers.service import in_background as runs_jobs
from hotfuse.machine.device_clock import clock_of
from hotfuse.machine.heap import heap
from hotfuse.runtime.background import Job
from hotfuse.runtime.serve.device_caches import let_go_of_static_caches
from hotfuse.runtime.serve.own_effects import contents_of, global_hooks, single_numbers
from hotfuse.runtime.serve.own_kinds import MAX_PLACES, OwnCall, OwnKind, OwnKinds
from hotfuse.runtime.serve.own_run import ChangesArguments, NoticesRecording, OwnRun, answered_and_unchanged
from hotfuse.runtime.tierup.agreement import COPIED_BYTES
from hotfuse.runtime.tierup.audit import Audit, why_not
from hotfuse.runtime.tierup.contest import LiveContest
from hotfuse.runtime.tierup.race import Trial
from hotfuse.runtime.tierup.tiers import interval
from hotfuse.runtime.tierup.turns import NEW
from hotfuse.runtime.weights.model_guard import ModelGuard, WeightChange

WARM_UPS = 2
"""Calls of a kind before the one that records: their kernels are loaded, and their sizes recur."""
PROOFS = 2
"""Calls that a recording is compared on, with their own data."""
MAX_RECORDINGS = 8
MAX_MEMORY = 0.125
"""Part of a device's memory that recordings of one model may hold."""
SHARE, AT_ONCE_S = 0.05, 0.5
"""Part of the time that recording may take, and seconds of it that need no time before them: an eager call of a large model and
what is compared of it may well take a tenth of a second."""
MAX_PUT_OFF = 200
"""Calls of a kind that are not recorded because a job has the interpreter lock: every operator would wait for it."""
MAX_REST = 255
"""Calls in a row that are not looked at where there is nothing to replay."""
SHORT_S, MAX_WAIT_S = 60.0, 1.0
"""Seconds for which nothing is recorded where memory was short, and that are waited for another thread's replay."""
IDLE_S = 300.0
"""Recordings that no call has used for so long are let go when nobody calls."""
MAX_CHANGES = 4
"""Changes of the model with no replay between them, after which it is left alone."""
_WHAT = "the model's own kernels, recorded"


class Watchable(Protocol):
    """A model whose own code may be recorded."""

    name: str

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own code."""
        ...

    def watched(self) -> ModelGuard:
        """What notices that the model changed; raises CaptureError where its code does what no recording would."""
        ...


class _Withdrawn(Exception):
    """The recording is gone: somebody else found the model changed."""


class OwnRecordings:
    """The model's own code, replayed where it is recorded. Called like the model."""

    def __init__(
        self, model: Watchable, settings: Settings, log: EventLog, in_background: Callable[[Job], None],
        device: Callable[[torch.device], RecordingDevice | None], kind: str, initialized: Callable[[], bool],
        clock: Callable[[], float] = time.perf_counter, disturbed: Callable[[], bool] = lambda: False,
    ) -> None:
        """`kind` is torch's name of the devices whose calls are recorded; they are asked nothing before they are `initialized`.
        Calls that come while they would be `disturbed` are recorded later."""
        self._model, self._settings, self._log = model, settings, log
        self._call = model.call
        self._in_background = in_background
        self._make_device, self._device_kind, self._initialized = device, kind, initialized
        self._clock, self._disturbed = clock, disturbed
        self._begin, self._spent = clock(), 0.0
        self._lock = threading.Lock()
        self._kinds = OwnKinds(kind, self._lock)
        self._devices: dict[torch.device, RecordingDevice | None] = {}
        self._guard: ModelGuard | None = None
        self._holds: Sequence[object] = ()
        """Memory of the weights, which recordings read by address."""
        self._asked = False
        self._numbers: Sequence[tuple[torch.Tensor, str]] = ()
        self._changes = 0
        self._rest = self._unlooked = 0
        """Calls that are not looked at since nothing could be recorded: how many at a time, and how many are yet to come."""
        self._off = settings.capture != "background" or settings.tiers < 1
        self._audited = not why_not(settings)
        self.why_off = ""
        self.counts = {"replays": 0, "recorded": 0, "dropped": 0, "not_recordable": 0, "put_off": 0, "in_vain": 0}
        _ALL.add(self)

    def prepare(self, parameters: Iterable[torch.Tensor]) -> None:
        """Load what the first recording needs, where a model is taken that lies on a device: calls do not wait for that then."""
        first = next((p for p in parameters if _is_on(self._device_kind, p)), None)
        if self._off or first is None or (backend := registry.device(self._device_kind)) is None:
            return
        try:
            backend.prepare(first.device, COPIED_BYTES)
        except Exception as e:  # the first recording will meet it again, and be refused for it
            self._log.decide(Action.NOTICE, Why.RUN_FAILED, self._model.name, what=_WHAT, because=error_text(e))

    # --- the call path ---------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Replay, record, or run the model's own code."""
        if self._off or torch.is_grad_enabled() or not self._initialized():
            return self._call(*args, **kwargs)
        if self._unlooked > 0:
            self._unlooked -= 1
            return self._call(*args, **kwargs)
        entered = time.perf_counter()
        call = self._kinds.meet(args, kwargs)
        if call is None and not self._asked and any(_is_on(self._device_kind, a) for a in (*args, *kwargs.values())):
            self._ask_for_guard()  # a prompt may be of no kind that is recorded, and what continues it be of one
        try:
            return self._answered(call, args, kwargs, entered)
        except torch.OutOfMemoryError:
            answers = call is not None and call.kind.proofs > 0 and not call.kind.written  # what does nothing else is run again
            if not _let_go(self._device_kind) or not answers:
                raise
        return self._call(*args, **kwargs)

    def _answered(self, call: OwnCall | None, args: tuple[Any, ...], kwargs: dict[str, Any], entered: float) -> Any:
        if call is None or (kind := call.kind).refused:
            if self.counts["recorded"] == self.counts["dropped"]:
                self._rest = self._unlooked = min(2 * self._rest + 1, MAX_REST)
            return self._call(*args, **kwargs)
        self._rest = 0
        device = self._device(call.tensors[0].device)
        if device is None or not device.may_record():
            return self._call(*args, **kwargs)
        if kind.recording is None:
            return self._approach(call, device)
        try:
            if kind.proofs >= PROOFS and kind.contest is None and (kind.audit is None or kind.calls + 1 < kind.next_look):
                return self._ahead(call, device, entered)
            return self._served(call, device, entered) if self._unchanged() else self._call(*args, **kwargs)
        except _Withdrawn:
            return self._call(*args, **kwargs)

    def _ahead(self, call: OwnCall, device: RecordingDevice, entered: float) -> Any:
        """A replay, launched before the model is looked at, which takes as long as much of the model: the memory that it reads is
        held. Its results are dropped where the model has changed. What writes the caller's memory is launched behind the look."""
        kind = call.kind
        if kind.written and not self._unchanged():
            return self._call(*call.args, **call.kwargs)
        outs = self._replay(call, device)
        if not kind.written and not self._unchanged():
            self.counts["in_vain"] += 1
            return self._call(*call.args, **call.kwargs)
        kind.calls += 1
        kind.used = entered
        return kind.rebuild(outs, call.holders)

    def _device(self, device: torch.device) -> RecordingDevice | None:
        if device not in self._devices:
            with self._lock:
                self._devices.setdefault(device, self._make_device(device))
        return self._devices[device]

    def _served(self, call: OwnCall, device: RecordingDevice, entered: float) -> Any:
        """A call of a kind that is recorded."""
        kind = call.kind
        kind.calls += 1
        kind.used = entered
        if kind.proofs < PROOFS:
            return self._proven(call, device)
        contest, audit = kind.contest, kind.audit
        key = (threading.get_ident(), (), False)
        turn = contest is not None or (audit is not None and audit.due(kind.calls, key) and not self._disturbed())
        side = (
            NEW
            if not turn
            else contest.turn(key)
            if contest is not None
            else audit.turn(key)
            if audit is not None
            else NEW
        )
        ahead = time.perf_counter() - entered if side == NEW else 0.0
        clock = clock_of(call.tensors)
        begin = clock()
        if side == NEW:
            result = kind.rebuild(self._replay(call, device), call.holders)
        else:
            result = self._call(*call.args, **call.kwargs)
        spent = clock() - begin + ahead
        if contest is not None:
            contest.took(key, side, spent)
            if contest.trial is not None:
                self._decided(kind, contest.trial)
        elif audit is not None:
            if not turn:
                audit.note(kind.calls, (), spent, max(1, kind.calls - kind.looked))
            elif audit.took(kind.calls, key, side, spent, 0.0):
                self._slower(kind, audit)
            kind.looked = kind.calls
            after = interval(kind.calls, self._settings.watch_rate, spent, 0.0)
            kind.next_look = min(kind.calls + after, max(audit.at, kind.calls + 1))
        return result

    def _replay(self, call: OwnCall, device: RecordingDevice) -> tuple[Any, ...]:
        kind = call.kind
        with self._lock:  # recordings share a pool and have inputs of their own
            recording = kind.recording
            if recording is None:
                raise _Withdrawn
            self.counts["replays"] += 1
            self._changes = 0
            if kind.of is not None:
                kind.of.places = 0
            device.enter()
            try:
                return recording.replay(call.tensors)
            except Exception as e:
                kind.recording = None
                self.counts["dropped"] += 1
                self._refuse(kind, Why.RUN_FAILED, error_text(e))
                raise _Withdrawn from e
            finally:
                device.leave()

    # --- before it is replayed -------------------------------------------------------------------

    def _approach(self, call: OwnCall, device: RecordingDevice) -> Any:
        """A call of a kind that is not recorded: once it recurs, this one is. What won a race elsewhere needs not recur."""
        kind = call.kind
        kind.met += 1
        if kind.of is not None and kind.of.places > MAX_PLACES:
            self._refuse(kind, Why.STATEFUL, "it writes its arguments, which lie elsewhere in every call")
            return self._call(*call.args, **call.kwargs)
        self._ask_for_guard()
        if self._kinds.first_of(call):
            return self._first_of_a_structure(call)
        late = self._spent > AT_ONCE_S + SHARE * (self._clock() - self._begin)
        early = kind.met <= WARM_UPS and kind.trial is None
        if early or self._guard is None or late or not self._unchanged():
            return self._call(*call.args, **call.kwargs)
        if kind.put_off < MAX_PUT_OFF and self._disturbed():
            kind.put_off += 1
            self.counts["put_off"] += 1
            return self._call(*call.args, **call.kwargs)
        if not self._lock.acquire(blocking=False):
            return self._call(*call.args, **call.kwargs)
        try:
            return self._record(call, device)
        finally:
            self._lock.release()

    def _ask_for_guard(self) -> None:
        """In the first call already: what is captured of it takes the background for seconds."""
        if not self._asked:
            self._asked = True
            self._in_background(self._watch)

    def _first_of_a_structure(self, call: OwnCall) -> Any:
        """A cache that grows has other sizes in every call, so none of them would ever recur."""
        result, unchanged = answered_and_unchanged(self._call, call)
        if not unchanged:
            self._kinds.never(call.kind)
            self.counts["not_recordable"] += 1
            self._refuse(call.kind, Why.STATEFUL, "it changes its arguments")
        return result

    def _watch(self) -> None:
        """For the background: what the model is made of, which takes some milliseconds to look through."""
        try:
            guard = self._model.watched()
            if global_hooks():
                raise CaptureError("hooks run around every module", because="a recording would leave them out")
        except CaptureError as e:
            self._leave_alone(e.why, e.because or e.what)
            return
        self._numbers = single_numbers(guard.tensors, self._device_kind)
        self._holds = [t.untyped_storage() for t in guard.tensors]
        self._guard = guard

    def _record(self, call: OwnCall, device: RecordingDevice) -> Any:
        """Answer with the model's own code, and record what it did, with the lock."""
        guard, kind = self._guard, call.kind
        if kind.recording is not None or guard is None:
            return self._call(*call.args, **call.kwargs)
        if (run := self._looked_at(call, device)) is None:
            return self._call(*call.args, **call.kwargs)
        held = contents_of(guard.modules)
        result = run.answer(self._call)
        begin = self._clock()
        try:
            made, kind.rebuild = run.recorded(self._call, guard, held)
            because = too_large(device)
            if (held_bytes := device.held()) > MAX_MEMORY * device.total():
                because = f"its recordings would hold {held_bytes >> 20} MiB of the device"
            if because:
                raise CaptureError("a call cannot be recorded", because=because, why=Why.TOO_MUCH_MEMORY)
        except WrittenInput as e:  # it is of another kind
            self._writes(kind, e.places)
        except NoticesRecording as e:  # once more, in another call
            kind.notices = True
            self._log.decide(Action.NOTICE, e.why, self._model.name, what=_WHAT, call=kind.text, because=e.because or e.what)
        except Exception as e:  # the call has its answer
            why = e.why if isinstance(e, CaptureError) else Why.NOT_CAPTURABLE
            self.counts["not_recordable"] += 1
            if isinstance(e, ChangesArguments):
                self._kinds.never(kind)
            self._refuse(kind, why, (e.because or e.what) if isinstance(e, HotfuseError) else error_text(e))
        else:
            kind.recording, kind.proofs, kind.used = made, 0, time.perf_counter()
            self.counts["recorded"] += 1
            self._log.decide(Action.CAPTURE, Why.RECURS, self._model.name, what=_WHAT, call=kind.text,
                             ms=round((self._clock() - begin) * 1e3, 1), device_bytes=held_bytes)  # fmt: skip
            self._make_room()
        self._spent += self._clock() - begin
        return result

    def _looked_at(self, call: OwnCall, device: RecordingDevice) -> OwnRun | None:
        if because := device.short_of_memory():
            self._refuse(call.kind, Why.TOO_MUCH_MEMORY, because)
            return None
        try:
            return OwnRun(call, device)
        except torch.OutOfMemoryError as e:
            self._refuse(call.kind, Why.TOO_MUCH_MEMORY, error_text(e))
            return None

    def _writes(self, kind: OwnKind, places: tuple[int, ...]) -> None:
        """Such calls write some of their arguments: where those lie belongs to the kind from now on."""
        every = kind.of or kind
        every.written = tuple(sorted({*every.written, *places}))
        self._log.decide(Action.NOTICE, Why.STATEFUL, self._model.name, what=_WHAT, call=kind.text,
                         because=f"it writes {len(every.written)} of its arguments, and is recorded where they lie")  # fmt: skip

    def _proven(self, call: OwnCall, device: RecordingDevice) -> Any:
        """A call that the model's own code answers, and that the recording is compared on."""
        kind = call.kind
        if (run := self._looked_at(call, device)) is None:
            return self._call(*call.args, **call.kwargs)
        result = run.answer(self._call)
        with self._lock:
            if (made := kind.recording) is None:
                return result
            try:
                run.prove(made, self._settings.rtol)
            except Exception as e:  # the call has its answer
                self._drop(kind)
                why = e.why if isinstance(e, CaptureError) else Why.RUN_FAILED
                self._refuse(kind, why, (e.because or e.what) if isinstance(e, HotfuseError) else error_text(e))
                return result
            kind.proofs += 1
            if kind.proofs >= PROOFS:
                if kind.trial is None:
                    kind.contest = LiveContest()
                else:
                    self._on_trial(kind)
        return result

    def _decided(self, kind: OwnKind, trial: Trial) -> None:
        with self._lock:
            if kind.contest is None:  # another thread saw it too
                return
            kind.contest, kind.trial = None, trial
            took: dict[str, EvidenceValue] = {"us_before": round(trial.old_us, 1), "us_after": round(trial.new_us, 1),
                                              "rounds": trial.rounds, "race": trial.by, "certain": trial.decided}  # fmt: skip
            if not trial.won:
                self._drop(kind)
                said = f"{trial.new_us:.1f} us instead of {trial.old_us:.1f}"
                self._refuse(kind, Why.NOT_FASTER, said, **took)
                return
            if kind.of is not None:
                kind.of.trial = trial
            self._on_trial(kind)
            guard = self._guard
            self._log.decide(Action.DEPLOY, Why.FASTER, self._model.name, what=_WHAT, call=kind.text, **took,
                             against="the model's own code")  # fmt: skip
        for job in guard.hardening_jobs(self._in_background) if guard is not None else ():
            self._in_background(job)

    def _on_trial(self, kind: OwnKind) -> None:
        kind.audit = Audit(kind.recording, None, kind.calls) if self._audited else None
        kind.next_look = kind.calls + 1

    def _slower(self, kind: OwnKind, audit: Audit) -> None:
        with self._lock:
            found = audit.state()
            if kind.audit is not audit or found is None:
                return
            self._drop(kind)
            self._refuse(kind, Why.REGRESSED, f"it took {found.ratio:.2f} times as long as the model's own code",
                         ratio=round(found.ratio, 3), rounds=found.rounds)  # fmt: skip

    # --- the model changed -----------------------------------------------------------------------

    def _unchanged(self) -> bool:
        """Whether the model is the one that was recorded. Written weights are read where they lie; all else ends recordings."""
        guard = self._guard
        if guard is None:
            return False
        change = WeightChange.NONE if guard.unchanged() else guard.check()
        if change is WeightChange.VALUES:
            observed = guard.observe()
            if observed[2] == guard.addresses and all(t.device.type == self._device_kind for t in guard.tensors):
                guard.accept(observed)
                change = WeightChange.NONE
        if change is WeightChange.NONE and all(repr(t.item()) == was for t, was in self._numbers):
            return True
        with self._lock:
            if self._guard is guard:
                self._forget()
                self._log.decide(Action.DROP, Why.MODEL_CHANGED, self._model.name, what=_WHAT, changed=guard.difference())
                self._changes += 1
                if self._changes >= MAX_CHANGES:
                    self._leave_alone(Why.STATEFUL, "the model changes between calls")
        return False

    def _forget(self) -> None:
        """Let go of everything that rests on the model as it was; with the lock."""
        for kind in self._kinds:
            self._drop(kind)
        self._kinds.clear()
        self._guard, self._asked, self._numbers, self._holds = None, False, (), ()

    def _drop(self, kind: OwnKind) -> None:
        if kind.recording is None:
            return
        for device in self._devices.values():
            if device is not None:
                device.drain()  # which may be in it
        kind.recording, kind.contest, kind.audit, kind.proofs = None, None, None, 0
        self.counts["dropped"] += 1

    def _make_room(self) -> None:
        """Drop the least recently used recordings beyond the limit."""
        recorded = sorted((k for k in self._kinds if k.recording is not None), key=lambda k: k.used)
        for kind in recorded[: max(0, len(recorded) - MAX_RECORDINGS)]:
            self._drop(kind)
            kind.met, kind.trial = 0, None

    def _refuse(self, kind: OwnKind, why: Why, reason: str, **evidence: EvidenceValue) -> None:
        kind.refused = reason
        if kind.of is not None:
            kind.of.refused = reason
        self._log.decide(Action.REFUSE, why, self._model.name, what=_WHAT, call=kind.text, because=reason, **evidence)

    def _leave_alone(self, why: Why, reason: str) -> None:
        self._off, self.why_off = True, reason
        self._log.decide(Action.REFUSE, why, self._model.name, what=_WHAT, because=reason)

    # --- control ---------------------------------------------------------------------------------

    def give_back(self) -> int:
        """Let go of what no call has used for long, and of a model that has changed; the bytes of recordings that this frees."""
        if any(k.recording is not None for k in self._kinds):
            self._unchanged()
        with self._lock:
            now, before = time.perf_counter(), self._held()
            for kind in self._kinds:
                if kind.recording is not None and now - kind.used > IDLE_S:
                    self._drop(kind)
                    kind.met, kind.trial = 0, None
            return before - self._held()

    def let_go(self) -> bool:
        """Memory is short: recordings go, and for a minute there are no others; whether there were any."""
        if self.counts["recorded"] == self.counts["dropped"] or not self._lock.acquire(timeout=MAX_WAIT_S):
            return False
        try:
            for kind in self._kinds:
                self._drop(kind)
                kind.met = 0
            self._spent += SHARE * SHORT_S
            self._log.decide(Action.DROP, Why.TOO_MUCH_MEMORY, self._model.name, what=_WHAT)
            return True
        finally:
            self._lock.release()

    def close(self) -> None:
        """Let go of all recordings; later calls run the model's own code."""
        self._off = True
        with self._lock:
            self._forget()

    def after_fork(self) -> None:
        """In a forked child, where no device can be used: nothing is freed, which would take the device."""
        self._lock = threading.Lock()
        self._off = True

    def _held(self) -> int:
        return sum(d.held() for d in self._devices.values() if d is not None)

    def explain(self) -> dict[str, Any]:
        """What is recorded, what was measured of it, and what could not be."""
        if not list(self._kinds) and not self.why_off:
            return {}
        with self._lock:
            kinds = [k.to_dict() for k in self._kinds if k.recording is not None or k.refused]
            return {**self.counts, "device_bytes": self._held(), "off": self.why_off, "kinds": kinds}


def recorded_own_code(
    model: Watchable, settings: Settings, log: EventLog, in_background: Callable[[Job], None]
) -> OwnRecordings | None:
    """The model's own code for calls on CUDA devices; None where this torch has none."""
    if not torch.backends.cuda.is_built():
        return None

    def device(of: torch.device) -> RecordingDevice | None:
        backend = registry.device(of.type)
        return None if backend is None else backend.recorder(of, runs_jobs)

    return OwnRecordings(model, settings, log, in_background, device, "cuda", torch.cuda.is_initialized,
                         disturbed=lambda: background_priority.at_work)  # fmt: skip


def _is_on(kind: str, a: Any) -> bool:
    return isinstance(a, torch.Tensor) and a.device.type == kind


_ALL: Living[OwnRecordings] = Living()


def _let_go(kind: str) -> bool:
    """A device has no memory left: nothing that only makes calls faster may be why; whether anything was let go of."""
    backend = registry.device(kind)
    found = [*[each.let_go() for each in _ALL], let_go_of_static_caches()]
    if backend is not None:
        found.append(backend.let_go())
    if any(found) and kind == "cuda":
        torch.cuda.empty_cache()
    return any(found)


def _give_back() -> int:
    return sum(each.give_back() for each in _ALL)


def _after_fork() -> None:
    for each in _ALL:
        each.after_fork()


heap.spares(_give_back)
os.register_at_fork(after_in_child=_after_fork)
