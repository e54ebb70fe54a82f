"""Images with channels last on a device: the same numbers, lying as they did for callers, and kernels that write in that order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hotfuse.backends.device_code import GpuTarget
from hotfuse.backends.library import meaning
from hotfuse.backends.pycode import flat_function
from hotfuse.compile.device.channels_last import LAST, channels_last, faster
from hotfuse.compile.device.units import compiled, plan
from hotfuse.compile.request_bodies import DevicePlanRequest
from hotfuse.ir.graph import Graph
from hotfuse.ir.normal import normalized
from hotfuse.ir.subgraph import extract
from hotfuse.ir.text import parse, show
from hotfuse.ir.types import TensorType
from hotfuse.ir.verify import verify
from hotfuse.lower.gpu import gpu_tilings
from hotfuse.ops.table import packet
from tests.contract.lowering import Group, group_of

C = 16


def network(dtype: torch.dtype, *, last: bool = False) -> tuple[Group, torch.Tensor, tuple[torch.Tensor, ...]]:
    """Convolutions with norms, a residual, pooling, and results of several kinds; with what the module itself gives."""
    stem, inner, after = (torch.randn(s).to(dtype) / 4 for s in ((C, 3, 7, 7), (C, C, 3, 3), (C, C, 1, 1)))
    norms = [[torch.rand(C).to(dtype) + 0.5 for _ in range(4)] for _ in range(2)]

    def norm(x: torch.Tensor, p: list[torch.Tensor]) -> torch.Tensor:
        return F.batch_norm(x, p[0], p[1], p[2], p[3], False, 0.1, 1e-5)

    def net(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = F.max_pool2d(F.relu(norm(F.conv2d(x, stem, None, 2, 3), norms[0])), 3, 2, 1)
        y = F.relu(norm(F.conv2d(h, inner, None, 1, 1), norms[1]) + h)
        return F.conv2d(y, after), y, F.adaptive_avg_pool2d(y, 1), y.flatten(1)

    x = torch.randn(2, 3, 20, 28).to(dtype)
    x = x.contiguous(memory_format=torch.channels_last) if last else x
    return group_of(net, (x,), constants=True), x, net(x)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dtype", [torch.half, torch.bfloat16])
def test_the_same_numbers_lie_as_they_did(dtype: torch.dtype, last: bool) -> None:
    found, x, want = network(dtype, last=last)
    graph = channels_last(found.graph)
    verify(graph)
    got = flat_function(graph, meaning, found.weights)[0](x)
    for g, w in zip(got, want, strict=True):
        assert g.shape == w.shape and g.dtype is w.dtype
        assert all(n == 1 or a == b for n, a, b in zip(g.shape, g.stride(), w.stride(), strict=True))
        assert torch.allclose(g.double(), w.double(), rtol=2e-2, atol=2e-2)


def images(graph: Graph) -> list[TensorType]:
    return [v.type for n in graph.nodes for v in n.outs if isinstance(v.type, TensorType) and len(v.type.shape) == 4]


def test_one_copy_at_the_beginning_one_for_each_weight_with_windows_and_one_for_each_result() -> None:
    graph = channels_last(network(torch.half)[0].graph)
    ops = [packet(n.op) for n in graph.nodes]
    assert ops.count("aten.contiguous") == 1 + 2 and ops.count("aten.clone") == 3
    assert sum(t.layout == LAST for t in images(graph)) == len(images(graph)) - 3


def test_kernels_write_neighbours_in_memory_together() -> None:
    answer, _ = plan(DevicePlanRequest(show(channels_last(network(torch.half)[0].graph)), False))
    graph, at, seen = parse(answer.graph), 0, 0
    for count, kind in answer.groups:
        piece = normalized(extract(graph, range(at, at + count), "group"))
        at += count
        if kind == "library" or not any(packet(n.op) == "aten.batch_norm" for n in piece.nodes):
            continue
        tiling = gpu_tilings(piece)[0]
        lowered, _ = compiled(piece, tiling, {}, GpuTarget("cuda", "90", 32))
        assert tiling.columns == C  # which are a row of the tile
        assert all(strides[1] == 1 for _, strides in lowered.strides[:1])
        seen += 1
    assert seen == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_types_stay(dtype: torch.dtype) -> None:
    graph = network(dtype)[0].graph
    assert channels_last(graph) is graph


def test_no_images_no_change() -> None:
    found = group_of(lambda x, w: F.conv1d(x, w), (torch.randn(1, 4, 9).half(), torch.randn(2, 4, 3).half()))
    assert channels_last(found.graph) is found.graph


def test_both_orders_are_timed_once_for_each_kind_of_convolution() -> None:
    weight = torch.randn(C, C, 3, 3).half()
    found = group_of(lambda x: F.conv2d(F.conv2d(x, weight, None, 1, 1), weight, None, 1, 1), (torch.randn(1, C, 6, 6).half(),),
                     constants=True)  # fmt: skip
    asked: list[float] = []

    def seconds(run: Callable[[], Any]) -> float:
        assert run()[0].shape == (1, C, 6, 6)
        asked.append(1e-6 * (len(asked) + 1))
        return asked[-1]

    assert faster(found.graph, found.weights, torch.device("cpu"), seconds) == pytest.approx((2.0, 4.0))
    assert len(asked) == 2
