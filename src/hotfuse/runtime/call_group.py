"""Calls of one structure and kind of tensors: which of their sizes vary, and so which dims a capture of them leaves open."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import field

import torch

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.frontends.captured import CallSpec, TensorSpec
from hotfuse.frontends.paths.reads import Path

MAX_SHAPE_KINDS, MIN_CALLS = 2, 48
"""Kinds of sizes that each get a graph of their own, once so many calls have had no others."""
MAX_OPEN = 2
"""Captures with open sizes that fail before each size is captured by itself: which of them may be open, calls show in between."""
PARDON_S, MAX_PARDON_S = 10.0, 3600.0
"""A refusal that tells of the moment ends after so long; each further one lasts twice as long, up to the second."""


@dataclass(slots=True)
class CallGroup:
    """Calls of one structure whose tensors have the same dtypes, ranks, devices and contiguity."""

    first: tuple[tuple[int, ...], ...]
    varied: list[set[int]]
    captures: int = 0
    raised: int = 0
    """Calls that were to be captured and raised."""
    pending: bool = False
    refused: str = ""
    pardon_at: float = math.inf
    """When a refusal ends that tells of the moment, and not of the model."""
    lasted_s: float = 0.0
    """How long the last such refusal was to last."""
    tried: set[tuple[tuple[int, ...], ...]] = field(default_factory=set[tuple[tuple[int, ...], ...]])
    kinds: set[tuple[tuple[int, ...], ...]] = field(default_factory=set[tuple[tuple[int, ...], ...]])
    """Sizes that calls had, as far as they are told apart."""
    noted: int = 0
    nothing_new: int = 0
    """Calls in a row that were looked at and had sizes that are known."""
    alike: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])
    """By tensor and dim a number; dims whose sizes were equal in every call have the same one."""
    follows: bool = False
    """The model's code reads tensor data: what it reads is recorded in calls that are captured."""
    paths: tuple[Path, ...] = ()
    """Paths that a graph has which calls stray from: the next one that is captured is to have them, too."""
    followed: int = 0
    """Captures for further ones."""
    idle_graphs: int = 0
    """Graphs in a row that answered hardly any of their first calls: each of those took another path."""
    across: tuple[frozenset[int], ...] = ()
    """Dims in which calls of earlier processes had other sizes."""
    not_open: int = 0
    """Captures with open sizes that failed."""

    def refuse(self, because: str, *, passing: bool = False) -> None:
        """Nothing is captured any more; where the reason may pass, nothing for a while."""
        self.refused, self.pardon_at = because, math.inf
        if passing:
            self.refused += "; that may pass, so it is tried again later"
            self.lasted_s = min(max(2 * self.lasted_s, PARDON_S), MAX_PARDON_S)
            self.pardon_at = time.monotonic() + self.lasted_s

    def is_refused(self) -> bool:
        """Whether nothing is captured. A refusal whose time has come ends here: what was tried is tried again."""
        if self.refused and time.monotonic() >= self.pardon_at:
            self.refused, self.pardon_at = "", math.inf
            self.tried.clear()
        return bool(self.refused)

    def note(self, shapes: tuple[tuple[int, ...], ...]) -> None:
        """Learn which dims vary."""
        self.noted += 1
        kinds = len(self.kinds)
        if kinds <= MAX_SHAPE_KINDS:
            self.kinds.add(shapes)
        self.nothing_new = self.nothing_new + 1 if len(self.kinds) == kinds else 0
        for seen, before, now in zip(self.varied, self.first, shapes, strict=True):
            seen.update(d for d, (a, b) in enumerate(zip(before, now, strict=True)) if a != b)
        self._tell_apart(shapes)

    def note_other_processes(self, call: CallSpec, others: Sequence[CallSpec]) -> None:
        """Calls of earlier processes had other sizes than this one; all that differs is left open."""
        for other in others:
            self._tell_apart(other.shapes)
        opened = [dims for other in others if (dims := call.opened_with(other)) is not None]
        self.across = tuple(frozenset().union(*dims) for dims in zip(*opened, strict=True))

    def _tell_apart(self, shapes: tuple[tuple[int, ...], ...]) -> None:
        numbers: dict[tuple[int, int], int] = {}
        self.alike = {
            (i, d): numbers.setdefault((self.alike.get((i, d), 0), size), len(numbers))
            for i, shape in enumerate(shapes) for d, size in enumerate(shape)
        }

    def equal(self, inputs: Sequence[TensorSpec]) -> tuple[tuple[tuple[int, int], ...], ...]:
        """The dims that a capture leaves open and that were always equal: a graph with one symbol for all of them is simpler."""
        found: dict[int, list[tuple[int, int]]] = {}
        for i, spec in enumerate(inputs):
            for d in sorted(spec.dynamic):
                found.setdefault(self.alike[i, d], []).append((i, d))
        return tuple(tuple(dims) for dims in found.values() if len(dims) > 1)

    def dynamic(self) -> list[set[int]]:
        """The dims that a capture leaves open: none where many calls had few kinds of sizes, but for those that differ from process
        to process, and none where captures with open ones failed.

        A graph for each kind is captured and compiled sooner than one for all, and takes in no call that was never seen.
        """
        if self.not_open >= MAX_OPEN:
            return [set[int]() for _ in self.varied]
        few = self.noted >= MIN_CALLS and len(self.kinds) <= MAX_SHAPE_KINDS
        seen = [set[int]() for _ in self.varied] if few else self.varied
        return [s | a for s, a in zip(seen, self.across, strict=True)] if self.across else seen

    def across_processes(self) -> bool:
        """Whether a capture leaves dims open that calls here showed nothing of."""
        return any(a - s for a, s in zip(self.across, self.varied, strict=False))


def specs_of(leaves: Sequence[torch.Tensor], varied: Sequence[set[int]]) -> list[TensorSpec]:
    """The leaves as capture needs to know them.

    A dim of size 0 or 1 broadcasts or is empty, so a graph that is generic in it excludes the very call it is for: there
    it stays static, and the dims beside it vary.
    """
    return [
        TensorSpec(tuple(t.shape), tuple(t.stride()), t.dtype, str(t.device), frozenset(d for d in v if t.shape[d] > 1))
        for t, v in zip(leaves, varied, strict=True)
    ]
