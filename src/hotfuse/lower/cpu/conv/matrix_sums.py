"""Sums of tiles by the rows of a constant matrix, with what rows or columns share computed once."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from hotfuse.ir.types import DType
from hotfuse.lower.common.winograd import Matrix
from hotfuse.tile.build import KernelBuilder
from hotfuse.tile.program import Tile


def shared(matrix: Matrix) -> list[tuple[int, ...]]:
    """Rows of a matrix by what `combined` computes once for them: pairs that are equal but for signs, and single ones."""
    found: list[tuple[int, ...]] = []
    for i, row in enumerate(matrix):
        if not any(i in group for group in found):
            others = (j for j in range(i + 1, len(matrix)) if not any(j in group for group in found))
            found.append((i, *[j for j in others if _twins(row, matrix[j])][:1]))
    return found


def used(rows: Matrix) -> list[int]:
    """Which of the given tiles some rows read."""
    return [k for k in range(len(rows[0])) if any(row[k] for row in rows)]


def combined(b: KernelBuilder, matrix: Matrix, given: Sequence[Tile]) -> list[Tile]:
    """Sums of tiles by the rows of a matrix; what two rows or two columns share but for signs is computed once."""
    columns: list[tuple[Tile, list[Fraction]]] = []
    done: set[int] = set()
    for i, x in enumerate(given):
        if i in done:
            continue
        of_i = [row[i] for row in matrix]
        twin = next(
            (j for j in range(i + 1, len(given)) if j not in done and _twins(of_i, [row[j] for row in matrix])), -1
        )
        if twin < 0:
            columns.append((x, of_i))
            continue
        done.add(twin)
        of_twin = [row[twin] for row in matrix]
        same = [p if p == q else Fraction(0) for p, q in zip(of_i, of_twin, strict=True)]
        other = [p if p == -q else Fraction(0) for p, q in zip(of_i, of_twin, strict=True)]
        columns += [(b.map("add", x, given[twin]), same), (b.map("sub", x, given[twin]), other)]
    rows = [[(c[k], x) for x, c in columns] for k in range(len(matrix))]
    made: list[Tile | None] = [None] * len(rows)
    for i, row in enumerate(rows):
        if made[i] is not None:
            continue
        factors = [c for c, _ in row]
        twin = next((j for j in range(i + 1, len(rows)) if _twins(factors, [c for c, _ in rows[j]])), -1)
        if twin < 0:
            made[i] = _sum(b, row)
            continue
        pairs = [(p, q[0]) for p, q in zip(row, rows[twin], strict=True)]
        same_part = _sum(b, [p for p, q in pairs if p[0] == q])
        other_part = _sum(b, [p for p, q in pairs if p[0] != q])
        made[i], made[twin] = b.map("add", same_part, other_part), b.map("sub", same_part, other_part)
    return [t for t in made if t is not None]


def _twins(a: Sequence[Fraction], c: Sequence[Fraction]) -> bool:
    """Whether two rows or columns are equal but for signs, and some signs differ and some do not."""
    kinds = {p == q for p, q in zip(a, c, strict=True) if p != 0 or q != 0}
    return all(abs(p) == abs(q) for p, q in zip(a, c, strict=True)) and len(kinds) == 2


def _sum(b: KernelBuilder, terms: Sequence[tuple[Fraction, Tile]]) -> Tile:
    used = sorted(((c, x) for c, x in terms if c != 0), key=lambda t: t[0] != 1)
    (first, x), *rest = used
    total = x if first == 1 else b.map("mul", x, float(first))
    for c, x in rest:
        if abs(c) == 1:
            total = b.map("add" if c == 1 else "sub", total, x)
        else:
            total = b.map("fma", x, b.fill(float(c), DType.F32, x.type.shape), total)
    return total
