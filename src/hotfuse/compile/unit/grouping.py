"""The passes that group a graph, in a worker: layouts that pay, groups by access class, changed by the fusion engine, in order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from hotfuse.analysis.growth import read_in_any_strides
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.base.passes import Pass, Where
from hotfuse.base.settings import Objective
from hotfuse.compile.unit.planning import Gate, adjusted, arranged
from hotfuse.fusion.groups import Group, group, reordered
from hotfuse.fusion.seen_costs import SeenCosts
from hotfuse.ir.graph import Graph, Value, makers, output_values
from hotfuse.ir.retype import revalued
from hotfuse.ir.types import Layout, TensorType
from hotfuse.ir.verify import verify
from hotfuse.lower.cpu.tiling import Core
from hotfuse.lower.run.places import is_view, operand
from hotfuse.ops.movement import APPEND, append_order
from hotfuse.simplify import simplify
from hotfuse.simplify.experts import experts_in_order


@dataclass(frozen=True, slots=True)
class GroupingJob:
    """What grouping knows besides the graph."""

    sizes: Mapping[str, int]
    """Of a real call."""
    core: Core
    lowers: Callable[[Graph], str]
    """Why a piece has no kernel; empty if it has one."""
    objective: Objective = "latency"
    gate: Gate | None = None
    seen: SeenCosts | None = None
    """What calls showed of the graph."""
    outer_symbols: frozenset[str] = frozenset()
    """Symbols of the graph around this one, which is a branch or a loop's body: its own inputs need not show them."""


@dataclass(frozen=True, slots=True)
class GroupedGraph:
    """A graph and which of its nodes become one kernel; no groups before they are formed."""

    graph: Graph
    groups: tuple[Group, ...] = ()
    choices: tuple[str, ...] = ()
    """What was decided on the way, for `explain()`."""


def appended(graph: Graph) -> Graph:
    """The graph with caches that grow as nodes of their own, whose results lie so that more can be appended to them.

        %y = cat((%past, %new), 2)   f32[1, 4, s0 + 1, 64]   ->   %y = append(%past, %new, 2)   f32[1, 4, s0 + 1, 64]{2,0,1,3}
    """
    grown = {g.node: g.dim for g in read_in_any_strides(graph)}
    if not grown:
        return graph
    nodes = list(graph.nodes)
    laid: dict[str, Value] = {}
    for i, dim in grown.items():
        (out,), (joined, *_) = nodes[i].outs, nodes[i].args
        assert isinstance(out.type, TensorType) and isinstance(joined, tuple)
        laid[out.name] = Value(out.name, replace(out.type, layout=Layout(append_order(len(out.type.shape), dim))))
        nodes[i] = replace(nodes[i], op=APPEND, args=(*joined, dim), attrs=())
    return revalued(replace(graph, nodes=tuple(nodes)), lambda v: laid.get(v.name, v))


def _layouts(graph: Graph, job: GroupingJob) -> GroupedGraph:
    made, choices = arranged(graph, job.sizes, job.core, job.lowers, job.objective, job.gate)
    return GroupedGraph(made, (), tuple(choices))


def _groups(found: GroupedGraph, job: GroupingJob) -> GroupedGraph:
    graph, groups, choices = adjusted(found.graph, first_groups(found.graph), job.sizes, job.core, job.lowers, job.objective,
                                      gate=job.gate, seen=job.seen)  # fmt: skip
    return GroupedGraph(graph, groups, (*found.choices, *choices))


def first_groups(graph: Graph) -> tuple[Group, ...]:
    """The groups that the engine begins with, by access class."""
    apart = shared_views(graph)
    return tuple(group(graph, lambda node: not any(v.name in apart for v in node.outs)))


def shared_views(graph: Graph) -> frozenset[str]:
    """Views that lead to outputs which share memory with other outputs or with inputs. A kernel would give each memory of its own,
    and a write into one result would not be seen in the other, as it is with the model's own code.
    """
    maker = makers(graph)
    chains: dict[str, list[str]] = {}  # by the value whose memory it is: the outputs that lie in it, and the views up to them
    outputs: dict[str, int] = {}
    for out in dict.fromkeys(v.name for v in output_values(graph)):
        name, passed = out, list[str]()
        while name in maker and is_view(node := graph.nodes[maker[name]]) and (below := operand(node, 0)) is not None:
            passed.append(name)
            name = below.name
        outputs[name] = outputs.get(name, 0) + 1
        chains.setdefault(name, []).extend(passed)
    return frozenset(view for base, views in chains.items() if outputs[base] > 1 or base not in maker for view in views)


def _order(found: GroupedGraph, _job: object) -> GroupedGraph:
    """Each group's nodes side by side, groups in the order that they need each other."""
    at, groups = 0, list[Group]()
    for g in found.groups:
        groups.append(replace(g, nodes=tuple(range(at, at + len(g.nodes)))))
        at += len(g.nodes)
    return GroupedGraph(reordered(found.graph, found.groups), tuple(groups), found.choices)


def _well_formed(found: Graph | GroupedGraph, job: Any) -> object:
    graph = found if isinstance(found, Graph) else found.graph
    return verify(graph, job.outer_symbols if isinstance(job, GroupingJob) else ())


ORDER: Pass[GroupedGraph, GroupedGraph, Any] = Pass(
    "order", GroupedGraph, GroupedGraph, _order, _well_formed, Where.WORKER, always=True
)
"""Of any target."""
GROUPING = (
    Pass("rules", Graph, Graph, lambda graph, _: simplify(experts_in_order(graph))[0], _well_formed, Where.WORKER),
    Pass("appends", Graph, Graph, lambda graph, _: appended(graph), _well_formed, Where.WORKER),
    Pass("layouts", Graph, GroupedGraph, _layouts, _well_formed, Where.WORKER),
    Pass("groups", GroupedGraph, GroupedGraph, _groups, _well_formed, Where.WORKER),
    ORDER,
)
