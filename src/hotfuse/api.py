"""`hotfuse.jit`: a PyTorch module or function, served at once and captured beside."""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling
from torch.fx import GraphModule

from hotfuse.analysis.growth import read_anywhere
from hotfuse.base.errors import CaptureError, InputError
from hotfuse.base.events import Action, EventLog, Why
from hotfuse.base.faults import faults
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.base.passes import run
from hotfuse.base.settings import INEXACT, Objective, Precision, Settings, Weights
from hotfuse.base.structure import TENSOR, Spec, held_by_objects, read_beside
from hotfuse.cache.address import digest
from hotfuse.cache.place import cache_stats
from hotfuse.compile.captured_answers import captured_from
from hotfuse.compile.captures import Known, captured, known, recalled
from hotfuse.compile.changed_state import remember_state, remembered_state
from hotfuse.compile.request_bodies import PresentCapture, ReadyRequest, TorchCapture, request_of
from hotfuse.compile.workers import wire
from hotfuse.compile.workers.background_priority import background_priority
from hotfuse.compile.workers.fork_once import ask_fork
from hotfuse.compile.workers.forked import ForkFailed
from hotfuse.compile.workers.service import ask, ask_here, counters, service
from hotfuse.explain import Explanation, explain_engine, memory_of
from hotfuse.frontends.captured import CallSpec, Captured
from hotfuse.frontends.hooks import refuse_hooks
from hotfuse.frontends.lifted_state import CHANGES, OF_THE_PROCESS, LiftedState, StatePlaces, values_of
from hotfuse.frontends.model_parts import hold
from hotfuse.frontends.naming import Unnamed, call_name, structure_name
from hotfuse.frontends.present import keep, release
from hotfuse.frontends.questions.as_traced import DATA
from hotfuse.frontends.ship import Shipment, ship
from hotfuse.machine import team_size
from hotfuse.machine.heap import heap
from hotfuse.pipeline import BIND, Units, compile_tier0
from hotfuse.runtime.engine import Engine
from hotfuse.runtime.epochs import epochs
from hotfuse.runtime.own_state import StateServing
from hotfuse.runtime.plans import Capture
from hotfuse.runtime.tally import Everyone
from hotfuse.runtime.weights.model_guard import ModelGuard
from hotfuse.stages import ServedPlan, plans_of
from hotfuse.view import view_of

if TYPE_CHECKING:
    from torch.export import ExportedProgram

_SHIPPING = threading.Lock()
_OWN = frozenset(("_target", "_view", "_serving", "_rest"))


@dataclass(frozen=True, slots=True)
class PackedModel:
    """A model as it is sent to workers, and where the cache keeps captures of it: all that pickling it is for."""

    spec: Spec
    shipment: Shipment
    watch: ModelGuard
    at: Known | None

    def holds(self, spec: Spec) -> bool:
        """Whether pickling the model again for such calls would give the same."""
        return spec == self.spec and self.watch.same_now()


