"""Bytes to and from memory: counted by the memory controllers where the system lets us, else derived, and labelled so.

    uncore_imc_0/events/cas_count_read         event=0x04,umask=0x03     what to count, in words of the device's own
    uncore_imc_0/events/cas_count_read.scale   6.103515625e-5            and what one count is
    uncore_imc_0/format/umask                  config:8-15               where the words go

Controllers count for the whole machine. What one thread moves is derived from its cache misses: each fetches a line.
"""

from __future__ import annotations

import os
import re
import struct
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.machine.counters import open_of_machine, reason
from hotfuse.machine.topology import read_text

LINE = 64
"""Bytes that a cache miss fetches."""
Source = Literal["counted", "derived"]
_DEVICES = Path("/sys/bus/event_source/devices")
_CONTROLLERS = re.compile(r"(uncore_imc|amd_umc|uncore_ddr|arm_dmc).*")
_READS = ("cas_count_read", "data_reads", "data_read")
_WRITES = ("cas_count_write", "data_writes", "data_write")
_UNITS = {"MiB": 1 << 20, "KiB": 1 << 10, "Bytes": 1, "B": 1}
_UNNAMED: Mapping[str, Mapping[str, str]] = {
    "amd_umc": {"data_reads": "event=0x0a,rdwrmask=0x1", "data_writes": "event=0x0a,rdwrmask=0x2"}
}
"""Devices whose events the system knows no names for; each count is a line."""


@dataclass(frozen=True, slots=True)
class TrafficMeter:
    """One direction of one controller."""

    device: str
    writes: bool
    kind: int
    number: int
    cpu: int
    bytes: float
    """Of one count."""


@dataclass(frozen=True, slots=True)
class Moved:
    """Bytes in some time."""

    read: float
    written: float
    seconds: float
    source: Source
    of: str
    """Whose they are."""

    @property
    def per_s(self) -> float:
        """Bytes a second, both ways."""
        return (self.read + self.written) / self.seconds if self.seconds > 0 else 0.0


def meters(root: Path = _DEVICES) -> list[TrafficMeter]:
    """What controllers the system knows can count."""
    found: list[TrafficMeter] = []
    for device in sorted(root.glob("*")):
        if not _CONTROLLERS.fullmatch(device.name):
            continue
        kind, cpu = read_text(device / "type"), re.match(r"\d+", read_text(device / "cpumask") or "0")
        if kind is None or not kind.isdigit():
            continue
        unnamed = next((v for k, v in _UNNAMED.items() if device.name.startswith(k)), {})
        for writes, names in ((False, _READS), (True, _WRITES)):
            for name in names:
                text = read_text(device / "events" / name) or unnamed.get(name)
                number = None if text is None else encoded(text, device / "format")
                if number is not None:
                    each = _bytes(device / "events", name)
                    found.append(TrafficMeter(device.name, writes, int(kind), number, int(cpu[0]) if cpu else 0, each))
                    break
    return found


def encoded(text: str, formats: Path) -> int | None:
    """`event=0x04,umask=0x03` as the number that the system takes; None where a word's place is not known."""
    number = 0
    for word in text.split(","):
        name, _, value = word.strip().partition("=")
        place = re.fullmatch(r"config:(\d+)(?:-(\d+))?", read_text(formats / name) or "")
        try:
            given = int(value, 0) if value else 1
        except ValueError:
            return None
        if place is None or given >> (int(place[2] or place[1]) - int(place[1]) + 1):
            return None
        number |= given << int(place[1])
    return number


def _bytes(events: Path, name: str) -> float:
    try:
        return float(read_text(events / f"{name}.scale") or "") * _UNITS[read_text(events / f"{name}.unit") or ""]
    except (ValueError, KeyError):
        return float(LINE)


class Traffic:
    """The machine's memory traffic since it was begun; `missing` says why it is not counted."""

    def __init__(
        self, root: Path = _DEVICES, open_: Callable[[int, int, int], int] = open_of_machine,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:  # fmt: skip
        self.missing = ""
        self._files: list[tuple[TrafficMeter, int]] = []
        self._clock = clock
        known = meters(root)
        try:
            for meter in known:
                self._files.append((meter, open_(meter.kind, meter.number, meter.cpu)))
        except OSError as e:  # some controllers alone would say too little
            self.close()
            self.missing = reason(e)
        if not known:
            self.missing = "the system shows no memory controller that counts (common in virtual machines)"
        self._first = {file: _value(file) for _, file in self._files}
        self._begun = clock()

    @property
    def controllers(self) -> tuple[str, ...]:
        """What counts."""
        return tuple(dict.fromkeys(m.device for m, _ in self._files))

    def read(self) -> Moved | None:
        """Bytes since the beginning; None where nothing counts them."""
        if not self._files:
            return None
        taken = [(m.writes, (_value(f) - self._first[f]) * m.bytes) for m, f in self._files]
        read, written = (sum(b for w, b in taken if w is way) for way in (False, True))
        return Moved(read, written, self._clock() - self._begun, "counted", "the whole machine")

    def close(self) -> None:
        """Give the counters back."""
        while self._files:
            os.close(self._files.pop()[1])


def _value(file: int) -> float:
    value, wanted, counted = struct.unpack("=QQQ", os.read(file, 24))
    return value * wanted / counted if counted else 0.0


def of_misses(misses: float, seconds: float) -> Moved:
    """What a thread fetched, from its cache misses; what it wrote back is not seen."""
    return Moved(misses * LINE, 0.0, seconds, "derived", "cache misses of the calling thread, a line each")


def look(seconds: float = 0.05) -> tuple[Moved | None, str]:
    """The machine's traffic just now, and why it is not counted."""
    traffic = Traffic()
    try:
        if traffic.controllers:
            time.sleep(seconds)
        return traffic.read(), traffic.missing
    finally:
        traffic.close()
