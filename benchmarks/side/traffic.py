"""Seeded streams of requests, as servers see them: nothing here is a file, the generators are the traces.

A trace is asked for one request after another, with how much of the serving time has passed (0 to 1): all contenders meet the
same kinds of requests at the same time, however fast they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Feed = dict[str, np.ndarray[Any, Any]]
VOCABULARY, LONGEST = 30522, 128


@dataclass(frozen=True, slots=True)
class Request:
    """One call, after a pause."""

    feed: Feed
    pause_s: float = 0.0


Make = Callable[[np.random.Generator, float, int], Request]


@dataclass(slots=True)
class Trace:
    """A stream of requests; equal seeds give equal streams."""

    make: Make
    seed: int = 0
    count: int = 0

    def next(self, progress: float) -> Request:
        """The next request; each is drawn from its own number, so that a slow contender sees the same ones."""
        rng = np.random.default_rng((self.seed, self.count))
        self.count += 1
        return self.make(rng, progress, self.count - 1)


def tokens(rng: np.random.Generator, batch: int, length: int, real: np.ndarray[Any, Any] | None = None) -> Feed:
    """Token ids and a mask; `real` gives each sequence's number of real tokens."""
    mask = np.ones((batch, length), np.int64)
    if real is not None:
        mask = (np.arange(length) < real[:, None]).astype(np.int64)
    return {"input_ids": rng.integers(1, VOCABULARY, (batch, length)) * mask, "attention_mask": mask}


def _length(rng: np.random.Generator, middle: float) -> int:
    return int(np.clip(rng.lognormal(math.log(middle), 0.5), 4, LONGEST))


def lengths(rng: np.random.Generator, _progress: float, _i: int) -> Request:
    """Texts of all lengths, one at a time."""
    return Request(tokens(rng, 1, _length(rng, 32)))


def shift(rng: np.random.Generator, progress: float, _i: int) -> Request:
    """Short texts; from half-way on, long ones."""
    return Request(tokens(rng, 1, _length(rng, 16 if progress < 0.5 else 80)))


def padded(rng: np.random.Generator, _progress: float, _i: int) -> Request:
    """Batches of 8, padded to 128 tokens of which 20 to 60% are real."""
    share = rng.uniform(0.2, 0.6)
    real = np.clip(rng.normal(share, 0.12, 8) * LONGEST, 4, LONGEST).astype(int)
    real[0] = LONGEST  # somebody's text is as long as the batch
    return Request(tokens(rng, 8, LONGEST, real))


def batches(rng: np.random.Generator, _progress: float, _i: int) -> Request:
    """Whatever was waiting is one batch: 1 to 12 texts of 32 tokens."""
    return Request(tokens(rng, int(np.clip(rng.geometric(0.25), 1, 12)), 32))


def bursts(rng: np.random.Generator, _progress: float, i: int) -> Request:
    """Twenty requests at once, then half a second of silence."""
    return Request(tokens(rng, 1, _length(rng, 32)), 0.5 if i and i % 20 == 0 else 0.0)


def branches(rng: np.random.Generator, progress: float, _i: int) -> Request:
    """Speech at two sampling rates, which take two branches of one model: mostly one, later mostly the other."""
    rate, samples = (16000, 576) if rng.random() < (0.9 if progress < 0.5 else 0.2) else (8000, 288)
    return Request({
        "input": (rng.standard_normal((1, samples)) * 0.1).astype(np.float32),
        "state": (rng.standard_normal((2, 1, 128)) * 0.1).astype(np.float32),
        "sr": np.array(rate, np.int64),
    })  # fmt: skip


TRACES: dict[str, Make] = {
    "lengths": lengths, "padded": padded, "batches": batches, "shift": shift, "branches": branches, "bursts": bursts,
}  # fmt: skip
