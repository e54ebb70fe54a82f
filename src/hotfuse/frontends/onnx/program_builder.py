"""From a model's graphs and functions to programs: names become slots, operators become calls, attributes are filled in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from functools import partial
from typing import Any

import torch

from hotfuse.base.errors import ModelError
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.frontends.onnx import constant_folding, control, fallback, limits
from hotfuse.frontends.onnx.model_file import AttrRef, FunctionKey, OnnxFunction, OnnxGraph, OnnxNode
from hotfuse.frontends.onnx.onnx_program import ABSENT, UNUSED, NodeCtx, Program, ProgramStep
from hotfuse.frontends.onnx.recording import size_folding
from hotfuse.frontends.onnx.registry import OpFn, Prepare, find
from hotfuse.frontends.onnx.values import Value

MAX_STEPS = 1_000_000
"""Most nodes after functions are expanded: far above real models, and below what a hostile file could ask for."""


@dataclass(slots=True)
class _NameScope:
    """Names of one graph; unknown names come from the scope around it, as captures."""

    parent: _NameScope | None = None
    slots: dict[str, int] = field(default_factory=dict[str, int])
    captures: dict[str, int] = field(default_factory=dict[str, int])
    size: int = 2

    def new(self, name: str) -> int:
        self.slots[name] = self.size
        self.size += 1
        return self.size - 1

    def lookup(self, name: str) -> int:
        if not name:
            return ABSENT
        if (slot := self.slots.get(name)) is not None:
            return slot
        if self.parent is None:
            raise ModelError(f"value {name!r} is used but never computed")
        self.parent.lookup(name)
        slot = self.captures[name] = self.new(name)
        return slot


@dataclass(slots=True)
class Compiler:
    """Compiles graphs and functions of one model."""

    functions: Mapping[FunctionKey, OnnxFunction]
    on_fallback: Callable[[str], None]
    weights: dict[str, Value] = field(default_factory=dict[str, Value])
    pack: bool = True
    """Whether the programs may pack convolutions."""
    steps: int = 0
    """Nodes compiled so far, those of a function once per call of it."""
    made: dict[tuple[Any, ...], tuple[Program, int]] = field(default_factory=dict[tuple[Any, ...], tuple[Program, int]])
    """Functions called without attributes are compiled once; with how many steps they are."""

    def graph(
        self,
        graph: OnnxGraph,
        opsets: Mapping[str, int],
        *,
        parent: _NameScope | None = None,
        attrs: Mapping[str, Any] | None = None,
        path: str = "",
    ) -> Program:
        """A graph; inputs with an initializer are not among the program's inputs unless the graph is nested."""
        scope = _NameScope(parent)
        consts: dict[int, tuple[str, Value]] = {}
        ports = [p.name for p in graph.inputs if parent is not None or p.name not in graph.initializers]
        in_slots = [scope.new(n) for n in ports]
        for name, value in graph.initializers.items():
            if name not in scope.slots:
                consts[scope.new(name)] = (path + name, value)
        steps = self._steps(graph.nodes, opsets, scope, attrs, consts, path)
        outs = tuple(scope.lookup(p.name) for p in graph.outputs)
        return self._program(graph.name, scope, in_slots, outs, steps, consts, graph)

    def function(self, fn: OnnxFunction, n_in: int, given: Mapping[str, Any], n_out: int, path: str) -> Program:
        """A function's body with its attributes filled in; takes `n_in` inputs, the rest are absent."""
        scope = _NameScope()
        in_slots = [scope.new(n) for n in fn.inputs[:n_in]]
        for n in fn.inputs[n_in:]:
            scope.slots[n] = ABSENT
        consts: dict[int, tuple[str, Value]] = {}
        steps = self._steps(fn.nodes, fn.opsets, scope, {**fn.defaults, **given}, consts, path)
        outs = tuple(scope.lookup(n) for n in fn.outputs[:n_out])
        return self._program(fn.name, scope, in_slots, outs, steps, consts, None)

    def _program(
        self,
        name: str,
        scope: _NameScope,
        in_slots: list[int],
        outs: tuple[int, ...],
        steps: list[ProgramStep],
        consts: dict[int, tuple[str, Value]],
        graph: OnnxGraph | None,
    ) -> Program:
        template: list[Value] = [None] * scope.size
        keys: dict[int, str] = {}
        for slot, (key, value) in consts.items():
            template[slot] = value
            while self.weights.get(key, value) is not value:  # node names need not be unique
                key += "+"
            self.weights[key] = value
            keys[slot] = key
        slots = (*in_slots, *scope.captures.values())
        captures, ready, record = tuple(scope.captures), constant_folding.ready, size_folding.record
        return Program(name, tuple(steps), template, slots, outs, captures, keys, ready, record, graph, self.pack)

    def _steps(
        self,
        nodes: Sequence[OnnxNode],
        opsets: Mapping[str, int],
        scope: _NameScope,
        attrs: Mapping[str, Any] | None,
        consts: dict[int, tuple[str, Value]],
        path: str,
    ) -> list[ProgramStep]:
        steps: list[ProgramStep] = []
        for node in nodes:
            self._count(1)
            given = _fill(node.attrs, attrs)
            given.pop("consumed_inputs", None)  # of versions before 6: which memory may be used again
            if node.op == "Constant" and node.domain == "":
                consts[scope.new(node.outputs[0])] = (path + node.outputs[0], constant_value(node, given))
                continue
            steps.append(self._step(node, given, opsets, scope, path))
        return steps

    def _step(self, node: OnnxNode, given: dict[str, Any], opsets: Mapping[str, int], scope: _NameScope, path: str) -> ProgramStep:
        opset = opsets.get(node.domain, 1)
        ins = tuple(scope.lookup(i) for i in node.inputs)
        inner = f"{path}{node.title}/"
        programs: tuple[Program, ...] = ()
        fn: OpFn | None = None
        definition: fallback.Fallback | None = None
        prepare: Prepare | None = None
        key = (node.domain, node.op, node.overload)
        if key in self.functions:
            body = self._called(key, len(ins), given, len(node.outputs), inner)
            call, programs, kind = body, (body,), "function"
        elif node.domain == "" and node.op in control.KINDS:
            graphs = [g for g in given.values() if isinstance(g, OnnxGraph)]
            order = control.graph_order(node, given)
            programs = self._nested(order, opsets, scope, inner)
            ins = (*ins, *(scope.lookup(n) for n in programs[0].captures))
            plain = {k: v for k, v in given.items() if not any(v is g for g in graphs)}
            call, kind, given = control.bind(node, opset, programs, plain), "control", plain
        elif (row := find(node.domain, node.op, opset)) is not None:
            fn, prepare, kind = row.fn, row.prepare, "op"
            call = limits.guard(node, given, partial(fn, NodeCtx(opset, len(node.outputs)), **given))
        else:
            definition, kind = fallback.bind(node, opsets, given, self.on_fallback, self.body), "fallback"
            call = limits.guard(node, given, definition)
        outs = tuple(scope.new(o) if o else UNUSED for o in node.outputs)
        return ProgramStep(node, opset, call, ins, outs or (UNUSED,), programs, fn, given, kind, definition, prepare)

    def body(self, fn: OnnxFunction, n_in: int, given: Mapping[str, Any], n_out: int) -> Program:
        """An operator's definition by others, on its own: it sees no function or weight of the model."""
        return Compiler({}, self.on_fallback, pack=self.pack).function(fn, n_in, given, n_out, "")

    def _called(self, key: FunctionKey, n_in: int, given: dict[str, Any], n_out: int, path: str) -> Program:
        """The body of a called function; shared between calls, so that nested calls cannot multiply."""
        call = (key, n_in, n_out)
        if given or call not in self.made:
            before = self.steps
            program = self.function(self.functions[key], n_in, given, n_out, path)
            if not given:
                self.made[call] = (program, self.steps - before)
            return program
        program, steps = self.made[call]
        self._count(steps)
        return program

    def _count(self, steps: int) -> None:
        self.steps += steps
        if self.steps > MAX_STEPS:
            raise ModelError("functions expand to too many nodes", because=f"more than {MAX_STEPS}")

    def _nested(
        self, graphs: Sequence[OnnxGraph], opsets: Mapping[str, int], scope: _NameScope, path: str
    ) -> tuple[Program, ...]:
        """Nested graphs that all take the same captures after their inputs."""
        made = [self.graph(g, opsets, parent=scope, path=f"{path}{i}/") for i, g in enumerate(graphs)]
        names = tuple(dict.fromkeys(n for p in made for n in p.captures))
        for p in made:
            n_ports = len(p.in_slots) - len(p.captures)
            own = dict(zip(p.captures, p.in_slots[n_ports:], strict=True))
            p.in_slots = (*p.in_slots[:n_ports], *(own.get(n, UNUSED) for n in names))
            p.captures = names
        return tuple(made)


