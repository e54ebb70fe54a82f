"""Which folder a process keeps entries in: one for each place that settings name, shared by all models that name it."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

from hotfuse.base.errors import InputError
from hotfuse.base.settings import Settings
from hotfuse.cache.folder import Folder
from hotfuse.cache.keys import keys_for

OFF = "off"
NAME = "code"
IN_MEMORY = ":memory:"

_folders: dict[tuple[str, str, str | None], Folder | str] = {}
_lock = threading.Lock()


def root_of(settings: Settings) -> Path | None:
    """The directory that the settings name; None where nothing is kept."""
    if settings.cache == OFF or (settings.cache is None and settings.profiles == IN_MEMORY):
        return None
    return Path(settings.cache).expanduser() if settings.cache else settings.cache_dir.expanduser() / NAME


def folder_of(settings: Settings) -> Folder | None:
    """The folder of these settings; None where nothing is kept, or no key is to be had. Tools and tests that do everything in the
    call have none: what they ask for they want done."""
    root = root_of(settings)
    if root is None or settings.capture != "background":
        return None
    found = opened(root, settings)
    return found if isinstance(found, Folder) else None


Where = tuple[str, str, str | None, int]
"""A folder for another process: where it is, where the user's key is, the shared key, and the size."""


def where(settings: Settings) -> Where | None:
    """The folder of these settings for a request; None where nothing is kept."""
    root = root_of(settings)
    if root is None or settings.capture != "background":
        return None
    return str(root), str(settings.cache_dir.expanduser()), settings.cache_key, settings.cache_bytes


def folder_at(place: Where) -> Folder | None:
    """The folder that a request names; None where no key is to be had."""
    found = _opened(place)
    return found if isinstance(found, Folder) else None


def opened(root: Path, settings: Settings) -> Folder | str:
    """The folder at a place, or why there is none."""
    return _opened((str(root), str(settings.cache_dir.expanduser()), settings.cache_key, settings.cache_bytes))


def _opened(place: Where) -> Folder | str:
    root, home, shared, limit = place
    key = (root, home, shared)
    with _lock:
        if key not in _folders:
            try:
                _folders[key] = Folder(Path(root), keys_for(Path(home), shared), limit)
            except InputError as e:
                _folders[key] = f"{e.what}: {e.because}"
            except OSError as e:
                _folders[key] = f"no key could be made: {e.strerror}"
        return _folders[key]


def cache_stats(settings: Settings) -> dict[str, Any]:
    """Counters of the place that the settings name, and why nothing is kept where that is so."""
    root = root_of(settings)
    if root is None or settings.capture != "background":
        return {"state": "switched off by the settings"}
    found = opened(root, settings)
    return {"state": found} if isinstance(found, str) else {"state": "on", "place": str(root), **found.stats()}


def forget() -> None:
    """Let go of every folder; what is on the disk stays."""
    with _lock:
        _folders.clear()


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()
    forget()


os.register_at_fork(after_in_child=_after_fork)
