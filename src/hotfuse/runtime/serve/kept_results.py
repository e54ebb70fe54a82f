"""A plan that keeps what depends on repeated inputs alone, and computes it again only where those inputs changed.

    call ─▶ are the repeated inputs, byte by byte, those of one of the last few calls?
              yes ─▶ the rest, with what was kept
              no  ─▶ what depends on them, which is kept from now on; then the rest
            several misses in a row ─▶ the plan there was, for a while; then one call's inputs are noted, and if the next
                                       brings them again, keeping begins anew; if not, the while is twice as long

Bytes decide, not identity: a write through numpy, through `.data` or from another language changes neither a tensor's identity nor
its version. Comparing stops at the first difference, so a miss costs next to nothing, and a hit one read of the inputs. Results
share no memory with what is kept.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hotfuse.backends.protocol import Run

MOST_CONTENTS = 4
"""Contents of the repeated inputs for which results are kept."""
MOST_BYTES = 64 << 20
"""Memory for them, the copies of inputs included."""
IN_VAIN = 3
"""Misses in a row after which nothing is kept for a while."""
FIRST_REST, MOST_DOUBLED = 16, 10
"""Calls of the first such while, and how often it is doubled at most."""

_memcmp: Callable[[int, int, int], int] = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)  # type: ignore[attr-defined]
_memcmp.restype = ctypes.c_int  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class InputCopy:
    """A tensor's contents at one time."""

    copy: torch.Tensor
    shape: torch.Size
    address: int
    bytes: int

    def same(self, t: torch.Tensor) -> bool:
        """Whether a tensor has them now."""
        if t.shape != self.shape:
            return False
        if t.is_contiguous():
            return _memcmp(self.address, t.data_ptr(), self.bytes) == 0
        return torch.equal(self.copy, t)


def copied(t: torch.Tensor) -> InputCopy:
    """A tensor's contents, as they are now."""
    copy = t.detach().contiguous()
    copy = copy.clone() if copy.data_ptr() == t.data_ptr() else copy
    return InputCopy(copy, copy.shape, copy.data_ptr(), copy.numel() * copy.element_size())


@dataclass(frozen=True, slots=True)
class KeptResults:
    """What was computed for some contents."""

    inputs: tuple[InputCopy, ...]
    values: tuple[Any, ...]
    storages: frozenset[int]
    bytes: int

    def of(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether these are the tensors that it was computed for."""
        return all(c.same(t) for c, t in zip(self.inputs, tensors, strict=True))


class RepeatedInputs:
    """The plan; call it like any."""

    def __init__(self, takes: tuple[int, ...], kept: Run, rest: Run, whole: Run) -> None:
        """`takes`: which inputs repeat, in the order that `kept` takes them; `rest` takes all inputs and then what `kept` gives."""
        self._takes, self._kept_run, self._rest_run, self._whole = takes, kept, rest, whole
        self._known: tuple[KeptResults, ...] = ()
        """The most recently used first; exchanged by one reference store."""
        self._noted: tuple[InputCopy, ...] | None = None
        self._resting = 0
        self._in_vain = 0
        self._doubled = 0
        self.hits = self.misses = self.passed = self.begun_again = 0
        """Calls answered with what was kept, those that computed it, those that did not look, and how often looking began anew."""
        self.kept_s = 0.0
        """What computing it takes, as last measured."""
        self.saved_s = 0.0

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        """The graph's outputs."""
        if self._resting > 0:
            return self._not_now(inputs)
        mine = [inputs[i] for i in self._takes]
        if self._noted is not None and not self._came_again(mine):
            return self._whole(*inputs)
        known = self._known
        found = next((k for k in known if k.of(mine)), None)
        if found is not None:
            self.hits += 1
            self.saved_s += self.kept_s
            self._in_vain = self._doubled = 0
            if found is not known[0]:
                self._known = (found, *(k for k in known if k is not found))
        else:
            self._in_vain += 1
            if self._in_vain > IN_VAIN:
                self._stop()
                return self._whole(*inputs)
            found = self._computed(mine)
        outs = self._rest_run(*inputs, *found.values)
        return tuple([_own(o, found.storages) for o in outs])

    def _computed(self, mine: Sequence[torch.Tensor]) -> KeptResults:
        self.misses += 1
        begin = time.perf_counter()
        with torch.inference_mode(False), torch.no_grad():
            copies = tuple(copied(t) for t in mine)  # before anything runs: what is computed belongs to these contents
            theirs = frozenset(t.untyped_storage().data_ptr() for t in mine)
            values = tuple(_own(v, theirs) for v in self._kept_run(*[c.copy for c in copies]))
        self.kept_s = time.perf_counter() - begin
        tensors = [v for v in values if isinstance(v, torch.Tensor)]
        size = sum(c.bytes for c in copies) + sum(t.numel() * t.element_size() for t in tensors)
        made = KeptResults(copies, values, frozenset(t.untyped_storage().data_ptr() for t in tensors), size)
        room, kept = MOST_BYTES - size, list[KeptResults]()
        for k in self._known[: MOST_CONTENTS - 1]:
            room -= k.bytes
            if room >= 0:
                kept.append(k)
        self._known = (made, *kept) if size <= MOST_BYTES else ()
        return made

    def _stop(self) -> None:
        """Nothing came again for several calls: the plan there was answers for a while."""
        self._known, self._in_vain = (), 0
        self._resting = FIRST_REST << self._doubled
        self._doubled = min(self._doubled + 1, MOST_DOUBLED)

    def _not_now(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        self.passed += 1
        self._resting -= 1
        if self._resting == 0:
            self._noted = tuple(copied(inputs[i]) for i in self._takes)
        return self._whole(*inputs)

    def _came_again(self, mine: Sequence[torch.Tensor]) -> bool:
        """Whether the inputs are those that were noted at the end of a while without looking; if not, another one begins."""
        noted, self._noted = self._noted, None
        if noted is not None and all(c.same(t) for c, t in zip(noted, mine, strict=True)):
            self.begun_again += 1
            return True
        self.passed += 1
        self._stop()
        return False

    @property
    def bytes(self) -> int:
        """Memory of what is kept."""
        return sum(k.bytes for k in self._known)

    def counters(self) -> dict[str, int]:
        """For `stats()` and `explain()`."""
        return {"repeated_hits": self.hits, "repeated_misses": self.misses, "repeated_passed": self.passed,
                "repeated_bytes": self.bytes, "repeated_saved_us": int(self.saved_s * 1e6)}  # fmt: skip


def _own(v: Any, storages: frozenset[int]) -> Any:
    """A value that shares no memory with these."""
    if isinstance(v, torch.Tensor) and v.layout is torch.strided and v.untyped_storage().data_ptr() in storages:
        return v.clone()
    return [_own(x, storages) for x in v] if isinstance(v, list) else v  # pyright: ignore[reportUnknownVariableType]
