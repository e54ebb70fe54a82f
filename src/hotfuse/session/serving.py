"""An ONNX model as the engine serves it: the interpreter at first, a captured graph once it is proven."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import replace

from hotfuse.base.errors import CaptureError
from hotfuse.base.events import EventLog
from hotfuse.base.fixed_weights import fix
from hotfuse.base.settings import Settings
from hotfuse.base.structure import TENSOR, Spec, describe
from hotfuse.cache.address import digest
from hotfuse.compile.captures import Known, captured, known
from hotfuse.compile.freeze import frozen, may_copy
from hotfuse.compile.request_bodies import OnnxCapture, ReadyRequest
from hotfuse.compile.workers import wire
from hotfuse.compile.workers.service import ask, service
from hotfuse.frontends.captured import CallSpec
from hotfuse.frontends.onnx.interp import OnnxModule
from hotfuse.frontends.ship import restore, ship
from hotfuse.pipeline import Units, compile_tier0
from hotfuse.runtime.engine import Engine
from hotfuse.runtime.plans import Capture
from hotfuse.runtime.weights.model_guard import ModelGuard

_SHIPPING = threading.Lock()


class ServedModel:
    """What the engine asks of a model, for one read from an ONNX file."""

    def __init__(self, module: OnnxModule, settings: Settings) -> None:
        self.name = module.model.source
        self.call = module.forward
        self._module = module
        self._settings = settings
        self._known: Known | None = None
        self._naming = threading.Lock()
        fix(module.weights.values())

    def watched(self) -> ModelGuard:
        """Nobody outside can reach the weights: there is nothing to notice."""
        return ModelGuard((), ())

    def prepare(self) -> None:
        """Have a worker load what capturing takes, unless the cache knows the model."""
        known = self._at()
        if self._settings.capture == "background" and (known is None or not known.remembered()):
            ask(ReadyRequest("onnx"), [], self._settings)

    def _at(self) -> Known | None:
        """Where captures of this model are kept: a file is what it is, so it is named once."""
        with self._naming:  # the first call's capture comes while the constructor's job is at it
            if self._known is None:
                self._known = known("onnx", lambda: digest(self._shipped()), self._settings)
            return self._known

    def name_model(self) -> None:
        """Find out where captures of this model are kept: before the first call, as beside calls it takes several times as long."""
        with contextlib.suppress(CaptureError):  # a model that cannot be sent: whoever captures it says so
            if (known := self._at()) is not None:
                known.calls  # noqa: B018 - what names rest on is found out, too

    def _shipped(self) -> bytes:
        with _SHIPPING:
            return ship(self._module.model).blob

    def get_ready(self) -> None:
        """When the model is loaded: the interpreter is slow, so the worker waits for the first call instead of the other way."""
        with contextlib.suppress(CaptureError):  # a capture asks again, and says what is wrong
            self.prepare()

    def capture(self, spec: Spec, call: CallSpec, watching: Callable[[ModelGuard], None]) -> Capture:
        """Ship the model without its weights to the worker, and bind what comes back to the weights here."""
        if any(child is not TENSOR for child in spec.children[0].children):
            raise CaptureError("a call with sequences or absent inputs", because=f"its inputs are {describe(spec)}",
                               hint="such calls stay in the interpreter")

        def capture(call: CallSpec) -> wire.Message:
            return ask(OnnxCapture(wire.call_to_json(call)), [self._shipped()], self._settings)

        done = captured(self._at(), "", call, capture, self._settings.capture_timeout_s)
        weights = {**self._module.weights, **{k: restore(info) for k, info in done.constants.items()}}
        graph, weights = frozen(done.graph, weights, "constant:", widen=may_copy(self._settings))
        # nobody outside can reach the weights: none need watching, and every tier may have what follows from them
        return Capture(replace(done, graph=graph), weights, ModelGuard((), ()))


def engine_for(module: OnnxModule, settings: Settings, log: EventLog) -> Engine:
    """An engine that serves the module."""
    served = ServedModel(module, settings)
    if settings.capture == "background":
        served.name_model()
        service().submit(served.get_ready, served)
    return Engine(
        served,
        lambda graph, weights: compile_tier0(graph, weights, settings, constant=may_copy(settings)),
        lambda job: service().submit(job, served),
        settings,
        log,
        Units(settings),
        lambda job: service().submit(job, (served, "captures")),
    )
