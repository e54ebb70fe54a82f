"""Matrix products through the tile interpreter and as native code, against float64."""

from __future__ import annotations

import numpy as np
import pytest

from hotfuse.ir.dims import Dim, expr, sym
from hotfuse.ir.types import DType
from hotfuse.lower import gemm, pack, tiling
from hotfuse.lower.pack import Order, PackSource, PackSpec
from hotfuse.tile import interp
from hotfuse.tile.build import KernelBuilder, remaining
from hotfuse.tile.program import Kernel

CORES = {
    "avx512": tiling.Core(16, 32),
    "avx2": tiling.Core(8, 16),
    "neon": tiling.Core(4, 32),
    "generic": tiling.Core(4, 16),
    "tiny caches": tiling.Core(8, 16, 1 << 10, 4 << 10),
}
RNG = np.random.default_rng(7)


def f32(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


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


@pytest.mark.parametrize("order", list(Order))
@pytest.mark.parametrize(("n", "k", "nr"), [(48, 8, 16), (50, 7, 16), (1, 1, 8), (5, 128, 8), (33, 64, 16)])
def test_panels_hold_the_weight_and_zeros(order: Order, n: int, k: int, nr: int) -> None:
    weight = f32(n, k) if order is Order.NK else f32(k, n)
    spec = PackSpec((PackSource("w", order, n),), k, nr)
    flat = pack.pack(spec, {"w": weight})
    assert flat.nbytes == spec.bytes and flat.ctypes.data % 64 == 0
    columns = weight.T if order is Order.NK else weight
    for p in range(spec.panels):
        panel = flat[p * spec.panel_stride :][: k * nr].reshape(k, nr)
        width = min(nr, n - p * nr)
        assert np.array_equal(panel[:, :width], columns[:, p * nr : p * nr + width])
        assert not panel[:, width:].any()


def test_panels_do_not_begin_at_the_same_place_of_every_page() -> None:
    for k, nr in ((1024, 16), (64, 16), (768, 48), (100, 48)):
        spec = PackSpec((PackSource("w", Order.NK, 4 * nr),), k, nr)
        assert spec.panel_stride * 4 % 4096
        assert spec.panel_stride * 4 % 64 == 0


def test_a_weight_of_another_shape_is_refused() -> None:
    spec = PackSpec((PackSource("w", Order.NK, 5),), 7, 8)
    with pytest.raises(Exception, match=r"weight w is float32\[7, 5\]"):
        pack.pack(spec, {"w": f32(7, 5)})


# --- products


def plain(m: Dim, n: int, k: int, t: tiling.GemmTiling, *, in_loop: bool, lda: Dim) -> tuple[Kernel, PackSpec]:
    """C = A @ W.T + bias."""
    spec = PackSpec((PackSource("w", Order.NK, n),), k, t.nr)
    b = KernelBuilder("product")
    rows = b.size("m") if not isinstance(m, int) else m
    a = b.input("a", DType.F32, (rows, k), (lda, 1))
    w = b.const("w", DType.F32, spec.shape, spec.stride)
    bias = b.const("bias", DType.F32, (n,))
    c = b.output("c", DType.F32, (rows, n))

    def finish(f: gemm.Finished) -> None:
        col = expr("*", f.panel, t.nr)
        left = remaining(n, col)
        along = b.load(bias, (col,), (t.nr,), valid=(left,))
        f.each_row(lambda x, row: b.store(c, (row, col), b.map("add", x, along), valid=(None, left)))

    gemm.product(b, gemm.Product(a, w, rows, k, spec.panels, t), finish, in_loop=in_loop)
    return b.finish(), spec


def run_plain(kernel: Kernel, spec: PackSpec, m: int, n: int, k: int, lda: int) -> None:
    memory = f32(m, lda)
    weight, bias, out = f32(n, k), f32(n), np.full((m, n), np.nan, np.float32)
    flat = memory.reshape(-1)[: (m - 1) * lda + k] if m else memory.reshape(-1)
    given = {"a": np.ascontiguousarray(flat), "w": pack.pack(spec, {"w": weight}), "bias": bias, "c": out}
    interp.run(kernel, given, {"m": m} if kernel.sizes else {})
    a = memory[:, :k].astype(np.float64)
    exact = a @ weight.T.astype(np.float64) + bias
    bound = (np.abs(a) @ np.abs(weight.T.astype(np.float64)) + np.abs(bias)) * (k + 2) * 2.0**-24
    assert (np.abs(out - exact) <= bound).all()


@pytest.mark.parametrize("core", CORES.values(), ids=CORES)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (1, 50, 33), (7, 5, 3), (20, 100, 18), (13, 48, 64), (40, 96, 10)])
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
