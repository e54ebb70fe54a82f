"""What a worker can be asked for: one row per kind of request. Every captured graph leaves simplified and verified."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from importlib import import_module
from typing import Any

from hotfuse.base.errors import CaptureError, HotfuseError
from hotfuse.base.faults import error_text
from hotfuse.compile import answer_bodies, request_context
from hotfuse.compile.answer_bodies import Answered, ReadyAnswer
from hotfuse.compile.capture_passes import captured
from hotfuse.compile.captured_answers import answer_of
from hotfuse.compile.request_bodies import (
    CountingRequest,
    DevicePlanRequest,
    DeviceTimesRequest,
    DeviceUnitRequest,
    IdleRequest,
    KernelRequest,
    LearnedRequest,
    OnnxCapture,
    PlanRequest,
    PresentCapture,
    ProbesRequest,
    ProfileRequest,
    ReadyRequest,
    RunsRequest,
    TorchCapture,
    UnitRequest,
    body_of,
)
from hotfuse.compile.workers import wire
from hotfuse.compile.workers.task import Task
from hotfuse.frontends.captured import Captured
from hotfuse.frontends.dynamo_stand_in import remove_stand_in, stand_in_installed
from hotfuse.lower.common.effort import REQUEST_STEPS, limited

Header = dict[str, Any]


def _torch(request: TorchCapture, blobs: list[bytes]) -> Answered:
    remove_stand_in()
    from hotfuse.frontends.torch_module import capture_shipment  # torch.export takes a second to import
    from hotfuse.frontends.tracing import tracing

    with tracing():
        done = captured(lambda: capture_shipment(blobs[0], wire.call_from_json(dict(request.call))))
    return answer_of(done)


def _present(request: PresentCapture, _blobs: list[bytes]) -> Answered:
    remove_stand_in()
    from hotfuse.frontends.present import capture_present
    from hotfuse.frontends.tracing import tracing

    with tracing():
        done = captured(lambda: capture_present(request.number, wire.call_from_json(dict(request.call))))
    return answer_of(done)


def _onnx(request: OnnxCapture, blobs: list[bytes]) -> Answered:
    from hotfuse.frontends.onnx.capture import capture_shipment as capture_onnx  # a PyTorch user never pays for ONNX
    from hotfuse.frontends.tracing import tracing

    def capture() -> Captured:
        with tracing():
            return captured(lambda: capture_onnx(blobs[0], wire.call_from_json(dict(request.call))))

    try:
        return answer_of(capture())
    except HotfuseError:
        if not stand_in_installed():
            raise
    remove_stand_in()
    return answer_of(capture())


COMMON = ("torch.fx.experimental.symbolic_shapes", "hotfuse.simplify", "hotfuse.compile.unit.units", "hotfuse.compile.run.runs")
"""What captures and kernels of every model take, and a process that serves does not."""
_FRONTS = {
    "torch": ("torch.export._trace", "hotfuse.frontends.torch_module"),
    "onnx": ("torch._higher_order_ops.triton_kernel_wrap", "hotfuse.frontends.onnx.capture"),
}


def _ready(request: ReadyRequest, _blobs: list[bytes]) -> Answered:
    """Load what a kind of capture takes, so that the one that follows begins at once."""
    if request.front == "torch":
        remove_stand_in()
    for module in _FRONTS[request.front]:
        import_module(module)
    return ReadyAnswer(), []


def import_common() -> None:
    """Have at hand what most requests take."""
    for module in COMMON:
        import_module(module)


def _probes(_request: ProbesRequest, _blobs: list[bytes]) -> Answered:
    from hotfuse.compile.unit import instrumented  # nor anyone for LLVM before it is needed

    return instrumented.probes()


def _runs(request: RunsRequest, _blobs: list[bytes]) -> Answered:
    from hotfuse.compile.run import runs

    return runs.handle(request)


def _plan(request: PlanRequest, _blobs: list[bytes]) -> Answered:
    from hotfuse.compile.unit import units

    return units.plan(request)


def _unit(request: UnitRequest, blobs: list[bytes]) -> Answered:
    from hotfuse.compile.unit import units

    return units.unit(request, blobs)


def _kernel(request: KernelRequest, _blobs: list[bytes]) -> Answered:
    from hotfuse.compile.learn import measure

    return measure.handle(request)


def _learned(request: LearnedRequest, _blobs: list[bytes]) -> Answered:
    from hotfuse.compile.learn import strategy_history

    return strategy_history.handle(request)


def _idle(request: IdleRequest, _blobs: list[bytes]) -> Answered:
    from hotfuse.compile.learn import idle

    return idle.handle(request, Here())


def _profile(request: ProfileRequest, _blobs: list[bytes]) -> Answered:
    from hotfuse.compile.learn import profiling

    return profiling.handle(request)


def _counting(request: CountingRequest, _blobs: list[bytes]) -> Answered:
    from hotfuse.compile.unit import instrumented

    return instrumented.counting(request)


def _device_plan(request: DevicePlanRequest, _blobs: list[bytes]) -> Answered:
    from hotfuse.compile.device import units

    return units.plan(request)


def _device_unit(request: DeviceUnitRequest, _blobs: list[bytes]) -> Answered:
    from hotfuse.compile.device import units

    return units.unit(request)


def _device_times(request: DeviceTimesRequest, _blobs: list[bytes]) -> Answered:
    from hotfuse.compile.learn import device_times

    return device_times.handle(request)


_HANDLERS: Mapping[type[Any], Callable[[Any, list[bytes]], Answered]] = {
    ReadyRequest: _ready, TorchCapture: _torch, PresentCapture: _present, OnnxCapture: _onnx, ProbesRequest: _probes,
    RunsRequest: _runs, CountingRequest: _counting, PlanRequest: _plan, UnitRequest: _unit, KernelRequest: _kernel,
    LearnedRequest: _learned, IdleRequest: _idle, ProfileRequest: _profile, DevicePlanRequest: _device_plan,
    DeviceUnitRequest: _device_unit, DeviceTimesRequest: _device_times,
}  # fmt: skip


def answer(header: Header, blobs: list[bytes]) -> wire.Message:
    """Do what the request asks for; whatever goes wrong is an answer too."""
    kind = str(header.get("kind"))
    try:
        with request_context.used_by(header), limited(REQUEST_STEPS):
            request = body_of(header)
            return answer_bodies.message(*_HANDLERS[type(request)](request, blobs))
    except CaptureError as e:
        return answer_bodies.refusal(e)
    except HotfuseError as e:
        return answer_bodies.refusal(CaptureError(e.what, where=e.where, because=e.because, hint=e.hint))
    except Exception as e:
        return answer_bodies.refusal(CaptureError(f"the request {kind!r} failed", because=error_text(e)))


class Here:
    """This process as an executor: each request is done when it is submitted."""

    size = 0
    """Nothing runs beside."""

    def submit(self, task: Task) -> Future[wire.Message]:
        """Do it now."""
        future: Future[wire.Message] = Future()
        future.set_running_or_notify_cancel()
        begun = time.process_time()
        done = answer(dict(task.header), list(task.blobs))
        task.took(time.process_time() - begun)
        future.set_result(done)
        return future

    def cancel(self, owner: str) -> int:
        """Nothing ever waits here."""
        return 0
