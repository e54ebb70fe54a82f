"""Operands of their own: what several kernels prepare alike is copied, and each kernel takes its copy in."""

from __future__ import annotations

import pytest
import torch

from hotfuse.analysis.quantized import byte_products, weight_nodes
from hotfuse.backends.library import LibraryBackend
from hotfuse.backends.llvm.native import compile_kernel, load_kernel
from hotfuse.backends.llvm.runs.kernel_call import artifact
from hotfuse.compile.freeze import frozen
from hotfuse.fusion.groups import group
from hotfuse.fusion.recomputed_operands import with_own_operands
from hotfuse.ir.graph import Graph
from hotfuse.ir.text import parse
from hotfuse.ir.verify import verify
from hotfuse.lower import lower
from hotfuse.lower.cpu.tiling import Core

THREE = """graph g(%q: u8[5, 8]) {
  param %w: i8[8, 6] = "w"
  param %v: i8[8, 6] = "v"
  %c: f32[5, 8] = aten.to.dtype(%q, f32)
  %s: f32[5, 8] = aten.sub.Tensor(%c, 9.0)
  %x: f32[5, 8] = aten.mul.Tensor(%s, 0.5)
  %wf: f32[8, 6] = aten.to.dtype(%w, f32)
  %vf: f32[8, 6] = aten.to.dtype(%v, f32)
  %a: f32[5, 6] = aten.matmul.default(%x, %wf)
  %b: f32[5, 6] = aten.matmul.default(%x, %vf)
  %r: f32[5, 8] = aten.relu.default(%x)
  return %a, %b, %r
}"""
MASKED = """graph g(%x: f32[2, 3, 7, 8], %m: bool[2, 7]) {
  %u: bool[2, 1, 7] = aten.unsqueeze.default(%m, 1)
  %t: bool[2, 1, 1, 7] = aten.unsqueeze.default(%u, 1)
  %e: bool[2, 1, 7, 7]{*} = aten.expand.default(%t, [2, 1, 7, 7])
  %a: f32[2, 3, 7, 8] = aten.scaled_dot_product_attention.default(%x, %x, %x, %e)
  %b: f32[2, 3, 7, 8] = aten.scaled_dot_product_attention.default(%a, %a, %a, %e)
  return %b
}"""


def outputs(graph: Graph, inputs: list[torch.Tensor], weights: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    return list(LibraryBackend().compile(graph, weights).run(*inputs))


def byte_data() -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    weights = {n: torch.randint(-128, 128, (8, 6), dtype=torch.int8, generator=generator) for n in "wv"}
    return [torch.randint(0, 256, (5, 8), dtype=torch.uint8, generator=generator)], weights


def test_products_of_bytes_share_nothing_but_bytes() -> None:
    graph = verify(parse(THREE))
    own = verify(with_own_operands(graph))
    inputs, weights = byte_data()
    for got, want in zip(outputs(own, inputs, weights), outputs(graph, inputs, weights), strict=True):
        assert torch.equal(got, want)
    (one,) = (g for g in group(own) if g.kind == "contract")
    products = byte_products(own)
    assert len(products) == 2
    assert {i for p in products.values() for i in (p.node, *p.x.nodes, *p.weight.nodes)} == set(one.nodes)
    assert verify(with_own_operands(own)) == own


def test_attentions_walk_one_mask() -> None:
    graph = verify(parse(MASKED))
    own = verify(with_own_operands(graph))
    attentions = [g for g in group(own) if g.kind == "attention"]
    assert [len(g.nodes) for g in attentions] == [4, 4]
    x, mask = torch.randn(2, 3, 7, 8, generator=torch.Generator().manual_seed(1)), torch.ones(2, 7, dtype=torch.bool)
    mask[1, 4:] = False
    assert torch.equal(outputs(own, [x, mask], {})[0], outputs(graph, [x, mask], {})[0])


def test_byte_weights_are_not_frozen_into_floats() -> None:
    graph = verify(parse(THREE))
    assert {graph.nodes[i].outs[0].name for i in weight_nodes(graph)} == {"wf", "vf"}
    laid_out, _ = frozen(graph, byte_data()[1])
    assert len(byte_products(laid_out)) == 2


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f64"])
def test_weights_of_any_type_reach_their_kernel(dtype: str) -> None:
    """From torch's memory through packing into native code."""
    graph = verify(parse(f"""graph g(%x: {dtype}[3, 20]) {{ param %w: {dtype}[10, 20] = "w"
      %y: {dtype}[3, 10] = aten.linear.default(%x, %w) return %y }}"""))
    real = {"bf16": torch.bfloat16, "f16": torch.float16, "f64": torch.float64}[dtype]
    generator = torch.Generator().manual_seed(2)
    x, w = (torch.randn(n, 20, generator=generator).to(real) for n in (3, 10))
    lowered = lower(graph, Core(4, 16))
    (got,) = artifact(graph, lowered, load_kernel(compile_kernel(lowered.kernel)), {"w": w}, "").run(x)
    exact = x.double() @ w.double().T
    assert got.dtype is real
    bound = {"bf16": 2**-7, "f16": 2**-10, "f64": 1e-13}[dtype]
    assert float((got.double() - exact).abs().max()) <= bound * (1 + float(exact.abs().max()))
