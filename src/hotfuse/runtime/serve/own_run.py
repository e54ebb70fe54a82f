"""One run of the model's own code that is looked at: what it did besides answering, and its recording compared with it.

A recording answers a call only where answering is all that the call does. Random numbers, changes of the model and of the lists,
dicts and objects it was given are looked for around a real call. Tensors that it writes may be written by a recording as well,
where they lie; to compare both, what they held is put back before the replay, and what the model's own code wrote behind it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hotfuse.backends.device_protocol import RecordingDevice, Replay
from hotfuse.base.changed_arguments import SAME, contents, refers_to_arguments, take_after
from hotfuse.base.errors import CaptureError, HotfuseError, RecordingError, WrittenInput
from hotfuse.base.events import Why
from hotfuse.base.structure import Spec, StructureBuilder, Taken, builder
from hotfuse.frontends.side_effects import observed
from hotfuse.machine.device_stream import unnoticed
from hotfuse.runtime.serve.effects import Before, same_bits
from hotfuse.runtime.serve.own_effects import casting_again, contents_of, random_states, refuse_effects, same_contents
from hotfuse.runtime.serve.own_kinds import OwnCall, Rebuild, is_count
from hotfuse.runtime.tierup.agreement import disagreement
from hotfuse.runtime.weights.model_guard import ModelGuard, WeightChange


class NoticesRecording(CaptureError):
    """The model's code could not be recorded without being told."""


class ChangesArguments(CaptureError):
    """A call changes the lists, dicts and objects that it was given, whatever the sizes of its tensors are."""


class OwnRun:
    """A call that the model's own code answers."""

    def __init__(self, call: OwnCall, device: RecordingDevice) -> None:
        """Raises torch's OutOfMemoryError where there is no room for copies of what the call may write."""
        self._call, self._device = call, device
        self._saved = [t.detach().clone() for t in call.tensors]
        self._before = Before(call.args, call.kwargs, call.tensors)
        self._drawn = self._random()
        self._wrote: list[torch.Tensor] = []
        self._after: Taken | None = None

    def answer(self, model: Callable[..., Any]) -> Any:
        """What the model's own code gives."""
        self._result = model(*self._call.args, **self._call.kwargs)
        return self._result

    def recorded(self, model: Callable[..., Any], guard: ModelGuard, held: Any) -> tuple[Replay, Rebuild]:
        """A recording of the call and how its results become the call's; raises CaptureError where there cannot be one. `held` is
        what the model's containers held before."""
        after = self._taken()
        if self._random() != self._drawn:
            raise CaptureError("a call cannot be recorded", because="it draws random numbers", why=Why.RANDOM)
        if guard.check() is not WeightChange.NONE or not same_contents(contents_of(guard.modules), held):
            raise CaptureError("a call cannot be recorded", because="it changes the model", why=Why.STATEFUL)
        _refuse_changes(after.spec)
        run = self._flat(model, {t.untyped_storage().data_ptr() for t in guard.tensors} - {0})
        try:
            made = self._device.record(run, self._call.tensors, self._call.kind.written)
        except RecordingError as e:
            if self._call.kind.notices:
                raise
            raise NoticesRecording(e.what, because=e.because) from e
        finally:
            self._put_back(self._wrote)  # a device may compute while it records
        return made, _rebuilding(after.spec)

    def prove(self, made: Replay, rtol: float) -> None:
        """Compare a replay with what the model's own code gave and wrote; raises CaptureError where they differ."""
        after, written = self._taken(), self._call.written()
        self._put_back([self._saved[i] for i in self._call.kind.written])
        try:
            self._device.enter()
            try:
                found, *got = made.replay(self._call.tensors)
            finally:
                self._device.leave()
            difference = (
                "its results have another structure" if found != after.spec else disagreement(got, after.leaves, rtol)
            )
            if not difference and (apart := disagreement(written, self._wrote, rtol)):
                difference = f"of what it writes, {apart}"
        finally:
            self._put_back(self._wrote)
        if difference:
            raise CaptureError("a replay disagrees with the model's own code", because=difference, why=Why.MISMATCH)

    def _taken(self) -> Taken:
        """The result and what the call changed, taken apart once; raises where it wrote what it is not known to write."""
        if self._after is None:
            self._after = self._before.after(self._result)
            now, known = self._call.tensors, self._call.kind.written
            places = [i for i in range(len(now)) if i not in known and not same_bits(now[i], self._saved[i])]
            places += [i for i in self._before.written_places() if i not in known]
            if places:
                raise WrittenInput(tuple(sorted(set(places))))
            self._wrote = [t.detach().clone() for t in self._call.written()]
        return self._after

    def _put_back(self, held: Sequence[torch.Tensor]) -> None:
        for t, was in zip(self._call.written(), held, strict=True):
            t.detach().copy_(was)

    def _random(self) -> tuple[Any, ...]:
        return self._device.random_state(), *random_states()

    def _flat(self, model: Callable[..., Any], weights: set[int]) -> Callable[..., tuple[Any, ...]]:
        """The model's own code from tensors to the spec and the leaves of what it returns."""
        taken, notices = self._call.taken(), self._call.kind.notices
        places = [i for i, t in enumerate(taken.leaves) if not is_count(t)]

        def run(*tensors: torch.Tensor) -> tuple[Any, ...]:
            leaves = list(taken.leaves)
            for i, t in zip(places, tensors, strict=True):
                leaves[i] = t
            made = StructureBuilder(leaves)
            args, kwargs = made.build(taken.spec)
            before = [contents(h) for h in made.holders]
            with casting_again(), contextlib.nullcontext() if notices else unnoticed(), observed() as seen:
                result = model(*args, **kwargs)
            refuse_effects(seen)
            after = take_after(result, made.holders, before)
            _refuse_changes(after.spec)
            if any(isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() in weights for t in after.leaves):
                raise CaptureError("a call cannot be recorded", because="a result is a weight, or a view of one")
            return after.spec, *after.leaves

        return run


def answered_and_unchanged(model: Callable[..., Any], call: OwnCall) -> tuple[Any, bool]:
    """What the model's own code gives, and whether the lists, dicts and objects that it was given are as they were."""
    before = Before(call.args, call.kwargs, call.tensors)
    result = model(*call.args, **call.kwargs)
    try:
        _refuse_changes(before.after(result).spec)
    except HotfuseError:  # or it cannot be told
        return result, False
    return result, True


def _refuse_changes(after: Spec) -> None:
    if any(s is not SAME for s in after.children[1:]):
        raise ChangesArguments("a call cannot be recorded", because="it changes its arguments", why=Why.STATEFUL)


def _rebuilding(after: Spec) -> Rebuild:
    """What a model returned, of a recording's results: the first of them is their spec."""
    result = after.children[0]
    if refers_to_arguments(after):
        return lambda outs, holders: StructureBuilder(outs[1:], holders).build(result)
    build = builder(result)
    return lambda outs, _holders: build(outs[1:])
