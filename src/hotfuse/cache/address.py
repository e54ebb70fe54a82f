"""Where an entry is: what it is about, and everything it rests on.

    capture   a model and a kind of call                -> its graph
    plan      a graph as text                           -> how it is cut, its kernels and native runs as object code
    verdict   the same                                  -> what its plan took against the one before it
    unit      a group of nodes in its normal form       -> its kernels as object code, or why it has none

What an entry rests on is in its name, field by field, so nothing is found that does not hold. What was found under the same subject
on another basis is known by its `head`, so that a miss can say what has changed.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import sys
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.cache.notes import StartNotes

SEEN = {
    "program": "it was made by another version of Hotfuse",
    "torch": "it was made with another version of torch",
    "toolchain": "it was made by another version of LLVM",
    "machine": "it was made for another machine",
    "threads": "it was made for another number of threads",
    "options": "it was made with other settings",
    "sizes": "it was made for calls of other sizes",
    "model": "the performance model has learned since",
    "call": "it was made for another kind of call",
}
"""What a difference between two bases means, in words; the first that differs is told."""


def digest(*parts: str | bytes) -> str:
    """A name for content."""
    made = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        made.update(len(data).to_bytes(8, "little"))
        made.update(data)
    return made.hexdigest()


@dataclass(frozen=True, slots=True)
class Address:
    """What an entry is about, and what it rests on."""

    kind: str
    subject: str
    """A digest of what it was made of."""
    basis: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def name(self) -> str:
        """The name under which the entry is kept."""
        return digest(self.kind, self.subject, json.dumps(sorted(self.basis.items())))[:40]

    @property
    def head(self) -> str:
        """The name of the note that says what the newest entry about the same subject rests on."""
        return digest(self.kind, self.subject, "head")[:40]

    def differs(self, basis: Mapping[str, str]) -> str:
        """Why an entry on another basis does not hold here."""
        for key, said in SEEN.items():
            if self.basis.get(key) != basis.get(key):
                return said
        return "it rests on something else"

    def serves(self, basis: Mapping[str, str], usable: AbstractSet[str]) -> bool:
        """Whether an entry on another basis is right here, if not the best: it differs in the sizes of calls or in their threads at
        most, or was made for a machine that executes less than this one."""
        flexible = ("sizes", "threads", "machine")
        same = {k: v for k, v in basis.items() if k not in flexible} == {k: v for k, v in self.basis.items() if k not in flexible}
        there, here = basis.get("machine", "").split(), self.basis.get("machine", "").split()
        return same and (there == here or (there[:1] == here[:1] and set(there[1:]) <= usable))


_notes: StartNotes | None = None


def note_sources_in(notes: StartNotes | None) -> None:
    """Where the digest of Hotfuse's own files is noted; the last call decides."""
    global _notes
    _notes = notes


@functools.cache
def program() -> str:
    """A name for the code that makes entries: its sources, whatever they are called and whenever they were written."""
    root = Path(__file__).parents[1]
    files = sorted(_sources(str(root)))
    seen = digest(*(f"{name} {size} {changed}" for name, size, changed in files))
    known = None if _notes is None else _notes.recall("sources", seen)
    if isinstance(known, str):
        return known
    made = hashlib.sha256()
    for name, _, _ in files:
        data = Path(name).read_bytes()
        made.update(f"{Path(name).relative_to(root).as_posix()} {len(data)}\n".encode() + data)
    found = made.hexdigest()[:24]
    if _notes is not None:
        _notes.keep("sources", seen, found)
    return found


def _sources(folder: str) -> Iterator[tuple[str, int, int]]:
    """Our files below a folder, with their sizes and when they were changed."""
    with os.scandir(folder) as found:
        for entry in found:
            if entry.is_dir():
                yield from _sources(entry.path)
            elif entry.name.endswith(".py"):
                about = entry.stat()
                yield entry.path, about.st_size, about.st_mtime_ns


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


@functools.cache
def versions() -> Mapping[str, str]:
    """What every entry rests on."""
    return {"program": program(), "torch": _version("torch"), "python": f"{sys.implementation.name} {platform.python_version()}"}


@functools.cache
def toolchain() -> str:
    """What makes machine code."""
    return f"llvmlite {_version('llvmlite')}"


def machine_text(features: Iterable[str]) -> str:
    """A machine as code rests on it: the features that code may use. Hints for tuning are not among them."""
    return " ".join((platform.machine(), *sorted(features)))
