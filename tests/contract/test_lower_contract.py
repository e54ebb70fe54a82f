"""Matrix products through the tile interpreter and as native code, against float64."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

from hotfuse.backends.llvm.native import compile_kernel, load_kernel
from hotfuse.ir import dims
from hotfuse.ir.dims import Dim, expr, sym
from hotfuse.ir.graph import Graph, Value, output_values, sources
from hotfuse.ir.text import parse
from hotfuse.ir.types import DType, TensorType
from hotfuse.lower import lower
from hotfuse.lower.common import pack
from hotfuse.lower.common.codec import from_json, to_json
from hotfuse.lower.common.errors import CannotLower
from hotfuse.lower.common.lowered import (
    BufferArgument,
    BufferRole,
    Lowered,
    PackArgument,
    StrideArgument,
    SymbolArgument,
)
from hotfuse.lower.common.pack import PackSource, PackSpec, WeightOrder
from hotfuse.lower.cpu import tiling
from hotfuse.lower.cpu.gemm import gemm
from hotfuse.lower.cpu.gemm.product_group import lower_contraction
from hotfuse.native.target import CpuTarget, host_levels
from hotfuse.ops.table import resolve
from hotfuse.ops.torch_dtypes import torch_dtype
from hotfuse.tile import interpreter
from hotfuse.tile.build import KernelBuilder, remaining
from hotfuse.tile.program import Kernel
from hotfuse.tile.text import show as show_kernel
from tests.seeds import generator

CORES = {
    "avx512": tiling.Core(16, 32),
    "avx2": tiling.Core(8, 16),
    "neon": tiling.Core(4, 32),
    "generic": tiling.Core(4, 16),
    "tiny caches": tiling.Core(8, 16, 1 << 10, 4 << 10),
}


def f32(*shape: int) -> np.ndarray:
    return generator().standard_normal(shape).astype(np.float32)


# --- tiling


@pytest.mark.parametrize("core", CORES.values(), ids=CORES)
@pytest.mark.parametrize("n", [1, 5, 16, 48, 50, 64, 100, 768, 1000, 1024, 2304, 4096])
def test_tiles_fit_the_registers(core: tiling.Core, n: int) -> None:
    t = tiling.choose(core, 64, [n], 768)
    for rows in range(1, t.mr + 1):
        assert t.sets(rows) * rows * t.vectors + t.vectors + 1 <= core.registers
    assert t.why


def test_generic_and_specialized_code_share_packed_weights() -> None:
    for core in CORES.values():
        for n in (48, 100, 1024, 3072):
            assert {tiling.choose(core, m, [n], 768).nr for m in (1, 4, 64, 512, sym("s"))} == {
                tiling.choose(core, 1, [n], 768).nr
            }


def test_the_tiles_that_measured_best() -> None:
    core = CORES["avx512"]
    assert {(t.mr, t.nr) for t in (tiling.choose(core, 128, [n], 768) for n in (768, 3072, 2304))} == {(9, 48)}
    wide = tiling.choose(core, 128, [1024], 1024)
    assert (wide.mr, wide.nr) == (6, 64)
    small = tiling.choose(CORES["avx2"], 128, [768], 768)
    assert (small.mr, small.nr) == (6, 16)


@pytest.mark.parametrize("mr", [1, 6, 9])
def test_blocks_are_balanced(mr: int) -> None:
    for m in range(0, 100):
        blocks = tiling.balance(m, mr)
        assert blocks.count * blocks.rows + blocks.extra == m
        assert blocks.rows + bool(blocks.extra) <= mr


# --- packing


@pytest.mark.parametrize("order", [WeightOrder.NK, WeightOrder.KN, WeightOrder.ROWS])
@pytest.mark.parametrize(("n", "k", "nr"), [(48, 8, 16), (50, 7, 16), (1, 1, 8), (5, 128, 8), (33, 64, 16)])
def test_panels_hold_the_weight_and_zeros(order: WeightOrder, n: int, k: int, nr: int) -> None:
    weight = f32(k, n) if order is WeightOrder.KN else f32(n, k)
    spec = PackSpec((PackSource("w", order, n),), k, nr)
    flat = pack.pack(spec, {"w": weight})
    assert flat.nbytes == spec.bytes and flat.ctypes.data % 64 == 0
    columns = weight if order is WeightOrder.KN else weight.T
    for p in range(spec.panels):
        panel = flat[p * spec.panel_stride :][: k * nr].reshape(k, nr)
        width = min(nr, n - p * nr)
        assert np.array_equal(panel[:, :width], columns[:, p * nr : p * nr + width])
        assert not panel[:, width:].any()


def test_panels_do_not_begin_at_the_same_place_of_every_page() -> None:
    for k, nr in ((1024, 16), (64, 16), (768, 48), (100, 48)):
        spec = PackSpec((PackSource("w", WeightOrder.NK, 4 * nr),), k, nr)
        assert spec.panel_stride * 4 % 4096
        assert spec.panel_stride * 4 % 64 == 0


def test_a_weight_of_another_shape_is_refused() -> None:
    spec = PackSpec((PackSource("w", WeightOrder.NK, 5),), 7, 8)
    with pytest.raises(Exception, match=r"weight w is float32\[7, 5\]"):
        pack.pack(spec, {"w": f32(7, 5)})


# --- products


def plain(m: Dim, n: int, k: int, t: tiling.GemmTiling, *, in_loop: bool, lda: Dim) -> tuple[Kernel, PackSpec]:
    """C = A @ W.T + bias."""
    spec = PackSpec((PackSource("w", WeightOrder.NK, n),), k, t.nr)
    b = KernelBuilder("product")
    rows = b.size("m") if not isinstance(m, int) else m
    a = b.input("a", DType.F32, (rows, k), (lda, 1))
    w = b.const("w", DType.F32, spec.shape, spec.stride)
    bias = b.const("bias", DType.F32, (n,))
    c = b.output("c", DType.F32, (rows, n))

    def finish(f: gemm.FinishedTile) -> None:
        col = expr("*", f.panel, t.nr)
        left = remaining(n, col)
        along = b.load(bias, (col,), (t.nr,), valid=(left,))
        f.each_row(lambda x, row: b.store(c, (row, col), b.map("add", x, along), valid=(left,)))

    gemm.product(
        b,
        gemm.Product(lambda row, k, h: b.load(a, (row, k), (h, 1)), w, rows, k, spec.panels, t),
        finish,
        in_loop=in_loop,
    )
    return b.finish(), spec


def run_plain(kernel: Kernel, spec: PackSpec, m: int, n: int, k: int, lda: int) -> None:
    memory = f32(m, lda)
    weight, bias, out = f32(n, k), f32(n), np.full((m, n), np.nan, np.float32)
    flat = memory.reshape(-1)[: (m - 1) * lda + k] if m else memory.reshape(-1)
    given = {"a": np.ascontiguousarray(flat), "w": pack.pack(spec, {"w": weight}), "bias": bias, "c": out}
    interpreter.run(kernel, given, {"m": m} if kernel.sizes else {})
    a = memory[:, :k].astype(np.float64)
    exact = a @ weight.T.astype(np.float64) + bias
    bound = (np.abs(a) @ np.abs(weight.T.astype(np.float64)) + np.abs(bias)) * (k + 2) * 2.0**-24
    assert (np.abs(out - exact) <= bound).all()


@pytest.mark.parametrize("core", CORES.values(), ids=CORES)
@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 1, 1), (1, 50, 33), (7, 5, 3), (20, 100, 18), (13, 48, 64), (40, 96, 10)]
)
@pytest.mark.parametrize("in_loop", [False, True])
def test_static_products(core: tiling.Core, m: int, n: int, k: int, in_loop: bool) -> None:
    kernel, spec = plain(m, n, k, tiling.choose(core, m, [n], k), in_loop=in_loop, lda=k + 3)
    run_plain(kernel, spec, m, n, k, k + 3)


@pytest.mark.parametrize("core", [CORES["avx512"], CORES["tiny caches"]], ids=["avx512", "tiny caches"])
@pytest.mark.parametrize(("n", "k"), [(7, 5), (50, 18)])
def test_one_kernel_serves_every_number_of_rows(core: tiling.Core, n: int, k: int) -> None:
    kernel, spec = plain(sym("m"), n, k, tiling.choose(core, sym("m"), [n], k), in_loop=True, lda=k)
    for m in (0, 1, 2, 3, 5, 8, 9, 10, 11, 12, 19, 31, 40):
        run_plain(kernel, spec, m, n, k, k)


@pytest.mark.parametrize("mr", [1, 6, 9, 10])
@pytest.mark.parametrize("of", [1, 2, 3, 5, 6, 9, 12, 24, 30])
def test_heights_are_those_that_some_multiple_has(mr: int, of: int) -> None:
    had = set[int]()
    for m in range(of, 400 * of, of):
        blocks = tiling.balance(m, mr)
        had |= {blocks.rows, blocks.rows + 1} if blocks.extra else {blocks.rows}
    assert gemm.heights_of_multiples(of, mr) == tuple(sorted(had, reverse=True))


def test_rows_that_are_a_multiple_have_few_heights() -> None:
    source = """graph g(%x: f32[(6 * s0), 12]) {
      param %w: f32[48, 12] = "w"
      %y: f32[(6 * s0), 48] = aten.linear.default(%x, %w)
      return %y
    }"""
    for s0 in (0, 1, 2, 4, 5, 7, 9, 31):
        lowered = check(source, CORES["avx512"], {"s0": s0}, 12)
        written = re.findall(r"if \(height\S* == (\d+)\)", show_kernel(lowered.kernel))
        assert written == ["9", "8", "7", "6"]


# --- groups


def reference(graph: Graph, values: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """The graph's own operators, in float64 where they are floats."""
    env: dict[str, Any] = {n: t.double() if t.dtype.is_floating_point else t for n, t in values.items()}
    for node in graph.nodes:
        args = [_given(a, env) for a in node.args]
        result = resolve(node.op)(*args, **{k: _given(a, env) for k, a in node.attrs})
        for v, r in zip(node.outs, result if isinstance(result, tuple | list) else (result,), strict=True):
            env[v.name] = r
    return [env[v.name] for v in output_values(graph)]


