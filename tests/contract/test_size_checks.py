"""What a path assumes of sizes that data decide is checked before anything runs on them."""

from __future__ import annotations

import pytest
import torch

from hotfuse.backends.library import LibraryBackend
from hotfuse.frontends.paths.path_checks import checked
from hotfuse.ir.graph import Graph
from hotfuse.ir.text import parse, show
from hotfuse.ir.verify import verify
from hotfuse.ops.own.assume import SIZED, OtherPath
from hotfuse.ops.table import packet
from hotfuse.simplify import simplify

ROWS = """graph g(%x: f32[8, 4], %m: bool[8]) {
  %y: f32[6, 4] = aten.index.Tensor(%x, [%m])
  %z: f32[6, 4] = aten.mul.Tensor(%y, 2)
  %n: i64[] = hotfuse.size_of.default(%y, 0)
  aten._assert_async.msg(%n, "a call read 6")
  %s: f32[] = aten.sum.default(%x)
  %c: bool[] = aten.gt.Scalar(%s, 0)
  aten._assert_async.msg(%c, "a call read true")
  return %z, %y
}"""
TWO = """graph g(%x: f32[8, 4], %m: bool[8], %k: bool[8]) {
  %a: f32[6, 4] = aten.index.Tensor(%x, [%m])
  %n: i64[] = hotfuse.size_of.default(%a, 0)
  %u: f32[6, 4] = aten.relu.default(%a)
  %b: f32[6, 4] = aten.index.Tensor(%x, [%k])
  %z: f32[6, 4] = aten.add.Tensor(%u, %b)
  %o: i64[] = hotfuse.size_of.default(%b, 0)
  %e: bool[] = aten.eq.Tensor(%n, %o)
  aten._assert_async.msg(%e, "a call read true")
  return %z
}"""


def ops(graph: Graph) -> list[str]:
    return [packet(n.op).split(".")[1] for n in graph.nodes]


def test_sizes_are_checked_before_they_are_used_and_other_reads_at_the_end() -> None:
    graph = checked(parse(ROWS))
    verify(graph)
    assert parse(show(graph)) == graph
    order = ops(graph)
    assert order.index("sized") < order.index("mul") and order[-1] == "assume", order
    (gate,) = [n for n in graph.nodes if n.op == SIZED]
    readers = [n for n in graph.nodes if any(v.name == "y" for v in n.ins)]
    assert {packet(n.op) for n in readers} == {"hotfuse.size_of", "hotfuse.sized"}, "everything else reads what was checked"
    assert graph.outputs[1] == gate.outs[0]


@pytest.mark.parametrize("rows", [0, 1, 5, 6, 7, 8])
def test_a_call_with_other_sizes_raises_and_runs_nothing_on_them(rows: int) -> None:
    run = LibraryBackend().compile(checked(parse(ROWS)), {}).run
    x, mask = torch.rand(8, 4), torch.arange(8) < rows
    if rows == 6:
        assert torch.equal(run(x, mask)[0], x[mask] * 2)
        with pytest.raises(OtherPath):
            run(-x, mask)
    else:
        with pytest.raises(OtherPath):
            run(x, mask)


def test_a_condition_on_two_sizes_is_checked_where_both_are_there() -> None:
    graph = checked(parse(TWO))
    verify(graph)
    order = ops(graph)
    assert "assume" not in order and order.index("sized") < order.index("add"), order
    run, x = LibraryBackend().compile(graph, {}).run, torch.rand(8, 4)
    six, five = torch.arange(8) < 6, torch.arange(8) < 5
    assert torch.equal(run(x, six, six.flip(0))[0], x[six].relu() + x[six.flip(0)])
    with pytest.raises(OtherPath):
        run(x, six, five)


NUMBER = """graph g(%x: f32[s0, 4], %z: f32[s1, 4], %k: i64[]) {
  %a: i64[] = hotfuse.size_of.default(%z, 0)
  %i: int(u0) = aten.item.default(%k)
  %c: i64[] = aten.clone.default(%k)
  %y: f32[u0, 4] = aten.slice.Tensor(%x, 0, 0, %i)
  %e: bool[] = aten.eq.Tensor(%c, %a)
  aten._assert_async.msg(%e, "a call read true")
  %r: f32[u0, 4] = aten.mul.Tensor(%y, %z)
  %s: f32[4] = aten.sum.dim_IntList(%r, [0])
  return %s
}"""


def test_what_is_assumed_of_a_number_that_is_a_size_is_checked_before_it_is_read() -> None:
    graph = checked(parse(NUMBER))
    verify(graph)
    order = ops(graph)
    assert order.index("sized") < order.index("item") and "assume" not in order, order
    run, x = LibraryBackend().compile(graph, {}).run, torch.rand(8, 4)
    z = torch.rand(3, 4)
    torch.testing.assert_close(run(x, z, torch.tensor(3))[0], (x[:3] * z).sum(0))
    for other in (2, 4):
        with pytest.raises(OtherPath):
            run(x, z, torch.tensor(other))


LATE = """graph g(%x: f32[8, 4], %m: bool[8]) {
  %y: f32[u0, 4] = aten.index.Tensor(%x, [%m])
  %n: i64[] = hotfuse.size_of.default(%y, 0)
  %s: f32[4] = aten.sum.dim_IntList(%y, [0])
  %t: f32[] = aten.sum.default(%s)
  %c: bool[] = aten.gt.Tensor(%n, %t)
  aten._assert_async.msg(%c, "a call read true")
  return %s
}"""


def test_a_check_that_nothing_would_read_is_left_to_the_end() -> None:
    """It would be taken out as what nobody needs, and every call would pass."""
    graph = checked(parse(LATE))
    verify(graph)
    assert ops(graph)[-1] == "assume"
    run, mask = LibraryBackend().compile(graph, {}).run, torch.arange(8) < 5
    torch.testing.assert_close(run(torch.full((8, 4), 0.1), mask)[0], torch.full((4,), 0.5))
    with pytest.raises(OtherPath):
        run(torch.ones(8, 4), mask)


ASSERTED = """graph g(%x: f32[s0, 4], %z: f32[s1, 4], %k: i64[]) {
  %a: int(s1) = aten.sym_size.int(%z, 0)
  %i: int(u0) = aten.item.default(%k)
  %y: f32[s1, 4] = aten.slice.Tensor(%x, 0, 0, %i)
  %b: int(s1) = aten.sym_size.int(%y, 0)
  %e: bool = sym.eq(%b, %a)
  aten._assert_scalar.default(%e, "as many rows as z has")
  %r: f32[s1, 4] = aten.mul.Tensor(%y, %z)
  return %r
}"""


@pytest.mark.parametrize("rows", ["s1", "3"])
def test_what_is_asserted_of_a_size_is_asked_of_it_and_not_of_its_type(rows: str) -> None:
    """Types say what is asserted: two sizes of one expression are not one number before that."""
    graph, _ = simplify(parse(ASSERTED.replace("s1", rows)))
    run, x, z = LibraryBackend().compile(graph, {}).run, torch.rand(8, 4), torch.rand(3, 4)
    torch.testing.assert_close(run(x, z, torch.tensor(3))[0], x[:3] * z)
    for other in (1, 2, 4):
        with pytest.raises(OtherPath):
            run(x, z, torch.tensor(other))
