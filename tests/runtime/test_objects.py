"""Arguments and results that are objects: what a call changes in them, and methods that call the served model."""

from __future__ import annotations

import copy
import threading
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

import hotfuse
from hotfuse import Settings

INLINE = Settings(capture="inline")


def served(model: Any, **changes: Any) -> hotfuse.Jit:
    return hotfuse.jit(model, settings=INLINE.with_(**changes))


def in_graph(fast: hotfuse.Jit) -> int:
    return fast.stats()["graph_calls"]


@pytest.fixture(autouse=True)
def no_grad() -> Any:
    with torch.no_grad():
        yield


class Memory:
    """Grows by what it is given, as a key/value cache does."""

    def __init__(self) -> None:
        self.rows: torch.Tensor | None = None
        self.seen = 0
        self.parts: list[Any] = []

    def add(self, x: torch.Tensor) -> torch.Tensor:
        self.rows = x if self.rows is None else torch.cat([self.rows, x])
        self.seen += x.shape[0]
        self.parts.append(x.sum())
        del self.parts[:-2]
        return self.rows


class StrategyHistory(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, memory: Memory | None = None) -> tuple[torch.Tensor, Memory]:
        memory = Memory() if memory is None else memory
        rows = memory.add(self.layer(x))
        return rows.mean(0) * memory.seen, memory


def test_an_object_that_a_call_changes() -> None:
    model = StrategyHistory().eval()
    fast = served(model)
    for length in (2, 3, 2, 3):
        mine, theirs = Memory(), Memory()
        for _ in range(12):
            x = torch.randn(length, 8)
            (got, back), (want, _) = fast(x, mine), model(x, theirs)
            assert back is mine
            torch.testing.assert_close(got, want)
            torch.testing.assert_close(mine.rows, theirs.rows)
            torch.testing.assert_close(mine.parts, theirs.parts)
            assert mine.seen == theirs.seen and type(mine.seen) is int
    assert in_graph(fast) > 20, str(fast.explain(full=True))
    assert fast.stats()["captures"] < 12, "a number that grows with every call is a symbol, not a structure of its own"


def test_an_object_that_a_call_makes() -> None:
    model = StrategyHistory().eval()
    fast = served(model)
    for _ in range(3):
        x = torch.randn(3, 8)
        (got, mine), (want, theirs) = fast(x), model(x)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(mine.rows, theirs.rows)
        assert type(mine) is Memory and mine.seen == theirs.seen
    assert in_graph(fast) == 2


@dataclass
class Batch:
    x: torch.Tensor
    scale: float = 2.0
    log: list[str] = field(default_factory=list)
    extra: dict[str, torch.Tensor] = field(default_factory=dict)


def test_lists_dicts_and_dataclasses_that_a_call_changes() -> None:
    def step(batch: Batch, notes: list[Any], table: dict[str, Any]) -> Batch:
        batch.x = batch.x * batch.scale
        batch.log.append("scaled")
        batch.extra["old"] = batch.x - 1
        notes.append(batch.x.sum())
        table.pop("gone", None)
        table["new"] = notes
        return batch

    fast = served(step)
    for _ in range(3):
        x = torch.randn(4)
        mine, theirs = Batch(x), Batch(x)
        notes, table, table2 = [1, "a"], {"gone": 1}, {"gone": 1}
        notes2 = list(notes)
        assert fast(mine, notes, table) is mine
        step(theirs, notes2, table2)
        torch.testing.assert_close(mine.x, theirs.x)
        torch.testing.assert_close(mine.extra, theirs.extra)
        torch.testing.assert_close(notes[2], notes2[2])
        assert mine.log == ["scaled"] and list(table) == ["new"] and table["new"] is notes
    assert in_graph(fast) == 2


def test_one_object_in_two_places_stays_one() -> None:
    def step(a: Memory, b: Memory, x: torch.Tensor) -> tuple[Memory, torch.Tensor]:
        a.add(x)
        return b, b.add(x)

    fast = served(step)
    for _ in range(3):
        one, two, x = Memory(), Memory(), torch.randn(2, 3)
        back, rows = fast(one, one, x)
        assert back is one and one.seen == 4 and rows.shape == (4, 3)
        back, rows = fast(one, two, x)
        assert back is two and two.seen == 2 and one.seen == 6
    assert in_graph(fast) >= 2


def test_a_plan_that_raises_leaves_objects_as_they_were() -> None:
    model = StrategyHistory().eval()
    fast = served(model)
    memory = Memory()
    for _ in range(4):
        fast(torch.randn(2, 8), memory)
    with pytest.raises(RuntimeError):
        fast(torch.randn(2, 7), memory)
    assert memory.seen == 8 and memory.rows is not None and memory.rows.shape == (8, 8)


