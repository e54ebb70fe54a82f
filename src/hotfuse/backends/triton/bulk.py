"""Loads that the device's copy engine can do by itself: a block of a matrix, from memory to shared memory, by a tensor descriptor.

    load %w[n * 49152 + k], steps (768, 1), tile 64 x 64   ->   rows of 768 elements; the block at row n * 64, column k

No thread computes addresses then, and what lies behind the matrix is read as zeros. A descriptor is for one matrix and one block.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.dims import Dim, Sym, dims_in, expr
from hotfuse.ir.types import DType
from hotfuse.tile.program import Buffer, TileAccess

ELEMENT_BYTES = {DType.F16: 2, DType.BF16: 2, DType.F32: 4}
ALIGNED = 16
"""Bytes that addresses, rows and blocks are multiples of."""
LARGEST_BLOCK = 256
"""Along one dim."""


@dataclass(frozen=True, slots=True)
class MatrixBlock:
    """What a tensor descriptor is made of."""

    argument: int
    """The place of its buffer among a kernel's arguments."""
    shape: tuple[int, int]
    stride: int
    """Elements from one row to the next."""
    block: tuple[int, int]


@dataclass(frozen=True, slots=True)
class BulkLoad:
    """A load as one block of a matrix; `turned` where the tile has its columns first."""

    source: MatrixBlock
    row: Dim
    column: Dim
    turned: bool


def bulk_load(
    buffer: Buffer, argument: int, access: TileAccess, tile: Sequence[int], fill: float, most: Mapping[str, int]
) -> BulkLoad | None:
    """The load as a block of a matrix; None where it is none. `most` has the largest values of loop variables."""
    size = ELEMENT_BYTES.get(buffer.dtype)
    if size is None or len(tile) != 2 or fill != 0 or min(tile) < 8 or max(tile) > LARGEST_BLOCK:
        return None
    found = _matrix(buffer, access)
    if found is None:
        return None
    (rows, columns), stride, row, column, turned = found
    block = (tile[1], tile[0]) if turned else (tile[0], tile[1])
    if stride * size % ALIGNED or block[1] * size % ALIGNED or columns > stride:
        return None
    valid = access.valid or (None, None)
    along_row, along_column = (valid[1], valid[0]) if turned else (valid[0], valid[1])
    if not _inside(along_row, rows, row, block[0], most) or not _inside(along_column, columns, column, block[1], most):
        return None
    return BulkLoad(MatrixBlock(argument, (rows, columns), stride, block), row, column, turned)


def _matrix(buffer: Buffer, access: TileAccess) -> tuple[tuple[int, int], int, Dim, Dim, bool] | None:
    """Extents, row stride and place of an access, and whether its tile has columns first."""
    shape, strides = _numbers(buffer.shape), _numbers(buffer.stride)
    steps = _numbers(access.step or (1, 1))
    if shape is None or strides is None or steps is None or min(access.axes, default=-1) < 0:
        return None
    moved = [s * strides[a] for s, a in zip(steps, access.axes, strict=True)]
    if moved.count(1) != 1:
        return None
    turned = moved[0] == 1
    stride = moved[1] if turned else moved[0]
    inner, outer = (access.axes[0], access.axes[1]) if turned else (access.axes[1], access.axes[0])
    if stride <= 1:
        return None
    if inner != outer:  # two dims of the buffer; the others have one element
        if any(n != 1 for i, n in enumerate(shape) if i not in (inner, outer)) or steps != (1, 1):
            return None
        return (shape[outer], shape[inner]), stride, access.index[outer], access.index[inner], turned
    if len(shape) != 1 or shape[0] % stride:
        return None
    split = _split(access.index[0], stride)
    return None if split is None else ((shape[0] // stride, stride), stride, *split, turned)


def _split(index: Dim, stride: int) -> tuple[Dim, Dim] | None:
    """A place in a row of elements as row and column of a matrix, by the numbers that its symbols are multiplied with."""
    rows: list[Dim] = [0]
    columns: list[Dim] = [0]
    for term in dims_in(index) if isinstance(index, Sym) and index.op == "+" else (index,):
        number, rest = _factor(term)
        if number % stride == 0:
            rows.append(expr("*", rest, number // stride))
        elif 0 <= number < stride:
            columns.append(term)
        else:
            return None
    return expr("+", *rows), expr("+", *columns)


def _factor(term: Dim) -> tuple[int, Dim]:
    if isinstance(term, int):
        return term, 1
    if term.op != "*":
        return 1, term
    factors = list(dims_in(term))
    number = math.prod(f for f in factors if isinstance(f, int))
    return number, expr("*", *(f for f in factors if not isinstance(f, int)), 1)


def _inside(valid: Dim | None, extent: int, at: Dim, block: int, most: Mapping[str, int]) -> bool:
    """Whether a block begins inside the matrix, and exactly those of its elements are left out that lie behind."""
    largest = _largest(at, most)
    if largest is None or largest >= extent:
        return False
    if valid is None or isinstance(valid, int):
        return valid is None and largest + block <= extent
    return _terms(expr("+", valid, at)) == _terms(extent)


def _largest(d: Dim, most: Mapping[str, int]) -> int | None:
    """What a sum of products is at most; None where that is not clear."""
    if isinstance(d, int):
        return d if d >= 0 else None
    if d.op == "sym":
        return most.get(str(d.args[0]))
    if d.op not in ("+", "*"):
        return None
    parts = [_largest(a, most) for a in dims_in(d)]
    known = [n for n in parts if n is not None]
    if len(known) < len(parts):
        return None
    return sum(known) if d.op == "+" else math.prod(known)


def _terms(d: Dim) -> dict[str, int]:
    """A sum as its parts, each with the number that it is multiplied with; two equal sums have equal parts."""
    if isinstance(d, int):
        return {"1": d} if d else {}
    found: dict[str, int] = {}
    for term in dims_in(d) if d.op == "+" else (d,):
        number, rest = _factor(term)
        for name, n in (_terms(rest) if not isinstance(rest, int) and rest.op == "+" else {str(rest): 1}).items():
            found[name] = found.get(name, 0) + n * number
    return {k: n for k, n in found.items() if n}


def _numbers(dims: Sequence[Dim]) -> tuple[int, ...] | None:
    found = tuple(d for d in dims if isinstance(d, int))
    return found if len(found) == len(dims) else None
