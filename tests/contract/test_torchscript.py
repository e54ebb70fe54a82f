# pyright: reportPrivateUsage=false
"""Library calls as TorchScript functions: the same numbers, exceptions and gradients as calls from Python."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from hotfuse.backends.library import LibraryBackend, meaning
from hotfuse.backends.pycode import flat_function
from hotfuse.backends.torchscript import scripted
from hotfuse.ir.graph import Graph
from hotfuse.ir.text import parse
from hotfuse.ir.verify import verify

MIXED = """graph g(%x: f32[n, 6], %i: i64[n], %z: f32[]) {
  param %w: f32[6, 6] = "w"
  param %e: f32[9, 6] = "e"
  %n: int(n) = aten.sym_size.int(%x, 0)
  %m: int((n * 2)) = sym.mul(%n, 2)
  %k: int(((n * 2) + -1)) = sym.sub(%m, 1)
  %f: int(n) = sym.floordiv(%m, 2)
  %a: f32[n, 6] = aten.linear.default(%x, %w)
  %b: f32[n, 6] = aten.embedding.default(%e, %i)
  %c: f32[n, 6] = aten.add.Tensor(%a, %b, alpha=0.5)
  %p: f32[n, 2], %q: f32[n, 4] = aten.split_with_sizes.default(%c, [2, 4], 1)
  %r: f32[n, 6] = aten.cat.default([%q, %p], 1)
  %s: f32[(n * 2), 3] = aten.view.default(%r, [%m, 3])
  %v: f32[(n * 2), 3] = aten.clamp.default(%s, -inf, 2)
  %h: f16[(n * 2), 3] = aten.to.dtype(%v, f16)
  %t: f32[(n * 2), 3] = aten.to.dtype(%h, f32)
  %y: f32[n, 6] = aten.reshape.default(%t, [%f, 6])
  %o: bool[n, 6] = aten.gt.Scalar(%y, 0)
  %u: f32[n, 6] = aten.where.self(%o, %y, %z)
  %g: f32[n, 6], %d: i64[n, 6] = aten.sort.default(%u, 1, True)
  return %g, %d, %o, %k
}"""


def _weights() -> dict[str, torch.Tensor]:
    return {"w": torch.randn(6, 6), "e": torch.randn(9, 6)}


def _both(graph: Graph, weights: dict[str, torch.Tensor]) -> tuple[Any, Any, Any]:
    """Called from Python node by node; as regions; what was made of them."""
    found = scripted(graph, meaning)
    assert found is not None
    return flat_function(graph, meaning, weights)[0], flat_function(found.graph, found.meaning, weights)[0], found


@pytest.mark.parametrize("n", [0, 1, 7])
def test_the_same_as_calls_from_python(n: int) -> None:
    graph, weights = verify(parse(MIXED)), _weights()
    plain, run, found = _both(graph, weights)
    assert len(found.graph.nodes) == 1 and not any(r.failed for r in found.regions)
    x = torch.randn(n, 12)[:, ::2]
    if n == 7:
        x[0, 0], x[1, 1] = torch.nan, torch.inf
    inputs = x, torch.randint(0, 9, (n,)), torch.tensor(-1.5)
    with torch.no_grad():
        want, got = plain(*inputs), run(*inputs)
    assert len(got) == len(want) and got[3] == want[3] == 2 * n - 1
    for a, b in zip(want[:3], got[:3], strict=True):
        assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) and a.dtype is b.dtype and a.stride() == b.stride()
    assert not any(r.failed for r in found.regions)


def test_it_raises_what_eager_raises_and_goes_on() -> None:
    plain, run, found = _both(verify(parse(MIXED)), _weights())
    good = torch.randn(2, 6), torch.tensor([0, 8]), torch.tensor(0.0)
    bad = good[0], torch.tensor([0, 9]), good[2]
    with torch.no_grad():
        with pytest.raises(Exception) as of_nodes:
            plain(*bad)
        with pytest.raises(type(of_nodes.value)) as of_region:
            run(*bad)
        assert str(of_region.value) == str(of_nodes.value)
        assert not found.regions[0].failed and torch.equal(run(*good)[0], plain(*good)[0])


def test_a_region_at_fault_is_left_and_told() -> None:
    """Where the nodes answer what the function does not, they serve from then on."""
    _, run, found = _both(verify(parse(MIXED)), _weights())
    asked: list[int] = []

    def broken(*_args: Any) -> Any:
        asked.append(1)
        raise RuntimeError("no such thing")

    found.regions[0]._function = broken
    with torch.no_grad():
        for _ in range(3):
            run(torch.randn(2, 6), torch.tensor([0, 8]), torch.tensor(0.0))
    assert len(asked) == 1 and found.failures() == ("a region of the graph left TorchScript: no such thing",)


def test_gradients_flow_where_they_are_recorded() -> None:
    weights = _weights()
    weights["w"].requires_grad_()
    run = LibraryBackend().compile(verify(parse(MIXED)), weights).run
    x = torch.randn(3, 6)
    run(x, torch.zeros(3, dtype=torch.int64), torch.tensor(0.0))[0].sum().backward()
    assert weights["w"].grad is not None and weights["w"].grad.abs().sum() > 0


def test_weights_that_get_other_memory_are_read() -> None:
    weights = _weights()
    parameter = weights["w"] = torch.nn.Parameter(weights["w"])
    run = LibraryBackend().compile(verify(parse(MIXED)), weights).run
    inputs = torch.randn(3, 6), torch.zeros(3, dtype=torch.int64), torch.tensor(0.0)
    with torch.no_grad():
        before = run(*inputs)[0]
        parameter.data = torch.randn(6, 6)
        assert not torch.equal(run(*inputs)[0], before)


def test_what_torchscript_cannot_say_splits_regions() -> None:
    """A write into an argument stays a call of its own, and what it alone reads is no input of the regions around it."""
    body = "\n".join(f"  %a{i + 1}: f32[4] = aten.sin.default(%a{i})" for i in range(5))
    after = "\n".join(f"  %b{i + 1}: f32[4] = aten.cos.default(%b{i})" for i in range(5))
    graph = parse(
        f"graph g(%a0: f32[4], %z: f32[4]) {{\n{body}\n  %b0: f32[4] = aten.add_.Tensor(%a5, %z)\n{after}\n  return %b5, %a2\n}}"
    )
    plain, run, found = _both(graph, {})
    assert [n.op.rstrip("0123456789") for n in found.graph.nodes] == ["hotfuse.region", "aten.add_.Tensor", "hotfuse.region"]
    assert [v.name for v in found.graph.nodes[0].ins] == ["a0"]
    x, z = torch.randn(4), torch.randn(4)
    with torch.no_grad():
        assert all(torch.equal(a, b) for a, b in zip(plain(x, z), run(x, z), strict=True))


def test_threads_share_it_and_keep_their_settings() -> None:
    plain, run, found = _both(verify(parse(MIXED)), _weights())
    wrong: list[str] = []

    def calls(seed: int) -> None:
        made = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for n in range(1, 20):
                inputs = torch.randn(n, 6, generator=made), torch.randint(0, 9, (n,), generator=made), torch.tensor(0.0)
                if not torch.equal(run(*inputs)[0], plain(*inputs)[0]):
                    wrong.append(f"thread {seed}, {n} rows")
        if not torch._C._get_graph_executor_optimize():
            wrong.append("TorchScript's own setting was left behind")

    threads = [threading.Thread(target=calls, args=(i,)) for i in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong and not found.regions[0].failed


def test_automatic_casts_are_eagers() -> None:
    plain, run, _ = _both(verify(parse(MIXED)), _weights())
    inputs = torch.randn(3, 6), torch.zeros(3, dtype=torch.int64), torch.tensor(0.0)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(run(*inputs)[0], plain(*inputs)[0])


ROWS = """graph g(%x: f32[3, 4, 4], %i: i64[2], %z: f32[3, 2, 4]) {
  %a: f32[3, 4, 4] = aten.neg.default(%x)
  %r1: f32[3, 4] = aten.select.int(%a, 1, 0)
  %a1: f32[3, 4, 4] = aten.select_scatter.default(%a, %r1, 1, 1)
  %v2: f32[3, 2, 4] = aten.slice.Tensor(%a1, 1, 0, 2)
  %c2: f32[3, 2, 4] = aten.clone.default(%v2)
  %r2: f32[3, 4] = aten.sum.dim_IntList(%c2, [1])
  %a2: f32[3, 4, 4] = aten.select_scatter.default(%a1, %r2, 1, 2)
  %v3: f32[3, 3, 4] = aten.slice.Tensor(%a2, 1, 0, 3)
  %r3: f32[3, 4] = aten.sum.dim_IntList(%v3, [1])
  %a3: f32[3, 4, 4] = aten.slice_scatter.default(%a2, %z, 1, 2, 4)
  %a4: f32[3, 4, 4] = aten.select_scatter.default(%a3, %r3, 1, 3)
  %a5: f32[3, 4, 4] = aten.index_add.default(%a4, 1, %i, %z)
  return %a5
}"""
"""Rows that are filled one by one and read meanwhile: the first copy is needed, since `neg` is not known to give new memory."""

KEPT = (
    ("", "%a2", "read by the caller, too"),
    ("  %k: f32[3, 4, 4] = aten.mul.Tensor(%a1, 2)\n", "%k", "the old tensor is read later"),
    ("  %k: f32[3, 4] = aten.mul.Tensor(%v, 2)\n", "%k", "a view of it is read later"),
)


def test_rows_are_written_where_nobody_reads_the_old_tensor() -> None:
    graph = verify(parse(ROWS))
    plain, run, found = _both(graph, {})
    assert len(found.graph.nodes) == 1 and found.text.count("into its argument") == 4
    for _ in range(2):
        given = torch.randn(3, 4, 4), torch.tensor([3, 0]), torch.randn(3, 2, 4)
        before = [t.clone() for t in given]
        with torch.no_grad():
            (expected,), (got,) = plain(*given), run(*given)
        assert torch.equal(got, expected) and got.stride() == expected.stride()
        assert all(map(torch.equal, given, before)) and not any(r.failed for r in found.regions)


@pytest.mark.parametrize(("more", "out", "_what"), KEPT)
def test_a_tensor_that_somebody_still_reads_is_copied(more: str, out: str, _what: str) -> None:
    graph = verify(parse("graph g(%x: f32[3, 4, 4], %r: f32[3, 4]) {\n  %a1: f32[3, 4, 4] = aten.clone.default(%x)\n"
                         "  %v: f32[3, 4] = aten.select.int(%a1, 1, 0)\n  %s: f32[3, 4] = aten.add.Tensor(%r, %v)\n"
                         f"  %a2: f32[3, 4, 4] = aten.select_scatter.default(%a1, %s, 1, 0)\n{more}"
                         "  %b: f32[3, 4, 4] = aten.add.Tensor(%a2, 1)\n"
                         f"  %a3: f32[3, 4, 4] = aten.select_scatter.default({'%a2' if not more else '%b'}, %r, 1, 1)\n"
                         f"  return %a3, %b, {out}\n}}"))  # fmt: skip
    plain, run, found = _both(graph, {})
    assert found.text.count("into its argument") == (0 if more else 1)
    given = torch.randn(3, 4, 4), torch.randn(3, 4)
    with torch.no_grad():
        assert all(map(torch.equal, plain(*given), run(*given)))


def test_a_piece_that_lies_in_the_same_memory_is_copied_first() -> None:
    graph = verify(parse("graph g(%x: f32[4, 4]) {\n  %a: f32[4, 4] = aten.clone.default(%x)\n"
                         "  %t: f32[4, 4] = aten.transpose.int(%a, 0, 1)\n  %v: f32[4, 3] = aten.slice.Tensor(%t, 1, 0, 3)\n"
                         "  %b: f32[4, 4] = aten.slice_scatter.default(%a, %v, 1, 1, 4)\n"
                         "  %c: f32[4, 4] = aten.add.Tensor(%b, 1)\n  return %c\n}"))  # fmt: skip
    plain, run, found = _both(graph, {})
    x = torch.randn(4, 4)
    with torch.no_grad():
        assert torch.equal(plain(x)[0], run(x)[0]) and "into its argument" not in found.text
