"""Lines of the next row, asked for where data is large: a hint changes no number, and is there by size.

Bound: within 1e-5 of the float64 result, relative to the largest element; with and without hints bit for bit the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hotfuse.ir.dims import evaluate
from hotfuse.ir.text import parse
from hotfuse.lower import lower
from hotfuse.lower.cpu import prefetch
from hotfuse.lower.cpu.tiling import core_for
from hotfuse.tile.program import Instr, Kernel, Loop, Stmt, TileAccess, When
from hotfuse.tile.text import parse as parse_kernel
from hotfuse.tile.text import show
from tests.contract.lowering import Group, group_of, interpret, run_native

CORE = core_for(16, many_registers=True)
R = torch.randn
Case = tuple[Callable[..., Any], list[torch.Tensor]]
CASES: dict[str, Case] = {
    "softmax, three rows": (lambda x: torch.softmax(x, -1), [R(19, 75)]),
    "softmax, row by row": (lambda x: torch.softmax(x * 2, -1), [R(5, 75)]),
    "rms norm and its sum": (lambda x, r, w: ((h := x + r), F.rms_norm(h, (75,), w)), [R(5, 75), R(5, 75), R(75)]),
    "layer norm of halves": (lambda x: F.layer_norm(x, (75,)), [R(5, 75).half()]),
    "layer norm of doubles": (lambda x: F.layer_norm(x, (75,)), [R(5, 75).double()]),
    "one row": (lambda x: F.layer_norm(x, (130,)), [R(1, 130)]),
    "rows that lie apart": (lambda x: F.layer_norm(x, (75,)), [R(5, 160)[:, :75]]),
}
BOUNDS = {torch.float16: 2e-3, torch.float32: 1e-5, torch.float64: 1e-12}


def hints(stmts: tuple[Stmt, ...], under: tuple[Any, ...] = ()) -> Iterator[tuple[Instr, tuple[Any, ...]]]:
    """The prefetches, each with the predicates around it."""
    for s in stmts:
        match s:
            case Instr():
                if s.op == "prefetch":
                    yield s, under
            case Loop():
                yield from hints(s.body, under)
            case When():
                yield from hints(s.body, (*under, s.pred))


def asked(kernel: Kernel) -> set[tuple[str, int]]:
    return {(a.buffer, dict(i.attrs)["write"]) for i, _ in hints(kernel.body) for a in i.args if isinstance(a, TileAccess)}  # type: ignore[misc]


@pytest.mark.parametrize("name", CASES)
def test_hints_change_no_number(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fn, tensors = CASES[name]
    group = group_of(fn, tensors)
    plain = lower(group.graph, CORE)
    assert not asked(plain.kernel)
    monkeypatch.setattr(prefetch, "BEYOND_CACHES_FACTOR", 0)
    lowered = lower(group.graph, CORE)
    assert len(asked(lowered.kernel)) >= 2 or name == "one row"
    assert parse_kernel(show(lowered.kernel)) == lowered.kernel
    exact = fn(*(t.double() for t in tensors))
    want = list(exact) if isinstance(exact, tuple) else [exact]
    before, native = run_native(plain, group, tensors), run_native(lowered, group, tensors)
    for got in (interpret(lowered, group, tensors), native):
        for g, w in zip(got, want, strict=True):
            bound = BOUNDS[g.dtype] * max(1.0, float(w.abs().max()))
            assert float((g.double() - w).abs().max()) <= bound
    for g, w in zip(native, before, strict=True):
        assert torch.equal(g, w)


@pytest.mark.parametrize(
    ("text", "buffers"),
    [
        ("%y: f32[n, 96] = aten.softmax.int(%x, -1)", {("x", 0), ("y", 1)}),
        ("%y: f32[n, 96] = aten.layer_norm.default(%x, [96])", {("x", 0), ("y", 1)}),
    ],
)
def test_large_is_a_question_of_a_calls_sizes(text: str, buffers: set[tuple[str, int]]) -> None:
    group = Group(parse(f"graph g(%x: f32[n, 96]) {{ {text}\n return %y }}"), {})
    lowered = lower(group.graph, CORE)
    assert asked(lowered.kernel) == buffers
    border = prefetch.BEYOND_CACHES_FACTOR * CORE.l2 // (2 * 4 * 96)
    for _, under in hints(lowered.kernel.body):
        (pred,) = under
        assert not evaluate(pred, {"n": border}) and evaluate(pred, {"n": border + 1})
    for rows in (0, 1, 3, border + 1):
        x = R(rows, 96)
        (got,) = run_native(lowered, group, [x])
        (want,) = (torch.softmax(x.double(), -1),) if "softmax" in text else (F.layer_norm(x.double(), (96,)),)
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


def test_a_single_pass_asks_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """One stream is what the processor runs ahead of by itself."""
    monkeypatch.setattr(prefetch, "BEYOND_CACHES_FACTOR", 0)
    for fn in (lambda x: torch.relu(x) + 1, lambda x: x.sum(-1)):
        assert not asked(lower(group_of(fn, [R(5, 75)]).graph, CORE).kernel)
