"""The model's own kernels as recordings of a device: what serves a second after the first call, before anything is compiled.

A small model on a device spends most of a call on launching kernels, and a graph of its own kernels takes none of a capture, a
compile or a worker. So calls that the model's own code would answer are recorded once their sizes recur, and replayed where
everything is as it was: structure, sizes, strides, types, what is around the call, which kernels are allowed, and the model
(`runtime.weights.model_guard`). Weights are read where they lie, so writing to them changes replays as it changes the model.

    met twice -> recorded in the third call, and compared with it -> compared with one more -> raced on live calls -> replayed

Recording happens in a call (decision 34) and takes about as long as the call. What wins stays on trial like any plan (`audit`).
What cannot be recorded, or does not win, is a decision with its reason, and is not tried again while the model is the same.

For the engine this is the model's own code: tier 0 races against it, tier 1 has to beat it, and audits refer to it.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from hotfuse.backends import registry
from hotfuse.backends.protocol import RecordingDevice, Replay
from hotfuse.base.errors import CaptureError, HotfuseError, InputError, RecordingError
from hotfuse.base.events import Action, EventLog, EvidenceValue, Why
from hotfuse.base.faults import error_text
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.base.settings import Settings
from hotfuse.base.state import changes_nothing, contents, take_after
from hotfuse.base.structure import Spec, StructureBuilder, builder, take_call
from hotfuse.compile.workers.background_priority import background_priority
from hotfuse.compile.workers.service import in_background as runs_jobs
from hotfuse.frontends.side_effects import observed
from hotfuse.machine.device_clock import clock_of
from hotfuse.machine.device_stream import unnoticed
from hotfuse.machine.heap import heap
from hotfuse.native.call_context import asked_in_python
from hotfuse.runtime.background import Job
from hotfuse.runtime.serve.effects import Before
from hotfuse.runtime.serve.own_effects import (
    allowed_kernels,
    contents_of,
    global_hooks,
    random_states,
    refuse_effects,
    single_numbers,
    transformed,
)
from hotfuse.runtime.tierup.audit import Audit, why_not
from hotfuse.runtime.tierup.contest import LiveContest
from hotfuse.runtime.tierup.race import Trial
from hotfuse.runtime.tierup.tiers import interval
from hotfuse.runtime.tierup.turns import NEW
from hotfuse.runtime.tierup.verify import disagreement
from hotfuse.runtime.weights.model_guard import ModelGuard, WeightChange

WARM_UPS = 2
"""Calls of a kind before the one that records: their kernels are loaded, and their sizes recur."""
PROOFS = 2
"""Calls that a recording is compared on: the one it was made of, and another one's data."""
MOST_RECORDINGS = 8
MOST_KINDS = 256
"""Kinds of calls that are remembered; the one not seen for the longest is forgotten."""
MOST_MEMORY = 0.125
"""Part of a device's memory that recordings of one model may hold."""
SHARE, AT_ONCE_S = 0.05, 0.5
"""Part of the time that recording may take, and seconds of it that need no time before them: an eager call of a large model and
what is compared of it may well take a tenth of a second."""
MOST_PUT_OFF = 200
"""Calls of a kind that are not recorded because a job has the interpreter lock: every operator would wait for it."""
IDLE_S = 300.0
"""Recordings that no call has used for so long are let go when nobody calls."""
MOST_CHANGES = 4
"""Changes of the model with no replay between them, after which it is left alone."""
_TENSORS = (torch.Tensor, torch.nn.Parameter)
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


@dataclass(slots=True, eq=False)
class OwnKind:
    """Calls of one structure, with tensors of the same sizes, strides and types, under the same circumstances."""

    text: str
    """The sizes, for readers."""
    met: int = 0
    put_off: int = 0
    """Calls that could have been recorded, had no job been at work."""
    recording: Replay | None = None
    rebuild: Callable[[tuple[Any, ...]], Any] = tuple
    """What the model returns, of the recording's results."""
    proofs: int = 0
    contest: LiveContest | None = None
    audit: Audit | None = None
    trial: Trial | None = None
    refused: str = ""
    notices: bool = False
    """Whether the model's code may ask whether it is recorded: it could not be without."""
    calls: int = 0
    next_look: int = 0
    looked: int = 0
    """The call that was timed last."""
    used: float = 0.0


