# pyright: reportPrivateUsage=false
# A tensor's version has no public name.
"""One run on a device as a CUDA graph: recorded once on a stream of its own, replayed with other inputs.

A graph reads fixed addresses, so inputs are copied into tensors of its own; results are copied out, because the next replay writes
over them. Inputs that the run itself writes into are not copied (a key/value cache): they are recorded where they lie, and the
caller of a replay sees to it that they still lie there. Recording waits for nothing but its own stream and leaves the allocator's
cache alone, which `torch.cuda.graph` does not.

It must happen on a thread that serves a call, never beside: while any stream of the process is recorded, another thread that waits
for the whole device (`torch.cuda.synchronize()`) gets an error, whatever error mode the recording has. Where several threads serve,
such waits are put off (`machine.device_stream`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from typing import Any

import torch

from hotfuse.backends.cuda.copies import input_copies
from hotfuse.base.errors import CaptureError, RecordingError, WrittenInput
from hotfuse.base.faults import error_text
from hotfuse.machine.device_stream import others_wait

_end_allocating: Callable[[int, Any], None] = getattr(torch._C, "_cuda_endAllocateToPool", lambda _device, _pool: None)
_release: Callable[[int, Any], None] = getattr(torch._C, "_cuda_releasePool", lambda _device, _pool: None)
_FAILED: list[torch.cuda.CUDAGraph] = []
"""Graphs whose recording could not be ended: torch's allocator of pinned memory asks them for ever whether they are recorded."""
_DEFAULT = 0
"""The handle of the default stream."""
raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda _index: _DEFAULT)  # absent without CUDA
Run = Callable[..., tuple[Any, ...]]
Bases = Sequence[torch.Tensor]
Copy = Callable[[Sequence[torch.Tensor], Bases], Any]
"""From a call's inputs and its copies of what results share to a result of its own."""


def unrecordable(inputs: Sequence[torch.Tensor], device: torch.device) -> str:
    """Why calls with such inputs cannot be replayed; empty if they can."""
    for i, t in enumerate(inputs):
        if t.device != device:
            return f"input {i} is on {t.device}, the graph on {device}"
        if any(n > 1 and s == 0 for n, s in zip(t.shape, t.stride(), strict=True)):
            return f"input {i} repeats its own memory"
    return ""


