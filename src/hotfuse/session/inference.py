"""`InferenceSession`: an ONNX model behind ONNX Runtime's call signatures.

An application changes one import. What differs is only what `explain()` and `stats()` add, and that options which steer
ONNX Runtime's own machinery have no effect; each of those is recorded as a decision when the session starts.
Any number of threads may call `run` at once: a call touches nothing of the session but counters.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self, cast

import torch

from hotfuse.api import engine_stats, with_artifacts
from hotfuse.base.errors import HotfuseError, InputError, ModelError
from hotfuse.base.events import Action, EventLog, Why
from hotfuse.base.settings import Settings
from hotfuse.compile.freeze import may_copy
from hotfuse.compile.workers.service import service
from hotfuse.explain import Explanation, explain_engine
from hotfuse.frontends.onnx.domains.zipped_outputs import with_dictionaries, without_dictionaries
from hotfuse.frontends.onnx.interp import OnnxModule
from hotfuse.frontends.onnx.leaves import parse_name, runs_reference
from hotfuse.frontends.onnx.load import all_nodes, load
from hotfuse.frontends.onnx.model_file import OnnxGraph, OnnxModel, Port
from hotfuse.frontends.onnx.values import Value
from hotfuse.ir.graph import Graph
from hotfuse.machine.primitives import bound_primitive_caches
from hotfuse.session import providers as eps
from hotfuse.session.args import ModelMetadata, NodeArg, complete, fix_dims, metadata, node_args
from hotfuse.session.feeds import admit, release, slot
from hotfuse.session.options import RunOptions, SessionOptions, adopted, check_severity
from hotfuse.session.ort_errors import (
    Fail,
    InvalidArgument,
    InvalidGraph,
    Unavailable,
    UnsupportedFeed,
    WrongCall,
    load_error,
    run_error,
)
from hotfuse.session.ortvalue import IOBinding, OrtValue
from hotfuse.session.serving import DeviceModel, begin_native_layers, engine_for
from hotfuse.stages import ServedPlan, plans_of

_OVERRIDABLE_SINCE = 4
"""Before this IR version every initializer had to be listed as an input, and was a constant all the same."""
_ASYNC_WORKERS = 4
_set_grad_enabled = cast(Callable[[bool], None], torch._C._set_grad_enabled)  # pyright: ignore[reportPrivateUsage]

Source = str | os.PathLike[str] | bytes
AsyncCallback = Callable[[list[Any], Any, str], None]


class InferenceSession:
    """Runs an ONNX model; the signatures are ONNX Runtime's."""

    def __init__(self, path_or_bytes: Source, sess_options: SessionOptions | Any | None = None,
                 providers: Sequence[eps.Provider] | None = None,
                 provider_options: Sequence[dict[Any, Any]] | None = None, *,
                 settings: Settings | None = None, artifacts: str | os.PathLike[str] | None = None, **kwargs: Any) -> None:
        if not isinstance(path_or_bytes, (str, os.PathLike, bytes)):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise WrongCall(f"Unable to load from type '{type(path_or_bytes)}'", hint="a path, or the file's bytes")
        options = SessionOptions() if sess_options is None else adopted(sess_options)
        if options.log_severity_level != -1:
            check_severity(options.log_severity_level)
        settings = Settings() if settings is None else settings
        settings = settings.with_(threads=options.threads or settings.threads, debug=max(options.debug, settings.debug))
        settings = with_artifacts(settings, artifacts)
        self._options = options
        self._settings = settings
        self._events = EventLog(settings.max_events, settings.debug)
        self._closed = False
        bound_primitive_caches()
        self._unmapped: set[str] = set()
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._note_ignored("session option", options.ignored())
        self._note_ignored("argument", {k: str(v) for k, v in kwargs.items()})
        self._providers = eps.resolve(providers, provider_options)
        self._note_ignored("provider", self._providers.ignored)
        try:
            model = load(path_or_bytes)
            begin_native_layers(model)
            served, self._zipped = without_dictionaries(model)
            self._module = OnnxModule(served, self._fell_back, pack=may_copy(settings))
        except ModelError as e:
            raise load_error(e) from e
        except HotfuseError:
            raise
        except Exception as e:
            # A damaged file that got past every check of its own: still the model's error, with the cause kept.
            raise InvalidGraph("cannot load the model: malformed", because=f"{type(e).__name__}: {e}") from e
        self._describe(model, path_or_bytes)
        self._place()

    def _place(self) -> None:
        """Serve on the device of the providers, if they have one and the model's inputs can be there."""
        self._device = self._providers.device
        unfit = next((s.name for s in self._slots if s.plain is None or s.optional), None)
        if self._device is not None and unfit is not None:
            self._events.decide(Action.FALLBACK, Why.UNSUPPORTED_CALL, self._module.model.source,
                                what=f"calls stay on the host, not on {self._device}", because=f"input {unfit} is no plain tensor")
            self._device = None
        self._engine, self._served = engine_for(self._module, self._settings, self._events, self._device)

    def _describe(self, model: OnnxModel, source: Source) -> None:
        sizes = self._options.free_dimensions
        used = _names_used(model)
        inputs = [fix_dims(p, sizes) for p in model.inputs]
        overridable = [fix_dims(p, sizes) for p in model.overridable if model.ir_version >= _OVERRIDABLE_SINCE]
        self._model = model
        self._meta = metadata(model)
        self._inputs = node_args(inputs)
        self._overridable = node_args(overridable)
        self._slots = [slot(p, used=p.name in used) for p in inputs]
        self._override_slots = {p.name: slot(p) for p in overridable}
        self._required = [p.name for p in inputs if p.type.kind != "optional"]
        self._needed = frozenset(self._required)
        self._known = frozenset(p.name for p in (*inputs, *overridable))
        self._output_names = [p.name for p in model.outputs]
        self._output_index = {name: i for i, name in reversed(list(enumerate(self._output_names)))}
        self._open_outputs: tuple[tuple[Port, ...], Source] | None = (
            tuple(fix_dims(p, sizes) for p in model.outputs), source
        )
        self._outputs: list[NodeArg] = []

    # Running

    def run(self, output_names: Iterable[str] | None, input_feed: Mapping[str, Any],
            run_options: RunOptions | None = None) -> list[Any]:
        """Compute outputs: those named, in that order, or all of them; arrays, lists of arrays or None."""
        self._require(input_feed)
        return self._run(output_names, input_feed, run_options)

    def _require(self, input_feed: Mapping[str, Any]) -> None:
        if self._closed:
            raise InputError("the session is closed", hint="make a new one")
        if type(input_feed) is not dict and not isinstance(input_feed, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise WrongCall("input_feed must be a dict of name to value",
                            because=f"it is a {type(input_feed).__name__}")
        if not input_feed.keys() >= self._needed:
            missing = [name for name in self._required if name not in input_feed]
            raise InputError(f"Required inputs ({missing}) are missing from input feed ({list(input_feed)}).")

    def _run(self, output_names: Iterable[str] | None, input_feed: Mapping[str, Any],
             run_options: RunOptions | None) -> list[Any]:
        inputs: list[Value] = []
        return release(self._values(output_names, input_feed, run_options, inputs))

    def _values(self, output_names: Iterable[str] | None, input_feed: Mapping[str, Any],
                run_options: RunOptions | None, inputs: list[Value]) -> list[Value]:
        """The results where they were computed; `inputs` is filled, and has to be held until nobody asks who holds the results."""
        wanted = self._wanted(output_names)
        if run_options is not None:
            self._check_run_options(run_options)
        if not self._known.issuperset(input_feed):
            self._refuse_name(next(name for name in input_feed if name not in self._known))
        args = tuple([admit(s, input_feed.get(s.name)) for s in self._slots])
        inputs += args
        overrides: dict[str, Value] = {}
        if self._override_slots and any(name in self._override_slots for name in input_feed):
            overrides = {n: admit(s, input_feed[n]) for n, s in self._override_slots.items() if n in input_feed}
        results = self._guarded(args, overrides)
        picked = list(results) if wanted is None else [results[i] for i in wanted]
        del results
        return picked

    def _guarded(self, args: tuple[Value, ...], overrides: Mapping[str, Value]) -> Sequence[Value]:
        """Serve a call; whatever fails inside becomes an error of ours that keeps the cause."""
        try:
            results = self._serve_with(args, overrides) if overrides else self._serve(args)
            return with_dictionaries(results, self._zipped) if self._zipped else results
        except HotfuseError as e:
            self._events.count("errors")
            renamed = run_error(e)
            if renamed is e:
                raise
            raise renamed from e
        except MemoryError as e:
            self._events.count("errors")
            raise Fail("the model needs more memory than there is", because=str(e)) from e
        except Exception as e:
            self._events.count("errors")
            raise Fail("the model failed", because=f"{type(e).__name__}: {e}") from e

    def _serve(self, args: tuple[Value, ...]) -> tuple[Value, ...]:
        """One call of the model, all inputs in order: the only place that runs it."""
        if self._device is not None and isinstance(self._served, DeviceModel):
            if self._served.off:  # the device cannot run it: from now on an engine for the host does
                self._engine.close()
                self._device = None
                self._engine, self._served = engine_for(self._module, self._settings, self._events)
            else:
                args = tuple([a.to(self._device) if isinstance(a, torch.Tensor) else a for a in args])
        if self._device is None:
            for a in args:  # no generator: in a call of a small model it would be a hundredth
                if isinstance(a, torch.Tensor) and not a.is_cpu:
                    args = tuple([b.cpu() if isinstance(b, torch.Tensor) else b for b in args])
                    break
        if not torch.is_grad_enabled():
            return self._engine.serve(args, {})
        _set_grad_enabled(False)  # noqa: FBT003 - what `torch.no_grad()` does, without its Python
        try:
            return self._engine.serve(args, {})
        finally:
            _set_grad_enabled(True)  # noqa: FBT003

    def _serve_with(self, args: tuple[Value, ...], overrides: Mapping[str, Value]) -> tuple[Value, ...]:
        """The rare call that replaces an initializer: always by the model's own definition."""
        self._events.count("calls_with_overrides")
        return _with_threads(self._settings.threads, self._module.run_with, args, overrides)

    def _wanted(self, output_names: Iterable[str] | None) -> list[int] | None:
        """Which outputs, in which order; None is all of them."""
        if not output_names:
            return None
        if isinstance(output_names, str) or not isinstance(output_names, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise WrongCall("run(): output_names must be a list of names", because=f"it is {output_names!r}")
        wanted: list[int] = []
        for name in output_names:
            if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise WrongCall("run(): output_names must be a list of names", because=f"one is {name!r}")
            if name not in self._output_index:
                raise InvalidArgument(f"Invalid output name:{name}", hint="one of " + ", ".join(self._output_names))
            wanted.append(self._output_index[name])
        return wanted

    def _refuse_name(self, name: object) -> None:
        if not isinstance(name, str):
            raise WrongCall("run(): input names must be strings", because=f"one is {name!r}")
        raise InvalidArgument(f"Invalid input name: {name}", hint="one of " + ", ".join(sorted(self._known)))

    def _check_run_options(self, run_options: object) -> None:
        if not isinstance(run_options, RunOptions):
            raise WrongCall("run(): run_options must be a RunOptions", because=f"it is a {type(run_options).__name__}")
        if run_options.terminate:
            raise Fail("Exiting due to terminate flag being set to true.")

    def run_async(self, output_names: Iterable[str] | None, input_feed: Mapping[str, Any], callback: AsyncCallback,
                  user_data: Any, run_options: RunOptions | None = None) -> None:
        """Run on another thread; `callback(results, user_data, error)` gets the outputs or an error text."""
        self._require(input_feed)

        def work() -> None:
            try:
                results, error = self._run(output_names, input_feed, run_options), ""
            except HotfuseError as e:
                results, error = [], str(e)
            callback(results, user_data, error)

        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(_ASYNC_WORKERS, thread_name_prefix="hotfuse-async")
            self._pool.submit(work)

    def run_with_ort_values(self, output_names: Iterable[str] | None, input_dict_ort_values: Mapping[str, OrtValue],
                            run_options: RunOptions | None = None) -> list[OrtValue]:
        """Like `run`, with values held in `OrtValue`s on both sides."""
        return [OrtValue(v) for v in self.run(output_names, input_dict_ort_values, run_options)]

    def io_binding(self) -> IOBinding:
        """A holder for inputs and outputs that are used again and again."""
        return IOBinding(self, sorted(self._known), self._bound)

    def _bound(self, output_names: Sequence[str], input_feed: Mapping[str, Any], run_options: RunOptions | None,
               places: Sequence[torch.device | None]) -> list[Any]:
        """Like `run`, with results on devices where that is wanted: as tensors there, arrays elsewhere."""
        self._require(input_feed)
        inputs: list[Value] = []
        return release(self._values(output_names, input_feed, run_options, inputs), places)

    def run_with_iobinding(self, iobinding: IOBinding, run_options: RunOptions | None = None) -> None:
        """Run on what is bound; the results are in the binding."""
        if iobinding.session is not self:
            raise InputError("IOBinding must be used with the session that created it.")
        try:
            iobinding.execute(run_options)
        except (InvalidArgument, Fail) as e:
            raise UnsupportedFeed(f"Error in execution: {e.what}", where=e.where, because=e.because, hint=e.hint) from e

    # What the session says about itself

    def get_inputs(self) -> list[NodeArg]:
        """The inputs a call must give."""
        return list(self._inputs)

    def get_outputs(self) -> list[NodeArg]:
        """The outputs, with sizes completed by shape inference."""
        with self._lock:
            if self._open_outputs is not None:
                ports, source = self._open_outputs
                self._outputs = node_args(complete(ports, source, self._options.free_dimensions))
                self._open_outputs = None
        return list(self._outputs)

    def get_overridable_initializers(self) -> list[NodeArg]:
        """Inputs that have a default in the model."""
        return list(self._overridable)

    def get_modelmeta(self) -> ModelMetadata:
        """What the file says about itself."""
        return self._meta

    def get_session_options(self) -> SessionOptions:
        """The options the session was made with."""
        return self._options

    def get_providers(self) -> list[str]:
        """Where the model runs, in the order of preference."""
        return [eps.CPU] if self._device is None else list(self._providers.names)

    def get_provider_options(self) -> dict[str, dict[str, str]]:
        """The options in use."""
        return {eps.CPU: {}} if self._device is None else self._providers.options()

    def set_providers(self, providers: Sequence[eps.Provider] | None = None,
                      provider_options: Sequence[dict[Any, Any]] | None = None) -> None:
        """Serve on other providers from now on; what is not available is warned about and recorded."""
        before, self._providers = self._providers, eps.resolve(providers, provider_options)
        self._note_ignored("provider", self._providers.ignored)
        if self._providers.device != before.device:
            self._engine.close()
            self._place()

    def disable_fallback(self) -> None:
        """Accepted; there is no other provider to fall back to."""
        self._note_ignored("call", {"disable_fallback": ""})

    def enable_fallback(self) -> None:
        """Accepted; there is no other provider to fall back to."""

    def end_profiling(self) -> str:
        """ONNX Runtime's profile file does not exist here; without profiling asked for, its answer is an empty name."""
        if self._options.enable_profiling:
            raise Unavailable("there is no ONNX Runtime profile file", because="Hotfuse keeps its own records",
                                 hint="read explain() and stats()")
        return ""

    def get_profiling_start_time_ns(self) -> int:
        """When profiling began: never, as in ONNX Runtime without profiling."""
        return 0

    def explain(self, *, full: bool = False) -> Explanation:
        """What runs now and why, in about ten lines; with `full` partitions, kernels and every decision behind them."""
        module = self._module
        own_code = tuple(filter(None, (module.callers, *module.notes)))
        return explain_engine(self._engine, dict(self._fallbacks()), module.unprepared, full=full, own_code=own_code)

    def plans(self) -> tuple[ServedPlan, ...]:
        """What serves now, as values: plans, their kernels, each kernel's code, cost and measurements."""
        return plans_of(self._engine)

    def _fell_back(self, op: str) -> None:
        """Said once per operator; `stats()` and `explain()` count every run."""
        if op not in self._unmapped:
            self._unmapped.add(op)
            self._events.decide(Action.FALLBACK, Why.NO_MAPPING, op)

    def _fallbacks(self) -> Counter[str]:
        """Runs through `onnx.reference` by operator: the interpreter's, and one per call for each such leaf in a graph."""
        total = Counter(self._module.fallbacks)
        for entry in (e for site in list(self._engine.sites.values()) for e in site.entries):
            for name in _leaves(entry.baseline.graph):
                if runs_reference(name):
                    op, domain = parse_name(name)[:2]
                    total[f"{domain}::{op}" if domain else op] += entry.calls
        return total

    def stats(self) -> dict[str, Any]:
        """Plain counters: those of `hotfuse.jit`, and errors and fallbacks."""
        stats = engine_stats(self._engine)
        events = stats["events"]
        stats["calls"] += events.get("calls_with_overrides", 0)
        stats["memory"]["prepared"] = self._module.prepared_bytes  # by the interpreter, of constants
        stats["unprepared"] = list(self._module.unprepared)
        return {**stats, "errors": events.get("errors", 0), "fallbacks": self._fallbacks().total()}

    def wait(self, timeout: float | None = None) -> bool:
        """Until no background work is pending; True if drained in time."""
        with service().pool.waited_for():
            return self._engine.wait(timeout)

    def close(self) -> None:
        """Drop all plans and threads; later runs are refused."""
        with self._lock:
            self._closed = True
            pool, self._pool = self._pool, None
        self._engine.close()
        if pool is not None:
            pool.shutdown(wait=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()

    def _note_ignored(self, what: str, ignored: Mapping[str, str]) -> None:
        for name, value in ignored.items():
            self._events.decide(Action.NOTICE, Why.NO_EFFECT, f"{what} {name}", what=what, name=name, value=value)


def _with_threads(count: int | None, call: Callable[..., tuple[Value, ...]], *args: Any) -> tuple[Value, ...]:
    """Call with torch's thread count of the calling thread set, and put back afterwards."""
    if count is None or (before := torch.get_num_threads()) == count:
        return call(*args)
    torch.set_num_threads(count)
    try:
        return call(*args)
    finally:
        torch.set_num_threads(before)


def _names_used(model: OnnxModel) -> frozenset[str]:
    """Every name that some node, nested graphs included, or the result reads."""
    used = {p.name for p in model.graph.outputs}
    for node in all_nodes(model.graph.nodes):
        used.update(node.inputs)
        for attr in node.attrs.values():
            for g in cast(list[Any], attr) if isinstance(attr, list) else [attr]:
                if isinstance(g, OnnxGraph):
                    used.update(p.name for p in g.outputs)
    return frozenset(used)


def _leaves(graph: Graph) -> Iterator[str]:
    """The names of operators that stayed whole, nested graphs included."""
    for node in graph.nodes:
        if node.op.startswith("onnx."):
            yield node.op
        for nested in node.graphs:
            yield from _leaves(nested)
