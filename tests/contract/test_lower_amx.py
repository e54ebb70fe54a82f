"""Products on a matrix unit, block by block: the instruction and the kernels around it, by meaning, by vectors and by tiles.

Code without tiles runs everywhere, so that loops, layouts and padding are tested on every machine; code with tiles is compiled
everywhere and run where the probe saw the unit execute. Bounds are those of `test_lower_bf16`.
"""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from hotfuse.backends.llvm import native
from hotfuse.backends.llvm.emission import matrix_unit as llvm_blocks
from hotfuse.backends.llvm.emission.multiplies import multiplies
from hotfuse.backends.llvm.native import assembly_text, compile_kernel, llvm_text, load_kernel
from hotfuse.base.errors import InternalError
from hotfuse.compile.host import host_core
from hotfuse.ir.text import parse
from hotfuse.ir.types import DType
from hotfuse.lower.common.codec import from_json, to_json
from hotfuse.lower.common.lowered import Lowered, PackArgument
from hotfuse.lower.cpu.gemm.product_group import lower_contraction
from hotfuse.lower.cpu.tiling import Core, core_for
from hotfuse.machine import tiles
from hotfuse.native.target import CpuTarget, host_levels, level
from hotfuse.tile.build import KernelBuilder
from hotfuse.tile.memory import NUMPY
from hotfuse.tile.program import Kernel
from hotfuse.tile.serial import one_thread
from hotfuse.tile.text import parse as parse_kernel
from hotfuse.tile.text import show
from tests.contract.native import levels, run_native
from tests.contract.test_lower_contract_types import data, run