class Recording:
    """A CUDA graph of a run for inputs of one kind. Its caller sees to it that no other thread replays it at the same time."""

    def __init__(
        self, run: Run, inputs: Sequence[torch.Tensor], stream: torch.cuda.Stream, pool: Any, in_place: Collection[int] = ()
    ) -> None:
        """Record; raises CaptureError where the run synchronizes, allocates by data, or returns memory that replays would share."""
        device = stream.device
        if why := unrecordable(inputs, device):
            raise CaptureError("a call cannot be recorded", because=why)
        self._graph = torch.cuda.CUDAGraph()

        def record(*own: torch.Tensor) -> tuple[Any, ...]:
            stream.wait_stream(torch.cuda.current_stream(device))
            with others_wait(), torch.cuda.stream(stream):
                outputs = self._recorded(run, own, pool)
            torch.cuda.current_stream(device).wait_stream(stream)
            return outputs

        own, self._results = on_own_inputs(record, inputs, in_place)
        index = torch.empty(0, device=device).device.index
        self._copied = [i for i in range(len(own)) if i not in in_place]
        self._in_place = sorted(in_place)
        self._copied_in = input_copies([own[i] for i in self._copied], lambda: raw_stream(index))

    def _recorded(self, run: Run, own: Sequence[torch.Tensor], pool: Any) -> tuple[Any, ...]:
        device = torch.cuda.current_device()
        error: Exception | None = None
        outputs: tuple[Any, ...] = ()
        try:
            with _generator_spared(torch.cuda.default_generators[device]):
                self._graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                outputs = run(*own)
            except Exception as e:
                error = e
            self._graph.capture_end()
        except Exception as e:
            error = error or e
            self._put_back(device, pool)
        if error is not None:
            raise RecordingError("the kernels of a call cannot be recorded", because=error_text(error)) from error
        return outputs

    def _put_back(self, device: int, pool: Any) -> None:
        """Undo what torch leaves undone where a recording cannot be ended. Until then its allocator keeps what it has cached, so
        programs near the end of memory would fail. The pool itself is of no use any more: that of pinned memory stays as it is."""
        try:
            _end_allocating(device, pool)
        except RuntimeError:  # it has ended, and the graph lets go of its pool by itself
            return
        _FAILED.append(self._graph)
        _release(device, pool)

    def replay(self, inputs: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        """The results for other inputs of this kind, on the caller's stream; they are the caller's own."""
        if not self._in_place:
            self._copied_in(inputs)
            self._graph.replay()
            return self._results.copied(inputs)
        room = self._results.room()  # behind the launch nothing may fail: it has written what is the caller's
        self._copied_in([inputs[i] for i in self._copied])
        self._graph.replay()
        del room
        written(inputs[i] for i in self._in_place)
        return self._results.copied(inputs)


@contextlib.contextmanager
def _generator_spared(generator: torch.Generator) -> Generator[None]:
    """Around the beginning of a recording, which takes the state of the device's generator of random numbers: threads that draw
    from that get an error until it has ended. It is given another state. Code that draws while it is recorded gets an error now."""
    theirs = generator.graphsafe_get_state()
    generator.graphsafe_set_state(generator.clone_state())
    try:
        yield
    finally:
        generator.graphsafe_set_state(theirs)


def written(tensors: Iterable[torch.Tensor]) -> None:
    """Tell torch that tensors were written, as the operators that were recorded would have."""
    torch.autograd.graph.increment_version([t for t in tensors if not t.is_inference()])


def on_own_inputs(
    run: Run, inputs: Sequence[torch.Tensor], in_place: Collection[int] = ()
) -> tuple[list[torch.Tensor], Results]:
    """Run once on copies of the inputs; these and the results. Raises WrittenInput where the run writes into copies.

    Outside of inference mode, or calls outside of it could not write into what one inside of it made.
    """
    with torch.inference_mode(False), torch.no_grad():
        own = [_alias(t) if i in in_place else t.detach().clone() for i, t in enumerate(inputs)]
        before = [t._version for t in own]
        outputs = run(*own)
    places = tuple(i for i, (t, was) in enumerate(zip(own, before, strict=True)) if t._version != was and i not in in_place)
    if places:
        raise WrittenInput(places)
    return own, Results(outputs, own)


def _alias(t: torch.Tensor) -> torch.Tensor:
    """The same memory; unlike a view it may be written outside of inference mode, too."""
    return torch.empty(0, dtype=t.dtype, device=t.device).set_(
        t.untyped_storage(), t.storage_offset(), t.shape, t.stride()
    )


class Results:
    """What a run returned, and how each call gets copies of its own: results that share memory share it in the copies too."""

    def __init__(self, outputs: Sequence[Any], inputs: Sequence[torch.Tensor]) -> None:
        """Raises CaptureError where a result lies in an input's memory, or results read the same memory as different types."""
        self._inputs: Sequence[torch.Tensor] = inputs
        self._theirs = {t.untyped_storage().data_ptr() for t in inputs} - {0}
        self._sharing: dict[int, list[torch.Tensor]] = {}
        self._note(outputs)
        self._bases: list[torch.Tensor] = []
        """Of memory that several results lie in, all that they reach."""
        self._base_of: dict[int, tuple[int, int]] = {}
        for at, group in self._sharing.items():
            if at and len(group) > 1:
                self._share(at, group)
        self._copies = [self._copy(o) for o in outputs]
        self._inputs = ()  # those in place are the caller's, who may let go of them

    def room(self) -> list[torch.Tensor]:
        """Memory as copies take it."""
        return [torch.empty_like(t) for at, group in self._sharing.items() for t in (group if at else ())]

    def copied(self, inputs: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        """The results as they are now, for the call that brought these inputs."""
        bases = [b.clone() for b in self._bases]
        return tuple(copy(inputs, bases) for copy in self._copies)

    def _note(self, outputs: Sequence[Any]) -> None:
        for o in outputs:
            if isinstance(o, (list, tuple)):
                self._note(o)
            elif isinstance(o, torch.Tensor) and not any(o is t for t in self._inputs):
                at = o.untyped_storage().data_ptr()
                if at in self._theirs:
                    raise CaptureError("a call cannot be recorded", because="a result is a view of an input")
                self._sharing.setdefault(at, []).append(o)

    def _share(self, at: int, group: Sequence[torch.Tensor]) -> None:
        if len({t.dtype for t in group}) > 1:
            raise CaptureError("a call cannot be recorded", because="two results of different types share memory")
        filled = [t for t in group if t.numel()] or group
        first = min(int(t.storage_offset()) for t in filled)
        last = max(t.storage_offset() + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) for t in filled)
        self._base_of[at] = (len(self._bases), first)
        self._bases.append(group[0].as_strided((max(0, last + 1 - first),), (1,), first))

    def _copy(self, output: Any) -> Copy:
        if isinstance(output, (list, tuple)):
            parts = [self._copy(o) for o in output]
            return lambda given, bases: [part(given, bases) for part in parts]
        if not isinstance(output, torch.Tensor):
            return lambda _given, _bases: output
        for i, t in enumerate(self._inputs):
            if output is t:
                return lambda given, _bases: given[i]
        shared = self._base_of.get(output.untyped_storage().data_ptr())
        if shared is not None:
            which, first = shared
            shape, stride, offset = output.shape, output.stride(), max(0, output.storage_offset() - first)
            return lambda _given, bases: bases[which].as_strided(shape, stride, offset)
        return lambda _given, _bases: output.clone()


def pool_bytes(pools: Collection[Any]) -> int:
    """Device memory that recordings of some pools hold."""
    asked = {tuple(p) for p in pools}
    segments = torch.cuda.memory_snapshot() if asked else ()
    return sum(int(s["total_size"]) for s in segments if tuple(s.get("segment_pool_id", ())) in asked)
