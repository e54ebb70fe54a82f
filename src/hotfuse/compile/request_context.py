"""Which profile store a request speaks of: it travels in the request's header, as workers serve models with different settings.

place ::= {"profiles": a path or URL, "record": whether what is measured may be written there, "cache": where code is kept}
    strategies ::= names of candidates that are to be tried alone, where somebody wants to know what they are worth
    focus ::= the groups that those are about, between commas; "*" for all of them
    threads ::= how many calls have: what is learned of one number of threads says nothing of another
    backend ::= which back end makes the kernels, by its name in the registry
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from hotfuse.backends import registry
from hotfuse.backends.protocol import KernelBackend
from hotfuse.base.settings import Settings, from_env
from hotfuse.cache.folder import Folder
from hotfuse.cache.place import CachePlace, folder_at, where
from hotfuse.profile.place import location

EVERY = "*"
ARMS, STRATEGIES, SPECIALIZATIONS = "fusion arms", "strategies", "specializations"
"""Names of what is remembered of promises: by kind of candidate, and by bottleneck and strategy."""


@dataclass(frozen=True, slots=True)
class RequestContext:
    """A profile store, and whether it is written."""

    path: str
    record: bool = True
    cache: CachePlace | None = None
    """Where object code and verdicts are kept, if they are."""

    def header(self) -> dict[str, Any]:
        """For a request."""
        return {"profiles": self.path, "record": self.record, "cache": self.cache and self.cache.to_json()}


_current: ContextVar[RequestContext | None] = ContextVar("place", default=None)
_threads: ContextVar[int] = ContextVar("threads", default=1)
_only: ContextVar[tuple[str, ...]] = ContextVar("strategies", default=())
_focus: ContextVar[str] = ContextVar("focus", default="")
_backend: ContextVar[str] = ContextVar("backend", default=registry.AUTO)


def context_of(settings: Settings) -> RequestContext:
    """Where the settings put the store; only serving writes there."""
    return RequestContext(location(settings), settings.record and settings.capture == "background", where(settings))


def current() -> RequestContext:
    """The store of the request in hand; of the environment where there is none."""
    return _current.get() or RequestContext(location(from_env()), record=False)


@contextmanager
def used_by(header: Mapping[str, Any]) -> Generator[None]:
    """While a request is answered, its store is the current one."""
    path, cache = header.get("profiles"), header.get("cache")
    kept = None if cache is None else CachePlace.from_json(cache)
    token = _current.set(RequestContext(str(path), bool(header.get("record")), kept) if path else None)
    asked = _only.set(tuple(str(s) for s in header.get("strategies", ())))
    about = _focus.set(str(header.get("focus", "")))
    served = _threads.set(max(1, int(header.get("threads", 1))))
    made_by = _backend.set(str(header.get("backend", registry.AUTO)))
    try:
        yield
    finally:
        _backend.reset(made_by)
        _threads.reset(served)
        _focus.reset(about)
        _only.reset(asked)
        _current.reset(token)


def threads() -> int:
    """How many threads calls have that the request in hand is for."""
    return _threads.get()


def backend_name() -> str:
    """Which back end makes the kernels of the request in hand."""
    return _backend.get()


def kernels() -> KernelBackend:
    """The back end that makes the kernels of the request in hand."""
    return registry.kernels(_backend.get())


def folder() -> Folder | None:
    """Where the request in hand keeps object code; None where it does not."""
    place = _current.get()
    return None if place is None or place.cache is None else folder_at(place.cache)


def strategies() -> tuple[str, ...]:
    """What the request in hand wants tried, by name; empty where that is everything."""
    return _only.get()


def text_id(text: str) -> str:
    """A name for a group in its normal form."""
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def wanted(text: str) -> tuple[str, ...]:
    """What the request in hand wants tried for one group in particular, by name."""
    return _only.get() if text_id(text) in _focus.get().split(",") or _focus.get() == EVERY else ()
