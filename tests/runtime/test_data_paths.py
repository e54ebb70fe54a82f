"""Programs whose Python reads tensor data: as eager on every path, in graphs on those that calls take often (decision 160)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hotfuse
from hotfuse.base.settings import Settings
from hotfuse.runtime.samples import CallSamples
from hotfuse.runtime.serve.other_paths import WINDOW, PathBalance
from hotfuse.runtime.site import Entry

D = 16
Call = Callable[[int], tuple[Any, ...]]


class _Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, D), nn.Linear(D, D)


class Validates(_Two):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.isnan(x).any():
            raise ValueError("NaN in the input")
        if not (x > -50).all():  # what `assert` does; pytest's own one reaches all that pytest holds, and is watched then
            raise AssertionError("out of range")
        return self.a(x)


class Chooses(_Two):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x).relu() if x.mean() > 0 else self.b(x).tanh()


class Scales(_Two):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        most = x.abs().max().item()
        if most > 1:
            x = x / most
        return self.a(x)


class Boxes(_Two):
    def forward(self, x: torch.Tensor, least: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.a(x).sigmoid().amax(-1)
        keep = scores > least
        if keep.sum() == 0:
            return x.new_zeros((0, D)), scores.new_zeros((0,))
        return x[keep], scores[keep]


class Experts(_Two):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(D, 4, bias=False), nn.ModuleList(nn.Linear(D, D) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        w, ids = self.gate(x).softmax(-1).topk(2, -1)
        out = torch.zeros_like(x)
        for e in torch.zeros(4).index_fill(0, ids.flatten(), 1.0).nonzero():
            rows, k = torch.where(ids == e)
            out.index_add_(0, rows, self.experts[int(e)](x[rows]) * w[rows, k, None])
        return out


class Steps(_Two):
    def forward(self, x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        for _ in range(int(n)):
            x = self.a(x).tanh()
        return x


class Converges(_Two):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        k = 0
        while (x * x).mean() > 1e-2 and k < 6:
            x, k = self.a(x) * 0.5, k + 1
        return x


class Kinds(_Two):
    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        kinds = torch.unique(ids)
        if len(kinds) == 1:
            return self.a(x)
        return self.b(x) * len(kinds) if 2 in ids else self.a(x) - self.b(x)


class Lengths(_Two):
    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.a(x[i, :n]).sum(0) for i, n in enumerate(lengths.tolist())])


class Maps(_Two):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.vmap(lambda row: torch.dot(row, row) * row)(self.a(x))


class Compares(_Two):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if torch.equal(x, y):
            return self.a(x)
        return self.a(x) + self.b(y) if torch.allclose(x, y, atol=1.0) else self.b(y)


class Spares(_Two):
    """As masks of transformers: what would spare work is asked for where nothing is traced."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            if type(mask) is torch.Tensor and bool((mask == 1).all()):
                continue
            x = x * mask
        return self.a(x) if x.mean() > 0 else self.b(x)


class Names(_Two):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.a(x)
        return {"positive": h} if h.sum() > 0 else {"negative": h}


