"""Planning the loops of native runs: `control.loop` and `control.scan` with everything in their bodies.

Every carried value has memory of its own, into which its first value is copied, from which an iteration reads, and into which the
iteration ends by copying what comes next: so it is also where the loop's result lies, however often it ran. Slices of scanned
values are views at the iteration's number, and so are the places that steps are stacked in. Values whose sizes change from one
iteration to the next, and stacks whose length only the run tells, stay with the library.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.compile.run.run_plan import RunPlanner, moved
from hotfuse.compile.run.run_steps import (
    GraphScope,
    LevelParts,
    PlannedLoop,
    PlannedStep,
    Pointer,
    alike,
    tensor_of,
)
from hotfuse.ir.control_bodies import IF, LOOP, branches, control_name, inside
from hotfuse.ir.dims import Dim, expr, sym
from hotfuse.ir.graph import Arg, Node, Value
from hotfuse.ir.types import DType, Layout, ScalarType, TensorType
from hotfuse.lower.common.algebra import add, mul, product, same
from hotfuse.lower.common.errors import CannotLower
from hotfuse.lower.common.lowered import dense_strides
from hotfuse.lower.run.description import LOOP_VAR
from hotfuse.lower.run.places import Lies


@dataclass(frozen=True, slots=True)
class _Form:
    """A loop or a scan, said in one way."""

    trips: Arg
    """How many iterations at most: a value, a number, or None."""
    condition: Arg
    carried: tuple[Value, ...]
    scanned: tuple[Value, ...]
    captures: tuple[Arg, ...]
    in_axes: tuple[int, ...]
    in_reverse: tuple[bool, ...]
    out_axes: tuple[int, ...]
    out_reverse: tuple[bool, ...]
    counted: int
    """Inputs of the body before what it carries: 2 where they are its iteration and its condition, else 0."""


class LoopPlanner(RunPlanner):
    """A planner that knows loops."""

    def _branch(self, scope: GraphScope, node: Node, levels: Sequence[LevelParts]) -> list[PlannedStep]:
        return super()._branch(scope, node, levels) if node.op == IF else self._loop(scope, node, levels[0])

    def _loop(self, scope: GraphScope, node: Node, level: LevelParts) -> list[PlannedStep]:
        form = _form(node)
        (found,) = branches(scope.graph, node)
        count = form.counted + len(form.carried) + len(form.scanned)
        own, name = found.graph.inputs[:count], control_name(node, scope.inside)
        taken = replace(found, graph=replace(found.graph, inputs=found.graph.inputs[count:]))
        var = f"{LOOP_VAR}{len(self.state.roots)}"
        trips, length = self._trips(scope, form)
        exactly: Dim | None = None
        if length is None and trips is not None and len(node.outs) > len(form.carried):
            exactly = length = tensor_of(node.outs[-1]).shape[0]  # as its type says, which is checked when it ran
        condition = self._truth(scope, form.condition, before=True)
        lies = self._captured(scope, taken, form.captures)
        steps: list[PlannedStep] = []
        iteration = self._counter(own[0], f"{name} iteration", lies) if form.counted else None
        go = self._counter(own[1], f"{name} condition", lies) if form.counted else None
        states: list[int] = []
        outs = node.outs[: len(form.carried)]
        for given, inner, out in zip(form.carried, own[form.counted :], outs, strict=False):
            alike(given, inner)
            alike(out, inner)
            t = tensor_of(out)
            root = self._made(out.name, t, dense_strides(t.shape, Layout()))
            steps += self._copy(self._where(scope, given.name), t, Layout(), root)
            lies[inner.name] = Lies(root, 0, dense_strides(t.shape, Layout()))
            states.append(root)
        first = form.counted + len(form.carried)
        for k, (x, inner) in enumerate(zip(form.scanned, own[first:], strict=True)):
            lies[inner.name] = self._slice(scope, x, inner, form.in_axes[k], reverse=form.in_reverse[k], var=var, length=length)
        stacks = [self._stack(out, axis, length) for out, axis in zip(node.outs[len(states) :], form.out_axes, strict=True)]
        before = self.state
        self.state = before.copy()
        body, again = self._body(level, lies, form, states, stacks, var, inside(name, 0))
        self.state.lies, self.state.copied = before.lies, before.copied
        made = (*states, *(s.root for s in stacks))
        steps.append(PlannedLoop(var, trips, condition, again, iteration, go, made, tuple(body), name, exactly))
        for out, root in zip(outs, states, strict=True):
            scope.lies[out.name] = Lies(root, 0, dense_strides(tensor_of(out).shape, Layout()))
        for out, stack in zip(node.outs[len(states) :], stacks, strict=True):
            steps += self._stacked(scope, out, stack)
        return steps

    # -- what goes in

    def _trips(self, scope: GraphScope, form: _Form) -> tuple[Dim | Pointer | None, Dim | None]:
        """The most iterations, as a size or as a number in memory; and as a size where it is one."""
        if form.scanned:
            length = tensor_of(form.scanned[0]).shape[form.in_axes[0]]
            return length, length
        match form.trips:
            case None:
                return None, None
            case int():
                return form.trips, form.trips
            case Value(type=ScalarType(expr=known)) if known is not None:
                return known, known
            case Value(type=TensorType(dtype=DType.I64, shape=shape)) if all(n == 1 for n in shape):
                at = self._where(scope, form.trips.name)
                return Pointer(at.root, at.offset), None
            case _:
                raise CannotLower("a trip count that is not one whole number")

    def _truth(self, scope: GraphScope, condition: Arg, *, before: bool) -> Pointer | None:
        """Where a condition lies; None where it always holds."""
        if condition is True or (before and condition is None):
            return None
        if not isinstance(condition, Value):
            raise CannotLower("a loop whose condition is no value")
        t = tensor_of(condition)
        if t.dtype is not DType.BOOL or any(n != 1 for n in t.shape):
            raise CannotLower("a condition that is not one truth value")
        at = self._where(scope, condition.name)
        return Pointer(at.root, at.offset)

    def _counter(self, v: Value, name: str, lies: dict[str, Lies]) -> Pointer | None:
        """Memory for what the loop itself tells its body; none for a number that is no tensor."""
        if not isinstance(v.type, TensorType):
            return None
        if v.type.dtype not in (DType.I64, DType.BOOL) or any(n != 1 for n in v.type.shape):
            raise CannotLower(f"%{v.name} is not one number")
        strides = dense_strides(v.type.shape, Layout())
        root = self._made(name, v.type, strides)
        lies[v.name] = Lies(root, 0, strides)
        return Pointer(root)

    def _slice(self, scope: GraphScope, x: Value, inner: Value, axis: int, *, reverse: bool, var: str, length: Dim | None) -> Lies:
        t = tensor_of(x)
        if length is None or not same(t.shape[axis], length):
            raise CannotLower("scanned values of different lengths")
        alike(Value(x.name, replace(t, shape=_without(t.shape, axis), layout=Layout())), inner)
        at = self._where(scope, x.name)
        offset = add(at.offset, mul(_turn(var, length, reverse=reverse), at.strides[axis]))
        return Lies(at.root, offset, _without(at.strides, axis))

    # -- the body

    def _body(
        self, level: LevelParts, lies: dict[str, Lies], form: _Form, states: Sequence[int], stacks: Sequence[_Stack], var: str,
        path: str,
    ) -> tuple[list[PlannedStep], Pointer | None]:  # fmt: skip
        """The steps of one iteration, and where it leaves the condition of the next."""
        graph = level.graph
        scope = GraphScope(graph, {p.value.name: p.key for p in graph.params}, lies, top=False, inside=path)
        steps = [step for part in range(len(level.parts)) for step in self._part(scope, level, part)]
        given = [v for v in graph.outputs if isinstance(v, Value)]
        go, results = (graph.outputs[0], list(graph.outputs[1:])) if form.counted else (True, list(graph.outputs))
        if len(given) < len(results) or len(results) != len(states) + len(stacks):
            raise CannotLower("a body that returns a number")
        again = self._truth(scope, go, before=False)
        late: list[PlannedStep] = []
        for v, root in zip(results, states, strict=False):
            assert isinstance(v, Value)
            steps += self._next(scope, v, root, states, late)
        for k, (v, stack) in enumerate(zip(results[len(states) :], stacks, strict=True)):
            assert isinstance(v, Value)
            t, length = tensor_of(v), stack.length
            alike(v, Value(v.name, replace(stack.type, shape=stack.type.shape[1:])))
            copy = self._copy(self._where(scope, v.name), t, Layout(), stack.root)
            offset = mul(_turn(var, length, reverse=form.out_reverse[k]), product(t.shape))
            steps += [*copy[:-1], moved(copy[-1], stack.root, offset)]
        return [*steps, *late], again

    def _next(self, scope: GraphScope, v: Value, root: int, states: Sequence[int], late: list[PlannedStep]) -> list[PlannedStep]:
        """Copy what comes next into its place, last of all; what lies in another state's place is brought to safety first."""
        at, made = self._where(scope, v.name), self.state.roots[root]
        t = tensor_of(v)
        dense = dense_strides(t.shape, Layout())
        if t.dtype is not made.dtype or not same(product(t.shape), made.elements):
            raise CannotLower(f"%{v.name} is something else in the next iteration")
        if at == Lies(root, 0, dense):
            return []
        safe: list[PlannedStep] = []
        if at.root in states:
            kept = self._made(f"{v.name} kept", t, dense)
            safe = self._copy(at, t, Layout(), kept)
            at = Lies(kept, 0, dense)
        late += self._copy(at, t, Layout(), root)
        return safe

    # -- what comes out

    def _stack(self, out: Value, axis: int, length: Dim | None) -> _Stack:
        t = tensor_of(out)
        if length is None or not same(t.shape[axis], length):
            raise CannotLower("steps are stacked, and only the run tells how many")
        at = axis % len(t.shape)
        shape = (t.shape[at], *_without(t.shape, at))
        laid = replace(t, shape=shape, layout=Layout())
        root = self._made(out.name if at == 0 else f"{out.name} by steps", laid, dense_strides(shape, Layout()))
        return _Stack(root, laid, at, length)

    def _stacked(self, scope: GraphScope, out: Value, stack: _Stack) -> list[PlannedStep]:
        """Give a stack its place; along another axis than the first it is copied so that it lies as others expect."""
        t = tensor_of(out)
        strides = list(dense_strides(stack.type.shape, Layout()))
        strides.insert(stack.axis, strides.pop(0))
        if stack.axis == 0:
            scope.lies[out.name] = Lies(stack.root, 0, tuple(strides))
            return []
        dense = dense_strides(t.shape, Layout())
        root = self._made(out.name, t, dense)
        scope.lies[out.name] = Lies(root, 0, dense)
        return self._copy(Lies(stack.root, 0, tuple(strides)), t, Layout(), root)


