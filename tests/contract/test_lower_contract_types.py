"""Products of halves, doubles and bytes: the interpreter and native code against float64, or against exact integers."""

from __future__ import annotations

import pytest
import torch

from hotfuse.backends.llvm.native import compile_kernel, load_kernel
from hotfuse.ir import dims
from hotfuse.ir.graph import Graph, Value, output_values, sources
from hotfuse.ir.text import parse
from hotfuse.ir.types import TensorType
from hotfuse.lower.common import pack
from hotfuse.lower.common.codec import from_json, to_json
from hotfuse.lower.common.errors import CannotLower
from hotfuse.lower.common.lowered import BufferArgument, BufferRole, Lowered, PackArgument, SymbolArgument
from hotfuse.lower.common.pack import PackSource, PackSpec, WeightOrder
from hotfuse.lower.cpu.gemm.product_group import lower_contraction
from hotfuse.native.target import CpuTarget, host_levels
from hotfuse.ops.table import resolve
from hotfuse.ops.torch_args import to_torch
from hotfuse.ops.torch_dtypes import torch_dtype
from hotfuse.tile import interpreter
from tests.contract.lowering import as_numpy, as_torch
from tests.contract.test_lower_contract import CORES, core_of

EVERY = [None, *host_levels()]
EVERYWHERE = pytest.mark.parametrize("target", EVERY, ids=lambda t: "interpreted" if t is None else t.name)
SEED = 11


def data(graph: Graph, sizes: dict[str, int], seed: int = SEED) -> dict[str, torch.Tensor]:
    """Random inputs and weights; bytes over their whole range."""
    generator = torch.Generator().manual_seed(seed)
    made: dict[str, torch.Tensor] = {}
    for v in sources(graph):
        assert isinstance(v.type, TensorType)
        shape = [dims.evaluate(d, sizes) for d in v.type.shape]
        dtype = torch_dtype(v.type.dtype)
        if dtype.is_floating_point:
            made[v.name] = torch.randn(shape, generator=generator).to(dtype)
        else:
            info = torch.iinfo(dtype)
            made[v.name] = torch.randint(info.min, info.max + 1, shape, generator=generator, dtype=dtype)
    return made


def run(
    lowered: Lowered, graph: Graph, values: dict[str, torch.Tensor], sizes: dict[str, int], target: CpuTarget | None,
    threads: int = 1,
) -> list[torch.Tensor]:
    """The outputs of a lowered group."""
    outs: dict[str, torch.Tensor] = {}
    for v in dict.fromkeys(output_values(graph)):
        assert isinstance(v.type, TensorType)
        outs[v.name] = torch.full([dims.evaluate(d, sizes) for d in v.type.shape], 77, dtype=torch_dtype(v.type.dtype))
    buffers = {}
    numbers: dict[str, int] = {}
    for a in lowered.arguments:
        match a:
            case BufferArgument(buffer, role, value):
                buffers[buffer] = as_numpy(outs[value] if role is BufferRole.OUTPUT else values[value]).reshape(-1)
            case PackArgument(buffer, spec):
                buffers[buffer] = pack.pack(spec, {s.name: as_numpy(values[s.name]) for s in spec.sources})
            case SymbolArgument(size, symbol):
                numbers[size] = sizes[symbol]
            case _:
                raise AssertionError(a)
    if target is None:
        interpreter.run(lowered.kernel, buffers, numbers)
    else:
        tensors = [as_torch(x) for x in buffers.values()]
        load_kernel(compile_kernel(lowered.kernel, target))(tensors, list(numbers.values()), threads)
    return [outs[v.name] for v in output_values(graph)]


def meaning(graph: Graph, values: dict[str, torch.Tensor], wide: bool) -> list[torch.Tensor]:
    """The graph through torch's operators; `wide` computes reals in float64."""
    env = {n: t.double() if wide and t.is_floating_point() else t for n, t in values.items()}
    for node in graph.nodes:
        args = [env[a.name] if isinstance(a, Value) else to_torch(a) for a in node.args]
        result = resolve(node.op)(*args, **{k: to_torch(a) for k, a in node.attrs})
        env[node.outs[0].name] = result.double() if wide and result.is_floating_point() else result
    return [env[v.name] for v in output_values(graph)]


