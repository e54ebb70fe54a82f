"""A directory of entries: many processes at once, bounded, safe against crashes, and of use where it cannot be written.

    <root>/ab/ab12….hf   an entry
    <root>/ab/ab12….KEY.hf   the same of a user whose key is called so, where the first is signed by somebody who is not believed
    <root>/locks/ab12…   held while somebody makes it
    <root>/.new-…        one that is being written: it gets its name when it is whole

A folder that others may write too is made so by whoever shares it (`chmod 1777`, or a group's); what is made in it is then open to
them. Any other is its owner's alone.

A hit renews an entry's time, so the least recently used leaves first. What the directory has not, its layers may have: bundles that
were made ahead, and a store that machines share, whose entries are kept here then. Whatever goes wrong with the files is counted
and told, and costs a compile, never an answer.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import os
import stat
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any, Protocol

from hotfuse.base.clock import is_recent
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.cache.address import Address
from hotfuse.cache.entry import EntryRefusal, Message, Refused, pack, unpack
from hotfuse.cache.flight import flight
from hotfuse.cache.keys import TrustedKeys, unblocked
from hotfuse.cache.shared import SharedStore
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
UNUSED_S = 2 * RENEW_S
"""Entries that nobody used for so long leave a full disk to new ones; times of those in use are at most `RENEW_S` old."""
ROOM = 8 << 20
"""Bytes that leave a full disk at once: the folder is not looked through for every entry."""
RETRY_S = 60.0
"""After a failed write nothing is written for so long: a disk that was full is used again, a read-only one is left alone."""
COUNTED = ("hits", "from_bundles", "from_shared", "misses", "refused", "unreadable", "written", "not_written", "waited",
           "made_by_others", "evicted", "bytes_read", "bytes_written")
MAX_REASONS = 16
"""Reasons kept for a reader."""


@dataclass(frozen=True, slots=True)
class CachedFile:
    """A file of the folder."""

    name: str
    """Of the entry."""
    bytes: int
    used: float
    file: str
    """The entry's name, and that of a key where the file is one user's own."""


class EntryLayer(Protocol):
    """Where entries are that the directory has not."""

    @property
    def about(self) -> str:
        """What it is called in words."""
        ...

    @property
    def machine(self) -> str:
        """The machine that its code is for, as addresses name it; empty where it has entries for any."""
        ...

    @property
    def counted(self) -> str:
        """What is counted when it has an entry."""
        ...

    @property
    def kept(self) -> bool:
        """Whether its entries are worth a place in the directory."""
        ...

    def read(self, name: str) -> bytes | None:
        """An entry as bytes, not believed yet; None where there is none. Raises Refused and OSError."""
        ...


@dataclass(slots=True)
class Folder:
    """Entries in a directory."""

    root: Path | None
    """None: nothing is kept, and only the layers are read."""
    keys: TrustedKeys
    limit: int
    layers: tuple[EntryLayer, ...] = ()
    """Where entries are looked for that the directory has not."""
    shared: SharedStore | None = None
    """The layer that gets what the directory gets."""
    counts: Counter[str] = field(default_factory=Counter[str])
    told: deque[str] = field(default_factory=lambda: deque[str](maxlen=MAX_REASONS))
    """Why entries were refused, not found or not written, the newest last."""
    trouble: str = ""
    """Why nothing is written at present; empty while it is."""
    _resumes: float = 0.0
    """When it is tried again."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _written: Iterator[int] = field(default_factory=itertools.count)
    _foreign: set[str] = field(default_factory=set[str])
    """Entries that others signed: they stay, or users who share a folder would replace each other's for ever."""

    # --- reading ---------------------------------------------------------------------------------

    def get(self, address: Address) -> Message | None:
        """An entry; None where there is none that holds, and why is told."""
        found = self._read(address.name)
        self._note("hits" if found is not None else "misses")
        if found is None:
            self._note(f"misses: {self._because(address)}")
        return found

    def peek(self, address: Address) -> Message | None:
        """Like `get`, for an entry that need not exist: its absence does not count as a miss."""
        found = self._read(address.name)
        self._note("hits", found is not None)
        return found

    def again(self, address: Address) -> Message | None:
        """Like `get`, after a miss that was already counted."""
        there = self.root is not None and any(os.path.exists(p) for p in self._paths(address.name))
        found = self._read(address.name) if there else None
        self._note("made_by_others", found is not None)
        return found

    def latest(self, address: Address) -> tuple[Message, str, Address] | None:
        """An entry about the subject that serves, though it was made for calls of other sizes or threads, or for a machine that
        executes less; with the words for that, and where it is."""
        for basis in self._near(address):
            other = Address(address.kind, address.subject, basis)
            if basis == address.basis or not address.serves(basis, usable_features()):
                continue
            if (found := self._read(other.name)) is not None:
                return found, address.differs(basis), other
        return None

    def _near(self, address: Address) -> Iterator[Mapping[str, str]]:
        """What entries about the subject may rest on, the nearest first."""
        others = {b.machine for b in self.layers} - {"", address.basis.get("machine")}
        yield from ({**address.basis, "machine": m} for m in sorted(others))
        yield from (found for head in self._heads(address) if (found := _basis(head)))

    def _heads(self, address: Address) -> Iterator[Message]:
        """The notes about a subject: in the directory, then in each layer."""
        for read in (self._local, *(functools.partial(self._layered, b) for b in self.layers)):
            if (head := read(address.head)) is not None:
                yield head

    def _because(self, address: Address) -> str:
        head = next(self._heads(address), None)
        if head is None:
            return "nothing like it was kept"
        why = address.differs(_basis(head))
        self.tell(f"{address.kind}: {why}")
        return why

    def _read(self, name: str) -> Message | None:
        if (found := self._local(name)) is not None:
            return found
        return next((f for b in self.layers if (f := self._layered(b, name)) is not None), None)

    def _layered(self, layer: EntryLayer, name: str) -> Message | None:
        """An entry of a layer."""
        try:
            data = layer.read(name)
            if data is None:
                return None
            found = unpack(data, name, self.keys, usable_features())
        except Refused as e:
            self.refuse(layer.about, e.why)
            return None
        except OSError as e:
            self._note("unreadable")
            self.tell(f"{layer.about} cannot be read: {e.strerror}")
            return None
        self._note(layer.counted)
        self._note("bytes_read", len(data))
        if layer.kept:
            self._write(name, data)
        return found

    def refuse(self, what: str, why: EntryRefusal) -> None:
        """Count and tell that something was not believed."""
        self._note("refused")
        self._note(f"refused: {why.value}")
        self.tell(f"{what} was refused: {why.value}")

    def _local(self, name: str) -> Message | None:
        """An entry of the directory: the user's own before the one that anybody may have made."""
        for path in () if self.root is None else self._paths(name):
            if (found := self._at(path, name)) is not None:
                return found
        return None

    def _at(self, path: Path, name: str) -> Message | None:
        try:
            data, changed = _read_file(path)
        except OSError as e:
            if e.errno not in (errno.ENOENT, errno.ENOTDIR):
                self._note("unreadable")
                self.tell(f"an entry cannot be read: {e.strerror}")
            return None
        try:
            found = unpack(data, name, self.keys, usable_features())
        except Refused as e:
            self.refuse("an entry", e.why)
            if e.why is EntryRefusal.FOREIGN:
                self._foreign.add(name)
            elif e.why is not EntryRefusal.FEATURES:  # which may be of use on another machine
                with contextlib.suppress(OSError):
                    path.unlink()
            return None
        self._note("bytes_read", len(data))
        if not is_recent(changed, RENEW_S):
            with contextlib.suppress(OSError):
                os.utime(path)
        return found

    # --- writing ---------------------------------------------------------------------------------

    def put(
        self, address: Address, body: dict[str, Any], blobs: Sequence[bytes] = (), features: Sequence[str] = ()
    ) -> bool:
        """Keep an entry; False where it cannot be, and why is told."""
        head = {"basis": dict(address.basis), "at": int(time.time())}
        made = {address.name: pack(address.name, body, blobs, self.keys, features),
                address.head: pack(address.head, head, (), self.keys)}  # fmt: skip
        kept = all(self._write(name, data) for name, data in made.items())
        if self.shared is not None:
            for name, data in made.items():
                self.shared.write(name, data)
        if kept and next(self._written) % CHECK_EVERY == 0:
            self.collect()
        return kept

    def _write(self, name: str, data: bytes) -> bool:
        if self.root is None or self._rests() or len(data) > min(MAX_ENTRY, self.limit):
            self._note("not_written")
            return False
        own, anybodys = self._paths(name)
        paths = (own,) if name in self._foreign or os.path.exists(own) else (anybodys, own)
        try:
            try:
                self._placed(paths, data)
            except OSError as e:
                if e.errno not in (errno.ENOSPC, errno.EDQUOT) or not self._make_room(len(data)):
                    raise
                self._placed(paths, data)
        except OSError as e:
            self.trouble, self._resumes = f"entries cannot be written: {e.strerror}", time.monotonic() + RETRY_S
            self._note("not_written")
            self.tell(self.trouble)
            return False
        self.trouble = ""
        self._foreign.discard(name)  # from here on the file is there
        self._note("written")
        self._note("bytes_written", len(data))
        return True

    def _placed(self, paths: Sequence[Path], data: bytes) -> None:
        """Write a file under the first of some names that may be had: one that another user made may not be replaced."""
        assert self.root is not None
        new = self.root / f".new-{os.getpid()}-{threading.get_ident()}-{next(self._written)}"
        mode = 0o600 | self._open_to(paths[0].parent) << 1  # who may write the folder may read its entries
        try:
            with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
                file.write(data)
            if mode != 0o600:
                new.chmod(mode)
            try:
                new.replace(paths[0])
            except PermissionError:
                if len(paths) == 1:
                    raise
                new.replace(paths[1])
        finally:
            with contextlib.suppress(OSError):
                new.unlink(missing_ok=True)

    def _open_to(self, directory: Path) -> int:
        """Make a directory of the folder where there is none: open to those whom the folder is open to, else to its owner. Who
        they are, as the bits of a mode that let them write."""
        assert self.root is not None
        self.root.mkdir(mode=0o755, parents=True, exist_ok=True)  # whatever the umask: sharing it is decided by a person
        whole = stat.S_IMODE(self.root.stat().st_mode)
        others = whole & (stat.S_IWGRP | stat.S_IWOTH)
        directory.mkdir(mode=0o700, exist_ok=True)
        if others:
            about = directory.stat()
            if about.st_uid == os.geteuid() and stat.S_IMODE(about.st_mode) != whole:
                directory.chmod(whole)
        return others

    def _make_room(self, size: int) -> bool:
        """On a full disk, let entries leave that nobody used for long; whether there is room for so many bytes then."""
        wanted = max(ROOM, 2 * size)
        return self._evict([h for h in self.entries() if not is_recent(h.used, UNUSED_S)], lambda _, gone: gone >= wanted) > size

    def _rests(self) -> bool:
        """Whether nothing is written so shortly behind a write that failed."""
        return bool(self.trouble) and time.monotonic() < self._resumes

    @contextlib.contextmanager
    def making(self, address: Address, patience_s: float, stop: Callable[[], bool] = lambda: False) -> Generator[bool]:
        """While it is open, no other process makes this entry; False where that cannot be had."""
        if self.root is None or self._rests():
            yield False
            return
        begin, lock, others = time.monotonic(), self.root / LOCKS / address.name, 0
        with contextlib.suppress(OSError):  # then nobody can be kept from making it, either
            others = self._open_to(lock.parent)
        with flight(lock, patience_s, stop, 0o600 | others | others << 1) as alone:
            if time.monotonic() - begin > 0.1:
                self._note("waited")
            yield alone

    # --- keeping it small ------------------------------------------------------------------------

    def entries(self) -> list[CachedFile]:
        """All of them, the longest unused first."""
        found: list[CachedFile] = []
        for path in () if self.root is None else self.root.glob(f"??/*{SUFFIX}"):
            with contextlib.suppress(OSError):
                about = path.stat()
                file = path.name.removesuffix(SUFFIX)
                found.append(CachedFile(file.partition(".")[0], about.st_size, about.st_mtime, file))
        return sorted(found, key=lambda h: h.used)

    def collect(self, limit: int | None = None) -> int:
        """Let the longest unused leave until the rest is well within the limit, and tidy up; the bytes that left."""
        limit = self.limit if limit is None else limit
        if self.root is None:
            return 0
        for path in (*self.root.glob(".new-*"), *self.root.glob(f"{LOCKS}/*")):
            with contextlib.suppress(OSError):
                if not is_recent(path.stat().st_mtime, STALE_S):
                    path.unlink()
        held = self.entries()
        total = sum(h.bytes for h in held)
        return 0 if total <= limit else self._evict(held, lambda kept, gone: total - kept - gone <= limit * LOW)

    def _evict(self, held: Sequence[CachedFile], enough: Callable[[int, int], bool]) -> int:
        """Let entries leave in turn until it is `enough`, told the bytes of those that others keep and of those that left."""
        gone = kept = 0
        for h in held:
            if enough(kept, gone):
                break
            try:
                self._path(h.file).unlink()
            except OSError:  # another user's: what they keep is bounded by what they do
                kept += h.bytes
                continue
            gone += h.bytes
            self._note("evicted")
        self._note("bytes_evicted", gone)
        return gone

    def raw(self, held: CachedFile) -> bytes | None:
        """An entry as it lies there, for a bundle; None where it would not be believed."""
        return None if self.verify(held) else _read_file(self._path(held.file))[0]

    def verify(self, held: CachedFile) -> str:
        """Why an entry would be refused; empty if it holds. Nothing is counted, nothing deleted."""
        try:
            unpack(_read_file(self._path(held.file))[0], held.name, self.keys, usable_features())
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

    def _paths(self, name: str) -> tuple[Path, Path]:
        """Where an entry may be: the user's own file, and the one that anybody may have made."""
        return self._path(f"{name}.{self.keys.own.name}"), self._path(name)

    def _path(self, file: str) -> Path:
        assert self.root is not None
        return self.root / file[:2] / f"{file}{SUFFIX}"

    def _note(self, what: str, by: int = 1) -> None:
        with self._lock:
            self.counts[what] += by

    def tell(self, what: str) -> None:
        """A reason for readers."""
        if what not in self.told:
            self.told.append(what)


def _read_file(path: Path) -> tuple[bytes, float]:
    """What a file holds, and when it was changed. Nothing is waited for: others may write to the folder."""
    with open(path, "rb", opener=unblocked) as file:
        return file.read(MAX_ENTRY + 1), os.fstat(file.fileno()).st_mtime


def _basis(head: Message) -> dict[str, str]:
    """What a note says that an entry rests on."""
    found = head[0].get("basis")
    return {str(k): str(v) for k, v in found.items()} if isinstance(found, dict) else {}
