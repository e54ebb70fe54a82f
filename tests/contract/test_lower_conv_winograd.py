"""Winograd convolutions: the transforms themselves, then kernels three ways, then what is not finite."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hotfuse
from hotfuse import Settings
from hotfuse.backends.llvm.native import assembly_text, compile_kernel, load_kernel
from hotfuse.base.errors import CallFault
from hotfuse.ir.text import parse
from hotfuse.lower.common import pack
from hotfuse.lower.common.lowered import BufferArgument, Lowered, PackArgument
from hotfuse.lower.common.winograd import PIECE, Scheme, schemes, transformed
from hotfuse.lower.cpu.conv import winograd
from hotfuse.lower.cpu.conv.conv_group import lower_convolution
from hotfuse.lower.cpu.conv.shape import Axis
from hotfuse.lower.cpu.tiling import Core
from hotfuse.native.target import CpuTarget, host_levels, level
from tests.contract.convolving import CORES, EPILOGUES, check, text
from tests.races import kernels_win, slow_library


def by_winograd(lowered: Lowered) -> bool:
    return any(b.name == "data" for b in lowered.kernel.buffers)


@pytest.fixture(autouse=True)
def whatever_it_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small shapes too."""
    monkeypatch.setattr(winograd, "_GAIN", 1e9)


@pytest.mark.parametrize("scheme", [s for r in (1, 2, 3, 4, 5, 7) for s in schemes(r)], ids=str)
def test_the_transforms_are_a_convolution(scheme: Scheme) -> None:
    """In exact arithmetic, to the last digit."""
    d = [3 * i * i - 7 * i + 2 for i in range(scheme.points)]
    g = [5 - 2 * i for i in range(scheme.window)]
    data = [sum(c * x for c, x in zip(row, d, strict=True)) for row in scheme.data]
    weights = [sum(c * x for c, x in zip(row, g, strict=True)) for row in scheme.weights]
    products = [a * b for a, b in zip(data, weights, strict=True)]
    found = [sum(c * x for c, x in zip(row, products, strict=True)) for row in scheme.results]
    assert found == [sum(d[o + i] * w for i, w in enumerate(g)) for o in range(scheme.outputs)]


def test_weights_along_two_dims() -> None:
    windows = np.arange(3 * 5 * 2 * (PIECE + 3), dtype=np.float64).reshape(3, 5, 2, PIECE + 3)
    found = transformed(windows.reshape(15, 2, -1), (3, 5), (4, 2)).reshape(6, 6, 2, -1)
    down, across = (np.array(Scheme(*s).weights, np.float64) for s in ((4, 3), (2, 5)))
    want = np.einsum("pi,qj,ijnk->pqnk", down, across, windows)
    np.testing.assert_allclose(found, want, rtol=1e-12, atol=1e-12 * np.abs(want).max())


def test_weights_are_rounded_once() -> None:
    windows = np.random.default_rng(0).standard_normal((9, 7), np.float32)
    found = transformed(windows, (3, 3), (4, 4))
    assert found.dtype == np.float32
    exact = transformed(windows.astype(np.float64), (3, 3), (4, 4))
    np.testing.assert_array_equal(found, exact.astype(np.float32))


