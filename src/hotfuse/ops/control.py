"""What control nodes mean: plain functions over callables.

The ONNX interpreter, the graph's reference execution and the tests all use these, so `if`, `loop`, `scan` and `map` mean
one thing. A body is any callable that takes its arguments in the stated order and returns a tuple.
Captures are the values a body uses from outside; they come last and are the same in every iteration.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Body = Callable[..., tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Stacked:
    """What a loop that never ran must still say of a stacked output: element type and shape of one step (None: unknown)."""

    dtype: torch.dtype | None
    shape: tuple[int | None, ...] | None


def run_if(cond: Any, then: Body, else_: Body, captures: Sequence[Any] = ()) -> tuple[Any, ...]:
    """`then(*captures)` when cond is true, else `else_(*captures)`."""
    return tuple(then(*captures) if truth(cond) else else_(*captures))


def run_loop(
    trip: Any,
    cond: Any,
    carried: Sequence[Any],
    body: Body,
    captures: Sequence[Any] = (),
    stacked: Sequence[Stacked] = (),
) -> tuple[Any, ...]:
    """Run `body(i, cond, *carried, *captures) -> (cond, *carried, *steps)` while i < trip and cond holds.

    `trip` and `cond` may be None (no limit; true). Returns the last carried values, then one tensor per step output,
    stacked along a new first axis; `stacked` describes those for a loop that never runs.
    """
    limit = None if trip is None else int(trip)
    state = list(carried)
    steps: list[list[Any]] = [[] for _ in stacked]
    go, i = (True if cond is None else truth(cond)), 0
    while go and (limit is None or i < limit):
        out = body(torch.tensor(i), torch.tensor(True), *state, *captures)
        go = truth(out[0])
        state = list(out[1 : 1 + len(state)])
        for acc, value in zip(steps, out[1 + len(state) :], strict=True):
            acc.append(value)
        i += 1
    return (*state, *(_stack(acc, spec, 0) for acc, spec in zip(steps, stacked, strict=True)))


@dataclass(frozen=True, slots=True)
class ScanAxes:
    """Per scanned input and stacked output: the axis, and whether it runs backwards."""

    in_axes: tuple[int, ...]
    in_reverse: tuple[bool, ...]
    out_axes: tuple[int, ...]
    out_reverse: tuple[bool, ...]


def run_scan(
    states: Sequence[Any],
    scanned: Sequence[torch.Tensor],
    body: Body,
    axes: ScanAxes,
    captures: Sequence[Any] = (),
    stacked: Sequence[Stacked] = (),
) -> tuple[Any, ...]:
    """Run `body(*states, *slices, *captures) -> (*states, *steps)` over slices of the scanned inputs.

    Returns the last states, then one tensor per step output.
    """
    length = scanned[0].shape[axes.in_axes[0]] if scanned else 0
    state = list(states)
    steps: list[list[Any]] = [[] for _ in stacked]
    for i in range(length):
        slices = [
            x.select(axis, length - 1 - i if reverse else i)
            for x, axis, reverse in zip(scanned, axes.in_axes, axes.in_reverse, strict=True)
        ]
        out = body(*state, *slices, *captures)
        state = list(out[: len(state)])
        for acc, value in zip(steps, out[len(state) :], strict=True):
            acc.append(value)
    results: list[Any] = []
    for acc, spec, axis, reverse in zip(steps, stacked, axes.out_axes, axes.out_reverse, strict=True):
        results.append(_stack(acc[::-1] if reverse else acc, spec, axis))
    return (*state, *results)


def run_map(sequences: Sequence[Any], body: Body, n_out: int, captures: Sequence[Any] = ()) -> tuple[list[Any], ...]:
    """`body(*elements, *captures) -> tuple` for each position of the first list; results are lists.

    Later arguments that are not lists are passed whole to every call.
    """
    results: tuple[list[Any], ...] = tuple([] for _ in range(n_out))
    for i in range(len(sequences[0])):
        out = body(*(s[i] if isinstance(s, list) else s for s in sequences), *captures)
        for acc, value in zip(results, out, strict=True):
            acc.append(value)
    return results


def truth(cond: Any) -> bool:
    """A condition: a bool, or a tensor of one element."""
    return bool(cond.reshape(()).item()) if isinstance(cond, torch.Tensor) else bool(cond)


def _stack(steps: list[Any], spec: Stacked, axis: int) -> Any:
    if steps:
        return torch.stack(steps, axis)
    shape = [d or 0 for d in spec.shape or ()]
    at = axis + len(shape) + 1 if axis < 0 else axis
    shape.insert(at, 0)
    return torch.empty(shape, dtype=spec.dtype or torch.float32)
