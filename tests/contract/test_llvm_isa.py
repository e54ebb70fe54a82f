"""Every instruction, for every element type, natively and by its meaning: on all levels that this machine executes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch  # the OpenMP runtime is torch's

from hotfuse.backends.llvm.emit import EMISSIONS
from hotfuse.backends.llvm.native import compile_kernel, load_kernel
from hotfuse.backends.llvm.target import Target, host_levels
from hotfuse.ir.dims import evaluate
from hotfuse.ir.types import DType
from hotfuse.tile import interp, isa
from hotfuse.tile.build import KernelBuilder
from hotfuse.tile.memory import NUMPY
from hotfuse.tile.program import BufferKind, Kernel, Tile, TileType

LEVELS = host_levels()
FLOATS = (DType.F64, DType.F32, DType.F16, DType.BF16)
CANARY = 0xA5
PAD = 128
Array = np.ndarray[Any, np.dtype[Any]]
levels = pytest.mark.parametrize("target", LEVELS, ids=[t.name for t in LEVELS])


def run_native(kernel: Kernel, arrays: Mapping[str, Array], sizes: Mapping[str, int], target: Target, threads: int = 1) -> None:
    """Run on copies that lie between canary bytes; the outputs' bytes are copied back, and no canary may have changed."""
    native = load_kernel(compile_kernel(kernel, target))
    given = [b for b in kernel.buffers if b.kind is not BufferKind.SCRATCH]
    held: list[Array] = []
    for buffer in given:
        array = arrays[buffer.name]
        held.append(np.full(array.nbytes + 2 * PAD, CANARY, np.uint8))
        held[-1][PAD:PAD + array.nbytes] = np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8)
    arena = native.arena(sizes, threads)
    base = 0 if arena is None else -(-arena.data_ptr() // 64) * 64
    native.enter(*[h.ctypes.data + PAD for h in held], base, *[sizes[s] for s in kernel.sizes], threads)
    for buffer, h in zip(given, held, strict=True):
        assert (h[:PAD] == CANARY).all() and (h[-PAD:] == CANARY).all(), f"written outside {buffer.name}"
        if buffer.kind is BufferKind.OUTPUT:
            array = arrays[buffer.name]
            array[...] = np.frombuffer(h[PAD:PAD + array.nbytes].tobytes(), array.dtype).reshape(array.shape)
        else:
            assert h[PAD:h.size - PAD].tobytes() == arrays[buffer.name].tobytes(), f"{buffer.name} was written"


def blank(kernel: Kernel, arrays: dict[str, Array], sizes: Mapping[str, int]) -> dict[str, Array]:
    """The arrays, with an output for every output buffer that has none, each value there hard to mistake for a result."""
    for buffer in kernel.buffers:
        if buffer.kind is BufferKind.OUTPUT and buffer.name not in arrays:
            shape = tuple(evaluate(d, sizes) for d in buffer.shape)
            arrays[buffer.name] = np.full(shape, 77 if buffer.dtype is not DType.BOOL else 1, NUMPY[buffer.dtype])
    return arrays


def compare(got: Array, want: Array, ulps: float, what: str) -> None:
    """Equal, or within so many units in the last place of what is wanted."""
    assert got.dtype == want.dtype and got.shape == want.shape
    if got.dtype.kind in "iub":
        np.testing.assert_array_equal(got, want, err_msg=what)
        return
    g, w = got.astype(np.float64), want.astype(np.float64)
    assert (np.isnan(g) == np.isnan(w)).all(), f"{what}: NaN differs\n{g}\n{w}"
    info = ml_dtypes.finfo(got.dtype)
    near = np.maximum(np.abs(np.where(np.isfinite(w), w, float(info.max))), float(info.smallest_normal))
    unit = 2.0 ** np.floor(np.log2(near)) * float(info.eps)
    same = (g == w) | (np.isnan(g) & np.isnan(w))
    with np.errstate(invalid="ignore"):
        off = np.where(same, 0, np.abs(g - w) / unit)
    assert off.size == 0 or off.max() <= ulps, f"{what}: off by {off.max()} ulp: {g.ravel()[off.argmax()]!r} for {w.ravel()[off.argmax()]!r}"


def check(kernel: Kernel, arrays: dict[str, Array], sizes: Mapping[str, int], target: Target, ulps: float = 0.0,
          threads: int = 1) -> None:  # fmt: skip
    """The native kernel and the interpreter agree."""
    want = {n: a.copy() for n, a in blank(kernel, arrays, sizes).items()}
    got = {n: a.copy() for n, a in want.items()}
    interp.run(kernel, want, sizes)
    run_native(kernel, got, sizes, target, threads)
    for buffer in kernel.buffers:
        if buffer.kind is BufferKind.OUTPUT:
            compare(got[buffer.name], want[buffer.name], ulps, f"{kernel.name} {buffer.name} on {target.name}")


def numbers(rng: np.random.Generator, dtype: DType, shape: tuple[int, ...], small: bool = False) -> Array:
    """Random numbers with the awkward ones among them."""
    kind = NUMPY[dtype]
    if dtype is DType.BOOL:
        return rng.integers(0, 2, shape).astype(bool)
    if dtype in FLOATS:
        x = rng.standard_normal(shape) * (1 if small else 3)
        special = [0.0, -0.0, 1.0, -1.0, 1.5, 2.5] if small else [0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, -1.0, 1.5, 2.5]
        return np.where(rng.random(shape) < 0.25, rng.choice(special, shape), x).astype(kind)
    info = np.iinfo(kind)
    x = rng.integers(-9 if info.min < 0 else 0, 10, shape, dtype=np.int64).astype(kind)
    if small:
        return x
    return np.where(rng.random(shape) < 0.25, rng.choice(np.array([info.min, info.max, 0, 1], kind), shape), x).astype(kind)


SHAPES = ((), (1,), (5,), (16,), (3, 19), (2, 1, 33), (4, 16), (2, 3, 7))
Apply = Callable[[KernelBuilder, Tile, Callable[[tuple[int, ...], DType | None], Tile]], Tile]


def shapes_for(k: int, least_rank: int = 0) -> list[tuple[int, ...]]:
    """Two shapes per element type, in turn, so that all occur."""
    usable = [s for s in SHAPES if len(s) >= least_rank]
    return [usable[k % len(usable)], usable[(k + 3) % len(usable)]]


def check_elements(name: str, dtypes: tuple[DType, ...], apply: Apply, target: Target, ulps: Callable[[DType], float],
                   least_rank: int = 0, small: bool = False) -> None:  # fmt: skip
    """One kernel that applies an instruction to tiles of every element type and some shapes."""
    rng = np.random.default_rng(sum(map(ord, name)))
    for k, dtype in enumerate(dtypes):
        b = KernelBuilder(f"{name}_{dtype.value}")
        arrays: dict[str, Array] = {}

        def operand(shape: tuple[int, ...], kind: DType | None = None, b: KernelBuilder = b, dtype: DType = dtype,
                    arrays: dict[str, Array] = arrays) -> Tile:  # fmt: skip
            kind = kind or dtype
            x = b.input(f"x{len(arrays)}", kind, shape)
            arrays[x.name] = numbers(rng, kind, shape, small)
            return b.load(x, (0,) * len(shape), shape)

        for i, shape in enumerate(shapes_for(k, least_rank)):
            out = apply(b, operand(shape, None), operand)
            y = b.output(f"y{i}", out.type.dtype, out.type.shape)
            b.store(y, (0,) * len(out.type.shape), out)
        check(b.finish(), arrays, {}, target, ulps(dtype))


def test_every_instruction_has_an_emission() -> None:
    assert set(EMISSIONS) == set(isa.rows())


FUNCTIONS = ("exp", "exp2", "expm1", "log", "log2", "log1p", "sin", "cos", "tanh", "erf", "pow", "rsqrt", "recip", "sqrt", "fma")
MAPS = sorted(n for n, r in isa.rows().items() if r.category is isa.Category.MAP and n not in ("map.select", "map.cast", "map.bitcast"))


@levels
@pytest.mark.parametrize("name", MAPS)
def test_map(name: str, target: Target) -> None:
    row = isa.row(name)
    short = name.removeprefix("map.")

    def ulps(dtype: DType) -> float:
        return (2.0 if dtype in (DType.F32, DType.F64) else 1.0) if short in FUNCTIONS else 0.0

    def apply(b: KernelBuilder, x: Tile, operand: Any) -> Tile:
        shape = x.type.shape
        others = [operand(tuple(1 if i == len(shape) - 1 - k else e for i, e in enumerate(shape)), None) for k in range(row.arity - 1)]
        return b.emit(name, x, *others)

    check_elements(short, row.dtypes, apply, target, ulps)


@levels
def test_literal_operands(target: Target) -> None:
    """NaN and plain literals beside tiles that hold NaN: maximum and minimum hand NaN on from either side."""
    for name in ("max", "min", "add", "lt", "eq", "fma"):
        for value in (0.0, math.nan, math.inf, -0.0):
            def apply(b: KernelBuilder, x: Tile, operand: Any, name: str = name, value: float = value) -> Tile:
                return b.map(name, x, value, x) if name == "fma" else b.map(name, b.map(name, value, x), x) if name in ("max", "min") \
                    else b.map(name, x, value)  # fmt: skip

            check_elements(f"{name}_literal", FLOATS, apply, target, lambda d: 0.0 if d in (DType.F32, DType.F64) else 1.0)


@levels
def test_select(target: Target) -> None:
    def apply(b: KernelBuilder, x: Tile, operand: Any) -> Tile:
        return b.map("select", operand(x.type.shape, DType.BOOL), x, operand((), None))

    check_elements("select", isa.row("map.select").dtypes, apply, target, lambda _: 0.0)


@levels
@pytest.mark.parametrize("to", isa.row("map.cast").dtypes)
def test_cast(to: DType, target: Target) -> None:
    def apply(b: KernelBuilder, x: Tile, operand: Any) -> Tile:
        unsigned = x.type.dtype in FLOATS and to.value.startswith("u")
        return b.cast(b.map("abs", x) if unsigned else x, to)

    check_elements(f"cast_{to.value}", isa.row("map.cast").dtypes, apply, target, lambda _: 0.0, small=True)


@levels
def test_halves_round_to_even(target: Target) -> None:
    """All f16 and bf16 numbers widen exactly; all halfway cases and their neighbours round as they should."""
    for dtype in (DType.F16, DType.BF16):
        n = 1 << 16
        every = np.arange(n, dtype=np.uint16).view(NUMPY[dtype])
        wide = every.astype(np.float64)
        with np.errstate(all="ignore"):
            halfway = np.where(np.isfinite(wide), (wide + np.roll(wide, -1)) / 2, wide)
            for source, kind in ((DType.F32, np.float32), (DType.F64, np.float64)):
                values = np.concatenate([halfway, halfway * (1 + 2.0**-22), halfway * (1 - 2.0**-22), halfway * (1 + 2.0**-45)]).astype(kind)
                b = KernelBuilder(f"halves_{dtype.value}_{source.value}")
                x, h = b.input("x", source, (4 * n,)), b.input("h", dtype, (n,))
                y, w = b.output("y", dtype, (4 * n,)), b.output("w", source, (n,))
                with b.loop("i", 0, 4 * n, 16) as i:
                    b.store(y, (i.var,), b.cast(b.load(x, (i.var,), (16,)), dtype))
                with b.loop("j", 0, n, 16) as j:
                    b.store(w, (j.var,), b.cast(b.load(h, (j.var,), (16,)), source))
                arrays = {"x": values, "h": every.copy(), "y": np.zeros(4 * n, NUMPY[dtype]), "w": np.zeros(n, kind)}
                run_native(b.finish(), arrays, {}, target)
                compare(arrays["w"], every.astype(kind), 0, f"widen {dtype}")
                compare(arrays["y"], values.astype(NUMPY[dtype]), 0, f"narrow {source} to {dtype}")


@levels
def test_bitcast(target: Target) -> None:
    pairs = [(a, b) for a in isa.row("map.bitcast").dtypes for b in isa.row("map.bitcast").dtypes
             if NUMPY[a].itemsize == NUMPY[b].itemsize]  # fmt: skip
    rng = np.random.default_rng(5)
    b = KernelBuilder("bitcast")
    arrays: dict[str, Array] = {}
    for k, (source, to) in enumerate(pairs):
        x, y = b.input(f"x{k}", source, (3, 7)), b.output(f"y{k}", to, (3, 7))
        arrays[f"x{k}"] = rng.integers(1, 100, (3, 7)).astype(NUMPY[source])
        b.store(y, (0, 0), b.bitcast(b.load(x, (0, 0), (3, 7)), to))
    check(b.finish(), arrays, {}, target)


REDUCTIONS = sorted(n for n, r in isa.rows().items() if r.category in (isa.Category.REDUCE, isa.Category.SCAN))


@levels
@pytest.mark.parametrize("name", REDUCTIONS)
def test_reduce_and_scan(name: str, target: Target) -> None:
    sums = name.endswith((".sum", ".prod"))

    def apply(b: KernelBuilder, x: Tile, operand: Any) -> Tile:
        return b.emit(name, x, axis=(len(x.type.shape) + 1) // 2 - (len(x.type.shape) == 1))

    def last(b: KernelBuilder, x: Tile, operand: Any) -> Tile:
        return b.emit(name, x, axis=len(x.type.shape) - 1)

    for which in (apply, last):
        check_elements(name, isa.row(name).dtypes, which, target, lambda d: (64.0 if d in (DType.F32, DType.F64) else 2.0) if sums else 0.0,
                       least_rank=1, small=sums)  # fmt: skip


@levels
@pytest.mark.parametrize("name", ["fill", "iota", "index", "bcast", "reshape", "transpose", "extract", "concat"])
def test_moves(name: str, target: Target) -> None:
    def apply(b: KernelBuilder, x: Tile, operand: Any) -> Tile:
        shape, dtype = x.type.shape, x.type.dtype
        if name == "fill":
            return b.fill(1 if dtype is DType.BOOL else 3, dtype, shape)
        if name == "iota":
            return b.iota(-3 if dtype.value[0] == "i" else 3, shape, len(shape) // 2 if len(shape) > 1 else 0, dtype)
        if name == "index":
            return b.index(-41)
        if name == "bcast":
            return b.bcast(operand((*shape[:-1], 1), None), (2, *shape)[-3:] if len(shape) < 3 else shape)
        if name == "reshape":
            return b.reshape(x, (math.prod(shape),)) if len(shape) > 1 else b.reshape(x, (*shape, 1))
        if name == "transpose":
            return b.transpose(x, tuple(reversed(range(len(shape)))))
        if name == "extract":
            start = tuple(e // 3 for e in shape)
            return b.extract(x, start, tuple(max(1, (e - s) - 1) for e, s in zip(shape, start, strict=True)))
        more = operand((*shape[:-1], 3), None)
        return b.concat([x, more, x], len(shape) - 1)

    check_elements(name, isa.row(name).dtypes, apply, target, lambda _: 0.0, least_rank=1)


@levels
def test_transposes(target: Target) -> None:
    """All permutations, with extents that make full squares of vectors and that do not."""
    rng = np.random.default_rng(8)
    for shape in ((16, 16), (32, 16), (5, 3), (16, 33), (2, 16, 16), (3, 4, 5), (16, 2, 16)):
        b, arrays = KernelBuilder("transposes"), dict[str, Array]()
        x = b.input("x", DType.F32, shape)
        arrays["x"] = rng.standard_normal(shape).astype(np.float32)
        perms = [(0, 1), (1, 0)] if len(shape) == 2 else [(0, 2, 1), (1, 0, 2), (2, 1, 0), (1, 2, 0), (2, 0, 1)]
        for k, perm in enumerate(perms):
            out = b.transpose(b.load(x, (0,) * len(shape), shape), perm)
            b.store(b.output(f"y{k}", DType.F32, out.type.shape), (0,) * len(shape), out)
        check(b.finish(), arrays, {}, target)


@levels
@pytest.mark.parametrize("a,b_,acc", [(DType.F32, DType.F32, DType.F32), (DType.F64, DType.F64, DType.F64), (DType.F16, DType.F16, DType.F32),
                                      (DType.BF16, DType.BF16, DType.F32), (DType.I8, DType.I8, DType.I32), (DType.U8, DType.I8, DType.I32),
                                      (DType.U8, DType.U8, DType.I32), (DType.I32, DType.I32, DType.I32), (DType.I64, DType.I64, DType.I64)])  # fmt: skip
def test_mma(a: DType, b_: DType, acc: DType, target: Target) -> None:
    rng = np.random.default_rng(4)
    for m, k, n in ((1, 1, 1), (3, 4, 19), (2, 5, 16), (4, 2, 7)):
        b = KernelBuilder("mma")
        x, w = b.input("x", a, (m, k)), b.input("w", b_, (k, n))
        c, y = b.input("c", acc, (m, n)), b.output("y", acc, (m, n))
        left = b.load(x, (0, 0), (m, k))
        first = b.mma(b.load(c, (0, 0), (m, n)), left, b.load(w, (0, 0), (k, n)))
        b.store(y, (0, 0), first)
        z = b.output("z", acc, (m, n))
        other = b.map("add", left, left) if a in FLOATS else b.map("sub", left, left)
        b.store(z, (0, 0), b.mma(first, other, b.load(w, (0, 0), (k, n))))
        arrays = {"x": numbers(rng, a, (m, k), True), "w": numbers(rng, b_, (k, n), True), "c": numbers(rng, acc, (m, n), True)}
        check(b.finish(), arrays, {}, target, 256.0 if acc in FLOATS else 0.0)




def test_threads_come_from_torch() -> None:
    assert torch.get_num_threads() >= 1