def _given(arg: Any, env: dict[str, Any]) -> Any:
    if isinstance(arg, DType):
        return torch_dtype(arg)
    return env[arg.name] if isinstance(arg, Value) else arg


def inputs_for(graph: Graph, sizes: dict[str, int], strided: bool = False) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    made: dict[str, torch.Tensor] = {}
    for v in sources(graph):
        assert isinstance(v.type, TensorType)
        shape = [dims.evaluate(d, sizes) for d in v.type.shape]
        if v.type.dtype is DType.BOOL:
            made[v.name] = torch.rand(shape, generator=generator) < 0.5
        elif v.type.layout.strided:
            made[v.name] = torch.randn([*shape[:-2], 2 * shape[-2], shape[-1] + 3], generator=generator)[
                ..., ::2, : shape[-1]
            ]
        else:
            made[v.name] = torch.randn(shape, generator=generator)
    return made


def run(lowered: Lowered, graph: Graph, values: dict[str, torch.Tensor], sizes: dict[str, int], native: CpuTarget | None):
    """The outputs of a lowered group, through the interpreter or as native code."""
    strides = dict(lowered.strides)
    outs: dict[str, torch.Tensor] = {}
    for v in dict.fromkeys(output_values(graph)):
        assert isinstance(v.type, TensorType)
        shape = [dims.evaluate(d, sizes) for d in v.type.shape]
        stride = [dims.evaluate(d, sizes) for d in strides[v.name]]
        outs[v.name] = torch.empty_strided(shape, stride, dtype=torch_dtype(v.type.dtype)).fill_(77)
    buffers: dict[str, torch.Tensor] = {}
    numbers: dict[str, int] = {}
    for a in lowered.arguments:
        match a:
            case BufferArgument(buffer, role, value):
                buffers[buffer] = outs[value] if role is BufferRole.OUTPUT else values[value]
            case PackArgument(buffer, spec):
                packed = pack.pack(spec, {s.name: values[s.name].numpy() for s in spec.sources})
                buffers[buffer] = torch.from_numpy(packed)
            case SymbolArgument(size, symbol):
                numbers[size] = sizes[symbol]
            case StrideArgument(size, value, dim):
                numbers[size] = values[value].stride(dim)
    kernel = lowered.kernel
    assert list(numbers) == list(kernel.sizes)
    if native is not None:
        load_kernel(compile_kernel(kernel, native))(list(buffers.values()), list(numbers.values()))
    else:
        interpreter.run(kernel, {n: t.numpy() for n, t in buffers.items()}, numbers)
    return [outs[v.name] for v in output_values(graph)]


