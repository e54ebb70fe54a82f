"""A directory of entries: many processes at once, bounded, safe against crashes, and of use where it cannot be written.

    <root>/ab/ab12….hf   an entry
    <root>/locks/ab12…   held while somebody makes it
    <root>/.new-…        one that is being written: it gets its name when it is whole

A hit renews an entry's time, so the least recently used leaves first. Whatever goes wrong with the files is counted and told, and
costs a compile, never an answer.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hotfuse.cache.address import Address
from hotfuse.cache.entry import EntryRefusal, Message, Refused, pack, unpack
from hotfuse.cache.flight import flight
from hotfuse.cache.keys import TrustedKeys
from hotfuse.machine.probe import usable_features

SUFFIX = ".hf"
LOCKS = "locks"
MAX_ENTRY = 256 << 20
RENEW_S = 3600.0
"""Entries used more recently than this keep their time: a hit shall not write to the disk."""
LOW = 0.8
"""What is left of the limit after entries had to leave."""
CHECK_EVERY = 16
"""Entries written between two looks at how large the folder is."""
STALE_S = 3600.0
"""Unfinished files and locks older than this belong to nobody."""
COUNTED = ("hits", "misses", "refused", "unreadable", "written", "not_written", "waited", "made_by_others", "evicted",
           "bytes_read", "bytes_written")
TOLD = 16
"""Reasons kept for a reader."""


@dataclass(frozen=True, slots=True)
class CachedFile:
    """A file of the folder."""

    name: str
    bytes: int
    used: float


@dataclass(slots=True)
class Folder:
    """Entries in a directory."""

    root: Path
    keys: TrustedKeys
    limit: int
    counts: Counter[str] = field(default_factory=Counter[str])
    told: deque[str] = field(default_factory=lambda: deque[str](maxlen=TOLD))
    """Why entries were refused, not found or not written, the newest last."""
    trouble: str = ""
    """Why nothing is written any more; empty while it is."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _written: Iterator[int] = field(default_factory=itertools.count)

    # --- reading ---------------------------------------------------------------------------------

    def get(self, address: Address) -> Message | None:
        """An entry; None where there is none that holds, and why is told."""
        found = self._read(address.name)
        self._note("hits" if found is not None else "misses")
        if found is None:
            self._note(f"misses: {self._because(address)}")
        return found

    def again(self, address: Address) -> Message | None:
        """The same after a miss that was counted."""
        found = self._read(address.name) if self._path(address.name).exists() else None
        self._note("made_by_others", found is not None)
        return found

    def latest(self, address: Address) -> tuple[Message, str, Address] | None:
        """The newest entry about the subject where only the sizes of calls differ, with the words for that, and where it is."""
        head = self._read(address.head)
        if head is None:
            return None
        basis = {str(k): str(v) for k, v in head[0].get("basis", {}).items()}
        same = {k: v for k, v in basis.items() if k != "sizes"} == {k: v for k, v in address.basis.items() if k != "sizes"}
        if not same or basis == address.basis:
            return None
        other = Address(address.kind, address.subject, basis)
        found = self._read(other.name)
        return None if found is None else (found, address.differs(basis), other)

    def _because(self, address: Address) -> str:
        head = self._read(address.head)
        if head is None:
            return "nothing like it was kept"
        why = address.differs({str(k): str(v) for k, v in head[0].get("basis", {}).items()})
        self._tell(f"{address.kind}: {why}")
        return why

    def _read(self, name: str) -> Message | None:
        path = self._path(name)
        try:
            with path.open("rb") as file:
                about = os.fstat(file.fileno())
                data = file.read(MAX_ENTRY + 1)
        except OSError as e:
            if e.errno not in (errno.ENOENT, errno.ENOTDIR):
                self._note("unreadable")
                self._tell(f"an entry cannot be read: {e.strerror}")
            return None
        try:
            found = unpack(data, name, self.keys, usable_features())
        except Refused as e:
            self._note("refused")
            self._note(f"refused: {e.why.value}")
            self._tell(f"an entry was refused: {e.why.value}")
            if e.why not in (
                EntryRefusal.FOREIGN,
                EntryRefusal.FEATURES,
            ):  # which may be of use to another user, or on another machine
                with contextlib.suppress(OSError):
                    path.unlink()
            return None
        self._note("bytes_read", len(data))
        if time.time() - about.st_mtime > RENEW_S:
            with contextlib.suppress(OSError):
                os.utime(path)
        return found

    # --- writing ---------------------------------------------------------------------------------

    def put(
        self, address: Address, body: dict[str, Any], blobs: Sequence[bytes] = (), features: Sequence[str] = ()
    ) -> bool:
        """Keep an entry; False where it cannot be, and why is told."""
        head = {"basis": dict(address.basis), "at": int(time.time())}
        kept = self._write(address.name, pack(address.name, body, blobs, self.keys, features)) and self._write(
            address.head, pack(address.head, head, (), self.keys)
        )
        if kept and next(self._written) % CHECK_EVERY == 0:
            self.collect()
        return kept

    def _write(self, name: str, data: bytes) -> bool:
        if self.trouble or len(data) > min(MAX_ENTRY, self.limit):
            self._note("not_written")
            return False
        path = self._path(name)
        new = self.root / f".new-{os.getpid()}-{threading.get_ident()}-{next(self._written)}"
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:
                with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
                    file.write(data)
                new.replace(path)
            finally:
                with contextlib.suppress(OSError):
                    new.unlink(missing_ok=True)
        except OSError as e:
            self.trouble = f"entries cannot be written: {e.strerror}"
            self._note("not_written")
            self._tell(self.trouble)
            return False
        self._note("written")
        self._note("bytes_written", len(data))
        return True

    @contextlib.contextmanager
    def making(self, address: Address, patience_s: float, stop: Callable[[], bool] = lambda: False) -> Generator[bool]:
        """While it is open, no other process makes this entry; False where that cannot be had."""
        if self.trouble:
            yield False
            return
        begin = time.monotonic()
        with flight(self.root / LOCKS / address.name, patience_s, stop) as alone:
            if time.monotonic() - begin > 0.1:
                self._note("waited")
            yield alone

    # --- keeping it small ------------------------------------------------------------------------

    def entries(self) -> list[CachedFile]:
        """All of them, the longest unused first."""
        found: list[CachedFile] = []
        for path in self.root.glob(f"??/*{SUFFIX}"):
            with contextlib.suppress(OSError):
                about = path.stat()
                found.append(CachedFile(path.name.removesuffix(SUFFIX), about.st_size, about.st_mtime))
        return sorted(found, key=lambda h: h.used)

    def collect(self, limit: int | None = None) -> int:
        """Let the longest unused leave until the rest is well within the limit, and tidy up; the bytes that left."""
        limit = self.limit if limit is None else limit
        for path in (*self.root.glob(".new-*"), *self.root.glob(f"{LOCKS}/*")):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > STALE_S:
                    path.unlink()
        held = self.entries()
        total = sum(h.bytes for h in held)
        if total <= limit:
            return 0
        gone = 0
        for h in held:
            if total - gone <= limit * LOW:
                break
            with contextlib.suppress(OSError):
                self._path(h.name).unlink()
                gone += h.bytes
                self._note("evicted")
        self._note("bytes_evicted", gone)
        return gone

    def verify(self, name: str) -> str:
        """Why an entry would be refused; empty if it holds. Nothing is counted, nothing deleted."""
        try:
            unpack(self._path(name).read_bytes(), name, self.keys, usable_features())
        except Refused as e:
            return e.why.value
        except OSError as e:
            return f"it cannot be read: {e.strerror}"
        return ""

    # --- telling ---------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Counters, for `stats()`."""
        with self._lock:
            counts = dict(self.counts)
        found: dict[str, Any] = {n: counts.get(n, 0) for n in COUNTED}
        reasons = {k: n for k, n in counts.items() if ": " in k}
        return {**found, "reasons": reasons, "told": list(self.told), "trouble": self.trouble}

    def _path(self, name: str) -> Path:
        return self.root / name[:2] / f"{name}{SUFFIX}"

    def _note(self, what: str, by: int = 1) -> None:
        with self._lock:
            self.counts[what] += by

    def _tell(self, what: str) -> None:
        if what not in self.told:
            self.told.append(what)
