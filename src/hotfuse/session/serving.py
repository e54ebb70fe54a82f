"""An ONNX model as the engine serves it: the interpreter at first, a captured graph once it is proven."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from hotfuse.base.errors import CaptureError
from hotfuse.base.events import Action, EventLog, Why
from hotfuse.base.fixed_weights import fix
from hotfuse.base.settings import Settings
from hotfuse.base.structure import TENSOR, Spec, describe
from hotfuse.cache.address import digest
from hotfuse.compile.captures import Known, captured, known, recalled
from hotfuse.compile.freeze import frozen, may_copy
from hotfuse.compile.request_bodies import OnnxCapture, ReadyRequest
from hotfuse.compile.workers import wire
from hotfuse.compile.workers.service import ask, service
from hotfuse.frontends.captured import CallSpec, Captured
from hotfuse.frontends.onnx.interp import OnnxModule
from hotfuse.frontends.onnx.load import all_nodes
from hotfuse.frontends.onnx.model_file import OnnxModel
from hotfuse.frontends.onnx.values import Value
from hotfuse.frontends.ship import restore, ship
from hotfuse.ir.placed import placed
from hotfuse.native.byte_kernels import background as byte_layers
from hotfuse.native.float_layers.layer_code import background_layers
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
        known = self.known_at()
        if self._settings.capture == "background" and (known is None or not known.remembered()):
            ask(ReadyRequest("onnx"), [], self._settings)

    def known_at(self) -> Known | None:
        """Where captures of this model are kept: a file is what it is, so it is named once."""
        with self._naming:  # the first call's capture comes while the constructor's job is at it
            if self._known is None:
                self._known = known("onnx", lambda: digest(self._shipped(source="")), self._settings)
            return self._known

    def name_model(self) -> None:
        """Find out where captures of this model are kept: before the first call, as beside calls it takes several times as long."""
        with contextlib.suppress(CaptureError):  # a model that cannot be sent: capture says so
            if (known := self.known_at()) is not None:
                known.calls  # noqa: B018 - what names rest on is found out, too

    def _shipped(self, source: str | None = None) -> bytes:
        """The model without its weights; `source` is what it is called, which says nothing of what it is."""
        model = self._module.model
        with _SHIPPING:
            return ship(model if source is None else replace(model, source=source)).blob

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

        return self._bound(captured(self.known_at(), "", call, capture, self._settings.capture_timeout_s))

    def recall(self, spec: Spec, call: CallSpec) -> Capture | None:
        """The graph of an earlier process for calls like these, bound; None where there is none."""
        if (at := self.known_at()) is None or any(child is not TENSOR for child in spec.children[0].children):
            return None
        found = recalled(at, "", call)
        return None if found is None else replace(self._bound(found[0]), calls=found[1])

    def other_sizes(self, spec: Spec, call: CallSpec) -> Sequence[CallSpec]:
        """Calls of earlier processes that differ from this one in nothing but sizes."""
        at = self.known_at()
        return () if at is None else at.other_sizes("", call)

    def fix_sizes(self, spec: Spec) -> None:
        """A graph that leaves open in what such calls differ cannot be had: later processes need not try."""
        if (at := self.known_at()) is not None:
            at.fix_sizes("")

    def disbelieve(self) -> None:
        """A graph of an earlier process gave another answer than the file: what is kept of it is made anew."""
        if (at := self.known_at()) is not None:
            at.disbelieve()

    def _bound(self, done: Captured) -> Capture:
        """A graph with the file's weights."""
        weights = {**self._module.weights, **{k: restore(info) for k, info in done.constants.items()}}
        graph, weights = frozen(done.graph, weights, "constant:", widen=may_copy(self._settings))
        # nobody outside can reach the weights: none need watching, and every tier may have what follows from them
        return Capture(replace(done, graph=graph), weights, ModelGuard((), ()))


MAX_OF_FREE = 0.8
"""Part of a device's free memory that the weights of a file may take."""


