"""`scaled_dot_product_attention`, with the views around it, as one kernel.

    q, k, v = transpose(view(x, [B, S, H, D]), 1, 2) of projections        read in place
    out = reshape(transpose(attention, 1, 2), [B, S, H * D])               written in place

Views before and after are positions (`lower.views`): a [batch, head, row, element] view of a projection is a sum of steps, and so
is the place of an output element. Heads that are repeated to serve several query heads are not copied either. A group that
does anything else to an operand cannot be lowered here. Attention that is spelled out as products and a softmax
(`analysis.attention`) is the same kernel.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from hotfuse.analysis.attention import FUSED, written
from hotfuse.ir.dims import Dim
from hotfuse.ir.graph import Graph, Node, Value, output_values, sources
from hotfuse.ir.types import DType
from hotfuse.lower.algebra import add, mul, same
from hotfuse.lower.attention_data import HALVES, MAX_WIDTH, Along, Attention, Mask, Rows
from hotfuse.lower.attention_kernel import attend
from hotfuse.lower.attention_tiling import AttentionTiling, choose
from hotfuse.lower.errors import CannotLower
from hotfuse.lower.index import Position, Space, Split, counters_in
from hotfuse.lower.lowered import Lowered, Memory, Place, tensor_type
from hotfuse.lower.tiling import Core
from hotfuse.lower.views import Alias, is_move, move, shape_of
from hotfuse.ops.schema import argument
from hotfuse.ops.table import packet
from hotfuse.tile.build import KernelBuilder

OP = FUSED
_COPIES = frozenset({"aten.contiguous", "aten.clone", "aten.detach", "aten.alias", "aten.lift_fresh"})
"""Ops whose result has the same elements: inside a kernel they cost nothing."""


def lower_attention(
    graph: Graph,
    core: Core,
    *,
    name: str = "attention",
    strides: Mapping[str, tuple[int, ...]] | None = None,
    tiling: AttentionTiling | None = None,
) -> Lowered:
    """A kernel for a group around one attention; `strides` are those of inputs whose type does not tell them."""
    return _Group(graph, core, name, strides or {}, tiling).lower()


class _Group:
    """One group while it is lowered."""

    def __init__(
        self, graph: Graph, core: Core, name: str, strides: Mapping[str, tuple[int, ...]], tiling: AttentionTiling | None
    ) -> None:
        self.graph, self.core, self.tiling = graph, core, tiling
        self.job = _asked(graph)
        self.where = str(self.job.node.loc)
        self.builder = KernelBuilder(name, self.job.node.loc)
        self.memory = Memory(self.builder, graph, strides)
        self.makers: dict[str, tuple[Node, int]] = {v.name: (n, i) for n in graph.nodes for i, v in enumerate(n.outs)}
        self.sources = {v.name for v in sources(graph)}

    def lower(self) -> Lowered:
        asked = self.job
        shapes = [_four(shape_of(x)) for x in (asked.q, asked.k, asked.v)]
        if asked.turned:
            shapes[1] = (*shapes[1][:2], shapes[1][3], shapes[1][2])
        (batch, heads, queries, width), (_, kv_heads, keys, _), (*_, value_width) = shapes
        self.check(shapes, heads, kv_heads)
        assert isinstance(heads, int) and isinstance(kv_heads, int)
        assert isinstance(width, int) and isinstance(value_width, int)
        shared = heads // kv_heads if kv_heads else 1
        k = self.walked(asked.k, shared)
        if asked.turned:
            k = replace(k, dims=tuple(Along(d.offset, (*d.steps[:2], d.steps[3], d.steps[2])) for d in k.dims))
        if width == 1:
            k = _one_wide(k)
        job = Attention(
            q=self.view(asked.q),
            k=k,
            v=self.view(asked.v, shared),
            out=self.output(),
            batch=batch,
            heads=heads,
            queries=queries,
            keys=keys,
            width=width,
            value_width=value_width,
            scale=1 / math.sqrt(width) if asked.scale is None else asked.scale,
            causal=asked.causal,
            mask=self.mask((batch, heads, queries, keys)),
            empty_is_nan=asked.empty_is_nan,
            nan_is_zero=asked.nan_is_zero,
        )
        self.neighbours(job.k, asked.k, only=(2,))
        attend(self.builder, job, self.tiling or choose(self.core, width))
        return self.memory.finish(self.builder.finish())

    def check(self, shapes: list[tuple[Dim, Dim, Dim, Dim]], heads: Dim, kv_heads: Dim) -> None:
        """Whether the kernel can do what torch would."""
        q, k, v = shapes
        where = self.where
        dtype = tensor_type(self.job.q).dtype
        for x in (self.job.q, self.job.k, self.job.v):
            if tensor_type(x).dtype is not dtype or dtype not in (DType.F32, *HALVES):
                raise CannotLower(f"attention whose operand %{x.name} is {tensor_type(x).dtype.value}", where=where)
        if not all(isinstance(w, int) and 0 < w <= MAX_WIDTH for w in (q[3], v[3])):
            raise CannotLower(f"heads of width {q[3]} and {v[3]}", where=where)
        if not isinstance(heads, int) or not isinstance(kv_heads, int):
            raise CannotLower("the number of heads is known only at run time", where=where)
        grouped = self.job.grouped
        if (heads != kv_heads and not (grouped and kv_heads and heads % kv_heads == 0)) or v[1] != kv_heads:
            raise CannotLower(f"{heads} query heads meet {kv_heads} and {v[1]}", where=where)
        agree = same(q[0], k[0]) and same(q[0], v[0]) and same(k[2], v[2]) and same(q[3], k[3])
        if not agree or len({len(shape_of(x)) for x in (self.job.q, self.job.k, self.job.v)}) != 1:
            raise CannotLower("attention whose operands do not have one batch", where=where)

    # -- views

    def view(self, value: Value, shared: int = 1) -> Rows:
        """A tensor of [batch, head, row, element] as steps through the memory it comes from."""
        rows = self.walked(value, shared)
        self.neighbours(rows, value)
        if shape_of(value)[-1] == 1:
            return _one_wide(rows)
        axis, step = rows.walk(3)
        if axis < 0 or step != 1 or rows.buffer.stride[axis] != 1:
            raise CannotLower(f"the elements of a row of %{value.name} are not next to each other", where=self.where)
        return rows

    def neighbours(self, rows: Rows, value: Value, only: tuple[int, ...] = (2, 3)) -> None:
        """Each counter must move along one dim of the buffer."""
        if any(sum(d.steps[c] != 0 for d in rows.dims) > 1 for c in only):
            raise CannotLower(f"%{value.name} is not a strided view", where=self.where)

    def walked(self, value: Value, shared: int = 1) -> Rows:
        shape = shape_of(value)
        space, repeated = Space.of(shape), 1
        rank = len(shape_of(self.job.node.outs[0]))
        head = len(shape) - 3 if rank == 4 else -1
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
        dims: list[Along] = []
        for offset, terms in _by_dim(place, position):
            if terms.pop(extra, 0) != 0 or not terms.keys() <= set(range(len(shape))):
                raise CannotLower(f"%{value.name} is not a strided view", where=self.where)
            steps = tuple(terms.get(i, 0) for i in range(len(shape) - rank, len(shape)))  # missing leading dims: no step
            dims.append(Along(offset, _four(steps, absent=0)))
        return Rows(place.buffer, tuple(dims), shared * repeated)

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

    def output(self) -> Rows:
        """Where the elements of attention's result lie in the group's output."""
        outs = list(dict.fromkeys(output_values(self.graph)))
        if len(outs) != 1:
            raise CannotLower(f"attention with {len(outs)} outputs", where=self.where)
        out, made = outs[0], self.job.node.outs[0]
        shape = shape_of(out)
        space = Space.of(shape)
        for _ in range(8):
            try:
                value, position = out, tuple(space.root(i) for i in range(len(shape)))
                while value.name != made.name:
                    node, index = self.makers.get(value.name) or (self.job.node, 0)
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

    def placed(self, out: Value, position: Position, space: Space) -> Rows:
        """Each dim of attention's result must be a counter of the output's own, so that every element has one place."""
        place = self.memory.output(out)
        stride: dict[int, Dim] = {}
        for at, step in enumerate(place.strides):
            for counter, coef in space.root(at).terms:
                stride[counter] = mul(coef, step)
        result_shape = shape_of(self.job.node.outs[0])
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
        steps = _four(tuple(found), absent=0)
        live = {k for k, n in enumerate(space.extents) if n != 1}
        full = all(same(space.extents[c.terms[0][0]], n) for c, n in zip(position, result_shape, strict=True) if c.terms)
        if len(used) != len(set(used)) or set(used) != live or not full or steps[3] != 1:
            raise CannotLower("attention's result does not fit its output", where=self.where)
        return Rows(place.buffer, (Along(0, steps),))

    def mask(self, shape: tuple[Dim, Dim, Dim, Dim]) -> Mask | None:
        value = self.job.mask
        if value is None:
            return None
        where = self.where
        if tensor_type(value).dtype not in (DType.BOOL, DType.F32, *HALVES):
            raise CannotLower(f"attention with a mask of {tensor_type(value).dtype.value}", where=where)
        if self.job.causal:
            raise CannotLower("attention with a mask, and causal as well", where=where)
        given = shape_of(value)
        rank = len(shape_of(self.job.node.outs[0]))
        if len(given) > rank:
            raise CannotLower(f"a mask of {len(given)} dims", where=where)
        full = shape if rank == 4 else (shape[0], *shape[2:])[-rank:]
        for n, whole in zip(reversed(given), reversed(full), strict=False):
            if n != 1 and not same(n, whole):
                raise CannotLower(f"whether a mask's dim of {n} is repeated to {whole} is not known", where=where)
        rows = self.walked(value)
        return Mask(rows, per_query=rows.walk(2)[0] >= 0, hides=self.job.hides)


@dataclass(frozen=True, slots=True)
class _Asked:
    """An attention of either kind: one node, or spelled out."""

    node: Node
    """The one that gives the result."""
    q: Value
    k: Value
    v: Value
    turned: bool
    """Whether k is [..., element, key]."""
    scale: float | None
    mask: Value | None = None
    hides: bool = False
    causal: bool = False
    grouped: bool = False
    empty_is_nan: bool = False
    nan_is_zero: bool = False


def _asked(graph: Graph) -> _Asked:
    """What a group's attention is to compute."""
    spelled = written(graph)
    whole = [n for n in graph.nodes if packet(n.op) == OP]
    if len(spelled) + len(whole) != 1:
        raise CannotLower(f"a group with {len(spelled) + len(whole)} attentions")
    if spelled:
        (w,) = spelled
        last = graph.nodes[w.nodes[-1]]
        return _Asked(last, w.q, w.k, w.v, turned=True, scale=w.scale, mask=w.mask, hides=w.hides,
                      empty_is_nan=w.empty_is_nan, nan_is_zero=not w.empty_is_nan)  # fmt: skip
    (node,) = whole
    where = str(node.loc)
    scale = argument(node, "scale")
    if argument(node, "dropout_p", 0.0) not in (0, 0.0):
        raise CannotLower("attention with dropout", where=where)
    if not (scale is None or isinstance(scale, int | float)):
        raise CannotLower("attention whose scale is known only at run time", where=where)
    q, k, v, mask = (argument(node, n) for n in ("query", "key", "value", "attn_mask"))
    if not (isinstance(q, Value) and isinstance(k, Value) and isinstance(v, Value)):
        raise CannotLower("attention whose operands are not tensors", where=where)
    if not (mask is None or isinstance(mask, Value)):
        raise CannotLower("attention whose mask is not a tensor", where=where)
    causal, grouped = (bool(argument(node, n, False)) for n in ("is_causal", "enable_gqa"))
    return _Asked(node, q, k, v, turned=False, scale=None if scale is None else float(scale), mask=mask,
                  causal=causal, grouped=grouped)  # fmt: skip


def _one_wide(rows: Rows) -> Rows:
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


def _four(shape: tuple[Dim, ...], absent: Dim = 1) -> tuple[Dim, Dim, Dim, Dim]:
    """[batch, head, row, element]; three dims are a batch of single heads."""
    match shape:
        case (row, element):
            return absent, absent, row, element
        case (batch, row, element):
            return batch, absent, row, element
        case (batch, head, row, element):
            return batch, head, row, element
        case _:
            raise CannotLower(f"attention over {len(shape)} dims")


def _by_dim(place: Place, position: Position) -> list[tuple[Dim, dict[int, Dim]]]:
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