class TorchModel:
    """A module or function as an engine serves it."""

    def __init__(self, target: Callable[..., Any], settings: Settings) -> None:
        self.target = target
        self.settings = settings
        model = target.inner if isinstance(target, LiftedState) else target
        self.name = type(model).__name__ if isinstance(model, nn.Module) else getattr(target, "__name__", "function")
        self.call = target.call if isinstance(target, LiftedState) else target
        self.state_count = len(target.places) if isinstance(target, LiftedState) else 0
        self.changes_itself: Callable[[], None] = lambda: None
        """Told of captures that ended because the model writes what is its own."""
        self.remembers_state: Callable[[StatePlaces], bool] = lambda _: False
        """Told what calls of an earlier process changed of the same model; whether that is among the arguments from here on."""
        self.unnamed = self._stays = _why_not_pickled(target)
        """Why its captures are not kept, and why it is not sent to workers; empty where it is, or nobody asked so far."""
        self._asked_fork = False
        """Whether a fork of the process as it was then was asked, behind a worker's refusal for what the code did there."""
        self._read_beside: dict[int, Any] = {}
        """Classes of arguments and members of enumerations, in the calls that were captured: code reads them, too."""
        self._holds_data, self._reads_data = False, False
        """Whether graphs hold data of tensors that are none of the weights, and whether the code read some itself."""
        self._packed: PackedModel | None = None
        """From the look for an earlier process's graph until the capture: the model is pickled once for both. Pickling holds the
        interpreter lock for most of the time in which the next calls come, and on a device one of those is recorded."""

    def prepare(self) -> None:
        """Have a worker load what capturing takes, unless the cache knows the model."""
        packed = self._packed
        at = packed.at if packed is not None else self._at()
        if self.settings.capture == "background" and (at is None or not (at.remembered() or self._earlier_state(at))):
            ask(ReadyRequest("torch"), [], self.settings)

    def _earlier_state(self, at: Known | None) -> StatePlaces | None:
        """What calls of an earlier process changed of it, where that is not among the arguments already."""
        return None if at is None or isinstance(self.target, LiftedState) else remembered_state(self.target, self.settings)

    def _at(self) -> Known | None:
        """Where captures of the model as it is now are kept; None where nothing is, or it has no name."""
        if self._stays:
            return None
        try:
            found = known("torch", lambda: name_of(self.target), self.settings)
            self.unnamed = ""
        except Unnamed as e:
            self.unnamed, found = str(e), None
        return found

    def watched(self) -> ModelGuard:
        """What notices that the model changed; raises CaptureError where hooks or kinds of weights would be left out."""
        held = hold(self.target, TENSOR)
        refuse_hooks(held.modules)
        known = set(map(id, held.tensors))
        weights = [w for m in held.modules for w in (*m.named_parameters(recurse=False), *m.named_buffers(recurse=False))]
        for name, t in weights:
            if id(t) not in known or t.layout is not torch.strided:
                raise CaptureError("not all weights can be watched", because=f"{name} is a {type(t).__name__}, {t.layout}")
        return self._guard(held.modules, held.tensors)

    def _guard(self, modules: Sequence[nn.Module], tensors: Sequence[torch.Tensor]) -> ModelGuard:
        """What notices changes; raises CaptureError where the model's code reads what no guard can watch."""
        state: set[int] = set()
        if isinstance(self.target, LiftedState):  # arguments, which every call brings as they are
            kept = self.target.keepers()
            values = [owner[name] for owner, name in (*self.target.owners(), *kept)]
            state = {id(t) for value in values for t in (value if isinstance(value, tuple) else (value,))}
            tensors = [t for t in tensors if id(t) not in state]
        else:
            kept = []
        guard = ModelGuard(modules, tensors, [self.target], kept, list(self._read_beside.values()), state)
        if guard.blind:
            raise CaptureError("the model's code reads something that cannot be watched for changes", because=guard.blind)
        return guard

    def recall(self, spec: Spec, call: CallSpec) -> Capture | None:
        """The graph of an earlier process for calls like these, bound to the live tensors; None where there is none, or where
        looking for it would hold the first call up: graphs of `torch.fx` take most of a second to pickle."""
        if isinstance(self.target, GraphModule):
            return None
        packed = self._packed = self._pack(spec)
        refuse_hooks(packed.shipment.modules)
        found = None if packed.at is None else recalled(packed.at, call_name(spec), call)
        if found is None:
            return None
        self._packed = None
        done, calls = self._growing(spec, found[0]), found[1]
        self._rests(packed.watch, done)
        return Capture(done, run(BIND, done, packed.shipment.tensors).weights, packed.watch, calls)

    def other_sizes(self, spec: Spec, call: CallSpec) -> Sequence[CallSpec]:
        """Calls of earlier processes that differ from this one in nothing but sizes."""
        at = self._packed.at if self._packed is not None else self._at()
        return () if at is None else at.other_sizes(call_name(spec), call)

    def fix_sizes(self, spec: Spec) -> None:
        """A graph that leaves open in what such calls differ cannot be had: later processes need not try."""
        if (at := self._at()) is not None:
            at.fix_sizes(call_name(spec))

    def disbelieve(self) -> None:
        """A graph of an earlier process gave another answer than the model: what is kept of it is made anew."""
        if (at := self._at()) is not None:
            at.disbelieve()

    def _pack(self, spec: Spec) -> PackedModel:
        """Pickle the model as it is now; raises CaptureError where it cannot be sent."""
        self._note_read_beside(spec)
        with _SHIPPING:
            shipment = ship(self.target, spec)
        watch = self._guard(shipment.modules, shipment.tensors)
        return PackedModel(spec, shipment, watch, self._at())  # named behind the watch, which shows whatever changes from here on

    def capture(self, spec: Spec, call: CallSpec, watching: Callable[[ModelGuard], None]) -> Capture:
        """The model's graph for such calls, with the live tensors as its weights."""
        try:
            return self._capture(spec, call, watching)
        except CaptureError as e:
            if e.why is Why.SIDE_EFFECT and (found := self._captured_in_own_fork(spec, call, watching, e.what)) is not None:
                return found
            if e.why is Why.STATEFUL or (e.why is Why.SIDE_EFFECT and e.what.startswith(CHANGES)):
                self.changes_itself()
            raise

    def _captured_in_own_fork(
        self, spec: Spec, call: CallSpec, watching: Callable[[ModelGuard], None], what: str
    ) -> Capture | None:
        """The graph of a model whose code did something in a worker, from a fork that begins now. The worker began before the
        model's first calls, which may have done it for all later ones: read a table into a variable. None where the fork says the
        same, or the model changes what is its own, which travels.
        """
        own = what.startswith(CHANGES) and not what.removeprefix(CHANGES).startswith(OF_THE_PROCESS)
        if self._stays or self._asked_fork or own or self.settings.capture != "background":
            return None
        self._asked_fork = True
        because = "a worker has not what its first calls made for later ones"
        try:
            found = self._capture_in_place(spec, call, watching, because, only_forked=True)
        except CaptureError:
            return None
        self._stays = because
        return found

    def _capture(self, spec: Spec, call: CallSpec, watching: Callable[[ModelGuard], None]) -> Capture:
        """Ship the model to the worker and bind what comes back to the live tensors."""
        if self._stays:
            return self._capture_in_place(spec, call, watching, self._stays)
        packed, self._packed = self._packed, None  # it holds the weights
        try:
            if packed is None or not packed.holds(spec):
                packed = self._pack(spec)
        except CaptureError as e:
            if e.why is not Why.NOT_SENDABLE:
                raise
            self._stays = e.because or e.what  # it is not pickled in vain once more
            return self._capture_in_place(spec, call, watching, self._stays)
        state = self._earlier_state(packed.at)
        if state is not None and self.remembers_state(state):
            names = ", ".join(sorted((*state.buffers, *state.attributes)))[:200]
            because = f"calls of an earlier process changed {names}"
            raise CaptureError("the model changes its own state", because=because, why=Why.STATEFUL)
        shipment, watch = packed.shipment, packed.watch
        watching(watch)
        refuse_hooks(shipment.modules)

        def capture(call: CallSpec) -> wire.Message:
            return ask(TorchCapture(wire.call_to_json(call)), [shipment.blob], self.settings)

        try:
            done = self._growing(spec, captured(packed.at, call_name(spec), call, capture, self.settings.capture_timeout_s))
        except CaptureError as e:
            if e.why is not Why.NOT_SENDABLE:
                raise
            self._stays = e.because or e.what  # a worker that is no fork has not what the program made while it ran
            return self._capture_in_place(spec, call, watching, self._stays)
        if isinstance(self.target, LiftedState):
            state = StatePlaces(frozenset(self.target.places), frozenset(self.target.attributes))
            remember_state(self.target.inner, state, self.settings)
        self._rests(watch, done)
        return Capture(done, run(BIND, done, shipment.tensors).weights, watch)

    def _note_read_beside(self, spec: Spec) -> None:
        """Have guards watch, from here on, what code reads of such arguments that no spec says."""
        self._read_beside |= {id(each): each for each in read_beside(spec)}

    def _rests(self, watch: ModelGuard, done: Captured) -> None:
        """One guard is asked for all graphs of a model."""
        self._holds_data |= bool(done.constants)
        self._reads_data |= any(a.what == DATA for a in done.asked)
        watch.rests_on(data=self._holds_data, read=self._reads_data)

    def _growing(self, spec: Spec, done: Captured) -> Captured:
        """With caches that may grow in place, unless they are to be copied. Only tensors that objects hold: a program that hands
        tensors around itself may view them as their strides in the model's own code allow.
        """
        return replace(done, graph=read_anywhere(done.graph, held_by_objects(spec))) if self.settings.caches == "grow" else done

    def _capture_in_place(
        self, spec: Spec, call: CallSpec, watching: Callable[[ModelGuard], None], because: str, *, only_forked: bool = False
    ) -> Capture:
        """Capture a model that cannot be sent: in a fork made for it, or else in this process, in turns with calls."""
        held = hold(self.target, spec)
        self._note_read_beside(spec)
        watch = self._guard(held.modules, held.tensors)
        watching(watch)
        refuse_hooks(held.modules)
        number = keep(held)
        request = request_of(PresentCapture(number, wire.call_to_json(call)), self.settings)
        try:
            how = "in a fork of this process"
            try:
                message = ask_here(request) if self.settings.capture == "inline" else ask_fork(request, self.settings)
            except ForkFailed as e:
                if only_forked or service().stopping:
                    raise
                how, message = f"in this process ({e.because or e.what})", ask_here(request)
            done = self._growing(spec, captured_from(message))
        finally:
            release(number)
        weights = run(BIND, done, held.tensors).weights
        note = f"captured {how}: it cannot be sent to a worker ({because})"
        self._rests(watch, done)
        return Capture(replace(done, notes=(*done.notes, note)), weights, watch)