class DeviceModel(ServedModel):
    """Serves a file for tensors on a device: the interpreter answers on the host until a graph with its weights on the device does.

    Operators of a file read sizes as values, which on a device would be a synchronization each. In the graph that is captured from
    them sizes are symbols, so all of its tensors can be there.
    """

    def __init__(self, module: OnnxModule, settings: Settings, device: torch.device, log: EventLog) -> None:
        super().__init__(module, settings)
        self.call = self._on_host
        self._device = device
        self._log = log
        self._moved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """Weights by their ids on the host, with what stands for them on the device."""
        self.refused: Callable[[], str] = str
        """Why graphs of the file cannot run on the device, as far as captures have shown it."""
        self.off = ""
        """The same, when it has been told: calls stay on the host from then on."""

    def watched(self) -> ModelGuard:
        """There are no kernels of its own to record."""
        raise CaptureError("the interpreter of a file runs on the host")

    def _on_host(self, *inputs: Value) -> tuple[Value, ...]:
        outs = self._module.forward(*[x.cpu() if isinstance(x, torch.Tensor) else x for x in inputs])
        if not self.off and (why := self.refused()):
            self.off = why
            self._log.decide(Action.FALLBACK, Why.NOT_CAPTURABLE, self.name, what=f"calls stay on the host, not on {self._device}",
                             because=why.splitlines()[0][:300])  # fmt: skip
        return tuple([o.to(self._device) if isinstance(o, torch.Tensor) else o for o in outs])

    def capture(self, spec: Spec, call: CallSpec, watching: Callable[[ModelGuard], None]) -> Capture:
        """A graph of the file as on the host, placed on the device with its weights."""
        here = replace(call, inputs=tuple(replace(t, device="cpu") for t in call.inputs))
        found = super().capture(spec, here, watching)
        graph = placed(found.captured.graph, str(self._device))
        used = [p.key for p in graph.params]
        held: dict[str, Value] = dict(found.weights)
        odd = next((key for key in used if not isinstance(held[key], torch.Tensor)), None)
        if odd is not None:
            raise CaptureError("the model cannot run on the device", because=f"the constant {odd} is no tensor")
        new = {id(w): w.nbytes for w in (found.weights[key] for key in used) if id(w) not in self._moved}
        free = torch.cuda.mem_get_info(self._device)[0] if self._device.type == "cuda" else sum(new.values()) * 2
        if sum(new.values()) > MAX_OF_FREE * free:
            raise CaptureError("the model cannot run on the device", why=Why.TOO_MUCH_MEMORY,
                               because=f"its weights take {sum(new.values()) >> 20} MiB, {free >> 20} are free")  # fmt: skip
        weights = {key: self._there(found.weights[key]) for key in used}
        return Capture(replace(found.captured, graph=graph), weights, found.watch)

    def recall(self, spec: Spec, call: CallSpec) -> Capture | None:
        """Nothing: plans on a device are recorded anew, and its weights are moved when calls have shown that they are wanted."""
        return None

    def _there(self, weight: torch.Tensor) -> torch.Tensor:
        """A weight on the device; one for all graphs of the file. The host's is kept so that its id stays its own."""
        if id(weight) not in self._moved:
            self._moved[id(weight)] = (weight, weight.to(self._device))
        return self._moved[id(weight)][1]


_FLOAT_LAYERS = frozenset({"LSTM", "GRU", "DynamicQuantizeLSTM"})
_BYTE_LAYERS = frozenset({
    "ConvInteger", "DequantizeLinear", "DynamicQuantizeLinear", "DynamicQuantizeMatMul", "MatMulInteger", "MatMulIntegerToFloat",
    "QLinearAdd", "QLinearConv", "QLinearMatMul", "QLinearMul", "QGemm", "QuantizeLinear",
})  # fmt: skip
"""Operators that the native code which all files share is made for."""


def begin_native_layers(model: OnnxModel) -> None:
    """Have that code compiled, or read, while the model is made ready: its first calls are those that wait for it."""
    ops = {node.op for node in all_nodes(model.graph.nodes)}
    if ops & _FLOAT_LAYERS:
        background_layers.begin()
    if ops & _BYTE_LAYERS:
        byte_layers.begin()


def engine_for(
    module: OnnxModule, settings: Settings, log: EventLog, device: torch.device | None = None
) -> tuple[Engine, ServedModel]:
    """An engine that serves the module to tensors on the host, or on a device."""
    served = ServedModel(module, settings) if device is None else DeviceModel(module, settings, device, log)
    if settings.capture == "background":
        served.name_model()
        service().submit(served.get_ready, served)
    constant = may_copy(settings) and device is None  # what is made of them is for the host's kernels
    engine = Engine(
        served,
        lambda graph, weights: compile_tier0(graph, weights, settings, constant=constant),
        lambda job: service().submit(job, served),
        settings,
        log,
        Units(settings),
        lambda job: service().submit(job, (served, "captures")),
        beside=lambda job: service().submit(job, (served, "beside")),
    )
    if isinstance(served, DeviceModel):
        groups = engine.sites
        served.refused = lambda: next((g.refused for s in list(groups.values()) for g in list(s.groups.values()) if g.refused), "")
    return engine, served