@dataclass(frozen=True, slots=True)
class _Stack:
    """Steps one behind the other."""

    root: int
    type: TensorType
    """Steps first."""
    axis: int
    length: Dim


def _turn(var: str, length: Dim, *, reverse: bool) -> Dim:
    """Which slice an iteration takes."""
    return expr("+", length, -1, expr("*", -1, sym(var))) if reverse else sym(var)


def _without(items: tuple[Dim, ...], axis: int) -> tuple[Dim, ...]:
    at = axis % len(items)
    return (*items[:at], *items[at + 1 :])


def _form(node: Node) -> _Form:
    """The two control nodes in one form."""
    if node.op == LOOP:
        trips, condition, carried, captures = node.args
        outs = len(node.outs) - len(_group(carried))
        return _Form(trips, condition, _values(carried), (), _group(captures), (), (), (0,) * outs, (False,) * outs, 2)
    states, scanned, captures = node.args
    axes = [_group(node.attr(n)) for n in ("in_axes", "in_reverse", "out_axes", "out_reverse")]
    numbers, flags = [tuple(int(a) for a in g if isinstance(a, int)) for g in axes], axes
    if not scanned:
        raise CannotLower("a scan over nothing")
    return _Form(None, None, _values(states), _values(scanned), _group(captures), numbers[0],
                 tuple(a is True for a in flags[1]), numbers[2], tuple(a is True for a in flags[3]), 0)  # fmt: skip


def _group(arg: Arg) -> tuple[Arg, ...]:
    if not isinstance(arg, tuple):
        raise CannotLower("a loop of an unusual form")
    return arg


def _values(arg: Arg) -> tuple[Value, ...]:
    found = tuple(a for a in _group(arg) if isinstance(a, Value))
    if len(found) != len(_group(arg)):
        raise CannotLower("a loop carries a number")
    return found
