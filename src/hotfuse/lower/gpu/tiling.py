"""How a kernel is cut into programs on a GPU, and how one program runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.dims import Dim
from hotfuse.lower.common.errors import CannotLower
from hotfuse.lower.common.positions import Space, in_finer_loops
from hotfuse.tile.build import KernelBuilder, remaining

TRIES = 16
"""Times that loops are made finer."""
MIN_OPERAND_EXTENT = 16
"""The least extent of a tensor core's operand."""


@dataclass(frozen=True, slots=True)
class GpuTiling:
    """A tile of results per program, and the threads and stages that make it."""

    rows: int
    columns: int
    depth: int = 1
    """Steps of a product, or keys of an attention, at once."""
    warps: int = 4
    stages: int = 1
    """Loop iterations whose loads are under way at the same time."""
    bulk: bool = False
    """Whether the device's copy engine fetches what loops read."""
    split: int = 1
    """Programs that share the steps of one product."""
    programs: int = 0
    """So many make one tile after the other; 0: one program a tile."""

    def __str__(self) -> str:
        deep = f"x{self.depth}" if self.depth > 1 else ""
        more = (", bulk copies" if self.bulk else "") + (f", {self.split} programs a tile" if self.split > 1 else "")
        more += f", {self.programs} programs in turns" if self.programs else ""
        return f"{self.rows}x{self.columns}{deep}, {self.warps} warps, {self.stages} stages{more}"


def power_of_2(n: int) -> int:
    """The least power of 2 that is at least n."""
    return 1 << max(0, n - 1).bit_length()


def numbers(*sizes: Dim) -> tuple[int, ...]:
    """Sizes that must be numbers."""
    found: list[int] = []
    for n in sizes:
        if not isinstance(n, int):
            raise CannotLower(f"the size {n} is known only at run time")
        found.append(n)
    return tuple(found)


def left_over(extent: int, tile: int, at: Dim) -> Dim | None:
    """How many elements of a tile that begins at `at` exist; None where all do."""
    return None if extent % tile == 0 else remaining(extent, at)


def write_in_finer_loops(builder: KernelBuilder, shape: Sequence[Dim], write: Callable[[Space], None]) -> None:
    """Add to a kernel what `write` writes in loops over a shape; an attempt whose loops had to be finer leaves nothing behind."""

    def attempt(space: Space) -> None:
        with builder.apart() as written:
            write(space)
        builder.splice(written)

    in_finer_loops(shape, TRIES, attempt)
