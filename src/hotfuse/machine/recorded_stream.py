"""Whether what the calling thread launches becomes part of a CUDA graph, and code that is recorded without being told.

Libraries ask torch whether a stream is being recorded and then run other kernels: transformers hands attention a mask that hides
nothing, so that it need not look at one. A recording of a model should hold the kernels that the model runs. It loads no others
then: those of attention with a mask took a quarter of a second in the call that recorded. What reads the device's data on the host
cannot be recorded so, and is recorded as it wants to be.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager

import torch

being_recorded_here: Callable[[], bool] = torch.cuda.is_current_stream_capturing
"""torch's own question, for our own code: it is true while a stream is recorded unnoticed, too."""
_here = threading.local()
_lock = threading.Lock()
_inside = 0


def _asked() -> bool:
    return False if getattr(_here, "unnoticed", False) else being_recorded_here()


@contextmanager
def unnoticed() -> Generator[None]:
    """Around code of a user's that is recorded: on the calling thread `torch.cuda.is_current_stream_capturing()` says no."""
    global _inside
    with _lock:
        _inside += 1
        torch.cuda.is_current_stream_capturing = _asked
    outer, _here.unnoticed = getattr(_here, "unnoticed", False), True
    try:
        yield
    finally:
        _here.unnoticed = outer
        with _lock:
            _inside -= 1
            if not _inside and torch.cuda.is_current_stream_capturing is _asked:
                torch.cuda.is_current_stream_capturing = being_recorded_here
