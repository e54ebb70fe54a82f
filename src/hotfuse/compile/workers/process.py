"""A worker process and the pipes to it: started, asked, paused, measured, ended. The pool decides what is asked.

`Worker` starts a fresh interpreter; `compile.workers.forked` has the other kind. The pipes are unbuffered: a process that forks
in the middle of a message must not send the rest of it twice.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

from hotfuse.base.environment import for_child
from hotfuse.compile.workers import wire
from hotfuse.compile.workers.priority import LEVEL, LOWEST, renice, steps_below

COMMAND = (sys.executable, "-m", "hotfuse.compile.workers.worker")
_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
_LOG_BYTES, _FILE_BYTES = range(120, 123), range(1 << 30, (1 << 30) + 512)
"""That SQLite locks: of the file beside one with a write-ahead log, to write, bring it over or recover it; of any other file."""
STOP_TICKS, STOP_TICK_S = 10, 0.0005
"""How often, and how far apart, it is asked whether a process stands."""
_TICK = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


def _uses_a_device() -> bool:
    """Whether models of this process run on a device: their code, captured in a worker, may ask what devices there are."""
    torch: Any = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_initialized()


def holds_database(pid: int) -> bool:
    """Whether a process is about to write to an SQLite file: it holds the bytes that stand for that."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/locks").read_text().splitlines():
            fields = line.split()
            if "->" not in fields and fields[1:5] == ["POSIX", "ADVISORY", "WRITE", str(pid)] and _is_sqlites(int(fields[6])):
                return True
    return False


def _is_sqlites(byte: int) -> bool:
    return byte in _LOG_BYTES or byte in _FILE_BYTES


def _stands(pid: int) -> bool:
    """Whether a process that was told to stop has done so; given a moment, since it may be on another core."""
    for _ in range(STOP_TICKS):
        with contextlib.suppress(OSError, IndexError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt":
                return True
        time.sleep(STOP_TICK_S)
    return False


class Child(Protocol):
    """A child process, as far as a worker needs it: what `subprocess.Popen` has of it."""

    pid: int
    returncode: int | None

    def poll(self) -> int | None: ...  # noqa: D102
    def wait(self) -> int: ...  # noqa: D102
    def kill(self) -> None: ...  # noqa: D102
    def send_signal(self, number: int, /) -> None: ...  # noqa: D102


class Worker:
    """One process; only the thread that started it may ask it, any thread may pause or kill it."""

    forked = False
    """Whether it began as a copy of this process."""

    def __init__(self, memory: int = 0, command: Sequence[str] = COMMAND, level: int = LOWEST) -> None:
        bound = 0 if _uses_a_device() else memory  # the driver maps many times what it uses; the resident size is watched
        env = for_child(OMP_NUM_THREADS="1", HOTFUSE_CAPTURE="off", HOTFUSE_WORKER_MEMORY=str(bound), **{LEVEL: str(level)})
        log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the worker
        process = subprocess.Popen(
            list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=env, bufsize=0,
        )
        assert process.stdin is not None and process.stdout is not None
        self._hold(process, cast(BinaryIO, process.stdin), cast(BinaryIO, process.stdout), log, level)

    def _hold(self, process: Child, requests: BinaryIO, answers: BinaryIO, log: BinaryIO, level: int) -> None:
        self._process, self._in, self._out, self._log = process, requests, answers, log
        self.paused = False
        self._began = level
        self._said_last = ""
        """Its last words, once it is closed."""

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    @property
    def status(self) -> int | None:
        """How it ended, if it did."""
        return self._process.returncode

    def ask(self, header: dict[str, Any], blobs: Sequence[bytes]) -> wire.Message:
        """Send a request and wait for its answer; raises EOFError or OSError when the process is gone."""
        wire.send(self._in, header, blobs)
        return wire.receive(self._out)

    def pause(self) -> None:
        """Stop it where it is. One that writes to a database goes on for now: all who write there would wait until it goes on, and
        after half a minute give the file up."""
        self._signal(signal.SIGSTOP)
        if self.paused or not (_stands(self.pid) and holds_database(self.pid)):
            self.paused = True
        else:
            self._signal(signal.SIGCONT)

    def resume(self) -> None:
        """Let it go on."""
        self.paused = False
        self._signal(signal.SIGCONT)

    @property
    def level(self) -> int:
        """Steps of priority below this process; those it was told to begin with where the system does not say."""
        with contextlib.suppress(OSError, AttributeError):
            return steps_below(self.pid)
        return self._began

    def renice(self, level: int) -> bool:
        """Give it another priority; False where this process may not."""
        return renice(self.pid, level)

    def kill(self) -> None:
        """End it at once; waiting threads get an error."""
        self._process.kill()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def _stat(self) -> list[str]:
        """What the system says of it, from the state on; empty where it says nothing."""
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return []

    def cpu_s(self) -> float:
        """CPU time it has used, 0 where the system does not say."""
        fields = self._stat()
        return (int(fields[11]) + int(fields[12])) / _TICK if fields else 0.0

    def sleeps(self) -> bool:
        """Whether it waits for something, rather than for a core."""
        return self._stat()[:1] in (["S"], ["D"])

    def ask_where(self) -> None:
        """Have it write down where it stands, if it can."""

    def where(self) -> str:
        """Where it stood when it was asked last; empty where it did not say."""
        return ""

    def rss(self) -> int:
        """Bytes it holds in memory, 0 where the system does not say."""
        try:
            return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * _PAGE
        except (OSError, IndexError):
            return 0

    def last_words(self) -> str:
        """The last line it wrote to its standard error."""
        with contextlib.suppress(ValueError):  # it was closed, maybe just now
            self._log.seek(0, os.SEEK_END)
            self._log.seek(max(0, self._log.tell() - 2000))
            lines = self._log.read().decode(errors="replace").strip().splitlines()
            return lines[-1] if lines else ""
        return self._said_last

    def close(self) -> None:
        """End the process, at once, and take its status, so that no zombie stays."""
        self._process.kill()
        self._process.wait()
        self._close_pipes()
        self._said_last = self.last_words()
        self._log.close()

    def abandon(self) -> None:
        """In a forked child: let go of the parent's worker, so that it ends when the parent does."""
        self._process.returncode = 0
        self._close_pipes()
        self._log.close()

    def _close_pipes(self) -> None:
        for pipe in (self._in, self._out):
            with contextlib.suppress(OSError):
                pipe.close()
