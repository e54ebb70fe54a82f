"""What traced code asks of the system: files, folders, other programs, sockets, the clock, random bytes. A graph would ask once.

The interpreter tells of most by audit events, on the thread that asks, whichever function was called (`open`, `os.open`,
`Path.read_text`, `numpy.save`). A hook stays for the life of a process: it is added by the first trace, and outside of one it looks
at a variable of the thread. For what no event tells of, functions stand in while something is traced. They ask the thread, too: one
that a module imported meanwhile keeps (`from time import time_ns`) goes on as what it stands for. What would write is refused where
it is asked, so that it is not done twice.
"""

from __future__ import annotations

import functools
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from hotfuse.base.errors import CaptureError
from hotfuse.base.faults import error_text
from hotfuse.base.lazy_dataclass import dataclass
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
_SIGNALS = ("raise_signal", "alarm", "setitimer")
_SOCKETS = ("send", "sendall", "recv", "recv_into", "recvfrom", "recvmsg"), "uses a socket"
_WORK = ("submit",), "gives work to others"
_METHODS = {
    ("socket", "socket"): _SOCKETS, ("ssl", "SSLSocket"): _SOCKETS,
    ("multiprocessing.connection", "Connection"): (("_send", "_recv"), "uses a pipe"),
    ("threading", "Thread"): (("start",), "starts a thread"),
    ("concurrent.futures.thread", "ThreadPoolExecutor"): _WORK, ("concurrent.futures.process", "ProcessPoolExecutor"): _WORK,
}  # fmt: skip
"""Of classes of the standard library, where somebody has imported them."""
_SAVED = {"save": "writes a file", "load": "reads a file"}
"""Torch's, which writes in native code, and reads files for itself, too."""
STANDS_IN_FOR = frozenset({
    ("random", "_urandom"), *(("time", name) for name in _CLOCKS), *(("os", name) for name in ("urandom", *_DESCRIPTORS)),
    *(("signal", name) for name in _SIGNALS), *(("torch", name) for name in _SAVED),
})  # fmt: skip
"""Functions that are others for as long as something is traced in this process: by module and name."""
_HEARD = "hotfuse.process_effects"
"""An event of our own."""
Note = Callable[[str], None]


class _TracedFor(threading.local):
    """What a thread traces for: told of what the traced code does."""

    note: Note | None = None
    heard: bool = False
    """Whether the event of our own came."""


_tracing = _TracedFor()


def _heard(event: str, args: Sequence[Any], tracing: _TracedFor = _tracing) -> None:
    """The hook; at the end of the interpreter it outlives the variables of its module."""
    if tracing.note is None:
        return
    if event == _HEARD:
        tracing.heard = True
        return
    what = _asked(event, args)
    if what and (frame := emitter(imports=False)) is not None:
        tracing.note(placed(what, frame))
        raise CaptureError(f"a model that is traced {what}")


def _asked(event: str, args: Sequence[Any]) -> str:
    """What is asked of the system, in words; empty where that is nothing that a graph would leave out."""
    if event != "open":
        return _EVENTS.get(event, "")
    flags = args[2] if len(args) > 2 and isinstance(args[2], int) else 0
    if isinstance(args[0], int):  # a file that is open already
        return ""
    return "opens a file to write" if flags & _WRITES else "reads a file"


def _listen() -> None:
    """Have the hook hear what this thread does. Another hook may forbid it, which the interpreter does not tell."""
    unheard = "an audit hook of the process forbids others"
    try:
        for add in (False, True):
            if add:
                sys.addaudithook(_heard)
            _tracing.heard = False
            sys.audit(_HEARD)
            if _tracing.heard:
                return
    except Exception as e:  # of somebody's hook
        unheard = f"{unheard}: {error_text(e)}"
    raise CaptureError("the model's code asks the system for something that cannot be watched for changes", because=unheard)


@contextmanager
def process_effects(note: Note) -> Generator[None]:
    """Tell `note` what code does on this thread until the block ends; raises CaptureError where that cannot be told."""
    before = _tracing.note
    _tracing.note = note
    try:
        _listen()
        with _stand_ins.in_place():
            yield
    finally:
        _tracing.note = before


@contextmanager
def unwatched() -> Generator[None]:
    """For what is done here, and not by the model, while its code runs."""
    before, _tracing.note = _tracing.note, None
    try:
        yield
    finally:
        _tracing.note = before


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a function stands in for another one, and what asking it means."""

    owner: Any
    name: str
    what: str
    through_library: bool = False
    """Whether it counts, too, where the standard library asks: locks, queues and logging look at the clock themselves."""
    stops: bool = False
    """Whether it is refused there and then."""


def _places() -> list[_Place]:
    found = [_Place(time, name, "reads the clock") for name in _CLOCKS]
    found += [_Place(os, name, f"calls os.{name}") for name in _DESCRIPTORS if hasattr(os, name)]
    random_bytes = (os, "urandom"), (random, "_urandom")
    found += [_Place(owner, name, "draws random bytes", through_library=True) for owner, name in random_bytes]
    found += [_Place(signal, name, "sends a signal", stops=True) for name in _SIGNALS if hasattr(signal, name)]
    found += [_Place(torch, name, what, stops=True) for name, what in _SAVED.items()]
    for (module, name), (methods, what) in _METHODS.items():
        if (there := sys.modules.get(module)) is not None:
            found += [_Place(getattr(there, name), m, what, through_library=True, stops=True) for m in methods]
    return found


class _StandIns:
    """Shared by all threads that trace: the first puts them in place, the last takes them away."""

    def __init__(self) -> None:
        self._lock, self._users = threading.Lock(), 0
        self._ours: dict[tuple[Any, str], Any] = {}
        self._before: dict[tuple[Any, str], Any] = {}

    @contextmanager
    def in_place(self) -> Generator[None]:
        with self._lock:
            if not self._users:
                self._put()
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    self._take_away()

    def _put(self) -> None:
        for place in _places():
            at = place.owner, place.name
            self._before[at] = vars(place.owner).get(place.name)  # None of a class that inherits it
            self._ours[at] = _watched(getattr(place.owner, place.name), place)
            setattr(place.owner, place.name, self._ours[at])

    def _take_away(self) -> None:
        """Whatever others put there meanwhile stays."""
        for (owner, name), ours in self._ours.items():
            if vars(owner).get(name) is not ours:
                continue
            if (before := self._before[owner, name]) is None:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
        self._ours, self._before = {}, {}

    def forget_others(self) -> None:
        """In a fork: no other thread is there that would let go of the lock."""
        self._lock = threading.Lock()


_stand_ins = _StandIns()
os.register_at_fork(after_in_child=_stand_ins.forget_others)


def _watched(real: Callable[..., Any], place: _Place, tracing: _TracedFor = _tracing) -> Callable[..., Any]:
    """A function that tells of calls by traced code, whoever holds it by now."""

    @functools.wraps(real)
    def asked(*args: Any, **named: Any) -> Any:
        note = tracing.note
        if note is not None and (place.through_library or not called_by_library()) and (frame := emitter()) is not None:
            note(placed(place.what, frame))
            if place.stops:
                raise CaptureError(f"a model that is traced {place.what}")
        return real(*args, **named)

    return asked
