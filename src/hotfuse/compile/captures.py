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
from hotfuse.frontends.captured import CallSpec, Captured, TensorSpec

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


def recalled(at: Known, structure: str, call: CallSpec) -> Captured | None:
    """The graph that is kept for calls like these; None where there is none."""
    message = at.folder.get(at.capture(structure, _widest(at, structure, call)))
    return None if message is None else wire.answer_from_message(message)


def _widest(at: Known, structure: str, call: CallSpec) -> CallSpec:
    """Of the kinds of calls that there are captures for, the one that takes this call and most others."""
    return max((c for s, c in at.remembered() if s == structure and _takes(c, call)), key=_width, default=call)


def _width(call: CallSpec) -> int:
    return sum(len(t.dynamic) for t in call.inputs)


def _takes(wide: CallSpec, call: CallSpec) -> bool:
    """Whether a capture for one call is one for another: it differs in no more than dims that vary."""
    return (
        wide.grad_mode == call.grad_mode
        and len(wide.inputs) == len(call.inputs)
        and all(_takes_tensor(w, t) for w, t in zip(wide.inputs, call.inputs, strict=True))
    )


def _takes_tensor(wide: TensorSpec, t: TensorSpec) -> bool:
    if (wide.dtype, wide.device, len(wide.shape)) != (t.dtype, t.device, len(t.shape)) or not wide.dynamic >= t.dynamic:
        return False
    if wide.shape == t.shape:
        return wide.stride == t.stride
    # sizes of 0 and 1 mean something else to tracing than others do
    same = all(a == b or (i in wide.dynamic and min(a, b) > 1) for i, (a, b) in enumerate(zip(wide.shape, t.shape, strict=True)))
    return same and _dense(wide) and _dense(t)


def _dense(t: TensorSpec) -> bool:
    step, found = 1, True
    for size, stride in zip(reversed(t.shape), reversed(t.stride), strict=True):
        found = found and (size == 1 or stride == step)
        step *= size
    return found


def _call_text(structure: str, call: CallSpec) -> str:
    data: dict[str, Any] = wire.call_to_json(call)
    return digest(structure, json.dumps(data))
