"""`torch.compile(model, backend="hotfuse")`: Dynamo finds the graphs and guards them; an engine serves each of them.

Dynamo's graph is a graph already: it is converted when Dynamo hands it over, on Dynamo's own fake tensors, so that its symbolic
sizes are ours. From there on it is a model like any other: its first call is compared, its plans are proven and raced, its weights
are watched. What cannot be converted runs as Dynamo gave it. All of it shows in `explain_compiled()`.

Dynamo passes parameters and buffers as arguments of every call. They are bound as weights when a call brings them, so that they
can be packed. A call that brings other ones gets an engine of its own, up to `MAX_INSTANCES`: another instance of the same class,
such as the blocks of a transformer that are compiled one by one. Instances that nobody calls any more make room.
"""

from __future__ import annotations

import itertools
import operator
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from hotfuse.base.errors import CaptureError, HotfuseError, InputError
from hotfuse.base.events import Action, EventLog, Why
from hotfuse.base.living import Living
from hotfuse.base.settings import Settings
from hotfuse.base.structure import Spec
from hotfuse.compile.capture_passes import captured
from hotfuse.compile.workers.background_priority import background_priority
from hotfuse.compile.workers.service import service
from hotfuse.explain import Explanation, explain_engine
from hotfuse.frontends.captured import CallSpec, Captured
from hotfuse.frontends.dynamo import Arguments, arguments_of, capture_dynamo
from hotfuse.frontends.fx import Converted
from hotfuse.frontends.varlen import packed_for_varlen
from hotfuse.machine import team_size
from hotfuse.pipeline import Units, compile_tier0
from hotfuse.runtime.engine import Engine
from hotfuse.runtime.plans import Capture
from hotfuse.runtime.tally import NEVER, Rest
from hotfuse.runtime.weights.model_guard import ModelGuard
from hotfuse.stages import ServedPlan, plans_of

MAX_INSTANCES = 128
"""Sets of parameters that one of Dynamo's graphs is served with: more instances of one class run as Dynamo gave them."""
MAX_STATES = 4
"""The same where sets differ in other tensors alone, which may be new ones in every call."""
UNUSED_S = 60.0
"""An instance that had no call for so long makes room when another one comes."""
BREAKS_COUNT_BELOW_S = 2e-4
"""Dynamo's way to a graph behind a break takes 10 to 20 us: worth a line where the graphs take no longer than this."""
LOOK_AGAIN = 256
"""Of calls with weights that there was no room for, one in so many asks whether there is."""
MODES = {
    "default": "",
    "reduce-overhead": "a plan is one native call already",
    "max-autotune": "kernels are always timed, in the background",
    "max-autotune-no-cudagraphs": "kernels are always timed, in the background",
}
"""`torch.compile`'s modes, and why each changes nothing here."""

_numbers = itertools.count()
_graphs: Living[CompiledGraph] = Living()


class DynamoModel:
    """One of Dynamo's graphs with the weights that calls brought, as an engine serves it."""

    def __init__(self, graph: CompiledGraph, weights: Sequence[torch.Tensor]) -> None:
        self.name = graph.name
        self._keys, self._converted = graph.arguments.keys, graph.converted  # as they are now: a later call may open a weight
        self.weights = tuple(weights)
        self.call = graph.arguments.bound(graph.own, weights)
        """Dynamo's own graph, of the inputs."""

    def watched(self) -> ModelGuard:
        """The weights that calls bring, and the graph's constants."""
        return ModelGuard((), (*self.weights, *self._converted.constants.values()))

    def prepare(self) -> None:
        """There is nothing to wait for."""

    def capture(self, spec: Spec, call: CallSpec, watching: Callable[[ModelGuard], None]) -> Capture:
        """The graph is there; its weights are those of the call."""
        del spec, call
        done = self._bound()
        watching(done.watch)
        return done

    def recall(self, spec: Spec, call: CallSpec) -> Capture | None:
        """The graph is there before its first call, so what an earlier process made of it is made ready beside that one."""
        del spec, call
        return self._bound()

    def other_sizes(self, spec: Spec, call: CallSpec) -> Sequence[CallSpec]:
        """None: which sizes are open is Dynamo's to say."""
        del spec, call
        return ()

    def fix_sizes(self, spec: Spec) -> None:
        """Dynamo's own."""

    def disbelieve(self) -> None:
        """The graph is Dynamo's."""

    def _bound(self) -> Capture:
        converted = self._converted
        weights: Mapping[str, torch.Tensor] = {**dict(zip(self._keys, self.weights, strict=True)), **converted.constants}
        watch = ModelGuard((), tuple(weights.values()))
        used = {p.key for p in converted.graph.params}
        return Capture(Captured(converted.graph, {}, {}), {k: w for k, w in weights.items() if k in used}, watch)


