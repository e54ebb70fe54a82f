"""One run on a device as a CUDA graph: recorded once on a stream of its own, replayed with other inputs.

A graph reads fixed addresses, so inputs are copied into tensors of its own; results are copied out, because the next replay writes
over them. Recording waits for nothing but its own stream and leaves the allocator's cache alone, which `torch.cuda.graph` does not.

It must happen on a thread that serves a call, never beside: while any stream of the process is recorded, another thread that waits
for the whole device (`torch.cuda.synchronize()`) gets an error, whatever error mode the recording has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hotfuse.base.errors import CaptureError

Run = Callable[..., tuple[Any, ...]]
Copy = Callable[[Sequence[torch.Tensor]], Any]


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
        self._inputs = [t.detach().clone() for t in inputs]
        self._graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.no_grad(), torch.cuda.stream(stream):
            outputs = self._recorded(run, pool)
        torch.cuda.current_stream(device).wait_stream(stream)
        self._copies = _copies(outputs, self._inputs)

    def _recorded(self, run: Run, pool: Any) -> tuple[Any, ...]:
        error: Exception | None = None
        outputs: tuple[Any, ...] = ()
        self._graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            outputs = run(*self._inputs)
        except Exception as e:
            error = e
        try:
            self._graph.capture_end()
        except Exception as e:
            error = error or e
        if error is not None:
            said = str(error).strip().splitlines()
            because = f"{type(error).__name__}: {said[0][:200] if said else ''}"
            raise CaptureError("the kernels of a call cannot be recorded", because=because) from error
        return outputs

    def replay(self, inputs: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        """The results for other inputs of this kind, on the caller's stream; they are the caller's own."""
        for mine, given in zip(self._inputs, inputs, strict=True):
            mine.copy_(given, non_blocking=True)
        self._graph.replay()
        return tuple(copy(inputs) for copy in self._copies)


def _copies(outputs: Sequence[Any], inputs: Sequence[torch.Tensor]) -> list[Copy]:
    """For each output, how a call gets its own."""
    theirs = {t.untyped_storage().data_ptr() for t in inputs}
    seen: set[int] = set()
    return [_copy(o, inputs, theirs, seen) for o in outputs]


def _copy(output: Any, inputs: Sequence[torch.Tensor], theirs: set[int], seen: set[int]) -> Copy:
    if isinstance(output, (list, tuple)):
        parts = [_copy(o, inputs, theirs, seen) for o in output]
        return lambda given: [part(given) for part in parts]
    if not isinstance(output, torch.Tensor):
        return lambda _given: output
    for i, t in enumerate(inputs):
        if output is t:
            return lambda given: given[i]
    at = output.untyped_storage().data_ptr()
    if at and at in theirs:
        raise CaptureError("a call cannot be recorded", because="a result is a view of an input")
    if at and at in seen:
        raise CaptureError("a call cannot be recorded", because="two results share memory")
    seen.add(at)
    return lambda _given: output.clone()


def pool_bytes(pool: Any) -> int:
    """Device memory that recordings of a pool hold."""
    segments = torch.cuda.memory_snapshot()
    return sum(int(s["total_size"]) for s in segments if tuple(s.get("segment_pool_id", ())) == tuple(pool))
