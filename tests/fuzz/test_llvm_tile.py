"""Random tile kernels, natively and interpreted: only instructions that round exactly, so results must be equal to the bit.

A kernel is valid by construction: the builder types every instruction it is given. The seed is printed with the kernel's text.
"""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest

from hotfuse.ir.dims import Sym, expr
from hotfuse.ir.types import DType
from hotfuse.native.target import CpuTarget
from hotfuse.tile import isa
from hotfuse.tile.build import KernelBuilder, remaining
from hotfuse.tile.program import Buffer, Kernel, Tile
from hotfuse.tile.text import show
from tests.contract.native import FLOATS, check, levels, numbers

KERNELS = 25
"""Seeds per level."""
DTYPES = isa.row("load").dtypes
EXACT = (
    *(
        "add",
        "sub",
        "mul",
        "truncdiv",
        "floordiv",
        "rem",
        "mod",
        "max",
        "min",
        "neg",
        "abs",
        "sign",
        "floor",
        "ceil",
        "round",
    ),
    *("trunc", "eq", "ne", "lt", "le", "gt", "ge", "isnan", "isinf", "and", "or", "xor", "not", "shl", "shr", "select"),
)
"""Elementwise instructions that give the same bits everywhere."""


class Writer:
    """Writes one random kernel."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.b = KernelBuilder(f"random{seed}")
        self.n = self.b.size("n")
        self.inputs: list[Buffer] = []
        self.outs = 0

    def write(self) -> Kernel:
        rng = self.rng
        for k in range(3):
            self.inputs.append(self.b.input(f"x{k}", rng.choice(DTYPES), (6, self.n)))
        cols = rng.choice([1, 3, 8, 13, 16, 24, 33])
        kind = rng.choice(["loop", "parallel"])
        opened = (
            self.b.parallel("i", 6, rng.choice([1, 2, 3]))
            if kind == "parallel"
            else self.b.loop("i", 0, 6, rng.choice([1, 2, 4]))
        )
        with opened as i, self.b.loop("j", 0, self.n, cols) as j:
            self.body(i.var, j.var, rng.choice([1, 2]), cols)
        return self.b.finish()

    def body(self, i: Sym, j: Sym, rows: int, cols: int) -> None:
        b, rng = self.b, self.rng
        valid = (remaining(6, i), remaining(self.n, j))
        tiles = [b.load(x, (i, j), (rows, cols), valid=valid, fill=rng.choice([0, 1])) for x in self.inputs]
        for _ in range(rng.randint(3, 14)):
            made = self.step(tiles)
            if made is not None:
                tiles.append(made)
        for t in rng.sample(tiles[3:], min(3, len(tiles) - 3)):
            if math.prod(t.type.shape) <= 400:
                self.keep(t, i, j)

    def keep(self, t: Tile, i: Sym, j: Sym) -> None:
        """Store a tile where no other iteration stores: outputs have two more dims, one per loop."""
        b, shape = self.b, t.type.shape
        self.outs += 1
        y = b.output(f"y{self.outs}", t.type.dtype, (6, self.n, *shape))
        with b.when(expr("and", expr("<=", 0, i), expr("<", j, self.n))):
            b.store(y, (i, j, *(0 for _ in shape)), t)

    def step(self, tiles: list[Tile]) -> Tile | None:
        b, rng = self.b, self.rng
        t = rng.choice(tiles)
        shape, dtype = t.type.shape, t.type.dtype
        way = rng.choice(["map", "map", "map", "map", "cast", "reduce", "scan", "shape", "carry"])
        if way == "map":
            return self.map(rng.choice(EXACT), t, tiles)
        if way == "cast":
            targets = [d for d in DTYPES if not (dtype in FLOATS and d not in FLOATS and d is not DType.BOOL)]
            return b.cast(t, rng.choice(targets))
        if way in ("reduce", "scan") and shape:
            names = ["max", "min"] + (["argmax", "argmin"] if way == "reduce" else [])
            names += ["sum", "prod"] if dtype not in FLOATS else []
            name = rng.choice(["any", "all"]) if dtype is DType.BOOL and way == "reduce" else rng.choice(names)
            return (
                b.emit(f"{way}.{name}", t, axis=rng.randrange(len(shape))) if self.takes(f"{way}.{name}", t) else None
            )
        if way == "shape" and shape:
            return self.shaped(t, tiles)
        if way == "carry" and shape:
            with b.loop("k", 0, rng.choice([0, 1, 3]), carry=[t]) as k:
                nxt = self.map(rng.choice(["add", "max", "xor", "sub"]), k.carried[0], [*tiles, k.carried[0]])
                k.yields(nxt if nxt is not None and nxt.type == t.type else k.carried[0])
            return k.outs[0]
        return None

    def takes(self, op: str, t: Tile) -> bool:
        return t.type.dtype in isa.row(op).dtypes

    def map(self, name: str, t: Tile, tiles: list[Tile]) -> Tile | None:
        op = f"map.{name}"
        row = isa.row(op)
        if name == "select":
            conditions = [c for c in tiles if c.type.dtype is DType.BOOL and fits(c, t)]
            return self.b.emit(op, self.rng.choice(conditions), t, t) if conditions else None
        if not self.takes(op, t):
            return None
        others = [o for o in tiles if o.type.dtype is t.type.dtype and fits(o, t)]
        return self.b.emit(op, t, *(self.rng.choice(others) for _ in range(row.arity - 1)))

    def shaped(self, t: Tile, tiles: list[Tile]) -> Tile:
        b, rng, shape = self.b, self.rng, t.type.shape
        way = rng.choice(["transpose", "reshape", "extract", "concat", "bcast"])
        if way == "transpose":
            return b.transpose(t, rng.sample(range(len(shape)), len(shape)))
        if way == "reshape":
            return b.reshape(
                t, rng.choice([(math.prod(shape),), (*shape[::-1],), (1, math.prod(shape)), (math.prod(shape), 1)])
            )
        if way == "extract":
            start = [rng.randrange(e) for e in shape]
            return b.extract(t, start, [rng.randint(1, e - s) for e, s in zip(shape, start, strict=True)])
        if way == "concat":
            return b.concat([t, t], rng.randrange(len(shape)))
        return b.bcast(t, (2, *shape)) if len(shape) < 3 else t


def fits(a: Tile, b: Tile) -> bool:
    """Whether extents broadcast, and stay small."""
    try:
        return math.prod(np.broadcast_shapes(a.type.shape, b.type.shape)) <= 300
    except ValueError:
        return False


@levels
@pytest.mark.parametrize("seed", range(KERNELS))
def test_random_kernels(seed: int, target: CpuTarget) -> None:
    writer = Writer(seed)
    kernel = writer.write()
    rng = np.random.default_rng(seed)
    for n in (1, 5, 37):
        arrays: dict[str, Any] = {x.name: numbers(rng, x.dtype, (6, n)) for x in writer.inputs}
        try:
            check(kernel, arrays, {"n": n}, target)
        except AssertionError as e:
            raise AssertionError(f"seed {seed}, n = {n}\n{show(kernel)}\n{e}") from e