AVX512 = {"sse4.2", "avx", "avx2", "fma", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512bf16"}
AMX = level("avx512", AVX512 | {"amx-tile", "amx-bf16"})
CORE = replace(core_for(16, many_registers=True, precision="bf16"), tiles=True)
EVERY = [None, *host_levels()]
EVERYWHERE = pytest.mark.parametrize("target", EVERY, ids=lambda t: "interpreted" if t is None else t.name)


def block(rows: int, columns: int, blocks: int) -> Kernel:
    """The instruction alone, on rows that lie apart and on the second of two panels."""
    b = KernelBuilder("block")
    x = b.input("x", DType.BF16, (rows, 32 * blocks + 32))
    w = b.const("w", DType.BF16, (2, 16 * blocks, columns, 2))
    y = b.output("y", DType.F32, (rows + 1, columns))
    left = b.access(x, (0, 32), 3, axes=(1, 0, 1), step=(32, 1, 1))
    b.mma_memory(b.access(y, (1, 0), 2), left, b.access(w, (1, 0, 0, 0), 3), rows=rows, columns=columns, blocks=blocks)
    return b.finish()


@levels
@pytest.mark.parametrize("rows, columns, blocks", [(1, 16, 1), (7, 32, 3), (16, 32, 2), (20, 32, 1), (32, 32, 4), (33, 48, 1)])
def test_the_instruction_alone(rows: int, columns: int, blocks: int, target: CpuTarget) -> None:
    kernel = block(rows, columns, blocks)
    assert parse_kernel(show(kernel)) == kernel
    rng = np.random.default_rng(rows + blocks)
    x, w, y = (rng.integers(-8, 9, s).astype(t) for s, t in (
        ((rows, 32 * blocks + 32), NUMPY[DType.BF16]), ((2, 16 * blocks, columns, 2), NUMPY[DType.BF16]),
        ((rows + 1, columns), np.dtype(np.float32))))  # fmt: skip
    got = y.copy()
    run_native(kernel, {"x": x, "w": w, "y": got}, {}, target)
    want = y.copy()
    right = w[1].astype(np.float64).transpose(0, 2, 1).reshape(-1, columns)
    want[1:] = x[:, 32:].astype(np.float64) @ right
    np.testing.assert_array_equal(got, want)  # whole numbers that every order of adding keeps exact
    meant = y.copy()
    run_interpreted(kernel, {"x": x, "w": w, "y": meant})
    np.testing.assert_array_equal(meant, want)


def run_interpreted(kernel: Kernel, arrays: dict[str, np.ndarray]) -> None:
    from hotfuse.tile import interpreter

    interpreter.run(kernel, arrays, {})


@pytest.mark.parametrize(
    "change, why",
    [({"columns": 24}, "multiple of 16"), ({"rows": 0}, "multiple of 1"), ({"blocks": -1}, "multiple of 1")],
)
def test_what_the_rule_refuses(change: dict[str, int], why: str) -> None:
    b = KernelBuilder("block")
    x, w = b.input("x", DType.BF16, (4, 32)), b.const("w", DType.BF16, (16, 32, 2))
    y = b.output("y", DType.F32, (4, 32))
    places = b.access(y, (0, 0), 2), b.access(x, (0, 0), 3, axes=(1, 0, 1), step=(32, 1, 1)), b.access(w, (0, 0, 0), 3)
    attrs = {"rows": 4, "columns": 32, "blocks": 1} | change
    with pytest.raises(InternalError, match="mma.memory") as e:
        b.effect("mma.memory", *places, **attrs)
    assert why in e.value.because
    with pytest.raises(InternalError) as e:
        b.effect("mma.memory", places[1], places[0], places[2], rows=4, columns=32, blocks=1)
    assert "axes" in e.value.because or "holds" in e.value.because


def graph_of(m: str, k: int, n: int) -> str:
    return f"""graph group(%x: f32[{m}, {k}], %r: f32[{m}, {n}]) {{
      param %w: f32[{n}, {k}] = "w"
      param %b: f32[{n}] = "b"
      %l: f32[{m}, {n}] = aten.linear.default(%x, %w, %b)
      %g: f32[{m}, {n}] = aten.gelu.default(%l)
      %y: f32[{m}, {n}] = aten.add.Tensor(%g, %r)
      return %y
    }}"""


def blocked(lowered: Lowered) -> Lowered:
    """The same, having crossed to another process; it must be made of blocks."""
    assert llvm_blocks.multiplies_blocks(lowered.kernel)
    assert from_json(to_json(lowered)) == lowered
    return from_json(to_json(lowered))


SIZES = [(0, 5, 3), (1, 1, 1), (3, 7, 5), (16, 64, 48), (17, 33, 100), (40, 129, 17), (33, 700, 40), (70, 32, 64)]


@EVERYWHERE
@pytest.mark.parametrize("m, k, n", SIZES)
@pytest.mark.parametrize("symbolic", [False, True])
def test_products_by_blocks(target: CpuTarget | None, m: int, k: int, n: int, symbolic: bool) -> None:
    graph = parse(graph_of("s0" if symbolic else str(m), k, n))
    lowered = blocked(lower_contraction(graph, CORE))
    values = data(graph, {"s0": m})
    (got,) = run(lowered, graph, values, {"s0": m}, target)
    x, w, b, r = (values[v].double() for v in ("x", "w", "b", "r"))
    rounded = F.gelu(F.linear(x.float().bfloat16().double(), w.float().bfloat16().double(), b)) + r
    room = x.abs() @ w.abs().T + b.abs() + r.abs()
    assert got.shape == (m, n)
    assert ((got.double() - rounded).abs() <= 2e-6 * (k + 4) * room).all()


@EVERYWHERE
def test_groups_of_rows(target: CpuTarget | None) -> None:
    graph = parse(graph_of("s0", 350, 70))
    lowered = blocked(lower_contraction(graph, replace(CORE, l2=128 << 10)))  # a cache for 64 rows
    for m in (1, 16, 17, 100, 150):
        values = data(graph, {"s0": m}, seed=m)
        (got,) = run(lowered, graph, values, {"s0": m}, target)
        x, w = (values[v].bfloat16().double() for v in ("x", "w"))
        want = F.gelu(F.linear(x, w, values["b"].double())) + values["r"].double()
        assert (got.double() - want).abs().max() <= 1e-4 * want.abs().max()


@levels
@pytest.mark.parametrize("m", ["200", "s0"])
def test_threads_share_the_panels(target: CpuTarget, m: str) -> None:
    graph = parse(graph_of(m, 512, 640))
    values = data(graph, {"s0": 200})
    alone, shared = (run(lower_contraction(graph, CORE), graph, values, {"s0": 200}, target, threads=n)[0] for n in (1, 3))
    assert torch.equal(alone, shared)
    want = F.gelu(F.linear(values["x"], values["w"], values["b"])) + values["r"]
    assert (alone - want).abs().max() <= 2**-7 * want.abs().max()


@EVERYWHERE
def test_special_values_stay_in_their_rows(target: CpuTarget | None) -> None:
    graph = parse(graph_of("4", 9, 20))
    values = data(graph, {})
    values["x"][0, 3], values["x"][1, 8], values["x"][2] = float("nan"), float("inf"), 0.0
    (got,) = run(blocked(lower_contraction(graph, CORE)), graph, values, {}, target)
    want = F.gelu(F.linear(values["x"], values["w"], values["b"])) + values["r"]
    assert torch.equal(got.isfinite(), want.isfinite())
    torch.testing.assert_close(got[2], want[2])


@EVERYWHERE
@pytest.mark.parametrize("core", [CORE, replace(CORE, tiles=False)], ids=["blocks", "pairs"])
@pytest.mark.parametrize("m, k, symbolic", [(0, 37, True), (1, 37, False), (11, 48, False), (21, 33, True)])
def test_what_is_computed_in_front_ends_where_k_ends(target: CpuTarget | None, core: Core, m: int, k: int, symbolic: bool) -> None:
    rows, n = "s0" if symbolic else str(m), 70  # 0 / 0 is made of numbers that do not exist: none of it may be multiplied
    graph = parse(f"""graph group(%x: f32[{rows}, {k}], %z: f32[{rows}, {k}]) {{
      param %w: f32[{n}, {k}] = "w"
      %p: f32[{rows}, {k}] = aten.div.Tensor(%x, %z)
      %y: f32[{rows}, {n}] = aten.linear.default(%p, %w)
      return %y
    }}""")
    lowered = from_json(to_json(lower_contraction(graph, core)))
    values = data(graph, {"s0": m})
    values["z"] = values["z"].abs() + 0.5
    (got,) = run(lowered, graph, values, {"s0": m}, target)
    x, w = (values["x"] / values["z"]).bfloat16().double(), values["w"].bfloat16().double()
    assert got.shape == (m, n) and bool(got.isfinite().all())
    assert ((got.double() - x @ w.T).abs() <= 2e-6 * (k + 4) * (x.abs() @ w.abs().T) + 2**-7 * (x.abs() @ w.abs().T)).all()


@EVERYWHERE
@pytest.mark.parametrize("m", [5, 40])
def test_products_that_share_their_input_and_that_meet(target: CpuTarget | None, m: int) -> None:
    apart = parse(f"""graph g(%x: f32[2, {m}, 40]) {{
      param %a: f32[50, 40] = "a"
      param %c: f32[33, 40] = "c"
      %p: f32[2, {m}, 50] = aten.linear.default(%x, %a)
      %q: f32[2, {m}, 33] = aten.linear.default(%x, %c)
      return %p, %q }}""")
    meet = parse(f"""graph g(%x: f32[{m}, 40]) {{
      param %a: f32[50, 40] = "a"
      param %c: f32[50, 40] = "c"
      %p: f32[{m}, 50] = aten.linear.default(%x, %a)
      %q: f32[{m}, 50] = aten.linear.default(%x, %c)
      %s: f32[{m}, 50] = aten.silu.default(%p)
      %y: f32[{m}, 50] = aten.mul.Tensor(%s, %q)
      return %y }}""")
    for graph in (apart, meet):
        values = data(graph, {})
        found = run(blocked(lower_contraction(graph, CORE)), graph, values, {}, target)
        p, q = (F.linear(values["x"].bfloat16().double(), values[n].bfloat16().double()) for n in ("a", "c"))
        for got, want in zip(found, (p, q) if graph is apart else (F.silu(p) * q,), strict=True):
            torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)


