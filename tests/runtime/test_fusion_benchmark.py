"""The fusion benchmark's judgement: what is lost beyond what labels can tell is called worse, the rest is not."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.fusion import Cases, Pieces, Problem, report
from benchmarks.fusion_cases import BLOCKS, graph_of
from hotfuse.fusion.closed import UseIndex

TEXT, (SIZES, *_) = BLOCKS["norms"]


def problem() -> Problem:
    index = UseIndex(graph_of(TEXT, SIZES), {})
    nodes = range(len(index.graph.nodes))
    alone = [(i,) for i in nodes]
    return Problem("norms", index, alone, [tuple(nodes)], alone, index, [alone, [tuple(nodes)]])


def timed(p: Problem, alone: tuple[float, float], whole: tuple[float, float]) -> Pieces:
    """Both labels of single nodes and of the whole graph as one piece, by kernels and the library alike."""
    pieces = Pieces()
    for nodes, labels in [(n, alone) for n in p.none] + [(p.always[0], whole)]:
        for turn, seconds in enumerate(labels):
            for kernel in (True, False):
                pieces.times[pieces.key(p.index, nodes), kernel, turn] = seconds
    return pieces


def test_pieces_that_both_plans_have_cancel() -> None:
    pieces = Pieces(times={("a", True, 0): 1.0, ("a", True, 1): 2.0, ("b", True, 0): 3.0, ("b", True, 1): 3.2})
    a, b = ("a", True), ("b", True)
    assert pieces.uncertain(Counter({a: 3}), Counter({a: 3})) == 0.0
    assert pieces.uncertain(Counter({a: 1, b: 2}), Counter({a: 1})) == pytest.approx(2 * 0.2 / 2**0.5)


@pytest.mark.parametrize(
    ("alone", "whole", "worse"),
    [((1.0, 1.05), (7.0, 6.2), 0), ((1.0, 1.1), (6.01, 6.01), 1)],
)
def test_a_loss_is_named_where_labels_can_tell_it(
    alone: tuple[float, float], whole: tuple[float, float], worse: int
) -> None:
    """Single nodes are chosen by the first labels and lose by the second: by less than labels repeat, or by more."""
    p = problem()
    found = report(Cases([("pointwise", p)], [p], []), timed(p, alone, whole))
    assert found["vs_always_fuse"] == pytest.approx(whole[1] / (6 * alone[1])) and found["vs_always_fuse"] < 1
    assert len(found["worse"]) == worse and all("always fusing" in w for w in found["worse"])
