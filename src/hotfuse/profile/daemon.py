"""The analyzer's process: drains the ring beside inference, and says what it learned.

Started as `python -m hotfuse.profile.daemon FD SECONDS [follows]`. It runs at the lowest priority, and ends with its parent, or
when no record came for so many seconds: then it hands over what it remembers, and the next one goes on from there (decision 245).
It loads neither torch nor a compiler.

    to it      lines on standard input: `remember M` (what one before it handed over), `flush N` (answer when N records have been
               taken), `forget N` (a graph that is gone), end of file (stop)
    from it    lines on standard output: S and a snapshot, D and a change, F and the N of a flush that is done, M and what it
               remembers (the last line of one that leaves), L and why it could not take over what one before it remembered

What is handed over is text to everybody but an analyzer: the serving process keeps it and never reads it.
"""

from __future__ import annotations

import base64
import json
import math
import os
import pickle
import select
import signal
import sys
import time
import zlib
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
        self.book = AnalyzerMemory()
        self._say = say
        self._clock = clock
        self._said = -SNAPSHOT_S
        self._told = 0
        self._flushes: list[int] = []

    def flush(self, records: int) -> None:
        """Answer when so many records have been taken out in all."""
        self._flushes.append(records)

    def remember(self, text: bytes) -> None:
        """Go on from what another one handed over."""
        try:
            book = pickle.loads(zlib.decompress(base64.b64decode(text, validate=True)))
            if not isinstance(book, AnalyzerMemory):
                raise TypeError(f"{type(book).__name__} is no memory of an analyzer")
        except Exception as e:  # of another version of the sources, which were exchanged under the running process: begin anew
            self._say(b"L" + f"{type(e).__name__}: {e}"[:200].replace("\n", " ").encode())
            return
        self.book, self._told = book, book.records

    def hand_over(self) -> bool:
        """Say what is remembered, so that another one can go on; False where somebody waits for an answer, or records wait."""
        if self._flushes or self._told < self.book.records or self.ring.published > self.ring.consumed:
            return False
        self._say(b"M" + base64.b64encode(zlib.compress(pickle.dumps(self.book, pickle.HIGHEST_PROTOCOL), 1)))
        return True

    def step(self) -> int:
        """Drain what there is; how many records that were."""
        raw = self.ring.drain()
        if len(raw):
            for drift in self.book.add(raw):
                self._say(b"D" + json.dumps(asdict(drift)).encode())
        due = [n for n in self._flushes if n <= self.ring.consumed]
        new = self.book.records > self._told
        if due or (new and self._clock() - self._said >= SNAPSHOT_S):
            self._said = self._clock()
            self._told = self.book.records
            self._say(b"S" + to_json(self.book.snapshot(self.ring.torn)))
        for n in due:
            self._flushes.remove(n)
            self._say(b"F%d" % n)
        return len(raw)


def serve(daemon: Daemon, requests: BinaryIO, parent: int, patience_s: float = math.inf, *, follows: bool = False) -> None:
    """Until the other side closes, the parent is gone, or no record came for so long.

    One that follows another takes no record before it has that one's memory: the parent writes it, and reads nothing meanwhile.
    """
    fd = requests.fileno()
    pending, sleep, busy = b"", 0.0, time.monotonic()
    while os.getppid() == parent:
        if select.select([fd], [], [], IDLE_S if follows else sleep)[0]:
            data = os.read(fd, 1 << 16)
            if not data:
                return
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                word, _, number = line.partition(b" ")
                if word == b"flush":
                    daemon.flush(int(number))
                elif word == b"forget":
                    daemon.book.forget(int(number))
                elif word == b"remember":
                    daemon.remember(number)
                    follows = False
        if follows:
            continue
        taken = daemon.step()
        if taken:
            busy = time.monotonic()
        elif time.monotonic() - busy > patience_s and daemon.hand_over():
            return
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
        daemon = Daemon(Ring.attach(int(sys.argv[1])), say)
        serve(daemon, sys.stdin.buffer, parent, float(sys.argv[2]), follows="follows" in sys.argv)
    except BrokenPipeError:  # nobody listens any more
        os._exit(0)


if __name__ == "__main__":
    main()