# --- tiles: compiled everywhere


@pytest.mark.parametrize("m, k", [("1", 64), ("40", 100), ("s0", 768)])
def test_tiles_compile(m: str, k: int) -> None:
    kernel = lower_contraction(parse(graph_of(m, k, 64)), CORE).kernel
    text = assembly_text(kernel, AMX)
    for word in ("ldtilecfg", "tilezero", "tileloadd", "tdpbf16ps", "tilestored", "tilerelease"):
        assert word in text, word
    assert len(re.findall(r"ldtilecfg", text)) == len(re.findall(r"tilerelease", text)) == 1  # in the loop's function alone
    alone = one_thread(kernel)
    assert alone is not None and "tdpbf16ps" in assembly_text(alone, AMX)
    assert multiplies(kernel, llvm_text(kernel, AMX), AMX) == "amx bf16 f32"
    plain = level("avx512", AVX512)
    assert "tdpbf16ps" not in assembly_text(kernel, plain)
    assert multiplies(kernel, llvm_text(kernel, plain), plain) == "avx512 fma f32"


def test_tiles_of_two_heights_in_one_function_are_refused() -> None:
    b = KernelBuilder("two")
    x, w = b.input("x", DType.BF16, (32, 32)), b.const("w", DType.BF16, (16, 32, 2))
    y = b.output("y", DType.F32, (32, 32))
    left, right = b.access(x, (0, 0), 3, axes=(1, 0, 1), step=(32, 1, 1)), b.access(w, (0, 0, 0), 3)
    for rows in (32, 5):
        b.mma_memory(b.access(y, (0, 0), 2), left, right, rows=rows, columns=32, blocks=1)
    with pytest.raises(InternalError, match="16 and of 5 rows"):
        compile_kernel(b.finish(), AMX)


