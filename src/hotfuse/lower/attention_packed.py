"""Attention over sequences that lie one behind the other, without padding between them.

    q, k, v [tokens, heads * width],  sequence i: rows offsets[i] to offsets[i + 1]

What is not there is neither read nor computed. Where sequences begin and how long they are are sizes of the call, so one kernel
serves all batches of up to so many sequences; `sizes` gives them for a batch's offsets. Inside, a sequence's own numbers are
picked by its index: `begin0 * (i == 0) + begin1 * (i == 1) + ...`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from hotfuse.base.errors import InputError
from hotfuse.ir.dims import Dim, expr
from hotfuse.ir.types import DType
from hotfuse.lower.attention_data import MAX_WIDTH, Along, Attention, Rows
from hotfuse.lower.attention_kernel import Panel, apart
from hotfuse.lower.attention_tiling import AttentionTiling, choose
from hotfuse.lower.errors import CannotLower
from hotfuse.lower.tiling import Core
from hotfuse.tile.build import KernelBuilder
from hotfuse.tile.program import Buffer, Kernel


@dataclass(frozen=True, slots=True)
class Packed:
    """Heads of a packed batch."""

    heads: int
    width: int
    sequences: int
    """How many sequences a call may have."""
    kv_heads: int | None = None
    """Heads of K and V, where they are fewer."""
    value_width: int | None = None
    scale: float | None = None
    causal: bool = False
    one_projection: bool = False
    """Whether Q, K and V stand next to each other in every row of one buffer `qkv`, rather than in three."""


def lower_packed(job: Packed, core: Core, *, name: str = "packed_attention", tiling: AttentionTiling | None = None) -> Kernel:
    """The kernel: buffers q, k, v (or qkv) and out; `sizes` gives the numbers of a call."""
    kv_heads, value_width = job.kv_heads or job.heads, job.value_width or job.width
    if job.heads % kv_heads or job.width % 8 or value_width % 8 or max(job.width, value_width) > MAX_WIDTH:
        raise CannotLower(f"{job.heads} heads of {job.width} meet {kv_heads} of {value_width}")
    b = KernelBuilder(name)
    tokens = b.size("tokens")
    begins, lengths = ([b.size(f"{n}{i}") for i in range(job.sequences)] for n in ("begin", "length"))
    parts = {"q": job.heads * job.width, "k": kv_heads * job.width, "v": kv_heads * value_width}
    if job.one_projection:
        whole = b.input("qkv", DType.F32, (tokens, sum(parts.values())))
        buffers = dict.fromkeys(parts, whole)
        start = {"q": 0, "k": parts["q"], "v": parts["q"] + parts["k"]}
    else:
        buffers = {n: b.input(n, DType.F32, (tokens, width)) for n, width in parts.items()}
        start = dict.fromkeys(parts, 0)
    out = b.output("out", DType.F32, (tokens, job.heads * value_width))
    shared = job.heads // kv_heads
    tiling = tiling or choose(core, job.width)
    # All sequences of a head, then the next head: threads that share heads evenly share the work evenly.
    with b.parallel("task", job.heads * job.sequences) as task:
        head, sequence = apart(task.var, job.sequences)
        length = _picked(lengths, sequence)
        attention = Attention(
            q=_rows(buffers["q"], start["q"], job.width),
            k=_rows(buffers["k"], start["k"], job.width, shared),
            v=_rows(buffers["v"], start["v"], value_width, shared),
            out=_rows(out, 0, value_width),
            batch=1,
            heads=job.heads,
            queries=length,
            keys=length,
            width=job.width,
            value_width=value_width,
            scale=1 / math.sqrt(job.width) if job.scale is None else job.scale,
            causal=job.causal,
            first=_picked(begins, sequence),
            most_keys=expr("max", 0, *lengths),
        )
        with b.loop("first", 0, length, tiling.panel) as first:
            Panel(b, attention, tiling, 0, head, first.var).write()
    return b.finish()


def _picked(numbers: Sequence[Dim], index: Dim) -> Dim:
    """The number at an index."""
    if len(numbers) == 1:
        return numbers[0]
    return expr("+", *(expr("*", n, expr("==", index, i)) for i, n in enumerate(numbers)))


def _rows(buffer: Buffer, start: int, width: int, shared: int = 1) -> Rows:
    """Heads side by side in a token's row."""
    return Rows(buffer, (Along(0, (0, 0, 1, 0)), Along(start, (0, width, 0, 1))), shared)


def sizes(job: Packed, offsets: Sequence[int], tokens: int | None = None) -> list[int]:
    """The sizes of a call, in the kernel's order: the longest sequence first, then shorter ones, then empty ones."""
    ascend = bool(offsets) and offsets[0] >= 0 and all(a <= b for a, b in itertools.pairwise(offsets))
    if not ascend or (tokens is not None and offsets[-1] > tokens):
        raise InputError("the offsets of packed sequences do not ascend to the last token", because=f"they are {list(offsets)}")
    found = sorted(((b - a, a) for a, b in itertools.pairwise(offsets) if b > a), reverse=True)
    if len(found) > job.sequences:
        raise InputError(f"{len(found)} sequences are given to a kernel for {job.sequences}")
    found += [(0, 0)] * (job.sequences - len(found))
    return [offsets[-1] if tokens is None else tokens, *(a for _, a in found), *(n for n, _ in found)]
