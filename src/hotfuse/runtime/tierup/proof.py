"""The proof a plan must pass before it serves: real inputs, compared with the baseline; where they differ, float64 judges.

Two float32 programs that add in another order differ, and neither is the truth. Within the tolerance they agree. Beyond it the
baseline is run once more in float64, where its operators allow that, and the new plan passes if it is no farther from that than
twice the baseline is. Outputs that a model rounds (QuantizeLinear) may lie one quantum apart, in one of a hundred places:
`analysis.ties` says how that is judged. Where a model answers differently when its weights change in their last digit, that is
how far right answers lie apart, and it is measured (decisions 40 and 108).

Both are timed on the way. Behind the first call, which warms both up, these are rounds like those of a race, which need not be run
again where nobody is served beside.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Protocol

import torch

from hotfuse.analysis.closeness import largest, units
from hotfuse.analysis.ties import Quantum, all_tied
from hotfuse.backends.library import meaning
from hotfuse.backends.protocol import Run
from hotfuse.backends.pycode import flat_function
from hotfuse.base.errors import CallFault
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.graph import Graph
from hotfuse.ir.retype import widened
from hotfuse.machine.device_clock import clock_of
from hotfuse.machine.device_stream import in_own_stream
from hotfuse.runtime.tierup.agreement import disagreement
from hotfuse.runtime.tierup.lull import Computing

MIN_PROVEN, PROOF_S = 2, 2.0
"""Calls that a plan is proven on however long they take; it goes on with others until so many seconds are over. Calls of a second
or more would be held up by every further one, and the plan is as far from serving."""
MAX_FAULTS = 3
"""Times that a run may have met faults of calls beside."""
SLACK = 2.0
"""How much larger than the baseline's the error against float64 may be."""

NOISE = 4 * torch.finfo(torch.float32).eps
"""How far off, relatively, a neighbour's weights are: as a sum of some hundred products in float32 is."""
NOISES = 4
"""Neighbours whose answers tell how far right ones lie apart."""
MAX_SPREAD, MAX_ROUNDED_SPREAD = 0.01, 0.25
"""Of the largest magnitude: a model whose neighbours are farther apart than this shows nothing of a plan. Outputs computed from
rounded numbers jump by quanta, and may lie farther apart."""


class Wide(Protocol):
    """Makes the baseline in float64; of other numbers than 0, a neighbour of it: with weights off by as much as `NOISE`."""

    def __call__(self, noise: int = 0) -> Run:  # noqa: D102
        ...


@dataclass(frozen=True, slots=True)
class Proof:
    """What was found."""

    difference: str
    """Empty when the plan passed."""
    inputs: int
    judge: str
    """`tier 0` or `float64`."""
    rounds: tuple[tuple[float, float], ...] = ()
    """Seconds of the baseline and of the new plan on each call but the first."""
    first: tuple[tuple[float, float], ...] = ()
    """The same of the first call, which warms both up: where calls take long that does not show."""


def prove(
    new: Run, baseline: Run, calls: Sequence[Sequence[torch.Tensor]], rtol: float, wide: Wide, steps: Sequence[Quantum] = (),
    computing: Computing = nullcontext,
) -> Proof:  # fmt: skip
    """Run both on every call while there is time, in turns who goes first; `steps` are the quanta of outputs that are rounded.
    `computing` is around each round.
    """
    judge, proven = "tier 0", 0
    rounds: list[tuple[float, float]] = []
    with torch.no_grad(), in_own_stream(t for inputs in calls for t in inputs):
        for number, inputs in enumerate(calls):
            with computing():
                if number % 2:
                    want, old_s = _timed(baseline, inputs)
                    got, new_s = _again(new, inputs)
                else:
                    got, new_s = _again(new, inputs)
                    want, old_s = _timed(baseline, inputs)
                rounds.append((old_s, new_s))
                proven += 1
                difference = disagreement(got, want, rtol)
                if difference and not all_tied(got, want, steps, lambda g, w: not disagreement([g], [w], rtol)):
                    judge = "float64"
                    if not _closer(got, want, inputs, wide, steps):
                        return Proof(difference, proven, judge)
            if proven >= MIN_PROVEN and sum(map(sum, rounds)) >= PROOF_S:
                break
    return Proof("", proven, judge, tuple(rounds[1:]), tuple(rounds[:1]))


def _again(run: Run, inputs: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], float]:
    """As `_timed`. Faults are counted for all threads together: a call that has none of its own shows it when it is run again."""
    for _ in range(MAX_FAULTS):
        try:
            return _timed(run, inputs)
        except CallFault:
            continue
    return _timed(run, inputs)


