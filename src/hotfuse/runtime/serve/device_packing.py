"""Packed plans on a device: a call asks its mask a few questions there, and brings their answers back in one small copy.

    facts      counted on the device in one recorded run: live rows, empty sequences, other numbers than the mask's two, …
    capacity   live rows rounded up in steps of at most a sixteenth, so that calls of many masks share few recordings
    packed     what a packed graph is given of the mask is made on the device too, inside the recording of the packed kernels

So a recording serves every mask with at most as many live rows as its capacity. Rows between the two belong to no sequence: they
are copies of the first row until the first attention, nobody reads them, and no output shows them.

Where the last calls all needed nearly the same capacity, packed kernels are launched before the answers are there, and the device
does not stand still meanwhile. If the answers then forbid it, these results are dropped, and the call is answered as without them:
what is made of a mask stays within the bucket, whatever the mask is.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import field
from typing import Any

import torch

from hotfuse.backends.device_protocol import RecordedRun
from hotfuse.backends.protocol import Run
from hotfuse.base.errors import InternalError
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.machine.device_stream import being_recorded_here
from hotfuse.runtime.serve.backoff import Backoff
from hotfuse.runtime.serve.packing import MaskPacker, Padded
from hotfuse.specialize.packing import PackedInput

MIN_ROWS = 64
"""Capacities are multiples of it."""
STEPS = 16
"""Capacities between a number and its double."""
TO_RECORD = 2
"""Calls of a capacity after which it is recorded."""
BUCKET_SLACK = 8
"""A bucket may be larger by this part of itself."""
GENERATED_SLACK = 6
"""The same of the bucket that kernels were generated for: those save more than the rows that are computed for nobody."""
MAX_BUCKETS = 1024
REMEMBERED = 64
"""Packed calls whose capacities the next one is expected to stay within."""
REST_AFTER_WRONG = 64
"""Calls after a wrong guess that are asked first; doubled with each, since a guess that is wrong costs as much as a call."""
_FACTS = (Padded.EMPTY, Padded.NUMBERS, Padded.POSITION, Padded.INDEX, Padded.LARGE, Padded.NOT_IN_FRONT)
"""What is asked besides the number of live rows, in this order; 0 where all is well."""


def capacity(live: int, rows: int) -> int:
    """Rows that a recording for so many live ones has places for."""
    step = max(MIN_ROWS, (1 << max(0, live.bit_length() - 1)) // STEPS)
    return max(1, min(rows, -(-live // step) * step))


def usual_capacity(buckets: Sequence[int]) -> int:
    """What kernels are best made for: the first of these, or somewhat more where others need that."""
    return max(n for n in buckets if n <= buckets[0] + buckets[0] // BUCKET_SLACK)


def least_generated(bucket: int) -> int:
    """The least capacity whose calls take a bucket that kernels were generated for."""
    return bucket - bucket // GENERATED_SLACK


@dataclass(frozen=True, slots=True)
class DevicePacker:
    """The questions and the further inputs of a packed graph, as kernels that copy nothing to the host."""

    packer: MaskPacker

    def facts(self, *inputs: torch.Tensor) -> tuple[torch.Tensor]:
        """How many rows live, and 0 or more for each of `_FACTS`."""
        packing, mask = self.packer.packing, inputs[self.packer.mask].detach()
        live = self.live(mask)
        each = live.sum(1)
        none = torch.zeros((), dtype=torch.int64, device=mask.device)
        numbers = none if mask.dtype is torch.bool else (~live.reshape(mask.shape) & (mask != packing.mask.dead)).sum()
        places = none
        if packing.first:
            places = places + (~live[:, 0]).sum()
        if packing.last:
            places = places + (~live[:, -1]).sum()
        if packing.counted:
            places = places + (~live.gather(1, (each - 1).clamp(min=0)[:, None])).sum()
        outside = none
        for i, most in self.packer.indices:
            outside = outside + ((inputs[i] < 0) | (inputs[i] >= most)).sum()
        odd = none
        for i, most in self.packer.floats:
            odd = odd + (~(inputs[i].detach().abs() <= most)).sum()
        gaps = (live[:, 1:] > live[:, :-1]).sum() if packing.front else none
        return (torch.stack([live.sum(), (each == 0).sum(), numbers, places, outside, odd, gaps]),)

    def live(self, mask: torch.Tensor) -> torch.Tensor:
        """Which rows live, [sequences, rows]."""
        return (mask == self.packer.packing.mask.live).reshape([mask.shape[i] for i in self.packer.axes])

    def made(self, mask: torch.Tensor, bucket: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The further inputs for as many rows as the bucket has."""
        live, t = self.live(mask.detach()), bucket.shape[0]
        flat = live.reshape(-1)
        place = flat.cumsum(0) - 1
        every = torch.arange(flat.shape[0], device=mask.device)
        rows = torch.zeros(t + 1, dtype=torch.int64, device=mask.device)  # dead rows share one place behind the last
        rows = rows.index_copy_(0, torch.where(flat, place.clamp(max=t), t), every)[:t]
        each = live.sum(1)
        offsets = torch.cat([each.new_zeros(1), each.cumsum(0)]).clamp(max=t)  # nothing outside is read, whatever the mask is

        def one(what: PackedInput) -> torch.Tensor:
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
                    return place.clamp(min=0, max=t - 1).reshape(live.shape)
                case PackedInput.LIVE:
                    return live
                case PackedInput.FIRST:
                    return offsets[:-1].clamp(max=t - 1)
                case PackedInput.LAST:
                    return (offsets[1:] - 1).clamp(min=0)
                case PackedInput.COUNTED:
                    before = torch.arange(live.shape[1], device=mask.device) < each[:, None]
                    return (offsets[:-1] + (live & before).sum(1) - 1).clamp(min=0, max=t - 1)
                case PackedInput.KEY_PLACES:
                    return (~live).byte().argsort(dim=1, stable=True)[rows // live.shape[1]]
                case PackedInput.QUERIES:
                    return torch.arange(live.shape[0] + 1, device=mask.device)
                case PackedInput.TOLD:
                    raise InternalError("a packed graph of a device reads a row by a place that inputs tell",
                                        because="such places are made of values of the host alone")  # fmt: skip

        return tuple(one(what) for what in self.packer.packing.inputs)


def _soon(answers: torch.Tensor) -> Callable[[], list[int]]:
    """Numbers that a device is still to count: what waits for them alone, not for what is launched behind."""
    if not answers.is_cuda:
        return answers.tolist
    copied = answers.to("cpu", non_blocking=True)
    there = torch.cuda.Event()
    there.record()

    def wait() -> list[int]:
        there.synchronize()
        found: list[int] = copied.tolist()
        return found

    return wait


@dataclass(slots=True)
class DevicePackedRun:
    """A packed plan where it pays, else the padded one; call it like either."""

    packer: DevicePacker
    limit: float
    """The share of live rows up to which packing pays."""
    ask: Run
    """`DevicePacker.facts`, recorded."""
    packed: RecordedRun
    """Takes a call's inputs, and a tensor with as many elements as the bucket has rows."""
    padded: Run
    generated: int = 0
    """The bucket that kernels were generated for; 0: none."""
    usual: int = 0
    """The bucket that kept calls fit in: first calls share it, or each of many capacities would have two calls kernel by kernel,
    and a race would be lost before any of them is recorded."""
    buckets: dict[torch.device, torch.Tensor] = field(default_factory=dict[torch.device, torch.Tensor])
    calls: int = 0
    """Packed ones."""
    live: int = 0
    """Rows of these."""
    computed: int = 0
    """Rows that were computed for these."""
    used: Counter[int] = field(default_factory=Counter[int])
    """How often a capacity was taken."""
    why_not: Counter[Padded] = field(default_factory=Counter[Padded])
    unread: int = 0
    """Calls whose masks were not asked: several in a row before them could not be packed."""
    rest: Backoff = field(default_factory=Backoff)
    needed: deque[int] = field(default_factory=lambda: deque[int](maxlen=REMEMBERED))
    """Capacities of the last packed calls."""
    guesses: Backoff = field(default_factory=lambda: Backoff(patience=1, first=REST_AFTER_WRONG))
    guessed: int = 0
    """Calls whose kernels were launched before the answers were there, rightly."""
    wrong: int = 0
    """The same in vain."""

    @property
    def padded_calls(self) -> int:
        """Those that were not packed."""
        return self.why_not.total() + self.unread

    def begin(self) -> None:
        """Forget what calls have shown: from here on they are served."""
        self.calls = self.live = self.computed = self.unread = self.guessed = self.wrong = 0
        self.why_not.clear()
        self.rest.begin()

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        """The outputs."""
        if self.rest.left > 0:
            self.rest.left -= 1
            self.unread += 1
            return self.padded(*inputs)
        mask = inputs[self.packer.packer.mask]
        if mask.is_cuda and being_recorded_here():  # nothing may be asked now
            self.why_not[Padded.RECORDED] += 1
            return self.padded(*inputs)
        answers = _soon(self.ask(*inputs)[0]) if mask.numel() else lambda: [0, 1]
        guess = self._guess()
        early = self.packed(*inputs, self.bucket_for(mask, guess)) if guess and mask.numel() else None
        found = answers()
        why = self._padded_because(found, mask.numel())
        needs = capacity(found[0], mask.numel())
        fits = early is not None and why is None and needs <= guess
        if early is not None and not fits:
            self.wrong += 1
            self.guesses.missed()
        if why is not None:
            self.why_not[why] += 1
            self.rest.missed()
            return self.padded(*inputs)
        self.rest.held()
        self.needed.append(needs)
        rows = guess if fits else self.usual_bucket(needs)
        self.calls += 1
        self.live += found[0]
        self.computed += rows
        if early is not None and fits:
            self.guessed += 1
            return early
        return self.packed(*inputs, self.bucket_for(mask, rows))

    def _guess(self) -> int:
        """The bucket that the next call needs, as it seems; 0 where it has to be asked first."""
        if self.guesses.left > 0:
            self.guesses.left -= 1
            return 0
        if len(self.needed) < REMEMBERED:
            return 0
        kept = list(self.needed)
        least, most = min(kept), max(kept)
        buckets = [n for n, times in list(self.used.items()) if most <= n <= least + least // BUCKET_SLACK and times > TO_RECORD]
        return min(buckets, default=0)

    def _padded_because(self, found: Sequence[int], rows: int) -> Padded | None:
        if found[0] > self.limit * rows:
            return Padded.SHARE
        return next((why for why, n in zip(_FACTS, found[1:], strict=False) if n), None)

    def usual_bucket(self, rows: int) -> int:
        """A somewhat larger bucket that calls have had often enough to be recorded, where this one has not been: one recording more
        would take two calls kernel by kernel, and traffic around a capacity would need two of them for ever."""
        used = self.used
        if least_generated(self.generated) <= rows <= self.generated:
            rows = self.generated
        elif used[rows] < TO_RECORD:
            larger = [n for n, times in used.items() if rows < n <= rows + rows // BUCKET_SLACK and times >= TO_RECORD]
            first = self.usual if rows <= self.usual <= rows + rows // BUCKET_SLACK else rows
            rows = min(larger, default=first)
        if rows in used or len(used) < MAX_BUCKETS:
            used[rows] += 1
        return rows

    def bucket_for(self, mask: torch.Tensor, rows: int) -> torch.Tensor:
        """Which capacity a recording is for shows by the size of an input: nobody reads what it holds."""
        held = self.buckets.get(mask.device)
        if held is None or held.shape[0] < rows:
            held = self.buckets[mask.device] = torch.zeros(mask.numel(), dtype=torch.uint8, device=mask.device)
        return held[:rows]
