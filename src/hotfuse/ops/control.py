"""What control nodes mean: plain functions over callables.

The ONNX interpreter, the graph's reference execution and the tests all use these, so `if`, `loop`, `scan` and `map` mean
one thing. A body is any callable that takes its arguments in the stated order and returns a tuple.
Captures are the values a body uses from outside; they come last and are the same in every iteration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch

from hotfuse.base.errors import ModelError
from hotfuse.base.lazy_dataclass import dataclass

Kind = Literal["if", "loop", "scan", "map"]
Body = Callable[..., tuple[Any, ...]]

MAX_TRIPS = 1_000_000
"""Most iterations of one loop: far above what models do, and some seconds of work; more is a damaged file's."""
NO_COUNT = 2**63 - 1
"""What exporters write as the count of a loop that only its condition ends."""


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
    if limit is not None and MAX_TRIPS < limit < NO_COUNT:
        raise _too_long(f"its trip count is {limit}")
    state = list(carried)
    steps: list[list[Any]] = [[] for _ in stacked]
    go, i, holds = (True if cond is None else truth(cond)), 0, torch.tensor(True)
    while go and (limit is None or i < limit):
        if i >= MAX_TRIPS:
            raise _too_long(f"its condition still held after {i} iterations")
        out = body(torch.tensor(i), holds, *state, *captures)
        go = out[0] is holds or truth(out[0])  # a loop that only counts gives it back as it is
        state = list(out[1 : 1 + len(state)])
        for acc, value in zip(steps, out[1 + len(state) :], strict=True):
            acc.append(value)
        i += 1
    return (*state, *(_stack(acc, spec, 0) for acc, spec in zip(steps, stacked, strict=True)))


def _too_long(because: str) -> ModelError:
    return ModelError(
        f"a loop runs for more than {MAX_TRIPS} iterations",
        because=because,
        hint="the model is damaged, or its loop does not end",
    )


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
        out = body(*(s[i] if isinstance(s, (list, tuple)) else s for s in sequences), *captures)
        for acc, value in zip(results, out, strict=True):
            acc.append(value)
    return results


def run(kind: Kind, bodies: Sequence[Body], args: Sequence[Any], attrs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Run a control node from its arguments as a graph holds them.

    if    (cond, captures)                  -> outs
    loop  (trip, cond, carried, captures)   -> carried, then stacked steps
    scan  (states, scanned, captures)       -> states, then stacked steps
    map   (sequences, captures)             -> lists

    Keyword arguments, one entry per stacked output: `dtypes` and `shapes` (loop, scan: what one step gives, None where
    unknown), `out_axes`, `out_reverse` (scan); one entry per scanned input: `in_axes`, `in_reverse`; `n_out` (map).
    """
    match kind:
        case "if":
            return run_if(args[0], bodies[0], bodies[1], args[1])
        case "loop":
            return run_loop(args[0], args[1], args[2], bodies[0], args[3], _stacked(attrs))
        case "scan":
            axes = ScanAxes(*(tuple(attrs[n]) for n in ("in_axes", "in_reverse", "out_axes", "out_reverse")))
            return run_scan(args[0], args[1], bodies[0], axes, args[2], _stacked(attrs))
        case "map":
            return run_map(args[0], bodies[0], attrs["n_out"], args[1])


def _stacked(attrs: Mapping[str, Any]) -> tuple[Stacked, ...]:
    pairs = zip(attrs.get("dtypes", ()), attrs.get("shapes", ()), strict=True)
    return tuple(Stacked(d, None if s is None else tuple(s)) for d, s in pairs)


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
