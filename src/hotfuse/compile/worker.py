"""The worker process: reads a request, captures, answers; ends when its parent does.

Started as `python -m hotfuse.compile.worker`. User code may print: standard output is moved out of its way first. It runs at
the lowest priority, so that it takes only what inference leaves; HOTFUSE_WORKER_NICE says otherwise (a busy test machine).
"""

from __future__ import annotations

import os
import signal
import sys
from typing import BinaryIO

from hotfuse.compile import requests, wire


def serve(requests_in: BinaryIO, answers_out: BinaryIO) -> None:
    """Answer requests until the other side closes."""
    while True:
        try:
            header, blobs = wire.receive(requests_in)
        except EOFError:
            return
        wire.send(answers_out, *requests.answer(header, blobs))


def main() -> None:
    """Claim the pipes, lower the priority, serve."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    if hasattr(os, "nice"):
        os.nice(int(os.environ.get("HOTFUSE_WORKER_NICE", "19")))
    import torch

    torch.set_num_threads(1)
    serve(sys.stdin.buffer, answers)


if __name__ == "__main__":
    main()
