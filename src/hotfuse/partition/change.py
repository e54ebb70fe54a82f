"""Adjustments of a partitioning as values: what was done, to which partitions, why, and on what evidence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from enum import StrEnum

from hotfuse.base.errors import HotfuseError
from hotfuse.base.events import EvidenceValue
from hotfuse.base.lazy_dataclass import dataclass

MAX_HISTORY = 256
"""Diffs a partitioning remembers; older ones are counted only."""


class PartitionChange(StrEnum):
    """What can be done to a partitioning."""

    BEGIN = "begin"
    FUSE = "fuse"
    SPLIT = "split"


class CannotChange(HotfuseError):
    """An adjustment that would break a dependence, or that speaks of what is not there; the partitioning stays as it is."""


@dataclass(frozen=True, slots=True)
class Diff:
    """One adjustment: the partitions that went and those that came, by number."""

    change: PartitionChange
    gone: tuple[int, ...]
    added: tuple[int, ...]
    nodes: int
    """Nodes of the partitions that came."""
    why: str
    evidence: Mapping[str, EvidenceValue] = field(default_factory=dict[str, EvidenceValue])

    def to_dict(self) -> dict[str, object]:
        """A plain dict for JSON."""
        return {"change": self.change.value, "gone": list(self.gone), "made": list(self.added), "nodes": self.nodes,
                "why": self.why, "evidence": dict(self.evidence)}

    def __str__(self) -> str:
        arrow = f"{_numbers(self.gone)} -> {_numbers(self.added)}"
        detail = ", ".join(f"{k}={v}" for k, v in self.evidence.items())
        return f"{self.change.value} {arrow}: {self.why}" + (f" ({detail})" if detail else "")


@dataclass(frozen=True, slots=True)
class History:
    """What led to a partitioning, oldest first, bounded."""

    diffs: tuple[Diff, ...] = ()
    forgotten: int = 0

    def __len__(self) -> int:
        return len(self.diffs) + self.forgotten

    def with_(self, diff: Diff) -> History:
        """The history and one more step."""
        over = max(0, len(self.diffs) + 1 - MAX_HISTORY)
        return History((*self.diffs[over:], diff), self.forgotten + over)

    def lines(self) -> list[str]:
        """One line per step that is remembered."""
        head = [f"({self.forgotten} earlier steps are not kept)"] if self.forgotten else []
        return head + [f"{self.forgotten + i}: {d}" for i, d in enumerate(self.diffs)]


def _numbers(ids: tuple[int, ...]) -> str:
    """`0 1 2`, long lists shortened."""
    if len(ids) > 8:
        return f"{ids[0]}..{ids[-1]} ({len(ids)})"
    return " ".join(map(str, ids)) or "nothing"
