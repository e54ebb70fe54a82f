"""What a worker can be asked for: one row per kind of request. Every captured graph leaves simplified and verified."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from importlib import import_module
from typing import Any

from hotfuse.base.errors import CaptureError, HotfuseError, InternalError
from hotfuse.compile import request_context
from hotfuse.compile.workers import wire
from hotfuse.compile.workers.task import Task
from hotfuse.frontends.captured import Captured
from hotfuse.ir.verify import verify
from hotfuse.lower.common.effort import REQUEST_STEPS, limited
from hotfuse.simplify import simplify_captured

Header = dict[str, Any]


def _torch(header: Header, blobs: list[bytes]) -> wire.Message:
    from hotfuse.frontends.torch_module import capture_shipment  # torch.export takes a second to import
    from hotfuse.frontends.tracing import tracing

    with tracing():
        captured = capture_shipment(blobs[0], wire.call_from_json(header["call"]))
    return wire.answer_to_message(_finished(captured))


def _present(header: Header, _blobs: list[bytes]) -> wire.Message:
    from hotfuse.frontends.present import capture_present
    from hotfuse.frontends.tracing import tracing

    with tracing():
        captured = capture_present(int(header["number"]), wire.call_from_json(header["call"]))
    return wire.answer_to_message(_finished(captured))


def _onnx(header: Header, blobs: list[bytes]) -> wire.Message:
    from hotfuse.frontends.onnx.capture import capture_shipment as capture_onnx  # a PyTorch user never pays for ONNX
    from hotfuse.frontends.tracing import tracing

    with tracing():
        captured = capture_onnx(blobs[0], wire.call_from_json(header["call"]))
    return wire.answer_to_message(_finished(captured))


_FRONTS = {
    "torch": ("torch.export._trace", "hotfuse.frontends.torch_module"),
    "onnx": ("torch.fx.experimental.validator", "hotfuse.frontends.onnx.capture"),
}


def _ready(header: Header, _blobs: list[bytes]) -> wire.Message:
    """Load what a kind of capture takes, so that the one that follows begins at once."""
    for module in _FRONTS[str(header["front"])]:
        import_module(module)
    return {"ok": True}, []


def _probes(header: Header, blobs: list[bytes]) -> wire.Message:
    from hotfuse.compile.unit import instrumented  # nor anyone for LLVM before it is needed

    return instrumented.probes(header, blobs)


def _runs(header: Header, blobs: list[bytes]) -> wire.Message:
    from hotfuse.compile.run import runs

    return runs.handle(header, blobs)


def _plan(header: Header, blobs: list[bytes]) -> wire.Message:
    from hotfuse.compile.unit import units

    return units.plan(header, blobs)


def _unit(header: Header, blobs: list[bytes]) -> wire.Message:
    from hotfuse.compile.unit import units

    return units.unit(header, blobs)


def _kernel(header: Header, blobs: list[bytes]) -> wire.Message:
    from hotfuse.compile.learn import measure

    return measure.handle(header, blobs)


def _learned(header: Header, _blobs: list[bytes]) -> wire.Message:
    from hotfuse.compile.learn import strategy_history

    return strategy_history.handle(header)


def _idle(header: Header, _blobs: list[bytes]) -> wire.Message:
    from hotfuse.compile.learn import idle

    return idle.handle(header, Here())


def _profile(header: Header, _blobs: list[bytes]) -> wire.Message:
    from hotfuse.compile.learn import profiling

    return profiling.handle(header)


def _counting(header: Header, blobs: list[bytes]) -> wire.Message:
    from hotfuse.compile.unit import instrumented

    return instrumented.counting(header, blobs)


def _device_plan(header: Header, blobs: list[bytes]) -> wire.Message:
    from hotfuse.compile.device import units

    return units.plan(header, blobs)


def _device_unit(header: Header, blobs: list[bytes]) -> wire.Message:
    from hotfuse.compile.device import units

    return units.unit(header, blobs)


_KINDS: dict[str, Callable[[Header, list[bytes]], wire.Message]] = {
    "ready": _ready, "torch": _torch, "present": _present, "onnx": _onnx, "probes": _probes, "runs": _runs,
    "counting": _counting, "plan": _plan, "unit": _unit, "kernel": _kernel, "learned": _learned, "idle": _idle, "profile": _profile,
    "device plan": _device_plan, "device unit": _device_unit,
}  # fmt: skip


def _finished(done: Captured) -> Captured:
    graph, notes = simplify_captured(verify(done.graph))
    used = {p.key for p in verify(graph).params}
    return replace(
        done, graph=graph, shared={k: n for k, n in done.shared.items() if k in used},
        constants={k: c for k, c in done.constants.items() if k in used}, notes=(*done.notes, *notes),
    )


def answer(header: Header, blobs: list[bytes]) -> wire.Message:
    """Do what the request asks for; whatever goes wrong is an answer too."""
    kind = str(header.get("kind"))
    try:
        if kind not in _KINDS:
            raise InternalError(f"no request of kind {kind!r}")
        with request_context.used_by(header), limited(REQUEST_STEPS):
            return _KINDS[kind](header, blobs)
    except CaptureError as e:
        return wire.error_to_message(e)
    except HotfuseError as e:
        return wire.error_to_message(CaptureError(e.what, where=e.where, because=e.because, hint=e.hint))
    except Exception as e:
        text = str(e).strip().splitlines()
        because = f"{type(e).__name__}: {text[0][:300] if text else ''}"
        return wire.error_to_message(CaptureError(f"the request {kind!r} failed", because=because))


class Here:
    """This process as an executor: each request is done when it is submitted."""

    size = 0
    """Nothing runs beside."""

    def submit(self, task: Task) -> Future[wire.Message]:
        """Do it now."""
        future: Future[wire.Message] = Future()
        future.set_running_or_notify_cancel()
        future.set_result(answer(dict(task.header), list(task.blobs)))
        return future

    def cancel(self, owner: str) -> int:
        """Nothing ever waits here."""
        return 0
