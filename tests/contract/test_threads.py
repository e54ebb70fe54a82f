"""Native runs on any number of threads: the same results, one region of the runtime per run, and faults that are reported."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hotfuse import Settings
from hotfuse.backends.llvm.threads import parallel
from hotfuse.compile.unit import units
from hotfuse.compile.variants.variant_search import VariantDecision
from hotfuse.lower.cpu import thread_work
from hotfuse.pipeline import compile_tier1
from hotfuse.runtime.plan import Plan
from tests.contract.lowering import group_of
from tests.races import kernels_win

INLINE = Settings(capture="inline")
THREADS = (1, 2, 3, 7, 16)
HIDDEN, HEADS = 96, 3


@pytest.fixture(autouse=True)
def any_work_is_worth_a_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Clocks decide nothing here, and small kernels are divided as large ones are."""
    kernels_win(monkeypatch)
    monkeypatch.setattr(units, "measuring", lambda _sizes: None)
    monkeypatch.setattr(units.VariantSearch, "decide", lambda _self: VariantDecision())
    for name in ("WORK_PER_THREAD", "AWAKE_WORK", "MEETING_WORK"):
        monkeypatch.setattr(thread_work, name, 1)
    before = torch.get_num_threads()
    with torch.no_grad():
        yield
    torch.set_num_threads(before)


class Layer(torch.nn.Module):
    """Products, attention, norms, a softmax and a reduction."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(HIDDEN, 3 * HIDDEN), torch.nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = torch.nn.Linear(HIDDEN, 250), torch.nn.Linear(250, HIDDEN)
        self.norm, self.table = torch.nn.LayerNorm(HIDDEN), torch.nn.Embedding(50, HIDDEN)

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.norm(self.table(ids))
        b, s, d = x.shape
        q, k, v = (t.view(b, s, HEADS, d // HEADS).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        x = self.norm(x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, s, d)))
        x = self.norm(x + self.down(F.gelu(self.up(x))))
        return torch.softmax(x, -1), x.mean(1)


def compiled(fn: Any, sample: torch.Tensor, symbolic: bool) -> Plan:
    found = group_of(fn, [sample], symbolic, constants=True)
    return compile_tier1(found.graph, found.weights, [sample], INLINE)


def regions() -> int:
    team = parallel.runtime().team
    return 0 if team is None else team.regions


@pytest.mark.parametrize("made_for", [1, 16])
def test_any_number_of_threads_gives_the_same(made_for: int) -> None:
    model = Layer().eval()
    torch.set_num_threads(made_for)
    plan = compiled(model, torch.randint(0, 50, (2, 37)), symbolic=True)
    assert len(plan.runs) == 1, [a.source for a in plan.artifacts]
    for shape in ((2, 37), (1, 128), (3, 2), (1, 1), (16, 5), (2, 0), (0, 4)):
        ids = torch.randint(0, 50, shape)
        wanted = model(ids)
        for threads in THREADS:
            torch.set_num_threads(threads)
            before = regions()
            got = plan.run(ids)
            used = regions() - before
            assert used == (1 if threads > 1 and ids.numel() > 1 else 0) or ids.numel() < 8, (shape, threads, used)
            for a, b in zip(got, wanted, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, equal_nan=True)
    assert plan.counters()["fell_back"] == 0


def test_a_fault_on_any_thread_is_the_models_to_answer() -> None:
    """An index outside the table, wherever in the call it is, and whoever reads it."""
    model = Layer().eval()
    torch.set_num_threads(7)
    plan = compiled(model, torch.randint(0, 50, (2, 40)), symbolic=True)
    for place in (0, 41, 79):
        ids = torch.randint(0, 50, (2, 40))
        fine = plan.run(ids)
        broken = ids.clone()
        broken.view(-1)[place] = 50
        with pytest.raises(IndexError):
            plan.run(broken)
        for a, b in zip(plan.run(ids), fine, strict=True):
            assert torch.equal(a, b), "the team goes on as before"
    assert plan.counters()["fell_back"] == 3
