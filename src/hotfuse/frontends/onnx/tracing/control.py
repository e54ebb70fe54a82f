"""`If`, `Loop`, `Scan` and `SequenceMap` while tracing: decided here, unrolled over a list, or kept with nested graphs.

A nested graph is traced on stand-ins for what it gets. The sizes of a carried value may change from one iteration to the
next, so a body is traced again with those sizes unknown until nothing more changes (a size only ever goes
from known to unknown, so this ends).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, free_symbols

from hotfuse.base.errors import CaptureError
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.frontends.leaf import UNKNOWN, ControlLeaf, Leaf
from hotfuse.frontends.onnx import control, leaves
from hotfuse.frontends.onnx.model_file import OnnxGraph
from hotfuse.frontends.onnx.tracing import shape_algebra
from hotfuse.frontends.onnx.tracing.level import Opaque, TracedLevel, drop_unused, order_placeholders
from hotfuse.frontends.onnx.tracing.node_walk import run
from hotfuse.frontends.onnx.values import Value
from hotfuse.ops.control import run_map

if TYPE_CHECKING:
    from hotfuse.frontends.onnx.onnx_program import Program, ProgramStep


def trace_step(level: TracedLevel, step: ProgramStep, args: list[Value]) -> Sequence[Value]:
    """Trace one control node on values of the graph."""
    match step.node.op:
        case "If":
            return _if(level, step, args)
        case "Loop":
            return _loop(level, step, args)
        case "Scan" if step.opset < 9:
            return _unrolled(level, step, args)
        case "Scan":
            return _scan(level, step, args)
        case _:
            return _map(level, step, args)


# --- nested graphs ---------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Nested:
    """A traced nested graph: what it takes beyond its own inputs, and what it gives."""

    gm: fx.GraphModule
    level: TracedLevel
    vals: list[Any]
    """Its results: fake tensors, None, or UNKNOWN."""


@dataclass(slots=True)
class Captures:
    """What nested graphs use from outside, as values of the outer graph."""

    values: list[Value]
    symbols: list[torch.SymInt] = field(default_factory=list[torch.SymInt])
    """Sizes that known numbers among the values are made of."""


def _captures(level: TracedLevel, values: Sequence[Value]) -> Captures:
    simple = [_simple(level, v) for v in values]
    found: dict[str, torch.SymInt] = {}
    for v in simple:
        numbers = level.numbers(v) if isinstance(v, torch.Tensor) else None
        for n in () if numbers is None else numbers.flat:
            if isinstance(n, torch.SymInt):
                found.setdefault(str(n), n)
    return Captures(simple, list(found.values()))


def _simple(level: TracedLevel, v: Value) -> Value:
    """A list as one value of unknown type; others as they are."""
    if not isinstance(v, list):
        return v
    items: list[Any] = v
    leaf = Leaf(leaves.leaf_name("SequenceConstruct", "", 11, 1))
    return level.emit(leaf, items, {}, [UNKNOWN], tupled=False)[0]


def _nested(level: TracedLevel, program: Program, stand_ins: Sequence[Any], captures: Captures) -> Nested:
    """Trace a nested graph; its inputs are the stand-ins, then the captures, then the captures' symbols."""
    inner = TracedLevel(level.session)
    vals: list[Any] = []

    def body() -> list[Value]:
        own = [inner.input(f"in{i}", v) for i, v in enumerate(stand_ins)]
        outer: list[Value] = []
        for i, v in enumerate(captures.values):
            if isinstance(v, Opaque):
                got = inner.input(f"c{i}", UNKNOWN)
                outer.append(Opaque(got.proxy, v.const))
            else:
                outer.append(inner.input(f"c{i}", v))
        for i, symbol in enumerate(captures.symbols):
            inner.input(f"size{i}", symbol)
        for v in captures.values:
            numbers = level.numbers(v) if isinstance(v, torch.Tensor) else None
            if numbers is not None and not any(isinstance(n, torch.SymFloat | torch.SymBool) for n in numbers.flat):
                inner.know(v, numbers)
        results = [_simple(inner, v) for v in run(inner, program, [*own, *outer])]
        vals.extend(UNKNOWN if isinstance(v, Opaque) else v for v in results)
        return results

    with disable_proxy_modes_tracing():
        gm = inner.trace(body)
    level.where = inner.where
    return Nested(gm, inner, vals)


