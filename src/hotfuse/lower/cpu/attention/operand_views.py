"""Operands and results of attention as strided views of the memory behind them.

A [batch, head, row, element] view of a projection is a sum of steps, and so is the place of an output element: transposes,
slices and reshapes between the memory and attention cost nothing. Heads that are repeated to serve several query heads are not
copied either.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hotfuse.ir.dims import Dim
from hotfuse.ir.graph import Graph, Node, Value, output_values, sources
from hotfuse.lower.common.algebra import add, mul, same
from hotfuse.lower.common.errors import CannotLower
from hotfuse.lower.common.lowered import BufferView, KernelBuffers
from hotfuse.lower.common.positions import Position, Space, Split, counters_in
from hotfuse.lower.cpu.attention.attention_job import AffineIndex, AttentionView
from hotfuse.lower.ops.views import Alias, is_move, move, shape_of
from hotfuse.ops.table import packet

_COPIES = frozenset({"aten.contiguous", "aten.clone", "aten.detach", "aten.alias", "aten.lift_fresh"})
"""Ops whose result has the same elements: inside a kernel they cost nothing."""
Four = tuple[Dim, Dim, Dim, Dim]
"""[batch, head, row, element]."""


class Views:
    """The views of one group around an attention; `four` orders what belongs to its dims, with something for absent ones."""

    def __init__(self, graph: Graph, memory: KernelBuffers, result: Node, four: Callable[[tuple[Dim, ...], Dim], Four]) -> None:
        self.graph, self.memory, self.result, self.four = graph, memory, result, four
        self.where = str(result.loc)
        self.makers: dict[str, tuple[Node, int]] = {v.name: (n, i) for n in graph.nodes for i, v in enumerate(n.outs)}
        self.sources = {v.name for v in sources(graph)}

    def view(self, value: Value, shared: int = 1) -> AttentionView:
        """A tensor of [batch, head, row, element] as steps through the memory it comes from."""
        rows = self.walked(value, shared)
        self.neighbours(rows, value)
        if shape_of(value)[-1] == 1:
            return one_wide(rows)
        axis, step = rows.walk(3)
        if axis < 0 or step != 1 or rows.buffer.stride[axis] != 1:
            raise CannotLower(f"the elements of a row of %{value.name} are not next to each other", where=self.where)
        return rows

    def neighbours(self, rows: AttentionView, value: Value, only: tuple[int, ...] = (2, 3)) -> None:
        """Each counter must move along one dim of the buffer."""
        if any(sum(d.steps[c] != 0 for d in rows.dims) > 1 for c in only):
            raise CannotLower(f"%{value.name} is not a strided view", where=self.where)

    def walked(self, value: Value, shared: int = 1) -> AttentionView:
        """The same without a condition on how a row's elements lie."""
        shape = shape_of(value)
        space, repeated = Space.of(shape), 1
        rank = len(shape_of(self.result.outs[0]))
        head = self.four(tuple(range(rank)), -1)[1]
        head = -1 if head == -1 else len(shape) - rank + head  # type: ignore[operator]
        while True:
            try:
                source, position = self.back(value, tuple(space.root(i) for i in range(len(shape))), space)
                break
            except Split as split:  # repeated heads show as a quotient
                if head < 0 or split.counter != head or repeated > 1 or not isinstance(split.inner, int):
                    raise CannotLower(f"%{value.name} is not a strided view", where=self.where) from split
                space, repeated = space.refined(split), split.inner
        place = self.memory.place(source)
        extra = len(shape) if repeated > 1 else -1  # the counter of a head among its copies
        dims: list[AffineIndex] = []
        for offset, terms in _by_dim(place, position):
            if terms.pop(extra, 0) != 0 or not terms.keys() <= set(range(len(shape))):
                raise CannotLower(f"%{value.name} is not a strided view", where=self.where)
            steps = tuple(terms.get(i, 0) for i in range(len(shape) - rank, len(shape)))  # missing leading dims: no step
            dims.append(AffineIndex(offset, self.four(steps, 0)))
        return AttentionView(place.buffer, tuple(dims), shared * repeated)

    def back(self, value: Value, position: Position, space: Space) -> tuple[Value, Position]:
        """The source behind a chain of views, and the position there."""
        while value.name not in self.sources:
            node, out = self.makers[value.name]
            if packet(node.op) in _COPIES:
                step = Alias(_first(node), position)
            elif is_move(node.op):
                step = move(node, out, position, space)
            else:
                raise CannotLower(f"an operand of attention is computed by {node.op}", where=str(node.loc))
            if not isinstance(step, Alias):
                raise CannotLower(f"an operand of attention is put together by {node.op}", where=str(node.loc))
            value, position = step.value, step.position
        return value, position

    def output(self) -> AttentionView:
        """Where the elements of attention's result lie in the group's output."""
        outs = list(dict.fromkeys(output_values(self.graph)))
        if len(outs) != 1:
            raise CannotLower(f"attention with {len(outs)} outputs", where=self.where)
        out, made = outs[0], self.result.outs[0]
        shape = shape_of(out)
        space = Space.of(shape)
        for _ in range(8):
            try:
                value, position = out, tuple(space.root(i) for i in range(len(shape)))
                while value.name != made.name:
                    node, index = self.makers.get(value.name) or (self.result, 0)
                    if packet(node.op) in _COPIES:
                        step = Alias(_first(node), position)
                    elif is_move(node.op):
                        step = move(node, index, position, space)
                    else:
                        raise CannotLower(f"attention's result goes through {node.op}", where=str(node.loc))
                    if not isinstance(step, Alias):
                        raise CannotLower(f"attention's result is put together by {node.op}", where=str(node.loc))
                    value, position = step.value, step.position
                break
            except Split as split:
                space = space.refined(split)
        else:
            raise CannotLower("attention's result does not fit its output", where=self.where)
        return self.placed(out, position, space)

    def placed(self, out: Value, position: Position, space: Space) -> AttentionView:
        """Each dim of attention's result must be a counter of the output's own, so that every element has one place."""
        place = self.memory.output(out)
        stride: dict[int, Dim] = {}
        for at, step in enumerate(place.strides):
            for counter, coef in space.root(at).terms:
                stride[counter] = mul(coef, step)
        result_shape = shape_of(self.result.outs[0])
        found: list[Dim] = []
        used: list[int] = []
        for coord, extent in zip(position, result_shape, strict=True):
            if coord.offset != 0 or any(c != 1 for _, c in coord.terms) or len(coord.terms) > 1:
                raise CannotLower("attention's result is not written whole", where=self.where)
            if not coord.terms and extent != 1:
                raise CannotLower("attention's result is not written whole", where=self.where)
            found.append(stride[coord.terms[0][0]] if coord.terms else 0)
            used += [k for k, _ in coord.terms]
        if result_shape[-1] == 1:
            found[-1] = 1  # one element is next to itself
        steps = self.four(tuple(found), 0)
        live = {k for k, n in enumerate(space.extents) if n != 1}
        full = all(same(space.extents[c.terms[0][0]], n) for c, n in zip(position, result_shape, strict=True) if c.terms)
        if len(used) != len(set(used)) or set(used) != live or not full or steps[3] != 1:
            raise CannotLower("attention's result does not fit its output", where=self.where)
        return AttentionView(place.buffer, (AffineIndex(0, steps),))


