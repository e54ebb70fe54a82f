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
import platform
import sys
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

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
        """Of the entry."""
        return digest(self.kind, self.subject, json.dumps(sorted(self.basis.items())))[:40]

    @property
    def head(self) -> str:
        """Of the note that says what the newest entry about the same subject rests on."""
        return digest(self.kind, self.subject, "head")[:40]

    def differs(self, basis: Mapping[str, str]) -> str:
        """Why an entry on another basis does not hold here."""
        for key, said in SEEN.items():
            if self.basis.get(key) != basis.get(key):
                return said
        return "it rests on something else"

    def serves(self, basis: Mapping[str, str], usable: AbstractSet[str]) -> bool:
        """Whether an entry on another basis is right here, if not the best: it differs in the sizes of calls at most, or was made
        for a machine that executes less than this one."""
        flexible = ("sizes", "machine")
        same = {k: v for k, v in basis.items() if k not in flexible} == {k: v for k, v in self.basis.items() if k not in flexible}
        there, here = basis.get("machine", "").split(), self.basis.get("machine", "").split()
        return same and (there == here or (there[:1] == here[:1] and set(there[1:]) <= usable))


@functools.cache
def program() -> str:
    """A name for the code that makes entries: its sources, whatever they are called and whenever they were written."""
    root = Path(__file__).parents[1]
    made = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        data = path.read_bytes()
        made.update(f"{path.relative_to(root).as_posix()} {len(data)}\n".encode() + data)
    return made.hexdigest()[:24]


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