EPILOGUES = {
    "nothing": ("", "%h"),
    "relu": ("%y: f32[{B}, N] = aten.relu.default(%h)", "%y"),
    "gelu": ("%y: f32[{B}, N] = aten.gelu.default(%h)", "%y"),
    "gelu tanh": ('%y: f32[{B}, N] = aten.gelu.default(%h, approximate="tanh")', "%y"),
    "silu": ("%y: f32[{B}, N] = aten.silu.default(%h)", "%y"),
    "residual": ("%y: f32[{B}, N] = aten.add.Tensor(%h, %r)", "%y"),
    "gelu, residual": (
        "%g: f32[{B}, N] = aten.gelu.default(%h) %y: f32[{B}, N] = aten.add.Tensor(%r, %g)", "%y"
    ),
    "scale": ("%y: f32[{B}, N] = aten.mul.Tensor(%h, 0.125)", "%y"),
    "column scale": ("%y: f32[{B}, N] = aten.mul.Tensor(%h, %c)", "%y"),
    "mask": ("%y: f32[{B}, N] = aten.masked_fill.Scalar(%h, %m, -1.5)", "%y"),
    "cast": ("%y: f64[{B}, N] = aten.to.dtype(%h, f64)", "%y"),
    "two outputs": ("%y: f32[{B}, N] = aten.tanh.default(%h)", "%h, %y"),
}  # fmt: skip


