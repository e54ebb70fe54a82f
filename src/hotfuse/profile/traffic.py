"""What calls of a graph were seen to bring, as planners read it: a value that travels in requests for plans.

| what was seen | what it decides |
| --- | --- |
| sizes that data tell (how many rows a mask picks) | one that is about the same in most calls is planned for, others stay unknown |
| the sizes of calls, where no kind of call is most | a candidate is worth what it gains at each of them, by their shares |
| the part of a mask that hides nothing | attention computes no keys that its mask hides, so it costs that part |
| what partitions took while they served | stands in the place of predictions, and corrects those of what would replace them |

No code rests on any of it: wrong statistics make a plan slower, never wrong.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from hotfuse.base.lazy_dataclass import dataclass

STEADY = 0.8
"""Part of the samples that must be like the typical one for data to be called predictable."""
ALIKE_FACTOR = 2.0
"""Sizes within this factor of the typical one are planned for alike: loops, tilings and threads are the same ones."""
MIN_SAMPLES = 4
"""Samples of a mask without which nothing is said of it."""


@dataclass(frozen=True, slots=True)
class DataSize:
    """A size that only a call's data tell."""

    symbol: str
    size: int
    """The median of what was seen."""
    low: int
    high: int
    n: int
    near: float
    """The part of the samples within a factor of two of it."""
    refused_by: str = ""
    """An operator that may refuse it at some extents, so that no code is made for it (`specialize.data_sizes`)."""

    @property
    def predictable(self) -> bool:
        """Whether it may be planned for: as other sizes are, from the first call on, until calls show that it differs."""
        return self.size > 0 and self.near >= STEADY and not self.refused_by

    def __str__(self) -> str:
        but = f", and {self.refused_by} may refuse it" if self.refused_by else ""
        return f"{self.symbol} is {self.low} to {self.high} in {self.n} samples, {self.near:.0%} of them near {self.size}{but}"


@dataclass(frozen=True, slots=True)
class MaskShare:
    """The part of a mask that lets something through, of late."""

    value: str
    live: float
    deviation: float
    n: int

    @property
    def predictable(self) -> bool:
        """Whether most calls have about this part: within a third of it, in two of three."""
        return self.n >= MIN_SAMPLES and self.deviation <= self.live / 3

    def __str__(self) -> str:
        return f"%{self.value} leaves {self.live:.0%} ± {self.deviation:.0%} open in {self.n} samples"


@dataclass(frozen=True, slots=True)
class SizesShare:
    """Sizes of calls, and the part of the calls that have them."""

    dims: Mapping[str, int]
    share: float


@dataclass(frozen=True, slots=True)
class MeasuredPiece:
    """What a partition took while it served: its weight as measured."""

    graph: str
    """What it computes, as text."""
    dims: Mapping[str, int]
    library: bool
    us: float
    noise: float
    """Half of what four in five samples lie within, relative."""
    n: int
    bytes: int
    """That enter and leave; -1 where data decide."""
    cycles: float | None
    """Counted; None where the system counts none."""
    uj: float
    """Estimated from time and bytes: meters say nothing about microseconds."""


@dataclass(frozen=True, slots=True)
class TrafficSeen:
    """All of it; empty where nothing was seen."""

    sizes: tuple[DataSize, ...] = ()
    masks: tuple[MaskShare, ...] = ()
    mix: tuple[SizesShare, ...] = ()
    pieces: tuple[MeasuredPiece, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.sizes or self.masks or self.mix or self.pieces)

    def with_data_sizes(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Sizes of a call, and beside them those that its data tell, where they are predictable."""
        return {**{s.symbol: s.size for s in self.sizes if s.predictable}, **sizes}

    def address(self) -> str:
        """What plans made with it are kept under: figures as coarse as decisions are, or no two processes would share a plan."""
        sizes = [(s.symbol, s.size if s.predictable else None) for s in self.sizes]
        masks = [(m.value, round(8 * m.live), m.predictable) for m in self.masks]
        mix = [(sorted(m.dims.items()), round(8 * m.share)) for m in self.mix]
        pieces = [(p.graph, sorted(p.dims.items()), p.library, round(4 * math.log2(max(p.us, 1e-3)))) for p in self.pieces]
        return repr((sizes, masks, mix, pieces)) if self else ""

    def lines(self) -> list[str]:
        """What a plan was made by, for a reader."""
        said = [f"{s}: {'planned for' if s.predictable else 'not planned for'}" for s in self.sizes]
        said += [str(m) for m in self.masks]
        if self.mix:
            each = (f"{m.share:.0%} {', '.join(f'{k}={v}' for k, v in m.dims.items())}" for m in self.mix)
            said.append(f"planned for sizes {'; '.join(each)}")
        if self.pieces:
            us = sum(p.us for p in self.pieces)
            said.append(f"{len(self.pieces)} partitions as measured while they served, {us:.1f} us")
        return said


NOTHING_SEEN = TrafficSeen()


def data_size(symbol: str, seen: Sequence[int], refused_by: str = "") -> DataSize:
    """What some calls say of a size."""
    ordered = sorted(seen)
    middle = ordered[len(ordered) // 2]
    near = sum(middle <= ALIKE_FACTOR * n and n <= ALIKE_FACTOR * middle for n in ordered) / len(ordered)
    return DataSize(symbol, middle, ordered[0], ordered[-1], len(ordered), near, refused_by)
