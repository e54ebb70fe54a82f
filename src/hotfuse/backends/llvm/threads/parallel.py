"""Parallel loops: an outlined body, run by the OpenMP runtime that torch has loaded.

Using torch's own thread pool means that our threads and torch's never compete, and that `torch.set_num_threads` holds for
both. A kernel refers to a fork by name, and a run to what opens and closes a team (`gather`); their addresses are bound when the
code is loaded. Where there is no such runtime, they are bound to functions that run everything on the calling thread, and
`runtime().kind` says so.
"""

from __future__ import annotations

import ctypes
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hotfuse.backends.llvm.threads import gather
from hotfuse.backends.llvm.threads.gather import Gathered, gathered
from hotfuse.base.once import once
from hotfuse.ir.dims import Dim, expr, substitute, symbols
from hotfuse.native.jit import Loaded, compile_object, load_object
from hotfuse.native.target import host
from hotfuse.tile.program import Instr, Loop, Stmt, Tile, TileType, When
from hotfuse.tile.rules import block_extents

SYMBOLS = gather.NAMES
WORK_PER_THREAD = 1 << 15
"""Vector operations that one more thread must have to do: some ten microseconds, about what waking it costs at worst."""
AWAKE_WORK = 1 << 12
"""The same where threads are awake: the loop before was parallel as well, or the run has a team already. About two microseconds."""
MEETING_WORK = 1 << 11
"""The same where a team's threads are inside already and only meet: half a microsecond or more."""
@dataclass(frozen=True, slots=True)
class Runtime:
    """Where parallel loops run."""

    kind: str
    """`gomp`, or `serial` where torch has not loaded an OpenMP runtime with GNU's interface."""
    symbols: Mapping[str, int]
    detail: str
    keep: Loaded | ctypes.CDLL | None = None
    team: Gathered | None = None
    """How threads come together; None where there is only one."""


@once
def runtime() -> Runtime:
    """The runtime of this process, looked up once; import torch before."""
    tried: list[str] = []
    for path in _candidates():
        try:
            library = ctypes.CDLL(path)
            found = {n: ctypes.cast(getattr(library, n), ctypes.c_void_p).value or 0 for n in gather.OPENMP}
        except (OSError, AttributeError) as e:
            tried.append(f"{path}: {e}")
            continue
        team = gathered(found)
        return Runtime("gomp", team.symbols, path, library, team)
    loaded = load_object(compile_object(gather.SERIAL_TEXT, host()).code, SYMBOLS)
    return Runtime(
        "serial", {n: loaded.address(n) for n in SYMBOLS}, "; ".join(tried) or "no OpenMP library is loaded", loaded
    )


@contextmanager
def awake(threads: int) -> Generator[None]:
    """While a kernel is timed by itself: a team around it as in a native run, where that would have one."""
    team = runtime().team
    if threads < 2 or team is None:
        yield
        return
    with team.awake(threads):
        yield


def _candidates() -> list[str]:
    """OpenMP libraries mapped into this process: torch's own first."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return []
    found: list[str] = []
    for line in maps.read_text().splitlines():
        path = line.split(maxsplit=5)[-1]
        if path.startswith("/") and ("libgomp" in Path(path).name or "libomp" in Path(path).name) and path not in found:
            found.append(path)
    return sorted(found, key=lambda p: "torch" not in p)


_COSTLY = {"exp": 12, "exp2": 10, "expm1": 16, "log": 14, "log2": 16, "log1p": 18, "sin": 24, "cos": 24, "tanh": 20,
           "erf": 24, "normal": 20, "pow": 60, "div": 8, "sqrt": 8, "rsqrt": 16, "recip": 8, "rem": 100, "mod": 100, "truncdiv": 40,
           "floordiv": 40}  # fmt: skip


def _vectors(t: TileType, lanes: int) -> int:
    rows, cols = 1, t.shape[-1] if t.shape else 1
    for e in t.shape[:-1]:
        rows *= e
    return rows * -(-cols // lanes)


def _instr_work(instr: Instr, lanes: int) -> int:
    if instr.op == "mma.memory":
        (rows, columns), (blocks, *_), _ = block_extents(dict(instr.attrs))
        return max(rows, 16) * (columns // 16) * blocks  # as many lines of the right operand are read for one row as for sixteen
    types = [t.type for t in instr.outs] or [a.type for a in instr.args if isinstance(a, Tile)]
    if not types:
        return 1
    work = _vectors(types[0], lanes)
    if instr.op == "mma":
        a = instr.args[1]
        return work * (a.type.shape[1] if isinstance(a, Tile) else 1)
    return work * _COSTLY.get(instr.op.removeprefix("map."), 1)


def work(stmts: tuple[Stmt, ...], lanes: int) -> Dim:
    """An estimate of the vector operations in statements, as an expression over what is known outside them."""
    terms: list[Dim] = []
    for stmt in stmts:
        match stmt:
            case Instr():
                terms.append(_instr_work(stmt, lanes))
            case When():
                terms.append(work(stmt.body, lanes))
            case Loop():
                terms.append(loop_work(stmt, lanes))
    return expr("+", 0, *terms)  # at once: a sum sorts its terms whenever one is added


def threads_worth(work: Dim, repeats: Sequence[Dim]) -> Dim:
    """How many threads work deserves that is shared out again in every round of the loops around: the first round wakes them."""
    once = expr("//", work, WORK_PER_THREAD)
    if all(r == 1 for r in repeats):
        return once
    return expr("min", expr("//", expr("*", work, *repeats), WORK_PER_THREAD), expr("//", work, AWAKE_WORK))


def trips(loop: Loop) -> Dim:
    """How often a loop runs."""
    if loop.given is not None:
        return 1
    return expr("max", 0, expr("ceildiv", expr("+", loop.hi, expr("*", loop.lo, -1)), loop.step))


def halfway(loop: Loop, inside: Dim) -> Dim:
    """What is inside a loop as it is in the middle of its rounds: the first ones of a window over an image see less of it."""
    if loop.var not in symbols(inside):
        return inside
    return substitute(inside, {loop.var: expr("//", expr("+", loop.lo, loop.hi), 2)})


def loop_work(loop: Loop, lanes: int) -> Dim:
    """The work of a loop: trips times the body's, for which inner bounds are taken halfway."""
    return expr("*", trips(loop), halfway(loop, work(loop.body, lanes)))
