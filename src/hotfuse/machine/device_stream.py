"""Background work on a device: on a stream of its own, so that calls do not queue up behind it.

A background thread's current stream is torch's default one, on which most programs serve. What it launches there delays every call
by all of its own time: a proof of a large batch is two whole calls. On another stream both share the device, and a call is delayed
by what is really done beside it.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any

import torch

from hotfuse.machine.recorded_stream import being_recorded_here

_here = threading.local()


@contextmanager
def in_own_stream(tensors: Iterable[Any]) -> Generator[None]:
    """Around work of a background thread on these tensors. It waits for what the default stream was given before, and all of it is
    done at the end: what it allocated may go back, what it read may be let go. Nothing it allocated may be used by calls."""
    device = next((t.device for t in tensors if isinstance(t, torch.Tensor) and t.is_cuda), None)
    if device is None or being_recorded_here():
        yield
        return
    default, current = torch.cuda.default_stream(device), torch.cuda.current_stream(device)
    stream = current if current != default else _stream(device)
    stream.wait_stream(default)
    with torch.cuda.stream(stream):
        try:
            yield
        finally:
            stream.synchronize()


def _stream(device: torch.device) -> torch.cuda.Stream:
    """The calling thread's own."""
    streams: dict[torch.device, torch.cuda.Stream] = _here.__dict__.setdefault("streams", {})
    if device not in streams:
        streams[device] = torch.cuda.Stream(device)
    return streams[device]
