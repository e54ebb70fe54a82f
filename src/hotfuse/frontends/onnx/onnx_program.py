"""A compiled ONNX graph: names are slots of a list, nodes are calls, values die after their last use.

Nested graphs and functions are programs too; what a nested graph uses from outside is appended to its inputs, so a program never
looks outside itself. The tracer walks the same programs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from typing import Any, Protocol

import torch

from hotfuse.base.errors import HotfuseError, ModelError
from hotfuse.base.faults import error_text
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.frontends.onnx import fallback
from hotfuse.frontends.onnx.model_file import OnnxGraph, OnnxNode
from hotfuse.frontends.onnx.recording.recorded_runs import Call, ProgramRecording, ProgramRecordings
from hotfuse.frontends.onnx.registry import OpFn, Prepare
from hotfuse.frontends.onnx.values import Value

_preparing = threading.RLock()
ABSENT, UNUSED = 0, 1
"""Slots that every program has: an optional input not given, and a result nobody reads."""


@dataclass(frozen=True, slots=True)
class NodeCtx:
    """The context an operator's function sees at run time: every number is known."""

    opset: int
    n_outputs: int

    @property
    def traced(self) -> bool:
        """Numbers are known here."""
        return False

    def ints(self, t: Any) -> list[Any]:
        """The numbers in a tensor, flat."""
        return t.tolist() if t.ndim == 1 else t.reshape(-1).tolist()

    def tensor(self, numbers: Any, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """A 1-d tensor of numbers, or a 0-d one of a number."""
        return torch.tensor(numbers, dtype=dtype)

    def known(self, t: Any) -> bool:
        """Always: the data is here."""
        return True


@dataclass(frozen=True, slots=True)
class ProgramStep:
    """One node ready to run: `call(*[env[i] for i in ins])` gives the outs."""

    node: OnnxNode
    opset: int
    call: Callable[..., Any]
    ins: tuple[int, ...]
    outs: tuple[int, ...]
    programs: tuple[Program, ...] = ()
    """Nested graphs (control), or the body (function call)."""
    fn: OpFn | None = None
    """The registry's function; None for control, function calls and fallbacks."""
    attrs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    kind: str = "op"
    """`op`, `control`, `function` or `fallback`."""
    definition: fallback.Fallback | None = None
    """What a fallback runs: ONNX's own definition of the operator."""
    prepare: Prepare | None = None
    """The registry's preparation of constant inputs."""

    @property
    def ctx(self) -> NodeCtx:
        """What the registry's function sees."""
        return NodeCtx(self.opset, len(self.node.outputs))


@dataclass(frozen=True, slots=True)
class CallSource:
    """What a call of a program was made of."""

    step: ProgramStep | None = None
    """None for calls that stand for several steps, or none, and whose results' sizes follow from their inputs'."""
    nested: tuple[Program, ...] = ()
    """Programs that it runs."""


class Packs(Protocol):
    """What holds a packed copy of a weight at times."""

    @property
    def bytes(self) -> int:
        """Memory of it."""
        ...


@dataclass(frozen=True, slots=True)
class Ready:
    """What a run needs."""

    template: list[Value]
    """Slots before a run: constants and what follows from them, None elsewhere."""
    calls: tuple[Call, ...]
    sources: tuple[CallSource, ...]
    """Of the calls."""
    bytes: int
    """Memory that was not there before."""
    nested: tuple[Program, ...] = ()
    """Programs that the calls run: copies of nested graphs that know which captures are constants, and functions."""
    unprepared: str = ""
    """Why constants are not prepared, where that failed."""
    notes: tuple[str, ...] = ()
    """What a reader should know of its calls."""
    packs: tuple[Packs, ...] = ()
    """Calls that may hold packed copies of weights, and let them go."""

    def held(self) -> int:
        """Memory that was not there before, packed copies included."""
        return self.bytes + sum(p.bytes for p in self.packs)


@dataclass(slots=True)
class Program:
    """A compiled graph."""

    name: str
    steps: tuple[ProgramStep, ...]
    template: list[Value]
    """Slots before a run: constants in place, None elsewhere."""
    in_slots: tuple[int, ...]
    out_slots: tuple[int, ...]
    captures: tuple[str, ...]
    """Names from outside, appended to the inputs."""
    consts: Mapping[int, str]
    """Slot -> key of the constant in `OnnxModule.weights`."""
    prepare: Callable[[Program], Ready]
    """Makes of the program what a run needs."""
    record: Callable[[Program, Sequence[Value]], tuple[ProgramRecording, tuple[Value, ...]]] | None = None
    """Runs the program and keeps the calls that runs on arguments of the same sizes need (`recording.size_folding`)."""
    graph: OnnxGraph | None = None
    pack: bool = True
    """Whether convolutions may be packed when constants are prepared."""
    _ready: Ready | None = None
    _runs: ProgramRecordings | None = None

    def ready(self) -> Ready:
        """What runs: made by the first run, since a branch that is never taken needs none."""
        if self._ready is None:
            with _preparing:  # sixteen threads whose first calls meet here would each do the work of one, in turns
                if self._ready is None:
                    self._ready = self.prepare(self)
        return self._ready

    @property
    def prepared_bytes(self) -> int:
        """Memory of what was computed of constants and sizes, here and in nested programs."""
        recorded = 0 if self._runs is None else self._runs.bytes
        return recorded + (0 if self._ready is None else self._ready.held() + sum(p.prepared_bytes for p in self._ready.nested))

    @property
    def prepared(self) -> bool:
        """Whether a run prepares nothing any more that this graph needs."""
        return self._ready is not None

    @property
    def prepared_steps(self) -> int:
        """Calls that a run makes, with those of branches taken so far, where its arguments have sizes that did not come again."""
        return 0 if self._ready is None else len(self._ready.calls) + sum(p.prepared_steps for p in self._ready.nested)

    @property
    def recorded_steps(self) -> int:
        """Calls that a run makes where sizes came again, with those of nested programs that became part of it; 0 where none did."""
        if self._ready is None or self._runs is None or not self._runs.runs:
            return 0
        return self._runs.steps + sum(p.recorded_steps for p in self._ready.nested)

    @property
    def recordings(self) -> int:
        """Kinds of sizes whose calls were recorded, here and in nested programs."""
        mine = 0 if self._runs is None else len(self._runs.runs)
        return mine + (0 if self._ready is None else sum(p.recordings for p in self._ready.nested))

    @property
    def unprepared(self) -> tuple[str, ...]:
        """Why constants were not prepared, here and in nested programs."""
        if self._ready is None:
            return ()
        mine = (f"{self.name}: {self._ready.unprepared}",) if self._ready.unprepared else ()
        if self._runs is not None:
            mine += tuple(f"{self.name}: calls of some sizes are not recorded: {why}" for why in self._runs.refused.values())
        return (*mine, *(why for p in self._ready.nested for why in p.unprepared))

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader should know of what runs, here and in nested programs."""
        return () if self._ready is None else (*self._ready.notes, *(note for p in self._ready.nested for note in p.notes))

    def knowing(self, captures: Mapping[int, Value]) -> Program:
        """This program for callers whose captures at these places never change: it may prepare what follows from them."""
        first = len(self.in_slots) - len(self.captures)
        slots = {self.in_slots[first + i]: value for i, value in captures.items()}
        template = [slots.get(i, value) for i, value in enumerate(self.template)]
        template[UNUSED] = None
        consts = {**self.consts, **{i: self.captures[self.in_slots.index(i) - first] for i in slots if i != UNUSED}}
        return replace(self, template=template, consts=consts, _ready=None, _runs=None)

    def __call__(self, *args: Value) -> tuple[Value, ...]:
        """Run as a body of control operators."""
        return self.run(args)

    def run(self, args: Sequence[Value]) -> tuple[Value, ...]:
        """Run the calls that arguments of these sizes need, or all steps; an error names the node it happened in."""
        if self.record is None:
            return self._run(args)
        if (runs := self._runs) is None:
            runs = self._runs = ProgramRecordings(self.in_slots, {UNUSED, *self.consts})
        kind = runs.kind(args)
        if kind is None:
            return self._run(args)
        found = runs.runs.get(kind)
        try:
            if found is not None:
                return found(args)
            if runs.again(kind):
                runs.runs[kind], values = self.record(self, args)
                return values
        except Exception as e:  # the run of all steps meets the same, and names the node
            values = self._run(args)
            runs.refuse(kind, e)  # or it does not: then the recording is to blame
            return values
        return self._run(args)

    def _run(self, args: Sequence[Value]) -> tuple[Value, ...]:
        """Run all steps."""
        ready = self.ready()
        env = ready.template.copy()
        for slot, value in zip(self.in_slots, args, strict=True):
            env[slot] = value
        node = None
        try:
            for call, ins, outs, frees, node in ready.calls:  # noqa: B007  the handler below reads it
                result = call(*[env[i] for i in ins])
                if isinstance(result, tuple):
                    for slot, value in zip(outs, result):  # noqa: B905  an operator may return outputs nobody declared
                        env[slot] = value
                else:
                    env[outs[0]] = result
                for slot in frees:
                    env[slot] = None
        except HotfuseError:
            raise
        except Exception as e:
            raise node_error(node, self.name, e) from e
        return tuple([env[i] for i in self.out_slots])


def node_error(node: OnnxNode | None, graph: str, e: Exception) -> ModelError:
    """An operator's own exception as one that says which node and what it was given."""
    if node is None:
        return ModelError("a graph cannot start", where=f"graph {graph!r}", because=error_text(e))
    return ModelError(
        f"operator {node.op} of node {node.title!r} failed",
        where=f"graph {graph!r}, node {node.index}",
        because=error_text(e),
        hint="check the inputs' shapes and types against the model",
    )
