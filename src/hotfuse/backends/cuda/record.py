# pyright: reportPrivateUsage=false
# A tensor's version has no public name.
"""One run on a device as a CUDA graph: recorded once on a stream of its own, replayed with other inputs.

A graph reads fixed addresses, so inputs are copied into tensors of its own; results are copied out, because the next replay writes
over them. Recording waits for nothing but its own stream and leaves the allocator's cache alone, which `torch.cuda.graph` does not.

It must happen on a thread that serves a call, never beside: while any stream of the process is recorded, another thread that waits
for the whole device (`torch.cuda.synchronize()`) gets an error, whatever error mode the recording has.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hotfuse.backends.cuda.copies import input_copies
from hotfuse.base.errors import CaptureError, RecordingError

_end_allocating: Callable[[int, Any], None] = getattr(torch._C, "_cuda_endAllocateToPool", lambda _device, _pool: None)
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
    """A CUDA graph of a run for inputs of one kind. Whoever replays it sees to it that nobody else does at the same time."""

    def __init__(self, run: Run, inputs: Sequence[torch.Tensor], device: torch.device, pool: Any) -> None:
        """Record; raises CaptureError where the run synchronizes, allocates by data, or returns memory that replays would share."""
        if why := unrecordable(inputs, device):
            raise CaptureError("a call cannot be recorded", because=why)
        self._graph = torch.cuda.CUDAGraph()

        def record(*own: torch.Tensor) -> tuple[Any, ...]:
            stream = torch.cuda.Stream(device)
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                outputs = self._recorded(run, own, pool)
            torch.cuda.current_stream(device).wait_stream(stream)
            return outputs

        self._inputs, self._results = on_own_inputs(record, inputs)
        index = torch.empty(0, device=device).device.index
        self._copied_in = input_copies(self._inputs, lambda: raw_stream(index))

    def _recorded(self, run: Run, own: Sequence[torch.Tensor], pool: Any) -> tuple[Any, ...]:
        error: Exception | None = None
        outputs: tuple[Any, ...] = ()
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        drawn = generator.clone_state()
        self._graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            outputs = run(*own)
        except Exception as e:
            error = e
        try:
            self._graph.capture_end()
        except Exception as e:
            error = error or e
        if error is not None:
            # torch puts neither its generator nor its allocator back where a recording cannot be ended
            generator.graphsafe_set_state(drawn)
            with contextlib.suppress(Exception):
                _end_allocating(torch.cuda.current_device(), pool)
            said = str(error).strip().splitlines()
            because = f"{type(error).__name__}: {said[0][:200] if said else ''}"
            raise RecordingError("the kernels of a call cannot be recorded", because=because) from error
        return outputs

    def replay(self, inputs: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        """The results for other inputs of this kind, on the caller's stream; they are the caller's own."""
        self._copied_in(inputs)
        self._graph.replay()
        return self._results.copied(inputs)


def on_own_inputs(run: Run, inputs: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Results]:
    """Run once on copies of the inputs; these and the results. Raises CaptureError where the run writes into them.

    Outside of inference mode, or calls outside of it could not write into what one inside of it made.
    """
    with torch.inference_mode(False), torch.no_grad():
        own = [t.detach().clone() for t in inputs]
        before = [t._version for t in own]
        outputs = run(*own)
    if before != [t._version for t in own]:
        raise CaptureError("a call cannot be recorded", because="it writes into an input")
    return own, Results(outputs, own)


class Results:
    """What a run returned, and how each call gets copies of its own: results that share memory share it in the copies too."""

    def __init__(self, outputs: Sequence[Any], inputs: Sequence[torch.Tensor]) -> None:
        """Raises CaptureError where a result lies in an input's memory, or results read the same memory as different types."""
        self._inputs = inputs
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


def pool_bytes(pool: Any) -> int:
    """Device memory that recordings of a pool hold."""
    segments = torch.cuda.memory_snapshot()
    return sum(int(s["total_size"]) for s in segments if tuple(s.get("segment_pool_id", ())) == tuple(pool))
