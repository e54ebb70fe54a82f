"""Grouped queries over a cache in native code, where the operator runs by itself: lengths are numbers there.

With torch's kernels a step of one row was some 60 calls, of which the products are six. Here the cache grows, heads are rotated
and rows attend in one call (decision 530 has figures).
"""

from __future__ import annotations

import functools
import math
from array import array

import torch
from torch import Tensor

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.frontends.onnx.native_floats.call_scratch import room
from hotfuse.frontends.onnx.packed_weights import usable
from hotfuse.native.float_layers.grouped_queries_code import GROUPED_FIELDS, HEIGHTS
from hotfuse.native.float_layers.layer_code import background_layers
from hotfuse.native.float_layers.word_table import WordTable

SMALL_WORK = 1 << 21
"""Multiplications that one thread is through with before a team of the library's is faster."""
MANY_STEPS = 1024
"""New rows up to which it was seen to be faster than the library's blocked products: 2.3 times at the end."""
KEPT_TABLES = 256
"""Kinds of nodes whose tables are kept."""


@dataclass(frozen=True, slots=True)
class GroupedQueries:
    """A node's attributes: `groups` heads of keys; a window of 0 is none, a scale of 0 the usual one."""

    heads: int
    groups: int
    rotated: bool
    interleaved: bool
    window: int
    scale: float
    softcap: float


def native_grouped_queries(
    node: GroupedQueries, q: Tensor, k: Tensor | None, v: Tensor | None, past_k: Tensor | None, past_v: Tensor | None, lens: Tensor,
    total: Tensor, cos: Tensor | None, sin: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor] | None:  # fmt: skip
    """What the node gives; None where the code is not there, or not made for such arguments: others say what is wrong with them."""
    native = background_layers.layers
    if native is None:
        background_layers.begin()
        return None
    if q.dim() != 3 or not q.numel() or not usable(q):
        return None
    (batch, steps, wide), heads, groups = q.shape, node.heads, node.groups
    parts = heads if k is not None and v is not None else heads + 2 * groups
    size = wide // parts
    if size % native.target.lanes or size * parts != wide or heads % groups or lens.shape not in ((batch,), (batch, 1)):
        return None
    if parts == heads and not _fit(k, v, (batch, steps, groups * size)):
        return None
    past = 0 if past_k is None or past_k.dim() != 4 else past_k.shape[2]
    if not _fit(past_k, past_v, (batch, groups, past, size)) and not (past_k is None and past_v is None):
        return None
    whole = int(total) if total.numel() == 1 else -1
    length = past + steps if whole == past + steps else past
    before = [0] * batch if whole == steps else [n + 1 - steps for n in lens.flatten().tolist()]
    longest = max(before)
    if not 0 < whole <= length or min(before) < 0 or longest > past or longest + steps > length:
        return None
    half = 0
    if node.rotated:
        if cos is None or cos.dim() != 2 or not _fit(cos, sin, tuple(cos.shape)) or longest + steps > cos.shape[0]:
            return None
        half = cos.shape[1]
    if steps > MANY_STEPS or 2 * half > size or (_work(node, q, length) > SMALL_WORK and torch.get_num_threads() > 1):
        return None
    table = _table(node, size, half, wide, groups * size if parts == heads else wide)
    held = [None if t is None else t.contiguous() for t in (q, k, v, past_k, past_v, cos if half else None, sin if half else None)]
    at_q, at_k, at_v, at_past_k, at_past_v, at_cos, at_sin = (0 if t is None else t.data_ptr() for t in held)
    if parts != heads:
        at_k, at_v = (at_q + 4 * size * n for n in (heads, heads + groups))
    kept = (batch, groups, length, size), (groups * length * size, length * size, size, 1)
    keys, values = q.new_empty_strided(*kept), q.new_empty_strided(*kept)
    y = q.new_empty_strided((batch, steps, heads * size), (steps * heads * size, heads * size, 1))
    starts, scratch = array("q", before), room(4 * HEIGHTS[0] * (2 * size + length + native.target.lanes))
    native.grouped_queries(
        at_q, at_k, at_v, at_past_k, at_past_v, keys.data_ptr(), values.data_ptr(), y.data_ptr(), starts.buffer_info()[0], at_cos,
        at_sin, scratch.data_ptr(), table.address, batch, steps, past, length, node.scale or 1.0 / math.sqrt(size), node.softcap,
    )  # fmt: skip
    return y, keys, values


def _fit(a: Tensor | None, b: Tensor | None, shape: tuple[int, ...]) -> bool:
    return (
        a is not None and b is not None and a.shape == shape and b.shape == shape and a.dtype is torch.float32
        and b.dtype is torch.float32
    )  # fmt: skip


def _work(node: GroupedQueries, q: Tensor, length: int) -> int:
    return 2 * q.numel() * min(length, node.window or length)


@functools.lru_cache(KEPT_TABLES)
def _table(node: GroupedQueries, size: int, half: int, q_step: int, kv_step: int) -> WordTable:
    return WordTable(
        GROUPED_FIELDS, heads=node.heads, groups=node.groups, size=size, half=half, interleaved=int(node.interleaved),
        window=node.window, q_step=q_step, kv_step=kv_step,
    )  # fmt: skip
