"""Real calls kept for proving plans on: a few inputs per kind of call, within a budget of memory.

A signature is the sizes a call gives to the graph's symbols. How often each came is counted with decay, so that traffic that
changes is seen to change. Where inputs must not be kept, plans are proven on made-up ones of the same shapes.

A graph that has some paths through code which reads its data is not for every call. Kept calls are shown only once it is known that
the graph has their path: what a plan answered has it, and of the others it is found out in the background (`vet`).

While two plans answer calls in turns, every call is looked at. Copying large inputs may take only a small part of the time then: a
copy of some megabytes, into memory that was just given back, takes ten times as long as a short model computes on them (decision
257).

Any number of threads call: one notes at a time, and what comes meanwhile is passed over, so that no call waits. Readers take no
lock: what is kept of a signature is exchanged by one reference store. While nobody calls, less is kept.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence

import torch

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.base.living import Living
from hotfuse.machine.heap import heap

Signature = tuple[int, ...]

DECAY = 0.99
"""What a count keeps with every further sample: half of it after about 70."""
MAX_SIGNATURES = 64
"""Signatures remembered."""


EACH = 4
"""Calls kept of one signature: what is in the tensors differs, too."""
REFRESH = 8
"""Samples of a signature after which a newer call takes the place of the oldest."""
EXCHANGE_SHARE = 0.005
"""Part of the time that copies of large inputs in the place of others may take."""
LARGE_BYTES = 1 << 16
"""Inputs of a call from which on that is counted: copying less takes no longer than noting it."""
KEPT_IDLE = 8
"""Signatures of which a call is kept while nobody calls: enough to prove a plan on. The next calls bring others."""
KEPT_IDLE_BYTES = 1 << 20
"""What those calls take at most; the commonest one is kept however large it is."""


class KeptCall(list[torch.Tensor]):
    """The inputs of a call."""

    fits = True
    """Whether it is known that the graph is for it."""


@dataclass(slots=True)
class _Seen:
    weight: float = 0.0
    count: int = 0
    kept: tuple[KeptCall, ...] = ()
    """The newest first."""
    each: int = 0
    """Bytes of one call."""

    @property
    def bytes(self) -> int:
        return len(self.kept) * self.each

    @property
    def fitting(self) -> tuple[KeptCall, ...]:
        return tuple(call for call in self.kept if call.fits)


def snapshot(t: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides: a graph is captured for this layout, so it is guarded and proven on it."""
    t = t.detach()
    if t.layout is not torch.strided or t.is_contiguous():
        return t.clone()
    span = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    return t.as_strided((span,), (1,)).clone().as_strided(t.shape, t.stride())


_seeds = itertools.count()


def made_up(t: torch.Tensor) -> torch.Tensor:
    """Another tensor of the same type: noise, or small integers; the program's own generator stays where it is."""
    other = snapshot(t)
    rng = torch.Generator(t.device).manual_seed(next(_seeds))
    if t.is_floating_point():
        return other.normal_(generator=rng)
    return other.random_(0, 2, generator=rng) if t.dtype is not torch.bool and not t.is_complex() else torch.zeros_like(other)


