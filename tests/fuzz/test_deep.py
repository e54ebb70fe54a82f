"""Planning deep random graphs is bounded: steps grow about linearly with nodes, whatever reads whatever."""

from __future__ import annotations

import pytest
import torch

from hotfuse.lower.common.effort import MAX_STEPS
from tests.fuzz.deep import deep_graph, planned, traced

STEPS_PER_NODE = 1500
"""Several times what graphs take on the whole; one group of nested windows that is followed naively takes a hundred times that."""


@pytest.mark.parametrize("seed", range(4))
def test_steps_grow_with_nodes(seed: int) -> None:
    graph = traced(seed, 80)
    found = planned(graph)
    assert found.steps <= STEPS_PER_NODE * found.nodes, f"seed {seed}: {found}"


def test_five_hundred_ops() -> None:
    found = planned(traced(104, 500))
    assert found.nodes >= 500 and found.kernels > 50
    assert found.steps <= STEPS_PER_NODE * found.nodes, found


def test_one_group_takes_no_more_than_its_share() -> None:
    assert MAX_STEPS < STEPS_PER_NODE * 500, "a single group could take what a whole graph may"


def test_the_same_seed_makes_the_same_graph() -> None:
    one, two = deep_graph(7, 30), deep_graph(7, 30)
    torch.testing.assert_close(one(*one.inputs), one(*one.inputs), equal_nan=True)
    assert str(one) == str(two)
