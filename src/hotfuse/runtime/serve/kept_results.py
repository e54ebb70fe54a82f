"""A plan that keeps what depends on repeated inputs alone, and computes it again only where those inputs changed.

    call ─▶ are the repeated inputs, byte by byte, those of one of the last few calls?
              yes ─▶ the rest, with what was kept
              no  ─▶ where new contents came again of late: what depends on them, which is kept from now on; then the rest
                     else they are noted, and the plan there was answers: what comes a second time is kept
            misses in a row, or calls that took longer in all than the plan there was ─▶ that plan, for a while; if what is kept
              comes again meanwhile the while is over, and if nothing does behind it, the next one is twice as long

Bytes decide, not identity: a write through numpy, through `.data` or from another language changes neither a tensor's identity nor
its version. Comparing stops at the first difference, so a miss costs next to nothing, and a hit one read of the inputs. Results
share no memory with what is kept. Whether keeping pays is weighed by the times of the very calls, so a wrong bet ends by itself.
Misses count, too: the plan there was has packed weights of its own, and where it runs now and then it finds them out of the caches,
which calls would not without this layer. What a call takes there is told by those behind another of its calls.
"""

from __future__ import annotations

import ctypes
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from ctypes import string_at
from typing import Any, NamedTuple

import torch

from hotfuse.backends.protocol import Run
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.runtime.serve.backoff import MAX_SHARE, pause

MAX_CONTENTS = 4
"""Contents of the repeated inputs for which results are kept."""
MAX_BYTES = 64 << 20
"""Memory for them, the copies of inputs included."""
IN_VAIN = 3
"""Contents in a row that were kept when they first came and did not come again; others then have to come twice. Computing apart
what nobody asks for again was what traffic that flips paid for."""
WEIGHED = 32
"""Calls whose times are added up: if they took longer than the plan there was, by more than looking may cost, nothing is kept for a
while either."""
OUTLIER = 3.0
"""Times as long as usual that a call counts for at most: what took longer was interrupted."""
FIRST_REST, MAX_DOUBLED = 16, 6
"""Calls of the first such while, and how often it is doubled at most."""
DOUBLED_IN_VAIN = 4
"""The same where inputs did not come again: looking at the few calls behind a while costs next to nothing, so traffic that returns
is seen within 256 calls, and sooner where looking costs next to nothing of a call. Where inputs did come again and keeping was
slower all the same, finding out takes 32 slow calls."""
OF_LATE = 9
"""Calls of the plan there was that tell what one takes."""
TIMED = 3
"""First calls that the plan there was answers, to know what it takes."""
NOTED = 4
"""Contents that are noted; as many misses in a row begin a while."""
PEEK = 4
"""During a while, one call in so many is compared with what is kept."""

FEW_BYTES = 64
"""Bytes in the middle that are looked at first: most contents differ there, and sequences begin and end alike more often."""

_memcmp: Callable[[int, int, int], int] = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)  # type: ignore[attr-defined]
_memcmp.restype = ctypes.c_int  # type: ignore[attr-defined]


class Contents(NamedTuple):
    """What tensors hold, row-major, and a few bytes of each: most other contents differ in those already."""

    few: tuple[tuple[torch.Size, bytes], ...]
    tensors: tuple[torch.Tensor, ...]
    places: tuple[tuple[int, int], ...]
    """Addresses, and how many bytes lie there."""

    def same(self, other: Contents) -> bool:
        """Whether others are these now; comparing numbers would take -0.0 for 0.0."""
        if self.few != other.few:
            return False
        return all(_memcmp(a, b, n) == 0 for (a, n), (b, _) in zip(self.places, other.places, strict=True))

    def copied(self) -> Contents:
        """As they are now, in memory that nobody writes."""
        return contents([t.detach().clone() for t in self.tensors])


