"""What a packed plan is given of a call's mask (`specialize.packing`), made on every call, or why the call stays padded.

Everything here is asked of the very tensors that came, so that one plan serves any mask: how many rows live, whether each sequence
has one, whether the mask holds its two numbers only. It takes some ten microseconds; a mask with too many live rows takes one pass.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import field
from enum import StrEnum
from typing import Any

import numpy as np
import torch

from hotfuse.backends.protocol import Run
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.graph import Graph, Value
from hotfuse.runtime.serve.backoff import Backoff
from hotfuse.specialize.packing import PackedInput, Packing

Array = np.ndarray[Any, Any]
_BY_ROW = frozenset({PackedInput.ROWS, PackedInput.POSITIONS, PackedInput.SEQUENCES, PackedInput.KEY_PLACES})
"""Inputs that are as long as there are live rows."""


class Padded(StrEnum):
    """Why a call runs padded."""

    SHARE = "too many rows live for packing to pay"
    EMPTY = "a sequence has no live row"
    NUMBERS = "the mask holds other numbers"
    POSITION = "a row that is read by its place is dead"
    NOT_IN_FRONT = "padding does not lie behind all sequences"
    LARGE = "an input is not finite, or so large that the mask may not hide it"
    INDEX = "an index lies outside its table"
    RECORDED = "the caller records a CUDA graph, so nothing can be asked of the mask"


@dataclass(frozen=True, slots=True)
class Maker:
    """What a graph makes of inputs by a few cheap operators, made of a call's."""

    run: Run
    takes: tuple[int, ...]
    """The inputs that it is made of."""
    tells: tuple[int, ...]
    """Those of them whose contents are read; of others it takes the sizes."""

    def __call__(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """The value."""
        return self.run(*[inputs[i] for i in self.takes])[0]


@dataclass(frozen=True, slots=True)
class MaskPacker:
    """From a call's inputs to the further inputs of a packed graph."""

    packing: Packing
    mask: int
    """Which input it is; -1 where the call's inputs do not have it, and `maker` makes it."""
    floats: tuple[tuple[int, float], ...]
    """Inputs of real numbers, and how large these may be."""
    indices: tuple[tuple[int, int], ...]
    """Inputs that have to be below a number, and not negative."""
    axes: tuple[int, ...] = (0, 1)
    """Of the mask: sequences, and their rows; others are 1 long."""
    limit: float = 1.0
    """The share of live rows up to which packing pays."""
    maker: Maker | None = None
    """Makes the mask of inputs, as the graph does; the packed graph is given it as its first further input."""
    place: Maker | None = None
    """Makes the place of the row that is read of each sequence, of inputs and a mask that is made of them."""
    then: MaskPacker | None = None
    """Packs the packed graph by another mask, of other rows; a call is packed by both or by neither. The limit here is of both."""

    @property
    def graph(self) -> Graph:
        """The graph on live rows of every mask."""
        return self.packing.graph if self.then is None else self.then.graph

    @property
    def products(self) -> int:
        """Products and attentions on live rows alone."""
        return self.packing.products + (0 if self.then is None else self.then.products)

    def mask_of(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """The mask of a call."""
        return inputs[self.mask] if self.maker is None else self.maker(inputs)

    def names(self, inputs: Sequence[Value]) -> tuple[str, ...]:
        """What the graph's inputs are called that tell which rows live."""
        own = tuple(inputs[i].name for i in (self.maker.tells if self.maker is not None else (self.mask,)))
        return tuple(dict.fromkeys((*own, *(self.then.names(inputs) if self.then is not None else ()))))

    def share(self, inputs: Sequence[torch.Tensor]) -> float:
        """The part of all rows that live."""
        alive, rows = self._rows(inputs)
        return alive / rows if rows else 1.0

    def _rows(self, inputs: Sequence[torch.Tensor]) -> tuple[int, int]:
        """How many rows live, and how many there are."""
        mask = _on_host(self.mask_of(inputs))
        alive, rows = (0, 0) if self.then is None else self.then._rows(inputs)
        return alive + int(np.count_nonzero(mask == self.packing.mask.live)), rows + mask.size

    def mostly_live(self, inputs: Sequence[torch.Tensor], made: Sequence[torch.Tensor]) -> bool:
        """Whether nearly all rows live, by the further inputs of a call; not where none of them tells."""
        told = self._rows_made(inputs, made)
        return told is not None and told[0] > MOSTLY_LIVE * told[1]

    def _rows_made(self, inputs: Sequence[torch.Tensor], made: Sequence[torch.Tensor]) -> tuple[int, int] | None:
        """How many rows live, and how many there are, by further inputs."""
        mask, own = (inputs[self.mask], made) if self.maker is None else (made[0], made[1:])
        at = next((i for i, what in enumerate(self.packing.inputs) if what in _BY_ROW), None)
        others = (0, 0) if self.then is None else self.then._rows_made(inputs, own[len(self.packing.inputs) :])
        return None if at is None or others is None else (others[0] + own[at].shape[0], others[1] + mask.numel())

    def with_all_rows(self, inputs: Sequence[torch.Tensor]) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...] | Padded]:
        """A call as if every row lived: its inputs and further ones."""
        mask = torch.full_like(self.mask_of(inputs), self.packing.mask.live)
        given = tuple(inputs) if self.maker is not None else (*inputs[: self.mask], mask, *inputs[self.mask + 1 :])
        made = self._made(given, mask)
        if self.then is None or isinstance(made, Padded):
            return given, made
        given, more = self.then.with_all_rows((*given, *made))
        return given[: len(inputs)], more if isinstance(more, Padded) else (*made, *more)

    def __call__(self, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...] | Padded:
        """The further inputs, or why there are none."""
        if self.then is not None and self.limit < 1 and self.share(inputs) > self.limit:
            return Padded.SHARE
        made = self._made(inputs, self.mask_of(inputs))
        if self.then is None or isinstance(made, Padded):
            return made
        more = self.then((*inputs, *made))
        return more if isinstance(more, Padded) else (*made, *more)

    def _made(self, inputs: Sequence[torch.Tensor], given: torch.Tensor) -> tuple[torch.Tensor, ...] | Padded:
        mask, (dead, alive) = _on_host(given), (self.packing.mask.dead, self.packing.mask.live)
        if mask.dtype == np.bool_:
            live = mask if alive else ~mask
        else:
            live = mask == alive
        count = int(np.count_nonzero(live))
        if self.then is None and count > self.limit * live.size:
            return Padded.SHARE
        if mask.dtype != np.bool_ and count + int(np.count_nonzero(mask == dead)) != mask.size:
            return Padded.NUMBERS
        live = np.ascontiguousarray(live).reshape([live.shape[i] for i in self.axes])
        each = np.count_nonzero(live, 1)
        if not count or int(each.min()) == 0:
            return Padded.EMPTY
        if (self.packing.first and not live[:, 0].all()) or (self.packing.last and not live[:, -1].all()):
            return Padded.POSITION
        if self.packing.counted and not live[np.arange(len(each)), each - 1].all():
            return Padded.POSITION
        told = (*inputs, given) if self.maker is not None else inputs
        place = None if self.place is None else self.place(told).numpy().reshape(-1)
        if place is not None and not _live_at(live, place):
            return Padded.POSITION
        if self.packing.front and bool((live[:, 1:] > live[:, :-1]).any()):
            return Padded.NOT_IN_FRONT
        for i, most in self.indices:
            if inputs[i].numel() and not 0 <= int(inputs[i].min()) <= int(inputs[i].max()) < most:
                return Padded.INDEX
        if any(not magnitude(inputs[i]) <= most for i, most in self.floats):
            return Padded.LARGE
        made = _made(self.packing.inputs, live, each, place)
        if self.maker is not None:
            return given, *made
        return made if given.device.type == "cpu" else tuple(t.to(given.device) for t in made)