def test_only_where_it_is_asked_for_and_executes() -> None:
    without = level("avx512", AVX512)
    assert host_core(AMX, "bf16").tiles
    assert not any(c.tiles for c in (host_core(AMX), host_core(without, "bf16"), host_core(without)))
    graph = parse(graph_of("8", 64, 64))
    for core in (host_core(AMX), host_core(without, "bf16"), replace(CORE, precision="fp32")):
        assert not llvm_blocks.multiplies_blocks(lower_contraction(graph, core).kernel)
    (spec,) = [a.spec for a in lower_contraction(graph, CORE).arguments if isinstance(a, PackArgument)]
    assert spec.paired and spec.nr == 32 and spec.steps % 16 == 0


def test_without_the_system_s_permission_nothing_is_linked(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = compile_kernel(lower_contraction(parse(graph_of("8", 64, 64)), CORE).kernel, AMX)
    monkeypatch.setattr(native.tiles, "refused", lambda: "not here")
    with pytest.raises(InternalError, match="cannot run in this process") as e:
        load_kernel(compiled)
    assert e.value.because == "not here"
    monkeypatch.setattr(native.tiles, "refused", lambda: pytest.fail("asked for a kernel without tiles"))
    load_kernel(compile_kernel(lower_contraction(parse(graph_of("8", 64, 64)), replace(CORE, tiles=False)).kernel))


def test_the_permission_is_asked_once_and_answers_in_words() -> None:
    first = tiles.refused()
    assert isinstance(first, str) and tiles.refused() is first
