"""The worker process: reads a request, captures, answers; ends when its parent does.

Started as `python -m hotfuse.compile.worker`. User code may print: standard output is moved out of its way first.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import BinaryIO

from hotfuse.base.errors import CaptureError, HotfuseError
from hotfuse.compile import requests, wire


def serve(requests_in: BinaryIO, answers_out: BinaryIO) -> None:
    """Answer requests until the other side closes."""
    while True:
        try:
            header, blobs = wire.receive(requests_in)
        except EOFError:
            return
        wire.send(answers_out, *answer(header, blobs))


def answer(header: dict[str, object], blobs: list[bytes]) -> wire.Message:
    """One request's answer; whatever goes wrong is an answer too."""
    try:
        return wire.answer_to_message(requests.handle(header, blobs))
    except CaptureError as e:
        return wire.error_to_message(e)
    except HotfuseError as e:
        return wire.error_to_message(CaptureError(e.what, where=e.where, because=e.because, hint=e.hint))
    except Exception as e:
        text = str(e).strip().splitlines()
        return wire.error_to_message(
            CaptureError("the model cannot be captured", because=f"{type(e).__name__}: {text[0][:300] if text else ''}")
        )


def main() -> None:
    """Claim the pipes, lower the priority, serve."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    if hasattr(os, "nice"):
        os.nice(19)
    import torch

    torch.set_num_threads(1)
    serve(sys.stdin.buffer, answers)


if __name__ == "__main__":
    main()
