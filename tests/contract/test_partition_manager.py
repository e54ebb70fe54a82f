"""The partition manager: every adjustment keeps the graph's dependences, says what it did, and costs next to nothing."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from hotfuse.backends.library import LibraryBackend
from hotfuse.ir.graph import Graph
from hotfuse.ir.subgraph import extract
from hotfuse.ir.text import parse
from hotfuse.ir.verify import verify
from hotfuse.partition.change import MAX_HISTORY, CannotChange, PartitionChange
from hotfuse.partition.cut import cut
from hotfuse.partition.manager import (
    Partitioned,
    fuse,
    part_needs,
    partitioned,
    partitioning,
    split,
)
from hotfuse.runtime.plan import build


def random_graph(rng: random.Random, n: int, reach: int = 8) -> Graph:
    lines = ["graph main(%x: f32[4]) {"]
    names = ["%x"]
    for i in range(n):
        a, b = (names[rng.randrange(max(0, len(names) - reach), len(names))] for _ in range(2))
        op = rng.choice([f"aten.tanh.default({a})", f"aten.add.Tensor({a}, {b})", f"aten.mul.Tensor({a}, {b})"])
        lines.append(f"  %n{i}: f32[4] = {op}")
        names.append(f"%n{i}")
    return parse("\n".join([*lines, f"  return {', '.join(names[-3:])}", "}", ""]))


def each_alone(graph: Graph) -> Partitioned:
    return partitioned(graph, [[i] for i in range(len(graph.nodes))], "one node each")


def check(p: Partitioned) -> None:
    """The laws: every node once, each partition convex, each after what it reads."""
    assert sorted(i for part in p.parts for i in part.nodes) == list(range(len(p.graph.nodes)))
    for part in p.parts:
        extract(p.graph, part.nodes, "part")
    ready: set[int] = set()
    needs = part_needs(p)
    for part in p.parts:
        assert needs[part.number] <= ready
        ready.add(part.number)
    made = partitioning(p)
    verify(made.graph)
    assert [q.last - q.first for q in made.parts] == [len(part) for part in p.parts]


def path_around(p: Partitioned, a: int, b: int) -> bool:
    """Whether a path leads from one to the other through a third: by search, as an oracle."""
    needs = part_needs(p)

    def reaches(start: int, goal: int, direct: bool) -> bool:
        waiting, seen = [m for m in needs[start] if direct or m != goal], set[int]()
        while waiting:
            at = waiting.pop()
            if at == goal:
                return True
            if at not in seen:
                seen.add(at)
                waiting.extend(needs[at])
        return False

    return reaches(a, b, False) or reaches(b, a, False)


@pytest.mark.parametrize("seed", range(12))
def test_random_adjustments_keep_the_laws(seed: int) -> None:
    rng = random.Random(seed)
    graph = random_graph(rng, 30)
    p = each_alone(graph)
    refused = accepted = 0
    for _ in range(60):
        numbers = [part.number for part in p.parts]
        if rng.random() < 0.6 and len(numbers) > 1:
            a, b = rng.sample(numbers, 2)
            legal = not path_around(p, a, b)
            try:
                q = fuse(p, a, b, "random")
            except CannotChange:
                assert not legal
                refused += 1
                continue
            assert legal
        else:
            big = [part for part in p.parts if len(part) > 1]
            if not big:
                continue
            part = rng.choice(big)
            q = split(p, part.number, rng.randrange(1, len(part)), "random")
        assert q is not p and q.history.diffs[:-1] == p.history.diffs
        p = q
        accepted += 1
        check(p)
    assert refused and accepted
    x = torch.randn(4)
    want = LibraryBackend().compile(graph, {}).run(x)
    got = build(partitioning(p), LibraryBackend(), {}).run(x)
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


DIAMOND = """
graph main(%x: f32[4]) {
  %a: f32[4] = aten.tanh.default(%x)
  %b: f32[4] = aten.exp.default(%a)
  %c: f32[4] = aten.sin.default(%a)
  %d: f32[4] = aten.add.Tensor(%b, %c)
  return %d
}
"""


def test_fusing_moves_what_lies_between() -> None:
    p = each_alone(parse(DIAMOND))
    q = fuse(p, 0, 2, "both read little", saved_us=1.5)
    assert [part.nodes for part in q.parts] == [(0, 2), (1,), (3,)]
    check(q)
    diff = q.history.diffs[-1]
    assert (diff.change, diff.gone, diff.added, diff.nodes) == (PartitionChange.FUSE, (0, 2), (4,), 2)
    assert str(diff) == "fuse 0 2 -> 4: both read little (saved_us=1.5)"
    assert [part.nodes for part in p.parts] == [(0,), (1,), (2,), (3,)]  # the old value is what it was


def test_a_cycle_is_refused_by_name() -> None:
    p = each_alone(parse(DIAMOND))
    with pytest.raises(CannotChange, match="lies between") as caught:
        fuse(p, 0, 3, "no")
    assert "1, 2" in caught.value.because
    for bad in ((7, 0), (0, 7), (1, 1)):
        with pytest.raises(CannotChange):
            fuse(p, *bad, "no")


def test_a_partition_of_one_node_cannot_be_cut() -> None:
    p = each_alone(parse(DIAMOND))
    for at in (0, 1, 2):
        with pytest.raises(CannotChange, match="cannot be cut"):
            split(p, 1, at, "no")


def test_partitions_of_different_devices_stay_apart() -> None:
    p = each_alone(parse(DIAMOND))
    p = replace(p, parts=tuple(replace(part, device="cuda:0") if part.number == 1 else part for part in p.parts))
    with pytest.raises(CannotChange, match="different devices"):
        fuse(p, 1, 0, "no")


def test_groups_must_hold_every_node_once_and_run_in_order() -> None:
    graph = parse(DIAMOND)
    for groups in ([[0, 1]], [[0], [1], [1], [2], [3]], [[0], [], [1, 2, 3]]):
        with pytest.raises(CannotChange):
            partitioned(graph, groups, "no")
    with pytest.raises(CannotChange, match="comes later"):
        partitioned(graph, [[0, 3], [1], [2]], "no")


def test_the_first_cut_can_be_adjusted_and_its_history_printed() -> None:
    first = cut(random_graph(random.Random(1), 40), max_nodes=10)
    p = partitioned(first.graph, [range(c.first, c.last) for c in first.parts], "the first cut", [c.cut for c in first.parts])
    assert [len(part) for part in p.parts] == [10, 10, 10, 10]
    q = fuse(split(p, 1, 4, "it loses"), 4, 0, "fits a kernel")
    check(q)
    assert q.history.lines() == [
        "0: begin nothing -> 0 1 2 3: the first cut", "1: split 1 -> 4 5: it loses", "2: fuse 0 4 -> 6: fits a kernel",
    ]  # fmt: skip
    assert q.history.diffs[2].to_dict()["gone"] == [0, 4]


def test_history_is_bounded_and_counts_what_it_forgot() -> None:
    p = each_alone(parse(DIAMOND))
    for i in range(MAX_HISTORY + 40):
        last = p.parts[-1].number
        p = fuse(p, p.parts[-2].number, last, "again") if i % 2 == 0 else split(p, last, 1, "again")
    assert len(p.history.diffs) == MAX_HISTORY and len(p.history) == MAX_HISTORY + 41
    assert "41 earlier steps" in p.history.lines()[0]


class Counted(tuple[Any, ...]):
    """What nodes read, counting how often anyone looks."""

    looks = 0

    def __getitem__(self, i: Any) -> Any:
        Counted.looks += 1
        return super().__getitem__(i)

    def __iter__(self) -> Iterator[Any]:
        Counted.looks += len(self)
        return super().__iter__()


def test_replanning_a_thousand_nodes_looks_at_each_a_few_times_only() -> None:
    graph = random_graph(random.Random(3), 1000, reach=30)
    p = partitioned(graph, [range(i, min(i + 5, 1000)) for i in range(0, 1000, 5)], "fives")
    p = replace(p, needs=Counted(p.needs))
    Counted.looks = 0
    q = split(p, 100, 2, "it loses")
    assert Counted.looks == 0
    fuse(q, 99, 200, "neighbours")
    assert Counted.looks <= 50
    Counted.looks = 0
    with contextlib.suppress(CannotChange):
        fuse(q, 0, 199, "far apart")
    assert Counted.looks <= 2000
    Counted.looks = 0
    partitioning(q)
    assert Counted.looks <= 3000