def one_wide(rows: AttentionView) -> AttentionView:
    """Rows of one element, which is walked as if others stood next to it: none of those is ever read."""
    at = next((i for i, n in enumerate(rows.buffer.stride) if n == 1), -1)
    if at < 0:
        raise CannotLower("heads of width 1 that do not lie densely")
    dims = [replace(d, steps=(*d.steps[:3], 1 if i == at else 0)) for i, d in enumerate(rows.dims)]
    return replace(rows, dims=tuple(dims))


def _first(node: Node) -> Value:
    if not node.ins:
        raise CannotLower(f"{node.op} of nothing", where=str(node.loc))
    return node.ins[0]


def _by_dim(place: BufferView, position: Position) -> list[tuple[Dim, dict[int, Dim]]]:
    """Per dim of a place's buffer: the offset, and the steps by counter."""
    if any(counters_in(c.offset) for c in position):
        raise CannotLower("an operand of attention is not a strided view")
    if not place.flat:
        return [(c.offset, dict(c.terms)) for c in position]
    offset: Dim = 0
    terms: dict[int, Dim] = {}
    for c, stride in zip(position, place.strides, strict=True):
        offset = add(offset, mul(c.offset, stride))
        for counter, coef in c.terms:
            terms[counter] = add(terms.get(counter, 0), mul(coef, stride))
    return [(offset, terms)]