class CompiledGraph:
    """One of Dynamo's graphs, served."""

    def __init__(self, gm: fx.GraphModule, name: str, settings: Settings) -> None:
        self.name = name
        self.settings = settings
        self.log = EventLog(settings.max_events, settings.debug)
        self.own_calls = 0
        self.refused = ""
        packed_for_varlen(gm)  # torch cannot run it on the CPU, and the first call runs Dynamo's own graph
        _ = gm.code  # until somebody asks for it, `forward` of a lazy module is one that goes through the module each time
        self.own: Callable[..., Any] = gm.forward
        self._module = gm
        self._broken_at = _broken_at(gm)
        self._bound: tuple[tuple[torch.Tensor, ...], ...] = ()
        """The sets of weights that engines were made for; the last one is the newest."""
        self._used: dict[Engine, tuple[int, float]] = {}
        """How many calls each engine had, and since when, as far as that was asked."""
        self._ask_at = 0.0
        """When that is asked next."""
        self._beyond = 0
        """Calls with weights that there is no room for."""
        self._never_inputs: frozenset[str] = frozenset()
        """Weights that cannot be inputs: what a call costs that was tried once."""
        self.engines: tuple[Engine, ...] = ()
        """One for each set of weights that calls brought."""
        self._enter: Callable[..., Any] = self._unbound
        """Serves a call by the weights that it brings."""
        self._rest: Rest | None = None
        """Where it stands how many calls go straight to Dynamo's own graph."""
        self._lock = threading.Lock()
        try:
            self.arguments: Arguments = arguments_of(gm)
            self.converted = self._convert()
        except HotfuseError as e:
            self._refuse(e.why if isinstance(e, CaptureError) else Why.NOT_CAPTURABLE, str(e))

    def served(self) -> Callable[..., Any]:
        """What Dynamo calls. While nothing is faster than Dynamo's own graph, calls go straight there until the next look: then a
        count and two questions are all that being served adds."""
        own = self.own
        if self.refused:
            return self._own_graph

        def graph(*args: Any) -> Any:
            rest = self._rest
            if rest is None:
                return self._first(args)
            if rest.left > 0 and not (background_priority.jobs and team_size.has_every_core()):
                rest.left -= 1
                self.own_calls += 1
                return own(*args)
            return self._enter(*args)

        return graph

    def _first(self, args: tuple[Any, ...]) -> Any:
        """A call before it is known where such calls are told that the graph's own code is best."""
        result = self._enter(*args)
        with self._lock:  # others may just bind more weights, or drop the engine
            if self._rest is None and len(self.engines) == 1:
                self._rest = self.engines[0].plain_rest(len(self.arguments.inputs_at))
        return result

    def _unbound(self, *args: Any) -> Any:
        """A call with weights that no call has brought before."""
        enter, dropped = self._found(args)
        for engine in dropped:
            engine.close()
        return enter(*args)

    def _found(self, args: tuple[Any, ...]) -> tuple[Callable[..., Any], Sequence[Engine]]:
        """What serves such a call, and engines that serve none from here on. Which arguments are weights stays the same meanwhile:
        weights that were picked before another thread opened one of them would be bound to other places."""
        with self._lock:
            weights = self._picked(args)
            dropped = self._open(changing) if (changing := self._changing(weights)) else ()
            if dropped:
                weights = self._picked(args)
            if any(all(map(operator.is_, bound, weights)) for bound in self._bound):  # another thread's call brought them meanwhile
                return self._enter, dropped
            unused = self._let_go_of_unused()
            return self._bind(weights), (*dropped, *unused)

    def _picked(self, args: Sequence[Any]) -> tuple[torch.Tensor, ...]:
        return tuple(args[p] for p in self.arguments.weights_at)

    def _let_go_of_unused(self) -> Sequence[Engine]:
        """Another instance comes: those that had no call for long go. Their weights would stay for as long as the graph does."""
        now, unused = time.monotonic(), list[Engine]()
        if now < self._ask_at:
            return ()
        self._ask_at = now + UNUSED_S / 4
        for engine in self.engines:
            calls = engine.counts()["calls"]
            before, since = self._used.get(engine, (-1, now))
            if calls != before:
                self._used[engine] = calls, now
            elif now - since >= UNUSED_S:
                unused.append(engine)
        if unused:
            stays = [(e, w) for e, w in zip(self.engines, self._bound, strict=True) if e not in unused]
            self.engines, self._bound = tuple(e for e, _ in stays), tuple(w for _, w in stays)
            self._used = {e: used for e, used in self._used.items() if e not in unused}
            self.log.decide(Action.DROP, Why.RARE, self.name, instances=len(unused), left=len(stays))
        return unused

    def _has_room(self, weights: Sequence[torch.Tensor]) -> bool:
        """Whether there may be one more set of weights, and that one."""
        same = sum(self._changed(weights, bound) is not None for bound in self._bound)
        return len(self.engines) < MAX_INSTANCES and same < MAX_STATES

    def _bind(self, weights: tuple[torch.Tensor, ...]) -> Callable[..., Any]:
        """What serves weights that no call has brought before: an engine, or Dynamo's own graph where there are enough of those."""
        if not self._has_room(weights):
            if not self._beyond:
                self.log.decide(Action.KEEP, Why.TOO_MANY, self.name, what="instances of one class", served=len(self.engines))
            self._beyond += 1
            self._enter = self._entrances(self._no_room)
            return self._own_graph
        owner = object()  # of its jobs; not the graph itself, which would then hold itself
        settings = self.settings
        model = DynamoModel(self, weights)
        engine = Engine(
            model, lambda graph, tensors: compile_tier0(graph, tensors, settings),
            lambda job: service().submit(job, owner), settings, self.log, Units(settings),
            beside=lambda job: service().submit(job, (owner, "beside")),
        )
        self.engines, self._bound = (*self.engines, engine), (*self._bound, weights)
        self._enter = self._entrances(self._unbound)
        if len(self.engines) > 1 or settings.threads is not None:  # what is best of one instance says nothing of another
            self._rest = NEVER
        return self._enter

    def _entrances(self, others: Callable[..., Any]) -> Callable[..., Any]:
        """What serves a call by the weights that it brings."""
        each = [(w, e.serve) for w, e in zip(self._bound, self.engines, strict=True)]
        return self.arguments.entrances(each, others) if each else others

    def _no_room(self, *args: Any) -> Any:
        """A call with weights that there was no room for: seldom asked again, since asking takes longer than a small graph."""
        self._beyond += 1
        return self._own_graph(*args) if self._beyond % LOOK_AGAIN else self._unbound(*args)

    def _own_graph(self, *args: Any) -> Any:
        """Dynamo's own graph, counted."""
        self.own_calls += 1
        return self.own(*args)

    def _changed(self, weights: Sequence[torch.Tensor], bound: Sequence[torch.Tensor]) -> frozenset[str] | None:
        """Keys of what a call brings another one of than a set of weights has; None where parameters are among it, which are
        another instance's."""
        found: set[str] = set()
        for key, weight, other in zip(self.arguments.keys, weights, bound, strict=True):
            if weight is not other:
                if isinstance(weight, torch.nn.Parameter):
                    return None
                found.add(key)
        return frozenset(found)

    def _changing(self, weights: Sequence[torch.Tensor]) -> frozenset[str]:
        """Like `_changed`, for the newest set of the same instance whose changes can all be inputs."""
        each = map(partial(self._changed, weights), reversed(self._bound))
        found = next((changed for changed in each if changed is not None), frozenset[str]())
        return frozenset() if found & self._never_inputs else found

    def _open(self, keys: frozenset[str]) -> Sequence[Engine]:
        """What calls bring another one of each time is an input from here on: tensors that a module keeps in its attributes are
        the same ones in every call for Dynamo, and a recurrent state is not. Gives the engines that there were."""
        before = self.arguments
        self.arguments = before.opened(keys)
        try:
            converted = self._convert()
        except HotfuseError as e:
            self.arguments, self._never_inputs = before, self._never_inputs | keys
            self.log.decide(Action.KEEP, Why.NOT_CAPTURABLE, self.name, because=str(e).splitlines()[0])
            return ()
        self.log.decide(Action.NOTICE, Why.STATEFUL, self.name, state=", ".join(sorted(keys))[:200],
                        what="calls bring other tensors than the last ones: inputs from here on")  # fmt: skip
        self.converted = converted
        dropped, self.engines, self._bound, self._enter, self._rest = self.engines, (), (), self._unbound, None
        self._used = {}
        return dropped

    def _convert(self) -> Converted:
        """Dynamo's graph with the arguments as they are known; raises CaptureError."""
        done = capture_dynamo(self._module, self.arguments)
        return Converted(captured(lambda: Captured(done.graph, {}, {})).graph, done.constants)

    def _refuse(self, why: Why, text: str) -> None:
        self.refused = text
        self.log.decide(Action.REFUSE, why, self.name, because=text.splitlines()[0])

    def limit(self) -> str:
        """What keeps calls in Dynamo's own graph though nothing is wrong with them; empty where nothing does."""
        return (f"{self._beyond} calls of {self.name} were those of further instances than the {len(self.engines)} that are served"
                if self._beyond else "")  # fmt: skip

    def broken(self) -> str:
        """Where Dynamo ends this graph before the model's code does, if that is much beside the graph; empty elsewhere."""
        entries = [e for engine in self.engines for site in list(engine.sites.values()) for e in site.entries if e.heat]
        if not self._broken_at or not any(e.seconds < BREAKS_COUNT_BELOW_S * e.heat for e in entries):
            return ""
        return (f"Dynamo breaks the graph {self._broken_at}, and its way to the next one takes as long as small operators do, "
                "whatever serves the graphs; hotfuse.jit serves a model as a whole where it can")  # fmt: skip

    def wait(self, timeout: float | None = None) -> bool:
        """Until no background work is pending; True if drained in time."""
        return all([engine.wait(timeout) for engine in self.engines])


