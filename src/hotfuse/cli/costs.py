"""`hotfuse show --stage costs`: what handing each value on costs, what groups are predicted to take, what the engine decided."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import typer

from hotfuse.base.errors import InputError
from hotfuse.base.settings import from_env
from hotfuse.cli.output import heading, print_json, rows

if TYPE_CHECKING:
    from hotfuse.fusion.closed import UseIndex
    from hotfuse.ir.graph import Graph

MOST_KEPT = 64
"""Profiles of one group that are looked through for the sizes in hand."""
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
    """Edges, groups and decisions as plain data."""
    from hotfuse.analysis.shapes import Mismatch, bind
    from hotfuse.compile.learn.learned import foresight, left_aside
    from hotfuse.compile.unit.kernel_cache import kernel_cache, piece_of
    from hotfuse.compile.unit.planning import arranged
    from hotfuse.compile.unit.units import measuring
    from hotfuse.fusion.closed import UseIndex
    from hotfuse.fusion.engine import FusionPlanner
    from hotfuse.fusion.explain import edges, lines
    from hotfuse.fusion.forecast import RooflinePredictor, Trained
    from hotfuse.fusion.groups import group
    from hotfuse.ops.table import packet
    from hotfuse.simplify import simplify

    sizes = bind(graph, shapes)
    if isinstance(sizes, Mismatch):
        raise InputError("the chosen sizes do not fit the graph", because=str(sizes), hint="fix dims with --dim")
    ahead, aside = foresight(), left_aside()
    predict = RooflinePredictor(kernel_cache().peaks) if ahead is None else Trained(ahead.predictor)

    def lowers(piece: Graph) -> str:
        return kernel_cache().lowers(piece_of(piece, range(len(piece.nodes)), sizes))

    ready, layouts = arranged(simplify(graph)[0], sizes, kernel_cache().core, lowers, from_env().objective, measuring(sizes))
    found = FusionPlanner(predict, kernel_cache().core, objective=from_env().objective).plan(ready, group(ready), sizes)
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
        "decisions": [*layouts, *lines(found)],
        "notes": [f"{why}; predicted by rooflines instead: hotfuse calibrate" for why in aside],
    }  # fmt: skip


def _served_us(index: UseIndex, nodes: Sequence[int], shapes: str) -> float | None:
    """What a group took in models that served with it, at these sizes of calls and as many threads, as the profile store has it."""
    from hotfuse.compile.learn.learned import notes
    from hotfuse.ir.hash import structural_hash
    from hotfuse.ir.subgraph import extract

    if (kept := notes()) is None:
        return None
    rows_ = kept.store.subgraphs(structural_hash(extract(index.graph, nodes, "group")), kept.host.machine, MOST_KEPT)
    found = [r for r in rows_ if r.sizes == shapes and r.threads == kept.host.at.threads and r.tier > 0]
    return round(found[0].p50_ns * 1e-3, 3) if found else None


def _figure(number: float | None) -> str:
    """A figure that depends on data is `?`."""
    return "?" if number is None else f"{number:.6g}"
