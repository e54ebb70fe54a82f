"""Convolutions whose results, or what is added to them, lie plane by plane: squares of pixels and channels are turned."""

from __future__ import annotations

from typing import Any

import pytest

from hotfuse.ir.text import parse
from hotfuse.lower.cpu.conv.conv_group import lower_convolution
from hotfuse.lower.cpu.tiling import Core
from hotfuse.native.target import CpuTarget, host_levels
from hotfuse.tile.program import Kernel, instructions
from tests.contract.convolving import CORES, EPILOGUES, LAST, check, text

SHAPES: dict[str, dict[str, Any]] = {
    "rows with a tail": {"size": (5, 29), "window": (3, 3), "channels": (6, 37), "padding": 1, "stride": 2},
    "few channels": {"size": (3, 35), "window": (1, 3), "channels": (4, 8), "padding": (0, 1)},
    "short rows": {"size": (4, 3), "window": (2, 2), "channels": (5, 20)},
    "depthwise": {"size": (4, 21), "window": (3, 3), "channels": (21, 21), "padding": 1, "groups": 21},
}


def turned(kernel: Kernel) -> list[tuple[int, ...]]:
    """The shapes of tiles that are turned round."""
    return [i.outs[0].type.shape for i in instructions(kernel.body) if i.op == "transpose"]


@pytest.mark.parametrize("target", host_levels(), ids=lambda t: t.name)
@pytest.mark.parametrize("shape", SHAPES)
def test_native(target: CpuTarget, shape: str) -> None:
    core = Core(target.lanes, 32 if target.name in ("avx512", "neon") else 16)
    for into in (LAST,) if shape == "depthwise" else ("", LAST):
        for epilogue in ("nothing", "residual", "batch norm, silu, residual"):
            check(text(**SHAPES[shape], n="2", epilogue=epilogue, into=into, out=""), core, target)


@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_epilogues(epilogue: str) -> None:
    check(text(**SHAPES["rows with a tail"], epilogue=epilogue, into="", out=""), CORES["avx2"])


@pytest.mark.parametrize("core", CORES)
def test_meaning(core: str) -> None:
    for shape in SHAPES:
        check(text(**SHAPES[shape], epilogue="batch norm", out=""), CORES[core])


def test_sizes_at_run_time() -> None:
    source = """graph g(%x: f32[s0, 6, s1, s2], %r: f32[s0, 18, s1, s2]) { param %w: f32[18, 6, 3, 3] = "w"
      param %b: f32[18] = "b"
      %h: f32[s0, 18, s1, s2] = aten.conv2d.default(%x, %w, %b, [1, 1], [1, 1], [1, 1], 1)
      %a: f32[s0, 18, s1, s2] = aten.add.Tensor(%h, %r)
      %y: f32[s0, 18, s1, s2] = aten.relu.default(%a) return %y }"""
    target = host_levels()[0]
    for sizes in ((1, 1, 1), (2, 4, 9), (1, 3, 40)):
        check(source, Core(target.lanes, 32), target, **dict(zip(("s0", "s1", "s2"), sizes, strict=True)))


MIXED = """graph g(%x: f32[2, 6, 5, 21], %r: f32[2, 18, 5, 21]{into}) {{ param %w: f32[18, 6, 3, 3] = "w"
  param %b: f32[18] = "b"
  %h: f32[2, 18, 5, 21] = aten.conv2d.default(%x, %w, %b, [1, 1], [1, 1], [1, 1], 1)
  %y: f32[2, 18, 5, 21]{out} = aten.add.Tensor(%h, %r) return %y }}"""


@pytest.mark.parametrize(("into", "out"), [("", LAST), (LAST, ""), ("", "")])
def test_one_of_them(into: str, out: str) -> None:
    """Squares where anything lies in planes: what lies otherwise is turned on its way."""
    target = host_levels()[0]
    lowered = check(MIXED.format(into=into, out=out), Core(target.lanes, 32), target)
    squares = turned(lowered.kernel)
    assert squares and set(squares) == {(target.lanes, target.lanes)}


def test_channels_innermost_are_left_alone() -> None:
    source = MIXED.format(into=LAST, out=LAST).replace("21] = aten.conv", f"21]{LAST} = aten.conv")
    assert not turned(lower_convolution(parse(source), Core(16, 32)).kernel)


def test_a_number_is_no_image() -> None:
    """An epilogue that multiplies with a size of the call has a kernel too."""
    source = """graph g(%n: int(s0), %x: f32[1, 6, 4, s0]) { param %w: f32[18, 6, 3, 3] = "w"
      param %b: f32[18] = "b"
      %h: f32[1, 18, 4, s0] = aten.conv2d.default(%x, %w, %b, [1, 1], [1, 1], [1, 1], 1)
      %y: f32[1, 18, 4, s0] = aten.mul.Tensor(%h, %n) return %y }"""
    assert turned(lower_convolution(parse(source), Core(16, 32)).kernel)
