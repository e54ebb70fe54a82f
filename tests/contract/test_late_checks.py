"""What a graph rests on is one more result on a device, read behind everything else; what may stop a device is not for it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from hotfuse.backends.library import meaning
from hotfuse.backends.pycode import flat_function
from hotfuse.compile.device.late_checks import LateChecks, checked_late, unsafe_behind_reads
from hotfuse.frontends.paths.path_checks import checked
from hotfuse.ir.graph import Graph, Kind, Node, Value
from hotfuse.ir.types import DType, TensorType
from hotfuse.ir.verify import verify
from hotfuse.ops.own.assume import ASSUME, OtherPath
from hotfuse.ops.table import packet
from tests.contract.lowering import group_of

X = torch.randn(4, 8)


def resting(fn: Callable[..., torch.Tensor], *more: torch.Tensor) -> Graph:
    """The graph of a function whose second result says whether the first is right, as tracing a way leaves it."""
    found = group_of(lambda *a: (fn(*a), a[0].sum() > 0), (X, *more))
    y, holds = found.graph.outputs
    assert isinstance(y, Value) and isinstance(holds, Value)
    out = Value("assumed", y.type)
    node = Node(Kind.OPERATOR, ASSUME, (y, holds), (out,))
    return Graph(found.graph.name, found.graph.inputs, found.graph.params, (*found.graph.nodes, node), (out,))


def test_the_condition_is_the_last_result() -> None:
    graph = resting(lambda x: x * 2)
    late = checked_late(graph)
    verify(late)
    assert len(late.outputs) == 2 and not any(packet(n.op) == "hotfuse.assume" for n in late.nodes)
    run = LateChecks(flat_function(late, meaning, {})[0])
    for x in (X.abs(), X.abs() + 1):
        (got,) = run(x)
        assert torch.equal(got, x * 2)
    for x in (-X.abs(), torch.full((4, 8), float("nan"))):
        with pytest.raises(OtherPath):
            run(x)


def test_a_graph_that_rests_on_nothing_stays() -> None:
    graph = group_of(lambda x: x * 2, (X,)).graph
    assert checked_late(graph) is graph and not unsafe_behind_reads(graph) and checked(graph) is graph


def test_several_conditions_become_one() -> None:
    graph = resting(lambda x: x * 2)
    flag = Value("flag", TensorType(DType.BOOL, ()))
    more = Node(Kind.OPERATOR, "aten._assert_async.msg", (flag, "no"), ())
    graph = Graph(graph.name, (*graph.inputs, flag), graph.params, (*graph.nodes, more), graph.outputs)
    run = LateChecks(flat_function(checked_late(graph), meaning, {})[0])
    assert torch.equal(run(X.abs(), torch.tensor(True))[0], X.abs() * 2)
    for x, holds in ((X.abs(), False), (-X.abs(), True)):
        with pytest.raises(OtherPath):
            run(x, torch.tensor(holds))


TABLE, AT = torch.randn(5, 8), torch.tensor([0, 4, 1, 2])


@pytest.mark.parametrize(("first", "unsafe"), [(True, ""), (False, "aten.embedding")])
def test_numbers_that_another_way_checks_are_not_read_by(first: bool, unsafe: str) -> None:
    """A model that looks at its data and then reads a table by them may have looked because of that."""

    def model(x: torch.Tensor, table: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if first:
            rows = torch.nn.functional.embedding(at, table)
            return x + rows, rows.sum() > 0
        holds = (at < 5).all() & (x.sum() > 0)
        return x + torch.nn.functional.embedding(at, table), holds

    found = group_of(model, (X, TABLE, AT)).graph
    y, holds = found.outputs
    assert isinstance(y, Value) and isinstance(holds, Value)
    out = Value("assumed", y.type)
    nodes = (*found.nodes, Node(Kind.OPERATOR, ASSUME, (y, holds), (out,)))
    assert unsafe_behind_reads(Graph(found.name, found.inputs, found.params, nodes, (out,))) == unsafe
