"""Convolutions beyond the plain ones: sizes known at run time, groups, transposed, three dims, padding in front."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from hotfuse.fusion.groups import group
from hotfuse.ir import dims
from hotfuse.ir.dims import Dim, sym
from hotfuse.ir.text import parse
from hotfuse.lower.common.errors import CannotLower
from hotfuse.lower.cpu.conv.conv_group import lower_convolution
from hotfuse.lower.cpu.conv.read import turned_phases
from hotfuse.lower.cpu.conv.shape import Axis
from hotfuse.lower.cpu.tiling import Core
from hotfuse.native.target import host_levels
from hotfuse.tile.text import show as show_kernel
from tests.contract.convolving import CORES, EPILOGUES, check

NATIVE = host_levels()[0]
LASTS = {3: "{0,2,1}", 4: "{0,2,3,1}", 5: "{0,2,3,4,1}"}


def show(shape: list[Dim]) -> str:
    return f"[{', '.join(dims.show(d) for d in shape)}]"


def source(
    sizes: list[Dim], windows: list[int], channels: tuple[int, int], *, n: Dim = 2, stride: int = 1, padding: int = 0,
    dilation: int = 1, groups: int = 1, epilogue: str = "relu", pads: list[tuple[int, int]] | None = None,
    into: str | None = None, bias: bool = True,
) -> str:  # fmt: skip
    """A group as text; `pads` are zeros around the image by a node in front, first dim first."""
    rank, (ic, oc) = len(windows), channels
    last = LASTS[rank + 2]
    around = pads or [(0, 0)] * rank
    full = [dims.expr("+", s, a + b) for s, (a, b) in zip(sizes, around, strict=True)]
    outs = [Axis(s, w, stride, padding, dilation).out for s, w in zip(full, windows, strict=True)]
    kind = f"f32{show([n, oc, *outs])}{last}"
    body, outputs = EPILOGUES[epilogue]
    front, x = "", "%x"
    if pads:
        flat = ", ".join(f"{a}, {b}" for a, b in reversed(pads))
        front, x = f'%f: f32{show([n, ic, *full])}{last} = aten.pad.default(%x, [{flat}], "constant", 0.0)', "%f"
    more = f", %r: {kind}" if "%r" in body else f", %q: f32{show([n, oc, *[1] * rank])}" if "%q" in body else ""
    params = "".join(f'param %{p}: f32[{oc}] = "{p}"\n' for p in "gomv" if f"%{p}," in body)
    many = [stride] * rank, [padding] * rank, [dilation] * rank, groups
    return f"""graph g(%x: f32{show([n, ic, *sizes])}{last if into is None else into}{more}) {{
      param %w: f32{show([oc, ic // groups, *windows])} = "w"
      {params}
      {'param %b: f32[' + str(oc) + '] = "b"' if bias else ""}
      {front}
      %h: {kind} = aten.conv{rank}d.default({x}, %w, {"%b" if bias else None}, {", ".join(map(str, many))})
      {body.replace(": T", f": {kind}")}
      return {outputs} }}"""


# --- sizes known at run time

DYNAMIC: dict[str, dict[str, Any]] = {
    "1x1": {"windows": [1, 1], "channels": (9, 21)},
    "1x1, stride": {"windows": [1, 1], "channels": (8, 24), "stride": 2},
    "3x3": {"windows": [3, 3], "channels": (5, 21), "padding": 1},
    "3x3, no padding": {"windows": [3, 3], "channels": (16, 8)},
    "3x3, stride, planes": {"windows": [3, 3], "channels": (3, 16), "stride": 2, "padding": 1, "into": ""},
    "5x5, dilation": {"windows": [5, 5], "channels": (4, 6), "padding": 4, "dilation": 2},
    "7x7, stride": {"windows": [7, 7], "channels": (3, 8), "stride": 3, "padding": 3},
    "depthwise": {"windows": [3, 3], "channels": (21, 21), "groups": 21, "padding": 1},
    "depthwise, stride": {"windows": [5, 5], "channels": (16, 16), "groups": 16, "padding": 2, "stride": 2},
    "groups": {"windows": [3, 3], "channels": (6, 10), "groups": 2, "padding": 1},
    "one channel": {"windows": [3, 3], "channels": (4, 1), "padding": 1},
    "one channel, 1x1": {"windows": [1, 1], "channels": (4, 1)},
    "along a line": {"windows": [3], "channels": (7, 12), "padding": 1},
}
SIZES = [(7, 9), (8, 33), (1, 1), (2, 3), (5, 1)]


@pytest.mark.parametrize("case", DYNAMIC)
def test_sizes_at_run_time(case: str) -> None:
    about = DYNAMIC[case]
    rank, window = len(about["windows"]), about["windows"][0]
    reach = about.get("dilation", 1) * (window - 1) + 1 - 2 * about.get("padding", 0)
    text = source([sym("s1"), sym("s2")][2 - rank :], **about, n=sym("s0"), epilogue="residual")
    core = list(CORES.values())[list(DYNAMIC).index(case) % len(CORES)]
    check(text, core, s0=2, s1=max(reach, 6), s2=max(reach, 7))
    for n, (height, width) in zip((1, 3, 1, 1, 2), SIZES, strict=True):
        sizes = {"s0": n, "s1": max(reach, height), "s2": max(reach, width)}
        check(text, Core(NATIVE.lanes, 32 if NATIVE.name == "avx512" else 16), NATIVE, **sizes)


@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_epilogues_with_sizes_at_run_time(epilogue: str) -> None:
    for about in ("1x1", "3x3", "depthwise", "one channel"):
        text = source([sym("s1"), sym("s2")], **DYNAMIC[about], n=sym("s0"), epilogue=epilogue)
        check(text, Core(NATIVE.lanes, 16), NATIVE, s0=2, s1=5, s2=18)


def test_only_some_sizes_at_run_time() -> None:
    for sizes in ([sym("s1"), 9], [9, sym("s1")]):
        check(source(list(sizes), [3, 3], (8, 8), padding=1), CORES["avx2"], NATIVE, s1=7)


def test_an_empty_batch() -> None:
    check(source([sym("s1"), 9], [3, 3], (8, 8), padding=1, n=sym("s0")), CORES["avx2"], NATIVE, s0=0, s1=7)


# --- groups, three dims, one column, padding in front

KINDS: dict[str, dict[str, Any]] = {
    "groups": {"sizes": [6, 7], "windows": [3, 3], "channels": (12, 20), "groups": 4, "padding": 1},
    "wide groups": {"sizes": [4, 5], "windows": [3, 3], "channels": (34, 70), "groups": 2, "padding": 1},
    "groups, 1x1": {"sizes": [4, 5], "windows": [1, 1], "channels": (6, 9), "groups": 3},
    "groups of one output": {"sizes": [4, 5], "windows": [3, 3], "channels": (6, 3), "groups": 3},
    "two outputs a channel": {"sizes": [5, 9], "windows": [3, 3], "channels": (7, 14), "groups": 7, "padding": 1},
    "groups, planes": {"sizes": [5, 6], "windows": [3, 3], "channels": (6, 4), "groups": 2, "padding": 1, "into": ""},
    "three dims": {"sizes": [4, 5, 6], "windows": [3, 3, 3], "channels": (5, 9), "padding": 1},
    "three dims, stride": {"sizes": [5, 6, 7], "windows": [2, 3, 3], "channels": (3, 17), "stride": 2, "padding": 1},
    "three dims, 1x1x1": {"sizes": [3, 4, 5], "windows": [1, 1, 1], "channels": (7, 18)},
    "three dims, planes": {"sizes": [3, 4, 5], "windows": [1, 3, 3], "channels": (2, 8), "into": ""},
    "three dims, depthwise": {"sizes": [4, 4, 5], "windows": [3, 3, 3], "channels": (9, 9), "groups": 9, "padding": 1},
    "a column": {"sizes": [23, 1], "windows": [5, 1], "channels": (7, 18)},
    "a column of planes": {"sizes": [23, 1], "windows": [5, 1], "channels": (7, 18), "into": ""},
    "a pixel": {"sizes": [1, 1], "windows": [1, 1], "channels": (7, 18), "groups": 1, "into": ""},
    "24 channels": {"sizes": [6, 17], "windows": [3, 3], "channels": (5, 24), "padding": 1},
    "40 channels, 1x1": {"sizes": [6, 17], "windows": [1, 1], "channels": (11, 40)},
    "3 channels": {"sizes": [6, 17], "windows": [3, 3], "channels": (5, 3), "padding": 1},
    "one channel": {"sizes": [6, 17], "windows": [3, 3], "channels": (5, 1), "padding": 1},
    "one channel, one pixel": {"sizes": [3, 3], "windows": [3, 3], "channels": (5, 1)},
    "padding in front": {"sizes": [6, 7], "windows": [2, 2], "channels": (5, 9), "pads": [(0, 1), (0, 1)]},
    "more padding in front": {"sizes": [4, 3], "windows": [3, 3], "channels": (4, 6), "pads": [(2, 0), (1, 3)], "padding": 1},
    "depthwise, padding in front": {
        "sizes": [6, 7], "windows": [3, 3], "channels": (9, 9), "groups": 9, "pads": [(0, 1), (1, 2)], "stride": 2,
    },
}  # fmt: skip


@pytest.mark.parametrize("case", KINDS)
def test_kinds(case: str) -> None:
    core = list(CORES.values())[list(KINDS).index(case) % len(CORES)]
    check(source(**KINDS[case]), core)
    native = Core(NATIVE.lanes, 32 if NATIVE.name == "avx512" else 16)
    check(source(**KINDS[case], epilogue="batch norm, silu, residual"), native, NATIVE)
    check(source(**KINDS[case], epilogue="residual", bias=False), native, NATIVE)


def test_padding_with_other_numbers_stays_outside() -> None:
    text = source([5, 5], [3, 3], (4, 4), pads=[(1, 1), (1, 1)])
    for other in ('"reflect", 0.0', '"constant", 1.0'):
        with pytest.raises(CannotLower):
            lower_convolution(parse(text.replace('"constant", 0.0', other)), CORES["avx2"])


def test_convolutions_take_the_padding_in_front_of_them() -> None:
    graph = parse(source([5, 5], [3, 3], (4, 4), pads=[(0, 1), (1, 1)]))
    assert [(g.kind, len(g.nodes)) for g in group(graph)] == [("convolution", 3)]
    twice = parse(source([5, 5], [3, 3], (4, 4), pads=[(0, 1), (1, 1)]).replace("return %y", "return %y, %f"))
    assert [g.kind for g in group(twice)] == ["library", "convolution"]


def test_quotients_by_numbers_are_products() -> None:
    text = """graph g(%x: f32[1, 4, 6, 4]{0,2,3,1}) { param %w: f32[9, 4, 3, 3] = "w"
      %h: f32[1, 9, 4, 2]{0,2,3,1} = aten.conv2d.default(%x, %w)
      %a: f32[1, 9, 4, 2]{0,2,3,1} = aten.div.Tensor(%h, 6.0)
      %y: f32[1, 9, 4, 2]{0,2,3,1} = aten.div.Tensor(%a, 0.0) return %a, %y }"""
    kernel = check(text.replace("%a, %y }", "%a }").replace("%y: f32[1, 9, 4, 2]{0,2,3,1} = aten.div.Tensor(%a, 0.0)", ""),
                   CORES["avx2"], NATIVE).kernel  # fmt: skip
    assert "map.div" not in show_kernel(kernel)
    assert "map.div" in show_kernel(lower_convolution(parse(text), CORES["avx2"]).kernel)


def test_what_spreads_along_pixels_is_not_taken_for_channels() -> None:
    text = """graph g(%x: f32[1, 4, 6, 4]{0,2,3,1}, %r: f32[4]) { param %w: f32[4, 4, 1, 1] = "w"
      %h: f32[1, 4, 6, 4]{0,2,3,1} = aten.conv2d.default(%x, %w)
      %y: f32[1, 4, 6, 4]{0,2,3,1} = aten.add.Tensor(%h, %r) return %y }"""
    check(text, CORES["avx2"], NATIVE)


# --- transposed


@pytest.mark.parametrize("window", [1, 2, 3, 4, 5])
@pytest.mark.parametrize(("stride", "padding", "extra", "dilation"), [
    (1, 0, 0, 1), (2, 0, 0, 1), (2, 1, 1, 1), (3, 1, 0, 1), (3, 0, 2, 1), (2, 2, 0, 2), (4, 1, 1, 2), (2, 0, 0, 3),
])  # fmt: skip
def test_phases_make_every_output_once(window: int, stride: int, padding: int, extra: int, dilation: int) -> None:
    size = 5
    out = (size - 1) * stride - 2 * padding + dilation * (window - 1) + extra + 1
    if out < 1:
        pytest.skip("no outputs")
    x, w = np.random.default_rng(0).standard_normal(size), np.random.default_rng(1).standard_normal(window)
    found = np.full(out, np.nan)
    for phase in turned_phases(size, out, window, stride, padding, extra, dilation):
        axis = phase.axis
        assert isinstance(axis.out, int)
        for t in range(axis.out):
            first, last = axis.seen(t)
            inputs = [t - axis.padding + j * axis.dilation for j in range(axis.window)]
            assert not axis.inside or all(0 <= i < size for i in inputs)
            at = t * phase.step + phase.first
            assert np.isnan(found[at])
            found[at] = sum(x[inputs[j]] * w[phase.taps[j]] for j in range(first, last))
    options = {"stride": stride, "padding": padding, "output_padding": extra, "dilation": dilation}
    exact = F.conv_transpose1d(torch.tensor(x)[None, None], torch.tensor(w)[None, None], **options)
    assert np.allclose(found, exact[0, 0].numpy())


TURNED: dict[str, dict[str, Any]] = {
    "2x2": {"sizes": [3, 9], "windows": [2, 2], "channels": (5, 24), "stride": 2},
    "2x2, one channel": {"sizes": [3, 9], "windows": [2, 2], "channels": (6, 1), "stride": 2},
    "3x3": {"sizes": [4, 5], "windows": [3, 3], "channels": (3, 7), "stride": 2, "padding": 1, "extra": 1},
    "4x4, planes": {"sizes": [4, 5], "windows": [4, 4], "channels": (3, 18), "stride": 2, "padding": 1, "into": ""},
    "stride beyond the window": {"sizes": [3, 4], "windows": [2, 2], "channels": (4, 6), "stride": 3, "extra": 1},
    "dilation": {"sizes": [4, 5], "windows": [3, 3], "channels": (4, 6), "stride": 2, "padding": 1, "dilation": 3},
    "stride 1": {"sizes": [4, 5], "windows": [3, 3], "channels": (4, 6), "padding": 1},
    "groups": {"sizes": [4, 5], "windows": [2, 2], "channels": (6, 8), "stride": 2, "groups": 2},
    "depthwise": {"sizes": [4, 5], "windows": [4, 4], "channels": (6, 6), "stride": 2, "padding": 1, "groups": 6},
    "along a line": {"sizes": [9], "windows": [4], "channels": (6, 10), "stride": 2, "padding": 1},
    "three dims": {"sizes": [2, 3, 4], "windows": [2, 2, 2], "channels": (4, 6), "stride": 2},
    "sizes at run time": {"sizes": [sym("s1"), sym("s2")], "windows": [2, 2], "channels": (5, 9), "stride": 2},
    "sizes at run time, overlapping": {
        "sizes": [sym("s1"), sym("s2")], "windows": [3, 3], "channels": (5, 9), "stride": 2, "padding": 1, "extra": 1,
    },
    "sizes at run time, one channel": {"sizes": [sym("s1"), sym("s2")], "windows": [4, 4], "channels": (5, 1), "stride": 2},
}  # fmt: skip


def turned(
    sizes: list[Dim], windows: list[int], channels: tuple[int, int], *, stride: int = 1, padding: int = 0, extra: int = 0,
    dilation: int = 1, groups: int = 1, epilogue: str = "relu", into: str | None = None,
) -> str:  # fmt: skip
    rank, (ic, oc) = len(windows), channels
    last = LASTS[rank + 2] if oc > 1 else ""
    outs = [
        dims.expr("+", dims.expr("*", s, stride), -stride - 2 * padding + dilation * (w - 1) + extra + 1)
        for s, w in zip(sizes, windows, strict=True)
    ]
    kind = f"f32{show([2, oc, *outs])}{last}"
    body, outputs = EPILOGUES[epilogue]
    op = "conv_transpose1d.default" if rank == 1 else f"conv_transpose{rank}d.input"
    many = [stride] * rank, [padding] * rank, [extra] * rank, groups, [dilation] * rank
    params = "".join(f'param %{p}: f32[{oc}] = "{p}"\n' for p in "gomv" if f"%{p}," in body)
    ends = f"%x: f32{show([2, ic, *sizes])}{LASTS[rank + 2] if into is None else into}"
    return f"""graph g({ends}{f", %r: {kind}" if "%r" in body else ""}) {{
      param %w: f32{show([ic, oc // groups, *windows])} = "w"
      param %b: f32[{oc}] = "b"
      {params}
      %h: {kind} = aten.{op}(%x, %w, %b, {", ".join(map(str, many))})
      {body.replace(": T", f": {kind}")}
      return {outputs} }}"""


@pytest.mark.parametrize("case", TURNED)
def test_transposed(case: str) -> None:
    core = list(CORES.values())[list(TURNED).index(case) % len(CORES)]
    native = Core(NATIVE.lanes, 32 if NATIVE.name == "avx512" else 16)
    for s1, s2 in ((3, 4), (1, 17)) if "run time" in case else ((0, 0),):
        check(turned(**TURNED[case]), core, s1=s1, s2=s2)
        check(turned(**TURNED[case], epilogue="batch norm, silu, residual"), native, NATIVE, s1=s1, s2=s2)
        check(turned(**TURNED[case], epilogue="residual"), native, NATIVE, s1=s1, s2=s2)


def test_transposed_by_its_general_name() -> None:
    text = """graph g(%x: f32[1, 3, 5, 5]) { param %w: f32[3, 4, 2, 2] = "w"
      %h: f32[1, 4, 10, 10] = aten.convolution.default(%x, %w, None, [2, 2], [0, 0], [1, 1], True, [0, 0], 1) return %h }"""
    check(text, CORES["avx2"])


def test_large_strides_stay_with_the_library() -> None:
    with pytest.raises(CannotLower, match="large stride"):
        lower_convolution(parse(turned([3, 3], [8, 8], (3, 3), stride=8)), CORES["avx2"])
