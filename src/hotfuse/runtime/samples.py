"""Real calls kept for proving plans on: a few inputs per kind of call, within a budget of memory.

A signature is the sizes a call gives to the graph's symbols. How often each came is counted with decay, so that traffic that
changes is seen to change. Where inputs must not be kept, plans are proven on made-up ones of the same shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Signature = tuple[int, ...]

DECAY = 0.99
"""What a count keeps with every further sample: half of it after about 70."""
MOST = 64
"""Signatures remembered."""


@dataclass(slots=True)
class _Seen:
    weight: float
    inputs: Sequence[torch.Tensor] | None
    bytes: int


def snapshot(t: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides: a graph is captured for this layout, so it is guarded and proven on it."""
    t = t.detach()
    if t.layout is not torch.strided or t.is_contiguous():
        return t.clone()
    span = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    return t.as_strided((span,), (1,)).clone().as_strided(t.shape, t.stride())


def made_up(t: torch.Tensor) -> torch.Tensor:
    """Another tensor of the same type: noise, or small integers."""
    other = snapshot(t)
    if t.is_floating_point():
        return other.normal_()
    return other.random_(0, 2) if t.dtype is not torch.bool and not t.is_complex() else torch.zeros_like(other)


class Samples:
    """The recent calls of one captured graph."""

    def __init__(self, budget: int, keep: Callable[[torch.Tensor], torch.Tensor] = snapshot) -> None:
        self._budget = budget
        self._keep = keep
        self._seen: dict[Signature, _Seen] = {}
        self._total = 0.0
        self._unit = 1.0
        self.taken = 0

    def note(self, signature: Signature, inputs: Sequence[torch.Tensor]) -> None:
        """Count a call, and keep its inputs if its kind has none yet and memory allows."""
        self.taken += 1
        self._unit /= DECAY  # instead of shrinking every count, new ones weigh more
        self._total += self._unit
        found = self._seen.get(signature)
        if found is None:
            if len(self._seen) >= MOST:
                rarest = min(self._seen, key=lambda s: self._seen[s].weight)
                self._total -= self._seen.pop(rarest).weight
            found = self._seen[signature] = _Seen(0.0, None, 0)
        found.weight += self._unit
        if found.inputs is None:
            size = sum(t.numel() * t.element_size() for t in inputs)
            while self._seen and self.bytes + size > self._budget:
                kept = [s for s, seen in self._seen.items() if seen.inputs is not None and s != signature]
                if not kept:
                    break
                rarest = min(kept, key=lambda s: self._seen[s].weight)
                self._seen[rarest].inputs, self._seen[rarest].bytes = None, 0
            if self.bytes + size <= self._budget or self.bytes == 0:  # without any input nothing could be proven
                found.inputs, found.bytes = [self._keep(t) for t in inputs], size
        if self._unit > 1e100:
            self._rescale()

    def _rescale(self) -> None:
        for seen in self._seen.values():
            seen.weight /= self._unit
        self._total /= self._unit
        self._unit = 1.0

    @property
    def bytes(self) -> int:
        """Memory of the inputs kept."""
        return sum(s.bytes for s in self._seen.values())

    def shares(self) -> dict[Signature, float]:
        """How often each signature came of late, the commonest first."""
        total = self._total or 1.0
        ranked = sorted(self._seen.items(), key=lambda pair: -pair[1].weight)
        return {s: seen.weight / total for s, seen in ranked}

    def inputs(self, signature: Signature | None = None) -> Sequence[torch.Tensor] | None:
        """Inputs of a call of that signature; of the commonest one that has any where none is asked for."""
        if signature is not None:
            found = self._seen.get(signature)
            return found.inputs if found is not None else None
        return next((i for s in self.shares() if (i := self._seen[s].inputs) is not None), None)

    def several(self, most: int) -> list[Sequence[torch.Tensor]]:
        """Inputs of up to so many signatures, the commonest first."""
        kept = [i for s in self.shares() if (i := self._seen[s].inputs) is not None]
        return kept[:most]
