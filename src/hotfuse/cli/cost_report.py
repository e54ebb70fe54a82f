"""`hotfuse show --stage costs`: what handing each value on costs, what groups are predicted to take, what the engine decided."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import typer

from hotfuse.base.errors import InputError
from hotfuse.base.settings import Settings
from hotfuse.cli.output import heading, print_json, rows

if TYPE_CHECKING:
    from hotfuse.fusion.closed import UseIndex
    from hotfuse.fusion.groups import Group
    from hotfuse.ir.graph import Graph

MAX_KEPT = 64
"""Profiles of one group that are looked through for the sizes in hand."""
MIN_NODES = 3
"""Operators of a group from which on it says which model it is of."""
MAX_SIZES = 4
"""Sizes that are named where nothing served at those in hand."""
BEFORE_GROUPS = 3
"""Passes of grouping in front of the engine: rules, appends, layouts."""
MAX_EDGES_SHOWN = 40
"""Edges that a terminal is shown, the dearest; JSON has all."""


def show_costs(graph: Graph, shapes: Sequence[tuple[int, ...]], *, as_json: bool) -> None:
    """Print edges, groups and decisions."""
    found = costs(graph, shapes)
    if as_json:
        print_json({"stage": "costs", **found})
        return
    for text in found["notes"]:
        heading(text)
    heading(f"{len(found['groups'])} groups, predicted by {found['predictor']}: {found['total_us']:.1f} us")
    body = [(g["kind"], g["nodes"], _figure(g["us"]), "" if g["measured_us"] is None else _figure(g["measured_us"]),
             _figure(g["uj"]), g["stored"], g["ops"]) for g in found["groups"]]  # fmt: skip
    rows(("group", "nodes", "us", "us served", "uJ", "bytes left", "ops"), body)
    dear = sorted(found["edges"], key=lambda e: -(e["us"] or 0))[:MAX_EDGES_SHOWN]
    weights = ("bytes", "cycles", "us", "uj")
    listed = [(f"%{e['value']}", e["maker"], e["readers"], *(_figure(e[w]) for w in weights), e["source"]) for e in dear]
    rows(("value", "made by", "readers", "bytes", "cycles", "us", "uJ", "source"), listed)
    inside = sum(e["inside"] for e in found["edges"])
    typer.echo(f"# {inside} of {len(found['edges'])} values never leave their kernel; energy is estimated")
    for text in found["decisions"]:
        typer.echo(f"# {text}")


def costs(graph: Graph, shapes: Sequence[tuple[int, ...]]) -> dict[str, Any]:
    """Edges, groups and decisions as plain data: of the graph that tier 1 is planned of, by the same passes and the same engine."""
    from hotfuse.analysis.shapes import Mismatch, bind
    from hotfuse.base.passes import run_all
    from hotfuse.compile.learn.learned import foresight, left_aside
    from hotfuse.compile.unit.grouping import GROUPING, GroupedGraph, first_groups
    from hotfuse.compile.unit.kernel_cache import kernel_cache
    from hotfuse.compile.unit.planning import planned, planner
    from hotfuse.compile.unit.units import grouping_job, measuring
    from hotfuse.fusion.closed import UseIndex
    from hotfuse.fusion.decision_lines import edges, lines
    from hotfuse.ops.table import packet

    sizes = bind(graph, shapes)
    if isinstance(sizes, Mismatch):
        raise InputError("the chosen sizes do not fit the graph", because=str(sizes), hint="fix dims with --dim")
    ahead, aside = foresight(), left_aside()
    job = grouping_job(sizes, Settings().objective, measuring(sizes))
    laid: GroupedGraph = run_all(GROUPING[:BEFORE_GROUPS], graph, job)
    engine = planner(job.core, job.lowers, job.objective, gate=job.gate)
    assert engine is not None  # kernels can be measured here
    found = planned(engine, laid.graph, first_groups(laid.graph), sizes)
    index, shown = UseIndex(found.graph, sizes), " ".join("x".join(map(str, s)) or "scalar" for s in shapes)
    took = {g: us for g in found.groups if (us := _served_us(index, g.nodes, shown)) is not None}
    off = {g: us * 1e-6 / found.costs[g].seconds for g, us in took.items() if found.costs[g].known and found.costs[g].seconds}
    groups = [
        {
            "kind": g.kind, "nodes": len(g.nodes), "us": round(c.seconds * 1e6, 2) if c.known else None,
            "measured_us": took.get(g), "uj": round(c.joules * 1e6, 2) if c.known else None, "stored": c.stored,
            "ops": "+".join(dict.fromkeys(packet(found.graph.nodes[i].op).removeprefix("aten.") for i in g.nodes)),
        }
        for g, c in found.costs.items()
    ]  # fmt: skip
    return {
        "predictor": "rooflines" if ahead is None else f"model {ahead.predictor.model.version}",
        "total_us": found.after.seconds * 1e6,
        "groups": groups, "edges": [e.to_dict() for e in edges(found.graph, found.groups, sizes, kernel_cache().peaks, off)],
        "decisions": [*laid.choices, *lines(found)],
        "notes": [*(f"{why}; predicted by rooflines instead: hotfuse calibrate" for why in aside),
                  *([] if took else _served_otherwise(index, found.groups, shown))],
    }  # fmt: skip


def _served_otherwise(index: UseIndex, groups: Sequence[Group], shapes: str) -> list[str]:
    """Where nothing served at these sizes: those that groups of the same operators did serve at, for who chose sizes."""
    from hotfuse.compile.learn.learned import notes
    from hotfuse.runtime.observe.record import MAX_OPS

    if (kept := notes()) is None:
        return []
    here = {" ".join(index.graph.nodes[i].op for i in g.nodes)[:MAX_OPS] for g in groups if len(g.nodes) >= MIN_NODES}
    rows_ = (r for r, _, _ in kept.store.top_subgraphs(kept.host.machine, MAX_KEPT) if r.tier > 0 and r.sizes != shapes)
    sizes = dict.fromkeys(r.sizes for r in rows_ if r.ops in here)
    return [f"nothing served at {shapes}; groups of these operators did at {', '.join(list(sizes)[:MAX_SIZES])}"] if sizes else []


def _served_us(index: UseIndex, nodes: Sequence[int], shapes: str) -> float | None:
    """What a group took in models that served with it, at these sizes of calls and as many threads, as the profile store has it."""
    from hotfuse.compile.learn.learned import notes
    from hotfuse.ir.hash import structural_hash
    from hotfuse.ir.subgraph import extract

    if (kept := notes()) is None:
        return None
    rows_ = kept.store.subgraphs(structural_hash(extract(index.graph, nodes, "group")), kept.host.machine, MAX_KEPT)
    found = [r for r in rows_ if r.sizes == shapes and r.threads == kept.host.at.threads and r.tier > 0]
    return round(found[0].p50_ns * 1e-3, 3) if found else None


def _figure(number: float | None) -> str:
    """A figure that depends on data is `?`."""
    return "?" if number is None else f"{number:.6g}"
