"""What generated kernels take on a device, for its performance model: problems are drawn, workers compile some tilings of each,
and the device times them in turns with the weights of several places, as trials do.

For `hotfuse calibrate --device`, never beside calls: the device does nothing else meanwhile, and workers may take the whole host.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import field

import torch

from hotfuse.backends import registry
from hotfuse.backends.device_code import device_kernel
from hotfuse.base.errors import HotfuseError
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.base.settings import Settings
from hotfuse.cache.address import digest
from hotfuse.compile.answer_bodies import DeviceTimesAnswer, DeviceUnitAnswer, MadeDeviceKernel, received
from hotfuse.compile.compilation import Executor
from hotfuse.compile.device.described import described
from hotfuse.compile.device.launch import generated
from hotfuse.compile.device.trial import AHEAD_S, TIMES
from hotfuse.compile.request_bodies import DeviceKernelTime, DeviceTimesRequest, DeviceUnitRequest, request_of
from hotfuse.compile.workers import wire
from hotfuse.compile.workers.task import Task
from hotfuse.hpm.device.problems import device_problems
from hotfuse.ir.dims import evaluate
from hotfuse.ir.graph import Graph, Value, sources
from hotfuse.ir.normal import normalized
from hotfuse.ir.text import show
from hotfuse.ir.types import TensorType
from hotfuse.lower.common.codec import from_json
from hotfuse.machine.device_clock import DeviceTimer
from hotfuse.ops.torch_dtypes import torch_dtype

ROUNDS = 5
"""Of each kernel; the least counts."""
STEP = 4
"""Of a problem's tilings every fourth is measured: other problems show the others."""
COMPILED_PER_WORKER = 3
"""Problems for each worker that are compiled before they are measured."""
COMPILE_TIMEOUT_S, LEARNING_TIMEOUT_S = 60.0, 300.0
NOISY = 0.2
"""Kernels whose rounds lie further apart are not learned from."""
MAX_PLACES = 12
MAX_BYTES = 256 << 20
"""Of weights, so that they come from memory and not from a cache, as in a model."""


@dataclass(frozen=True, slots=True)
class TimedKernel:
    """One kernel of one problem on the device."""

    problem: str
    tiling: str
    work: Mapping[str, float]
    """`hpm.device.work`"""
    seconds: float
    noise: float


@dataclass(slots=True)
class CalibrationReport:
    """What was measured, and what could not be."""

    kernels: list[TimedKernel] = field(default_factory=list[TimedKernel])
    problems: int = 0
    refused: Counter[str] = field(default_factory=Counter[str])
    interrupted: bool = False


def timed_kernels(
    executor: Executor, device: torch.device, settings: Settings, seconds: float, seed: int = 0,
    told: Callable[[float, CalibrationReport], None] = lambda _part, _report: None,
) -> CalibrationReport:  # fmt: skip
    """Measure for so long, or until somebody interrupts it."""
    report, begin = CalibrationReport(), time.monotonic()
    waiting: list[tuple[Graph, Future[wire.Message]]] = []
    drawn = _asked(executor, device, settings, seed)
    most = COMPILED_PER_WORKER * max(1, executor.size)
    try:
        while (at := time.monotonic() - begin) < seconds:
            told(at / seconds, report)
            waiting += itertools.islice(drawn, most - len(waiting))
            ready = next((i for i, (_, f) in enumerate(waiting) if f.done()), None)
            if ready is None:
                time.sleep(0.002)
                continue
            graph, future = waiting.pop(ready)
            try:
                report.kernels += _measured(graph, *received(future.result(), DeviceUnitAnswer), device)
                report.problems += 1
            except (HotfuseError, RuntimeError) as e:
                report.refused[str(e).splitlines()[0][:120]] += 1
    except KeyboardInterrupt:
        report.interrupted = True
    for _, future in waiting:
        future.cancel()
    return report


def _asked(executor: Executor, device: torch.device, settings: Settings, seed: int) -> Iterator[tuple[Graph, Future[wire.Message]]]:
    target = registry.device_kernels().target(device)
    for number, problem in enumerate(device_problems(seed)):
        graph = normalized(problem)
        kind = (target.backend, target.arch, target.warp)
        body = DeviceUnitRequest(show(graph), {}, kind, tf32=False, share=(number % STEP, STEP), every=True)
        task = Task(body.kind, request_of(body, settings).header(), timeout=COMPILE_TIMEOUT_S, threads=1)
        yield graph, executor.submit(task)


def _measured(graph: Graph, answer: DeviceUnitAnswer, codes: Sequence[bytes], device: torch.device) -> list[TimedKernel]:
    """All kernels of a problem, in turns."""
    names = {p.value.name for p in graph.params}
    given = sources(graph)
    weights = sum(_size(v) for v in given if v.name in names)
    places = max(1, min(MAX_PLACES, MAX_BYTES // max(weights, 1)))
    inputs = {v.name: _random(v, device) for v in given if v.name not in names}
    sets = [[inputs[v.name] if v.name in inputs else _random(v, device) for v in given] for _ in range(places if names else 1)]
    timers: list[tuple[MadeDeviceKernel, DeviceTimer]] = []
    with torch.no_grad():
        for data, code in zip(answer.kernels, codes, strict=True):
            function = registry.device_kernels().load(device_kernel(code, data.built), device)
            kernel = generated(graph, from_json(dict(data.lowered)), {}, function, device)
            turns = itertools.cycle(sets)
            timers.append((data, DeviceTimer(lambda k=kernel, t=turns: k(*next(t)), device, TIMES, AHEAD_S)))
        took = [[timer.seconds() for _, timer in timers] for _ in range(ROUNDS)]
    problem, found = digest(show(graph))[:16], list[TimedKernel]()
    for i, (data, _) in enumerate(timers):
        rounds = sorted(r[i] for r in took)
        noise = rounds[len(rounds) // 2] / rounds[0] - 1
        found.append(TimedKernel(problem, data.tiling, data.work, rounds[0], noise))
    return found


def _size(v: Value) -> int:
    assert isinstance(v.type, TensorType)
    return math.prod(evaluate(d, {}) for d in v.type.shape) * torch_dtype(v.type.dtype).itemsize


def _random(v: Value, device: torch.device) -> torch.Tensor:
    assert isinstance(v.type, TensorType)
    shape = [evaluate(d, {}) for d in v.type.shape]
    return torch.randn(shape, dtype=torch_dtype(v.type.dtype), device=device)


def kept_and_learned(
    executor: Executor, device: torch.device, settings: Settings, kernels: Sequence[TimedKernel]
) -> DeviceTimesAnswer:
    """Into the profile store, and a model of all that is there; what the worker answers."""
    target = registry.device_kernels().target(device)
    times = tuple(DeviceKernelTime(k.problem, k.work, k.seconds) for k in kernels if k.noise <= NOISY)
    name, arch = torch.cuda.get_device_name(device), f"{target.backend} {target.arch}"
    body = DeviceTimesRequest(name, arch, described(device, target, settings).to_dict(), times, calibrated=True, train=True)
    task = Task(body.kind, request_of(body, settings).header(), timeout=LEARNING_TIMEOUT_S, threads=1)
    return received(executor.submit(task).result(), DeviceTimesAnswer)[0]