class _Noticed(CaptureError):
    """The model's code could not be recorded without being told."""


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
        self._kinds: OrderedDict[Any, OwnKind] = OrderedDict()
        self._devices: dict[torch.device, RecordingDevice | None] = {}
        self._guard: ModelGuard | None = None
        self._holds: Sequence[object] = ()
        """Memory of the weights, which recordings read by address."""
        self._asked = False
        self._numbers: Sequence[tuple[torch.Tensor, str]] = ()
        self._changes = 0
        self._off = settings.capture != "background" or settings.tiers < 1
        self._audited = not why_not(settings)
        self.why_off = ""
        self.counts = {"replays": 0, "recorded": 0, "dropped": 0, "not_recordable": 0, "put_off": 0, "in_vain": 0}
        _ALL.add(self)

    # --- the call path ---------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Replay, record, or run the model's own code."""
        if self._off or torch.is_grad_enabled() or not self._initialized():
            return self._call(*args, **kwargs)
        entered = time.perf_counter()
        met = self._meet(args, kwargs)
        if met is None or (kind := met[0]).refused:
            return self._call(*args, **kwargs)
        leaves = met[1]
        device = self._device(leaves[0].device)
        if device is None or not device.may_record():
            return self._call(*args, **kwargs)
        if kind.recording is None:
            return self._approach(kind, device, leaves, args, kwargs)
        try:
            if kind.proofs >= PROOFS and kind.contest is None and (kind.audit is None or kind.calls + 1 < kind.next_look):
                return self._ahead(kind, device, leaves, args, kwargs, entered)
            return self._served(kind, device, leaves, args, kwargs, entered) if self._unchanged() else self._call(*args, **kwargs)
        except _Withdrawn:
            return self._call(*args, **kwargs)

    def _ahead(
        self, kind: OwnKind, device: RecordingDevice, leaves: Sequence[torch.Tensor], args: tuple[Any, ...],
        kwargs: dict[str, Any], entered: float,
    ) -> Any:  # fmt: skip
        """A replay, launched before the model is looked at, which takes as long as much of the model: the memory that it reads is
        held. Its results are dropped where the model has changed."""
        outs = self._replay(kind, device, leaves)
        if not self._unchanged():
            self.counts["in_vain"] += 1
            return self._call(*args, **kwargs)
        kind.calls += 1
        kind.used = entered
        return kind.rebuild(outs)

    def _meet(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[OwnKind, Sequence[torch.Tensor]] | None:
        """The kind of a call and its tensors; None where such calls are never recorded."""
        leaves: Sequence[Any] = (*args, *kwargs.values())
        structure: Any = (len(args), *kwargs)
        if not all(type(t) in _TENSORS for t in leaves):
            try:
                taken = take_call(args, kwargs)
                leaves, structure = taken.leaves, taken.spec
                hash(structure)
            except (InputError, TypeError):
                return None
        first = leaves[0].device if leaves and isinstance(leaves[0], torch.Tensor) else None
        if first is None or first.type != self._device_kind or not all(type(t) in _TENSORS and t.device == first for t in leaves):
            return None
        if any(t.layout is not torch.strided or t.is_neg() or t.is_conj() for t in leaves):
            return None
        if (around := asked_in_python()) < 0 or transformed():
            return None
        key = (structure, around, first, allowed_kernels(), *[(t.shape, t.stride(), t.dtype) for t in leaves])
        found = self._kinds.get(key)
        if found is None:
            text = ", ".join(f"{str(t.dtype).removeprefix('torch.')}[{', '.join(map(str, t.shape))}]" for t in leaves)
            with self._lock:
                found = self._kinds.setdefault(key, OwnKind(text))
                for old, kind in list(self._kinds.items())[: max(0, len(self._kinds) - MOST_KINDS)]:
                    if kind.recording is None:
                        del self._kinds[old]
        return found, leaves

    def _device(self, device: torch.device) -> RecordingDevice | None:
        if device not in self._devices:
            with self._lock:
                self._devices.setdefault(device, self._make_device(device))
        return self._devices[device]

    def _served(
        self, kind: OwnKind, device: RecordingDevice, leaves: Sequence[torch.Tensor], args: tuple[Any, ...],
        kwargs: dict[str, Any], entered: float,
    ) -> Any:  # fmt: skip
        """A call of a kind that is recorded."""
        kind.calls += 1
        kind.used = entered
        if kind.proofs < PROOFS:
            return self._proven(kind, device, leaves, args, kwargs)
        contest, audit = kind.contest, kind.audit
        key = (threading.get_ident(), (), False)
        turn = contest is not None or (audit is not None and audit.due(kind.calls, key))
        side = NEW if not turn else contest.turn(key) if contest is not None else audit.turn(key) if audit is not None else NEW
        ahead = time.perf_counter() - entered if side == NEW else 0.0
        clock = clock_of(leaves)
        begin = clock()
        result = self._replayed(kind, device, leaves) if side == NEW else self._call(*args, **kwargs)
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

    def _replayed(self, kind: OwnKind, device: RecordingDevice, leaves: Sequence[torch.Tensor]) -> Any:
        return kind.rebuild(self._replay(kind, device, leaves))

    def _replay(self, kind: OwnKind, device: RecordingDevice, leaves: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        with self._lock:  # recordings share a pool and have inputs of their own
            recording = kind.recording
            if recording is None:
                raise _Withdrawn
            self.counts["replays"] += 1
            self._changes = 0
            device.enter()
            try:
                return recording.replay(leaves)
            except Exception as e:
                kind.recording = None
                self._refuse(kind, Why.RUN_FAILED, f"{type(e).__name__}: {str(e).splitlines()[0][:200] if str(e) else ''}")
                raise _Withdrawn from e
            finally:
                device.leave()

    # --- before it is replayed -------------------------------------------------------------------

    def _approach(
        self, kind: OwnKind, device: RecordingDevice, leaves: Sequence[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A call of a kind that is not recorded: once it recurs, this one is."""
        kind.met += 1
        if not self._asked:
            self._asked = True
            self._in_background(self._watch)
        late = self._spent > AT_ONCE_S + SHARE * (self._clock() - self._begin)
        if kind.met <= WARM_UPS or self._guard is None or late or not self._unchanged():
            return self._call(*args, **kwargs)
        if kind.put_off < MOST_PUT_OFF and self._disturbed():
            kind.put_off += 1
            self.counts["put_off"] += 1
            return self._call(*args, **kwargs)
        if not self._lock.acquire(blocking=False):
            return self._call(*args, **kwargs)
        try:
            return self._record(kind, device, leaves, args, kwargs)
        finally:
            self._lock.release()

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

    def _record(
        self, kind: OwnKind, device: RecordingDevice, leaves: Sequence[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Answer with the model's own code, and record what it did, with the lock."""
        guard = self._guard
        if kind.recording is not None or guard is None:
            return self._call(*args, **kwargs)
        before, drawn, held = Before(args, kwargs, leaves), self._drawn(device), contents_of(guard.modules)
        result = self._call(*args, **kwargs)
        begin = self._clock()
        try:
            after = before.after(result)
            if self._drawn(device) != drawn:
                raise CaptureError("a call cannot be recorded", because="it draws random numbers", why=Why.RANDOM)
            if guard.check() is not WeightChange.NONE or contents_of(guard.modules) != held:
                raise CaptureError("a call cannot be recorded", because="it changes the model", why=Why.STATEFUL)
            if not changes_nothing(after.spec) or before.writes():
                raise CaptureError("a call cannot be recorded", because="it changes its arguments", why=Why.STATEFUL)
            made = self._recorded(kind, device, take_call(args, kwargs).spec, guard, leaves)
            kind.rebuild = _rebuilding(after.spec)
            self._prove(device, made, leaves, after.spec, after.leaves)
            if (held_bytes := device.held()) > MOST_MEMORY * device.total():
                because = f"its recordings would hold {held_bytes >> 20} MiB of the device"
                raise CaptureError("a call cannot be recorded", because=because, why=Why.TOO_MUCH_MEMORY)
        except _Noticed as e:  # once more, in another call
            kind.notices = True
            self._log.decide(Action.NOTICE, e.why, self._model.name, what=_WHAT, call=kind.text, because=e.because or e.what)
        except Exception as e:  # the call has its answer
            why = e.why if isinstance(e, CaptureError) else Why.NOT_CAPTURABLE
            self.counts["not_recordable"] += 1
            self._refuse(kind, why, (e.because or e.what) if isinstance(e, HotfuseError) else error_text(e))
        else:
            kind.recording, kind.proofs, kind.used = made, 1, time.perf_counter()
            self.counts["recorded"] += 1
            self._log.decide(Action.CAPTURE, Why.RECURS, self._model.name, what=_WHAT, call=kind.text,
                             ms=round((self._clock() - begin) * 1e3, 1), device_bytes=held_bytes)
            self._make_room()
        self._spent += self._clock() - begin
        return result

    def _drawn(self, device: RecordingDevice) -> tuple[Any, ...]:
        return device.random_state(), *random_states()

    def _recorded(
        self, kind: OwnKind, device: RecordingDevice, spec: Spec, guard: ModelGuard, leaves: Sequence[torch.Tensor]
    ) -> Replay:
        """Record as the model runs where nothing is recorded; where it cannot be so, the next call tells its code."""
        try:
            return device.record(self._flat(spec, guard, notices=kind.notices), leaves)
        except RecordingError as e:
            if kind.notices:
                raise
            raise _Noticed(e.what, because=e.because) from e

    def _flat(self, spec: Spec, guard: ModelGuard, *, notices: bool) -> Callable[..., tuple[Any, ...]]:
        """The model's own code from tensors to the spec and the leaves of what it returns."""
        weights = {t.untyped_storage().data_ptr() for t in guard.tensors} - {0}

        def run(*tensors: torch.Tensor) -> tuple[Any, ...]:
            made = StructureBuilder(tensors)
            args, kwargs = made.build(spec)
            before = [contents(h) for h in made.holders]
            with contextlib.nullcontext() if notices else unnoticed(), observed() as seen:
                result = self._call(*args, **kwargs)
            refuse_effects(seen)
            taken = take_after(result, made.holders, before)
            if not changes_nothing(taken.spec):
                raise CaptureError("a call cannot be recorded", because="it changes its arguments", why=Why.STATEFUL)
            if any(isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() in weights for t in taken.leaves):
                raise CaptureError("a call cannot be recorded", because="a result is a weight, or a view of one")
            return taken.spec, *taken.leaves

        return run

    def _prove(
        self, device: RecordingDevice, made: Replay, leaves: Sequence[torch.Tensor], spec: Spec, want: Sequence[Any]
    ) -> None:
        device.enter()
        try:
            found, *got = made.replay(leaves)
        finally:
            device.leave()
        difference = "its results have another structure" if found != spec else disagreement(got, want, self._settings.rtol)
        if difference:
            raise CaptureError("a replay disagrees with the model's own code", because=difference, why=Why.MISMATCH)

    def _proven(
        self, kind: OwnKind, device: RecordingDevice, leaves: Sequence[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A call that the model's own code answers, and that the recording is compared on."""
        before = Before(args, kwargs, leaves)
        result = self._call(*args, **kwargs)
        with self._lock:
            if (made := kind.recording) is None:
                return result
            try:
                after = before.after(result)
                self._prove(device, made, leaves, after.spec, after.leaves)
            except CaptureError as e:
                self._drop(kind)
                self._refuse(kind, e.why, e.because or e.what)
                return result
            kind.proofs += 1
            if kind.proofs >= PROOFS and kind.trial is None:
                kind.contest = LiveContest()
        return result

    def _decided(self, kind: OwnKind, trial: Trial) -> None:
        with self._lock:
            if kind.contest is None:  # another thread saw it too
                return
            kind.contest, kind.trial = None, trial
            took: dict[str, EvidenceValue] = {"us_before": round(trial.old_us, 1), "us_after": round(trial.new_us, 1),
                                              "rounds": trial.rounds, "race": trial.by, "certain": trial.decided}
            if not trial.won:
                self._drop(kind)
                said = f"{trial.new_us:.1f} us instead of {trial.old_us:.1f}"
                self._refuse(kind, Why.NOT_FASTER, said, **took)
                return
            kind.audit = Audit(kind.recording, None, kind.calls) if self._audited else None
            kind.next_look = kind.calls + 1
            guard = self._guard
            self._log.decide(Action.DEPLOY, Why.FASTER, self._model.name, what=_WHAT, call=kind.text, **took,
                             against="the model's own code")  # fmt: skip
        for job in guard.hardening_jobs() if guard is not None else ():
            self._in_background(job)

    def _slower(self, kind: OwnKind, audit: Audit) -> None:
        with self._lock:
            found = audit.standing()
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
                self._log.decide(Action.DROP, Why.MODEL_CHANGED, self._model.name, what=_WHAT)
                self._changes += 1
                if self._changes >= MOST_CHANGES:
                    self._leave_alone(Why.STATEFUL, "the model changes between calls")
        return False

    def _forget(self) -> None:
        """Let go of everything that rests on the model as it was; with the lock."""
        for kind in self._kinds.values():
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
        """Of many recordings the one that was not used for the longest goes."""
        recorded = sorted((k for k in self._kinds.values() if k.recording is not None), key=lambda k: k.used)
        for kind in recorded[: max(0, len(recorded) - MOST_RECORDINGS)]:
            self._drop(kind)
            kind.met, kind.trial = 0, None

    def _refuse(self, kind: OwnKind, why: Why, reason: str, **evidence: EvidenceValue) -> None:
        kind.refused = reason
        self._log.decide(Action.REFUSE, why, self._model.name, what=_WHAT, call=kind.text, because=reason, **evidence)

    def _leave_alone(self, why: Why, reason: str) -> None:
        self._off, self.why_off = True, reason
        self._log.decide(Action.REFUSE, why, self._model.name, what=_WHAT, because=reason)

    # --- control ---------------------------------------------------------------------------------

    def give_back(self) -> int:
        """Let go of what no call has used for long, and of a model that has changed; the bytes of recordings that this frees."""
        if any(k.recording is not None for k in list(self._kinds.values())):
            self._unchanged()
        with self._lock:
            now, before = time.perf_counter(), self._held()
            for kind in self._kinds.values():
                if kind.recording is not None and now - kind.used > IDLE_S:
                    self._drop(kind)
                    kind.met, kind.trial = 0, None
            return before - self._held()

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
        if not self._kinds and not self.why_off:
            return {}
        with self._lock:
            kinds = [_told(k) for k in self._kinds.values() if k.recording is not None or k.refused]
            return {**self.counts, "device_bytes": self._held(), "off": self.why_off, "kinds": kinds}


def _told(kind: OwnKind) -> dict[str, Any]:
    state = "refused" if kind.refused else "raced" if kind.trial is None else "replayed"
    took = None if kind.trial is None else {"us_before": round(kind.trial.old_us, 1), "us_after": round(kind.trial.new_us, 1)}
    standing = kind.audit.standing() if kind.audit is not None else None
    return {"call": kind.text, "state": state, "because": kind.refused, "calls": kind.calls, "race": took,
            "audit": None if standing is None else standing.to_dict()}


def _rebuilding(spec: Spec) -> Callable[[tuple[Any, ...]], Any]:
    """What a model returned, of a recording's results: the first of them is their spec."""
    build = builder(spec.children[0])
    return lambda outs: build(outs[1:])


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
                         disturbed=lambda: background_priority.at_work)


_ALL: weakref.WeakSet[OwnRecordings] = weakref.WeakSet()


def _give_back() -> int:
    return sum(each.give_back() for each in list(_ALL))


def _after_fork() -> None:
    for each in list(_ALL):
        each.after_fork()


heap.spares(_give_back)
os.register_at_fork(after_in_child=_after_fork)
