"""How often each graph of a nest runs in one call: execution frequencies, from what sampled calls did at its control nodes.

    main graph                    1 run a call
      if %y, taken 2% of the time
        then                      0.02
          loop %z, 50 trips
            body                  0.02 x 50 = 1
        else                      0.98

A unit of compilation is worth what it saves in a run times the runs of the graphs that it stands in: code of a branch that nobody
takes comes last, code that a loop repeats comes first. Where nothing was seen, sides of a branch are equally likely and loops make
a few trips. What was seen is shrunk towards that, so nothing is ever certain: a branch that none of eight samples took is thought
to be taken in one call of ten.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hotfuse.analysis.cost import BodyRuns
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.control_bodies import IF, SCAN, control_name, inside
from hotfuse.ir.dims import evaluate, symbols
from hotfuse.ir.graph import Node, Value
from hotfuse.ir.types import TensorType
from hotfuse.profile.snapshot import ControlSeen

Outcomes = Mapping[str, ControlSeen]
"""What was seen of control nodes, by the names that `ir.control_bodies.control_name` gives them."""
LIKELY_TRIPS = 8.0
"""Of a loop that nobody watched and whose count no size tells: what static estimates take for one."""
DOUBT = 2.0
"""Samples that a frequency assumed ahead counts as."""


@dataclass(frozen=True, slots=True)
class ControlBodies:
    """A control node of a graph, and the places of its bodies in the list of graphs."""

    node: Node
    bodies: Sequence[int]


def frequencies(graphs: Sequence[Sequence[ControlBodies]], outcomes: Outcomes, sizes: Mapping[str, int]) -> tuple[float, ...]:
    """Expected runs a call of every graph in a list, the main one first, each with the control nodes in it."""
    found = [0.0] * len(graphs)

    def enter(place: int, runs: float, path: str) -> None:
        found[place] += runs
        for nested in graphs[place]:
            name = control_name(nested.node, path)
            seen = outcomes.get(name)
            for body, where in enumerate(nested.bodies):
                enter(where, runs * runs_of_body(nested.node, body, seen, sizes), inside(name, body))

    if graphs:
        enter(0, 1.0, "")
    return tuple(found)


def runs_of_body(node: Node, body: int, seen: ControlSeen | None, sizes: Mapping[str, int]) -> float:
    """How often a body is expected to run each time that its control node does."""
    if (known := _scanned(node, sizes)) is not None:
        return known
    assumed = 0.5 if node.op == IF else LIKELY_TRIPS
    of_late = observed_runs(node, body, seen)
    if seen is None or of_late is None:
        return assumed
    return (seen.n * of_late + DOUBT * assumed) / (seen.n + DOUBT)


def observed_runs(node: Node, body: int, seen: ControlSeen | None) -> float | None:
    """How often it ran in calls that were seen, on average; None where none was."""
    total = sum(share for _, share in seen.outcomes) if seen is not None else 0.0
    if seen is None or not total:
        return None
    if node.op == IF:
        return sum(s for outcome, s in seen.outcomes if outcome == 1 - body) / total  # a true condition takes the first body
    return sum(trips * s for trips, s in seen.outcomes) / total


def observed(outcomes: Outcomes) -> BodyRuns:
    """Like `observed_runs`, in the form that `analysis.cost` asks for: control nodes by name."""
    return lambda node, path, body: observed_runs(node, body, outcomes.get(control_name(node, path)))


def _scanned(node: Node, sizes: Mapping[str, int]) -> float | None:
    """The trips of a scan, which are a size of what it goes through; None where no call's sizes tell it."""
    if node.op != SCAN or len(node.args) < 2 or not isinstance(node.args[1], tuple):
        return None
    axes = node.attr("in_axes")
    for value, axis in zip(node.args[1], axes if isinstance(axes, tuple) else (), strict=False):
        if isinstance(value, Value) and isinstance(value.type, TensorType) and isinstance(axis, int):
            length = value.type.shape[axis]
            return float(evaluate(length, sizes)) if symbols(length) <= sizes.keys() else None
    return None


def sides(node: Node) -> tuple[str, ...]:
    """What the bodies of a control node are called."""
    return ("then", "else") if node.op == IF else ("its body",)
