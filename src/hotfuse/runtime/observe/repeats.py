"""Which inputs calls bring again: the same contents as in the call before, or as in one of the last few.

Calls that are looked at come in pairs for that, since what a call has in common with the one before shows only in two that follow
each other. A call that repeats wholly teaches nothing: a benchmark or a poll brings one call again and again, and
to answer from memory what was answered before is the caller's business. What counts is an input that stays while another changes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from hotfuse.base.raw_bytes import raw_bytes

DECAY = 0.98
"""What a pair of calls weighs after each further one: half after about 35."""
RECENT = 4
"""Contents of an input that are remembered."""
SAMPLED_BYTES = 4096
"""Of a large input so many bytes, spread over all of it, stand for its contents: what is kept is compared wholly, later."""
FIRST_PAIRS, LATER = 64, 8
"""Pairs that are looked at one after the other; from then on one look in so many is a pair."""
MAX_KINDS = 64
"""Sets of inputs that repeated together, as far as they are told apart."""


class InputRepeats:
    """The repeated inputs of one captured graph; one call at a time notes, as with samples."""

    def __init__(self, inputs: int) -> None:
        self._on = inputs > 1
        self._recent: list[list[int]] = [[] for _ in range(inputs)]
        self._second = -1
        """The call that completes a pair, where one was begun."""
        self._looks = 0
        self.pairs = 0
        self.wholly = 0
        """Pairs in which every input came again: they are not counted."""
        self._kinds: dict[frozenset[int], float] = {}
        self._weight = 0.0
        self._weighed = 0

    def note(self, number: int, leaves: Sequence[torch.Tensor]) -> bool:
        """A call was looked at; whether the next one should be, too: then they are a pair."""
        if not self._on:
            return False
        second, self._second = number == self._second, -1
        self._looks += 1
        if not second and self.pairs + self.wholly >= FIRST_PAIRS and self._looks % LATER:
            return False
        prints = [fingerprint(t) for t in leaves]
        same = frozenset(i for i, p in enumerate(prints) if p in self._recent[i])
        for recent, p in zip(self._recent, prints, strict=True):
            if p in recent:
                recent.remove(p)
            recent.insert(0, p)
            del recent[RECENT:]
        if second:
            self._count(same, len(prints))
            return False
        self._second = number + 1
        return True

    def _count(self, same: frozenset[int], inputs: int) -> None:
        if len(same) == inputs:
            self.wholly += 1
            return
        self.pairs += 1
        self._kinds = {k: w * DECAY for k, w in self._kinds.items()}
        self._weight = self._weight * DECAY + 1
        self._kinds[same] = self._kinds.get(same, 0.0) + 1
        while len(self._kinds) > MAX_KINDS:
            rarest = min(self._kinds, key=lambda k: self._kinds[k])
            self._weight -= self._kinds.pop(rarest)

    def due(self, every: int) -> bool:
        """Whether so many pairs came since somebody last weighed them up."""
        if self.pairs < self._weighed + every:
            return False
        self._weighed = self.pairs
        return True

    def share(self, inputs: Collection[int]) -> float:
        """The part of the calls in which all of these inputs came again."""
        wanted = frozenset(inputs)
        return sum(w for k, w in self._kinds.items() if wanted <= k) / self._weight if self._weight > 0 else 0.0


def fingerprint(t: torch.Tensor) -> int:
    """A number for a tensor's shape and contents, or a part of them; another one for other contents, almost surely."""
    if t.device.type != "cpu" or t.layout is not torch.strided:
        return id(t)
    t = t.detach()
    if not t.is_contiguous():
        step = max(1, t.numel() * t.element_size() // SAMPLED_BYTES)
        t = t.flatten()[::step] if t.numel() * t.element_size() <= 1 << 20 else t.as_strided((1,), (1,))
        t = t.contiguous()
    flat = raw_bytes(t).numpy() if t.numel() else None
    if flat is None:
        return hash(tuple(t.shape))
    step = max(1, flat.size // SAMPLED_BYTES)
    ends = (flat[:64].tobytes(), flat[-64:].tobytes())
    return hash((tuple(t.shape), flat[:: step | 1].tobytes() if step > 1 else flat.tobytes(), ends))
