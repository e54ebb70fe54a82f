"""Which kernel of a group serves which sizes: the decision as plain data, from the worker to the run that carries it out.

    n0 <= 6 bmm "few rows" | beyond bmm "any size"           predicted 5, measured at 3, 6, 8

Kernels are indices into the caller's list; -1 is the library.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir import dims
from hotfuse.ir.dims import Dim

LIBRARY = -1


@dataclass(frozen=True, slots=True)
class VariantTable:
    """The first kernel up to the first end, and so on, the last beyond all ends."""

    size: Dim
    """In the group's own symbols."""
    ends: tuple[int, ...]
    kernels: tuple[int, ...]
    names: tuple[str, ...] = ()
    predicted: str = ""
    """The same decision before anything was measured, for a reader."""
    points: tuple[tuple[int, tuple[float | None, ...]], ...] = ()
    """Sizes at which all were measured, with the microseconds of each."""

    def kernel_at(self, size: int) -> int:
        """The kernel that serves a size."""
        return self.kernels[sum(size > end for end in self.ends)]

    def numbered(self, number: Callable[[int], int]) -> VariantTable:
        """This table with other numbers for its kernels."""
        return replace(self, kernels=tuple(LIBRARY if k == LIBRARY else number(k) for k in self.kernels))

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "size": dims.show(self.size), "ends": list(self.ends), "kernels": list(self.kernels), "names": list(self.names),
            "predicted": self.predicted, "points": [[n, list(us)] for n, us in self.points],
        }  # fmt: skip

    @staticmethod
    def from_json(data: Mapping[str, Any] | None) -> VariantTable | None:
        """The inverse of `to_json`; None stays None."""
        if data is None:
            return None
        points = tuple((int(n), tuple(None if t is None else float(t) for t in us)) for n, us in data["points"])
        ends, kernels = tuple(int(e) for e in data["ends"]), tuple(int(k) for k in data["kernels"])
        return VariantTable(
            dims.parse(data["size"]),
            ends,
            kernels,
            tuple(str(n) for n in data["names"]),
            str(data["predicted"]),
            points,
        )

    def __str__(self) -> str:
        measured = "; ".join(
            f"{n}: {' / '.join('?' if t is None else f'{t:.1f}' for t in us)} us" for n, us in self.points
        )
        return f"{variant_text(self.size, self.ends, self.names)}; predicted {self.predicted}; measured {measured}"


def variant_text(size: Dim, ends: tuple[int, ...], names: tuple[str, ...]) -> str:
    """A decision for a reader."""
    shown = dims.show(size)
    upto = [f"{shown} <= {end}: {name}" for end, name in zip(ends, names, strict=False)]
    return ", ".join([*upto, f"{'beyond' if ends else 'always'}: {names[-1]}"])