# --- halves and doubles

BOUND = {"f16": 2**-10, "bf16": 2**-7, "f64": 1e-13}
"""Largest error relative to the magnitude of the result: one rounding for halves, which sum in fp32."""


@EVERYWHERE
@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize(("batch", "n", "k"), [("1", 50, 33), ("2, s0", 20, 64), ("13", 7, 5), ("s0", 1, 70)])
def test_reals(target: CpuTarget | None, dtype: str, batch: str, n: int, k: int) -> None:
    graph = parse(f"""graph g(%x: {dtype}[{batch}, {k}], %r: {dtype}[{batch}, {n}]) {{
      param %w: {dtype}[{n}, {k}] = "w"
      param %b: {dtype}[{n}] = "b"
      %h: {dtype}[{batch}, {n}] = aten.linear.default(%x, %w, %b)
      %y: {dtype}[{batch}, {n}] = aten.add.Tensor(%h, %r)
      return %h, %y }}""")
    lowered = lower_contraction(graph, CORES["avx2"] if target is None else core_of(target))
    for s0 in (0, 1, 9) if "s0" in batch else (0,):
        values = data(graph, {"s0": s0})
        found = run(lowered, graph, values, {"s0": s0}, target)
        for got, exact in zip(found, meaning(graph, values, wide=True), strict=True):
            assert got.dtype == torch_dtype(graph.nodes[0].outs[0].type.dtype)  # type: ignore[union-attr]
            error = (got.double() - exact).abs()
            assert bool((error <= BOUND[dtype] * (exact.abs() + 2)).all()), error.max()
    assert from_json(to_json(lowered)) == lowered


def test_halves_are_kept_as_halves() -> None:
    graph = parse("""graph g(%x: bf16[4, 32]) { param %w: bf16[64, 32] = "w"
      %h: bf16[4, 64] = aten.linear.default(%x, %w) return %h }""")
    (spec,) = [a.spec for a in lower_contraction(graph, CORES["avx512"]).arguments if isinstance(a, PackArgument)]
    assert spec.dtype.value == "bf16"


# --- bytes

INTEGER = """graph g(%x: {x}[{batch}, {k}], %zx: {x}[]) {{
  param %w: {w}[{k}, {n}] = "w"
  %xf: f64[{batch}, {k}] = aten.to.dtype(%x, f64)
  %zf: f32[] = aten.to.dtype(%zx, f32)
  %zd: f64[] = aten.to.dtype(%zf, f64)
  %xs: f64[{batch}, {k}] = aten.sub.Tensor(%xf, %zd)
  %wf: f64[{k}, {n}] = aten.to.dtype(%w, f64)
  %ws: f64[{k}, {n}] = aten.sub.Tensor(%wf, {zw})
  %h: f64[{batch}, {n}] = aten.matmul.default(%xs, %ws)
  %y: i32[{batch}, {n}] = aten.to.dtype(%h, i32)
  return %y }}"""
"""MatMulInteger as the front end writes it, with a zero point that is known at run time."""


@EVERYWHERE
@pytest.mark.parametrize(("x", "w"), [("u8", "i8"), ("u8", "u8"), ("i8", "i8"), ("i8", "u8")])
@pytest.mark.parametrize("zw", [0.0, 128.0, -3.0])
def test_integers_are_exact(target: CpuTarget | None, x: str, w: str, zw: float) -> None:
    for batch, n, k in (("1", 50, 33), ("2, s0", 20, 64), ("13", 7, 5), ("3", 70, 1)):
        graph = parse(INTEGER.format(x=x, w=w, zw=zw, batch=batch, n=n, k=k))
        lowered = lower_contraction(graph, CORES["avx2"] if target is None else core_of(target))
        values = data(graph, {"s0": 5})
        (got,) = run(lowered, graph, values, {"s0": 5}, target)
        (want,) = meaning(graph, values, wide=False)
        assert torch.equal(got, want)
        assert from_json(to_json(lowered)) == lowered


