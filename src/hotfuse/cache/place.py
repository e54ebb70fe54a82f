"""Which folder a process keeps entries in: one for each place that settings name, shared by all models that name it."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

from hotfuse.base.errors import InputError
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.base.settings import Settings
from hotfuse.cache.address import note_sources_in
from hotfuse.cache.bundle import Bundle, open_bundle
from hotfuse.cache.entry import Refused
from hotfuse.cache.folder import Folder
from hotfuse.cache.keys import keys_for
from hotfuse.cache.notes import StartNotes
from hotfuse.cache.shared import SharedStore
from hotfuse.machine.probe import remember_with

OFF = "off"
SWITCHED_OFF = "switched off by the settings"
"""The state of a place that the settings name none for."""
NAME = "code"
IN_MEMORY = ":memory:"


@dataclass(frozen=True, slots=True)
class CachePlace:
    """Everything that makes a folder, as settings say it; also for requests, which other processes answer."""

    root: str | None
    home: str
    """Where the user's key is."""
    key: str | None = None
    limit: int = 1 << 30
    trusted: str | None = None
    artifacts: str | None = None
    shared: str | None = None

    def to_json(self) -> list[str | int | None]:
        """For a request."""
        return list(astuple(self))

    @classmethod
    def from_json(cls, data: Sequence[Any]) -> CachePlace:
        """The reverse."""
        return cls(*data)


_folders: dict[CachePlace, Folder | str] = {}
_lock = threading.Lock()


def root_of(settings: Settings) -> Path | None:
    """The directory that the settings name; None where nothing is kept."""
    if settings.cache == OFF or (settings.cache is None and settings.profiles == IN_MEMORY):
        return None
    return Path(settings.cache).expanduser() if settings.cache else settings.folder / NAME


def where(settings: Settings) -> CachePlace | None:
    """The folder of these settings; None where nothing is kept and nothing was made ahead. Tools and tests that do everything in
    the call have none: what they ask for they want done."""
    root = root_of(settings)
    if settings.capture != "background" or (root is None and settings.artifacts is None and settings.cache_shared is None):
        return None
    return _place(root, settings)


def _place(root: Path | None, settings: Settings) -> CachePlace:
    return CachePlace(
        None if root is None else str(root), str(settings.folder), settings.cache_key, settings.cache_bytes,
        settings.trusted_keys, settings.artifacts, settings.cache_shared,
    )  # fmt: skip


def folder_of(settings: Settings) -> Folder | None:
    """The folder of these settings; None where nothing is kept, or no key is to be had."""
    place = where(settings)
    return None if place is None else folder_at(place)


def folder_at(place: CachePlace) -> Folder | None:
    """The folder that a request names; None where no key is to be had."""
    found = _opened(place)
    return found if isinstance(found, Folder) else None


def opened(root: Path, settings: Settings) -> Folder | str:
    """The folder at a place, or why there is none."""
    return _opened(_place(root, settings))


def _opened(place: CachePlace) -> Folder | str:
    with _lock:
        if place not in _folders:
            try:
                _folders[place] = _made(place)
            except InputError as e:
                _folders[place] = f"{e.what}: {e.because}" + (f" ({e.hint})" if e.hint else "")
            except OSError as e:
                _folders[place] = f"no key could be made: {e.strerror}"
        return _folders[place]


def _made(place: CachePlace) -> Folder:
    """A folder with its bundles; one that is not believed is counted and told, and the folder does without it."""
    keys = keys_for(Path(place.home), place.key, place.trusted)
    notes = StartNotes(Path(place.home), keys)
    note_sources_in(notes)
    remember_with(notes)
    folder = Folder(None if place.root is None else Path(place.root), keys, place.limit)
    if place.artifacts is not None:
        path = Path(place.artifacts).expanduser()
        try:
            folder.layers = (open_bundle(path, keys),)
        except Refused as e:
            folder.refuse(f"the bundle {path.name}", e.why)
        except OSError as e:
            folder.tell(f"the bundle {path.name} cannot be read: {e.strerror}")
    if place.shared is not None:
        folder.shared = SharedStore(place.shared)
        folder.layers = (*folder.layers, folder.shared)
    return folder


def cache_stats(settings: Settings) -> dict[str, Any]:
    """Counters of the place that the settings name, and why nothing is kept where that is so."""
    place = where(settings)
    if place is None:
        return {"state": SWITCHED_OFF}
    found = _opened(place)
    if isinstance(found, str):
        return {"state": found}
    bundles = [{"path": str(b.path), "entries": len(b.index), **b.made} for b in found.layers if isinstance(b, Bundle)]
    shared = None if found.shared is None else found.shared.to_dict()
    return {"state": "on", "place": str(found.root or ""), "bundles": bundles, "shared": shared, **found.stats()}


def forget() -> None:
    """Let go of every folder; what is on the disk stays."""
    with _lock:
        _folders.clear()


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()
    forget()


os.register_at_fork(after_in_child=_after_fork)