def contents(tensors: Sequence[torch.Tensor]) -> Contents:
    """The contents of tensors, read from the tensors themselves where they lie row-major."""
    few: list[tuple[torch.Size, bytes]] = []
    rows: list[torch.Tensor] = []
    places: list[tuple[int, int]] = []
    for t in tensors:
        row = t if t.is_contiguous() else t.detach().contiguous()
        address, size = row.data_ptr(), row.nbytes
        some = string_at(address, size) if size <= FEW_BYTES else string_at(address + (size - FEW_BYTES) // 2, FEW_BYTES)
        few.append((row.shape, some))
        rows.append(row)
        places.append((address, size))
    return Contents(tuple(few), tuple(rows), tuple(places))


@dataclass(frozen=True, slots=True)
class KeptResults:
    """What was computed for some contents."""

    inputs: Contents
    values: tuple[Any, ...]
    storages: frozenset[int]
    bytes: int


class RepeatedInputs:
    """The plan; call it like any."""

    def __init__(self, takes: tuple[int, ...], kept: Run, rest: Run, whole: Run) -> None:
        """`takes`: which inputs repeat, in the order that `kept` takes them; `rest` takes all inputs and then what `kept` gives."""
        self._takes, self._kept_run, self._rest_run, self._whole = takes, kept, rest, whole
        self.begin()

    def begin(self) -> None:
        """Forget what calls have shown: those of proofs follow no traffic."""
        self.hits = self.misses = self.passed = self.begun_again = 0
        """Calls answered with what was kept, those that computed it, those that did not look, and how often looking began anew."""
        self.saved_s = 0.0
        """By the times of calls that looked, against what others took."""
        self._known: tuple[KeptResults, ...] = ()
        """The most recently used first; exchanged by one reference store."""
        self._noted: tuple[Contents, ...] = ()
        """Contents that came once of late, and are not kept."""
        self._newest: KeptResults | None = None
        """What was kept last and has not come again so far ..."""
        self._at_once = True
        """... and whether that was when it first came. What came twice before says less of contents that come first."""
        self._doubt = 0
        """Contents in a row that were kept when they first came, and have not come again."""
        self._resting = self._in_vain = self._doubled = 0
        self._times, self._untimed = deque[float](maxlen=OF_LATE), TIMED
        """What calls took of late in the plan there was, behind others of its own, and how many are still to be timed for that."""
        self._cold = deque[float](maxlen=OF_LATE)
        """The same of calls behind others that it did not answer; they tell no more than what it takes at most."""
        self._behind_whole = False
        """Whether the plan there was answered the last call."""
        self._look_s = math.inf
        """What the last look took that found nothing."""
        self._usual_s = math.inf
        """The middle one of them: the least was taken while everything was at hand, and other calls are not."""
        self._balance_s, self._weighed = 0.0, 0

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        """The graph's outputs."""
        if self._resting > 0 and not self._returned(inputs):
            if self._resting < OF_LATE:
                return self._timed(inputs)[0]
            self.passed += 1
            return self._whole(*inputs)
        if self._untimed > 0:
            self._untimed -= 1
            return self._timed(inputs)[0]
        begin = time.perf_counter()
        mine = contents([inputs[i] for i in self._takes])
        known = self._known
        found = next((k for k in known if k.inputs.same(mine)), None)
        if found is not None:
            self.hits += 1
            self._in_vain = 0
            if found is self._newest:
                self._newest, self._doubt = None, 0 if self._at_once else max(0, self._doubt - 1)
            if found is not known[0]:
                self._known = (found, *(k for k in known if k is not found))
        elif (found := self._admitted(mine)) is None:
            self._look_s = time.perf_counter() - begin
            outs, _ = self._timed(inputs)
            self._weigh(time.perf_counter() - begin)  # looking is part of what such a call takes
            return outs
        self._behind_whole = False
        outs = tuple([_own(o, found.storages) for o in self._rest_run(*inputs, *found.values)])
        self._weigh(time.perf_counter() - begin)
        return outs

    def _timed(self, inputs: Sequence[Any]) -> tuple[tuple[Any, ...], float]:
        """A call in the plan there was, to know what that takes, and its seconds."""
        self.passed += 1
        times = self._times if self._behind_whole else self._cold
        self._behind_whole = True
        begin = time.perf_counter()
        outs = self._whole(*inputs)
        seconds = time.perf_counter() - begin
        times.append(seconds)
        seen = [sorted(t) for t in (self._times, self._cold)]  # another thread's call may clear both at any time
        self._usual_s = min((t[len(t) // 2] for t in seen if t), default=self._usual_s)
        return outs, seconds

    def _weigh(self, seconds: float) -> None:
        """Note what a call that looked took, by the plan or by kept results."""
        saved = self._usual_s - min(seconds, OUTLIER * self._usual_s)
        self.saved_s += saved
        self._balance_s += saved
        self._weighed += 1
        if self._weighed >= WEIGHED:
            if self._balance_s < -MAX_SHARE * self._weighed * self._usual_s:
                self._stop(MAX_DOUBLED)
                self._known = ()
            else:
                self._balance_s, self._weighed, self._doubled = 0.0, 0, 0

    def _returned(self, inputs: Sequence[Any]) -> bool:
        """During a while: whether what is kept has come again, which ends it; one call in a few is asked."""
        self._resting -= 1
        if self._resting == 0:
            self._noted = ()
        if not self._known or self._resting % PEEK:
            return False
        mine = contents([inputs[i] for i in self._takes])
        if not any(k.inputs.same(mine) for k in self._known):
            return False
        self._resting = self._doubled = self._in_vain = 0
        return True

    def _admitted(self, mine: Contents) -> KeptResults | None:
        """What is kept of contents that are not known from now on; None where they are to come a second time first."""
        again = any(n.same(mine) for n in self._noted)
        if again or self._doubt < IN_VAIN:
            self.begun_again += again
            self._doubt += not again
            self._noted = () if again else self._noted
            self._newest, self._at_once = (found := self._computed(mine)), not again
            if not self._known:  # it is too large to be kept
                self._stop(MAX_DOUBLED)
            return found
        self._in_vain += 1
        rest = pause(FIRST_REST << min(self._doubled, DOUBLED_IN_VAIN), self._look_s, self._usual_s)
        if self._in_vain > NOTED and rest:
            self._stop(DOUBLED_IN_VAIN, rest)
        else:
            self._noted = (mine.copied(), *self._noted[: NOTED - 1])
        return None

    def _computed(self, mine: Contents) -> KeptResults:
        self.misses += 1
        with torch.inference_mode(False), torch.no_grad():
            copies = mine.copied()  # before anything runs: what is computed belongs to these contents
            theirs = frozenset(t.untyped_storage().data_ptr() for t in mine.tensors)
            values = tuple(_own(v, theirs) for v in self._kept_run(*copies.tensors))
        tensors = [v for v in values if isinstance(v, torch.Tensor)]
        size = sum(n for _, n in copies.places) + sum(t.numel() * t.element_size() for t in tensors)
        made = KeptResults(copies, values, frozenset(t.untyped_storage().data_ptr() for t in tensors), size)
        room, kept = MAX_BYTES - size, list[KeptResults]()
        for k in self._known[: MAX_CONTENTS - 1]:
            room -= k.bytes
            if room >= 0:
                kept.append(k)
        self._known = (made, *kept) if size <= MAX_BYTES else ()
        return made

    def _stop(self, most_doubled: int, rest: int | None = None) -> None:
        """Keeping did not pay of late: the plan there was answers for a while. What nothing asked for all the while goes; what
        saved more than was lost since the last one was asked for.
        """
        self._doubled = 0 if self._balance_s > 0 else self._doubled
        self._known = self._known if self._doubled < most_doubled else ()
        self._noted, self._in_vain = (), 0
        self._balance_s, self._weighed = 0.0, 0
        self._resting, self._behind_whole = FIRST_REST << min(self._doubled, most_doubled) if rest is None else rest, True
        self._times.clear()
        self._cold.clear()
        self._doubled = min(self._doubled + 1, MAX_DOUBLED)

    @property
    def bytes(self) -> int:
        """Memory of what is kept."""
        return sum(k.bytes for k in self._known)

    def counters(self) -> dict[str, int]:
        """For `stats()` and `explain()`."""
        return {"repeated_hits": self.hits, "repeated_misses": self.misses, "repeated_passed": self.passed,
                "repeated_bytes": self.bytes, "repeated_saved_us": int(self.saved_s * 1e6),
                "repeated_begun_again": self.begun_again}  # fmt: skip


def _own(v: Any, storages: frozenset[int]) -> Any:
    """A value that shares no memory with these."""
    if isinstance(v, torch.Tensor) and v.layout is torch.strided and v.untyped_storage().data_ptr() in storages:
        return v.clone()
    return [_own(x, storages) for x in v] if isinstance(v, list) else v  # pyright: ignore[reportUnknownVariableType]
