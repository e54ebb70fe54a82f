"""Attention of a step on a device: by its parts in library plans, the same values, and only where every call has other keys."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hotfuse.backends.library import meaning
from hotfuse.backends.step_attention import ATTENTION, is_step, step_attention
from hotfuse.ir.graph import Graph
from hotfuse.ir.text import parse


def graph_with(queries: str = "1", keys: str = "n", device: str = "@cuda:0", masked: bool = True) -> Graph:
    q, k = f"f16[1, 4, {queries}, 8]{device}", f"f16[1, 4, {keys}, 8]{device}"
    mask = f", %m: bool[1, 1, 1, {keys}]{device}" if masked else ""
    return parse(f"""graph main(%q: {q}, %k: {k}, %v: {k}{mask}) {{
      %y: {q} = {ATTENTION}(%q, %k, %v{", %m" if masked else ""})
      return %y
    }}""")


def test_steps_of_a_generation_on_a_device_alone() -> None:
    (step,) = graph_with().nodes
    assert meaning(step) == (step_attention, False)
    for other in (graph_with(device=""), graph_with(queries="n"), graph_with(keys="7"), graph_with(masked=False)):
        (node,) = other.nodes
        assert not is_step(node) and meaning(node)[0] is not step_attention


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows, past, groups, boolean", [(1, 1, 1, True), (1, 17, 2, True), (3, 64, 1, False), (1, 300, 4, False)])
def test_the_same_values(dtype: torch.dtype, rows: int, past: int, groups: int, boolean: bool) -> None:
    q = torch.randn(2, 4, rows, 16, dtype=dtype)
    k, v = (torch.randn(2, 4 // groups, past, 16, dtype=dtype) for _ in range(2))
    mask = torch.rand(2, 1, rows, past) > 0.3
    mask[..., 0] = True  # every query has a key
    mask[0, :, 0] &= past == 1  # but one, where there are several keys
    given = mask if boolean else torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, float("-inf"))
    got = step_attention(q, k, v, given, 0.0, False, scale=0.3, enable_gqa=groups > 1)
    wide = [t.double().repeat_interleave(groups, 1) for t in (k, v)]
    want = F.scaled_dot_product_attention(q.double(), *wide, attn_mask=mask, scale=0.3)
    assert got.dtype is dtype and got.shape == want.shape
    allowed = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    assert float((got.double() - want).abs().max() / want.abs().max()) < allowed
    nothing = F.scaled_dot_product_attention(q, *[t.repeat_interleave(groups, 1) for t in (k, v)], attn_mask=mask)[0, :, 0]
    assert torch.equal(got[0, :, 0], nothing) if past > 1 else got.isfinite().all()
    assert step_attention(q[:0], k[:0], v[:0], given[:0], enable_gqa=groups > 1).shape == (0, 4, rows, 16)
