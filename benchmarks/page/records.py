"""What one measurement found, with what it is of; kept as one file each, so that a run that was broken off goes on where it was."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

Outcome = Literal["ok", "failed", "late"]


class MixedRecords(Exception):
    """Records that are not all of one commit and one machine."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One number, and what is asked of it."""

    label: str
    value: float | None
    """None: it was asked for, and there is none."""
    unit: str = "×"
    low: float | None = None
    high: float | None = None
    """Between which it lies, round by round (10th and 90th percentile), where rounds were taken."""
    against: str = ""
    """Whom a ratio is over; above 1 Hotfuse is faster."""
    at_least: float | None = None
    at_most: float | None = None
    note: str = ""

    @property
    def is_ratio(self) -> bool:
        """Whether it compares with somebody."""
        return self.unit == "×" and bool(self.against)

    @property
    def missed(self) -> bool:
        """Whether something was asked that it does not reach."""
        if self.at_least is None and self.at_most is None:
            return False
        if self.value is None or math.isnan(self.value):
            return True
        low = self.at_least is not None and self.value < self.at_least
        return low or (self.at_most is not None and self.value > self.at_most)

    @property
    def lost(self) -> bool:
        """Whether the other one is faster."""
        return self.is_ratio and self.value is not None and self.value < 1


@dataclass(frozen=True, slots=True)
class Stamp:
    """What a record is of. Records of one page have the same one."""

    commit: str
    dirty: bool
    """Whether sources were changed that no commit has."""
    machine: str
    cores: int
    versions: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class PageRecord:
    """One measurement's figures, or why there are none."""

    name: str
    command: str
    stamp: Stamp
    threads: int
    date: str
    seconds: float
    outcome: Outcome = "ok"
    why: str = ""
    figures: tuple[Figure, ...] = field(default=())


def place(folder: Path, commit: str, name: str) -> Path:
    """Where a record is kept."""
    return folder / commit / f"{re.sub('[^A-Za-z0-9.]+', '-', name)}.json"


def keep(folder: Path, record: PageRecord) -> None:
    """Whole or not at all."""
    path = place(folder, record.stamp.commit, record.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(asdict(record), indent=1), encoding="utf-8")
    temporary.replace(path)


def kept(folder: Path, stamp: Stamp, name: str, command: str) -> PageRecord | None:
    """The record of a measurement with this stamp and command; None where it was never measured so. One that failed or was late is
    measured again."""
    path = place(folder, stamp.commit, name)
    if not path.exists():
        return None
    found = parsed(path.read_text(encoding="utf-8"))
    return found if found.stamp == stamp and found.command == command and found.outcome == "ok" else None


def all_kept(folder: Path, commit: str) -> list[PageRecord]:
    """Every record of a commit."""
    return [parsed(p.read_text(encoding="utf-8")) for p in sorted((folder / commit).glob("*.json"))]


def parsed(text: str) -> PageRecord:
    """A record out of its text."""
    data: dict[str, Any] = json.loads(text)
    figures, of = tuple(Figure(**f) for f in data.pop("figures")), Stamp(**data.pop("stamp"))
    return PageRecord(stamp=of, figures=figures, **data)


def one_stamp(records: Iterable[PageRecord]) -> Stamp:
    """That of all of them; raises MixedRecords where they have several, or there are none."""
    stamps = [r.stamp for r in records]
    if not stamps:
        raise MixedRecords("there are no records")
    for other in stamps:
        if other != stamps[0]:
            what = "commits" if other.commit != stamps[0].commit else "states of one commit or machines"
            raise MixedRecords(f"records are of two {what}: {_told(stamps[0])}; {_told(other)}")
    return stamps[0]


def _told(stamp: Stamp) -> str:
    return f"{stamp.commit[:12]}{' with changes' if stamp.dirty else ''} on {stamp.machine}"