DEQUANTIZED = """graph g(%x: u8[s0, 40]) {{
  param %w: i8{shape} = "w"
  param %s: f32{scales} = "s"
  param %b: f32[24] = "b"
  %xf: f32[s0, 40] = aten.to.dtype(%x, f32)
  %xs: f32[s0, 40] = aten.sub.Tensor(%xf, 117.0)
  %xr: f32[s0, 40] = aten.mul.Tensor(%xs, 0.03)
  %wf: f32{shape} = aten.to.dtype(%w, f32)
  %wr: f32{shape} = aten.mul.Tensor(%wf, %s)
  %h: f32[s0, 24] = {product}
  %r: f32[s0, 24] = aten.relu.default(%h)
  %d: f32[s0, 24] = aten.div.Tensor(%r, 7.5)
  %o: f32[s0, 24] = aten.round.default(%d)
  %p: f32[s0, 24] = aten.add.Tensor(%o, 3.0)
  %c: f32[s0, 24] = aten.clamp.default(%p, 0, 255)
  %i: i32[s0, 24] = aten.to.dtype(%c, i32)
  %y: u8[s0, 24] = aten.to.dtype(%i, u8)
  return %h, %y }}"""
"""DequantizeLinear around a product, and QuantizeLinear behind it."""


@EVERYWHERE
@pytest.mark.parametrize(
    ("product", "shape", "scales"),
    [
        ("aten.linear.default(%xr, %wr, %b)", "[24, 40]", "[24, 1]"),
        ("aten.linear.default(%xr, %wr)", "[24, 40]", "[]"),
        ("aten.matmul.default(%xr, %wr)", "[40, 24]", "[1, 24]"),
        ("aten.matmul.default(%xr, %wr)", "[40, 24]", "[24]"),
        ("aten.addmm.default(%b, %xr, %wr)", "[40, 24]", "[1]"),
    ],
)
def test_dequantized_operands(target: CpuTarget | None, product: str, shape: str, scales: str) -> None:
    graph = parse(DEQUANTIZED.format(product=product, shape=shape, scales=scales))
    lowered = lower_contraction(graph, CORES["avx2"] if target is None else core_of(target))
    assert any(isinstance(a, PackArgument) and a.spec.dtype.value == "i8" for a in lowered.arguments)
    for s0 in (0, 1, 17):
        values = data(graph, {"s0": s0})
        real, whole = run(lowered, graph, values, {"s0": s0}, target)
        exact, rounded = meaning(graph, values, wide=True)
        assert torch.allclose(real.double(), exact, rtol=1e-6, atol=1e-5 * float(exact.abs().max() if s0 else 0))
        assert int((whole.int() - rounded.int()).abs().max() if s0 else 0) <= 1
        assert float((whole != rounded).float().mean() if s0 else 0) < 0.01


def test_what_bytes_are_refused() -> None:
    text = INTEGER.format(x="u8", w="i8", zw=0.5, batch="3", n=8, k=8)
    with pytest.raises(CannotLower, match="not one whole number"):
        lower_contraction(parse(text), CORES["avx512"])
    text = DEQUANTIZED.format(product="aten.matmul.default(%xr, %wr)", shape="[40, 24]", scales="[40, 1]")
    with pytest.raises(CannotLower, match="whose scales are"):
        lower_contraction(parse(text), CORES["avx512"])


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
@pytest.mark.parametrize(("n", "k"), [(5, 7), (16, 8), (33, 1)])
def test_bytes_lie_four_by_four(dtype: torch.dtype, n: int, k: int) -> None:
    info = torch.iinfo(dtype)
    weight = torch.randint(info.min, info.max + 1, (k, n), dtype=dtype, generator=torch.Generator().manual_seed(SEED))
    spec = PackSpec((PackSource("w", WeightOrder.KN, n),), k, 16, pack.DType.I8)
    flat = pack.pack(spec, {"w": weight.numpy()})
    stored = weight.int() - (128 if dtype is torch.uint8 else 0)
    for column in range(n):
        for step in range(k):
            at = column // 16 * spec.panel_stride + (step // 4 * 16 + column % 16) * 4 + step % 4
            assert flat[at] == stored[step, column]
    sums = pack.pack(PackSpec(spec.sources, k, 16, pack.DType.I32), {"w": weight.numpy()})
    assert [int(s) for s in sums[:n]] == stored.sum(0)[:n].tolist() if n <= 16 else True