def text(op: str, batch: str, n: int, k: int, epilogue: str) -> str:
    body, outputs = EPILOGUES[epilogue]
    product = {
        "linear": "aten.linear.default(%x, %w, %b)",
        "linear without bias": "aten.linear.default(%x, %w)",
        "mm": "aten.mm.default(%x, %w)",
        "matmul": "aten.matmul.default(%x, %w)",
        "addmm": "aten.addmm.default(%b, %x, %w)",
        "scaled addmm": "aten.addmm.default(%b, %x, %w, beta=0.5, alpha=2.0)",
    }[op]
    shape = f"[{n}, {k}]" if "linear" in op else f"[{k}, {n}]"
    return f"""
    graph g(%x: f32[{batch}, {k}], %r: f32[{batch}, {n}], %m: bool[{batch}, {n}]) {{
      param %w: f32{shape} = "w"
      param %b: f32[{n}] = "b"
      param %c: f32[{n}] = "c"
      %h: f32[{batch}, {n}] = {product}
      {body.replace("{B}", batch).replace(" N]", f" {n}]")}
      return {outputs}
    }}"""


def check(source: str, core: tiling.Core, sizes: dict[str, int], k: int, native: CpuTarget | None = None) -> Lowered:
    graph = parse(source)
    lowered = lower_contraction(graph, core)
    values = inputs_for(graph, sizes)
    found = run(lowered, graph, values, sizes, native)
    for got, exact in zip(found, reference(graph, values), strict=True):
        assert got.shape == exact.shape
        assert torch.allclose(got.double(), exact, rtol=2e-5, atol=4e-6 * k**0.5), (got - exact).abs().max()
    return lowered


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("batch", ["7", "s0", "2, s0"])
def test_epilogues(epilogue: str, batch: str) -> None:
    check(text("linear", batch, 21, 13, epilogue), CORES["avx2"], {"s0": 5}, 13)


@pytest.mark.parametrize("op", ["linear without bias", "mm", "matmul", "addmm", "scaled addmm"])
def test_products_in_other_words(op: str) -> None:
    check(text(op, "10", 35, 19, "gelu"), CORES["avx512"], {}, 19)


def test_a_vector_times_a_matrix() -> None:
    source = """graph g(%x: f32[19]) { param %w: f32[19, 21] = "w"
      %h: f32[21] = aten.matmul.default(%x, %w) %y: f32[21] = aten.relu.default(%h) return %y }"""
    check(source, CORES["avx2"], {}, 19)


def test_operands_that_have_some_batch_dims_only() -> None:
    source = """graph g(%x: f32[3, s0, 5], %p: f32[s0, 9], %q: f32[3, 1, 1], %m: bool[3, 1, 9]) {
      param %w: f32[9, 5] = "w"
      %h: f32[3, s0, 9] = aten.linear.default(%x, %w)
      %a: f32[3, s0, 9] = aten.add.Tensor(%h, %p)
      %b: f32[3, s0, 9] = aten.mul.Tensor(%a, %q)
      %y: f32[3, s0, 9] = aten.masked_fill.Scalar(%b, %m, 0.5)
      return %y }"""
    for s0 in (1, 2, 7):
        check(source, CORES["avx2"], {"s0": s0}, 5)


def test_one_column() -> None:
    for batch in ("7", "2, s0"):
        check(text("linear", batch, 1, 13, "gelu, residual"), CORES["avx512"], {"s0": 5}, 13)


