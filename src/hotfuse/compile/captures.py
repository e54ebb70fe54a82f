"""Captured graphs that outlive the process: found by the model's name and the call, so that a known model needs no capture.

Which dims calls showed to vary is remembered with them: a call that a wider capture takes gets that one, as the process that
made it had seen more calls.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.base.settings import Settings
from hotfuse.cache.address import Address, digest, versions
from hotfuse.cache.folder import Folder
from hotfuse.cache.place import folder_of
from hotfuse.compile.kept import answered
from hotfuse.compile.workers import wire
from hotfuse.frontends.captured import CallSpec, Captured

MAX_CALLS = 16
"""Kinds of calls remembered per model."""


@dataclass(frozen=True, slots=True)
class Known:
    """A model by its name, and the kinds of calls that captures of it are kept for."""

    folder: Folder
    model: str
    front: str

    def capture(self, structure: str, call: CallSpec) -> Address:
        """Where the graph of a call is; `structure` is how its tensors are nested."""
        return Address("capture", self.model, {**versions(), "call": _call_text(structure, call)})

    @property
    def calls(self) -> Address:
        """Where the kinds of calls are."""
        return Address("calls", self.model, dict(versions()))

    def remembered(self) -> list[tuple[str, CallSpec]]:
        """Kinds of calls that there are captures for, with their structure."""
        found = self.folder.get(self.calls)
        return [] if found is None else [(str(c["structure"]), wire.call_from_json(c["call"])) for c in found[0]["calls"]]

    def remember(self, structure: str, call: CallSpec) -> None:
        """A capture for such calls is kept."""
        new = (structure, call)
        calls = [new, *(c for c in self.remembered() if c != new)][:MAX_CALLS]
        self.folder.put(self.calls, {"calls": [{"structure": s, "call": wire.call_to_json(c)} for s, c in calls]})


def known(front: str, name: Callable[[], str], settings: Settings) -> Known | None:
    """A model's place in the cache; None where nothing is kept. `name` is asked only where it is."""
    folder = folder_of(settings)
    return None if folder is None else Known(folder, digest(front, name()), front)


def captured(
    at: Known | None, structure: str, call: CallSpec, ask: Callable[[CallSpec], wire.Message], patience_s: float
) -> Captured:
    """A graph for calls like these: the one that is kept, or one that is asked for now; raises CaptureError."""
    if at is None:
        return wire.answer_from_message(ask(call))
    best = _widest(at, structure, call)
    message, found = answered(at.folder, at.capture(structure, best), lambda: wire.checked(ask(best)), patience_s)
    if not found:
        at.remember(structure, best)
    return wire.answer_from_message(message)


def recalled(at: Known, structure: str, call: CallSpec) -> tuple[Captured, CallSpec] | None:
    """The graph that is kept for calls like these, and the calls that it is for; None where there is none."""
    best = _widest(at, structure, call)
    message = at.folder.get(at.capture(structure, best))
    return None if message is None else (wire.answer_from_message(message), best)


def _widest(at: Known, structure: str, call: CallSpec) -> CallSpec:
    """Of the kinds of calls that there are captures for, the one that takes this call and most others."""
    return max((c for s, c in at.remembered() if s == structure and c.takes(call)), key=lambda c: c.open_dims, default=call)


def _call_text(structure: str, call: CallSpec) -> str:
    data: dict[str, Any] = wire.call_to_json(call)
    return digest(structure, json.dumps(data))
