"""Attention over sequences that lie one behind the other, without padding between them, as one kernel.

    checked = offsets, each between the one before and the last row        anything else is a fault of the call
    rows of no sequence = 0
    parallel (head, sequence)
      for panel of queries                                                 as in `attention_kernel`

What is not there is neither read nor computed. Where sequences begin and how long they are is data: the kernel reads offsets,
limits them to what exists, and counts its loops by them (`given`), so one kernel serves every batch. A fault is answered by the
model's own code, which says what is wrong with the offsets. Views before and after are steps through memory, as for any attention.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

from hotfuse.analysis.attention import PACKED
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.dims import Dim, expr
from hotfuse.ir.graph import Graph, Node, Value
from hotfuse.ir.types import DType
from hotfuse.lower.common.algebra import same
from hotfuse.lower.common.errors import CannotLower
from hotfuse.lower.common.lowered import KernelBuffers, Lowered, tensor_type
from hotfuse.lower.cpu.attention.attention_job import F32, HALVES, MAX_WIDTH, Attention, AttentionView, Band, Mask
from hotfuse.lower.cpu.attention.attention_kernel import Panel, apart
from hotfuse.lower.cpu.attention.operand_views import Four, Views, one_wide
from hotfuse.lower.cpu.attention.tiling import AttentionTiling, choose
from hotfuse.lower.cpu.tiling import Core
from hotfuse.lower.ops.views import shape_of
from hotfuse.ops.schema import argument
from hotfuse.ops.table import packet
from hotfuse.tile.build import KernelBuilder, remaining
from hotfuse.tile.program import Buffer

_OFFSETS = (DType.I32, DType.I64)


def lower_packed(
    graph: Graph,
    core: Core,
    *,
    name: str = "packed_attention",
    strides: Mapping[str, tuple[int, ...]] | None = None,
    tiling: AttentionTiling | None = None,
) -> Lowered:
    """A kernel for a group around one packed attention; `strides` are those of inputs whose type does not tell them."""
    asked = _asked(graph)
    builder = KernelBuilder(name, asked.node.loc)
    memory = KernelBuffers(builder, graph, strides or {})
    _write(asked, builder, memory, Views(graph, memory, asked.node, _four), tiling or choose(core, asked.width))
    return memory.finish(builder.finish())


@dataclass(frozen=True, slots=True)
class _PackedAttention:
    """What a group's attention is to compute."""

    node: Node
    q: Value
    k: Value
    v: Value
    offsets: Value
    offsets_k: Value
    heads: int
    kv_heads: int
    width: int
    value_width: int
    scale: float
    left: int
    right: int
    bias: Value | None
    """[tokens, heads, keys]: added to the scores."""


@dataclass(frozen=True, slots=True)
class _Sequences:
    """Where sequences lie, in memory of the kernel's own."""

    begins: Buffer
    lengths: Buffer
    """Of the sequence that ends at each offset; the first is what lies before all of them."""
    rows: Dim
    """The most that either can be."""


def _write(asked: _PackedAttention, b: KernelBuilder, memory: KernelBuffers, views: Views, tiling: AttentionTiling) -> None:
    (queries, *_), (keys, *_), (count,) = (shape_of(x) for x in (asked.q, asked.k, asked.offsets))
    shared = asked.heads // asked.kv_heads
    q, v, out = views.view(asked.q), views.view(asked.v, shared), views.output()
    k = views.walked(asked.k, shared)
    k = one_wide(k) if asked.width == 1 else k
    views.neighbours(k, asked.k, only=(2,))
    bias = None if asked.bias is None else Mask(views.view(asked.bias), per_query=True)
    longest = None if asked.bias is None else shape_of(asked.bias)[2]
    alone = asked.offsets_k == asked.offsets
    if not isinstance(count, int):
        b.effect("require", b.map("ne", b.index(expr("<", 0, count)), 0))  # no offsets at all is none of a first row
    with _if(b, count):
        rows = queries if not alone or same(queries, keys) else expr("min", queries, keys)
        of_q = _checked(b, memory, asked.offsets, count, rows, "", longest if alone else None)
        of_k = of_q if alone else _checked(b, memory, asked.offsets_k, count, keys, "_k", longest)
        with b.given("before", of_q.begins, (0,), 0, expr("+", rows, 1)) as before:
            _zero(b, asked, out, tiling.lanes, 0, before)
        with b.given("behind", of_q.begins, (expr("+", count, -1),), 0, expr("+", rows, 1)) as behind:
            _zero(b, asked, out, tiling.lanes, behind, queries)
        # All sequences of a head, then the next head: threads that share heads evenly share the work evenly.
        sequences = expr("+", count, -1)
        with b.parallel("task", expr("*", asked.heads, sequences)) as task:
            head, sequence = apart(task.var, sequences)
            with _one(b, of_q, sequence, "") as (first, length), (
                nullcontext((first, length)) if alone else _one(b, of_k, sequence, "_k")
            ) as (first_key, length_k):
                job = Attention(
                    q=q, k=k, v=v, out=out, batch=1, heads=asked.heads, queries=length, keys=length_k, width=asked.width,
                    value_width=asked.value_width, scale=asked.scale, first=first, first_key=first_key, most_keys=keys,
                    band=_band(asked, remaining(length_k, length)), mask=bias,
                )  # fmt: skip
                with b.loop("first", 0, length, tiling.panel) as panel:
                    Panel(b, job, tiling, 0, head, panel.var).write()


