"""Few rows times weights of four bits: the kernel against float64, and the graph that files become."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor

from hotfuse.compile.freeze import frozen
from hotfuse.frontends.captured import TensorSpec
from hotfuse.frontends.onnx.interp import OnnxModule
from hotfuse.frontends.onnx.load import load
from hotfuse.frontends.onnx.tracing.traced_model import trace
from hotfuse.fusion.groups import group
from hotfuse.lower import CannotLower, lower
from hotfuse.lower.cpu.tiling import Core
from hotfuse.ops.own import nibbles
from tests.contract.lowering import group_of, run_native

CORES = (Core(16, 32), Core(8, 16), Core(8, 16, threads=2))
SIZES = [(1, 64, 32), (5, 16, 16), (64, 256, 32), (70, 64, 64), (130, 96, 16), (200, 512, 128)]
"""Columns, K, block."""


@functools.cache
def weights(n: int, k: int, block: int, zeros: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Bytes, scales, zeros."""
    g = torch.Generator().manual_seed(n + k)
    made = torch.randint(0, 256, (n, k // block, block // 2), dtype=torch.uint8, generator=g)
    zero = torch.randint(0, 16, (n, k // block), dtype=torch.uint8, generator=g) if zeros else None
    return made, torch.randn(n, k // block, generator=g), zero


def by_hand(x: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor | None) -> Tensor:
    """In float64, weight by weight."""
    q = torch.stack([weight & 15, weight >> 4], -1).flatten(-2).double()
    real = (q - (8 if zeros is None else zeros.double().unsqueeze(2))) * scales.double().unsqueeze(2)
    return x.double() @ real.flatten(1).t()


def product(x: Tensor, n: int, k: int, block: int, zeros: bool) -> tuple[Any, Tensor]:
    """The group of one product, and what it has to give."""
    told = weights(n, k, block, zeros)
    panels, scale, zero = nibbles.packed(*told)
    found = group_of(lambda x: nibbles.nibble_mm(x, panels, scale, zero, n), [x], constants=True)
    return found, by_hand(x, *told)


@pytest.mark.budget_s(5)
@pytest.mark.parametrize("core", CORES, ids=str)
@pytest.mark.parametrize("zeros", [False, True], ids=["middle", "zeros"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_kernel_gives_what_the_weights_stand_for(size: tuple[int, int, int], zeros: bool, core: Core) -> None:
    for rows in (1, 3, 4, 7, 8):
        x = torch.randn(rows, size[1], generator=torch.Generator().manual_seed(rows))
        found, want = product(x, *size, zeros)
        assert [g.kind for g in group(found.graph)] == ["nibbles"]
        (got,) = run_native(lower(found.graph, core), found, [x])
        torch.testing.assert_close(got.double(), want, rtol=0, atol=3e-6 * size[1] ** 0.5 * 10)
        (plain,) = (nibbles.nibble_mm(x, *nibbles.packed(*weights(*size, zeros)), size[0]),)
        torch.testing.assert_close(plain.double(), want, rtol=0, atol=3e-6 * size[1] ** 0.5 * 10)


@pytest.mark.parametrize("zeros", [False, True], ids=["middle", "zeros"])
def test_numbers_that_are_none_go_where_they_belong(zeros: bool) -> None:
    x = torch.ones(3, 64)
    x[0, 5], x[1, 40], x[2, 63] = torch.nan, torch.inf, -torch.inf
    found, _ = product(x, 70, 64, 32, zeros)
    want = nibbles.nibble_mm(x, *nibbles.packed(*weights(70, 64, 32, zeros)), 70)
    (got,) = run_native(lower(found.graph, CORES[0]), found, [x])
    assert want.isnan().any() and want.isinf().any()
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_rows_that_are_many_stay_with_the_library() -> None:
    found, _ = product(torch.randn(9, 64), 70, 64, 32, False)
    assert [g.kind for g in group(found.graph)] == ["library"]
    with pytest.raises(CannotLower, match="more than 8 rows"):
        lower(found.graph, CORES[0])


def file(n: int, k: int, block: int, *, zeros: bool, bias: bool, bits: int = 4) -> bytes:
    g = np.random.default_rng(n)
    blocks = -(-k // block)
    inits = {
        "w": g.integers(0, 256, (n, blocks, block * bits // 8), dtype=np.uint8),
        "s": g.standard_normal(n * blocks).astype(np.float32),
    }
    names = ["x", "w", "s", "", "", ""]
    if zeros:
        inits["z"], names[3] = g.integers(0, 256, n * -(-blocks * bits // 8), dtype=np.uint8), "z"
    if bias:
        inits["b"], names[5] = g.standard_normal(n).astype(np.float32), "b"
    node = helper.make_node("MatMulNBits", names, ["y"], domain="com.microsoft", K=k, N=n, bits=bits, block_size=block)
    ports = [helper.make_tensor_value_info(p, TensorProto.FLOAT, ["m", w]) for p, w in (("x", k), ("y", n))]
    graph = helper.make_graph([node], "g", ports[:1], ports[1:], [numpy_helper.from_array(v, k) for k, v in inits.items()])
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()


@pytest.mark.parametrize(("rows", "bits", "taken"), [(1, 4, True), (8, 4, True), (9, 4, False), (1, 8, False)])
@pytest.mark.parametrize(("k", "zeros", "bias"), [(64, False, False), (70, True, True), (96, True, False)])
def test_files_of_few_rows_keep_four_bits(rows: int, bits: int, taken: bool, k: int, zeros: bool, bias: bool) -> None:
    data = file(70, k, 32, zeros=zeros, bias=bias, bits=bits)
    module = OnnxModule(load(data))
    x = torch.randn(rows, k)
    traced = trace(module, [TensorSpec((rows, k), (k, 1), torch.float32, "cpu")])
    assert not traced.leaves
    assert any("nibble_mm" in str(n.target) for n in traced.gm.graph.nodes) is taken
    (got,), (want,) = traced(x), module(x)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    ort = pytest.importorskip("onnxruntime")
    (theirs,) = ort.InferenceSession(data, providers=["CPUExecutionProvider"]).run(None, {"x": x.numpy()})
    np.testing.assert_allclose(got.numpy(), theirs, rtol=1e-4, atol=1e-4)


def test_what_is_made_of_the_weights_is_made_once() -> None:
    told = weights(70, 64, 32, True)
    found = group_of(lambda x: nibbles.nibble_mm(x, *nibbles.packed(*told), 70), [torch.randn(1, 64)], constants=True)
    graph, held = frozen(found.graph, found.weights)
    assert [n.op for n in graph.nodes] == ["hotfuse.nibble_mm.default"]
    assert {t.dtype for k, t in held.items() if k.startswith("frozen:")} == {torch.int32, torch.float32, torch.uint8}
    assert len(graph.params) == 3
