"""Which convolutions of a graph lie channels last: the engine prices each region with its conversions, measured kernels decide.

    region   convolutions that hand each other channels-last values; where the order has to change, somebody converts
    rule     channels last, since a pixel's channels are what a convolution sums over
    contest  where a region has to convert and is small enough to be built twice, both orders are built and timed
    copy     where a region reads row-major images, a copy with channels innermost is built and timed as well

A convolution between neighbours that read rows may be better off as it is: what it saves by another order, conversions cost.
Windows that overlap can go through Winograd transforms if channels are innermost, which may pay for a copy that nothing else
asks for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hotfuse.fusion.fusion_engine import Contest, FusionChoice, FusionPlanner
from hotfuse.fusion.groups import Group, group
from hotfuse.fusion.layout import channels_last, entered, regions
from hotfuse.fusion.recomputed_operands import with_own_operands
from hotfuse.ir.graph import Graph
from hotfuse.ops.table import packet

MAX_BUILT = 3
"""Convolutions of a region that are built in both orders."""
MAX_REGIONS = 12
"""Regions that are looked at, in the graph's order; the others go by the rule."""


def laid_out(
    graph: Graph, sizes: Mapping[str, int], engine: FusionPlanner, contest: Contest | None, *, other: bool = False
) -> tuple[Graph, list[FusionChoice]]:
    """The graph in the layout that pays, and a decision for each region.

    `other`: every region in the order that was decided against, for a race.
    """
    found = regions(graph)
    if not found:
        return with_own_operands(graph), []
    chosen, converted = frozenset[int]().union(*found), frozenset[int]()
    choices: list[FusionChoice] = []
    for region in found[:MAX_REGIONS]:
        last, rows = (_grouped(graph, c, converted) for c in (chosen, chosen - region))
        subject = _subject(graph, region)
        measured = contest if len(region) <= MAX_BUILT else None
        if measured is not None and (reads := entered(graph, region, engine.core.lanes)):
            copied = _grouped(graph, chosen, converted | reads)
            choices.append(engine.converting(last, copied, sizes, subject, measured))
            if choices[-1].accepted:
                last, converted = copied, converted | reads
        choices.append(engine.layout(rows, last, sizes, subject, measured))
        if not choices[-1].accepted:
            chosen -= region
    if other:
        chosen = frozenset[int]().union(*found) - chosen
    return with_own_operands(channels_last(graph, chosen, converted)), choices


def _grouped(graph: Graph, chosen: frozenset[int], converted: frozenset[int]) -> tuple[Graph, Sequence[Group]]:
    made = with_own_operands(channels_last(graph, chosen, converted))
    return made, group(made)


def _subject(graph: Graph, region: frozenset[int]) -> str:
    """A region for a reader."""
    ops = dict.fromkeys(packet(graph.nodes[i].op).removeprefix("aten.") for i in sorted(region))
    return f"{'+'.join(ops)} x{len(region)}" if len(region) > 1 else "+".join(ops)
