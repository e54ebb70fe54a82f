"""Attention by sequence over a cache, where lengths are at hand, against sums in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper

from hotfuse import InferenceSession, Settings
from hotfuse.frontends.onnx.domains import cached_attention, microsoft_attention
from hotfuse.frontends.onnx.domains.cached_attention import attend_by_sequence, grown

SHAPES = [
    (1, 9, [8, 8]), (1, 9, [8, 3]), (1, 12, [5, 0]), (1, 1, [0, 0]), (4, 9, [5, 5]), (4, 12, [3, 8]), (4, 4, [0, 0]),
    (4, 9, [0, 0]),
]  # fmt: skip


def _by_hand(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, before: list[int], scale: float, window: int, softcap: float
) -> torch.Tensor:
    batch, heads, steps, _ = q.shape
    y = torch.zeros(batch, steps, heads, v.shape[3], dtype=torch.float64)
    for b, h, s in np.ndindex(batch, heads, steps):
        group = h // (heads // k.shape[1])
        last = before[b] + s + 1
        first = max(0, last - window) if window else 0
        scores = k[b, group, first:last].double() @ q[b, h, s].double() * scale
        if softcap:
            scores = torch.tanh(scores / softcap) * softcap
        y[b, s, h] = torch.softmax(scores, 0) @ v[b, group, first:last].double()
    return y.flatten(2)


@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("window", [0, 1, 4, 50])
@pytest.mark.parametrize(("steps", "length", "before"), SHAPES)
def test_each_sequence_attends_to_its_own_keys(
    steps: int, length: int, before: list[int], window: int, softcap: float
) -> None:
    q, new_k, new_v = (torch.randn(2, heads, steps, size) for heads, size in ((6, 8), (2, 8), (2, 5)))
    past_k, past_v = (torch.full((2, 2, max(before), size), torch.nan) for size in (8, 5))
    for b, n in enumerate(before):  # what is behind a sequence's end is nobody's business
        past_k[b, :, :n], past_v[b, :, :n] = torch.randn(2, n, 8), torch.randn(2, n, 5)
    k, v = grown(past_k, new_k, before, length), grown(past_v, new_v, before, length)
    for b, n in enumerate(before):
        assert torch.equal(k[b, :, :n], past_k[b, :, :n])
        assert torch.equal(k[b, :, n : n + steps], new_k[b])
        assert not k[b, :, n + steps :].any()
    got = attend_by_sequence(q, k, v, before, scale=0.3, window=window, softcap=softcap)
    want = _by_hand(q, k, v, before, 0.3, window, softcap)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


def test_lengths_that_are_data_are_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is told the total as data computes no keys behind a sequence's end."""
    seen: list[list[int]] = []

    def counted(*args: torch.Tensor, **kw: float) -> torch.Tensor:
        seen.append(list(args[3]))  # type: ignore[arg-type]
        return cached_attention.attend_by_sequence(*args, **kw)  # type: ignore[arg-type]

    monkeypatch.setattr(microsoft_attention, "attend_by_sequence", counted)
    floats = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in ("q", "k", "v", "pk", "pv")]
    ints = [helper.make_tensor_value_info(n, TensorProto.INT32, None) for n in ("lens", "total")]
    outs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in ("y", "nk", "nv")]
    node = helper.make_node("GroupQueryAttention", [i.name for i in (*floats, *ints)], [o.name for o in outs],
                            domain="com.microsoft", num_heads=4, kv_num_heads=2)  # fmt: skip
    model = helper.make_model(
        helper.make_graph([node], "g", [*floats, *ints], outs), ir_version=8,
        opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)],
    )  # fmt: skip
    feeds = {n: np.random.default_rng(0).standard_normal(s).astype(np.float32) for n, s in (
        ("q", (2, 1, 32)), ("k", (2, 1, 16)), ("v", (2, 1, 16)), ("pk", (2, 2, 6, 8)), ("pv", (2, 2, 6, 8)))}  # fmt: skip
    feeds |= {"lens": np.array([6, 2], np.int32), "total": np.array([7], np.int32)}
    with InferenceSession(model.SerializeToString(), settings=Settings(capture="off")) as session:
        y, keys, _ = session.run(None, feeds)
    assert seen == [[6, 2]]
    assert y.shape == (2, 1, 32)
    assert not keys[1, :, 3:].any()