def _timed(run: Run, inputs: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], float]:
    clock = clock_of(inputs)
    begin = clock()
    outs = run(*inputs)
    return outs, clock() - begin


def in_float64(graph: Graph, weights: Mapping[str, torch.Tensor]) -> Wide:
    """Makes a graph in float64, once for all calls of a proof, operator by operator: it runs once a call, and regions of operators
    would take longer to compile than all its runs take.
    """
    exact: list[Run] = []

    def wide(noise: int = 0) -> Run:
        if noise or not exact:
            wider, numbers = neighbour(graph, weights, noise)
            run, _ = flat_function(wider, meaning, numbers)
            if noise:
                return run
            exact.append(run)
        return exact[0]

    return wide


def neighbour(graph: Graph, weights: Mapping[str, torch.Tensor], noise: int = 0) -> tuple[Graph, dict[str, torch.Tensor]]:
    """A graph and its weights in float64; with a number, weights that are off as sums of float32 are. Whole numbers stay: zero
    points that a file keeps as floats are cast to integers, and one that is a little less would move everything by a quantum.
    """
    wide = {k: w.double() if w.is_floating_point() else w for k, w in weights.items()}
    if noise:
        rng = torch.Generator().manual_seed(noise)
        for k, w in wide.items():
            if w.is_floating_point() and not torch.equal(w, w.round()):
                off = torch.rand(w.shape, generator=rng, dtype=w.dtype).to(w.device) * 2 - 1
                wide[k] = w * (1 + off * NOISE)
    return widened(graph), wide


def rounds_otherwise(
    expected: Sequence[Any], outs: Sequence[Any], inputs: Sequence[torch.Tensor], rtol: float, wide: Wide, steps: Sequence[Quantum]
) -> bool:  # fmt: skip
    """Whether a model's own answers differ from its captured graph's as those of the graph's neighbours do: both round, and every
    output that differs is computed from rounded numbers.
    """
    if len(expected) != len(outs) or len(steps) != len(outs):
        return False
    if any(s is None and disagreement([g], [w], rtol) for g, w, s in zip(outs, expected, steps, strict=True)):
        return False
    with torch.no_grad():
        return _closer(expected, outs, inputs, wide, steps)


def _closer(
    got: Sequence[Any], want: Sequence[Any], inputs: Sequence[torch.Tensor], wide: Wide, steps: Sequence[Quantum]
) -> bool:
    """Whether the new outputs are as near to float64's as the baseline's are, or as those of the model's neighbours."""
    exact = [t.double() if t.is_floating_point() else t for t in inputs]
    try:
        truth = wide()(*exact)
    except RuntimeError:  # an operator that insists on float32: there is no truth to be had this way
        return False
    neighbours: list[Sequence[Any]] = []
    for i, (g, w, t) in enumerate(zip(got, want, truth, strict=True)):
        if not (isinstance(t, torch.Tensor) and t.dtype is torch.float64 and isinstance(g, torch.Tensor)):
            if disagreement([g], [w], 0.0):
                return False
            continue
        finite = torch.isfinite(t)
        if g.dtype != w.dtype or g.shape != w.shape or not torch.equal(torch.isfinite(g), finite):
            return False
        if disagreement([g[~finite].double()], [t[~finite]], 0.0):  # an infinity is no NaN, nor the other one
            return False
        mine, theirs = ((x.double() - t)[finite].abs() for x in (g, w))
        unit = units(t[finite])
        if largest(mine, unit) > SLACK * largest(theirs, unit):
            most_apart = MAX_ROUNDED_SPREAD if i < len(steps) and steps[i] is not None else MAX_SPREAD
            if largest(mine, unit) > SLACK * most_apart:  # no neighbour that counts is that far off: none need be run
                return False
            neighbours = neighbours or [wide(number)(*exact) for number in range(1, NOISES + 1)]
            if not all(torch.equal(torch.isfinite(n[i]), finite) for n in neighbours):
                return False
            errors = [theirs, *((n[i] - t)[finite].abs() for n in neighbours)]
            if not _among(errors, mine, unit, most_apart):
                return False
    return True


def _among(errors: Sequence[torch.Tensor], mine: torch.Tensor, unit: torch.Tensor, most_apart: float) -> bool:
    """Whether an error, at its largest and on average, is such as `errors`, those of right answers, are."""
    most, mean = max(largest(e, unit) for e in errors), max(_mean(e, unit) for e in errors)
    return most <= most_apart and largest(mine, unit) <= SLACK * most and _mean(mine, unit) <= SLACK * mean


def _mean(errors: torch.Tensor, in_units: torch.Tensor) -> float:
    return float(torch.where(errors > 0, errors / in_units, 0.0).mean())
