"""Writes to weights that torch does not show: through `p.data`, NumPy, DLPack, shared memory, or to tensors of inference mode.

Plans above tier 0 serve copies of weights. Before copies are made, checksums of the originals' memory are taken; from the moment
that a plan with copies serves, the originals are compared with them, and a difference takes every plan with copies away.

| who compares | what | so that |
| --- | --- | --- |
| every call | the next chunk of a few hundred | a write is noticed after `weights_calls` calls at the latest |
| a thread (`scrubber`), where calls are too few for that | everything, from time to time | calls that come later need not |
| a call, where nobody has compared everything for long | everything | a write is noticed `weights_ms` later at the latest |

`weights="checked"` has every call compare everything, `"frozen"` nobody anything. Tier 0 and the model's own code read weights
where they lie, so nothing is compared for those, nor where a plan reads a weight in place (`Plan.live`), nor for ONNX files, whose
weights nobody can reach.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.base.settings import Settings
from hotfuse.machine import pages
from hotfuse.machine.copied import SIZE, Copied
from hotfuse.machine.pages import Range
from hotfuse.native.checksums import OVERDUE, SAME, WRITTEN, ChecksumRows, ChecksumTable
from hotfuse.runtime.epochs import epochs

SMALLEST, LARGEST = 256, 64 << 10
"""Bytes of one row."""
TensorKey = tuple[int, tuple[int, ...], tuple[int, ...], int]
"""Address, extents, strides, and bytes of an element."""
SMALL, SHIFT = 4 << 20, 4
"""Of fewer bytes than this, one call in 16 compares so much more: reaching a few hundred bytes costs more than comparing them."""
AT_ONCE = 64 << 10
"""Bytes of inference tensors that every call compares: three microseconds."""
MAX_PIECES = 4096
"""Separate pieces of one tensor that are compared one by one; of more, what lies between them is compared too."""


@dataclass(frozen=True, slots=True)
class Late:
    """A write that was noticed late."""

    calls: int
    """It is at most so many calls old ..."""
    ms: float
    """... and at most so many milliseconds."""


def pieces(t: torch.Tensor) -> list[Range]:
    """Where a tensor's numbers lie: first byte and the one behind the last of each piece without gaps."""
    if not t.numel():
        return []
    size, address = t.element_size(), t.data_ptr()
    dims = sorted(((st * size, n) for n, st in zip(t.shape, t.stride(), strict=True) if n > 1 and st), key=lambda d: d[0])
    whole = size
    while dims and dims[0][0] == whole:
        whole *= dims.pop(0)[1]
    if math.prod(n for _, n in dims) > MAX_PIECES:
        return [(address, address + whole + sum((n - 1) * st for st, n in dims))]
    begins = (address + sum(p) for p in itertools.product(*[range(0, n * st, st) for st, n in dims]))
    return [(b, b + whole) for b in begins]


def comparable(t: torch.Tensor) -> bool:
    """Whether a tensor's memory can be read here."""
    return t.layout is torch.strided and t.device.type == "cpu"