class CallSamples:
    """The recent calls of one captured graph."""

    def __init__(
        self, budget: int, keep: Callable[[torch.Tensor], torch.Tensor] = snapshot,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:  # fmt: skip
        self._budget = budget
        self._keep = keep
        self._clock = clock
        self._exchange_at = 0.0
        """When large inputs may next take the place of others."""
        self._seen: dict[Signature, _Seen] = {}
        self.bytes = 0
        """Memory of the inputs kept; counted as they come and go, since many kinds of calls may be kept and every look asks."""
        self._total = 0.0
        self._unit = 1.0
        self.taken = 0
        self.passed_over = 0
        """Calls that came while another one was noted."""
        self._noting = threading.Lock()
        _all.add(self)

    def note(self, signature: Signature, inputs: Sequence[torch.Tensor], *, fits: bool = True) -> None:
        """Count a call, and keep its inputs if its kind has none yet and memory allows. `fits`: the graph is known to be for it."""
        if not self._noting.acquire(blocking=False):
            self.passed_over += 1
            return
        try:
            self._note(signature, inputs, fits=fits)
        finally:
            self._noting.release()

    def vet(self, has: Callable[[Sequence[torch.Tensor]], bool]) -> tuple[int, int]:
        """Find out of which kept calls the graph is for, and let go of the others; how many those were that it is for, and the
        others. Runs the graph: for the background."""
        unknown = [call for seen in list(self._seen.values()) for call in seen.kept if not call.fits]
        for call in unknown:
            call.fits = has(call)
        gone = {id(call) for call in unknown if not call.fits}
        with self._noting:
            for seen in self._seen.values():
                self._have(seen, tuple(call for call in seen.kept if id(call) not in gone))
        return len(unknown) - len(gone), len(gone)

    def give_back(self) -> int:
        """Nobody calls: keep the newest call of the commonest signatures alone; the bytes that others took."""
        with self._noting:
            before, held = self.bytes, 0
            for rank, (_, seen) in enumerate(pair for pair in self._ranked() if pair[1].kept):
                stays = rank == 0 or (rank < KEPT_IDLE and held + seen.each <= KEPT_IDLE_BYTES)
                self._have(seen, seen.kept[:stays])
                held += seen.bytes
            return before - self.bytes

    def after_fork(self) -> None:
        """In a forked child: who was noting is in the parent."""
        self._noting = threading.Lock()

    def _note(self, signature: Signature, inputs: Sequence[torch.Tensor], *, fits: bool) -> None:
        self.taken += 1
        self._unit /= DECAY  # instead of shrinking every count, new ones weigh more
        self._total += self._unit
        found = self._seen.get(signature)
        if found is None:
            if len(self._seen) >= MAX_SIGNATURES:
                rarest = min(self._seen, key=lambda s: self._seen[s].weight)
                gone = self._seen.pop(rarest)
                self._total -= gone.weight
                self._have(gone, ())
            found = self._seen[signature] = _Seen(each=sum(t.numel() * t.element_size() for t in inputs))
        found.weight += self._unit
        found.count += 1
        if len(found.kept) < EACH and self.bytes + found.each <= self._budget:
            self._take(signature, found, inputs, fits=fits)
        elif (len(found.kept) < EACH or found.count % REFRESH == 0) and self._may_exchange(found):
            begin = self._clock()
            self._take(signature, found, inputs, fits=fits)
            end = self._clock()
            self._exchange_at = end + (end - begin) / EXCHANGE_SHARE
        if self._unit > 1e100:
            self._rescale()

    def _may_exchange(self, found: _Seen) -> bool:
        """Whether a call may be copied where that takes the place of others."""
        return found.each < LARGE_BYTES or not self.bytes or self._clock() >= self._exchange_at

    def _take(self, signature: Signature, found: _Seen, inputs: Sequence[torch.Tensor], *, fits: bool) -> None:
        """Keep a call; room is made by second copies of other kinds, then by the rarest kinds."""
        self._have(found, found.kept[: EACH - 1])
        while self.bytes + found.each > self._budget:
            others = [s for s, seen in self._seen.items() if seen.kept and s != signature]
            if not others:
                break
            several = [s for s in others if len(self._seen[s].kept) > 1]
            rarest = self._seen[min(several or others, key=lambda s: self._seen[s].weight)]
            self._have(rarest, rarest.kept[:-1])
        while found.kept and self.bytes + found.each > self._budget:
            self._have(found, found.kept[:-1])
        if self.bytes + found.each <= self._budget or self.bytes == 0:  # without any input nothing could be proven
            call = KeptCall(self._keep(t) for t in inputs)
            call.fits = fits
            self._have(found, (call, *found.kept))

    def _have(self, seen: _Seen, kept: tuple[KeptCall, ...]) -> None:
        """Replace the kept calls of one kind."""
        self.bytes += (len(kept) - len(seen.kept)) * seen.each
        seen.kept = kept

    def _rescale(self) -> None:
        for seen in self._seen.values():
            seen.weight /= self._unit
        self._total /= self._unit
        self._unit = 1.0

    @property
    def real(self) -> bool:
        """Whether the kept inputs are those of real calls."""
        return self._keep is not made_up

    def shares(self) -> dict[Signature, float]:
        """How often each signature came of late, the commonest first."""
        total = self._total or 1.0
        return {s: seen.weight / total for s, seen in self._ranked()}

    def _ranked(self) -> list[tuple[Signature, _Seen]]:
        return sorted(list(self._seen.items()), key=lambda pair: -pair[1].weight)

    def inputs(self, signature: Signature | None = None) -> Sequence[torch.Tensor] | None:
        """The latest kept call of that signature; of the commonest one that has any where none is asked for."""
        if signature is not None:
            kept = found.fitting if (found := self._seen.get(signature)) is not None else ()
            return kept[0] if kept else None
        return next(iter(self.several(1)), None)

    def several(self, most: int) -> list[Sequence[torch.Tensor]]:
        """Up to so many calls: the latest of each signature, the commonest first, then the ones before those."""
        ranked = [seen.fitting for _, seen in self._ranked()]
        found: list[Sequence[torch.Tensor]] = [kept[i] for i in range(EACH) for kept in ranked if i < len(kept)]
        return found[:most]


_all: Living[CallSamples] = Living()


def give_back_samples() -> int:
    """Let go of calls that are kept beyond what a proof takes; about how many bytes."""
    return sum(samples.give_back() for samples in _all)


heap.spares(give_back_samples)
