"""Convolutions read images without gaps: a copy stands where a view would have them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hotfuse.base.settings import Settings
from hotfuse.compile.host import host_core
from hotfuse.compile.unit.kernel_cache import piece_of
from hotfuse.fusion.dense_images import dense_images
from hotfuse.fusion.layout import CONVERTS
from hotfuse.ir.graph import Graph
from hotfuse.ir.text import parse
from hotfuse.ir.types import DType, TensorType
from hotfuse.ir.verify import verify
from hotfuse.lower import lower
from hotfuse.lower.common.errors import CannotLower
from hotfuse.native.target import host
from hotfuse.pipeline.plan_passes import compile_tier0

SPLIT = """graph g(%x: f32[2, 8, 6, 6]) {
  param %w: f32[4, 4, 3, 3] = "w"
  %a: f32[2, 4, 6, 6]{*} = aten.narrow.default(%x, 1, 4, 4)
  %y: f32[2, 4, 6, 6] = aten.conv2d.default(%a, %w, None, [1, 1], [1, 1])
  %z: f32[2, 4, 6, 6] = aten.conv2d.default(%a, %w, None, [1, 1], [1, 1])
  return %y, %z
}"""
BYTES = """graph g(%x: u8[2, 8, 6, 6]) {
  param %w: i8[4, 4, 3, 3] = "w"
  %a: u8[2, 4, 6, 6]{*} = aten.narrow.default(%x, 1, 4, 4)
  %b: f32[2, 4, 6, 6] = aten.to.dtype(%a, f32)
  %c: f32[4, 4, 3, 3] = aten.to.dtype(%w, f32)
  %y: f32[2, 4, 6, 6] = aten.conv2d.default(%b, %c, None, [1, 1], [1, 1])
  return %y
}"""


def lowers(graph: Graph) -> bool:
    """Whether the last convolution has a kernel of its own."""
    last = max(i for i, n in enumerate(graph.nodes) if n.op.startswith("aten.conv2d"))
    try:
        lower(piece_of(graph, range(last, last + 1), {}).normal, host_core(host()))
    except CannotLower as e:
        assert "gaps" in str(e), e
        return False
    return True


def test_one_copy_serves_all_convolutions_and_they_have_kernels() -> None:
    graph = parse(SPLIT)
    made = dense_images(graph)
    verify(made)
    assert [n.op for n in made.nodes].count(CONVERTS) == 1
    assert lowers(made) and not lowers(graph)
    weights, x = {"w": torch.randn(4, 4, 3, 3)}, torch.randn(2, 8, 6, 6)
    y, z = compile_tier0(made, weights, Settings()).run(x)
    torch.testing.assert_close(y, F.conv2d(x[:, 4:], weights["w"], padding=1))
    assert torch.equal(y, z)


def test_bytes_are_copied_before_they_are_widened() -> None:
    made = dense_images(parse(BYTES))
    verify(made)
    ops = [n.op for n in made.nodes]
    copied = made.nodes[ops.index(CONVERTS)].outs[0].type
    assert ops.index(CONVERTS) < ops.index("aten.to.dtype")
    assert isinstance(copied, TensorType) and copied.dtype is DType.U8 and not copied.layout.strided


@pytest.mark.parametrize("text", [
    SPLIT.replace("{*}", ""),
    SPLIT.replace('  param %w: f32[4, 4, 3, 3] = "w"\n', "").replace("6, 6]) {", "6, 6], %w: f32[4, 4, 3, 3]) {"),
])  # fmt: skip
def test_what_has_no_gaps_or_no_kernel_stays(text: str) -> None:
    graph = parse(text)
    assert dense_images(graph) is graph
