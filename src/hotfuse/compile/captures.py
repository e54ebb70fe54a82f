"""Captured graphs that outlive the process: found by the model's name and the call, so that a known model needs no capture.

Which dims calls showed to vary is remembered with them: a call that a wider capture takes gets that one, as the process that
made it had seen more calls. Sizes that each process has only one of vary, too: the second process that has another size captures
with it open, and those behind it need no capture (decision 146).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from hotfuse.analysis.call_facts import takes_sizes
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.base.settings import Settings
from hotfuse.cache.address import Address, digest, versions
from hotfuse.cache.folder import Folder
from hotfuse.cache.place import folder_of
from hotfuse.compile.answer_bodies import CaptureAnswer, received
from hotfuse.compile.captured_answers import captured_from
from hotfuse.compile.kept import answered
from hotfuse.compile.workers import wire
from hotfuse.frontends.captured import CallSpec, Captured

MAX_CALLS = 16
"""Kinds of calls remembered per model."""
_disbelieved: set[str] = set()
"""Models whose kept graphs gave other answers than their own code here: theirs are captured anew, and replace those."""


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
        return self._read()[0]

    def remember(self, structure: str, call: CallSpec) -> None:
        """A capture for such calls is kept."""
        new, (calls, fixed) = (structure, call), self._read()
        self._write([new, *(c for c in calls if c != new)], fixed)

    def other_sizes(self, structure: str, call: CallSpec) -> list[CallSpec]:
        """Calls of earlier processes that differ from this one in nothing but sizes; none where those could not be left open."""
        calls, fixed = self._read()
        if structure in fixed:
            return []
        return [c for s, c in calls if s == structure and (dims := call.opened_with(c)) is not None and any(dims)]

    def fix_sizes(self, structure: str) -> None:
        """Sizes that differ from process to process cannot be left open: such captures go, and are not tried again."""
        calls, fixed = self._read()
        kept = [(s, c) for s, c in calls if s != structure or not c.across]
        self._write(kept, [structure, *(s for s in fixed if s != structure)])

    def disbelieve(self) -> None:
        """A kept graph gave another answer than the model's own code: this process captures the model anew."""
        _disbelieved.add(self.model)

    def _read(self) -> tuple[list[tuple[str, CallSpec]], list[str]]:
        """Kinds of calls, and structures whose sizes stay numbers."""
        found = self.folder.get(self.calls)
        if found is None:
            return [], []
        calls = [(str(c["structure"]), wire.call_from_json(c["call"])) for c in found[0]["calls"]]
        return calls, [str(s) for s in found[0].get("fixed", ())]

    def _write(self, calls: Sequence[tuple[str, CallSpec]], fixed: Sequence[str]) -> None:
        kept = [{"structure": s, "call": wire.call_to_json(c)} for s, c in calls[:MAX_CALLS]]
        self.folder.put(self.calls, {"calls": kept, "fixed": [*fixed[:MAX_CALLS]]})


def believe_again() -> None:
    """Forget whose kept graphs gave other answers."""
    _disbelieved.clear()


def known(front: str, name: Callable[[], str], settings: Settings) -> Known | None:
    """A model's place in the cache; None where nothing is kept. `name` is asked only where it is."""
    folder = folder_of(settings)
    return None if folder is None else Known(folder, digest(front, name()), front)


def captured(
    at: Known | None, structure: str, call: CallSpec, ask: Callable[[CallSpec], wire.Message], patience_s: float
) -> Captured:
    """A graph for calls like these: the one that is kept, or one that is asked for now; raises CaptureError."""
    if at is None:
        return captured_from(ask(call))
    if (known := recalled(at, structure, call)) is not None:
        return known[0]
    if at.model in _disbelieved:
        message, found = _fitting(ask(call)), False
        at.folder.put(at.capture(structure, call), *message)
    else:
        message, found = answered(at.folder, at.capture(structure, call), lambda: _fitting(ask(call)), patience_s)
    if not found:
        at.remember(structure, call)
    return captured_from(message)


def _fitting(message: wire.Message) -> wire.Message:
    """A message that is a captured graph: nothing else is kept."""
    received(message, CaptureAnswer)
    return message


def recalled(at: Known, structure: str, call: CallSpec) -> tuple[Captured, CallSpec] | None:
    """The graph that is kept for calls like these, and the calls that it is for; None where there is none that is believed."""
    if at.model in _disbelieved:
        return None
    for kept in _widest_first(at, structure, call):
        message = at.folder.get(at.capture(structure, kept))
        if message is None:
            continue
        found = captured_from(message)
        if kept.shapes == call.shapes or takes_sizes(found.graph, call.shapes):  # what was traced may rest on more than open dims
            return found, kept
    return None


def _widest_first(at: Known, structure: str, call: CallSpec) -> list[CallSpec]:
    """The kinds of calls with captures that take this one, and most others first, by sizes and by paths through code that reads
    data; last what was opened for other processes: a process that has these very sizes, as one before it had, is better off with
    them.
    """
    taking = [c for s, c in at.remembered() if s == structure and c.takes(call)]
    return sorted(taking or [call], key=lambda c: (c.across, -c.open_dims, -len(c.paths or ())))


def _call_text(structure: str, call: CallSpec) -> str:
    data: dict[str, Any] = wire.call_to_json(call)
    del data["across"]  # why dims are open makes no other graph
    return digest(structure, json.dumps(data))
