"""Which operators become part of the convolution before them: shared by whatever lists operators in order.

    conv -> mul c -> add c -> relu                                       ->    one call
    conv -> batch norm -> add 3 -> clip 0..6 -> mul (itself) -> div 6    ->    one call (hardswish), what scales it behind

A `ChainLink` says of one operator what matters here, in any vocabulary. A chain goes on only while nobody else reads
what lies between.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from enum import Enum

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ops.folded_conv import Activation, Affine, affine


class ChainRole(Enum):
    """What an operator is to a chain."""

    CONV = "a convolution with constant weights"
    AFFINE = "a scale and a shift by constants"
    RELU = "relu"
    HARDSWISH = "hardswish"
    CLIP = "limits 0 and 6"
    TIMES = "a product of two values"
    INNERMOST = "a convolution that is no chain's, and makes images with channels innermost"
    ANY_ORDER = "something that reads images in any order of their memory, and keeps it"
    OTHER = "anything else"


@dataclass(frozen=True, slots=True)
class ChainLink:
    """One operator: its role, the values it reads and makes, its numbers."""

    role: ChainRole
    reads: tuple[Hashable, ...]
    makes: tuple[Hashable, ...]
    numbers: Affine | None = None
    channels: int = 0
    """Of a convolution."""


@dataclass(frozen=True, slots=True)
class Chain:
    """Operators that become one, by their places; the first is the convolution."""

    places: tuple[int, ...]
    reads: Hashable
    makes: Hashable
    before: Affine
    activation: Activation
    after: Affine


class _ChainGraph:
    def __init__(self, links: Sequence[ChainLink], kept: Counter[Hashable]) -> None:
        self.links = links
        self.readers: dict[Hashable, list[int]] = {}
        self.kept = kept
        for place, link in enumerate(links):
            for value in dict.fromkeys(link.reads):
                self.readers.setdefault(value, []).append(place)

    def after(self, value: Hashable, count: int = 1) -> list[int]:
        """Places of the readers of a value; none where there are not just so many, or an output is one."""
        found = self.readers.get(value, [])
        return found if len(found) == count and not self.kept[value] else []

    def only(self, value: Hashable, role: ChainRole) -> int | None:
        """The only reader, where it has that role and makes one value."""
        for place in self.after(value):
            if self.links[place].role is role and len(self.links[place].makes) == 1:
                return place
        return None


def chains(links: Sequence[ChainLink], outputs: Sequence[Hashable]) -> tuple[Chain, ...]:
    """The chains among operators in order: those that become one with a convolution. A convolution alone is a chain too."""
    graph = _ChainGraph(links, Counter(outputs))
    return tuple(_chain(graph, i) for i, link in enumerate(links) if link.role is ChainRole.CONV and len(link.makes) == 1)


def _chain(graph: _ChainGraph, place: int) -> Chain:
    conv = graph.links[place]
    places, value, before = [place], conv.makes[0], affine()
    before, value = _affine(graph, value, before, conv.channels, places, one_scale=False)
    activation: Activation = "none"
    after = affine()
    if (at := graph.only(value, ChainRole.RELU)) is not None:
        activation, value = "relu", graph.links[at].makes[0]
        places.append(at)
    elif (at := graph.only(value, ChainRole.HARDSWISH)) is not None:
        activation, value = "hardswish", graph.links[at].makes[0]
        places.append(at)
    elif (spelled := _spelled(graph, value)) is not None:
        activation, value, after = "hardswish", graph.links[spelled[-1]].makes[0], affine(6.0)
        places.extend(spelled)
    if activation != "none":
        after, value = _affine(graph, value, after, conv.channels, places, one_scale=True)
    return Chain(tuple(places), conv.reads[0], value, before, activation, after)


def _affine(
    graph: _ChainGraph, value: Hashable, found: Affine, channels: int, places: list[int], *, one_scale: bool
) -> tuple[Affine, Hashable]:
    """Scales and shifts that follow a value, put together; their places are added."""
    while (at := graph.only(value, ChainRole.AFFINE)) is not None:
        numbers = graph.links[at].numbers
        if numbers is None or any(t.numel() not in (1, channels) for t in (numbers.scale, numbers.shift)):
            break
        if one_scale and numbers.scale.numel() != 1:
            break
        found, value = found.then(numbers), graph.links[at].makes[0]
        places.append(at)
    return found, value


def _spelled(graph: _ChainGraph, value: Hashable) -> tuple[int, int, int] | None:
    """Places of `x * clip(x + 3, 0, 6)`."""
    readers = graph.after(value, 2)
    for plus in readers:
        link = graph.links[plus]
        if link.role is not ChainRole.AFFINE or link.numbers is None or not _is(link.numbers, 1.0, 3.0):
            continue
        if (clip := graph.only(link.makes[0], ChainRole.CLIP)) is None:
            continue
        if (times := graph.only(graph.links[clip].makes[0], ChainRole.TIMES)) is not None and times in readers:
            return plus, clip, times
    return None


def _is(numbers: Affine, scale: float, shift: float) -> bool:
    return all(t.numel() == 1 and float(t) == want for t, want in ((numbers.scale, scale), (numbers.shift, shift)))


def to_rows(
    links: Sequence[ChainLink], replaced: Mapping[int, Chain], gone: frozenset[int], outputs: Sequence[Hashable]
) -> tuple[dict[int, tuple[Hashable, ...]], tuple[Hashable, ...]]:
    """Values that must be put back into rows: before which operators, and which outputs at the end.

    What a chain makes has channels innermost. Pointwise operators, pools and other convolutions read and keep that; before
    anything else reads it, and where it leaves, it becomes what it would have been.
    """
    innermost: set[Hashable] = set()
    before: dict[int, tuple[Hashable, ...]] = {}
    for place, link in enumerate(links):
        if place in replaced:
            innermost.add(replaced[place].makes)
        if place in replaced or place in gone:
            continue
        found = tuple(v for v in dict.fromkeys(link.reads) if v in innermost)
        if link.role is ChainRole.INNERMOST:
            innermost.update(link.makes)
        elif link.role is ChainRole.OTHER and found:
            before[place] = found
            innermost.difference_update(found)
        elif found:
            innermost.update(link.makes)
    return before, tuple(v for v in dict.fromkeys(outputs) if v in innermost)
