"""Attention over sequences that lie one behind the other, without padding between them.

    q, k, v [tokens, heads * width],  sequence i: rows offsets[i] to offsets[i + 1]

A kernel does one sequence: `begin` and `length` are sizes of the call, so one kernel serves sequences of every length, and what is
not there is neither read nor computed. `sequences` gives the calls for a batch's offsets, the longest first.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from hotfuse.base.errors import InputError
from hotfuse.ir.types import DType
from hotfuse.lower.attention_data import Along, Attention, Rows
from hotfuse.lower.attention_kernel import attend
from hotfuse.lower.attention_tiling import AttentionTiling, choose
from hotfuse.lower.errors import CannotLower
from hotfuse.lower.tiling import Core
from hotfuse.tile.build import KernelBuilder
from hotfuse.tile.program import Buffer, Kernel

SIZES = ("tokens", "begin", "length")
"""The kernel's sizes, in order."""


@dataclass(frozen=True, slots=True)
class Packed:
    """Heads of a packed batch."""

    heads: int
    width: int
    kv_heads: int | None = None
    """Heads of K and V, where they are fewer."""
    value_width: int | None = None
    scale: float | None = None
    causal: bool = False
    one_projection: bool = False
    """Whether Q, K and V stand next to each other in every row of one buffer `qkv`, rather than in three."""


def lower_packed(job: Packed, core: Core, *, name: str = "packed_attention", tiling: AttentionTiling | None = None) -> Kernel:
    """The kernel: buffers q, k, v (or qkv) and out, sizes as in `SIZES`."""
    kv_heads, value_width = job.kv_heads or job.heads, job.value_width or job.width
    if job.heads % kv_heads or job.width % 8 or value_width % 8:
        raise CannotLower(f"{job.heads} heads of {job.width} meet {kv_heads} of {value_width}")
    b = KernelBuilder(name)
    tokens, begin, length = (b.size(n) for n in SIZES)
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
        first=begin,
    )
    attend(b, attention, tiling or choose(core, job.width))
    return b.finish()


def _rows(buffer: Buffer, start: int, width: int, shared: int = 1) -> Rows:
    """Heads side by side in a token's row."""
    return Rows(buffer, (Along(0, (0, 0, 1, 0)), Along(start, (0, width, 0, 1))), shared)


def sequences(offsets: Sequence[int]) -> list[tuple[int, int]]:
    """(begin, length) of every sequence that has tokens, the longest first, so that no thread is left with it at the end."""
    if not offsets or offsets[0] < 0 or any(b < a for a, b in itertools.pairwise(offsets)):
        raise InputError("the offsets of packed sequences do not ascend", because=f"they are {list(offsets)[:8]}")
    found = [(a, b - a) for a, b in itertools.pairwise(offsets) if b > a]
    return sorted(found, key=lambda s: -s[1])
