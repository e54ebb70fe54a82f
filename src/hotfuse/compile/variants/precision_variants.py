"""With which instructions a product is made where the user allows rounding to bf16: as measured in the worker.

    on the matrix unit    blocks of bf16 (AMX), where the machine has one that executes
    by pairs of bf16      dot products in vectors
    in fp32               as without the setting: some machines multiply pairs of bf16 at half the pace of fp32

Which of them is best is the machine's own affair, and depends on sizes: a matrix unit is faster by far on many rows, and takes as
long for one row as for sixteen. All that a core can do take turns on made-up data; the first in the order above stays unless
another one is faster by more than noise. For sizes that only calls tell, `compile.variants.variant_search` asks again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from hotfuse.base.errors import HotfuseError
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.compile.learn import measure
from hotfuse.compile.learn.measure import BoundCall, CompiledCandidate
from hotfuse.compile.request_context import kernels
from hotfuse.compile.variants.trial import rounded
from hotfuse.hpm.work import Candidate
from hotfuse.ir.graph import Graph
from hotfuse.lower import Core

TURN_S = 0.06
"""Most seconds for the turns of all kinds together."""
PASSES = 6
MIN_GAIN = 0.03
"""A kind that is better by less is not better."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """The kind that a product has."""

    candidate: CompiledCandidate
    core: Core
    note: str = ""
    """What was measured, or why nothing was."""


def kinds(core: Core) -> tuple[Core, ...]:
    """A core with each kind of instruction that the user allows and the machine has, the most promising one first."""
    if core.precision == "fp32":
        return (core,)
    found = [core, replace(core, tiles=False), replace(core, precision="fp32", tiles=False)]
    return tuple(dict.fromkeys(found))


def name(core: Core) -> str:
    """A kind's name."""
    return "on the matrix unit" if core.tiles else "in fp32" if core.precision == "fp32" else "by pairs of bf16"


def chosen(graph: Graph, sizes: Mapping[str, int], core: Core, first: CompiledCandidate) -> Chosen:
    """The best kind for a group at the sizes of a call; `first` is its kernel for the core as it is."""
    if not rounded(first.lowered):
        return Chosen(first, core)
    try:
        made = [(core, first), *((c, _made(graph, c)) for c in kinds(core)[1:])]
        taken = seconds([measure.bind(Candidate(graph, sizes, c), name(c), m) for c, m in made])
    except HotfuseError as e:
        return Chosen(first, core, f"{name(core)}, unmeasured: {e.because or e.what}")
    best = min(range(len(made)), key=lambda i: taken[i])
    if taken[best] > taken[0] * (1 - MIN_GAIN):
        best = 0
    said = ", ".join(f"{name(c)} {s * 1e6:.1f} us" for (c, _), s in zip(made, taken, strict=True))
    return Chosen(made[best][1], made[best][0], f"{name(made[best][0])}: {said}")


def _made(graph: Graph, core: Core) -> CompiledCandidate:
    lowered = kernels().lower(graph, core)
    suffix = "_".join(name(core).split()[-2:])
    lowered = replace(lowered, kernel=replace(lowered.kernel, name=f"{lowered.kernel.name}_{suffix}"))
    return CompiledCandidate(lowered, kernels().compile_kernel(lowered.kernel))


def seconds(batch: Sequence[BoundCall]) -> list[float]:
    """What each takes, in turns."""
    measure.timed(batch, PASSES, time.perf_counter() + TURN_S)
    return [b.figure()[0] for b in batch]