def test_rows_any_distance_apart() -> None:
    source = """graph g(%x: f32[s0, 5]{*}) { param %w: f32[9, 5] = "w"
      %h: f32[s0, 9] = aten.linear.default(%x, %w) return %h }"""
    lowered = check(source, CORES["avx2"], {"s0": 11}, 5)
    assert any(isinstance(a, StrideArgument) for a in lowered.arguments)


COUNTED = """graph g(%x: f32[(s0 * s1), 12], %r: f32[s0, s1, 21], %shown: f32[s0, s1]) {
  param %w: f32[12, 21] = "w"
  param %b: f32[21] = "b"
  %h: f32[(s0 * s1), 21] = aten.addmm.default(%b, %x, %w)
  %v: f32[s0, s1, 21] = aten.view.default(%h, [s0, s1, 21])
  %g: f32[s0, s1, 21] = aten.gelu.default(%v, approximate="tanh")
  %y: f32[s0, s1, 21] = aten.add.Tensor(%g, %r)
  %z: f32[(s0 * s1), 21] = aten.view.default(%y, [s0 * s1, 21])
  %q: f32[(s0 * s1), 21] = aten.relu.default(%z)
  return OUT }"""


@pytest.mark.parametrize("out", ["%y", "%q", "%h, %y, %q"])
def test_rows_counted_in_another_way_before_the_epilogue(out: str) -> None:
    for s0, s1 in ((3, 5), (1, 1), (2, 0)):
        source = COUNTED.replace("OUT", out).replace("[s0, s1, 21])", f"[{s0}, {s1}, 21])")
        source = source.replace("[s0 * s1, 21])", f"[{s0 * s1}, 21])")
        check(source, CORES["avx512"], {"s0": s0, "s1": s1}, 12)


def test_a_reshape_that_mixes_rows_and_columns_is_refused() -> None:
    source = """graph g(%x: f32[6, 5]) { param %w: f32[8, 5] = "w"
      %h: f32[6, 8] = aten.linear.default(%x, %w)
      %v: f32[12, 4] = aten.view.default(%h, [12, 4]) %y: f32[12, 4] = aten.relu.default(%v) return %y }"""
    with pytest.raises(CannotLower, match="counted along several dims"):
        lower_contraction(parse(source), CORES["avx2"])


SIBLINGS = """graph g(%x: f32[2, s0, 12], %r: f32[2, s0, 20]) {
  param %wq: f32[20, 12] = "q"
  param %wk: f32[7, 12] = "k"
  param %wv: f32[16, 12] = "v"
  param %bq: f32[20] = "bq"
  param %bv: f32[16] = "bv"
  %q: f32[2, s0, 20] = aten.linear.default(%x, %wq, %bq)
  %k: f32[2, s0, 7] = aten.linear.default(%x, %wk)
  %v: f32[2, s0, 16] = aten.linear.default(%x, %wv, %bv)
  %a: f32[2, s0, 20] = aten.add.Tensor(%q, %r)
  %g: f32[2, s0, 16] = aten.gelu.default(%v)
  return %a, %k, %g, %v }"""


def test_products_of_one_input_are_one_kernel() -> None:
    lowered = check(SIBLINGS, CORES["avx2"], {"s0": 9}, 12)
    (spec,) = [a.spec for a in lowered.arguments if isinstance(a, PackArgument)]
    assert [s.name for s in spec.sources] == ["wq", "wk", "wv"]


GATED = """graph g(%x: f32[s0, 12]) {
  param %wg: f32[{n}, 12] = "g"
  param %wu: f32[{n}, 12] = "u"
  param %bu: f32[{n}] = "b"
  %g: f32[s0, {n}] = aten.linear.default(%x, %wg)
  %u: f32[s0, {n}] = aten.linear.default(%x, %wu, %bu)
  %a: f32[s0, {n}] = aten.silu.default(%g)
  %y: f32[s0, {n}] = aten.mul.Tensor(%a, %u)
  return %y, %u }"""


@pytest.mark.parametrize("core", [CORES["avx512"], CORES["avx2"]], ids=["avx512", "avx2"])
@pytest.mark.parametrize("n", [1, 37, 64])
def test_products_that_meet_in_one_output(core: tiling.Core, n: int) -> None:
    lowered = check(GATED.replace("{n}", str(n)), core, {"s0": 9}, 12)
    (spec,) = [a.spec for a in lowered.arguments if isinstance(a, PackArgument)]
    assert spec.together and spec.width * 2 == spec.nr
    assert from_json(to_json(lowered)) == lowered


