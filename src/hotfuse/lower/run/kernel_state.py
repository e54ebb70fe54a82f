"""State of a kernel: words that outlive its calls: where its dispatch changes sides, and how often it took which."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from hotfuse.base.errors import InternalError

LIMIT, SKIPPED, DENSE = range(3)
"""What the words are: the limit, and how often rows were skipped and were not."""
WHOLE, NEVER = 1000, 1001
"""All rows, in thousandths; and the limit that no call reaches, at which rows are not even looked at."""
ROWS_TOGETHER = 2
"""Rows that leave out the steps of K at which all of them are zero (`lower.cpu.gemm.sparse`): zeros of a ReLU lie at places of
their own in every row, and the more rows have to agree, the fewer steps are left out."""


class KernelState:
    """Read and counted in native code; the limit is one word, so a call sees an old one or a new one."""

    def __init__(self, words: tuple[int, ...]) -> None:
        self._words = (ctypes.c_int64 * max(1, len(words)))(*words)
        self.address = ctypes.addressof(self._words)
        self.first = words[LIMIT]
        """The limit it began with."""

    @property
    def memory(self) -> np.ndarray[Any, Any]:
        """The words themselves."""
        return np.ctypeslib.as_array(self._words)

    @property
    def limit(self) -> int:
        """Thousandths of rows that must be zero for them to be skipped; beyond 1000 nobody looks."""
        return int(self._words[LIMIT])

    @limit.setter
    def limit(self, value: int) -> None:
        if not 0 <= value <= NEVER:
            raise InternalError(f"a limit of {value} thousandths")
        self._words[LIMIT] = value

    @property
    def on(self) -> bool:
        """Whether rows are looked at."""
        return self.limit < NEVER

    @property
    def skipped(self) -> int:
        """Calls of the kernel that left rows out."""
        return int(self._words[SKIPPED])

    @property
    def dense(self) -> int:
        """Calls that did not."""
        return int(self._words[DENSE])
