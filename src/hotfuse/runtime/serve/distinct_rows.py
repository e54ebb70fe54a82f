"""Rows of a batch that come twice are computed once: the distinct ones run, and results are spread over the batch again.

Bytes decide which rows are equal. Of long rows a few bytes are compared first, so that batches of distinct ones are told at once;
after several of those in a row nobody looks for a while (`runtime.serve.backoff`). Batches of very many rows are left alone:
looking takes half a microsecond a row, in the call, and half a million numbers without further axes are such a batch, too.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import field
from typing import Any

import numpy as np
import torch

from hotfuse.backends.protocol import Run
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.base.raw_bytes import raw_bytes
from hotfuse.runtime.serve.backoff import Backoff

Array = np.ndarray[Any, Any]
SAMPLED_BYTES = 256
"""Bytes of a long row that are compared first, spread over all of it."""
LONG_ROW = 4096
"""Bytes from which on a row is long."""
MAX_ROWS = 1024
"""Rows of a batch that are compared at most."""


@dataclass(frozen=True, slots=True)
class DistinctRows:
    """Which rows of a batch stand for all of them."""

    first: tuple[int, ...]
    """The first of each kind, in order."""
    which: tuple[int, ...]
    """Of every row, the number of its kind."""


def distinct_rows(tensors: Sequence[torch.Tensor], most: int) -> DistinctRows | None:
    """The kinds of rows that several tensors have together along their first axis; None where there are more than `most`, or
    too many rows to compare.
    """
    if tensors[0].shape[0] > MAX_ROWS:
        return None
    wholly: list[Array] = []
    for t in tensors:
        if t.device.type != "cpu" or t.layout is not torch.strided or not t.is_contiguous() or not t.numel():
            return None
        wholly.append(raw_bytes(t.detach()).view(t.shape[0], -1).numpy())
    quick = [a if a.shape[1] < LONG_ROW else a[:, :: a.shape[1] // SAMPLED_BYTES | 1] for a in wholly]
    exact = all(q is a for q, a in zip(quick, wholly, strict=True))
    parts = [(a.tobytes(), a.shape[1]) for a in quick]
    kinds, first, which = dict[tuple[bytes, ...], int](), list[int](), list[int]()
    for row in range(len(wholly[0])):
        key = tuple([data[row * wide : (row + 1) * wide] for data, wide in parts])
        kind = kinds.get(key)
        if kind is not None and not exact and not all(np.array_equal(a[row], a[first[kind]]) for a in wholly):
            kind = None  # its few bytes are another row's: it stands for itself
        if kind is None:
            kind = len(first)
            if kind >= most:
                return None
            kinds.setdefault(key, kind)
            first.append(row)
        which.append(kind)
    return DistinctRows(tuple(first), tuple(which))


@dataclass(slots=True)
class DistinctRowsRun:
    """A plan for any number of rows where enough of them come twice, else the plan there was; call it like either."""

    inputs: tuple[int, ...]
    """Inputs that have the rows, along their first axis."""
    outputs: tuple[int, ...]
    """Along which axis each output has them."""
    some: Run
    whole: Run
    limit: float = 1.0
    """The share of distinct rows up to which it pays."""
    held: int = 0
    missed: int = 0
    unread: int = 0
    """Calls whose rows were not compared."""
    rest: Backoff = field(default_factory=Backoff)

    def kinds(self, inputs: Sequence[Any]) -> DistinctRows | None:
        """Which rows stand for all, where that pays."""
        given = [inputs[i] for i in self.inputs]
        rows = given[0].shape[0]
        return distinct_rows(given, min(int(self.limit * rows), rows - 1)) if rows > 1 else None

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        """The outputs."""
        if self.rest.left > 0:
            self.rest.left -= 1
            self.unread += 1
            return self.whole(*inputs)
        begin = time.perf_counter()
        kinds = self.kinds(inputs)
        if kinds is None:
            self.missed += 1
            compared = time.perf_counter()
            outs = self.whole(*inputs)
            self.rest.missed(compared - begin, time.perf_counter() - compared)
            return outs
        self.rest.held()
        self.held += 1
        return self.run(inputs, kinds)

    def run(self, inputs: Sequence[Any], kinds: DistinctRows) -> tuple[Any, ...]:
        """The outputs, by the rows that stand for others."""
        rows = kinds.first if len(kinds.first) > 1 else kinds.first * 2  # graphs for any number of rows may be for two and more
        given, first, which = list(inputs), torch.tensor(rows), torch.tensor(kinds.which)
        for i in self.inputs:
            given[i] = given[i].detach().index_select(0, first)
        made = self.some(*given)
        return tuple([out.index_select(axis, which) for out, axis in zip(made, self.outputs, strict=True)])

    def begin(self) -> None:
        """Forget what calls have shown: those of proofs follow no traffic."""
        self.held = self.missed = self.unread = 0
        self.rest.begin()