class Writes(_Two):
    def forward(self, x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        if x.mean() > 0:
            total.add_(1)
        return self.a(x) + total


def _x(*shape: int, by: float = 0.0) -> torch.Tensor:
    return torch.randn(*shape or (8, D)) + by


def _near(i: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = _x()
    return x, x + (0.0, 0.1, 9.0)[i % 3]


class Chunks(nn.Module):
    """As Longformer does: numbers that do not depend on data are tensors, too, and are sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(D, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if bool((x.sum() > 0).item()):
            x = self.fc(x)
        chunks = torch.div(x.size(0), 2, rounding_mode="trunc")
        y = x.view(chunks, 2, D)
        return y.sum(1) + x[x[:, 0] > 0].sum()


class Pads(_Two):
    """As codecs do: how much to pad by is kept in a buffer, and depends on it and on data."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("left", torch.tensor(2))
        self.rnn = nn.LSTM(D, 4, batch_first=True)  # wants to know how many steps there are

    def forward(self, x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        if max(self.left, n) > 5:
            return self.b(x)
        y = nn.functional.pad(self.a(x).T, (self.left, n - 1))
        return self.rnn(nn.functional.pad(y, pad=[n, self.left // 2], value=1.0).T[None])[0]


class Picks(_Two):
    """Tracing makes a constant of each list, and gives it the same name on each path."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x)[[0, 2, 1]] if x.sum() > 0 else self.b(x)[[1, 0, 3]] * 2


PROGRAMS: dict[str, tuple[type[_Two], Call, float]] = {
    "validates": (Validates, lambda i: (_x() * (float("nan") if i == 11 else -100 if i == 13 else 1),), 0.8),
    "chooses": (Chooses, lambda i: (_x(by=0.5 if i % 3 else -0.5),), 0.8),
    "scales": (Scales, lambda i: (_x() * (1.0 if i % 2 else 0.01) if i != 17 else _x() * float("nan"),), 0.7),
    "boxes": (Boxes, lambda i: (_x(), torch.tensor(0.7 if i % 4 else 2.0)), 0.7),
    "experts": (Experts, lambda i: (_x(2 if i % 5 == 4 else 8, D),), 0.5),
    "steps": (Steps, lambda i: (_x(), torch.tensor(i % 3)), 0.6),
    "converges": (Converges, lambda i: (_x() * (1 + i % 2),), 0.6),
    "kinds": (Kinds, lambda i: (_x(), torch.randint(0, 1 + i % 3, (8,))), 0.1),
    "lengths": (Lengths, lambda i: (_x(3, 6, D), torch.randint(0, 7, (3,))), 0.9),
    "maps": (Maps, lambda i: (_x(),), 0.9),
    "chunks": (Chunks, lambda i: (_x(by=0.5 if i % 4 else -0.5),), 0.6),
    "pads": (Pads, lambda i: (_x(), torch.tensor(1 + i % 2)), 0.6),
    "picks": (Picks, lambda i: (_x().abs() * (1 - 2 * (i % 2)),), 0.6),
    "compares": (Compares, _near, 0.6),
    "spares": (Spares, lambda i: (_x(by=0.5 if i % 3 else -0.5), torch.ones(8, 1) if i % 2 else torch.rand(8, 1).round()), 0.6),
    "names": (Names, lambda i: (_x(by=0.5 if i % 4 else -0.5),), 0.3),
    "writes": (Writes, lambda i: (_x(by=0.5 if i % 4 else -0.5), torch.zeros(D)), 0.4),
}  # fmt: skip


def _outcome(call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    try:
        return call(*args)
    except Exception as e:
        return type(e).__name__, str(e).splitlines()[0]  # pytest writes further ones


def _jit(model: nn.Module, **settings: Any) -> Any:
    return hotfuse.jit(model, settings=Settings(capture="inline", **settings))


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_call_is_answered_as_in_eager(name: str) -> None:
    make, data, share = PROGRAMS[name]
    model = make().eval()
    fast, calls = _jit(model, tiers=0), 48
    with torch.no_grad():
        for i in range(calls):
            args = data(i)
            given = copy.deepcopy(args)
            want, got = _outcome(model, args), _outcome(fast, given)
            assert type(got) is type(want)
            if isinstance(want, tuple) and isinstance(want[0], str):
                assert got == want
            else:
                torch.testing.assert_close(got, want, equal_nan=True)
            torch.testing.assert_close(given, args, equal_nan=True)  # what the call wrote, and what it did not
    assert fast.stats()["calls_per_tier"]["0"] >= share * calls


def test_generated_code_decides_by_itself() -> None:
    model = Chooses().eval()
    fast = _jit(model)
    with torch.inference_mode():
        for i in range(60):
            x = _x(by=0.5 if i % 3 else -0.5)
            torch.testing.assert_close(fast(x), model(x))
        nothing = torch.full((8, D), float("nan"))
        torch.testing.assert_close(fast(nothing), model(nothing), equal_nan=True)  # of NaN no comparison holds
    text = str(fast.explain(full=True))
    assert "2 paths through code that reads its data" in text and "control.if" in text
    assert fast.stats()["calls_per_tier"]["1"] >= 40


def test_gradients_follow_the_way_of_the_call() -> None:
    model = Chooses()
    fast = _jit(model, tiers=0)
    for i in range(20):
        x = _x(by=0.5 if i % 3 else -0.5)
        got, want = fast(x), model(x)
        torch.testing.assert_close(got, want)
        used = model.a.weight if x.mean() > 0 else model.b.weight
        torch.testing.assert_close(*(torch.autograd.grad(y.sum(), used)[0] for y in (got, want)))


def test_too_many_ways_leave_the_model_alone_and_say_so() -> None:
    class Trims(_Two):
        def forward(self, x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
            return self.a(x[:, : int(n)]).mean(1)

    model = Trims().eval()
    fast = _jit(model, tiers=0)
    with torch.no_grad():
        for i in range(200):
            x, n = _x(2, 64, D), torch.tensor(1 + i * 37 % 61)
            torch.testing.assert_close(fast(x, n), model(x, n))
    assert "took another path through code that reads their data" in str(fast.explain())
    counts = fast.stats()["calls_per_tier"]
    assert counts["module"] > 3 * counts["0"]


class Sieve(_Two):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for i in range(10):
            y = self.a(y).relu() if x[0, i] > 0 else self.b(y).tanh() - i
        return y


def test_nobody_follows_paths_that_every_call_has_of_its_own() -> None:
    """Captures went on for a minute beside calls, which took 12% longer."""
    model = Sieve().eval()
    fast = _jit(model, tiers=0)
    with torch.no_grad():
        for i in range(400):
            x = _x(4, D)
            x[0, :10] = torch.tensor([1.0 if (i * 621) >> b & 1 else -1.0 for b in range(10)])  # each of 1,024 once
            torch.testing.assert_close(fast(x), model(x))
    assert "nearly every call takes a path of its own" in str(fast.explain(full=True))
    assert 3 <= fast.stats()["captures"] <= 5


def test_a_graph_answers_hardly_any_call_or_some() -> None:
    balance = PathBalance(missed=16)
    assert [balance.answered_hardly_any(calls) for calls in (16, 17, 18, 19, 24)] == [True, True, True, False, False]


def test_a_balance_weighs_what_strayed_calls_cost() -> None:
    frugal, costly = PathBalance(), PathBalance()
    rests = [frugal.miss(4 * i, own_s=1.0, plan_s=0.2, lost_s=0.0) for i in range(1, 60)]
    assert not any(rests)  # three of four calls take a fifth of the time
    rests = [costly.miss(4 * i, own_s=1.0, plan_s=0.9, lost_s=0.0) for i in range(1, 60)]
    assert [r for r in rests if r][:3] == [WINDOW, 2 * WINDOW, 4 * WINDOW]
    assert "were not tried" in costly.text(240) and costly.text(240).startswith("59 of 240 calls")


def test_a_balance_weighs_the_time_between_a_failed_check_and_the_own_code() -> None:
    cheap, dear = PathBalance(), PathBalance()
    assert not any(cheap.miss(5 * i // 4, own_s=1.0, plan_s=0.02, lost_s=0.1) for i in range(1, 60))
    assert any(dear.miss(5 * i // 4, own_s=1.0, plan_s=0.02, lost_s=0.4) for i in range(1, 60))


def test_what_raising_takes_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = hotfuse.jit(Chooses().eval(), settings=Settings(capture="inline", tiers=0))
    lost, counted = list[float](), PathBalance.miss

    def noted(balance: PathBalance, calls: int, own_s: float, plan_s: float, lost_s: float) -> int:
        lost.append(lost_s)
        return counted(balance, calls, own_s, plan_s, lost_s)

    with torch.no_grad():
        for _ in range(3):
            fast(_x(4, D).abs())
        monkeypatch.setattr(PathBalance, "miss", noted)
        fast(-_x(4, D).abs())
    assert len(lost) == 1 and lost[0] > 0.0


def test_misses_count_however_many_calls_no_plan_was_tried_for() -> None:
    balance = PathBalance()
    for call in (9_000, 9_010, 9_020):  # the model's own code answered those before
        assert not balance.wants_another(call)
        balance.miss(call, own_s=1.0, plan_s=0.2, lost_s=0.0)
    balance.missed += 1  # another thread's: whoever asks next is not the one that sees just three
    assert balance.wants_another(9_030)
    balance.asked()
    assert not balance.wants_another(9_031)
    rare = PathBalance()
    for call in range(0, 4_000, 100):
        rare.miss(call, own_s=1.0, plan_s=0.2, lost_s=0.0)
    assert not rare.wants_another(4_000)


def test_kept_calls_that_the_graph_is_not_for_prove_nothing() -> None:
    samples = CallSamples(1 << 20)
    samples.note((8,), [torch.tensor(1.0)])
    for number in (2.0, -3.0, 4.0):  # the model's own code answered: nobody knows which path they take
        samples.note((8,), [torch.tensor(number)], fits=False)
    assert [float(c[0]) for c in samples.several(9)] == [1.0]
    assert samples.vet(lambda call: bool(call[0] > 0)) == (2, 1)
    assert sorted(float(c[0]) for c in samples.several(9)) == [1.0, 2.0, 4.0]


def _entry(fast: Any) -> Entry:
    (entry,) = (e for s in fast._engine.sites.values() for e in s.entries)
    return entry


def test_where_own_code_answers_the_other_way_is_found_and_plans_are_proven() -> None:
    model = Chooses().eval()
    fast = _jit(model, hot_calls=64, watch=False)
    with torch.no_grad():
        for _ in range(4):
            fast(_x(by=0.5))
        entry = _entry(fast)
        entry.own, entry.own_ratio = True, 0.9  # as live calls may decide
        for i in range(400):
            x = _x(by=0.5 if i % 2 else -0.5)
            torch.testing.assert_close(fast(x), model(x))
        found = _entry(fast)
    assert found is not entry and found.balance is not None and found.balance.traced == 2
    assert fast.stats()["calls_per_tier"]["1"] > 100


@pytest.mark.parametrize("tier", [0, 1])
def test_a_plan_that_raises_on_a_way_that_it_has_is_withdrawn(tier: int) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("out of order")

    model = Chooses().eval()
    fast = _jit(model, tiers=tier, watch=False)
    with torch.no_grad():
        for i in range(60):
            fast(_x(by=0.5 if i % 3 else -0.5))
        entry = _entry(fast)
        assert entry.plan.tier == tier
        entry.plan = replace(entry.plan, run=broken)
        if tier == 0:
            entry.baseline = entry.plan
        x = _x(by=0.5)
        torch.testing.assert_close(fast(x), model(x))
    assert fast.stats()["events"]["drop.run_failed"] == 1
    assert fast.stats()["deopts"] == 1


def test_what_sizes_that_data_decide_make_operators_raise_is_no_fault_of_the_plan() -> None:
    def sized(*_: Any) -> Any:
        raise RuntimeError("sizes do not match")

    model = Chooses().eval()
    fast = _jit(model, tiers=0, watch=False)
    with torch.no_grad():
        for _ in range(4):
            fast(_x(by=0.5))
        entry = _entry(fast)
        entry.plan = entry.baseline = replace(entry.plan, run=sized)
        x = _x(by=-0.5)  # takes the other path
        torch.testing.assert_close(fast(x), model(x))
    assert fast.stats()["deopts"] == 0 and _entry(fast) is entry and entry.balance is not None and entry.balance.missed == 1


def test_a_graph_of_an_earlier_process_knows_its_paths(tmp_path: Path) -> None:
    """Of the captures that are kept, the one with most paths is taken, and a further path would be traced together with them."""
    model, settings = Chooses().eval(), Settings(cache_dir=tmp_path, tiers=0, watch=False)

    def served(*, until: int) -> PathBalance:
        fast = hotfuse.jit(model, settings=settings)
        with fast, torch.no_grad():
            for i in range(400):
                x = _x(by=0.5 if i % 2 else -0.5)
                torch.testing.assert_close(fast(x), model(x))
                fast.wait(30)
                entries = [e for s in fast._engine.sites.values() for e in s.entries]
                if entries and entries[0].balance is not None and entries[0].balance.traced >= until:
                    return entries[0].balance
        raise AssertionError(f"no graph with {until} paths")

    first = served(until=2)
    assert len(first.paths) == 2
    second = served(until=1)  # the first graph that serves
    assert second.traced == 2 and set(second.paths) == set(first.paths)


class Pools(_Two):
    """Torch takes the number of rows for that of the call when it traces a pool."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return nn.functional.max_pool1d(self.a(x)[mask].T[None] * 2, 3) * 2


@torch.no_grad()
def test_fewer_rows_than_were_traced_are_not_read_behind_their_end() -> None:
    """A process that read behind the end of no rows ended there."""
    model = Pools().eval()
    fast = hotfuse.jit(model, settings=Settings(capture="inline", hot_calls=2))
    for rows in (*[96] * 40, 48, 3, 2, 1, 0, *[96] * 8):
        x, mask = torch.randn(96, D), torch.randperm(96) < rows
        if rows < 3:
            for run in (model, fast):
                with pytest.raises(RuntimeError):
                    run(x, mask)
        else:
            torch.testing.assert_close(fast(x, mask), model(x, mask), rtol=1e-4, atol=1e-5)
    assert fast.stats()["graph_calls"], str(fast.explain(full=True))
    fast.close()


class Slices(_Two):
    """Torch takes the rows that a number picks for as many as the other argument has."""

    def forward(self, x: torch.Tensor, z: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.a(x[: n.item()]) * z).sum(0)


class Splits(_Two):
    """Tracing follows a path, so what is asked of the number is this package's to check."""

    def forward(self, x: torch.Tensor, z: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        if x.mean() > 1e6:
            return x
        k = n.item()
        first, _ = x.split([k, x.shape[0] - k])
        return torch.tanh(self.a(first) * z).sum(0)


@pytest.mark.parametrize("moves", [True, False])
@pytest.mark.parametrize("cls", [Slices, Splits])
@torch.no_grad()
def test_a_number_that_picks_other_rows_than_an_argument_has_raises_as_in_eager(cls: type[_Two], moves: bool) -> None:
    model = cls().eval()
    fast = hotfuse.jit(model, settings=Settings(capture="inline", hot_calls=2))
    for k in range(24):
        n = 4 + (k % 5 if moves else 0)
        x, z, rows = torch.randn(16 + (k % 3 if moves else 0), D), torch.randn(n, D), torch.tensor(n)
        torch.testing.assert_close(fast(x, z, rows), model(x, z, rows), rtol=1e-4, atol=1e-5)
        assert fast.wait(60)
    assert fast.stats()["graph_calls"], str(fast.explain(full=True))
    for n, other in ((4, 5), (5, 4), (4, 100_000), (4, 0), (30, 31), (100_000, 4)):
        for run in (model, fast):
            with pytest.raises(RuntimeError):
                run(torch.randn(16, D), torch.randn(other, D), torch.tensor(n))
    fast.close()


class PoolsSlices(_Two):
    """Nothing shows what a pool asks of the rows that a number picked."""

    def forward(self, x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        return nn.functional.max_pool1d(self.a(x[: n.item()]).T[None], 3)


@torch.no_grad()
def test_what_cannot_be_captured_with_open_sizes_is_tried_with_those_of_calls_and_told() -> None:
    """Captures with open sizes went on until none were left, and nothing was said."""
    model = PoolsSlices().eval()
    fast = hotfuse.jit(model, settings=Settings(capture="inline", hot_calls=2))
    for k in range(30):
        x, n = torch.randn(10 + k % 5, D), torch.tensor(6)
        torch.testing.assert_close(fast(x, n), model(x, n), rtol=1e-4, atol=1e-5)
        assert fast.wait(60)
    captures = sum(d["action"] == "capture" for d in fast.explain().to_dict()["decisions"])
    told = str(fast.explain())
    assert fast.stats()["graph_calls"] or (captures <= 6 and "nothing is known" not in told), str(fast.explain(full=True))
    fast.close()
