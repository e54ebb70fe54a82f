"""Where the suite's random data come from: each test begins at a number of its own, the same in every run.

A bound that random data can break once in a thousand runs would otherwise break a change that has nothing to do with it, and
what a test drew would depend on the tests that happened to run before it in the same worker. Search is for those who have time
for it: `pytest --seed N` gives every test other data, `--hypothesis-seed N` other examples, `make fuzz` other graphs. Which tests
share a process, and which of them comes first, is up to whoever runs them; `pytest --shuffle N` shows a test that minds.
"""

from __future__ import annotations

import hashlib
import random
import zlib
from collections.abc import Iterable

import numpy as np
import torch


def seed(number: int = 0) -> None:
    """Everything that draws without a generator of its own goes on from here."""
    torch.default_generator.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def begin(number: int, name: str) -> None:
    """What is drawn from here on follows from `number` and `name` alone."""
    seed(zlib.crc32(f"{number} {name}".encode()))


def generator() -> np.random.Generator:
    """NumPy's, begun from the test's number."""
    return np.random.default_rng(random.getrandbits(64))


def shuffled(number: int, names: Iterable[str]) -> dict[str, tuple[bytes, bytes]]:
    """Each test's place in the order that follows from `number`; files stay whole, as what a module keeps is made once for it."""

    def drawn(name: str) -> bytes:
        return hashlib.sha256(f"{number} {name}".encode()).digest()

    return {name: (drawn(name.split("::", 1)[0]), drawn(name)) for name in names}
