"""From which share of zero rows on a product leaves them out: the decision as plain data, from the worker to a reader."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hotfuse.base.lazy_dataclass import dataclass

SKIP = "rows of zeros"
"""What a request calls it."""
SPARSE = "zeros within rows"
"""The same of steps of K at which a few rows are zero."""


@dataclass(frozen=True, slots=True)
class Skips:
    """From where on rows are left out, and what that rests on."""

    limit: int
    """Thousandths of zero rows; more than 1000 for never."""
    predicted: int
    points: tuple[tuple[int, float, float], ...]
    """(share, microseconds with all rows, and without those of zeros)."""
    what: str = SKIP

    @property
    def saved_us(self) -> float:
        """What leaving zeros out saves where half of all is zero: by so much it may lose on data that have none, and race."""
        return max(0.0, next((dense - skipping for share, dense, skipping in self.points if share == 500), 0.0))

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"what": self.what, "limit": self.limit, "predicted": self.predicted, "points": [list(p) for p in self.points]}

    @staticmethod
    def from_json(data: Mapping[str, Any] | None) -> Skips | None:
        """The inverse; None stays None."""
        if data is None:
            return None
        points = tuple((int(s), float(a), float(b)) for s, a, b in data["points"])
        return Skips(int(data["limit"]), int(data["predicted"]), points, str(data["what"]))

    def __str__(self) -> str:
        said = ", ".join(f"{s / 10:g}%: {a:.1f} / {b:.1f} us" for s, a, b in self.points)
        where = f"skipped from {self.limit / 10:g}% on; predicted {self.predicted / 10:g}%"
        return f"{self.what}: {where}; measured {said or 'nowhere'}"
