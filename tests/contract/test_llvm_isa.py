"""Every instruction, for every element type, natively and by its meaning: on all levels that this machine executes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hotfuse.backends.llvm.emission.emit import EMISSIONS
from hotfuse.ir.types import DType
from hotfuse.native.target import CpuTarget
from hotfuse.tile import isa
from hotfuse.tile.build import KernelBuilder
from hotfuse.tile.memory import NUMPY
from hotfuse.tile.program import Tile
from tests.contract.native import FLOATS, Array, check, compare, levels, numbers, run_native

SHAPES = ((), (1,), (5,), (16,), (3, 19), (2, 1, 33), (4, 16), (2, 3, 7))
Apply = Callable[[KernelBuilder, Tile, Callable[[tuple[int, ...], DType | None], Tile]], Tile]


def shapes_for(k: int, least_rank: int = 0) -> list[tuple[int, ...]]:
    """Two shapes per element type, in turn, so that all occur."""
    usable = [s for s in SHAPES if len(s) >= least_rank]
    return [usable[k % len(usable)], usable[(k + 3) % len(usable)]]


def check_elements(
    name: str,
    dtypes: tuple[DType, ...],
    apply: Apply,
    target: CpuTarget,
    ulps: Callable[[DType], float],
    least_rank: int = 0,
    small: bool = False,
) -> None:
    """One kernel that applies an instruction to tiles of every element type and some shapes."""
    rng = np.random.default_rng(sum(map(ord, name)))
    for k, dtype in enumerate(dtypes):
        b = KernelBuilder(f"{name}_{dtype.value}")
        arrays: dict[str, Array] = {}

        def operand(
            shape: tuple[int, ...],
            kind: DType | None = None,
            b: KernelBuilder = b,
            dtype: DType = dtype,
            arrays: dict[str, Array] = arrays,
        ) -> Tile:
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


FUNCTIONS = (
    "decay",
    "normal",
    "exp",
    "exp2",
    "expm1",
    "log",
    "log2",
    "log1p",
    "sin",
    "cos",
    "tanh",
    "erf",
    "pow",
    "rsqrt",
    "recip",
    "sqrt",
    "fma",
)
MAPS = sorted(
    n
    for n, r in isa.rows().items()
    if r.category is isa.Category.MAP and n not in ("map.select", "map.cast", "map.bitcast")
)


@levels
@pytest.mark.parametrize("name", MAPS)
def test_map(name: str, target: CpuTarget) -> None:
    row = isa.row(name)
    short = name.removeprefix("map.")

    def ulps(dtype: DType) -> float:
        if short == "decay" and dtype is DType.F32:  # 3e-7 + 4e-9 |x|, |x| at most 105
            return 12.0
        if short == "normal" and dtype is DType.F32:  # 1.5e-7 of what is at least a half
            return 3.0
        return (2.0 if dtype in (DType.F32, DType.F64) else 1.0) if short in FUNCTIONS else 0.0

    def apply(b: KernelBuilder, x: Tile, operand: Any) -> Tile:
        shape = x.type.shape
        if short == "decay":  # it takes nothing else
            x = b.map("neg", b.map("abs", x))
        if short == "normal":  # below 0 its error is absolute
            x = b.map("abs", x)
        others = [
            operand(tuple(1 if i == len(shape) - 1 - k else e for i, e in enumerate(shape)), None)
            for k in range(row.arity - 1)
        ]
        return b.emit(name, x, *others)

    check_elements(short, row.dtypes, apply, target, ulps)


@levels
def test_literal_operands(target: CpuTarget) -> None:
    """NaN and plain literals beside tiles that hold NaN: maximum and minimum hand NaN on from either side."""
    for name in ("max", "min", "add", "lt", "eq", "fma"):
        for value in (0.0, math.nan, math.inf):

            def apply(b: KernelBuilder, x: Tile, operand: Any, name: str = name, value: float = value) -> Tile:
                return (
                    b.map(name, x, value, x)
                    if name == "fma"
                    else b.map(name, b.map(name, value, x), x)
                    if name in ("max", "min")
                    else b.map(name, x, value)
                )

            check_elements(
                f"{name}_literal", FLOATS, apply, target, lambda d: 0.0 if d in (DType.F32, DType.F64) else 1.0
            )


@levels
def test_select(target: CpuTarget) -> None:
    def apply(b: KernelBuilder, x: Tile, operand: Any) -> Tile:
        return b.map("select", operand(x.type.shape, DType.BOOL), x, operand((), None))

    check_elements("select", isa.row("map.select").dtypes, apply, target, lambda _: 0.0)


@levels
@pytest.mark.parametrize("to", isa.row("map.cast").dtypes)
def test_cast(to: DType, target: CpuTarget) -> None:
    def apply(b: KernelBuilder, x: Tile, operand: Any) -> Tile:
        unsigned = x.type.dtype in FLOATS and to.value.startswith("u")
        return b.cast(b.map("abs", x) if unsigned else x, to)

    check_elements(f"cast_{to.value}", isa.row("map.cast").dtypes, apply, target, lambda _: 0.0, small=True)


@levels
def test_halves_round_to_even(target: CpuTarget) -> None:
    """All f16 and bf16 numbers widen exactly; all halfway cases and their neighbours round as they should."""
    for dtype in (DType.F16, DType.BF16):
        n = 1 << 16
        every = np.arange(n, dtype=np.uint16).view(NUMPY[dtype])
        with np.errstate(all="ignore"):
            wide = every.astype(np.float64)
            halfway = np.where(np.isfinite(wide), (wide + np.roll(wide, -1)) / 2, wide)
            for source, kind in ((DType.F32, np.float32), (DType.F64, np.float64)):
                values = np.concatenate(
                    [halfway, halfway * (1 + 2.0**-22), halfway * (1 - 2.0**-22), halfway * (1 + 2.0**-45)]
                ).astype(kind)
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
def test_bitcast(target: CpuTarget) -> None:
    pairs = [
        (a, b)
        for a in isa.row("map.bitcast").dtypes
        for b in isa.row("map.bitcast").dtypes
        if NUMPY[a].itemsize == NUMPY[b].itemsize
    ]
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
def test_reduce_and_scan(name: str, target: CpuTarget) -> None:
    sums = name.endswith((".sum", ".prod"))

    def apply(b: KernelBuilder, x: Tile, operand: Any) -> Tile:
        return b.emit(name, x, axis=(len(x.type.shape) + 1) // 2 - (len(x.type.shape) == 1))

    def last(b: KernelBuilder, x: Tile, operand: Any) -> Tile:
        return b.emit(name, x, axis=len(x.type.shape) - 1)

    for which in (apply, last):
        check_elements(
            name,
            isa.row(name).dtypes,
            which,
            target,
            lambda d: (64.0 if d in (DType.F32, DType.F64) else 2.0) if sums else 0.0,
            least_rank=1,
            small=sums,
        )


@levels
@pytest.mark.parametrize("name", ["fill", "iota", "index", "bcast", "reshape", "transpose", "extract", "concat"])
def test_moves(name: str, target: CpuTarget) -> None:
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
def test_transposes(target: CpuTarget) -> None:
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
@pytest.mark.parametrize(
    "a,b_,acc",
    [
        (DType.F32, DType.F32, DType.F32),
        (DType.F64, DType.F64, DType.F64),
        (DType.F16, DType.F16, DType.F32),
        (DType.BF16, DType.BF16, DType.F32),
        (DType.I8, DType.I8, DType.I32),
        (DType.U8, DType.I8, DType.I32),
        (DType.U8, DType.U8, DType.I32),
        (DType.I8, DType.U8, DType.I32),
        (DType.I16, DType.I16, DType.I32),
        (DType.I32, DType.I32, DType.I32),
        (DType.I64, DType.I64, DType.I64),
    ],
)
def test_mma(a: DType, b_: DType, acc: DType, target: CpuTarget) -> None:
    rng = np.random.default_rng(4)
    for m, k, n in ((1, 1, 1), (3, 4, 19), (2, 5, 16), (4, 2, 7), (3, 8, 36)):
        b = KernelBuilder("mma")
        x, w = b.input("x", a, (m, k)), b.input("w", b_, (k, n))
        c, y = b.input("c", acc, (m, n)), b.output("y", acc, (m, n))
        left = b.load(x, (0, 0), (m, k))
        first = b.mma(b.load(c, (0, 0), (m, n)), left, b.load(w, (0, 0), (k, n)))
        b.store(y, (0, 0), first)
        z = b.output("z", acc, (m, n))
        other = b.map("add", left, left) if a in FLOATS else b.map("sub", left, left)
        b.store(z, (0, 0), b.mma(first, other, b.load(w, (0, 0), (k, n))))
        # Whole numbers that every order of adding keeps exact; bytes use their whole range.
        arrays = {
            name: rng.integers(-8, 9, shape).astype(NUMPY[dtype]) if dtype in FLOATS else numbers(rng, dtype, shape)
            for name, dtype, shape in (("x", a, (m, k)), ("w", b_, (k, n)), ("c", acc, (m, n)))
        }
        check(b.finish(), arrays, {}, target)
