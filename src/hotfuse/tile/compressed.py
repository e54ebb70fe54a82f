"""Kernels at rest: a process that serves keeps their text, compressed, and reads it again where somebody asks.

A kernel's statements are tens of thousands of small objects: the kernels of one text recognizer took 30 MB of the serving process,
and the text of all of them takes a third of a megabyte. Serving itself needs object code and a kernel's header.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import field, replace

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.tile.program import Kernel
from hotfuse.tile.text import parse

_LEVEL = 1
"""Of compression: the best one takes four times as long and saves a quarter."""


def header(kernel: Kernel) -> Kernel:
    """A kernel without its statements: its name, sizes, buffers and which instructions it has, which calling it needs."""
    return replace(kernel, body=(), left_out=kernel.ops)


@dataclass(frozen=True, slots=True)
class StoredKernel:
    """One kernel as compressed assembly text."""

    name: str
    packed: bytes
    facts: Mapping[str, float] = field(default_factory=dict[str, float])
    """What the worker knew of it, by name: what it computes and moves, what it was predicted to take, what it took."""

    @classmethod
    def of(cls, name: str, text: str, facts: Mapping[str, float] | None = None) -> StoredKernel:
        """Store a kernel's text."""
        return cls(name, zlib.compress(text.encode(), _LEVEL), facts or {})

    @property
    def text(self) -> str:
        """Its assembly text."""
        return zlib.decompress(self.packed).decode()

    def kernel(self) -> Kernel:
        """The kernel, read anew."""
        return parse(self.text)


@dataclass(frozen=True, slots=True)
class StoredKernels(Mapping[int, Kernel]):
    """Kernels by number; each access reads one from its text."""

    stored: Mapping[int, StoredKernel]

    def __getitem__(self, number: int) -> Kernel:
        """A kernel, read anew."""
        return self.stored[number].kernel()

    def __iter__(self) -> Iterator[int]:
        """The numbers there are."""
        return iter(self.stored)

    def __len__(self) -> int:
        """How many there are."""
        return len(self.stored)

    def names(self) -> dict[int, str]:
        """What they are called: nothing is read for this."""
        return {n: k.name for n, k in self.stored.items()}

    def only(self, numbers: Collection[int]) -> StoredKernels:
        """Some of them; numbers without a kernel are left out."""
        return StoredKernels({n: k for n, k in self.stored.items() if n in numbers})
