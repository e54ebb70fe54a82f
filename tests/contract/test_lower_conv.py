"""Convolutions through the tile interpreter and as native code, against float64; then a small network in place."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hotfuse
from hotfuse import Settings
from hotfuse.backends.library import LibraryBackend
from hotfuse.fusion.groups import group
from hotfuse.fusion.layout import channels_last
from hotfuse.ir.text import parse
from hotfuse.ir.types import TensorType
from hotfuse.ir.verify import verify
from hotfuse.lower.common import pack
from hotfuse.lower.common.errors import CannotLower
from hotfuse.lower.common.pack import PackSource, PackSpec, WeightOrder
from hotfuse.lower.cpu.conv.conv_group import lower_convolution
from hotfuse.lower.cpu.conv.shape import Axis, strips
from hotfuse.lower.cpu.tiling import Core
from hotfuse.native.target import CpuTarget, host_levels
from tests.contract.convolving import CORES, EPILOGUES, LAST, check, text

# --- shapes


@pytest.mark.parametrize("axis", [Axis(9, 3, 1, 1), Axis(14, 7, 2, 3), Axis(5, 5, 1, 4, 2), Axis(4, 3, 3, 2), Axis(8, 1, 2)])
@pytest.mark.parametrize("together", [True, False])
def test_blocks_read_every_element_once_and_nothing_outside(axis: Axis, together: bool) -> None:
    for most in (1, 2, 4, 9):
        read: set[tuple[int, int]] = set()
        for strip in strips(axis, most, together=together):
            for b in range(strip.count):
                for segment in strip.block.segments:
                    for p in segment.parts:
                        part = strip.block.parts[p]
                        for i in range(part.rows):
                            at = strip.first + b * strip.block.rows + part.start + i
                            for c in range(segment.first, segment.last):
                                assert (at, c) not in read
                                read.add((at, c))
        inside = {
            (at, c)
            for at in range(axis.out)
            for c in range(axis.window)
            if 0 <= at * axis.stride - axis.padding + c * axis.dilation < axis.size
        }
        assert read == inside


def test_packed_windows() -> None:
    weight = np.arange(6 * 3 * 2 * 4, dtype=np.float32).reshape(6, 3, 2, 4)
    spec = PackSpec((PackSource("w", WeightOrder.WINDOW, 6),), 24, 4)
    flat = pack.pack(spec, {"w": weight})
    halves = PackSpec(tuple(PackSource("w", WeightOrder.WINDOW, 3, first) for first in (0, 3)), 24, 4)
    by_group = pack.pack(halves, {"w": weight})
    taps = (5, 0, 2)
    turned = PackSpec((PackSource("w", WeightOrder.TURNED, 3, 2, taps),), 4 * len(taps), 4)
    some = pack.pack(turned, {"w": weight})
    for n, i, h, w in np.ndindex(*weight.shape):
        k = (h * 4 + w) * 3 + i
        assert flat[n // 4 * spec.panel_stride + k * 4 + n % 4] == weight[n, i, h, w]
        assert by_group[n // 3 * halves.panel_stride + k * 4 + n % 3] == weight[n, i, h, w]
        if n >= 2 and (at := h * 4 + w) in taps:
            assert some[(taps.index(at) * 4 + n - 2) * 4 + i] == weight[n, i, h, w]
    with pytest.raises(Exception, match="to be packed as 6 windows of 24"):
        pack.pack(spec, {"w": weight[:, :2]})


# --- kernels

SHAPES: dict[str, dict[str, Any]] = {
    "1x1": {"size": (5, 7), "window": (1, 1), "channels": (19, 21)},
    "1x1, stride": {"size": (6, 7), "window": (1, 1), "channels": (8, 33), "stride": 2},
    "3x3": {"size": (6, 11), "window": (3, 3), "channels": (5, 21), "padding": 1},
    "3x3, no padding": {"size": (5, 9), "window": (3, 3), "channels": (33, 8)},
    "3x3, stride": {"size": (9, 8), "window": (3, 3), "channels": (4, 16), "stride": 2, "padding": 1},
    "3x3, dilation": {"size": (9, 10), "window": (3, 3), "channels": (6, 17), "padding": 2, "dilation": 2},
    "5x5": {"size": (7, 6), "window": (5, 5), "channels": (3, 9), "padding": 2},
    "7x7, stride, few channels": {"size": (13, 15), "window": (7, 7), "channels": (3, 20), "stride": 2, "padding": 3},
    "1x5": {"size": (3, 12), "window": (1, 5), "channels": (7, 10), "padding": (0, 2)},
    "5x1": {"size": (8, 4), "window": (5, 1), "channels": (2, 5), "padding": (2, 0)},
    "more padding than window": {"size": (3, 3), "window": (2, 2), "channels": (2, 5), "padding": 1, "stride": 3},
    "one pixel": {"size": (3, 3), "window": (3, 3), "channels": (9, 40)},
    "one channel in, one out": {"size": (5, 6), "window": (3, 3), "channels": (1, 1), "padding": 1},
    "depthwise 3x3": {"size": (6, 9), "window": (3, 3), "channels": (21, 21), "groups": 21, "padding": 1},
    "depthwise 5x5, stride": {"size": (9, 11), "window": (5, 5), "channels": (16, 16), "groups": 16, "padding": 2, "stride": 2},
    "depthwise, dilation": {"size": (9, 8), "window": (3, 3), "channels": (5, 5), "groups": 5, "padding": 2, "dilation": 2},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_meaning(shape: str) -> None:
    core = list(CORES.values())[list(SHAPES).index(shape) % len(CORES)]
    check(text(**SHAPES[shape], n="2"), core)


@pytest.mark.parametrize("core", CORES)
def test_every_core(core: str) -> None:
    for shape in ("1x1", "3x3", "depthwise 3x3"):
        check(text(**SHAPES[shape]), CORES[core])


@pytest.mark.parametrize("shape", ["1x1", "3x3, stride", "3x3, dilation", "7x7, stride, few channels", "depthwise 3x3"])
@pytest.mark.parametrize(("into", "out"), [(LAST, ""), ("", LAST), ("", "")])
def test_planes(shape: str, into: str, out: str) -> None:
    source = text(**SHAPES[shape], n="2", into=into, out=out)
    if "depthwise" in shape and not into:
        with pytest.raises(CannotLower, match="plane by plane"):
            lower_convolution(parse(source), CORES["avx2"])
        return
    check(source, CORES["avx2"])


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("shape", ["1x1", "3x3", "depthwise 3x3", "one channel in, one out"])
def test_epilogues(epilogue: str, shape: str) -> None:
    check(text(**SHAPES[shape], epilogue=epilogue, n="s0"), CORES["avx2"], s0=2)


@pytest.mark.parametrize("target", host_levels(), ids=lambda t: t.name)
@pytest.mark.parametrize("shape", SHAPES)
def test_native(target: CpuTarget, shape: str) -> None:
    core = Core(target.lanes, 32 if target.name in ("avx512", "neon") else 16)
    check(text(**SHAPES[shape], n="2", epilogue="batch norm, silu, residual"), core, target)
    if "depthwise" not in shape and target.name == host_levels()[0].name:
        check(text(**SHAPES[shape], epilogue="residual", into="", out=""), core, target)


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("shape", ["1x1", "3x3", "depthwise 3x3"])
def test_native_epilogues(epilogue: str, shape: str) -> None:
    target = host_levels()[0]
    check(text(**SHAPES[shape], epilogue=epilogue, n="s0"), Core(target.lanes, 16), target, s0=3)


def test_one_dim() -> None:
    for into, stride, groups in (("{0,2,1}", 1, 1), ("", 2, 1), ("{0,2,1}", 2, 6)):
        out = Axis(17, 5, stride, 2).out
        source = f"""graph g(%x: f32[2, 6, 17]{into}) {{ param %w: f32[6, {6 // groups}, 5] = "w"
          param %b: f32[6] = "b"
          %h: f32[2, 6, {out}]{{0,2,1}} = aten.conv1d.default(%x, %w, %b, [{stride}], [2], [1], {groups})
          %y: f32[2, 6, {out}]{{0,2,1}} = aten.gelu.default(%h) return %y }}"""
        check(source, CORES["avx2"])
        check(source, CORES["avx2"], host_levels()[0])


def test_convolution_by_its_general_name() -> None:
    source = """graph g(%x: f32[1, 3, 5, 5]) { param %w: f32[4, 3, 3, 3] = "w"
      %h: f32[1, 4, 5, 5] = aten.convolution.default(%x, %w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1) return %h }"""
    check(source, CORES["avx2"])


@pytest.mark.parametrize(("padding", "dilation", "out"), [("same", 1, 6), ("same", 2, 6), ("valid", 1, 4)])
def test_padding_by_name(padding: str, dilation: int, out: int) -> None:
    check(NAMED.format(window=3, padding=padding, dilation=dilation, out=out, size=6, inputs=4, groups=1), CORES["avx2"])
    if padding == "same":
        check(NAMED.format(window=2, padding=padding, dilation=dilation, out=6, size=6, inputs=2, groups=2), CORES["avx2"])


NAMED = """graph g(%x: f32[1, 4, {size}, 6]) {{ param %w: f32[4, {inputs}, {window}, {window}] = "w"
  %h: f32[1, 4, {out}, {out}] = aten.conv2d.padding(%x, %w, None, [1, 1], "{padding}", [{dilation}, {dilation}], {groups})
  return %h }}"""


def test_what_is_refused() -> None:
    whole = NAMED.format(window=3, padding="valid", dilation=1, out=4, size=6, inputs=4, groups=1)
    with pytest.raises(CannotLower, match="not constant"):
        weight = "%w: f32[4, 4, 3, 3]"
        lower_convolution(parse(whole.replace(f') {{ param {weight} = "w"', f", {weight}) {{")), CORES["avx2"])
    with pytest.raises(CannotLower, match="not fp32"):
        lower_convolution(parse(whole.replace("f32", "f64")), CORES["avx2"])


# --- layouts

REGION = """graph g(%x: f32[2, 3, 8, 8]) {
  param %w: f32[6, 3, 3, 3] = "w"
  param %d: f32[6, 1, 3, 3] = "d"
  %a: f32[2, 6, 8, 8] = aten.conv2d.default(%x, %w, None, [1, 1], [1, 1])
  %b: f32[2, 6, 8, 8] = aten.relu.default(%a)
  %c: f32[2, 6, 8, 8] = aten.conv2d.default(%b, %d, None, [1, 1], [1, 1], [1, 1], 6)
  %s: f32[2, 6, 8, 8] = aten.add.Tensor(%c, %b)
  %p: f32[2, 6, 4, 4] = aten.max_pool2d.default(%s, [2, 2])
  %m: f32[2, 6] = aten.mean.dim(%p, [2, 3])
  %v: f32[2, 96] = aten.view.default(%p, [2, 96])
  %q: f32[2, 6, 1, 1] = aten.adaptive_avg_pool2d.default(%p, [1, 1])
  return %p, %m, %v, %q, %b
}"""


def test_regions_lie_channels_last_and_outputs_as_before() -> None:
    graph = parse(REGION)
    moved = verify(channels_last(graph))
    types = {v.name: v.type for n in moved.nodes for v in n.outs}
    inside = {name for name, t in types.items() if isinstance(t, TensorType) and t.layout.order == (0, 2, 3, 1)}
    assert inside == {"a", "b", "c", "s", "p"}
    weights = {"w": torch.randn(6, 3, 3, 3), "d": torch.randn(6, 1, 3, 3)}
    x = torch.randn(2, 3, 8, 8)
    want, got = (LibraryBackend().compile(g, weights).run(x) for g in (graph, moved))
    for a, b in zip(want, got, strict=True):
        torch.testing.assert_close(a, b)
        assert a.stride() == b.stride()


def test_without_convolutions_nothing_moves() -> None:
    graph = parse("graph g(%x: f32[1, 2, 3, 3]) { %y: f32[1, 2, 3, 3] = aten.relu.default(%x) return %y }")
    assert channels_last(graph) is graph


def test_convolutions_take_what_follows_them() -> None:
    kinds = {g.kind: [parse(REGION).nodes[i].outs[0].name for i in g.nodes] for g in group(parse(REGION))}
    assert kinds["convolution"] == ["c", "s"]


class Network(nn.Module):
    """Every kind of convolution between things that are none."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32)
        self.own, self.out = nn.Conv2d(32, 32, 5, 1, 2, groups=32), nn.Conv2d(32, 48, 1)
        self.dense, self.head = nn.Conv2d(48, 48, 3, 1, 1), nn.Linear(48, 10)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x = torch.relu(self.norm(self.stem(x)))
        x = x + F.hardswish(self.own(x))
        y = F.max_pool2d(self.out(x), 2)
        y = torch.cat([F.silu(self.dense(y)), y], 1)
        return self.head(y[:, :48].mean((2, 3))), y, y.flatten(1)


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
def test_a_network_in_place(order: torch.memory_format) -> None:
    torch.manual_seed(0)
    model = Network().eval().to(memory_format=order)
    model.norm.running_mean.normal_()
    fast = hotfuse.jit(model, settings=Settings(capture="inline", hot_calls=1))
    with torch.no_grad():
        for n in range(6):
            x = torch.randn(1, 3, 40, 36).to(memory_format=order)
            for got, want in zip(fast(x), model(x), strict=True):
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
                assert got.stride() == want.stride(), n
    told = fast.explain().to_dict()
    tiers = [p["tier"] for s in told["sites"] for p in s["plans"]]
    assert 1 in tiers or any("tier" in str(d) and "refuse" in str(d) for d in told["decisions"]), told["decisions"]