def test_what_cannot_be_lowered_says_why() -> None:
    refused = {
        "is not constant": """graph g(%x: f32[4, 5], %w: f32[5, 6]) { %h: f32[4, 6] = aten.mm.default(%x, %w) return %h }""",
        "a product of i64 and i64": """graph g(%x: i64[4, 5]) { param %w: i64[5, 6] = "w"
          %h: i64[4, 6] = aten.mm.default(%x, %w) return %h }""",
        "different widths": """graph g(%x: f32[4, 5]) { param %w: f32[5, 6] = "w" param %v: f32[5, 1] = "v"
          %h: f32[4, 6] = aten.mm.default(%x, %w) %i: f32[4, 1] = aten.mm.default(%x, %v)
          %y: f32[4, 6] = aten.mul.Tensor(%h, %i) return %y }""",
        "do not share": """graph g(%x: f32[4, 5], %z: f32[4, 5]) { param %w: f32[5, 6] = "w"
          %h: f32[4, 6] = aten.mm.default(%x, %w) %i: f32[4, 6] = aten.mm.default(%z, %w) return %h, %i }""",
    }
    for because, source in refused.items():
        with pytest.raises(CannotLower, match=because):
            lower_contraction(parse(source), CORES["avx2"])


def core_of(target: CpuTarget) -> tiling.Core:
    return tiling.Core(target.lanes, 32 if target.name in ("avx512", "neon") else 16)


@pytest.mark.parametrize("target", host_levels(), ids=lambda t: t.name)
@pytest.mark.parametrize("epilogue", ["nothing", "gelu, residual", "mask"])
@pytest.mark.parametrize(("batch", "n", "k"), [("1", 50, 33), ("20", 100, 18), ("3, s0", 48, 64), ("s0", 7, 5)])
def test_native_groups(target: CpuTarget, epilogue: str, batch: str, n: int, k: int) -> None:
    for s0 in (1, 13) if "s0" in batch else (0,):
        check(text("linear", batch, n, k, epilogue), core_of(target), {"s0": s0}, k, target)


@pytest.mark.parametrize("target", host_levels(), ids=lambda t: t.name)
def test_native_siblings(target: CpuTarget) -> None:
    check(GATED.replace("{n}", "37"), core_of(target), {"s0": 9}, 12, target)
    check(SIBLINGS, core_of(target), {"s0": 9}, 12, target)


def test_rows_that_are_put_together_of_pieces_are_refused_in_words() -> None:
    """Mamba multiplies what a concatenation gave: a product's loops cannot stop between two pieces."""
    source = """graph g(%a: f32[3, 1, 24], %b: f32[3, 4, 24]) { param %w: f32[16, 24] = "w"
      %c: f32[3, 5, 24] = aten.cat.default([%a, %b], 1) %d: f32[3, 5, 24] = aten.mul.Tensor(%c, 2)
      %y: f32[3, 5, 16] = aten.linear.default(%d, %w) return %y }"""
    with pytest.raises(CannotLower, match="put together of pieces"):
        lower(parse(source), CORES["avx2"])


@pytest.mark.parametrize("batch", ["3, 6", "3, s0", "2, 3, s0"])
@pytest.mark.parametrize("native", [False, True])
def test_rows_that_lie_all_over_the_place_are_put_together(batch: str, native: bool) -> None:
    """Mixers multiply along tokens: what they read of several images is transposed, and has no one step from row to row."""
    rank = batch.count(",") + 2
    order = (*range(rank - 2), rank - 1, rank - 2)
    for layout in ("{" + ",".join(map(str, order)) + "}", "{*}"):
        source = text("linear", batch, 21, 13, "gelu, residual").replace(f"%x: f32[{batch}, 13]", f"%x: f32[{batch}, 13]{layout}")
        graph = parse(source)
        lowered = lower_contraction(graph, CORES["avx2"])
        values = inputs_for(graph, {"s0": 6})
        values["x"] = values["x"].transpose(-1, -2).contiguous().transpose(-1, -2) if layout != "{*}" else values["x"]
        assert not values["x"].is_contiguous()
        target = host_levels()[0] if native else None
        given = values | ({} if layout == "{*}" else {"x": values["x"].as_strided((values["x"].numel(),), (1,))})  # as it lies
        (got,), (exact,) = run(lowered, graph, given, {"s0": 6}, target), reference(graph, values)
        assert torch.allclose(got.double(), exact, rtol=2e-5, atol=2e-5), (got - exact).abs().max()
