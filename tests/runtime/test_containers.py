"""Containers that a model's code reads: changing what is in them changes the model, as setting an attribute does."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hotfuse
from hotfuse import Settings
from hotfuse.runtime.plans import MOST_SHORT_LIVED
from hotfuse.runtime.weights.containers import MAX_CONTAINERS, MAX_ENTRIES, containers, names_in_code
from hotfuse.runtime.weights.model_guard import ModelGuard, WeightChange

INLINE = Settings(capture="inline", hot_calls=2)
OPTIONS, STEPS = {"scale": 2.0}, [1.0]


class Config:
    """As libraries have them."""

    def __init__(self) -> None:
        self.scale, self.nested, self.used = 1.0, {"deep": [1.0, {"deeper": 2.0}]}, True


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.config, self.space, self.parts = Config(), types.SimpleNamespace(shift=1.0), [1.0, 2.0]
        self.others = {"never": 0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x) * self.config.scale * OPTIONS["scale"] + STEPS[-1] + self.space.shift
        return x + self.parts[-1] + self.helped() if self.config.used else x

    def helped(self) -> float:
        return self.config.nested["deep"][1]["deeper"]  # pyright: ignore


CHANGES: dict[str, Callable[[Reads], Any]] = {
    "a config's attribute": lambda m: setattr(m.config, "scale", 3.0),
    "a config's switch": lambda m: setattr(m.config, "used", False),
    "a namespace": lambda m: setattr(m.space, "shift", 5.0),
    "an item of a list": lambda m: m.parts.__setitem__(-1, 7.0),
    "a longer list": lambda m: m.parts.append(9.0),
    "deep within": lambda m: m.config.nested["deep"][1].update(deeper=4.0),
    "a global dict": lambda _: OPTIONS.update(scale=6.0),
    "a global list": lambda _: STEPS.append(4.0),
    "a method that forward calls": lambda _: setattr(Reads, "helped", lambda self: 11.0),
    "forward itself": lambda _: setattr(Reads, "forward", lambda self, x: x * 7),
    "a library's method": lambda _: setattr(nn.Linear, "forward", lambda self, x: x @ self.weight),
}


@pytest.fixture(autouse=True)
def globals_as_they_were() -> Any:
    methods = Reads.helped, Reads.forward, nn.Linear.forward
    yield
    Reads.helped, Reads.forward, nn.Linear.forward = methods
    OPTIONS["scale"] = 2.0
    del STEPS[1:]


@pytest.mark.parametrize("how", CHANGES)
def test_what_a_model_reads_has_changed(how: str) -> None:
    model, x = Reads().eval(), torch.randn(3, 8)
    with torch.no_grad(), hotfuse.jit(model, settings=INLINE) as fast:
        for _ in range(12):
            fast(x)
        assert fast.wait(60) and fast.stats()["graph_calls"] > 0
        before = model(x)
        CHANGES[how](model)
        assert not torch.equal(model(x), before)
        torch.testing.assert_close(fast(x), model(x))
        for _ in range(12):
            torch.testing.assert_close(fast(x), model(x))
        assert fast.wait(60) and fast.stats()["calls_per_tier"]["0"] + fast.stats()["calls_per_tier"]["1"] > 0


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("how", CHANGES)
def test_a_guard_sees_it(how: str, native: bool) -> None:
    model = Reads()
    guard = ModelGuard(list(model.modules()), list(model.parameters()))
    if native:
        guard.harden()
        assert guard.stats()["native"], guard.stats()["why_not"]
        assert guard.unchanged()
    assert guard.check() is WeightChange.NONE
    model.others["never"] = 1  # its code does not read that
    assert guard.check() is WeightChange.NONE
    CHANGES[how](model)
    assert guard.check() is WeightChange.MODEL
    assert not native or not guard.unchanged()


def test_a_model_that_changes_itself_is_captured_a_bounded_number_of_times() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[int] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen.append(len(x))
            return x * 2

    model = Counts()
    with torch.no_grad(), hotfuse.jit(model, settings=INLINE) as fast:
        captures = [0]
        for i in range(120):
            fast(torch.ones(1 + i % 5))
            captures.append(fast.stats()["captures"])
        assert captures[-1] <= captures[60] + 1 <= MOST_SHORT_LIVED and len(model.seen) == 120  # ever more rarely
        assert "the model changed" in str(fast.explain()) and "that its code reads" in str(fast.explain())


def test_bounds() -> None:
    many: list[Any] = [{"a": k} for k in range(MAX_CONTAINERS)]
    dicts, lists = containers(
        [many[:9], list(range(MAX_ENTRIES + 1)), {(1, 2): 3}, {k: k for k in range(MAX_ENTRIES + 1)}]
    )
    assert (len(dicts), len(lists)) == (9, 1)
    dicts, lists = containers([(d,) for d in many] + [[1]])
    assert len(dicts) == MAX_CONTAINERS and not lists
    loop: list[Any] = []
    loop.append(loop)
    assert containers([loop, loop]) == ([], [loop])
    assert containers([torch, nn.Linear, nn.Linear(1, 1), torch.ones(1), len, test_bounds, torch.float32, None]) == (
        [],
        [],
    )


def test_names_in_code_follow_methods() -> None:
    assert {"config", "parts", "space", "nested"} <= names_in_code(Reads) and "others" not in names_in_code(Reads)


@pytest.mark.parametrize(("how", "said"), [
    (lambda m: setattr(m, "parts", [1.0]), "Reads.parts"),
    (lambda m: setattr(m, "new", 1), "an attribute or hook that Reads has now"),
    (lambda m: setattr(m.config, "scale", 3.0), "'scale' of what its code reads"),
    (lambda m: m.parts.append(1.0), "a list or dict that its code reads"),
    (lambda m: OPTIONS.update(scale=6.0), "'scale' of what its code reads"),
    (lambda m: None, ""),
])  # fmt: skip
def test_a_change_is_named(how: Callable[[Reads], Any], said: str) -> None:
    model = Reads()
    guard = ModelGuard(list(model.modules()), list(model.parameters()))
    how(model)
    assert guard.difference() == said
