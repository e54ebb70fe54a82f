"""Where the fusion engine meets compilation: groups of a graph, adjusted by prediction before any of them is compiled.

A trained model of this machine is believed if it did well on what it had not seen (`hpm.trust`). Else it, or rooflines where there
is none, says which changes are worth a look, and only those that were measured to be faster are made. Whether a kernel or the
library runs a group is left to the trial, which measures it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.base.settings import Objective
from hotfuse.compile.learn.learned import foresight, trust
from hotfuse.compile.request_context import RequestSettings, request_settings, strategies
from hotfuse.compile.unit.layouts import laid_out
from hotfuse.fusion import decision_lines
from hotfuse.fusion.dense_images import dense_images
from hotfuse.fusion.forecast import Predictor, Trained
from hotfuse.fusion.fusion_engine import Contest, FusionPlanner, Planned
from hotfuse.fusion.groups import Group
from hotfuse.fusion.kinds import CandidateKind
from hotfuse.fusion.layout import channels_last
from hotfuse.fusion.recomputed_operands import with_own_operands
from hotfuse.fusion.seen_costs import SeenCosts
from hotfuse.ir.graph import Graph
from hotfuse.lower.cpu.tiling import Core

KINDS = frozenset(CandidateKind) - {CandidateKind.LIBRARY, CandidateKind.LAYOUT}
"""What groups are changed by: the library against kernels is decided by trials, layouts before groups are formed."""


@dataclass(frozen=True, slots=True)
class Gate:
    """What stands in for a trained model: rooflines that propose, contests that decide about groups and about layouts."""

    rooflines: Predictor
    contest: Contest
    layouts: Contest | None = None


def asked_of_groups() -> RequestSettings:
    """What groups depend on of what the request in hand asks: other strategies, and single groups, are about kernels."""
    own = request_settings()
    kept = tuple(s for s in own.strategies if s in KINDS or s == CandidateKind.LAYOUT)
    return replace(own, strategies=kept, focus="")


MAX_LINES = 24
"""Decisions that are shown."""


def arranged(
    graph: Graph, sizes: Mapping[str, int], core: Core, lowers: Callable[[Graph], str], objective: Objective = "latency",
    gate: Gate | None = None,
) -> tuple[Graph, list[str]]:  # fmt: skip
    """A graph in the layouts that pay, before groups are formed, and the decisions; by rule where nobody can predict."""
    graph, ahead = dense_images(graph), foresight()
    predict = Trained(ahead.predictor) if ahead is not None else gate.rooflines if gate is not None else None
    if predict is None:
        return with_own_operands(channels_last(graph)), []
    engine = FusionPlanner(predict, core, threads=core.threads, objective=objective, bandit=trust(), lowers=lowers)
    contest = gate.layouts if gate is not None and objective == "latency" else None
    made, choices = laid_out(graph, sizes, engine, contest, other=CandidateKind.LAYOUT.value in strategies())
    return made, [decision_lines.line(c) for c in choices]


def adjusted(
    graph: Graph, groups: Sequence[Group], sizes: Mapping[str, int], core: Core, lowers: Callable[[Graph], str],
    objective: Objective = "latency", predict: Predictor | None = None, gate: Gate | None = None,
    seen: SeenCosts | None = None,
) -> tuple[Graph, tuple[Group, ...], list[str]]:  # fmt: skip
    """A graph's groups as the engine would have them, and its decisions; unchanged where nobody can predict or measure.

    `seen`: what calls showed, which the engine weighs candidates by.
    """
    engine = planner(core, lowers, objective, predict, gate, seen)
    if engine is None:
        return graph, tuple(groups), []
    found = planned(engine, graph, groups, sizes)
    return found.graph, found.groups, decision_lines.lines(found, MAX_LINES)


def planner(
    core: Core, lowers: Callable[[Graph], str], objective: Objective = "latency", predict: Predictor | None = None,
    gate: Gate | None = None, seen: SeenCosts | None = None,
) -> FusionPlanner | None:  # fmt: skip
    """The engine as it is asked on this machine; None where nobody can predict or measure."""
    contest = None
    if predict is None:
        ahead = foresight()
        if ahead is not None and (ahead.believed or gate is not None):
            predict = Trained(ahead.predictor)
        elif gate is not None:
            predict = gate.rooflines
        else:
            return None
        if gate is not None and (ahead is None or not ahead.believed):
            contest = None if objective == "memory" else gate.contest  # bytes need no clock
    only = frozenset(k for k in KINDS if k.value in strategies())
    engine = FusionPlanner(
        predict, core, threads=core.threads, objective=objective, bandit=trust(), lowers=lowers, kinds=only or KINDS,
        seen=seen or SeenCosts(),
    )
    engine.contest = contest
    return engine


def planned(engine: FusionPlanner, graph: Graph, groups: Sequence[Group], sizes: Mapping[str, int]) -> Planned:
    """What the engine makes of groups: by what it predicts alone also of none, else from these on."""
    return engine.best(graph, groups, sizes) if engine.contest is None else engine.plan(graph, groups, sizes)