def magnitude(t: torch.Tensor) -> float:
    """The largest magnitude of a tensor's numbers; NaN where one is NaN."""
    if not t.numel():
        return 0.0
    low, high = torch.aminmax(t.detach())
    return max(-low.item(), high.item())


def _on_host(mask: torch.Tensor) -> Array:
    """A mask as numbers of the host; one on a device is copied: calls do that while a race is on, else not (`device_packing`)."""
    return mask.detach().cpu().numpy()


def _live_at(live: Array, place: Array) -> bool:
    """Whether a row of each sequence lives; places from behind are not counted."""
    inside = bool(((place >= 0) & (place < live.shape[1])).all())
    return inside and bool(live[np.arange(len(live)), place].all())


def _made(wanted: Sequence[PackedInput], live: Array, each: Array, place: Array | None = None) -> tuple[torch.Tensor, ...]:
    offsets = np.zeros(len(each) + 1, np.int64)
    np.cumsum(each, out=offsets[1:])
    rows = np.flatnonzero(live)

    def one(what: PackedInput) -> Array:
        match what:
            case PackedInput.ROWS:
                return rows
            case PackedInput.POSITIONS:
                return rows % live.shape[1]
            case PackedInput.SEQUENCES:
                return rows // live.shape[1]
            case PackedInput.OFFSETS:
                return offsets
            case PackedInput.INVERSE:
                return np.maximum(np.cumsum(live.reshape(-1), dtype=np.int64) - 1, 0).reshape(live.shape)
            case PackedInput.LIVE:
                return live
            case PackedInput.FIRST:
                return offsets[:-1].copy()
            case PackedInput.LAST:
                return offsets[1:] - 1
            case PackedInput.COUNTED:
                places = np.arange(live.shape[1]) < each[:, None]  # which of a sequence's rows stand before that place, or at it
                return offsets[:-1] + np.count_nonzero(live & places, 1) - 1
            case PackedInput.TOLD:
                assert place is not None
                places = np.arange(live.shape[1]) < place[:, None]
                return offsets[:-1] + np.count_nonzero(live & places, 1)
            case PackedInput.KEY_PLACES:
                return np.argsort(~live, axis=1, kind="stable")[rows // live.shape[1]]
            case PackedInput.QUERIES:
                return np.arange(len(each) + 1, dtype=np.int64)

    return tuple(torch.from_numpy(one(what)) for what in wanted)


MOSTLY_LIVE = 0.8
"""The share of live rows from which on a padded plan of generated kernels is likely to be the faster one."""
OF_LATE = 1 / 32
"""What a call weighs in what calls were like of late."""


@dataclass(slots=True)
class PackedRun:
    """A packed plan where it pays, else the padded one; call it like either.

    A mask that cannot be packed was read in vain. After several in a row masks are not read for a while, and for twice as long
    if the next one is in vain too, as far as reading costs calls anything: traffic without padding pays a half per cent at most.
    """

    packer: MaskPacker
    packed: Run
    padded: Run
    calls: int = 0
    """Packed ones."""
    why_not: Counter[Padded] = field(default_factory=Counter[Padded])
    unread: int = 0
    """Calls whose masks were not read."""
    rest: Backoff = field(default_factory=Backoff)
    mostly_live: float = 0.0
    """The part of the calls of late that ran padded, or packed with nearly all rows alive."""

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        """The outputs."""
        if self.rest.left > 0:
            self.rest.left -= 1
            self.unread += 1
            self.mostly_live += (1 - self.mostly_live) * OF_LATE
            return self.padded(*inputs)
        begin = time.perf_counter()
        made = self.packer(inputs)
        if isinstance(made, Padded):
            self.why_not[made] += 1
            self.mostly_live += (1 - self.mostly_live) * OF_LATE
            read = time.perf_counter()
            outs = self.padded(*inputs)
            self.rest.missed(read - begin, time.perf_counter() - read)
            return outs
        self.rest.held()
        self.calls += 1
        dense = self.packer.mostly_live(inputs, made)
        self.mostly_live += (dense - self.mostly_live) * OF_LATE
        return self.packed(*inputs, *made)

    def begin(self) -> None:
        """Forget what calls have shown: those of proofs follow no traffic."""
        self.calls = self.unread = 0
        self.mostly_live = 0.0
        self.why_not.clear()
        self.rest.begin()