def name_of(target: Callable[..., Any]) -> str:
    """A model's name; what calls change of it counts by its places, as a model that has counted to five is the one that began."""
    if not isinstance(target, LiftedState):
        return structure_name(target)
    inner = structure_name(target.inner, values_of(target.inner, frozenset(target.attributes)))
    return digest(inner, *target.places, "", *target.attributes)


def _why_not_pickled(target: Callable[..., Any]) -> str:
    """An exported program's module holds what cannot be pickled: hundreds of nodes are written for nothing before that shows."""
    export = sys.modules.get("torch.export._unlift")
    kind = getattr(export, "_StatefulGraphModule", None)
    return "a module of an exported program" if kind is not None and isinstance(target, kind) else ""


class Jit:
    """A served model: call it like the model itself."""

    def __new__(cls, target: Callable[..., Any], settings: Settings) -> Jit:
        """Python looks for `len(fast)` and `fast[0]` in the class: this one has what the model's class has of them."""
        has = tuple(n for n in _CONTAINER if isinstance(target, nn.Module) and hasattr(type(target), n))
        return object.__new__(_container(cls, has) if has else cls)

    def __init__(self, target: Callable[..., Any], settings: Settings) -> None:
        self._target = target
        self._view: Any = None
        log = EventLog(settings.max_events, settings.debug)
        owner = object()  # of its jobs; not the served model itself, which would then hold itself

        def engine_of(model: TorchModel, counted: Everyone | None = None) -> Engine:
            return Engine(
                model,
                lambda graph, weights: compile_tier0(graph, weights, settings),
                lambda job: service().submit(job, owner),
                settings,
                log,
                Units(settings),
                counted=counted,
                beside=lambda job: service().submit(job, (owner, "beside")),
            )

        def lift(state: LiftedState) -> Engine:
            lifted = TorchModel(state, settings)
            lifted.changes_itself = serving.changes_itself
            return engine_of(lifted, plain.everyone)

        model = TorchModel(target, settings)
        plain = engine_of(model)
        self._rest = plain.everyone.rest
        self._serving = serving = StateServing(target, plain, lift)
        model.changes_itself, model.remembers_state = serving.plain_changes_itself, serving.remembers
        if isinstance(target, nn.Module):
            if plain.own_recordings is not None:
                plain.own_recordings.prepare(target.parameters())
            view = view_of(target, lambda args, kwargs: serving.serve(args, kwargs))
            if isinstance(view, str):
                log.decide(Action.KEEP, Why.UNSUPPORTED_CALL, self._engine.model.name,
                           what="methods run the model's own code", because=view)
            else:
                self._view = view
        else:  # a decorated function keeps its name, its text and its signature
            functools.update_wrapper(self, target, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Same structure, dtypes and values as the model's own call; never waits for a compile. While nothing is faster than the
        model's own code, calls go straight there until the next look (`RestOfAll`).
        """
        if not is_dynamo_compiling():  # it would guard on the count
            rest = self._rest
            if rest.left > 0 and not (background_priority.jobs and team_size.has_every_core()):
                rest.left -= 1
                rest.passed += 1
                return rest.own_code(*args, **kwargs)
        return self._serving.serve(args, kwargs)

    @property
    def _engine(self) -> Engine:
        """What serves now."""
        return self._serving.engine

    def wait(self, timeout: float | None = None) -> bool:
        """Until no background work is pending; True if drained in time."""
        with service().pool.waited_for():
            return self._engine.wait(timeout)

    def explain(self, *, full: bool = False) -> Explanation:
        """What runs now and why, in about ten lines; with `full` partitions, kernels and every decision behind them."""
        return explain_engine(self._engine, full=full)

    def plans(self) -> tuple[ServedPlan, ...]:
        """What serves now, as values: plans, their kernels, each kernel's code, cost and measurements."""
        return plans_of(self._engine)

    def stats(self) -> dict[str, Any]:
        """Plain counters."""
        return engine_stats(self._engine)

    def close(self) -> None:
        """Drop all plans; later calls run the model's own code."""
        self._serving.close()

    def __enter__(self) -> Jit:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def __get__(self, owner: object, cls: type[Any] | None = None) -> Any:
        """A decorated method: every object serves its own, made when it is first asked for and kept with it."""
        if owner is None or not isinstance(self._target, FunctionType):
            return self
        name = self._target.__name__
        if getattr(type(owner), name, None) is not self or not hasattr(owner, "__dict__"):
            return MethodType(self, owner)  # nowhere to keep another one; why its calls are not captured is told
        bound = Jit(MethodType(self._target, owner), self._engine.settings)
        return owner.__dict__.setdefault(name, bound)  # two threads may have asked

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """A copy, or what a spawned process is given: the model, served from the beginning."""
        if isinstance(self._target, MethodType):
            owner, name = self._target.__self__, self._target.__name__
            decorated = getattr(type(owner), name, None)
            if isinstance(decorated, Jit) and getattr(owner, "__dict__", {}).get(name) is self:
                return getattr, (owner, name)
        return Jit, (self._target, self._engine.settings)

    def __getattr__(self, name: str) -> Any:
        """Everything else is the model's own (`config`, `eval`, `state_dict`); its methods call the served model (`view`)."""
        if name.startswith("__") or "_target" not in self.__dict__:
            raise AttributeError(name)
        view = self._view
        if view is None:
            return getattr(self._target, name)
        found = getattr(view, name)
        if not isinstance(found, MethodType) or found.__self__ is not view:
            return found

        @functools.wraps(found.__func__)  # `inspect.signature` leaves the first parameter out, as of any method
        def method(jit: Jit, *args: Any, **kwargs: Any) -> Any:
            result = found(*args, **kwargs)
            return jit if result is view else result  # `fast.eval()` is the served model

        return MethodType(method, self)

    def __setattr__(self, name: str, value: Any) -> None:
        """What is set is the model's, too."""
        if name in _OWN or not isinstance(self._target, nn.Module):
            object.__setattr__(self, name, value)
        else:
            setattr(self._target, name, value)

    @property
    def __class__(self) -> type[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """For `isinstance`: a served module is whatever the module is, besides being a `Jit`."""
        target = self.__dict__.get("_target")
        return type(target) if isinstance(target, nn.Module) else Jit


_CONTAINER = ("__len__", "__getitem__", "__setitem__", "__delitem__", "__iter__", "__reversed__", "__contains__")


@functools.cache
def _container(cls: type[Jit], has: tuple[str, ...]) -> type[Jit]:
    """A served model with these methods, which are the model's own."""

    def method(name: str) -> Callable[..., Any]:
        return lambda self, *args: getattr(self._target, name)(*args)

    return type(cls.__name__, (cls,), {"__module__": cls.__module__, **{name: method(name) for name in has}})


def engine_stats(engine: Engine) -> dict[str, Any]:
    """An engine's counters as a plain dict."""
    counts = engine.counts()
    events = engine.log.counts
    entries = [e for s in list(engine.sites.values()) for e in s.entries]
    return {
        "calls": counts["calls"],
        "graph_calls": counts["graph_calls"],
        "calls_per_tier": {
            "module": counts["module_calls"],
            **{str(tier): counts[f"tier{tier}_calls"] for tier in (0, 1, 2)},
        },
        "looked_at": counts["looked_at"],
        "watching": engine.call_sampler.stats(),
        "idle": engine.recorder.idle(),
        "model_watch": engine.watch_stats(),
        "own_recordings": engine.own_recordings.explain() if engine.own_recordings is not None else {},
        "gradients": engine.gradients.explain(),
        "code": epochs.counts(),
        "recorded": engine.recorder.stats(),
        "central": engine.recorder.central(),
        "compile": counters(),
        "cache": cache_stats(engine.settings),
        "memory": {**memory_of(entries), **_released(engine), "trimmed": heap.bytes},
        "captures": sum(n for k, n in events.items() if k.startswith("capture.")),
        "swaps": sum(n for k, n in events.items() if k.startswith("deploy.")),
        "plans": len(entries),
        "versions": sum(len(e.versions) for e in entries),
        "guard_misses": counts["guard_misses"],
        "deopts": counts["deopts"],
        "rejected": events.get("refuse.mismatch", 0),
        "background_faults": faults.counts(),
        "refused": sum(n for k, n in events.items() if k.startswith("refuse.")),
        "events": events,
    }


def with_artifacts(settings: Settings, artifacts: str | os.PathLike[str] | None) -> Settings:
    """The settings with a bundle that a caller named; one that is not there is the caller's error, one not believed is told."""
    if artifacts is None:
        return settings
    path = Path(artifacts).expanduser()
    if not path.is_file():
        raise InputError(f"there is no bundle at {path}", hint="hotfuse build makes one")
    return settings.with_(artifacts=str(path.resolve()))


def _released(engine: Engine) -> dict[str, int]:
    """Bytes of weights that plans have copies of: given back to the system, and what of them was read again since."""
    released = engine.plans.released
    return {} if released is None else {"released": released.bytes, "came_back": released.resident()}


def jit(
    model: Callable[..., Any] | ExportedProgram, *, objective: Objective = "latency", exact: bool = True,
    profiles: str | None = None, threads: int | None = None, precision: Precision = "fp32", weights: Weights = "watched",
    artifacts: str | os.PathLike[str] | None = None, settings: Settings | None = None,
) -> Jit:
    """Serve a module, a function or an exported program: its own code at first, captured graphs as soon as they are proven.

    `exact=False` allows all that is not equal in real arithmetic: `precision="bf16"` and `Settings.padding` "ignore";
    `precision="bf16"` lets products round their operands, which no default does (`Settings.precision`);
    `weights` says how writes to weights are noticed that torch does not show (`Settings.weights`);
    `artifacts` is a bundle that `hotfuse build` made: its plans are proven on the first calls and serve, without a compile;
    `threads` bounds torch's threads during a call; what `settings` leaves open comes from the environment. Of a model that is
    served already the model itself is served once more, by itself and with these settings.
    """
    if issubclass(type(model), Jit):  # which passes for an instance of its model's class
        model = cast("Callable[..., Any]", model.__dict__["_target"])
    export = sys.modules.get("torch.export.exported_program")  # whose import takes a second
    if export is not None and isinstance(model, export.ExportedProgram):
        model = cast("ExportedProgram", model).module()
    if not callable(model):
        onnx = type(model).__name__ == "ModelProto" or isinstance(model, str | bytes | os.PathLike)
        raise InputError(f"hotfuse.jit needs a module or function, not {type(model).__name__}",
                         hint="hotfuse.InferenceSession takes ONNX models" if onnx else "a torch.nn.Module")
    if isinstance(model, type):
        raise InputError(f"hotfuse.jit needs an instance, not the class {model.__name__}", hint=f"{model.__name__}(...)")
    base = Settings() if settings is None else settings
    asked = {"objective": objective, "threads": threads, "profiles": profiles, "precision": precision, "weights": weights}
    defaults = {"objective": "latency", "threads": None, "profiles": None, "precision": "fp32", "weights": "watched"}
    changes = {name: value for name, value in asked.items() if value != defaults[name]}
    if not exact:
        changes |= INEXACT
    chosen = with_artifacts(base.with_(**changes), artifacts)
    if chosen.weights == "checked" and chosen.release_weights:
        raise InputError("weights='checked' reads all weights in every call, and release_weights gives their memory back",
                         hint="one of the two")
    return Jit(model, chosen)