def hotfuse_backend(
    gm: fx.GraphModule, example_inputs: Sequence[Any], *, mode: str | None = None, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """The backend that the entry point `torch_dynamo_backends` registers; `options` are settings by their names."""
    del example_inputs  # the graph's own placeholders carry the fake ones
    if mode is not None and mode not in MODES:
        raise InputError(f"unknown mode {mode!r}", hint="one of " + ", ".join(MODES))
    compiled = CompiledGraph(gm, f"graph{next(_numbers)}", Settings().with_(**(options or {})))
    if mode is not None and MODES[mode]:
        compiled.log.decide(Action.KEEP, Why.NO_EFFECT, compiled.name, mode=mode, because=MODES[mode])
    _graphs.add(compiled)
    return compiled.served()


def explain_compiled(*, full: bool = False) -> Explanation:
    """Every graph that `torch.compile` gave us in this process and that is still in use; `full` as in `Jit.explain`."""
    graphs = sorted(_graphs, key=lambda g: int(g.name.removeprefix("graph")))
    told = [(g, explain_engine(e).to_dict()) for g in graphs for e in g.engines]
    sites = [{**site, "call": f"{g.name}: {site['call']}"} for g, data in told for site in data["sites"]]
    sites += [{"call": g.name, "pending": False, "dispatch": [], "refused": [g.refused] if g.refused else [], "plans": []}
              for g in graphs if not g.engines]  # fmt: skip
    limits = [limit for _, data in told for limit in data["limits"]] + [limit for g in graphs if (limit := g.limit())]
    own = sum(g.own_calls for g in graphs)
    counts = _summed([data["counts"] for _, data in told]) or {"calls": 0, "graph_calls": 0, "module_calls": 0}
    counts |= {"calls": counts["calls"] + own, "module_calls": counts["module_calls"] + own}
    gradients = {k: sum(data["gradients"][k] for _, data in told) for k in ("served", "backwards", "own")}
    empty: dict[str, Any] = {"objective": "latency", "watching": "", "idle": {}, "workers": {}, "background": {},
                             "concurrency": {"most": 0}, "background_faults": {}}  # fmt: skip
    shared: dict[str, Any] = told[0][1] if told else empty  # what is the process's, not the model's
    return Explanation(
        {
            **shared,
            "model": "torch.compile",
            "counts": counts,
            **({"held": _summed([data["held"] for _, data in told])} if told else {}),
            "sites": sites,
            "limits": list(dict.fromkeys(limits)),
            "breaks": list(dict.fromkeys(text for g in graphs if (text := g.broken()))),
            "waits": [why for _, data in told for why in data["waits"]][:1],
            "fallbacks": {},
            "gradients": {**gradients, "kept": sorted({k for _, data in told for k in data["gradients"]["kept"]})},
            "decisions": [d.to_dict() for g in graphs for d in g.log.decisions],
            "spans": [s.to_dict() for g in graphs for s in g.log.spans],
        },
        full=full,
    )


def compiled_plans() -> tuple[ServedPlan, ...]:
    """What serves such graphs now, as values (`Jit.plans`)."""
    graphs = sorted(_graphs, key=lambda g: int(g.name.removeprefix("graph")))
    return tuple(plan for g in graphs for engine in g.engines for plan in plans_of(engine))


def _broken_at(gm: fx.GraphModule) -> str:
    """Where Dynamo ended a graph before its function did, in words; empty where it did not, or does not say so."""
    reason: Any = getattr(gm, "compile_subgraph_reason", None)
    if not getattr(reason, "graph_break", False):
        return ""
    stack = getattr(reason, "user_stack", ())
    return f"at {stack[-1].filename}:{stack[-1].lineno}" if stack else "of the model's code"


def _summed(each: Sequence[Mapping[str, int]]) -> dict[str, int]:
    return {k: sum(d[k] for d in each) for k in (each[0] if each else ())}


def wait_compiled(timeout: float | None = None) -> bool:
    """Until no background work of such graphs is pending; True if drained in time."""
    with service().pool.waited_for():
        return all([g.wait(timeout) for g in _graphs])