def _if(b: KernelBuilder, count: Dim) -> AbstractContextManager[None]:
    return nullcontext() if isinstance(count, int) else b.when(expr("<", 0, count))


def _band(asked: _PackedAttention, shift: Dim) -> Band | None:
    """The window around a query's place: the last query stands at the last key."""
    if asked.left < 0 and asked.right < 0:
        return None
    return Band(None if asked.left < 0 else asked.left, None if asked.right < 0 else asked.right, shift)


def _checked(
    b: KernelBuilder, memory: KernelBuffers, offsets: Value, count: Dim, rows: Dim, suffix: str, longest: Dim | None
) -> _Sequences:
    """Offsets that ascend within the rows, by at most `longest`; others are the one before them, and a fault."""
    i64 = DType.I64
    begins, lengths = (b.shared(f"{n}{suffix}", i64, (count,)) for n in ("begins", "lengths"))
    place = memory.place(offsets)
    with b.loop("offset", 0, count, carry=[b.fill(0, i64)]) as i:
        (before,) = i.carried
        at = b.cast(b.load(place.buffer, (i.var,)), i64)
        fits = b.map("and", b.map("le", before, at), b.map("le", at, b.index(rows)))
        if longest is not None:
            fits = b.map("and", fits, b.map("le", b.map("sub", at, before), b.index(longest)))
        b.effect("require", fits)
        at = b.map("select", fits, at, before)
        b.store(begins, (i.var,), at)
        b.store(lengths, (i.var,), b.map("sub", at, before))
        i.yields(at)
    return _Sequences(begins, lengths, rows)


@contextmanager
def _one(b: KernelBuilder, of: _Sequences, sequence: Dim, suffix: str) -> Generator[tuple[Dim, Dim]]:
    """A sequence's first row and its length, as numbers to count by."""
    most = expr("+", of.rows, 1)
    with (
        b.given(f"begin{suffix}", of.begins, (sequence,), 0, most) as begin,
        b.given(f"length{suffix}", of.lengths, (expr("+", sequence, 1),), 0, most) as length,
    ):
        yield begin, length


def _zero(b: KernelBuilder, asked: _PackedAttention, out: AttentionView, lanes: int, lo: Dim, hi: Dim) -> None:
    """Rows of no sequence."""
    with b.loop("row", lo, hi) as row, b.loop("head", 0, asked.heads) as head, b.loop("c", 0, asked.value_width, lanes) as c:
        left = (None, remaining(asked.value_width, c.var))
        out.write(b, (0, head.var, row.var, c.var), b.fill(0.0, F32, (1, lanes)), left)


def _asked(graph: Graph) -> _PackedAttention:
    """The one packed attention of a group, if a kernel can do what it asks."""
    found = [n for n in graph.nodes if packet(n.op) == PACKED]
    if len(found) != 1:
        raise CannotLower(f"a group with {len(found)} packed attentions")
    (node,) = found
    where = str(node.loc)
    q, k, v, offsets = (_tensor(node, n) for n in ("query", "key", "value", "offsets"))
    offsets_k = offsets if argument(node, "offsets_k") is None else _tensor(node, "offsets_k")
    scale, left, right = argument(node, "scale"), argument(node, "left", -1), argument(node, "right", -1)
    if not (isinstance(left, int) and isinstance(right, int) and (scale is None or isinstance(scale, int | float))):
        raise CannotLower("packed attention whose scale or window is known only at run time", where=where)
    dtype = tensor_type(q).dtype
    if dtype not in (F32, *HALVES) or any(tensor_type(x).dtype is not dtype for x in (k, v)):
        raise CannotLower(f"packed attention of {dtype.value}", where=where)
    if any(tensor_type(x).dtype not in _OFFSETS for x in (offsets, offsets_k)):
        raise CannotLower(f"packed attention whose offsets are {tensor_type(offsets).dtype.value}", where=where)
    (_, heads, width), (_, kv_heads, _), (*_, value_width) = (shape_of(x) for x in (q, k, v))
    if not (isinstance(heads, int) and isinstance(kv_heads, int) and isinstance(width, int) and isinstance(value_width, int)):
        raise CannotLower("packed attention whose heads are known only at run time", where=where)
    if not heads or not kv_heads or not 0 < width <= MAX_WIDTH or not 0 < value_width <= MAX_WIDTH:
        raise CannotLower(f"{heads} heads of {width} meet {kv_heads} of {value_width}", where=where)
    if shape_of(offsets) == (0,):
        raise CannotLower("packed attention without offsets", where=where)
    bias = None if argument(node, "bias") is None else _tensor(node, "bias")
    if bias is not None and tensor_type(bias).dtype is not dtype:
        raise CannotLower(f"packed attention whose bias is {tensor_type(bias).dtype.value}", where=where)
    factor = 1 / math.sqrt(width) if scale is None else float(scale)
    return _PackedAttention(node, q, k, v, offsets, offsets_k, heads, kv_heads, width, value_width, factor, left, right, bias)


def _tensor(node: Node, name: str) -> Value:
    value = argument(node, name)
    if not isinstance(value, Value):
        raise CannotLower(f"packed attention whose {name} is no tensor", where=str(node.loc))
    return value


def _four(dims: tuple[Dim, ...], absent: Dim) -> Four:
    """[row, head, element] in the order of a kernel."""
    row, head, element = dims
    return absent, head, row, element