def _close(level: TracedLevel, nested: Sequence[Nested]) -> list[Value]:
    """Give all nested graphs the same constants behind their inputs; gives those as values of the outer graph."""
    for n in nested:
        drop_unused(n.level)
    metas = {key: node.meta for n in nested for key, node in n.level.consts.items()}
    for n in nested:
        order_placeholders(n.gm, [*n.level.inputs, *(n.level.consts.get(k, metas[k]) for k in metas)])
    return [level.const(level.session.constants[k]) for k in metas]


def _emit(
    level: TracedLevel,
    kind: Any,
    nested: Sequence[Nested],
    args: Sequence[Any],
    captures: Captures,
    vals: Sequence[Any],
    **attrs: Any,
) -> list[Value]:
    behind = _close(level, nested)
    leaf = ControlLeaf(kind, tuple(n.gm for n in nested))
    every = (*captures.values, *captures.symbols, *behind)
    return level.emit(leaf, [*args, every], attrs, vals, tupled=True)


# --- types of results ------------------------------------------------------------------------------------------------


def _fresh_like(level: TracedLevel, val: Any, changing: set[int] = frozenset()) -> Any:  # type: ignore[assignment]
    """A new stand-in of the same type, with sizes that change made unknown."""
    if not isinstance(val, torch.Tensor):
        return UNKNOWN
    with disable_proxy_modes_tracing():
        shape = [level.session.fresh() if d in changing else s for d, s in enumerate(val.shape)]
        return torch.empty(shape, dtype=val.dtype, device=val.device)


def _visible(level: TracedLevel, before: set[Any], val: Any) -> Any:
    """The type a result has outside: sizes that only the nested graph knows are unknown there."""
    if not isinstance(val, torch.Tensor):
        return UNKNOWN
    inside = {d for d, s in enumerate(val.shape) if any(x not in before for x in free_symbols(s))}
    return _fresh_like(level, val, inside)


def _symbols(level: TracedLevel) -> set[Any]:
    assert level.session.mode.shape_env is not None
    return set(level.session.mode.shape_env.var_to_range)


def _same_size(a: Any, b: Any) -> bool:
    return str(a) == str(b)


def _changed(a: Any, b: Any) -> set[int] | None:
    """Dims in which two types differ; None when they are not even of one element type and rank."""
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)) or a.dtype != b.dtype or a.dim() != b.dim():
        return None
    return {d for d in range(a.dim()) if not _same_size(a.shape[d], b.shape[d])}


# --- the operators ---------------------------------------------------------------------------------------------------


def _if(level: TracedLevel, step: ProgramStep, args: list[Value]) -> Sequence[Value]:
    cond, outside = args[0], args[1:]
    if (taken := _decided(level, cond)) is not None:
        return run(level, step.programs[0 if taken else 1], outside)
    captures = _captures(level, outside)
    before = _symbols(level)
    nested = [_nested(level, p, [], captures) for p in step.programs]
    vals: list[Any] = []
    for a, b in zip(nested[0].vals, nested[1].vals, strict=True):
        changed = _changed(a, b)
        vals.append(
            UNKNOWN if changed is None else _visible(level, before, _fresh_like(level, a, changed) if changed else a)
        )
    return _emit(level, "if", nested, [cond], captures, vals)


def _decided(level: TracedLevel, cond: Value) -> bool | None:
    """A condition that is a constant, or a question about sizes (whose answer becomes a guard)."""
    numbers = level.numbers(cond) if isinstance(cond, torch.Tensor) else None
    if numbers is None:
        return None
    try:
        return bool(numbers.flat[0])
    except GuardOnDataDependentSymNode:
        return None


