"""Which profile store a request speaks of: it travels in the request's header, as workers serve models with different settings.

place ::= {"profiles": a path or URL, "record": whether what is measured may be written there, "cache": where code is kept}
    strategies ::= names of candidates that are to be tried alone, where somebody wants to know what they are worth
    focus ::= the groups that those are about, between commas; "*" for all of them
    threads ::= how many calls have: what is learned of one number of threads says nothing of another
    backend ::= which back end makes the kernels, by its name in the registry
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, fields, replace
from typing import Any, get_args

import torch

from hotfuse.backends import registry
from hotfuse.backends.protocol import KernelBackend
from hotfuse.base.errors import InternalError
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.base.settings import Objective, Precision, Settings
from hotfuse.cache.folder import Folder
from hotfuse.cache.place import CachePlace, folder_at, where
from hotfuse.profile.store_place import location

VERSION = 6
"""Of what requests say: a worker that speaks another one refuses."""
PRECISIONS, OBJECTIVES = get_args(Precision), get_args(Objective)
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


@dataclass(frozen=True, slots=True)
class RequestSettings:
    """What a request's kernels have to be: everything of the user's settings that decides about code, in one value.

    It is made in one place (`settings_of`), travels as a whole, and is read as a whole, so that no request can lose a part of it.
    """

    precision: Precision = "fp32"
    """What products may be rounded to."""
    objective: Objective = "latency"
    threads: int = 1
    """How many calls have."""
    backend: str = registry.AUTO
    """Which one makes the kernels."""
    strategies: tuple[str, ...] = ()
    """Candidates that are to be tried alone, by name; none of them where that is everything."""
    focus: str = ""
    """The groups that those are about, between commas: by what they compute (`text_id`), or by a value that their products multiply
    (`value_id`), which names them however a graph is grouped; "*" for all of them."""

    @property
    def lean(self) -> bool:
        """Whether weights must not grow."""
        return self.objective == "memory"

    def header(self) -> dict[str, Any]:
        """For a request."""
        return {"version": VERSION, **asdict(self), "strategies": list(self.strategies)}

    @classmethod
    def from_header(cls, header: Mapping[str, Any]) -> RequestSettings:
        """As a request says them; what it does not say is as in a process without settings."""
        if (version := header.get("version", VERSION)) != VERSION:
            raise InternalError(f"a request of version {version}", because=f"this worker speaks version {VERSION}")
        given: dict[str, Any] = {f.name: header[f.name] for f in fields(cls) if f.name in header}
        if given.get("precision", "fp32") not in PRECISIONS or given.get("objective", "latency") not in OBJECTIVES:
            raise InternalError("a request names an object that does not exist", because=str(given))
        found = cls(**given)
        return replace(found, threads=max(1, int(found.threads)), strategies=tuple(str(s) for s in found.strategies))


_current: ContextVar[RequestContext | None] = ContextVar("place", default=None)
_PLAIN = RequestSettings()
_asked: ContextVar[RequestSettings] = ContextVar("settings", default=_PLAIN)


def settings_of(settings: Settings, strategies: Sequence[str] = (), focus: str = "") -> RequestSettings:
    """What the user's settings ask of kernels."""
    threads = threads_for(settings)
    return RequestSettings(settings.precision, settings.objective, threads, settings.backend, tuple(strategies), focus)


def threads_for(settings: Settings) -> int:
    """The threads that calls will have."""
    return settings.threads or torch.get_num_threads()


def context_of(settings: Settings) -> RequestContext:
    """Where the settings put the store; only serving writes there."""
    return RequestContext(location(settings), settings.record and settings.capture == "background", where(settings))


def current() -> RequestContext:
    """The store of the request in hand; of the environment where there is none."""
    return _current.get() or RequestContext(location(Settings()), record=False)


@contextmanager
def used_by(header: Mapping[str, Any]) -> Generator[None]:
    """While a request is answered, its store is the current one."""
    path, cache = header.get("profiles"), header.get("cache")
    kept = None if cache is None else CachePlace.from_json(cache)
    token = _current.set(RequestContext(str(path), bool(header.get("record")), kept) if path else None)
    request_settings = _asked.set(RequestSettings.from_header(header))
    try:
        yield
    finally:
        _asked.reset(request_settings)
        _current.reset(token)


def request_settings() -> RequestSettings:
    """What the request in hand asks of kernels."""
    return _asked.get()


def threads() -> int:
    """How many threads calls have that the request in hand is for."""
    return _asked.get().threads


def backend_name() -> str:
    """Which back end makes the kernels of the request in hand."""
    return _asked.get().backend


def kernels() -> KernelBackend:
    """The back end that makes the kernels of the request in hand."""
    return registry.kernels(_asked.get().backend)


def folder() -> Folder | None:
    """Where the request in hand keeps object code; None where it does not."""
    place = _current.get()
    return None if place is None or place.cache is None else folder_at(place.cache)


def strategies() -> tuple[str, ...]:
    """What the request in hand wants tried, by name; empty where that is everything."""
    return _asked.get().strategies


def text_id(text: str) -> str:
    """A name for a group in its normal form."""
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def value_id(name: str) -> str:
    """A name for the groups whose products multiply a value of the graph."""
    return f"%{name}"


def value_of(ident: str) -> str:
    """The inverse."""
    return ident.removeprefix("%")


def wanted(text: str, values: Iterable[str] = ()) -> tuple[str, ...]:
    """What the request in hand wants tried for one group in particular, by name; `values`: what its products multiply."""
    own = _asked.get()
    names = {text_id(text), *map(value_id, values)}
    return own.strategies if own.focus == EVERY or not names.isdisjoint(own.focus.split(",")) else ()