SHAPES: dict[str, dict[str, Any]] = {
    "3x3": {"size": (9, 11), "window": (3, 3), "channels": (20, 21), "padding": 1},
    "3x3, whole tiles": {"size": (8, 8), "window": (3, 3), "channels": (16, 32), "padding": 1},
    "3x3, no padding": {"size": (5, 9), "window": (3, 3), "channels": (33, 8)},
    "3x3, wide border": {"size": (4, 3), "window": (3, 3), "channels": (16, 24), "padding": 2},
    "2x2": {"size": (8, 7), "window": (2, 2), "channels": (17, 12)},
    "5x1": {"size": (19, 1), "window": (5, 1), "channels": (32, 48), "padding": (2, 0)},
    "1x5": {"size": (3, 12), "window": (1, 5), "channels": (18, 10), "padding": (0, 2)},
    "one output": {"size": (3, 3), "window": (3, 3), "channels": (19, 40)},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_meaning(shape: str) -> None:
    for core in ("avx512", "generic") if shape == "3x3" else (list(CORES)[list(SHAPES).index(shape) % len(CORES)],):
        assert by_winograd(check(text(**SHAPES[shape], n="2"), CORES[core]))


@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_epilogues(epilogue: str) -> None:
    assert by_winograd(check(text(**SHAPES["3x3"], epilogue=epilogue, n="s0"), CORES["avx2"], s0=2))


@pytest.mark.parametrize("target", host_levels(), ids=lambda t: t.name)
@pytest.mark.parametrize("shape", SHAPES)
def test_native(target: CpuTarget, shape: str) -> None:
    core = Core(target.lanes, 32 if target.name in ("avx512", "neon") else 16)
    assert by_winograd(check(text(**SHAPES[shape], n="2", epilogue="batch norm, silu, residual"), core, target))


@pytest.mark.parametrize("shape", ["3x3", "1x5"])
def test_many_blocks_and_sizes_at_run_time(shape: str) -> None:
    target = host_levels()[0]
    small = Core(target.lanes, 16, 1 << 10, 32 << 10)
    assert by_winograd(check(text(**SHAPES[shape], n="s0"), small, target, s0=5))
    source = """graph g(%x: f32[s0, 16, s1, s2]{0,2,3,1}) { param %w: f32[18, 16, 3, 3] = "w"
      param %b: f32[18] = "b"
      %h: f32[s0, 18, s1, s2]{0,2,3,1} = aten.conv2d.default(%x, %w, %b, [1, 1], [1, 1], [1, 1], 1)
      %y: f32[s0, 18, s1, s2]{0,2,3,1} = aten.relu.default(%h) return %y }"""
    for sizes in ((1, 1, 1), (2, 4, 9), (1, 13, 30)):
        assert by_winograd(check(source, small, target, **dict(zip(("s0", "s1", "s2"), sizes, strict=True))))


def test_one_dim() -> None:
    source = """graph g(%x: f32[2, 24, 17]{0,2,1}) { param %w: f32[20, 24, 5] = "w"
      param %b: f32[20] = "b"
      %h: f32[2, 20, 17]{0,2,1} = aten.conv1d.default(%x, %w, %b, [1], [2], [1], 1)
      %y: f32[2, 20, 17]{0,2,1} = aten.gelu.default(%h) return %y }"""
    assert by_winograd(check(source, CORES["avx2"])) and by_winograd(check(source, CORES["avx512"], host_levels()[0]))


@pytest.mark.parametrize(
    "change", [{"stride": 2}, {"dilation": 2}, {"into": ""}, {"channels": (3, 21)}, {"channels": (20, 1)}]
)
def test_where_it_cannot_be_done(change: dict[str, Any]) -> None:
    assert not by_winograd(check(text(**{**SHAPES["3x3"], **change}), CORES["avx512"]))


def test_it_is_chosen_where_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(winograd, "_GAIN", 0.8)
    square, core = Axis(56, 3, 1, 1), CORES["avx512"]
    found = winograd.cut(core, square, square, 1, 64, 64)
    assert found is not None and found.points == 36, "six points each way make four outputs"
    assert winograd.cut(core, Axis(56, 1), Axis(56, 1), 1, 64, 64) is None
    assert winograd.cut(core, Axis(1, 3, 1, 1), Axis(1, 3, 1, 1), 1, 64, 64) is None


def test_registers_are_enough() -> None:
    """Rows of a transform are made a pair at a time: all 36 points at once would go to memory and back."""
    target = level("avx512", {"sse4.2", "avx", "avx2", "fma", "avx512f", "avx512bw", "avx512dq", "avx512vl"})
    wide: dict[str, Any] = {"size": (56, 56), "window": (3, 3), "channels": (64, 64), "padding": 1}
    lowered = lower_convolution(parse(text(**wide)), Core(target.lanes, 32))
    assert by_winograd(lowered)
    lines = assembly_text(lowered.kernel, target).splitlines()
    assert sum("(%rsp" in line and "zmm" in line and "vbroadcast" not in line for line in lines) < 60


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3e38])
def test_what_is_not_finite_is_a_fault(bad: float) -> None:
    graph = parse(text(**SHAPES["3x3"]))
    target = host_levels()[0]
    lowered = lower_convolution(graph, Core(target.lanes, 16))
    assert by_winograd(lowered)
    x = torch.randn(1, 20, 9, 11).contiguous(memory_format=torch.channels_last)
    w, b = torch.randn(21, 20, 3, 3), torch.randn(21)
    (spec,) = (a.spec for a in lowered.arguments if isinstance(a, PackArgument))
    packed = torch.from_numpy(pack.pack(spec, {"w": w.numpy()}))
    out = torch.empty(1, 21, 9, 11).contiguous(memory_format=torch.channels_last)
    by_name = {"x": x, "b": b, "y": out}
    buffers = [by_name[a.value] if isinstance(a, BufferArgument) else packed for a in lowered.arguments]
    kernel = load_kernel(compile_kernel(lowered.kernel, target))
    kernel(buffers, [])
    x[0, 3, 8, 10] = bad
    with pytest.raises(CallFault):
        kernel(buffers, [])


def test_what_is_not_finite_is_answered_by_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a number stays where the model's own code puts it; the plan serves on."""
    slow_library(monkeypatch)
    kernels_win(monkeypatch)
    model = nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 16, 3, padding=1)).eval()
    x = torch.randn(1, 16, 20, 20)
    with torch.no_grad(), hotfuse.jit(model, settings=Settings(capture="inline", hot_calls=1)) as fast:
        for _ in range(4):
            torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
        served = fast.stats()["calls_per_tier"]["1"]
        assert served >= 1, str(fast.explain(full=True))
        bad = x.clone()
        bad[0, 0, 10, 10] = torch.nan
        got, want = fast(bad), model(bad)
        assert torch.equal(got.isnan(), want.isnan()) and 0 < int(want.isnan().sum()) < want.numel()
        assert fast.stats()["events"]["call_faults"] == 1
        torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
        assert fast.stats()["calls_per_tier"]["1"] == served + 1
