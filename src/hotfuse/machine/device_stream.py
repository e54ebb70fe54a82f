"""Streams of a device: background work has one of its own, and what is launched on one may be recorded.

Background work: so that calls do not queue up behind it.

A background thread's current stream is torch's default one, on which most programs serve. What it launches there delays every call
by all of its own time: a proof of a large batch is two whole calls. On another stream both share the device, and a call is delayed
by what is really done beside it.

Recording: libraries ask torch whether a stream is being recorded and then run other kernels. transformers hands attention a mask
that hides nothing, so that it need not look at one. A recording of a model should hold the kernels that the model runs. It loads no
others then: those of attention with a mask took a quarter of a second in the call that recorded. What reads the device's data on
the host cannot be recorded so, and is recorded as it wants to be (decision 106).

While a stream is recorded, the driver refuses to wait for the whole device, in any thread. Other threads that ask torch for it wait
until the recording has ended.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

_here = threading.local()
being_recorded_here: Callable[[], bool] = torch.cuda.is_current_stream_capturing
"""torch's own question, for our own code: it is true while a stream is recorded unnoticed, too."""
MAX_RECORDING_S = 5.0
"""After so long a thread that waits for the device hears what the driver says: what is recorded may wait for that thread."""
_synchronize: Callable[[Any], None] = torch.cuda.synchronize
_ended = threading.Condition()


class _StandIn:
    """A function of `torch.cuda` that another one stands in for as long as any thread is `inside`. Whatever somebody else puts
    there meanwhile stays."""

    def __init__(self, name: str, ours: Callable[..., Any]) -> None:
        self._name, self._ours = name, ours
        self._before = ours
        self.threads = 0

    def here(self) -> bool:
        """Whether the calling thread is inside."""
        return getattr(_here, self._name, False)

    @contextmanager
    def inside(self) -> Generator[None]:
        with _ended:
            self.threads += 1
            if (found := getattr(torch.cuda, self._name)) is not self._ours:
                self._before = found
                setattr(torch.cuda, self._name, self._ours)
        outer = self.here()
        setattr(_here, self._name, True)
        try:
            yield
        finally:
            setattr(_here, self._name, outer)
            with _ended:
                self.threads -= 1
                if not self.threads and getattr(torch.cuda, self._name) is self._ours:
                    setattr(torch.cuda, self._name, self._before)
                _ended.notify_all()


def _asked() -> bool:
    return False if _noticing.here() else being_recorded_here()


def _behind_recordings(device: Any = None) -> None:
    if not _waiting.here():
        with _ended:
            _ended.wait_for(lambda: not _waiting.threads, MAX_RECORDING_S)
    _synchronize(device)


_noticing = _StandIn("is_current_stream_capturing", _asked)
_waiting = _StandIn("synchronize", _behind_recordings)


def unnoticed() -> AbstractContextManager[None]:
    """Around code of a user's that is recorded: on the calling thread `torch.cuda.is_current_stream_capturing()` says no."""
    return _noticing.inside()


def others_wait() -> AbstractContextManager[None]:
    """Around a recording: `torch.cuda.synchronize()` of other threads returns when it has ended."""
    return _waiting.inside()


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
