"""Where the fusion engine meets compilation: groups of a graph, adjusted by prediction before any of them is compiled.

Only a trained model of this machine may change what access classes suggest; roofs alone would not know better. Whether a kernel or
the library runs a group is left to the trial, which measures it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from hotfuse.base.settings import Objective
from hotfuse.compile.learned import foresight, trust
from hotfuse.fusion import explain
from hotfuse.fusion.candidates import Kind
from hotfuse.fusion.engine import Engine
from hotfuse.fusion.forecast import Predictor, Trained
from hotfuse.fusion.groups import Group
from hotfuse.hpm.work import Core
from hotfuse.ir.graph import Graph

KINDS = frozenset(Kind) - {Kind.LIBRARY, Kind.LAYOUT}
"""What is decided here: the library against kernels is decided by trials, layouts before groups are formed."""
MOST_LINES = 24
"""Decisions that are shown."""


def adjusted(
    graph: Graph, groups: Sequence[Group], sizes: Mapping[str, int], core: Core, lowers: Callable[[Graph], str],
    objective: Objective = "latency", predict: Predictor | None = None,
) -> tuple[Graph, tuple[Group, ...], list[str]]:  # fmt: skip
    """A graph's groups as the engine would have them, and its decisions; unchanged where nobody can predict."""
    if predict is None:
        ahead = foresight()
        if ahead is None:
            return graph, tuple(groups), []
        predict = Trained(ahead.predictor)
    engine = Engine(predict, core, objective=objective, bandit=trust(), lowers=lowers, kinds=KINDS)
    found = engine.best(graph, groups, sizes)
    return found.graph, found.groups, explain.lines(found, MOST_LINES)
