"""How a convolution's work is cut into tasks: neighbours share what comes from afar.

Bound: within 1e-5 of the float64 result, relative to the largest element.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hotfuse.ir.dims import evaluate
from hotfuse.ir.text import parse
from hotfuse.lower.common.lowered import Lowered
from hotfuse.lower.cpu.conv.conv_group import lower_convolution
from hotfuse.lower.cpu.tiling import Core, core_for
from hotfuse.native.target import host_levels
from hotfuse.tile.program import Loop, LoopKind, Stmt
from tests.contract.convolving import check, text
from tests.contract.lowering import Group, run_native

CORE = core_for(16, many_registers=True)


def convolution(inputs: int, outputs: int, size: int) -> Group:
    """Windows of 3 x 3 that move by two, channels innermost."""
    out = (size - 1) // 2 + 1
    graph = parse(f"""graph g(%x: f32[1, {inputs}, {size}, {size}]{{0,2,3,1}}) {{
      param %w: f32[{outputs}, {inputs}, 3, 3] = "w"
      %y: f32[1, {outputs}, {out}, {out}]{{0,2,3,1}} = aten.conv2d.default(%x, %w, None, [2, 2], [1, 1])
      return %y }}""")
    return Group(graph, {"w": torch.randn(outputs, inputs, 3, 3) / (9 * inputs) ** 0.5})


def panels(lowered: Lowered) -> list[int]:
    """The panel of every task, in order."""
    (shared,) = (s for s in lowered.kernel.body if isinstance(s, Loop))
    assert shared.kind is LoopKind.PARALLEL
    (inner,) = (s for s in _loops(shared.body) if s.var == "panel")
    return [evaluate(inner.lo, {shared.var: n}) for n in range(evaluate(shared.hi, {}))]


def _loops(stmts: tuple[Stmt, ...]) -> list[Loop]:
    mine = [s for s in stmts if isinstance(s, Loop)]
    return mine + [inner for s in mine for inner in _loops(s.body)]


def test_a_small_image_is_shared_by_panels_and_a_large_one_by_rows() -> None:
    """Two threads have half of the tasks each: of the weights, they have at most one panel in common, or all of them."""
    small = panels(lower_convolution(convolution(512, 512, 14).graph, CORE, name="small"))
    large = panels(lower_convolution(convolution(64, 512, 224).graph, CORE, name="large"))
    for tasks, most in ((small, 1), (large, len(set(large)))):
        half = len(tasks) // 2
        assert len(set(tasks[:half]) & set(tasks[half:])) <= most
    assert small == sorted(small) and large != sorted(large)
    assert len(set(small)) > 4 and small.count(0) == small.count(4) > 1


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("inputs", "outputs", "size"), [(64, 256, 14), (5, 200, 1), (16, 96, 2), (3, 49, 30)])
def test_every_output_is_made(inputs: int, outputs: int, size: int, threads: int) -> None:
    group = convolution(inputs, outputs, size)
    x = torch.randn(1, inputs, size, size).contiguous(memory_format=torch.channels_last)
    want = F.conv2d(x.double(), group.weights["w"].double(), None, 2, 1)
    lowered = lower_convolution(group.graph, CORE, name="conv")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        (got,) = run_native(lowered, group, [x])
    finally:
        torch.set_num_threads(before)
    assert float((got.double() - want).abs().max()) <= 1e-5 * max(1.0, float(want.abs().max()))


@pytest.mark.parametrize("nearest", [2 << 10, 1 << 20])
def test_depthwise_rows_lie_inside_blocks_where_lines_leave_the_cache(nearest: int) -> None:
    """Five blocks in a row: one behind the other, or each with all rows, so that the lines it reads are there still."""
    target = host_levels()[0]
    core = Core(target.lanes, 32, nearest, 1 << 20)
    source = text(size=(7, 70), window=(3, 3), channels=(21, 21), groups=21, padding=1, n="2", epilogue="batch norm")
    kernel = check(source, core, target).kernel
    inside = [_loops(loop.body) for loop in _loops(kernel.body) if loop.var in ("row", "row_1")]
    assert inside and any(loop.var.startswith("block") for loops in inside for loop in loops) == (nearest > 1 << 16)
