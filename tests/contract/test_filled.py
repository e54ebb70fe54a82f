"""Tensors that are filled piece by piece: put together once, and the same numbers whatever the pieces are."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from hotfuse.base.settings import Settings
from hotfuse.ops.table import packet
from hotfuse.pipeline import compile_tier0
from hotfuse.simplify import simplify_captured
from hotfuse.simplify.filled import filled_at_once
from tests.contract.lowering import Group, group_of

SCATTERS = ("aten.select_scatter", "aten.slice_scatter")
T = torch.Tensor
aten = torch.ops.aten


def put(x: T, piece: T, dim: int, index: int) -> T:
    """`x[..., index, ...] = piece` as capture has it: the copy says what is written, of the part's type."""
    part = aten.copy.default(aten.select.int(x, dim, index), piece)
    return aten.select_scatter.default(x, part, dim, index)


def put_range(x: T, piece: T, dim: int, start: int | None, stop: int | None) -> T:
    return aten.slice_scatter.default(x, piece, dim, start, stop)


def scatters(group: Group) -> tuple[int, set[str]]:
    graph, _ = simplify_captured(group.graph)
    return sum(packet(n.op) in SCATTERS for n in graph.nodes), {packet(n.op) for n in graph.nodes}


def check(fn: Callable[..., T], xs: list[T], left: int | None, *, symbolic: bool = False) -> set[str]:
    group = group_of(fn, xs, symbolic=symbolic)
    graph, _ = simplify_captured(group.graph)
    want = fn(*xs)
    (got,) = compile_tier0(graph, group.weights, Settings()).run(*xs)
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    assert got.stride() == want.stride()
    count, ops = scatters(group)
    assert left is None or count == left
    return ops


@pytest.mark.parametrize("symbolic", [False, True])
def test_every_place_once_is_a_stack(symbolic: bool) -> None:
    def fill(x: T) -> T:
        h, out = x[:, 0] * 0, torch.zeros(2, 5, 3)
        for t in range(5):
            h = torch.tanh(x[:, t] + h)
            out = put(out, h, 1 if t % 2 else -2, t if t % 3 else t - 5)
        return out

    if symbolic:
        check(fill, [torch.randn(2, 5, 3)], None, symbolic=True)
    else:
        assert "aten.stack" in check(fill, [torch.randn(2, 5, 3)], 0)


def test_what_was_written_last_reads_what_was_written_before() -> None:
    """`out[t] = f(out[t - 1])`, and the first place stays what it was."""

    def fill(x: T) -> T:
        out = x
        for t in range(1, 4):
            out = put(out, aten.select.int(out, 0, t - 1).sin() + aten.select.int(out, 0, t), 0, t)
        return out

    ops = check(fill, [torch.randn(4, 3)], 0)
    assert "aten.cat" in ops


def test_pieces_that_overlap_and_gaps() -> None:
    def fill(x: T, a: T, b: T, c: T) -> T:
        out = put_range(x, a, 1, 2, 6)
        out = put_range(out, b, 1, 4, None)
        out = put_range(out, c, 1, -5, -4)
        return out * 2

    check(fill, [torch.randn(2, 9), torch.randn(2, 4), torch.randn(2, 5), torch.randn(2, 1)], 0)


def test_a_stage_in_between_that_is_read_or_returned_stays() -> None:
    def read(x: T, a: T, b: T) -> T:
        one = put(x, a, 0, 1)
        return put(one, b, 0, 2) + one.sum(0, keepdim=True)

    assert check(read, [torch.randn(3, 4), torch.randn(4), torch.randn(4)], 2)

    def returned(x: T, a: T, b: T) -> tuple[T, T]:
        one = put(x, a, 0, 1)
        return one, put(one, b, 0, 2)

    assert scatters(group_of(returned, [torch.randn(3, 4), torch.randn(4), torch.randn(4)]))[0] == 2


