"""What a kernel has to do on a device: one row of counts from its tile program and from how its programs run.

    programs      the grid: iterations of the parallel loops, times the programs that share one tile
    of a program  multiply-adds, elements that are computed, reduced, loaded and stored, rounds of its longest loop
    of the whole  bytes of all that is read or written, once each

Counts come from the lowered kernel alone, so nothing here knows how a strategy cuts its loops. They say nothing of a device's
speed: rows of several devices can be kept beside each other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.dims import Dim, evaluate, symbols
from hotfuse.ir.types import DType
from hotfuse.tile.memory import NUMPY
from hotfuse.tile.program import OWN, Instr, Kernel, Loop, LoopKind, Operand, Stmt, Tile, TileAccess, TileType, When

HEAVY = frozenset({
    "exp", "exp2", "expm1", "log", "log2", "log1p", "tanh", "erf", "sin", "cos", "sqrt", "rsqrt", "recip", "div", "mod", "rem",
    "floordiv", "truncdiv", "pow", "decay", "normal",
})  # fmt: skip
"""Functions of an element that take many instructions, or the unit for special functions."""
ALIGNED = 16.0
"""Bytes that a thread reads at once at most."""
NAMES = (
    "programs", "nests", "multiply_adds", "loaded", "looped", "stored", "light", "heavy", "reduced", "rounds", "sums", "operands",
    "tile", "aligned", "cut", "rows", "columns", "depth", "width", "distinct", "warps", "stages", "split", "turns", "bulk",
)  # fmt: skip
"""Columns of a row."""
Row = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class ProgramShape:
    """How a program of a kernel runs, as far as a prediction reads it."""

    warps: int
    stages: int
    bulk: bool = False
    split: int = 1
    turns: int = 0
    """So many programs make one tile after the other; 0: one program a tile."""


@dataclass(slots=True)
class _Counts:
    """Counts of one program so far."""

    multiply_adds: float = 0.0
    loaded: float = 0.0
    looped: float = 0.0
    """Bytes that one round of its longest loop loads: what stages keep in shared memory."""
    stored: float = 0.0
    light: float = 0.0
    heavy: float = 0.0
    reduced: float = 0.0
    rounds: float = 1.0
    sums: float = 0.0
    """Elements that its loops hand from round to round: registers that are taken all the time."""
    operands: float = 0.0
    tile: float = 1.0
    """Elements of the largest tile that it stores."""
    aligned: float = ALIGNED
    """Bytes that may be read at once: rows of a matrix with an odd pitch are read element by element."""
    cut: float = 0.0
    """Bytes loaded by tiles that may reach over an end."""
    rows: float = 1.0
    columns: float = 1.0
    depth: float = 1.0


def work_of(kernel: Kernel, shape: ProgramShape) -> dict[str, float]:
    """The row of a kernel whose sizes are numbers, by name."""
    grids: list[tuple[float, _Counts]] = []
    for stmt in kernel.body:
        trips, inner = 1.0, (stmt,)
        while len(inner) == 1 and isinstance(inner[0], Loop) and inner[0].kind is LoopKind.PARALLEL:
            trips *= _rounds(inner[0], {})
            inner = inner[0].body
        counts = _Counts()
        _ProgramCounting(kernel, counts).block(inner, {}, 1.0, inside=False)
        grids.append((trips, counts))
    programs = sum(n for n, _ in grids)
    share = {name: sum(n * getattr(c, name) for n, c in grids) / max(programs, 1.0) for name in _MEAN}
    most = {name: max((getattr(c, name) for _, c in grids), default=0.0) for name in _LARGEST}
    least = {name: min((getattr(c, name) for _, c in grids), default=0.0) for name in _SMALLEST}
    width = max((_bytes(b.dtype) for b in kernel.buffers if b.kind not in OWN), default=4)
    distinct = sum(_bytes(b.dtype) * math.prod(evaluate(d, {}) for d in b.shape) for b in kernel.buffers if b.kind not in OWN)
    split = float(shape.split)
    for part, name in ((share, "multiply_adds"), (share, "loaded"), (share, "cut"), (most, "rounds")):
        part[name] /= split
    return {
        "programs": programs * split, "nests": float(len(grids)), **share, **most, **least, "width": float(width),
        "distinct": float(distinct), "warps": float(shape.warps), "stages": float(shape.stages), "split": split,
        "turns": float(shape.turns), "bulk": float(shape.bulk),
    }  # fmt: skip


_MEAN = ("multiply_adds", "loaded", "stored", "cut", "light", "heavy", "reduced")
_LARGEST = ("looped", "rounds", "sums", "operands", "tile", "rows", "columns", "depth")
_SMALLEST = ("aligned",)


class _ProgramCounting:
    """One program while it is counted."""

    def __init__(self, kernel: Kernel, into: _Counts) -> None:
        self.into, self.buffers = into, {b.name: b for b in kernel.buffers}

    def block(self, body: Sequence[Stmt], env: Mapping[str, int], times: float, *, inside: bool) -> None:
        into = self.into
        for stmt in body:
            match stmt:
                case Instr():
                    self._instruction(stmt, times, inside=inside)
                case When():
                    self.block(stmt.body, env, times, inside=inside)
                case Loop():
                    rounds = _rounds(stmt, env)
                    into.rounds = max(into.rounds, times * rounds)
                    into.sums = max(into.sums, sum(float(math.prod(t.type.shape)) for t, _ in stmt.carried))
                    self.block(stmt.body, {**env, stmt.var: _middle(stmt, env)}, times * rounds, inside=True)

    def _instruction(self, instr: Instr, times: float, *, inside: bool) -> None:
        tiles = [t.type for t in instr.outs] or [a.type for a in instr.args if isinstance(a, Tile)]
        if not tiles:
            return
        into, made = self.into, float(math.prod(tiles[0].shape))
        family, _, function = instr.op.partition(".")
        if family in ("load", "gather"):
            self._load(instr.args[0], tiles[0], times, inside=inside)
        elif family in ("store", "scatter"):
            into.stored += times * made * _bytes(tiles[0].dtype)
            into.tile = max(into.tile, made)
            for access in instr.args:
                if isinstance(access, TileAccess):
                    into.aligned = min(into.aligned, self._aligned(access))
        elif family == "mma":
            a, b = instr.args[1], instr.args[2]
            depth = float(a.type.shape[1]) if isinstance(a, Tile) else 1.0
            into.multiply_adds += times * made * depth
            into.rows, into.columns, into.depth = float(tiles[0].shape[0]), float(tiles[0].shape[1]), depth
            into.operands += sum(float(math.prod(t.type.shape)) for t in (a, b) if isinstance(t, Tile)) if inside else 0.0
        elif family == "map" and function in HEAVY:
            into.heavy += times * made
        elif family == "map":
            into.light += times * made
        elif family in ("reduce", "scan"):
            given = instr.args[0]
            into.reduced += times * (float(math.prod(given.type.shape)) if isinstance(given, Tile) else made)

    def _load(self, access: Operand, tile: TileType, times: float, *, inside: bool) -> None:
        size = float(math.prod(tile.shape)) * _bytes(tile.dtype)
        if isinstance(access, TileAccess):
            size /= math.prod(n for n, axis in zip(tile.shape, access.axes, strict=False) if axis < 0)
            self.into.aligned = min(self.into.aligned, self._aligned(access))
            self.into.cut += times * size if any(v is not None for v in access.valid) else 0.0
        self.into.loaded += times * size
        self.into.looped += size if inside else 0.0

    def _aligned(self, access: TileAccess) -> float:
        """What the distance between rows of a tile lets threads move at once; one element where no axis lies in memory in order."""
        buffer = self.buffers.get(access.buffer)
        if buffer is None or not access.axes:
            return ALIGNED
        size, steps = _bytes(buffer.dtype), access.step or (1,) * len(access.axes)
        walked = [(axis, step) for axis, step in zip(access.axes, steps, strict=True) if axis >= 0]
        far = [_value(step, {}) * _value(buffer.stride[axis], {}) for axis, step in walked]
        if far and 1 not in far:
            return float(size)
        return min([ALIGNED, *(float(math.gcd(n * size, int(ALIGNED))) for n in far if n > 1)])


def _rounds(loop: Loop, env: Mapping[str, int]) -> float:
    """Iterations; where data or outer loops tell how many, as in the middle of what they may be."""
    if loop.given is not None:
        return 1.0
    lo, hi = _value(loop.lo, env), _value(loop.hi, env)
    return float(max(0, -(-(hi - lo) // loop.step)))


def _middle(loop: Loop, env: Mapping[str, int]) -> int:
    return (_value(loop.lo, env) + _value(loop.hi, env)) // 2


def _value(bound: Dim, env: Mapping[str, int]) -> int:
    return evaluate(bound, {**dict.fromkeys(symbols(bound), 0), **env})


def _bytes(dtype: DType) -> int:
    return NUMPY[dtype].itemsize
