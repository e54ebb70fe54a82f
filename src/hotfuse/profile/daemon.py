"""The analyzer's process: drains the ring beside inference, and says what it learned.

Started as `python -m hotfuse.profile.daemon FD`. It runs at the lowest priority, and ends with its parent. It loads neither torch
nor a compiler.

    to it      lines on standard input: `flush N` (answer when N records have been taken), `forget N` (a graph that is gone), end of
               file (stop)
    from it    lines on standard output: S and a snapshot, D and a change, F and the N of a flush that is done
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import BinaryIO

from hotfuse.profile.analyzer_memory import AnalyzerMemory
from hotfuse.profile.ring import Ring
from hotfuse.profile.snapshot import to_json

BUSY_S, IDLE_S = 0.02, 0.25
"""How long it sleeps when records are coming, and when none are."""
SNAPSHOT_S = 0.5
"""Least time between two snapshots that nobody asked for."""
Say = Callable[[bytes], None]


class Daemon:
    """The loop, in steps that a test can take one by one."""

    def __init__(self, ring: Ring, say: Say, clock: Callable[[], float] = time.monotonic) -> None:
        self.ring = ring
        self.memory = AnalyzerMemory()
        self._say = say
        self._clock = clock
        self._said = -SNAPSHOT_S
        self._told = 0
        self._flushes: list[int] = []

    def flush(self, records: int) -> None:
        """Answer when so many records have been taken out in all."""
        self._flushes.append(records)

    def step(self) -> int:
        """Drain what there is; how many records that were."""
        raw = self.ring.drain()
        if len(raw):
            for drift in self.memory.add(raw):
                self._say(b"D" + json.dumps(asdict(drift)).encode())
        due = [n for n in self._flushes if n <= self.ring.consumed]
        new = self.memory.records > self._told
        if due or (new and self._clock() - self._said >= SNAPSHOT_S):
            self._said = self._clock()
            self._told = self.memory.records
            self._say(b"S" + to_json(self.memory.snapshot(self.ring.torn)))
        for n in due:
            self._flushes.remove(n)
            self._say(b"F%d" % n)
        return len(raw)


def serve(daemon: Daemon, requests: BinaryIO, parent: int) -> None:
    """Until the other side closes, or the parent is gone."""
    fd = requests.fileno()
    pending, sleep = b"", 0.0
    while os.getppid() == parent:
        if select.select([fd], [], [], sleep)[0]:
            data = os.read(fd, 4096)
            if not data:
                return
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                word, _, number = line.partition(b" ")
                if word == b"flush":
                    daemon.flush(int(number))
                elif word == b"forget":
                    daemon.memory.forget(int(number))
        taken = daemon.step()
        sleep = 0.0 if taken >= 512 else BUSY_S if taken else min(IDLE_S, sleep * 1.5 + 0.005)


def main() -> None:
    """Attach to the ring that the parent handed over, and serve."""
    parent = os.getppid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    os.nice(int(os.environ.get("HOTFUSE_WORKER_NICE", "19")))
    out = sys.stdout.buffer

    def say(line: bytes) -> None:
        out.write(line + b"\n")
        out.flush()

    try:
        serve(Daemon(Ring.attach(int(sys.argv[1])), say), sys.stdin.buffer, parent)
    except BrokenPipeError:  # nobody listens any more
        os._exit(0)


if __name__ == "__main__":
    main()
