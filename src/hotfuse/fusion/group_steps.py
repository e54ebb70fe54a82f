"""Steps from groups to other groups, as the engine takes them, and how two plans differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from hotfuse.fusion.candidates import FusionCandidate, anchor_kind
from hotfuse.fusion.closed import Key, UseIndex
from hotfuse.fusion.groups import Group
from hotfuse.fusion.kinds import GroupKind
from hotfuse.fusion.order import GroupOrder
from hotfuse.ir.graph import Graph
from hotfuse.ops.table import packet

Side = tuple[Graph, bool]
"""A closed piece, and whether the library runs it."""


def conversions(plain: Graph, other: Graph, sizes: Mapping[str, int]) -> tuple[list[int], int]:
    """The nodes that only the other graph has, by number, and the bytes that they read and write."""
    names = {v.name for n in plain.nodes for v in n.outs}
    added = [i for i, n in enumerate(other.nodes) if not any(v.name in names for v in n.outs)]
    index = UseIndex(other, sizes)
    return added, sum(2 * (index.size(v) or 0) for i in added for v in other.nodes[i].outs)


def differing(one: Sequence[tuple[Key, Side]], two: Sequence[tuple[Key, Side]]) -> tuple[list[tuple[Key, Side]], ...]:
    """What only one of two plans has, of both."""
    found: list[list[tuple[Key, Side]]] = []
    for here, there in ((one, two), (two, one)):
        left = Counter((k, s[1]) for k, s in there)
        kept: list[tuple[Key, Side]] = []
        for k, s in here:
            if left[k, s[1]]:
                left[k, s[1]] -= 1
            else:
                kept.append((k, s))
        found.append(kept)
    return tuple(found)


def regrouped(order: GroupOrder, found: Sequence[FusionCandidate], made: set[Group]) -> tuple[GroupOrder, int, set[Group]]:
    """Groups once a candidate is taken wherever it still fits: (groups then, how often it did, what is new)."""
    now, count = order, 0
    for c in found:
        groups = {g: True for g in now.groups}
        if not all(g in groups for g in c.old):
            continue
        trying = [g for g in groups if g not in c.old] + list(c.new)
        try:
            now = GroupOrder(order.index, trying)
        except ValueError:
            continue
        made = (made - set(c.old)) | set(c.new)
        count += 1
    return now, count, made


def rewritten(order: GroupOrder, c: FusionCandidate, sizes: Mapping[str, int]) -> tuple[GroupOrder, set[Group]]:
    """The groups of a rewritten graph: the new ones, and the old ones under their nodes' new numbers."""
    assert c.rewritten is not None
    place = {old: new for new, old in enumerate(c.rewritten.origin) if old >= 0}
    gone = set(c.old)
    kept = [Group(tuple(sorted(place[i] for i in g.nodes)), g.kind) for g in order.groups if g not in gone]
    index = UseIndex(c.rewritten.graph, sizes)
    return GroupOrder(index, [*kept, *c.new]), set(c.new)


def ops(index: UseIndex, groups: Sequence[Group]) -> str:
    """What groups compute, for a reader: anchors first."""
    texts: list[str] = []
    for g in groups:
        nodes = [index.graph.nodes[i] for i in g.nodes]
        anchors_first = sorted(nodes, key=lambda n: anchor_kind(n) is GroupKind.ROWS)
        names = dict.fromkeys(packet(n.op).removeprefix("aten.") for n in anchors_first)
        listed = list(names)
        texts.append("+".join(listed[:4]) + ("+..." if len(listed) > 4 else ""))
    return " | ".join(texts)
