"""The performance model of a device, in workers: what kernels took there is kept in the profile store, models are made of it, and
say which tilings of a group are worth compiling.

    device times   rows into the store; a model where there are enough more (`hpm.device.kernel_model`)
    likeliest      tilings of a group by what the model says of their lowered kernels, which takes a millisecond each

A worker has no device: the serving process measures (`compile.device.trial`, `compile.device.calibration`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from hotfuse.base.errors import HotfuseError
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.compile.answer_bodies import Answered, DeviceTimesAnswer
from hotfuse.compile.learn.learned import FRESH_S, notes
from hotfuse.compile.request_bodies import DeviceTimesRequest
from hotfuse.hpm.device import kernel_model
from hotfuse.hpm.device.features import shape_from
from hotfuse.hpm.device.kernel_model import DeviceKernelModel, TimedWork, device_fingerprint
from hotfuse.hpm.device.work import ProgramShape, work_of
from hotfuse.ir.graph import Graph
from hotfuse.lower.gpu import GpuTiling, lower_gpu
from hotfuse.profile.store import Store

COMPILED_TILINGS = 4
"""Tilings of a group that are compiled where a model chooses."""
MAX_DEVICES = 8
"""Whose models a worker keeps at hand."""


@dataclass(slots=True)
class _Read:
    """A model as it was read from a store."""

    model: DeviceKernelModel | None
    at: float


_read: dict[tuple[str, str], _Read] = {}


def handle(request: DeviceTimesRequest) -> Answered:
    """Keep and learn; answers how many rows there are, and what a new model is worth."""
    kept = notes()
    if kept is None or not kept.place.record:
        return DeviceTimesAnswer(0, "there is no store to write to"), []
    shape = shape_from(request.shape)
    machine = kept.store.machine(device_fingerprint(request.device, request.arch), shape.to_dict())
    rows = [TimedWork(t.problem, t.work, t.seconds) for t in request.times]
    kernel_model.record(kept.store, machine, rows, "calibrate" if request.calibrated else "race")
    known = kernel_model.recorded(kept.store, machine)
    answer = DeviceTimesAnswer(len(known))
    if (request.train and len(known) >= kernel_model.MIN_ROWS) or kernel_model.due(kept.store, machine, len(known)):
        made = kernel_model.fit(known, shape)
        version = kernel_model.save(kept.store, made, machine)
        answer = replace(answer, model=version, held_out=made.facts["held_out"], chooses=made.chooses)
        _read.clear()
    return answer, []


def likeliest(
    graph: Graph, tilings: Sequence[GpuTiling], strides: Mapping[str, tuple[int, ...]], device: str
) -> list[GpuTiling] | None:
    """The few tilings that are predicted to be the fastest on a device; None where no model can tell."""
    found = device_model(device)
    if found is None or not found.chooses:
        return None
    lowered: list[tuple[GpuTiling, dict[str, float]]] = []
    for tiling in tilings:
        try:
            kernel = lower_gpu(graph, tiling, strides).kernel
            lowered.append((tiling, work_of(kernel, program_shape(tiling))))
        except (HotfuseError, KeyError):  # sizes that only a call tells, or loops that this tiling does not fit
            continue
    if not lowered:
        return None
    seconds = found.seconds([work for _, work in lowered])
    ranked = sorted(zip(seconds, lowered, strict=True), key=lambda each: float(each[0]))
    return [tiling for _, (tiling, _) in ranked[:COMPILED_TILINGS]]


def program_shape(tiling: GpuTiling) -> ProgramShape:
    """How programs of a tiling run, as the model reads it."""
    return ProgramShape(tiling.warps, tiling.stages, tiling.bulk, tiling.split, tiling.programs)


def device_model(device: str) -> DeviceKernelModel | None:
    """The newest model of a device in the store of the request in hand; looked for again after a while."""
    kept = notes()
    if kept is None or not device:
        return None
    key, now = (kept.place.path, device), time.monotonic()
    known = _read.get(key)
    if known is None or now - known.at > FRESH_S:
        if len(_read) >= MAX_DEVICES:
            _read.clear()
        known = _read[key] = _Read(_newest(kept.store, device), now)
    return known.model


def _newest(store: Store, device: str) -> DeviceKernelModel | None:
    machine = next((m.id for m in store.machines() if m.identity.get("device") == device), None)
    return None if machine is None else kernel_model.load(store, machine)