class Originals:
    """The memory of one model's weights, as far as plans have copies of them."""

    def __init__(self, settings: Settings, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self.on = settings.weights != "frozen"
        self._every_call = settings.weights == "checked"
        self._calls = 1 if self._every_call else settings.weights_calls
        self.limit_ns = round(settings.weights_ms * 1e6)
        self._clock = clock
        self._lock = threading.Lock()
        self._word = ctypes.c_int64(0)
        self.address = ctypes.addressof(self._word)
        """Of a word that holds the table's address, or zero: what native code begins with."""
        self.table: ChecksumTable | None = None
        self._taken: dict[TensorKey, tuple[ChecksumRows, torch.Tensor]] = {}
        """By where a tensor's numbers lie: its rows, and what keeps its memory."""
        self._released: tuple[ChecksumRows, ...] = ()
        """Rows whose memory comes from a file: reading them would bring it back."""
        self._files: tuple[Range, ...] = ()
        """That memory."""
        self.generation = 0
        """Grows whenever what was taken is void."""
        self.noticed = 0
        self.by_thread = 0
        """Passes that the thread has made."""
        self.by_call = 0
        """Passes that a call had to make."""

    # --- taking ----------------------------------------------------------------------------------

    def take(self, weights: Iterable[torch.Tensor]) -> int:
        """Before copies are made: take checksums of what has none so far. Returns the generation; for the background."""
        generation = self.generation
        if self.on:
            fresh = {_key(t): t.detach() for t in weights if comparable(t) and _key(t) not in self._taken}
            total = sum(t.numel() * t.element_size() for t in fresh.values())
            size = min(LARGEST, max(SMALLEST, total // max(1, self._calls >> self._shift(total)) // 64 * 64))
            for key, t in fresh.items():
                rows = ChecksumRows([(a, min(size, end - a)) for begin, end in pieces(t) for a in range(begin, end, size)])
                rows.take()
                with self._lock:
                    if generation == self.generation:
                        self._taken[key] = (rows, t)
        return generation

    def _shift(self, total: int) -> int:
        """How many steps of so many bytes compare nothing, as a power of two."""
        return SHIFT if total < SMALL and self._calls >= 64 else 0

    def still(self, generation: int, weights: Iterable[torch.Tensor]) -> bool:
        """Whether these weights are as they were taken, copies of which are to serve now."""
        if not self.on:
            return True
        with self._lock:
            found = [self._taken.get(_key(t)) for t in weights if comparable(t)]
        return generation == self.generation and all(f is not None and f[0].same() for f in found)

    # --- comparing -------------------------------------------------------------------------------

    def compare(self, weights: Iterable[torch.Tensor], released: Sequence[Range] = ()) -> None:
        """From now on these are compared, and no others: plans with copies of them serve. `released`: memory that is in a file."""
        with self._lock:
            found = {k: self._taken[k] for t in weights if comparable(t) and (k := _key(t)) in self._taken} if self.on else {}
            apart = [f for f in found.values() if any(_meets(a, a + n, released) for a, n in f[0].pieces)]
            live = [f for f in found.values() if f not in apart and f[0].bytes]
            self._released, self._files = tuple(rows for rows, _ in apart), tuple(released)
            now, total = self._clock(), sum(rows.bytes for rows, _ in live)
            keep = [t for _, t in live]
            # Of inference tensors no write shows, `load_state_dict` and in-place operators included: few bytes are all compared.
            at_once = total <= AT_ONCE and any(t.is_inference() for t in keep)
            shift = 0 if at_once else self._shift(total)
            most = 1 if at_once else max(1, min(self._calls >> shift, total // SMALLEST))
            self._set(ChecksumTable([r for r, _ in live], most, self.limit_ns, now, keep, shift) if live else None)

    def forget(self) -> None:
        """What was taken is void: weights were changed, or the model is another one."""
        with self._lock:
            self.generation += 1
            self._taken.clear()
            self._released = self._files = ()
            self._set(None)

    def _set(self, table: ChecksumTable | None) -> None:
        old, self.table = self.table, table
        self._word.value = 0 if table is None else table.address
        if old is not None:
            epochs.retire(old)  # a call may be comparing

    @property
    def bytes(self) -> int:
        """How much is compared."""
        table = self.table
        return (0 if table is None else table.rows.bytes) + sum(r.bytes for r in self._released)

    def look(self, *, native: bool) -> Late | None:
        """On the call path: a step, or, where `native` code has made it, what that found."""
        table = self.table
        if table is None:
            return None
        if not native:
            table.step()
        found = table.found()
        if found == OVERDUE:
            self.by_call += 1
            found = SAME if self._pass(table) else WRITTEN
        return self._late(table) if found == WRITTEN else None

    def _late(self, table: ChecksumTable) -> Late:
        return Late(table.steps, round((self._clock() - table.verified_ns) * 1e-6, 1))

    def _pass(self, table: ChecksumTable) -> bool:
        """Compare everything at once."""
        begin = self._clock()
        if not table.rows.same() or not self._unwritten():
            return False
        table.verified_ns = begin
        return True

    def _unwritten(self) -> bool:
        """Whether released memory is as it was: only pages that somebody wrote to are the process's own, and only they are read."""
        if not self._released:
            return True
        own, files = pages.written_ranges(self._files), self._files
        for rows in self._released:
            for i, (a, n) in enumerate(rows.pieces):
                inside = any(begin <= a and a + n <= end for begin, end in files)
                if (not inside or _meets(a, a + n, own)) and not rows.same(i, i + 1):
                    return False
        return True

    # --- the thread's part -----------------------------------------------------------------------

    def due(self) -> bool:
        """Whether nobody has compared everything for half of the time allowed."""
        table = self.table
        if self._every_call:
            return False
        return bool(self._released) or (table is not None and self._clock() - table.verified_ns > self.limit_ns // 2)

    def scrub(self, room: Copied, rest: Callable[[], None]) -> Late | None:
        """Compare everything, a slice at a time, on copies: memory that is given back meanwhile is no fault. For the thread."""
        table = self.table
        if not self._unwritten():
            return Late(0, self.limit_ns * 1e-6)
        if table is None or self._clock() - table.verified_ns <= self.limit_ns // 2:
            return None
        begin = self._clock()
        for first, last in _slices(table.rows.pieces):
            at = table.rows.pieces[first][0]
            end = table.rows.pieces[last - 1][0] + table.rows.pieces[last - 1][1]
            if self.table is not table or not room.copy(at, end - at):
                return None  # it is another model's, or somebody moved the weights: calls will see that
            if not table.rows.same(first, last, room.address - at):
                return self._late(table)
            rest()
        self.by_thread += 1
        table.verified_ns = begin
        return None

    def stats(self) -> dict[str, int]:
        """For `stats()`."""
        table = self.table
        return {"bytes": self.bytes, "steps": 0 if table is None else table.steps, "noticed_late": self.noticed,
                "passes_by_thread": self.by_thread, "passes_by_calls": self.by_call}

    def text(self) -> str:
        """For `explain()`."""
        if not self.on:
            return "nothing is compared: frozen by the settings"
        table = self.table
        if table is None and not self._released:
            return "no plan has copies of weights that the program can write to: nothing has to be compared"
        if self._every_call:
            return f"{self.bytes} bytes are compared in every call; {self.noticed} writes behind torch's back were noticed"
        return (f"{self.bytes} bytes that plans have copies of are compared; a write behind torch's back shows within "
                f"{0 if table is None else table.steps} calls and {self.limit_ns * 1e-9:g} s; {self.noticed} were noticed")

    def after_fork(self) -> None:
        """In a forked child: the thread that held the lock is in the parent."""
        self._lock = threading.Lock()


def copied(weights: Mapping[str, torch.Tensor], live: Iterable[frozenset[str]]) -> list[torch.Tensor]:
    """The weights of which some plan has copies; of each plan, the keys that it reads in place and nowhere else."""
    everywhere = frozenset[str].intersection(*sets) if (sets := list(live)) else frozenset(weights)
    return [t for k, t in weights.items() if k not in everywhere]


def _key(t: torch.Tensor) -> TensorKey:
    return t.data_ptr(), tuple(t.shape), t.stride(), t.element_size()


def _meets(begin: int, end: int, ranges: Sequence[Range]) -> bool:
    return any(a < end and begin < b for a, b in ranges)


def _slices(pieces: Sequence[tuple[int, int]]) -> Iterable[tuple[int, int]]:
    """Rows that lie behind each other, as many as one copy takes."""
    first = 0
    for i in range(1, len(pieces) + 1):
        ends = sum(pieces[i - 1])
        if i == len(pieces) or pieces[i][0] != ends or sum(pieces[i]) - pieces[first][0] > SIZE:
            yield first, i
            first = i
