"""What a model reads without its code naming it: through special methods, metaclasses, functions' attributes, code of `exec`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hotfuse
from hotfuse import Settings
from hotfuse.runtime.weights.class_code import foreign
from hotfuse.runtime.weights.containers import reads
from hotfuse.runtime.weights.model_guard import ModelGuard, WeightChange

TABLE = {"gain": 2.0}


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.options = nn.Linear(8, 8), {"gain": 2.0}


class ByAttribute(Scaled):
    """`self.gain` is found where `__getattr__` says."""

    def __getattr__(self, name: str) -> Any:
        return self.options[name] if name == "gain" else super().__getattr__(name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.gain


class Lookup:
    def __getitem__(self, name: str) -> float:
        return TABLE[name]


class ByItem(Scaled):
    """`d[k]` runs code whose globals no code of the model names."""

    def __init__(self) -> None:
        super().__init__()
        self.lookup = Lookup()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.lookup["gain"]


class Registry(type):
    gain = 2.0


class Registered(metaclass=Registry):
    pass


class ByMetaclass(Scaled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * Registered.gain


def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * scaled.gain  # pyright: ignore


scaled.gain = 2.0  # pyright: ignore


class ByFunction(Scaled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return scaled(self.linear(x))


EXECUTED: dict[str, Any] = {"gain": 2.0}
exec("def helper(x): return x * gain\ndef program(x): return helper(x) + 1", EXECUTED)

CHANGES: dict[str, tuple[Callable[[], Callable[..., Any]], Callable[[Any, float], Any]]] = {
    "what __getattr__ reads": (ByAttribute, lambda m, v: m.options.update(gain=v)),
    "what __getitem__ reads": (ByItem, lambda _, v: TABLE.update(gain=v)),
    "a value of a metaclass": (ByMetaclass, lambda _, v: setattr(Registry, "gain", v)),
    "an attribute of a function": (ByFunction, lambda _, v: setattr(scaled, "gain", v)),
    "a variable of executed code": (lambda: EXECUTED["program"], lambda _, v: EXECUTED.update(gain=v)),
}


@pytest.mark.parametrize("how", CHANGES)
def test_what_is_read_unnamed_has_changed(how: str) -> None:
    make, change = CHANGES[how]
    model = make()
    try:
        with torch.no_grad(), hotfuse.jit(model, settings=Settings(capture="inline", hot_calls=2)) as fast:
            for value in (2.0, 5.0):
                change(model, value)
                for _ in range(6):
                    x = torch.randn(3, 8)
                    torch.testing.assert_close(fast(x), model(x))
                    assert fast.wait(60)
            assert fast.stats()["graph_calls"] > 0
    finally:
        change(model, 2.0)


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("how", CHANGES)
def test_a_guard_sees_what_is_read_unnamed(how: str, native: bool) -> None:
    make, change = CHANGES[how]
    model: Any = make()
    modules: list[nn.Module] = [*model.modules()] if isinstance(model, nn.Module) else []
    guard = ModelGuard(modules, [], [model])
    if native:
        guard.harden()
        assert guard.stats()["native"], guard.stats()["why_not"]
        assert guard.unchanged()
    assert guard.check() is WeightChange.NONE
    try:
        change(model, 5.0)
        assert guard.check() is WeightChange.MODEL and guard.difference()
        assert not native or not guard.unchanged()
    finally:
        change(model, 2.0)


def test_functions_attributes_that_no_code_names_are_nobodys() -> None:
    def helper(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    helper.calls = 0  # pyright: ignore
    assert not any(name == "calls" for _, name in reads([], [helper]).names)


def test_what_exec_defines_is_the_users() -> None:
    space: dict[str, Any] = {}
    exec("class Made: pass\ndef made(): pass", space)
    assert not foreign(space["Made"]) and not foreign(space["made"])
    assert foreign(int) and foreign(len) and foreign(nn.Linear)