def test_what_reaches_the_caller_shares_no_memory_with_an_argument() -> None:
    def fill(x: T, a: T) -> tuple[T, T]:
        out = put(put(x, a, 0, 0), a.sin(), 0, 1)
        return out, aten.select.int(out, 0, 0).view(2, 2)

    xs = [torch.randn(3, 4), torch.randn(4)]
    group = group_of(fill, xs)
    graph, _ = simplify_captured(group.graph)
    _, got = compile_tier0(graph, group.weights, Settings()).run(*xs)
    assert torch.equal(got, xs[1].view(2, 2)) and got.data_ptr() != xs[1].data_ptr()


def test_another_dim_or_type_ends_a_row() -> None:
    def dims(x: T, a: T, b: T) -> T:
        return put(put(x, a, 0, 1), b, 1, 2)

    check(dims, [torch.randn(3, 4), torch.randn(4), torch.randn(3)], 2)

    def types(x: T, a: T, b: T) -> T:
        return put(put(x, a, 0, 1), b, 0, 2)

    check(types, [torch.randn(3, 4), torch.randn(4).double(), torch.randint(9, (4,))], 0)  # copies of another type convert


def test_pieces_that_are_not_numbers_stay_themselves() -> None:
    def fill(x: T, a: T) -> T:
        return put(put(x, a, 0, 0), a / 0, 0, 2)

    check(fill, [torch.full((3, 2), float("nan")), torch.tensor([0.0, -float("inf")])], 0)


@pytest.mark.parametrize("seed", range(12))
def test_random_rows(seed: int) -> None:
    """Random pieces in random places, parts read in between."""
    drawn = random.Random(seed)
    sizes = [drawn.randint(1, 6), drawn.randint(1, 6)]
    steps = []
    for _ in range(drawn.randint(2, 7)):
        dim = drawn.randint(0, 1) if drawn.random() < 0.3 else 0
        start = drawn.randrange(sizes[dim])
        steps.append((dim, start, drawn.randint(start, sizes[dim]), drawn.choice(["put", "range", "read", "part"])))

    def fill(x: T, y: T) -> T:
        out, more = x, y
        for dim, start, stop, what in steps:
            if what == "put":
                out = put(out, aten.select.int(more, dim, start).sin(), dim, start)
            elif what == "range":
                out = put_range(out, aten.slice.Tensor(more, dim, start, stop).cos(), dim, start, stop)
            elif what == "read":
                out = put(out, aten.select.int(out, dim, start) + 1, dim, start)
            else:
                more = more + aten.slice.Tensor(out, dim, start, start + 1)
        return out + more

    check(fill, [torch.randn(sizes), torch.randn(sizes)], None)


def test_a_graph_without_rows_is_the_same_graph() -> None:
    group = group_of(lambda x, a: put(x, a, 0, 1) * 2, [torch.randn(3, 4), torch.randn(4)])
    assert filled_at_once(group.graph) == (group.graph, 0)


def test_a_piece_of_another_type_is_read_as_it_was_rounded() -> None:
    """The operator converts what it is given; who reads the place again must not get more digits."""

    def fill(x: T) -> T:
        out, fits = torch.zeros(4, 3), torch.zeros(4, 3)
        for t in range(4):
            out, fits = aten.select_scatter.default(out, x[t].double() / 3, 0, t), put(fits, x[t] + 1, 0, t)
        return fits * (out[1].double() * 1e8 - x[1].double() / 3 * 1e8).float()

    check(fill, [torch.randn(4, 3)], None)


def test_views_of_what_was_filled_lie_as_in_the_model() -> None:
    """Put together at once, it is row by row whatever was filled."""

    def fill(x: T) -> T:
        out = torch.zeros(5, 2, 3).permute(1, 0, 2) + x[:, :1]
        for t in range(5):
            out = put(out, x[:, t] + 1, 1, t)
        return out[..., 0]

    given = [torch.randn(2, 5, 3)]
    group = group_of(fill, given)
    graph, _ = simplify_captured(group.graph)
    (got,) = compile_tier0(graph, group.weights, Settings()).run(*given)
    assert torch.equal(got, fill(*given)) and got.stride() == fill(*given).stride()
