"""Native loads, stores, gathers and scatters against the interpreter: tails, strides, and memory that must not change."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
import pytest
import torch

from hotfuse.backends.llvm.native import compile_kernel, load_kernel
from hotfuse.ir.dims import expr
from hotfuse.ir.types import DType
from hotfuse.native.target import CpuTarget
from hotfuse.tile import isa
from hotfuse.tile.build import KernelBuilder, remaining
from hotfuse.tile.memory import NUMPY
from tests.contract.native import Array, check, levels, numbers

DTYPES = isa.row("load").dtypes


@levels
@pytest.mark.parametrize("dtype", DTYPES)
def test_tails(dtype: DType, target: CpuTarget) -> None:
    """A copy in tiles that do not fit: the last ones are cut, in both directions, with sizes known and unknown."""
    rng = np.random.default_rng(1)
    for m, n, rows, cols, known in (
        (5, 37, 2, 16, False),
        (3, 5, 4, 8, True),
        (1, 64, 1, 24, False),
        (7, 1, 3, 1, False),
        (4, 33, 3, 20, True),
    ):
        b = KernelBuilder("copy")
        M, N = (m, n) if known else (b.size("M"), b.size("N"))
        x, y = b.input("x", dtype, (M, N)), b.output("y", dtype, (M, N))
        with b.loop("i", 0, M, rows) as i, b.loop("j", 0, N, cols) as j:
            valid = (remaining(M, i.var), remaining(N, j.var))
            b.store(y, (i.var, j.var), b.load(x, (i.var, j.var), (rows, cols), valid=valid, fill=1), valid=valid)
        check(b.finish(), {"x": numbers(rng, dtype, (m, n))}, {} if known else {"M": m, "N": n}, target)


@levels
@pytest.mark.parametrize("dtype", [DType.F32, DType.I8, DType.BOOL, DType.F64, DType.BF16])
def test_fill_where_nothing_exists(dtype: DType, target: CpuTarget) -> None:
    """Missing elements read as the fill: rows, columns, both, and a count below zero."""
    rng = np.random.default_rng(2)
    for rows, cols in ((0, 5), (2, 0), (-3, 4), (3, 19), (2, 11)):
        b = KernelBuilder("fill")
        R, C = b.size("R"), b.size("C")
        x = b.input("x", dtype, (3, 19))
        t = b.load(x, (0, 0), (3, 19), valid=(R, C), fill=1)
        b.store(b.output("y", dtype, (3, 19)), (0, 0), t)
        b.store(b.output("z", dtype, (3, 19)), (0, 0), b.load(x, (0, 0), (3, 19), valid=(R, None), fill=1))
        b.store(b.output("u", dtype, (2, 19)), (0, 0), b.load(x, (0, 3), (2, 19), axes=(0, -1), valid=(R, C), fill=1))
        b.store(b.output("v", dtype, ()), (), b.load(x, (1, 2), ()))
        check(b.finish(), {"x": numbers(rng, dtype, (3, 19))}, {"R": rows, "C": cols}, target)


@levels
@pytest.mark.parametrize("dtype", DTYPES)
def test_walks(dtype: DType, target: CpuTarget) -> None:
    """Transposed, repeated, strided, backward and symbolic-stride accesses, read and written."""
    rng = np.random.default_rng(3)
    b = KernelBuilder("walks")
    s = b.size("s")
    x = b.input("x", dtype, (9, 40))
    w = b.input("w", dtype, (6, 5, 4), (s, 4, 1))
    tiles = [
        b.load(x, (1, 2), (5, 7), axes=(1, 0)),
        b.load(x, (1, 2), (4, 17), axes=(0, 1), step=(2, 2)),
        b.load(x, (8, 39), (3, 9), step=(-1, -1)),
        b.load(x, (2, 3), (3, 5), axes=(-1, 1)),
        b.load(x, (2, 3), (3, 18), axes=(1, -1)),
        b.load(x, (2, 3), (2, 3, 4), axes=(-1, 0, -1)),
        b.load(x, (1, 1), (6,), axes=(0,)),
        b.load(x, (2, 5), (17,), step=(b.size("st"),)),
        b.load(w, (1, 2, 0), (4, 3, 4)),
        b.load(w, (0, 2, 1), (17,), axes=(0,), step=(1,), valid=(expr("+", s, -22),)),
        b.load(w, (5, 0, 3), (3, 3), axes=(0, 2), step=(-2, -1)),
    ]
    for k, t in enumerate(tiles):
        b.store(b.output(f"y{k}", dtype, t.type.shape), (0,) * len(t.type.shape), t)
    z = b.output("z", dtype, (20, 50))
    b.store(z, (1, 1), tiles[1], axes=(1, 0))
    b.store(z, (19, 49), tiles[2], step=(-1, -2))
    b.store(z, (0, 30), tiles[6], axes=(0,), step=(3,))
    b.store(z, (2, 20), tiles[10], axes=(0, 1), step=(1, 3), valid=(s, expr("+", s, -26)))
    arrays = {"x": numbers(rng, dtype, (9, 40)), "w": numbers(rng, dtype, (6, 28))}
    check(b.finish(), arrays, {"s": 28, "st": 2}, target)


@levels
@pytest.mark.parametrize("dtype", DTYPES)
def test_gather_and_scatter(dtype: DType, target: CpuTarget) -> None:
    """An index per row moves whole rows, an index per element moves elements; indices that meet are stored in order or added."""
    rng = np.random.default_rng(4)
    for kind in (DType.I64, DType.I32, DType.U8) if dtype is DType.F32 else (DType.I64,):
        b = KernelBuilder("gather")
        R, C = b.size("R"), b.size("C")
        x = b.input("x", dtype, (9, 21))
        rows, each = b.input("rows", kind, (5, 1)), b.input("each", kind, (5, 21))
        per_row, per_element = b.load(rows, (0, 0), (5, 1)), b.load(each, (0, 0), (5, 21))
        tiles = [
            b.gather(x, (0, 0), per_row, (5, 21), dim=0, axes=(-1, 1)),
            b.gather(x, (0, 0), per_row, (5, 21), dim=0, axes=(-1, 1), valid=(R, C), fill=1),
            b.gather(x, (0, 0), per_element, (5, 21), dim=0, axes=(-1, 1)),
            b.gather(x, (1, 0), per_element, (5, 21), dim=1, axes=(0, -1), valid=(R, C)),
            b.gather(x, (0, 2), b.load(rows, (1, 0), ()), (), dim=0),
        ]
        for k, t in enumerate(tiles):
            b.store(b.output(f"y{k}", dtype, t.type.shape), (0,) * len(t.type.shape), t)
        new = tiles[0]
        arrays = {
            "x": numbers(rng, dtype, (9, 21), True),
            "rows": rng.integers(0, 9, (5, 1)).astype(NUMPY[kind]),
            "each": rng.integers(0, 9, (5, 21)).astype(NUMPY[kind]),
        }
        for reduce in ("none", "add") if dtype is not DType.BOOL else ("none",):
            p, q = b.output(f"p{reduce}", dtype, (9, 21)), b.output(f"q{reduce}", dtype, (9, 21))
            v = b.output(f"v{reduce}", dtype, (14, 30))
            b.scatter(
                p,
                (0, 0),
                b.load(rows, (2, 0), (1, 1)),
                b.load(x, (0, 0), (1, 21)),
                dim=0,
                reduce=reduce,
                valid=(None, C),
            )
            b.scatter(
                q, (0, 0), b.load(each, (0, 0), (1, 21)), b.load(x, (1, 0), (1, 21)), dim=0, reduce=reduce, valid=(1, C)
            )
            b.scatter(v, (0, 0), b.load(each, (0, 0), (5, 21)), new, dim=1, reduce=reduce, valid=(R, C))
        check(b.finish(), arrays, {"R": 4, "C": 19}, target, 2.0 if dtype.value[0] in "fb" else 0.0)


@levels
def test_reading_stops_at_the_end_of_memory(target: CpuTarget) -> None:
    """The last element lies before a page that may not be read: a tail that reads too far kills the process."""
    page = mmap.PAGESIZE
    memory = mmap.mmap(-1, 2 * page)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(base + page), ctypes.c_size_t(page), 0) == 0
    for dtype in (DType.F32, DType.I8, DType.F64, DType.BF16):
        for n in (1, 3, 13, 21):
            b = KernelBuilder("edge")
            N = b.size("N")
            x, y = b.input("x", dtype, (N,)), b.output("y", dtype, (n,))
            with b.loop("i", 0, N, 16) as i:
                valid = (remaining(N, i.var),)
                b.store(y, (i.var,), b.load(x, (i.var,), (16,), valid=valid), valid=valid)
            b.store(y, (0,), b.load(x, (0,), (n,)))
            with b.loop("j", 0, N, 8) as j:
                b.store(
                    y,
                    (j.var,),
                    b.load(x, (j.var,), (8,), step=(b.size("one"),), valid=(remaining(N, j.var),)),
                    valid=(remaining(N, j.var),),
                )
            values = np.arange(1, n + 1).astype(NUMPY[dtype])
            at = page - values.nbytes
            memory[at:page] = values.tobytes()
            got = np.zeros(n, NUMPY[dtype])
            native = load_kernel(compile_kernel(b.finish(), target))
            native.enter(base + at, got.ctypes.data, 0, n, 1, 1)
            np.testing.assert_array_equal(got, values)
    assert libc.mprotect(ctypes.c_void_p(base + page), ctypes.c_size_t(page), mmap.PROT_READ | mmap.PROT_WRITE) == 0


@levels
def test_count_and_hints(target: CpuTarget) -> None:
    """Counters add up; prefetches, also far outside, and barriers change nothing."""
    rng = np.random.default_rng(6)
    b = KernelBuilder("count")
    x, y = b.input("x", DType.F32, (6, 19)), b.output("n", DType.I64, (4,))
    with b.loop("i", 0, 6) as i:
        t = b.load(x, (i.var, 0), (19,))
        b.count(y, (1,), t)
        b.count(y, (2,), b.map("gt", t, 0.0))
        b.count(y, (3,), b.load(x, (i.var, 3), ()))
        b.prefetch(x, (expr("*", i.var, 1000), 5), level=2)
        b.effect("barrier_spill")
    arrays: dict[str, Array] = {"x": numbers(rng, DType.F32, (6, 19)), "n": np.zeros(4, np.int64)}
    check(b.finish(), arrays, {}, target)


@levels
@pytest.mark.parametrize("dtype", [DType.BF16, DType.F16, DType.I8, DType.U8, DType.I16, DType.I32])
def test_a_few_lanes_of_a_narrowed_vector_are_all_that_is_written(dtype: DType, target: CpuTarget) -> None:
    """LLVM has written 32 bits where one lane of 16 was to be: what lies behind must stay."""
    for source in (DType.F32, DType.I32):
        for count in (1, 2, 3):
            b = KernelBuilder("narrow")
            x, y = b.input("x", source, (16,)), b.output("y", dtype, (16,))
            b.store(y, (0,), b.cast(b.load(x, (0,), (16,)), dtype), valid=(count,))
            given = np.arange(3, 19, dtype=NUMPY[source])
            made = np.full(16, 77, NUMPY[dtype])
            tensors = [torch.from_numpy(a.view(np.int16) if a.dtype == NUMPY[DType.BF16] else a) for a in (given, made)]
            load_kernel(compile_kernel(b.finish(), target))(tensors)
            want = np.where(np.arange(16) < count, np.arange(3, 19), 77)
            assert np.array_equal(made.astype(np.float64), want), (source, count)