def test_objects_that_are_more_than_their_attributes_stay_with_the_model() -> None:
    class Locked(Memory):
        def __init__(self) -> None:
            super().__init__()
            self.lock = threading.Lock()

    model = StrategyHistory().eval()
    fast = served(model)
    memory = Locked()
    for n in range(1, 4):
        fast(torch.randn(2, 8), memory)
        assert memory.seen == 2 * n
    assert in_graph(fast) == 0
    assert fast.stats()["events"]["keep.unsupported_call"] == 1


# --- methods -------------------------------------------------------------------------------------


class Base(nn.Module):
    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self(x) + self.forward(x)


class Encoder(Base):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.used = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Doc."""
        return self.layer(x)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        assert isinstance(self, Encoder)
        return super().encode(x) * 2

    def use(self) -> None:
        self.used += 1


def test_methods_call_the_served_forward() -> None:
    model = Encoder().eval()
    fast = served(model)
    x = torch.randn(3, 8)
    want = model.encode(x)
    for _ in range(3):
        torch.testing.assert_close(fast.encode(x), want)
    assert in_graph(fast) == 5, "two calls a method; the first of all runs the model's own code"
    before = in_graph(fast)
    model.encode(x)
    assert in_graph(fast) == before, "whoever holds the model itself runs its own code"


def test_a_served_container_is_one() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval()
    fast: Any = served(model)
    assert len(fast) == 2 and fast[0] is model[0] and list(fast) == list(model) and isinstance(fast[:1], nn.Sequential)
    fast[1] = nn.Tanh()
    assert isinstance(model[1], nn.Tanh)
    x = torch.randn(3, 8)
    for _ in range(3):
        torch.testing.assert_close(fast(x), model(x))
    other: Any = copy.deepcopy(fast)
    assert len(other) == 2 and other[0] is not fast[0] and isinstance(other, hotfuse.Jit)
    named: Any = served(nn.ModuleDict({"a": nn.Linear(2, 2)}))
    assert "a" in named and list(named) == ["a"]
    plain: Any = served(Encoder())
    assert bool(plain)
    with pytest.raises(TypeError):
        len(plain)


def test_a_served_module_is_what_the_module_is() -> None:
    model = Encoder()
    fast = served(model)
    assert isinstance(fast, Encoder) and isinstance(fast, hotfuse.Jit)
    assert fast.eval() is fast and not model.training
    fast.used = 7
    fast.use()
    assert model.used == 8
    outer = nn.Sequential(nn.Identity(), fast)
    assert set(outer.state_dict()) == {"1.layer.weight", "1.layer.bias"}
    x = torch.randn(3, 8)
    for _ in range(3):
        torch.testing.assert_close(outer(x), model(x))
    assert in_graph(fast) == 2
    assert "used" not in vars(fast)


def test_hooks_run_once() -> None:
    model = Encoder().eval()
    seen: list[int] = []
    model.register_forward_hook(lambda *_: seen.append(1))
    fast = served(model, capture="off")
    fast.encode(torch.randn(3, 8))
    assert len(seen) == 1, "calling the module runs its hooks, calling forward does not"


def test_a_copy_of_what_a_method_returned_is_not_served() -> None:
    model = Encoder().eval()
    fast = served(model)
    twin = copy.deepcopy(fast._view)  # pyright: ignore[reportPrivateUsage]
    assert type(twin) is Encoder
    twin.layer.weight.zero_()
    x = torch.randn(3, 8)
    torch.testing.assert_close(twin(x), twin.layer.bias.expand(3, 8))
    torch.testing.assert_close(fast(x), model(x))


def test_a_bound_method_in_place_of_forward() -> None:
    model = Encoder().eval()
    x = torch.randn(3, 8)
    want = model(x)
    fast = served(model.forward)
    model.forward = fast  # type: ignore[method-assign]
    for _ in range(3):
        torch.testing.assert_close(model(x), want)
    assert in_graph(fast) == 2
    model.layer.weight.mul_(2)
    torch.testing.assert_close(model(x), model.layer(x))


def test_methods_in_many_threads() -> None:
    model = Encoder().eval()
    fast = served(model)
    wrong: list[int] = []
    fast.encode(torch.randn(3, 8))

    def work() -> None:
        with torch.no_grad():
            for _ in range(30):
                x = torch.randn(3, 8)
                if not torch.allclose(fast.encode(x), 4 * model.layer(x), atol=1e-5):
                    wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong and in_graph(fast) > 100


def test_gradients_of_a_call_that_changes_an_object() -> None:
    model = StrategyHistory().eval()
    fast = served(model)
    for _ in range(4):
        fast(torch.randn(2, 8), Memory())
    with torch.enable_grad():
        for _ in range(4):
            x = torch.randn(2, 8)
            found = []
            for run in (fast, model):
                memory = Memory()
                model.zero_grad()
                (run(x, memory)[0].sum() + memory.rows.pow(2).sum()).backward()  # type: ignore[union-attr]
                found.append(model.layer.weight.grad.clone())  # type: ignore[union-attr]
            torch.testing.assert_close(found[0], found[1])
