"""Products that round fp32 operands to bf16, where the user allows it: op reference, tile interpreter and native code.

The bound is stated: operands keep 8 significant bits, so every product is off by at most about 2^-8 of its magnitude, and a sum by
that of the sum of magnitudes; against operands that were rounded beforehand, only fp32's own error remains.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hotfuse
from hotfuse import InputError, Settings
from hotfuse.backends.llvm.native import assembly_text, compile_kernel
from hotfuse.base.settings import BF16_RTOL
from hotfuse.compile.host import host_core
from hotfuse.compile.variants import precision_variants
from hotfuse.ir.text import parse
from hotfuse.ir.types import DType
from hotfuse.lower.common.codec import from_json, to_json
from hotfuse.lower.common.lowered import PackArgument
from hotfuse.lower.cpu.gemm.product_group import lower_contraction
from hotfuse.lower.cpu.tiling import core_for
from hotfuse.machine.probe import usable_features
from hotfuse.native.target import CpuTarget, host_levels, level
from hotfuse.tile.program import BufferKind, Loop, LoopKind, Stmt, TileAccess, When
from tests.contract.test_lower_contract_types import EVERY, data, run
from tests.races import kernels_win, slow_library

EVERYWHERE = pytest.mark.parametrize("target", EVERY, ids=lambda t: "interpreted" if t is None else t.name)
CORE = core_for(16, many_registers=True, precision="bf16")
_AVX512 = {"sse4.2", "avx", "avx2", "fma", "avx512f", "avx512bw", "avx512dq", "avx512vl"}


def graph_of(m: str, k: int, n: int) -> str:
    return f"""graph group(%x: f32[{m}, {k}], %r: f32[{m}, {n}]) {{
      param %w: f32[{n}, {k}] = "w"
      param %b: f32[{n}] = "b"
      %l: f32[{m}, {n}] = aten.linear.default(%x, %w, %b)
      %g: f32[{m}, {n}] = aten.relu.default(%l)
      %y: f32[{m}, {n}] = aten.add.Tensor(%g, %r)
      return %y
    }}"""


@EVERYWHERE
@pytest.mark.parametrize("m, k, n", [(1, 1, 1), (3, 7, 5), (17, 64, 48), (5, 33, 100), (40, 129, 17), (2, 2, 3)])
@pytest.mark.parametrize("symbolic", [False, True])
def test_products_of_rounded_operands(target: CpuTarget | None, m: int, k: int, n: int, symbolic: bool) -> None:
    graph = parse(graph_of("s0" if symbolic else str(m), k, n))
    lowered = from_json(to_json(lower_contraction(graph, CORE)))
    values = data(graph, {"s0": m})
    (got,) = run(lowered, graph, values, {"s0": m}, target)
    x, w, b, r = (values[v].double() for v in ("x", "w", "b", "r"))
    exact = torch.relu(F.linear(x, w, b)) + r
    rounded = torch.relu(F.linear(x.float().bfloat16().double(), w.float().bfloat16().double(), b)) + r
    room = x.abs() @ w.abs().T + b.abs() + r.abs()
    assert ((got.double() - rounded).abs() <= 2e-6 * (k + 4) * room).all()
    assert ((got.double() - exact).abs() <= 2**-7.5 * room).all()


@EVERYWHERE
def test_special_values_pass_through(target: CpuTarget | None) -> None:
    graph = parse(graph_of("4", 9, 20))
    lowered = lower_contraction(graph, CORE)
    values = data(graph, {})
    values["x"][0, 3], values["x"][1, 8], values["x"][2] = float("nan"), float("inf"), 0.0
    (got,) = run(lowered, graph, values, {}, target)
    want = torch.relu(F.linear(values["x"], values["w"], values["b"])) + values["r"]
    assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got.isinf(), want.isinf())
    torch.testing.assert_close(got[2], want[2])


@EVERYWHERE
@pytest.mark.parametrize("m, symbolic", [(0, True), (1, False), (11, False), (21, True)])
def test_what_is_computed_in_front_is_rounded_too(target: CpuTarget | None, m: int, symbolic: bool) -> None:
    rows, k, n = "s0" if symbolic else str(m), 37, 70
    graph = parse(f"""graph group(%x: f32[{rows}, {k}], %z: f32[{rows}, {k}]) {{
      param %w: f32[{n}, {k}] = "w"
      %p: f32[{rows}, {k}] = aten.mul.Tensor(%x, %z)
      %y: f32[{rows}, {n}] = aten.linear.default(%p, %w)
      return %y
    }}""")
    lowered = from_json(to_json(lower_contraction(graph, CORE)))
    values = data(graph, {"s0": m})
    (got,) = run(lowered, graph, values, {"s0": m}, target)
    x, w = (values["x"] * values["z"]).bfloat16().double(), values["w"].float().bfloat16().double()
    assert got.shape == (m, n)
    assert ((got.double() - x @ w.T).abs() <= 2e-6 * (k + 4) * (x.abs() @ w.abs().T)).all()


@pytest.mark.parametrize("rows", ["200", "s0"])
def test_rows_are_rounded_once_and_not_for_every_panel(rows: str) -> None:
    kernel = lower_contraction(parse(graph_of(rows, 64, 960)), CORE).kernel
    (ready,) = (b for b in kernel.buffers if b.dtype is DType.BF16 and b.kind is BufferKind.SHARED)
    rounding, multiplying = (s for s in parallel_loops(kernel.body))
    assert writes(rounding.body, ready.name) and not writes(multiplying.body, ready.name)


def parallel_loops(stmts: Sequence[Stmt]) -> Iterator[Loop]:
    """Those that stand first on their way in."""
    for s in stmts:
        if isinstance(s, Loop) and s.kind is LoopKind.PARALLEL:
            yield s
        elif isinstance(s, Loop | When):
            yield from parallel_loops(s.body)


def writes(stmts: Sequence[Stmt], buffer: str) -> bool:
    """Whether a store to a buffer is among statements."""
    return any(
        writes(s.body, buffer) if isinstance(s, Loop | When)
        else s.op == "store" and isinstance(s.args[0], TileAccess) and s.args[0].buffer == buffer
        for s in stmts
    )  # fmt: skip


def test_only_where_it_is_asked_for_and_can_execute() -> None:
    graph = parse(graph_of("8", 64, 64))
    pairs = [any(isinstance(a, PackArgument) and a.spec.paired for a in lower_contraction(graph, c).arguments)
             for c in (CORE, replace(CORE, precision="fp32"))]  # fmt: skip
    assert pairs == [True, False]
    with_it, without = level("avx512", _AVX512 | {"avx512bf16"}), level("avx512", _AVX512)
    assert host_core(with_it, "bf16").precision == "bf16" and host_core(with_it).precision == "fp32"
    assert host_core(without, "bf16").precision == "fp32"
    kernel = lower_contraction(graph, CORE).kernel
    assert "vdpbf16ps" in assembly_text(kernel, with_it) and "vdpbf16ps" not in assembly_text(kernel, without)
    for target in (*host_levels(), without):  # whatever the machine, the kernel has code without the instruction
        assert compile_kernel(kernel, target).code


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 96), nn.Linear(96, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(F.gelu(self.a(x)))


@pytest.fixture
def kernels_always_win(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    slow_library(monkeypatch)
    kernels_win(monkeypatch)
    monkeypatch.setattr(precision_variants, "seconds", lambda batch: [1.0 + i for i in range(len(batch))])  # clocks decide nothing
    with torch.no_grad():
        yield


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.usefixtures("kernels_always_win")
def test_as_a_user_asks_for_it(precision: str) -> None:
    model, x = Net().eval(), torch.randn(12, 64)
    fast = hotfuse.jit(model, precision=precision, settings=Settings(capture="inline", hot_calls=1))  # type: ignore[arg-type]
    want = model.double()(x.double())
    model.float()
    for _ in range(5):
        got = fast(x)
    assert fast.stats()["calls_per_tier"]["1"] >= 1, str(fast.explain(full=True))
    error = float((got.double() - want).abs().max() / want.abs().max())
    assert error < (BF16_RTOL if precision == "bf16" else 1e-5)
    if precision == "bf16" and "avx512bf16" in usable_features():
        assert error > 1e-5, "nothing was rounded"
        assert "by pairs of bf16 " in str(fast.explain(full=True)) and "in fp32 " in str(fast.explain(full=True))


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(InputError, match="precision"):
        hotfuse.jit(Net(), precision="fp8")  # type: ignore[arg-type]