def _fill(attrs: Mapping[str, Any], env: Mapping[str, Any] | None) -> dict[str, Any]:
    """Attributes with references to the function's own replaced; an absent one is dropped."""
    filled: dict[str, Any] = {}
    for name, value in attrs.items():
        if isinstance(value, AttrRef):
            if env is not None and value.name in env:
                filled[name] = env[value.name]
        else:
            filled[name] = _fill_graph(value, env) if isinstance(value, OnnxGraph) and env is not None else value
    return filled


def _fill_graph(graph: OnnxGraph, env: Mapping[str, Any]) -> OnnxGraph:
    nodes = tuple(
        OnnxNode(n.op, n.domain, n.inputs, n.outputs, _fill(n.attrs, env), n.name, n.overload, n.index)
        for n in graph.nodes
    )
    return OnnxGraph(graph.name, graph.inputs, graph.outputs, nodes, graph.initializers, graph.types)


def constant_value(node: OnnxNode, attrs: Mapping[str, Any]) -> Value:
    """What a Constant node holds."""
    import numpy as np

    for name, value in attrs.items():
        match name:
            case "value" | "sparse_value":
                return value
            case "value_float" | "value_floats":
                return torch.tensor(value, dtype=torch.float32)
            case "value_int" | "value_ints":
                return torch.tensor(value, dtype=torch.int64)
            case "value_string" | "value_strings":
                return np.array(value, dtype=object)
            case _:
                continue
    raise ModelError(f"node {node.title!r} is a Constant without a value")
