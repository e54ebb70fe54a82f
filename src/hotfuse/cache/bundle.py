"""One file with the entries that a model starts from, made ahead and signed.

    magic    8 bytes
    length   of the header, 4 bytes, little-endian
    header   JSON: the key that signed it, who made it of what and for which machine, and per entry where it lies and its digest
    sign     a signature over all of the above
    entries  one behind the other, each as `cache.entry` has it

The header is small and read when the file is opened; an entry is read when it is asked for, checked against its digest and then
as any other. Nothing is mapped into memory: a file that is cut short meanwhile would end the process.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.cache.entry import EntryRefusal, Refused, read_head, write_head
from hotfuse.cache.keys import TrustedKeys

MAGIC = b"HFBUNDL1"
MAX_HEADER = 16 << 20
PREFIX = len(MAGIC) + 4


@dataclass(frozen=True, slots=True)
class BundledEntry:
    """Where an entry lies in the file."""

    offset: int
    bytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class Bundle:
    """A bundle whose header is believed."""

    path: Path
    made: Mapping[str, str]
    """Who made it, when, of which model, for which machine; for readers."""
    index: Mapping[str, BundledEntry]
    start: int

    @property
    def about(self) -> str:
        """What it is called in words."""
        return f"the bundle {self.path.name}"

    @property
    def counted(self) -> str:
        """What is counted when it has an entry."""
        return "from_bundles"

    @property
    def kept(self) -> bool:
        """It is a file already."""
        return False

    @property
    def machine(self) -> str:
        """The machine its code was made for, as addresses name it."""
        return self.made.get("machine", "")

    def read(self, name: str) -> bytes | None:
        """An entry as bytes, not believed yet; None where it has none of that name. Raises Refused and OSError."""
        at = self.index.get(name)
        if at is None:
            return None
        with self.path.open("rb") as file:
            data = os.pread(file.fileno(), at.bytes, self.start + at.offset)
        if len(data) != at.bytes or hashlib.sha256(data).hexdigest() != at.digest:
            raise Refused(EntryRefusal.DAMAGED)
        return data


def open_bundle(path: Path, keys: TrustedKeys) -> Bundle:
    """A bundle that is believed; raises Refused and OSError."""
    with path.open("rb") as file:
        begin = file.read(PREFIX)
        length = int.from_bytes(begin[len(MAGIC) :], "little")
        if len(begin) < PREFIX or length > MAX_HEADER:
            raise Refused(EntryRefusal.DAMAGED)
        signed = begin + file.read(length)
        head, _ = read_head(signed, MAGIC)
        try:
            signer, made = str(head["key"]), {str(k): str(v) for k, v in head["made"].items()}
            index = {str(n): BundledEntry(int(o), int(b), str(d)) for n, (o, b, d) in head["entries"].items()}
            size = int(head["bytes"])
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as e:
            raise Refused(EntryRefusal.DAMAGED) from e
        key = keys.named(signer)
        if key is None:
            raise Refused(EntryRefusal.FOREIGN)
        signature = file.read(key.signature_bytes)
        if not key.holds(signed, signature):
            raise Refused(EntryRefusal.FORGED)
        start = len(signed) + len(signature)
        if os.fstat(file.fileno()).st_size != start + size:
            raise Refused(EntryRefusal.DAMAGED)
    if any(e.offset < 0 or e.bytes < 0 or e.offset + e.bytes > size for e in index.values()):
        raise Refused(EntryRefusal.DAMAGED)
    return Bundle(path, made, index, start)


def write_bundle(path: Path, entries: Sequence[tuple[str, bytes]], made: Mapping[str, str], keys: TrustedKeys) -> int:
    """Put entries into one file, whole or not at all; its size. Raises OSError."""
    index: dict[str, tuple[int, int, str]] = {}
    offset = 0
    for name, data in entries:
        index[name] = (offset, len(data), hashlib.sha256(data).hexdigest())
        offset += len(data)
    head: dict[str, Any] = {"key": keys.own.name, "made": dict(made), "entries": index, "bytes": offset}
    parts = write_head(MAGIC, head)
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}")
    try:
        with new.open("wb") as file:
            for part in (*parts, keys.own.sign(*parts), *(data for _, data in entries)):
                file.write(part)
            size = file.tell()
        new.replace(path)
    finally:
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)
    return size