def _traced_until_stable(
    level: TracedLevel, vals: Sequence[Any], trace_body: Callable[[list[Any]], tuple[Nested, list[Any]]]
) -> tuple[Nested, list[Any]]:
    """Trace a body until the types of its carried values are stable; gives it with those types as seen outside."""
    types: list[Any] = [v if isinstance(v, torch.Tensor) else UNKNOWN for v in vals]
    changing: list[set[int]] = [set() for _ in vals]
    while True:
        stand_ins = [_fresh_like(level, t, c) for t, c in zip(types, changing, strict=True)]
        nested, after = trace_body(stand_ins)
        stable = True
        for i, (was, now) in enumerate(zip(stand_ins, after, strict=True)):
            if types[i] is UNKNOWN:
                continue
            changed = _changed(was, now)
            if changed is None:
                types[i], stable = UNKNOWN, False
            elif not changed <= changing[i]:
                changing[i] |= changed
                stable = False
        if stable:
            return nested, [_fresh_like(level, t, c) for t, c in zip(types, changing, strict=True)]


def _steps(level: TracedLevel, before: set[Any], vals: Sequence[Any], length: Any, axes: Sequence[int]) -> list[Any]:
    """The types of stacked outputs."""
    out: list[Any] = []
    for val, axis in zip(vals, axes, strict=True):
        one = _visible(level, before, val)
        if not isinstance(one, torch.Tensor):
            out.append(UNKNOWN)
            continue
        with disable_proxy_modes_tracing():
            shape = list(one.shape)
            shape.insert(
                axis + len(shape) + 1 if axis < 0 else axis, level.session.fresh() if length is None else length
            )
            out.append(torch.empty(shape, dtype=one.dtype))
    return out


def _stacked_attrs(program: Program, first: int, vals: Sequence[Any]) -> dict[str, Any]:
    """Element type and sizes of one step's outputs, for a loop that never runs."""
    dtypes: list[Any] = []
    shapes: list[Any] = []
    for declared, val in zip(control.stacked_of(program, first), vals, strict=True):
        if isinstance(val, torch.Tensor):
            dtypes.append(val.dtype)
            sizes: list[Any] = list(val.shape)
            shapes.append([s if isinstance(s, int) else None for s in sizes])
        else:
            dtypes.append(declared.dtype)
            shapes.append(None if declared.shape is None else list(declared.shape))
    return {"dtypes": dtypes, "shapes": shapes}


def _loop(level: TracedLevel, step: ProgramStep, args: list[Value]) -> Sequence[Value]:
    n_in = len(step.node.inputs)
    given = [*args[:n_in], *(None,) * (2 - n_in)]
    trip, cond, carried = given[0], given[1], [_simple(level, v) for v in given[2:]]
    captures = _captures(level, args[n_in:])
    body, n = step.programs[0], len(carried)
    before = _symbols(level)

    def trace_body(stand_ins: list[Any]) -> tuple[Nested, list[Any]]:
        with disable_proxy_modes_tracing():
            i, go = torch.empty((), dtype=torch.int64), torch.empty((), dtype=torch.bool)
        nested = _nested(level, body, [i, go, *stand_ins], captures)
        return nested, nested.vals[1 : 1 + n]

    nested, vals = _traced_until_stable(level, carried, trace_body)
    steps = nested.vals[1 + n :]
    stacked = _steps(level, before, steps, _known_trips(level, trip, cond, nested), [0] * len(steps))
    return _emit(
        level,
        "loop",
        [nested],
        [trip, cond, tuple(carried)],
        captures,
        [*vals, *stacked],
        **_stacked_attrs(body, 1 + n, steps),
    )


def _known_trips(level: TracedLevel, trip: Value, cond: Value, nested: Nested) -> Any:
    """How often a loop runs that only its count ends, where that is a number or a size; None where only a run tells."""
    count = level.numbers(trip) if isinstance(trip, torch.Tensor) else None
    if count is None or not _holds(level, cond):
        return None
    after = nested.gm.graph.output_node().args[0]
    places = nested.gm.graph.find_nodes(op="placeholder")
    passed_on = isinstance(after, tuple | list) and after[0] is places[1]
    if not passed_on and not (isinstance(nested.vals[0], torch.Tensor) and _holds(nested.level, nested.vals[0])):
        return None
    if shape_algebra.is_static(count):
        return max(int(count.flat[0]), 0)
    return count.flat[0] if isinstance(count.flat[0], torch.SymInt) else None


