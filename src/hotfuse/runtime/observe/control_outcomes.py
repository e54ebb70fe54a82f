"""Which way calls go at control nodes: library code that tells it, and what kept calls show before any call was sampled.

Sampling begins behind a model's first plan of kernels. That plan, too, should know which branches calls take and how many trips
loops make, so a few kept calls are run through the library's operators, beside serving.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from hotfuse.backends.library import control_meaning, meaning
from hotfuse.backends.protocol import Run
from hotfuse.backends.pycode import flat_function
from hotfuse.ir.control_bodies import control_name, inside
from hotfuse.ir.graph import Graph, Kind, Node
from hotfuse.machine.device_stream import in_own_stream
from hotfuse.profile.snapshot import ControlSeen

MAX_CALLS = 8
"""Kept calls that are run for it."""


class ToldOutcome(Protocol):
    """Who hears of a control node."""

    def __call__(self, outcome: int, *, loop: bool) -> None:
        """It took its first (1) or second (0) branch, or its loop made so many trips."""
        ...


def telling(node: Node, path: str, listener: Callable[[str], ToldOutcome]) -> tuple[Callable[..., Any], bool]:
    """A node's callable, and whether it gives several values; control nodes tell which way they went, at every depth."""
    if node.kind is not Kind.CONTROL:
        return meaning(node)
    name = control_name(node, path)
    told = listener(name)
    bodies = [
        flat_function(g, lambda n, inner=path: telling(n, inner, listener), {})[0]
        for g, path in ((g, inside(name, i)) for i, g in enumerate(node.graphs))
    ]
    if node.op == "control.if":
        then, other = bodies
        return control_meaning(node, [_taken(then, told, 1), _taken(other, told, 0)]), True
    return _counted(node, bodies, told), True


def _taken(body: Run, told: ToldOutcome, outcome: int) -> Run:
    def run(*args: Any) -> tuple[Any, ...]:
        told(outcome, loop=False)
        return body(*args)

    return run


def _counted(node: Node, bodies: Sequence[Run], told: ToldOutcome) -> Run:
    """A loop that counts its trips; the count is the call's own, so calls from many threads do not meet."""
    local = threading.local()
    (body,) = bodies

    def counting(*args: Any) -> tuple[Any, ...]:
        local.trips += 1
        return body(*args)

    loop = control_meaning(node, [counting])

    def run(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        outer = getattr(local, "trips", 0)  # a loop may run inside itself only through another one
        local.trips = 0
        try:
            outs = loop(*args, **kwargs)
            told(local.trips, loop=True)
        finally:
            local.trips = outer
        return outs

    return run


def outcomes_of(
    graph: Graph, weights: Mapping[str, torch.Tensor], calls: Sequence[Sequence[torch.Tensor]]
) -> dict[str, ControlSeen]:
    """What calls do at the control nodes of a graph, by their names; nothing where it has none."""
    if not any(n.kind is Kind.CONTROL for n in graph.nodes):
        return {}
    seen: dict[str, Counter[int]] = {}
    loops: dict[str, bool] = {}

    def note(name: str, outcome: int, *, loop: bool) -> None:
        seen.setdefault(name, Counter())[outcome] += 1
        loops[name] = loop

    run, _ = flat_function(graph, lambda n: telling(n, "", lambda name: partial(note, name)), weights)
    with torch.no_grad():
        for inputs in calls[:MAX_CALLS]:
            with in_own_stream(inputs):
                run(*inputs)
    return {name: ControlSeen(-1, total, loops[name], tuple((o, k / total) for o, k in found.most_common()))
            for name, found in seen.items() if (total := found.total())}  # fmt: skip
