"""Values inside native runs that only kernels see: some sampled calls go through kernels that count what they store.

Such kernels (`tile.instrument`) are compiled once there were samples enough to make it worth it; nobody but sampled calls
enters them.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING

from hotfuse.ir.dims import evaluate, symbols
from hotfuse.ir.graph import Value
from hotfuse.ir.types import TensorType
from hotfuse.profile.records import Flag
from hotfuse.runtime.observe.call_notes import SampledCall
from hotfuse.runtime.observe.watch_points import Point
from hotfuse.runtime.plan import Plan
from hotfuse.tile.compressed import StoredKernels
from hotfuse.tile.instrument import FLOATS, ranges
from hotfuse.tile.probe_kernels import DTYPES

if TYPE_CHECKING:
    from hotfuse.backends.protocol import LoadedKernel

COUNT_AFTER = 16
"""Samples of a plan before kernels that count are compiled for it."""
_COUNTED = struct.Struct("<7q3d")
"""What a probe would write (`profile.records`); -1 for what is not known."""


def stored(plan: Plan) -> Iterator[tuple[str, int]]:
    """The values that kernels inside the plan's native runs store, with the kernel's number."""
    for unit in plan.units:
        if unit.native is not None:
            code = unit.native.code
            yield from ((name, code.words[word].kernel) for word, names in code.made for name in names if name)


class RunProbes:
    """What is to be seen inside a plan's native runs, and whether kernels count it yet."""

    def __init__(self, plan: Plan, at: Mapping[str, tuple[int, Point]], outside: Collection[str]) -> None:
        kernels = dict(stored(plan))
        values = {v.name: v for n in plan.graph.nodes for v in n.outs}
        self._plan = plan
        self._watched: dict[str, tuple[int, Point, Value]] = {
            name: (*found, values[name]) for name, found in at.items() if name in kernels and name not in outside
        }
        self._kernels = {kernels[name] for name in self._watched}
        self._extents: dict[int, dict[str, tuple[int, ...]]] = {}
        """The sizes of those values, by signature."""
        self.counting = False
        """Whether there are kernels that count."""
        self.uncounted = 0
        """Values that kernels did not store element by element, so that what they counted tells nothing; once a look."""

    def wants(self, samples: int) -> StoredKernels:
        """The kernels that would have to count, by number; none before there were samples enough."""
        if samples < COUNT_AFTER:
            return StoredKernels({})
        return self._plan.kernels.only(self._kernels)

    def count_with(self, kernels: Mapping[int, LoadedKernel]) -> None:
        """Counting kernels there are now; some sampled calls enter them from here on."""
        self.counting = True
        for unit in self._plan.units:
            if unit.native is not None and kernels:
                unit.native.count_with({n: k.address for n, k in kernels.items()}, tuple(kernels.values()))

    def size(self, signature: int, env: Mapping[str, int]) -> None:
        """Work out how large the values are in calls of a signature."""
        types = {name: v.type for name, (_, _, v) in self._watched.items()}
        self._extents[signature] = {name: tuple(evaluate(d, env) for d in t.shape) for name, t in types.items()
                                    if isinstance(t, TensorType) and all(symbols(d) <= env.keys() for d in t.shape)}

    def counted(self, s: SampledCall, name: str, counters: tuple[int, ...]) -> None:
        """Write down what a kernel counted while it stored a value."""
        found = self._watched.get(name)
        shape = self._extents.get(s.subject.signature, {}).get(name)
        if found is None or shape is None:
            return
        item, point, value = found
        n, zeros, odd, top, bottom = counters
        if n != math.prod(shape) or not isinstance(value.type, TensorType):
            self.uncounted += 1
            return
        dtype = value.type.dtype
        exact = dtype not in FLOATS  # what a mask lets through is known of whole numbers only
        cols = math.prod(shape[max(0, len(shape) - point.keep) :])
        flags = point.flags if exact else point.flags & ~Flag.MASK
        at = s.batch.value(s.subject, item, DTYPES.index(dtype), shape, n // cols if cols else 0, cols, flags)
        low, high = ranges(dtype, top, bottom)
        most = max(abs(low), abs(high)) if low <= high else 0.0
        s.batch.write(at, _COUNTED.pack(zeros, -1, -1, odd, -1, n - zeros if exact else -1, -1, low, high, most))
