"""The fusion ISA: rows of the table, kernels that run, what the interpreter and the verifier refuse."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from hotfuse.base.errors import InternalError
from hotfuse.ir.dims import Sym, expr, sym
from hotfuse.ir.graph import Loc
from hotfuse.ir.types import DType, bits
from hotfuse.tile import isa
from hotfuse.tile.affine import difference, trip_count
from hotfuse.tile.build import KernelBuilder, remaining
from hotfuse.tile.interpreter import run
from hotfuse.tile.isa import Category, InstructionRow
from hotfuse.tile.memory import NUMPY, Array
from hotfuse.tile.program import (
    Buffer,
    BufferKind,
    Instr,
    Kernel,
    Loop,
    LoopKind,
    Stmt,
    Tile,
    TileAccess,
    TileType,
    When,
)
from hotfuse.tile.text import parse, show
from hotfuse.tile.verify import invariants, verify

F32, I64, BOOL = DType.F32, DType.I64, DType.BOOL
TORCH = {
    DType.F64: torch.float64, DType.F32: torch.float32, DType.F16: torch.float16, DType.BF16: torch.bfloat16,
    DType.I64: torch.int64, DType.I32: torch.int32, DType.I16: torch.int16, DType.I8: torch.int8, DType.U8: torch.uint8,
    DType.BOOL: torch.bool,
}  # fmt: skip


def numbers(dtype: DType, shape: tuple[int, ...], seed: int = 0) -> Array:
    """Any numbers of a type, with its special ones."""
    rng = np.random.default_rng(seed)
    size = int(np.prod(shape))
    if dtype is BOOL:
        return rng.integers(0, 2, shape).astype(bool)
    if dtype.value[0] in "iu":
        info = np.iinfo(NUMPY[dtype])
        odd = [0, 1, info.max, info.min, 2, 7]
        values = np.array([int(v) for v in rng.integers(0 if info.min == 0 else -9, 9, size)], object)
    else:
        odd = [0.0, -0.0, np.inf, -np.inf, np.nan, 0.5, 2.5, -1.5]
        values = np.array([float(v) for v in rng.normal(0, 3, size)], object)
    for at in rng.integers(0, max(size, 1), size // 3):
        values[at] = odd[int(rng.integers(len(odd)))]
    return values.astype(NUMPY[dtype]).reshape(shape)


# --- the table --------------------------------------------------------------------------------------------------------


def operand_types(row: InstructionRow, dtype: DType) -> list[TileType]:
    """Operands for an instruction without memory: broadcast against each other where it maps."""
    shapes: list[tuple[int, ...]] = [(3, 4), (4,), (3, 1)]
    match row.name:
        case "mma":
            whole = dict.fromkeys((DType.I16, DType.I8, DType.U8), DType.I32)
            acc = {**whole, DType.F16: F32, DType.BF16: F32}.get(dtype, dtype)
            return [TileType(acc, (3, 5)), TileType(dtype, (3, 2)), TileType(dtype, (2, 5))]
        case "map.select":
            return [TileType(BOOL, (4,)), TileType(dtype, (3, 4)), TileType(dtype)]
        case "concat":
            return [TileType(dtype, (3, 4)), TileType(dtype, (3, 1))]
        case _:
            return [TileType(dtype, s) for s in shapes[: row.arity]]


ATTRS: dict[str, dict[str, Any]] = {
    "transpose": {"perm": (1, 0)}, "extract": {"start": (1, 0), "extent": (2, 3)}, "concat": {"axis": 1}, "iota": {"axis": 1},
}  # fmt: skip
TILE_ROWS = [r for r in isa.rows().values() if r.category not in (Category.MEMORY, Category.HINT)]


@pytest.mark.parametrize("row", TILE_ROWS, ids=lambda r: r.name)
def test_rule_and_meaning_agree(row: InstructionRow) -> None:
    assert row.dtypes
    for dtype in row.dtypes:
        types = operand_types(row, dtype)
        args: tuple[Any, ...] = tuple(Tile(str(i), t) for i, t in enumerate(types))
        values: list[Any] = [numbers(t.dtype, t.shape, i) for i, t in enumerate(types)]
        attrs = ATTRS.get(row.name, {"axis": 1} if "axis" in row.attrs else {})
        out = None
        if row.name in ("fill", "iota", "index"):
            args, values = (1,), [1]
            out = (TileType(dtype, () if row.name == "index" else (3, 4)),)
        if row.name in ("bcast", "reshape"):
            out = (TileType(dtype, (2, 3, 4) if row.name == "bcast" else (2, 6)),)
        for target in row.dtypes if row.name in ("map.cast", "map.bitcast") else (None,):
            if target is not None:
                out = (TileType(target, (3, 4)),)
                if row.name == "map.bitcast" and bits(target) != bits(dtype):
                    with pytest.raises(InternalError, match="share their bits"):
                        isa.out_types(row.name, args, (), out)
                    continue
            (found,) = isa.out_types(row.name, args, tuple(attrs.items()), out)
            result = isa.compute(row.name, values, found, tuple(attrs.items()))  # checks type and extents
            assert result is not None


@pytest.mark.parametrize("row", TILE_ROWS, ids=lambda r: r.name)
def test_rules_refuse(row: InstructionRow) -> None:
    wrong: tuple[Any, ...] = (1.5,) * 7 if row.arity >= 0 else ()
    with pytest.raises(InternalError):
        isa.out_types(row.name, wrong, tuple((n, 0) for n in row.attrs))
    with pytest.raises(InternalError, match="attribute"):
        isa.out_types(row.name, (), (("nonsense", 1),))
    for dtype in set(NUMPY) - set(row.dtypes):
        if row.name not in ("mma", "iota", "index"):
            args = tuple(Tile(str(i), t) for i, t in enumerate(operand_types(row, dtype)))
            with pytest.raises(InternalError):
                isa.out_types(row.name, args, tuple((n, 0) for n in row.attrs))


LIKE_TORCH: dict[str, Callable[..., torch.Tensor]] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div, "rem": torch.fmod, "mod": torch.remainder,
    "pow": torch.pow, "max": torch.maximum, "min": torch.minimum, "neg": torch.neg, "abs": torch.abs, "sign": torch.sign,
    "sqrt": torch.sqrt, "rsqrt": torch.rsqrt, "recip": torch.reciprocal, "exp": torch.exp, "exp2": torch.exp2,
    "expm1": torch.expm1, "log": torch.log, "log2": torch.log2, "log1p": torch.log1p, "sin": torch.sin, "cos": torch.cos,
    "tanh": torch.tanh, "erf": torch.erf, "floor": torch.floor, "ceil": torch.ceil, "round": torch.round,
    "normal": lambda a: (torch.erfc(a.double() * -(0.5**0.5)) * 0.5).to(a.dtype), "trunc": torch.trunc,
    "eq": torch.eq, "ne": torch.ne, "lt": torch.lt, "le": torch.le, "gt": torch.gt, "ge": torch.ge, "isnan": torch.isnan,
    "isinf": torch.isinf, "and": torch.bitwise_and, "or": torch.bitwise_or, "xor": torch.bitwise_xor,
    "not": torch.bitwise_not, "shl": torch.bitwise_left_shift, "shr": torch.bitwise_right_shift,
    "truncdiv": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "floordiv": lambda a, b: torch.div(a, b, rounding_mode="floor"),
}  # fmt: skip


def to_torch(a: Array, dtype: DType) -> torch.Tensor:
    if dtype is DType.BF16:
        return torch.from_numpy(a.astype(np.float32)).to(torch.bfloat16)
    return torch.from_numpy(a)


@pytest.mark.parametrize("name", LIKE_TORCH)
def test_meaning_is_torchs(name: str) -> None:
    row = isa.row(f"map.{name}")
    for dtype in row.dtypes:
        if dtype not in TORCH:
            continue
        args = [numbers(dtype, (512,), seed) for seed in range(row.arity)]
        if name in ("truncdiv", "floordiv", "rem", "mod") and dtype.value[0] in "iu":
            args[1] = np.where(args[1] == 0, 3, args[1]).astype(args[1].dtype)  # torch raises
            args[1] = np.where(args[1] == -1, 3, args[1]).astype(args[1].dtype)  # the least number by -1 may trap there
        if name == "pow" and dtype.value[0] in "iu":
            args[1] = np.clip(args[1], 0 if dtype is DType.U8 else -9, 9).astype(args[1].dtype)
        (out,) = isa.out_types(row.name, tuple(Tile(str(i), TileType(dtype, (512,))) for i in range(row.arity)))
        found = isa.compute(row.name, args, out)
        assert found is not None
        wanted = LIKE_TORCH[name](*(to_torch(a, dtype) for a in args))
        error = {DType.F64: 1e-14, F32: 1e-6, DType.F16: 1e-3, DType.BF16: 8e-3}.get(dtype, 0)
        torch.testing.assert_close(
            to_torch(found, out.dtype), wanted, rtol=error, atol=error * 1e-3, equal_nan=True, msg=lambda m, d=dtype: f"{d}: {m}"
        )


def test_integers_never_trap() -> None:
    a = np.array([5, -128, 0], np.int8)
    t = TileType(DType.I8, (3,))
    for name in ("truncdiv", "floordiv", "rem", "mod"):
        assert isa.compute(f"map.{name}", [a, np.zeros(3, np.int8)], t).tolist() == [0, 0, 0]  # type: ignore[union-attr]
    assert isa.compute("map.truncdiv", [a, np.full(3, -1, np.int8)], t).tolist() == [-5, -128, 0]  # type: ignore[union-attr]


def test_special_values() -> None:
    nan = np.array([[1.0, np.nan, 3.0]], np.float32)
    one = TileType(F32, (1, 1))
    axis = (("axis", 1),)
    assert np.isnan(isa.compute("reduce.max", [nan], one, axis)).all()
    assert isa.compute("reduce.argmax", [nan], TileType(I64, (1, 1)), axis) == 1
    assert np.isnan(isa.compute("map.max", [nan, np.zeros((), np.float32)], TileType(F32, (1, 3)))).tolist() == [[0, 1, 0]]
    ties = np.array([[2, 7, 7, 2]], np.int32)
    assert isa.compute("reduce.argmax", [ties], TileType(I64, (1, 1)), axis) == 1
    assert isa.compute("reduce.argmin", [ties], TileType(I64, (1, 1)), axis) == 0
    full = np.full((1, 3), 100, np.int8)
    assert isa.compute("reduce.sum", [full], TileType(DType.I8, (1, 1)), axis) == 44
    assert isa.compute("scan.sum", [full], TileType(DType.I8, (1, 3)), axis).tolist() == [[100, -56, 44]]  # type: ignore[union-attr]


def test_long_sums_of_halves_are_rounded_once() -> None:
    ones = np.ones(300, ml_dtypes.bfloat16)  # adding one by one would stop at 256
    assert isa.compute("reduce.sum", [ones], TileType(DType.BF16, (1,)), (("axis", 0),)) == 300
    sums = isa.compute("scan.sum", [ones], TileType(DType.BF16, (300,)), (("axis", 0),))
    assert sums is not None and sums[-1] == 300


def test_unsigned_and_signed_bytes_contract_into_i32() -> None:
    acc, a, b = np.ones((1, 1), np.int32), np.full((1, 4), 255, np.uint8), np.full((4, 1), -128, np.int8)
    args = tuple(Tile(n, TileType(t, s)) for n, t, s in
                 (("c", DType.I32, (1, 1)), ("a", DType.U8, (1, 4)), ("b", DType.I8, (4, 1))))  # fmt: skip
    (out,) = isa.out_types("mma", args)
    assert isa.compute("mma", [acc, a, b], out) == 1 - 4 * 255 * 128


# --- kernels that run -------------------------------------------------------------------------------------------------


def softmax() -> Kernel:
    """Rows of any length: three passes over columns in steps of 4, with tails."""
    b = KernelBuilder("softmax")
    m_size, n_size = b.size("M"), b.size("N")
    x, y = b.input("x", F32, (m_size, n_size)), b.output("y", F32, (m_size, n_size))
    with b.parallel("m", m_size) as m:
        low = b.fill(-np.inf, F32, (1,))
        with b.loop("n", 0, n_size, 4, carry=[low]) as n:
            t = b.load(x, (m.var, n.var), (4,), valid=[remaining(n_size, n.var)], fill=-np.inf)
            n.yields(b.map("max", n.carried[0], b.reduce("max", t, 0)))
        top = n.outs[0]
        with b.loop("n", 0, n_size, 4, carry=[b.fill(0.0, F32, (1,))]) as n:
            t = b.load(x, (m.var, n.var), (4,), valid=[remaining(n_size, n.var)], fill=-np.inf)
            n.yields(b.map("add", n.carried[0], b.reduce("sum", b.map("exp", b.map("sub", t, top)), 0)))
        total = n.outs[0]
        with b.loop("n", 0, n_size, 4) as n:
            t = b.load(x, (m.var, n.var), (4,), valid=[remaining(n_size, n.var)])
            e = b.map("div", b.map("exp", b.map("sub", t, top)), total)
            b.store(y, (m.var, n.var), e, valid=[remaining(n_size, n.var)])
    return b.finish()


@pytest.mark.parametrize("shape", [(1, 1), (3, 4), (5, 7), (2, 17)])
def test_softmax(shape: tuple[int, int]) -> None:
    kernel = softmax()
    x, y = numbers(F32, shape), np.full(shape, np.nan, np.float32)
    x = np.nan_to_num(x, nan=1.0, posinf=9.0, neginf=-9.0)
    run(kernel, {"x": x, "y": y}, {"M": shape[0], "N": shape[1]})
    np.testing.assert_allclose(y, torch.softmax(torch.from_numpy(x), 1).numpy(), rtol=1e-5)
    again = parse(show(kernel))
    assert again == kernel


def test_matmul_on_a_transposed_weight_with_scratch() -> None:
    b = KernelBuilder("linear")
    m_size, n_size, k_size = b.size("M"), b.size("N"), b.size("K")
    x = b.input("x", DType.BF16, (m_size, k_size))
    w = b.const("w", DType.BF16, (n_size, k_size), (1, n_size))
    y, s = b.output("y", F32, (m_size, n_size)), b.scratch("s", F32, (4, 8))
    with b.parallel("m", m_size, 4) as m, b.parallel("n", n_size, 8) as n:
        rows, columns = remaining(m_size, m.var), remaining(n_size, n.var)
        with b.loop("k", 0, k_size, 2, carry=[b.fill(0, F32, (4, 8))]) as k:
            deep = remaining(k_size, k.var)
            lhs = b.load(x, (m.var, k.var), (4, 2), valid=[rows, deep])
            rhs = b.load(w, (n.var, k.var), (2, 8), axes=(1, 0), valid=[deep, columns])
            k.yields(b.mma(k.carried[0], lhs, rhs))
        b.store(s, (0, 0), k.outs[0])
        b.store(y, (m.var, n.var), b.load(s, (0, 0), (4, 8)), valid=[rows, columns])
    kernel = b.finish()
    rng = np.random.default_rng(0)
    x_, w_ = (rng.normal(size=s).astype(ml_dtypes.bfloat16) for s in ((7, 5), (5, 11)))
    y_ = np.full((7, 11), np.nan, np.float32)
    run(kernel, {"x": x_, "w": w_, "y": y_}, {"M": 7, "N": 11, "K": 5})
    np.testing.assert_allclose(y_, x_.astype(np.float32) @ w_.astype(np.float32), rtol=1e-5)


def test_steps_repeats_and_two_axes_along_one_dim() -> None:
    b = KernelBuilder("walk")
    x, y = b.input("x", I64, (4, 12)), b.output("y", I64, (2, 3, 4))
    b.store(y, (0, 0, 0), b.load(x, (3, 11), (3, 4), axes=(1, 1), step=(-4, -1)), axes=(1, 2))
    b.store(y, (1, 0, 0), b.load(x, (3, 0), (3, 2), axes=(-1, 0), step=(1, -2)), axes=(1, 2), step=(1, 2), valid=(2, None))
    kernel = b.finish()
    x_, y_ = np.arange(48).reshape(4, 12), np.zeros((2, 3, 4), np.int64)
    run(kernel, {"x": x_, "y": y_}, {})
    assert y_[0].tolist() == x_[3, ::-1].reshape(3, 4).tolist()
    assert y_[1].tolist() == [[36, 0, 12, 0], [36, 0, 12, 0], [0, 0, 0, 0]]


def test_gather_scatter_count_and_conditions() -> None:
    b = KernelBuilder("embed")
    n_size = b.size("n")
    ids, table = b.input("ids", DType.I32, (n_size,)), b.const("table", F32, (5, 3))
    y, bins, seen = b.output("y", F32, (n_size, 3)), b.output("bins", I64, (5,)), b.output("seen", I64, (2,))
    with b.loop("i", 0, n_size) as i:
        one = b.load(ids, (i.var,))
        row = b.gather(table, (0, 0), one, (4,), dim=0, axes=(1,), valid=(3,), fill=-1.0)
        b.store(y, (i.var, 0), row, valid=(3,))
        b.scatter(bins, (0,), one, b.fill(1, I64), dim=0, reduce="add")
        with b.when(expr("<", i.var, 2)):
            b.count(seen, (1,), b.map("lt", row, 0.0))
    kernel = b.finish()
    ids_ = np.array([4, 0, 4, 2], np.int32)
    table_ = np.arange(15, dtype=np.float32).reshape(5, 3)
    y_, bins_, seen_ = np.zeros((4, 3), np.float32), np.zeros(5, np.int64), np.zeros(2, np.int64)
    run(kernel, {"ids": ids_, "table": table_, "y": y_, "bins": bins_, "seen": seen_}, {"n": 4})
    assert (y_ == table_[ids_]).all()
    assert bins_.tolist() == [1, 0, 1, 0, 2]
    assert seen_.tolist() == [0, 2]  # the padding element of each of two rows
    ids_[1] = 5
    with pytest.raises(InternalError, match="elements 5 to 5 of dim 0, which has 5"):
        run(kernel, {"ids": ids_, "table": table_, "y": y_, "bins": bins_, "seen": seen_}, {"n": 4})


def test_unrolled_and_empty_loops_give_first_values() -> None:
    b = KernelBuilder("loops")
    n_size = b.size("n")
    y = b.output("y", I64, (2,))
    for at, (lo, hi, kind) in enumerate([(0, n_size, LoopKind.SERIAL), (n_size, expr("+", n_size, 3), LoopKind.UNROLL)]):
        with b.loop("i", lo, hi, 2, kind, carry=[b.fill(7, I64)]) as i:
            i.yields(b.map("add", i.carried[0], b.index(i.var)))
        b.store(y, (at,), i.outs[0])
    kernel = b.finish()
    for n, wanted in ((0, [7, 7 + 0 + 2]), (4, [7 + 0 + 2, 7 + 4 + 6])):
        y_ = np.zeros(2, np.int64)
        run(kernel, {"y": y_}, {"n": n})
        assert y_.tolist() == wanted


def test_memory_may_be_a_view_or_a_block() -> None:
    b = KernelBuilder("copy")
    x, y = b.input("x", F32, (3, 4), (8, 2)), b.output("y", F32, (3, 4))
    b.store(y, (0, 0), b.load(x, (0, 0), (3, 4)))
    kernel = b.finish()
    block = np.arange(24, dtype=np.float32).reshape(3, 8)
    for given in (block[:, ::2], block, block.ravel()):
        y_ = np.zeros((3, 4), np.float32)
        run(kernel, {"x": given, "y": y_}, {})
        assert (y_ == block[:, ::2]).all()
    for wrong in (block[:2], block.astype(np.float64), block[:, ::4], block[:, :4], np.zeros((6, 16), np.float32)[:, ::2]):
        with pytest.raises(InternalError, match="buffer x"):
            run(kernel, {"x": wrong, "y": np.zeros((3, 4), np.float32)}, {})
    with pytest.raises(InternalError, match="has buffers"):
        run(kernel, {"x": block}, {})
    with pytest.raises(InternalError, match="has sizes"):
        run(kernel, {"x": block, "y": np.zeros((3, 4), np.float32)}, {"n": 1})


# --- what the interpreter finds ---------------------------------------------------------------------------------------


def copy_kernel(read: Sym | int, write: Sym | int, kind: LoopKind, *, source: str = "x") -> Kernel:
    """y[write] = source[read] for i in 0..4"""
    b = KernelBuilder("copy")
    buffers = {"x": b.input("x", I64, (4,)), "y": b.output("y", I64, (4,)), "s": b.scratch("s", I64, (4,))}
    b.loc = Loc("model.py", 12)
    with b.loop("i", 0, 4, 1, kind):
        b.store(buffers["y"], (write,), b.load(buffers[source], (read,)))
    return b.finish()


I = sym("i")  # noqa: E741
NEXT, LAST = expr("+", I, 1), expr("+", I, -1)


def run_copy(kernel: Kernel, seed: int = 0) -> list[int]:
    y = np.zeros(4, np.int64)
    run(kernel, {"x": np.arange(4), "y": y}, {}, seed=seed)
    return y.tolist()


@pytest.mark.parametrize("index", [NEXT, LAST])
def test_out_of_bounds_names_the_instruction(index: Any) -> None:
    with pytest.raises(InternalError) as e:
        run_copy(copy_kernel(index, I, LoopKind.SERIAL))
    assert "out of bounds in x" in e.value.what
    assert "load x[" in e.value.where and "where i = " in e.value.where and "model.py:12" in e.value.where
    with pytest.raises(InternalError, match="out of bounds in y"):
        run_copy(copy_kernel(I, index, LoopKind.SERIAL))


def test_races_are_found() -> None:
    assert run_copy(copy_kernel(I, I, LoopKind.PARALLEL)) == [0, 1, 2, 3]
    assert run_copy(copy_kernel(I, 0, LoopKind.SERIAL)) == [3, 0, 0, 0]
    half: Any = expr("//", I, 2)
    for seed in range(24):  # whichever iteration comes first or last
        for read, write, source in ((I, 0, "x"), (0, I, "y"), (half, I, "y"), (I, half, "x")):
            with pytest.raises(InternalError, match="a race in y"):
                run_copy(copy_kernel(read, write, LoopKind.PARALLEL, source=source), seed)


def test_results_of_a_finished_parallel_loop_may_be_read() -> None:
    b = KernelBuilder("stages")
    y = b.output("y", I64, (3, 4))
    with b.parallel("m", 3) as m:
        with b.parallel("n", 4) as n:
            b.store(y, (m.var, n.var), b.index(n.var))
        total = b.reduce("sum", b.load(y, (m.var, 0), (4,)), 0)
        with b.parallel("k", 4) as k:
            b.store(y, (m.var, k.var), total, axes=(1,))
        with b.parallel("j", 4):  # several read one element, which is written once they are through
            b.load(y, (m.var, 0))
        b.store(y, (m.var, 0), b.index(5))
    kernel = b.finish()
    for seed in range(4):
        y_ = np.zeros((3, 4), np.int64)
        run(kernel, {"y": y_}, {}, seed=seed)
        assert y_.tolist() == [[5, 6, 6, 6]] * 3
    b = KernelBuilder("nested_race")
    y = b.output("y", I64, (3,))
    with b.parallel("m", 3) as m, b.parallel("n", 4):
        b.store(y, (m.var,), b.index(m.var))
    with pytest.raises(InternalError, match="a race in y"):
        run(b.finish(), {"y": np.zeros(3, np.int64)}, {})


def test_scratch_begins_unwritten_in_every_parallel_iteration() -> None:
    b = KernelBuilder("stale")
    y, s = b.output("y", F32, (4,)), b.scratch("s", F32, (1,))
    with b.parallel("i", 4) as i:
        with b.when(expr("==", i.var, 0)):
            b.store(s, (0,), b.fill(1.0, F32))
        b.store(y, (i.var,), b.load(s, (0,)))
    y_ = np.zeros(4, np.float32)
    for seed in range(3):
        run(b.finish(), {"y": y_}, {}, seed=seed)
        assert y_[0] == 1
        assert np.isnan(y_[1:]).all()


# --- what the verifier refuses ----------------------------------------------------------------------------------------

X, Y = Buffer("x", BufferKind.INPUT, F32, (8,), (1,)), Buffer("y", BufferKind.OUTPUT, F32, (8,), (1,))
S = Buffer("s", BufferKind.SCRATCH, F32, (8,), (1,))
A, B, W = Tile("a", TileType(F32, (4,))), Tile("b", TileType(F32, (4,))), Tile("w", TileType(F32, (2,)))


def load(tile: Tile = A, buffer: str = "x", at: Any = 0, **more: Any) -> Instr:
    return Instr("load", (TileAccess(buffer, (at,), (0,), **more),), (tile,))


def put(tile: Tile = A, buffer: str = "y") -> Instr:
    return Instr("store", (TileAccess(buffer, (0,), (0,)), tile))


def neg(tile: Tile, out: Tile) -> Instr:
    return Instr("map.neg", (tile,), (out,))


def loop(*body: Stmt, kind: LoopKind = LoopKind.SERIAL, hi: Any = 4, step: Any = 1, var: str = "i", **more: Any) -> Loop:
    return Loop(var, 0, hi, step, kind, body, **more)


def kernel_of(*body: Stmt, sizes: tuple[str, ...] = ("n",), buffers: tuple[Buffer, ...] = (X, Y, S), name: str = "k") -> Kernel:
    return Kernel(name, sizes, buffers, body)


def nested(depth: int) -> Stmt:
    stmt: Stmt = When(1, ())
    for _ in range(depth):
        stmt = When(1, (stmt,))
    return stmt


WRONG: list[tuple[int, Kernel, str]] = [
    (1, kernel_of(name=""), "the kernel has no name"),
    (1, kernel_of(sizes=("n", "n")), "size n has a name that is taken"),
    (1, kernel_of(sizes=("x",)), "buffer x has a name that is taken"),
    (1, kernel_of(loop(), loop()), "loop variable i has a name that is taken"),
    (1, kernel_of(load(replace(A, name=""))), "a tile has no name"),
    (2, kernel_of(load(), load()), "%a is assigned a second time"),
    (2, kernel_of(loop(load()), load()), "%a is assigned a second time"),
    (3, kernel_of(neg(A, B), load()), "%a is not defined here"),
    (3, kernel_of(loop(load()), put()), "%a is not defined here"),
    (3, kernel_of(When(1, (load(),)), put()), "%a is not defined here"),
    (3, kernel_of(load(), loop(carried=((B, A),), yields=(W,), outs=(replace(A, name="o"),))), "%w is not defined here"),
    (4, kernel_of(load(), put(replace(A, type=W.type))), "%a is used as f32[2], defined as f32[4]"),
    (5, kernel_of(load(Tile("a", TileType(F32, (0,))))), "f32[0]"),
    (5, kernel_of(Instr("fill", (0,), (Tile("a", TileType(F32, (1, 1, 1, 1))),))), "f32[1, 1, 1, 1]"),
    (6, kernel_of(buffers=(replace(X, dtype=DType.STR),)), "x holds str"),
    (6, kernel_of(buffers=(replace(X, stride=()),)), "1 dims and 0 strides"),
    (7, kernel_of(load(at=I)), "i of an access to x mentions i"),
    (7, kernel_of(loop(), load(at=I)), "mentions i"),
    (7, kernel_of(load(valid=(sym("q"),))), "mentions q"),
    (7, kernel_of(loop(hi=I)), "mentions i"),
    (7, kernel_of(buffers=(replace(X, shape=(sym("q"),)),)), "of buffer x mentions q"),
    (7, kernel_of(load(at=Sym("//", (1,)))), "'//' of 1 operands"),
    (7, kernel_of(load(at=1.5)), "1.5 of an access to x is not an integer expression"),
    (8, kernel_of(Instr("map.nothing", (), ())), "there is no instruction 'map.nothing'"),
    (8, kernel_of(load(), Instr("map.add", (A,), (B,))), "it takes 2 operands, not 1"),
    (8, kernel_of(load(), neg(A, W)), "it gives f32[4], and f32[2] is declared"),
    (8, kernel_of(load(buffer="z")), "there is no buffer 'z'"),
    (8, kernel_of(load(valid=(1, 1))), "2 valids are given for 1 axes"),
    (8, kernel_of(Instr("load", (TileAccess("x", (0,), (0, 0)),), (A,))), "the tile has 1 axes and x is walked along 2"),
    (8, kernel_of(Instr("load", (TileAccess("x", (0,), (1,)),), (A,))), "axes (1,) are not dims of x"),
    (8, kernel_of(Instr("load", (TileAccess("x", (), (0,)),), (A,))), "x has 1 dims and is indexed by 0"),
    (8, kernel_of(load(), Instr("store", (TileAccess("y", (0,), (-1,)), A))), "a store cannot repeat an element"),
    (9, kernel_of(load(), put(buffer="x")), "x is input"),
    (10, kernel_of(loop(step=0)), "step 0"),
    (10, kernel_of(loop(kind=LoopKind.UNROLL, hi=sym("n"))), "0 to n is not a fixed distance"),
    (11, kernel_of(load(), loop(carried=((B, A),))), "it carries 1, yields 0, gives 0 tiles"),
    (11, kernel_of(load(), loop(load(W), carried=((B, A),), yields=(W,), outs=(Tile("o", A.type),))), "f32[4], f32[4], f32[2]"),
    (12, kernel_of(load(), loop(kind=LoopKind.PARALLEL, carried=((B, A),), yields=(B,), outs=(Tile("o", A.type),))), "carries 1"),
    (13, kernel_of(load(), put(buffer="s"), loop(load(B, "s"), kind=LoopKind.PARALLEL)), "s is used in the parallel loop over i"),
    (14, kernel_of(When(sym("n"), ())), "n is a number"),
    (14, kernel_of(nested(70)), "nested more than 64 deep"),
    (15, kernel_of(Instr("prefetch", (TileAccess("x", (0,)),), (), (("level", True),))), "level is True"),
    (16, kernel_of(loop(given=TileAccess("x", (0,)))), "it reads f32 of x along 0 axes"),
    (16, kernel_of(loop(kind=LoopKind.UNROLL, given=TileAccess("x", (0,)))), "it is unroll, by 1, and carries 0 tiles"),
]  # fmt: skip


@pytest.mark.parametrize(("invariant", "kernel", "because"), WRONG, ids=lambda v: v if isinstance(v, str) else None)
def test_invariants(invariant: int, kernel: Kernel, because: str) -> None:
    with pytest.raises(InternalError) as e:
        verify(kernel)
    assert f"breaks invariant {invariant}: {invariants()[invariant]}" in e.value.what
    assert because in e.value.because


def test_every_invariant_is_tested() -> None:
    assert sorted(invariants()) == list(range(1, len(invariants()) + 1)) == sorted({number for number, _, _ in WRONG})


def test_the_message_shows_the_statements_around() -> None:
    inner = (load(), neg(A, B), neg(B, W), put(B))
    with pytest.raises(InternalError) as e:
        verify(kernel_of(load(Tile("z", A.type)), loop(*inner)))
    shown = e.value.where.splitlines()
    assert shown[1].strip() == "for i in 0..4 {"
    assert [line.strip() for line in shown[2:]] == [
        "%a: f32[4] = load x[0] axes(0)",
        "%b: f32[4] = map.neg %a",
        "-> %w: f32[2] = map.neg %b",
        "store y[0] axes(0), %b",
    ]


def test_scratch_may_serve_loops_side_by_side() -> None:
    uses = [(load(Tile(v, A.type), "s"), v) for v in "pq"]
    verify(kernel_of(*(loop(use, kind=LoopKind.PARALLEL, var=v) for use, v in uses)))


# --- small things -----------------------------------------------------------------------------------------------------


def test_the_builder_refuses() -> None:
    b = KernelBuilder("k")
    x = b.input("x", F32, (4,))
    with pytest.raises(InternalError, match="already something else"):
        b.size("x")
    with pytest.raises(InternalError, match="needs a tile"):
        b.map("add", 1.0, 2.0)
    with pytest.raises(InternalError, match="wrongly typed"):
        b.map("and", b.load(x, (0,), (4,)), b.load(x, (0,), (4,)))
    with pytest.raises(InternalError, match="not a number of type i8"):
        b.fill(300, DType.I8)
    assert (b.size("n"), b.size("n")) == (sym("n"), sym("n"))
    scope = b.loop("i", 0, 4)
    scope.__enter__()
    with pytest.raises(InternalError, match="open loop"):
        b.finish()


def test_an_error_inside_a_with_is_not_hidden() -> None:
    b = KernelBuilder("k")
    with pytest.raises(ZeroDivisionError), b.loop("i", 0, 4), b.when(expr("<", I, 2)):
        raise ZeroDivisionError


def test_distances() -> None:
    n, k = sym("n"), sym("k")
    assert difference(expr("+", n, 3), n) == 3
    assert difference(expr("+", expr("*", 4, expr("+", n, k)), 3), expr("+", expr("*", 4, k), expr("*", n, 4))) == 3
    assert difference(expr("+", expr("//", n, 2), k), expr("+", k, expr("//", n, 2), -1)) == 1
    assert difference(expr("*", n, k), expr("*", k, n)) == 0
    assert difference(n, k) is None
    assert difference(expr("*", n, 2), n) is None
    assert [trip_count(loop(hi=h, step=s)) for h, s in ((4, 1), (5, 2), (-3, 1), (n, 1))] == [4, 3, 0, None]