def _holds(level: TracedLevel, cond: Value) -> bool:
    """Whether a condition is known to be true; no condition is."""
    if cond is None:
        return True
    known = level.numbers(cond) if isinstance(cond, torch.Tensor) else None
    return known is not None and shape_algebra.is_static(known) and bool(known.flat[0])


def _scan(level: TracedLevel, step: ProgramStep, args: list[Value]) -> Sequence[Value]:
    n_in, n_scan = len(step.node.inputs), int(step.attrs["num_scan_inputs"])
    n = n_in - n_scan
    states, scanned, body = args[:n], args[n:n_in], step.programs[0]
    captures = _captures(level, args[n_in:])
    axes = control.scan_axes(step.attrs, n_scan, len(body.out_slots) - n)
    before = _symbols(level)
    with disable_proxy_modes_tracing():
        slices = [
            x.select(a, 0) if isinstance(x, torch.Tensor) and x.shape[a] != 0 else UNKNOWN
            for x, a in zip(scanned, axes.in_axes, strict=True)
        ]

    def trace_body(stand_ins: list[Any]) -> tuple[Nested, list[Any]]:
        nested = _nested(level, body, [*stand_ins, *(_fresh_like(level, s) for s in slices)], captures)
        return nested, nested.vals[:n]

    nested, vals = _traced_until_stable(level, states, trace_body)
    steps = nested.vals[n:]
    length = scanned[0].shape[axes.in_axes[0]] if isinstance(scanned[0], torch.Tensor) else None
    stacked = _steps(level, before, steps, length, axes.out_axes)
    return _emit(
        level,
        "scan",
        [nested],
        [tuple(states), tuple(scanned)],
        captures,
        [*vals, *stacked],
        **_stacked_attrs(body, n, steps),
        in_axes=list(axes.in_axes),
        in_reverse=list(axes.in_reverse),
        out_axes=list(axes.out_axes),
        out_reverse=list(axes.out_reverse),
    )


def _map(level: TracedLevel, step: ProgramStep, args: list[Value]) -> Sequence[Value]:
    n_in, n_out, body = len(step.node.inputs), len(step.node.outputs), step.programs[0]
    sequences, outside = args[:n_in], args[n_in:]
    if all(isinstance(s, list | torch.Tensor) for s in sequences) and isinstance(sequences[0], list):
        return run_map(sequences, lambda *values: tuple(run(level, body, values)), n_out, outside)
    captures = _captures(level, outside)
    whole = [_simple(level, s) for s in sequences]
    nested = _nested(level, body, [_fresh_like(level, s) for s in whole], captures)
    return _emit(level, "map", [nested], [tuple(whole)], captures, [UNKNOWN] * n_out, n_out=n_out)


@dataclass(frozen=True, slots=True)
class _Inline:
    """A nested program whose calls are traced into the graph around it."""

    level: TracedLevel
    program: Program

    @property
    def in_slots(self) -> tuple[int, ...]:
        return self.program.in_slots

    @property
    def captures(self) -> tuple[str, ...]:
        return self.program.captures

    @property
    def graph(self) -> OnnxGraph | None:
        return self.program.graph

    def __call__(self, *args: Value) -> tuple[Value, ...]:
        return tuple(run(self.level, self.program, args))


@dataclass(frozen=True, slots=True)
class _Lengths:
    """Known lengths in the place of a tensor."""

    numbers: list[int]

    def tolist(self) -> list[int]:
        return self.numbers


def _unrolled(level: TracedLevel, step: ProgramStep, args: list[Value]) -> Sequence[Value]:
    """The batched Scan of opset 8, step by step: its lengths must be known."""
    lengths: Any = args[0]
    if lengths is not None:
        numbers = level.numbers(lengths)
        if numbers is None or not shape_algebra.is_static(numbers):
            raise CaptureError(
                "a Scan of opset 8 with lengths that only a run can tell", hint="export with opset 9 or later"
            )
        lengths = _Lengths([int(n) for n in numbers.flat])
    bodies: Any = [_Inline(level, p) for p in step.programs]
    return control.bind(step.node, step.opset, bodies, step.attrs)(lengths, *args[1:])
