"""What traced code asks of the system: files, folders, other programs, the clock, random bytes. A graph would ask once.

The interpreter tells of most by audit events, on the thread that asks, whichever function was called (`open`, `os.open`,
`Path.read_text`, `numpy.save`). A hook stays for the life of a process: it is added by the first trace, and outside of one it looks
at a variable of the thread. What would write is refused where it is asked, so that it is not done twice.
"""

from __future__ import annotations

import functools
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

from hotfuse.base.errors import CaptureError
from hotfuse.frontends.model_frames import called_by_library, emitter, placed

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC
_EVENTS = {
    "os.mkdir": "makes a folder", "os.rmdir": "removes a folder", "os.remove": "removes a file", "os.rename": "renames a file",
    "os.link": "links a file", "os.symlink": "links a file", "os.truncate": "cuts a file", "os.utime": "writes times of a file",
    "os.chmod": "writes rights of a file", "os.system": "runs a program", "os.posix_spawn": "runs a program",
    "os.exec": "runs a program", "subprocess.Popen": "runs a program", "os.fork": "forks", "os.kill": "sends a signal",
    "socket.connect": "connects a socket", "socket.sendto": "sends through a socket", "socket.sendmsg": "sends through a socket",
    "sqlite3.connect": "opens a database", "os.listdir": "lists a folder", "os.scandir": "lists a folder",
}  # fmt: skip
_DESCRIPTORS = ("write", "writev", "pwrite", "sendfile", "read", "readv", "pread")
_CLOCKS = [f"{name}{unit}" for name in ("time", "perf_counter", "monotonic", "process_time", "thread_time") for unit in ("", "_ns")]
STANDS_IN_FOR = frozenset({
    ("random", "_urandom"), *(("time", name) for name in _CLOCKS), *(("os", name) for name in ("urandom", *_DESCRIPTORS)),
})  # fmt: skip
"""Functions that are others for as long as something is traced in this process: by module and name."""
Note = Callable[[str], None]


class _TracedFor(threading.local):
    """What a thread traces for: told of what the traced code does."""

    note: Note | None = None


_tracing = _TracedFor()


@functools.cache
def _listen() -> None:
    """Add the hook, once in a process."""
    sys.addaudithook(_heard)


def _heard(event: str, args: Sequence[Any]) -> None:
    if _tracing.note is None:
        return
    what = _asked(event, args)
    if what and (frame := emitter(imports=False)) is not None:
        _tracing.note(placed(what, frame))
        raise CaptureError(f"a model that is traced {what}")


def _asked(event: str, args: Sequence[Any]) -> str:
    """What is asked of the system, in words; empty where that is nothing that a graph would leave out."""
    if event != "open":
        return _EVENTS.get(event, "")
    flags = args[2] if len(args) > 2 and isinstance(args[2], int) else 0
    if isinstance(args[0], int):  # a file that is open already
        return ""
    return "opens a file to write" if flags & _WRITES else "reads a file"


@contextmanager
def process_effects(note: Note) -> Generator[None]:
    """Tell `note` what code does on this thread until the block ends."""
    _listen()
    before = _tracing.note
    _tracing.note = note
    try:
        with _replaced(_clocks(note) | _descriptors(note) | _random_bytes(note)):
            yield
    finally:
        _tracing.note = before


def _clocks(note: Note) -> dict[tuple[Any, str], Any]:
    return {(time, name): _watched(getattr(time, name), "reads the clock", note, through_library=False) for name in _CLOCKS}


def _descriptors(note: Note) -> dict[tuple[Any, str], Any]:
    """Those of the system's own numbers, of which no audit event tells."""
    there = [name for name in _DESCRIPTORS if hasattr(os, name)]
    return {(os, name): _watched(getattr(os, name), f"calls os.{name}", note, through_library=False) for name in there}


def _random_bytes(note: Note) -> dict[tuple[Any, str], Any]:
    watched = _watched(os.urandom, "draws random bytes", note, through_library=True)
    return {(os, "urandom"): watched, (random, "_urandom"): watched}


def _watched(real: Callable[..., Any], what: str, note: Note, *, through_library: bool) -> Callable[..., Any]:
    """A function that tells of calls by traced code, which is what the standard library is asked to do only with `through_library`:
    locks, queues and logging look at the clock themselves.
    """
    thread = threading.get_ident()

    @functools.wraps(real)
    def asked(*args: Any, **named: Any) -> Any:
        if threading.get_ident() == thread and (through_library or not called_by_library()) and (frame := emitter()) is not None:
            note(placed(what, frame))
        return real(*args, **named)

    return asked


@contextmanager
def _replaced(places: dict[tuple[Any, str], Any]) -> Generator[None]:
    """Have attributes be something else; whatever others put there meanwhile stays."""
    before = {(owner, name): getattr(owner, name) for owner, name in places}
    for (owner, name), new in places.items():
        setattr(owner, name, new)
    try:
        yield
    finally:
        for (owner, name), new in places.items():
            if getattr(owner, name) is new:
                setattr(owner, name, before[owner, name])
