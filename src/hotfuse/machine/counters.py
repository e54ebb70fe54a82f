"""Counters of the processor for the calling thread, through `perf_event_open`, one by one where the system allows them.

    with Counters() as counters:
        work()
    counters.read()["cycles"]      -> Count(value=..., share=1.0), or absent

Virtual machines and containers often forbid some or all of them; `Counters.missing` says which and why. What is then needed has
to be derived from time (`hpm.bottleneck`), and is labelled so: a count here was always counted.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Mapping
from types import TracebackType

from hotfuse.base.lazy_dataclass import dataclass

_SYSCALL = {"x86_64": 298, "aarch64": 241}
_HARDWARE, _SOFTWARE = 0, 1
EVENTS: Mapping[str, tuple[int, int]] = {
    "cycles": (_HARDWARE, 0),
    "instructions": (_HARDWARE, 1),
    "cache_references": (_HARDWARE, 2),
    "cache_misses": (_HARDWARE, 3),
    "branch_misses": (_HARDWARE, 5),
    "task_clock_ns": (_SOFTWARE, 1),
    "page_faults": (_SOFTWARE, 2),
    "context_switches": (_SOFTWARE, 3),
}
"""Name -> (type, number) as the kernel has them."""
_ATTR_BYTES = 128
_TIMES = 1 | 2
"""Read also how long an event was wanted and how long it was counted."""
_DISABLED, _INHERIT, _NO_KERNEL, _NO_HYPERVISOR = 1 << 0, 1 << 1, 1 << 5, 1 << 6
_ENABLE, _DISABLE, _RESET = 0x2400, 0x2401, 0x2403


@dataclass(frozen=True, slots=True)
class Count:
    """What one event came to."""

    value: float
    share: float
    """How much of the time it was really counted; below 1 the value was scaled up, as counters took turns."""


class Counters:
    """The events that this system lets this thread count; `inherit` adds threads begun later."""

    def __init__(self, events: tuple[str, ...] = tuple(EVENTS), *, inherit: bool = False) -> None:
        self.missing: dict[str, str] = {}
        """Why an event is not counted."""
        self._files: dict[str, int] = {}
        for name in events:
            try:
                self._files[name] = _open(*EVENTS[name], inherit=inherit)
            except OSError as e:
                self.missing[name] = reason(e)

    @property
    def names(self) -> tuple[str, ...]:
        """What is counted."""
        return tuple(self._files)

    def start(self) -> None:
        """Begin at zero."""
        for file in self._files.values():
            _control(file, _RESET)
            _control(file, _ENABLE)

    def stop(self) -> None:
        """Count no more."""
        for file in self._files.values():
            _control(file, _DISABLE)

    def read(self) -> dict[str, Count]:
        """What was counted since the start; an event that never got a counter is absent."""
        found: dict[str, Count] = {}
        for name, file in self._files.items():
            value, wanted, counted = struct.unpack("=QQQ", os.read(file, 24))
            if counted:
                found[name] = Count(value * wanted / counted, counted / wanted)
        return found

    def close(self) -> None:
        """Give the counters back."""
        while self._files:
            os.close(self._files.popitem()[1])

    def __enter__(self) -> Counters:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _open(kind: int, number: int, *, inherit: bool) -> int:
    flags = _DISABLED | _NO_HYPERVISOR | (_NO_KERNEL if kind == _HARDWARE else 0) | (_INHERIT if inherit else 0)
    return _event(kind, number, flags, 0, -1)


def open_of_machine(kind: int, number: int, cpu: int) -> int:
    """A running count of something outside the cores, for the whole machine; `cpu` is the core that may ask for it."""
    return _event(kind, number, 0, -1, cpu)


def _event(kind: int, number: int, flags: int, process: int, cpu: int) -> int:
    call = _SYSCALL.get(platform.machine())
    if call is None or platform.system() != "Linux":
        raise OSError(errno.ENOSYS, "no perf_event_open on this system")
    attr = struct.pack("=IIQQQQQ", kind, _ATTR_BYTES, number, 0, 0, _TIMES, flags).ljust(_ATTR_BYTES, b"\0")
    close_on_exec = 8
    libc = _libc()
    given = (ctypes.c_long(call), ctypes.c_char_p(attr), process, cpu, -1, ctypes.c_ulong(close_on_exec))
    file = libc.syscall(*given)
    if file < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return int(file)


def _control(file: int, what: int) -> None:
    if _libc().ioctl(file, ctypes.c_ulong(what), 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def reason(e: OSError) -> str:
    """Why an event cannot be counted."""
    match e.errno:
        case errno.ENOENT | errno.EOPNOTSUPP | errno.ENODEV:
            return "the processor does not offer it here (common in virtual machines)"
        case errno.EACCES | errno.EPERM:
            return "not permitted: see /proc/sys/kernel/perf_event_paranoid"
        case errno.ENOSYS:
            return "the system has no perf_event_open"
        case _:
            return e.strerror or str(e)


def availability() -> dict[str, str]:
    """Per event, an empty text where it can be counted, else why it cannot."""
    counters = Counters()
    try:
        return {name: counters.missing.get(name, "") for name in EVENTS}
    finally:
        counters.close()
