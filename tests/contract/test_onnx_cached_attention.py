"""Attention by sequence over a cache, where lengths are at hand, against sums in float64."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper

from hotfuse import InferenceSession, Settings
from hotfuse.frontends.onnx.domains import cached_attention, microsoft_attention
from hotfuse.frontends.onnx.domains.cached_attention import attend_by_sequence, grown
from hotfuse.frontends.onnx.domains.microsoft_attention import group_query_attention
from hotfuse.frontends.onnx.native_floats.native_grouped_queries import native_grouped_queries
from hotfuse.frontends.onnx.onnx_program import NodeCtx
from hotfuse.machine.probe import usable_features
from hotfuse.native.float_layers import layer_code
from hotfuse.native.float_layers.layer_code import FloatLayers, background_layers, load_layers
from hotfuse.native.jit import Loaded
from hotfuse.native.target import host, level

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


LEVELS = ("avx512", "avx2")


@functools.cache
def _layers(name: str) -> tuple[FloatLayers, Loaded]:
    usable = set(usable_features())
    if not layer_code.supported(host()) or (name == "avx512" and "avx512f" not in usable):
        pytest.skip(f"this machine has no {name}")
    return load_layers(level(name, usable))


@pytest.fixture(params=LEVELS)
def native(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FloatLayers:
    found = _layers(request.param)[0]
    monkeypatch.setattr(background_layers, "layers", found)
    monkeypatch.setattr(background_layers, "begin", lambda: None)
    return found


NODES: list[tuple[str, dict[str, Any]]] = [
    ("plain", {}), ("rotated", {"do_rotary": 1}), ("neighbours", {"do_rotary": 1, "rotary_interleaved": 1}),
    ("a part of a head", {"do_rotary": 1, "part": 6}), ("window", {"local_window_size": 5}), ("softcap", {"softcap": 2.0}),
    ("scale", {"scale": 0.7}), ("packed", {"packed": True, "do_rotary": 1}), ("odd heads", {"heads": (5, 5)}),
    ("one key head", {"heads": (7, 1), "do_rotary": 1}),
]  # fmt: skip
CALLS = [
    (1, 40, 40, [40, 13]), (1, 40, 64, [40, 0]), (3, 33, 33, [33, 2]), (3, 5, 20, [5, 5]), (6, 0, 6, [0, 0]), (1, 0, 1, [0, 0]),
    (19, 7, 26, [7, 7]),
]  # fmt: skip
"""Steps, the longest past, how long the result is (more than both: a cache with room), and each sequence's past."""


@pytest.mark.parametrize("call", CALLS, ids=str)
@pytest.mark.parametrize("node", NODES, ids=[n for n, _ in NODES])
def test_native_code_gives_what_the_library_gives(
    native: FloatLayers, monkeypatch: pytest.MonkeyPatch, node: tuple[str, dict[str, Any]], call: tuple[int, int, int, list[int]]
) -> None:
    attrs = {"do_rotary": 0, **node[1]}
    (heads, groups), packed, part = attrs.pop("heads", (6, 2)), attrs.pop("packed", False), attrs.pop("part", 16)
    (steps, longest, length, before), size = call, 32
    room = length if length > longest + steps else longest
    make = torch.Generator().manual_seed(3)

    def floats(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=make)

    widths = [(heads + 2 * groups) * size] if packed else [heads * size, groups * size, groups * size]
    given: list[torch.Tensor | None] = [floats(2, steps, w) for w in widths] + [None] * (3 - len(widths))
    for _ in range(2):  # what is behind a sequence's end is nobody's business
        cache = torch.full((2, groups, room, size), torch.nan)
        for b, n in enumerate(before):
            cache[b, :, :n] = floats(groups, n, size)
        given.append(cache)
    total = steps if not longest else longest + steps
    given += [torch.tensor(before, dtype=torch.int32) + steps - 1, torch.tensor(total, dtype=torch.int32)]
    given += [floats(80, part), floats(80, part)]
    ctx = NodeCtx(1, 3)
    seen: list[bool] = []

    def entered(*args: Any) -> Any:
        made = native_grouped_queries(*args)
        seen.append(made is not None)
        return made

    monkeypatch.setattr(microsoft_attention, "native_grouped_queries", entered)
    run = functools.partial(group_query_attention, ctx, num_heads=heads, kv_num_heads=groups, **attrs)
    got = run(*given)
    monkeypatch.setattr(background_layers, "layers", None)
    want = run(*[None if t is None else t.double() if t.is_floating_point() else t for t in given])
    assert seen == [True, False]
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape
        torch.testing.assert_close(a.double(), b, rtol=2e-5, atol=2e-5)


def test_native_code_leaves_what_does_not_fit(native: FloatLayers) -> None:
    """Lengths outside of the cache are an error as before, heads that are no whole vectors and float64 are the library's."""
    ctx = NodeCtx(1, 3)
    q, kv, past = torch.randn(1, 1, 64), torch.randn(1, 1, 32), torch.randn(1, 1, 4, 32)
    total = torch.tensor(5)
    run = functools.partial(group_query_attention, ctx, num_heads=2, kv_num_heads=1)
    assert run(q, kv, kv, past, past, torch.tensor([4]), total)[1].shape == (1, 1, 5, 32)
    for lens in (torch.tensor([5]), torch.tensor([-1])):
        with pytest.raises((IndexError, RuntimeError)):
            run(q, kv, kv, past, past, lens, total)
    narrow = run(*[t[..., : t.shape[-1] // 32 * 5] for t in (q, kv, kv, past, past)], torch.tensor([4]), total)
    wide = run(*[t.double() for t in (q, kv, kv, past, past)], torch.tensor([4]), total)
    assert narrow[0].shape == (1, 1, 10)
    assert wide[0].dtype is torch.float64


def test_rows_that_are_not_finite_stay_so(native: FloatLayers) -> None:
    """A key that is no number is seen by every row behind it; scores far apart are zeros and ones."""
    ctx = NodeCtx(1, 3)
    q, kv = torch.full((1, 2, 16), 1e4), torch.full((1, 2, 16), 1.0)
    run = functools.partial(group_query_attention, ctx, num_heads=1, kv_num_heads=1, scale=1.0)
    kv[0, 1] = -1.0
    y, *_ = run(q, kv, kv, None, None, torch.tensor([1]), torch.tensor(2))
    assert torch.equal(y[0], torch.ones(2, 16))
    past = torch.zeros(1, 1, 3, 16)
    past[0, 0, 1, 4] = torch.nan
    y, *_ = run(q[:, :1], kv[:, :1], kv[:, :1], past, torch.zeros_like(past), torch.tensor([3]), torch.tensor(4))
    assert y.isnan().all()
