"""Containers that a model's code reads: changing what is in them changes the model, as setting an attribute does."""

from __future__ import annotations

import contextvars
import os
import threading
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hotfuse
from hotfuse import Settings
from hotfuse.base.environment_reads import variables_of
from hotfuse.runtime.plans import MAX_SHORT_LIVED
from hotfuse.runtime.weights import containers as code_walk
from hotfuse.runtime.weights.containers import MAX_CONTAINERS, MAX_ENTRIES, reads
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
    "deep within": lambda m: m.config.nested["deep"][1].update(deeper=4.0),  # pyright: ignore
    "a global dict": lambda _: OPTIONS.update(scale=6.0),
    "a global list": lambda _: STEPS.append(4.0),
    "a method that forward calls": lambda _: setattr(Reads, "helped", lambda self: 11.0),
    "forward itself": lambda _: setattr(Reads, "forward", lambda self, x: x * 7),
    "a library's method": lambda _: setattr(nn.Linear, "forward", lambda self, x: x @ self.weight),
}


SHIFT = 1.0
SETTINGS: Any = types.ModuleType("settings_of_a_program")
LEVEL: contextvars.ContextVar[float] = contextvars.ContextVar("LEVEL", default=1.0)


def helper(x: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
    return x * factor + SHIFT


def from_environment() -> float:
    return float(os.getenv("OF_A_STRANGER", "1"))


def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
    def around(*args: Any, **named: Any) -> Any:
        return function(*args, **named)

    return around


class Slotted:
    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 1.0


class Activation:
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.scaled(x)

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


class Beside(nn.Module):
    """What it reads is in none of its attributes, or in some that are no dicts or lists."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.slotted, self.flags, self.table, self.activation = Slotted(), {"a"}, np.ones(8, dtype=np.float32), Activation()
        self.options = {"behind a decorator": 1.0}

    @decorated
    def forward(self, x: torch.Tensor, scale: float = 2.0, *, shift: float = 1.0) -> torch.Tensor:
        x = helper(self.linear(x)) * scale + shift + from_environment() + SETTINGS.scale + self.slotted.scale
        x = self.activation(x + self.options["behind a decorator"]) * torch.from_numpy(self.table) * LEVEL.get()
        return torch.nn.functional.relu(x) if "b" in self.flags else x


AROUND: Any = Beside.forward
FORWARD: Any = AROUND.__closure__[0].cell_contents


def other(self: Any, x: torch.Tensor, scale: float = 2.0, *, shift: float = 1.0) -> torch.Tensor:
    return x * scale + shift


BESIDE: dict[str, Callable[[Any], Any]] = {
    "defaults": lambda _: setattr(FORWARD, "__defaults__", (3.0,)),
    "defaults by name": lambda _: setattr(FORWARD, "__kwdefaults__", {"shift": 3.0}),
    "one default by name": lambda _: FORWARD.__kwdefaults__.update(shift=4.0),
    "code": lambda _: setattr(FORWARD, "__code__", other.__code__),
    "a helper's defaults": lambda _: setattr(helper, "__defaults__", (5.0,)),
    "a variable of a helper": lambda _: globals().update(SHIFT=7.0),
    "a variable of a module": lambda _: setattr(SETTINGS, "scale", 3.0),
    "the environment": lambda _: os.environ.update(OF_A_STRANGER="4"),
    "a slot": lambda m: setattr(m.slotted, "scale", 3.0),
    "a set": lambda m: m.flags.add("b"),
    "an array": lambda m: m.table.fill(3.0),
    "a context variable": lambda _: LEVEL.set(2.0),
    "a method of an object": lambda _: setattr(Activation, "scaled", lambda self, x: x * 5),  # pyright: ignore
    "an option behind a decorator": lambda m: m.options.update({"behind a decorator": 9.0}),
    "a function of a library": lambda _: setattr(torch, "from_numpy", lambda x: torch.tensor(x) * 2),  # pyright: ignore
}


@pytest.fixture(autouse=True)
def globals_as_they_were() -> Any:
    methods = Reads.helped, Reads.forward, nn.Linear.forward, Activation.scaled, torch.from_numpy
    function = FORWARD.__code__, FORWARD.__defaults__, helper.__defaults__
    SETTINGS.scale = 2.0
    yield
    Reads.helped, Reads.forward, nn.Linear.forward, Activation.scaled, torch.from_numpy = methods
    FORWARD.__code__, FORWARD.__defaults__, helper.__defaults__ = function
    FORWARD.__kwdefaults__ = {"shift": 1.0}
    OPTIONS["scale"], SETTINGS.scale = 2.0, 2.0
    globals()["SHIFT"] = 1.0
    LEVEL.set(1.0)
    os.environ.pop("OF_A_STRANGER", None)
    del STEPS[1:]


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("how", BESIDE)
def test_a_guard_sees_what_is_read_beside(how: str, native: bool) -> None:
    model, x = Beside(), torch.randn(3, 8)
    guard = ModelGuard(list(model.modules()), list(model.parameters()))
    if native:
        guard.harden()
        assert guard.stats()["native"], guard.stats()["why_not"]
        assert guard.unchanged()
    assert guard.check() is WeightChange.NONE and not guard.blind and not guard.difference()
    before = model(x)
    BESIDE[how](model)
    assert how == "a set" or not torch.equal(model(x), before)
    assert guard.check() is WeightChange.MODEL and guard.difference()
    assert not native or not guard.unchanged()


@pytest.mark.parametrize("native", [False, True])
def test_other_environment_variables_are_no_change(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs and libraries set theirs at any time."""
    model = Beside()
    guard = ModelGuard(list(model.modules()), list(model.parameters()))
    if native:
        guard.harden()
    for value in ("1", "2"):
        monkeypatch.setenv("OF_ANOTHER_STRANGER", value)
        assert guard.check() is WeightChange.NONE and guard.check() is WeightChange.NONE
    assert not native or guard.unchanged(), "the native sweep starts from here"
    monkeypatch.setenv("OF_A_STRANGER", "7")
    assert guard.check() is WeightChange.MODEL and guard.difference() == "the environment"


def _named() -> object:
    from os import environ, getenv

    first = os.getenv("A"), os.getenv("B", "0"), os.environ.get("C", default="x"), os.environ["D"], "E" in os.environ
    return first, environ.get("F"), getenv("G"), "H" not in environ, [os.environ.get("I") for _ in "x"]


UNNAMED: list[Callable[..., Any]] = [
    lambda k: os.getenv(k), lambda: dict(os.environ), lambda: os.environ.copy(), lambda k: k in os.environ, lambda k: os.environ[k],
    lambda: os.environ, lambda: os.getenv, lambda: os.environ.get,
    lambda f: f(os.environ, "A"), lambda f: f(os.getenv, "A"), lambda f: f(os.environ.get, "A"), lambda: os.getenv("A" + str(1)),
]  # fmt: skip


def test_which_environment_variables_code_reads() -> None:
    assert variables_of(_named.__code__) == frozenset("ABCDEFGHI")
    assert [f for f in UNNAMED if variables_of(f.__code__) is not None] == []


def test_code_that_is_too_much_to_follow_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    fast, x = hotfuse.jit(Beside(), settings=INLINE), torch.randn(3, 8)
    for _ in range(4):
        fast(x)
    assert "more than is followed" not in str(fast.explain())
    monkeypatch.setattr(code_walk, "MAX_NAMES", 3)
    fast = hotfuse.jit(Beside(), settings=INLINE)
    for _ in range(4):
        fast(x)
    assert "more than is followed" in str(fast.explain())


@pytest.mark.parametrize("how", ["one default by name", "a variable of a helper", "the environment", "a slot"])
def test_what_a_model_reads_beside_has_changed(how: str) -> None:
    model, x = Beside().eval(), torch.randn(3, 8)
    with torch.no_grad(), hotfuse.jit(model, settings=INLINE) as fast:
        for _ in range(12):
            fast(x)
        assert fast.wait(60) and fast.stats()["graph_calls"] > 0
        BESIDE[how](model)
        torch.testing.assert_close(fast(x), model(x))


def test_variables_of_a_library_are_looked_up_once_it_writes_some() -> None:
    model = nn.Linear(4, 4)
    guard = ModelGuard([model], list(model.parameters()))
    guard.harden()
    space: Any = vars(torch.nn.functional)
    try:
        for k in range(4):
            space["_written_by_a_test"] = k
            assert guard.check() is WeightChange.NONE
        assert guard.stats()["left"] == 1
    finally:
        del space["_written_by_a_test"]


def test_what_cannot_be_watched_is_left_to_the_models_own_code() -> None:
    local = threading.local()
    local.scale = 2.0
    table = np.ones((100, 100), dtype=np.float32)

    def of_a_thread(x: torch.Tensor) -> torch.Tensor:
        return x * local.scale

    def of_a_table(x: torch.Tensor) -> torch.Tensor:
        return x + torch.from_numpy(table).sum()

    for function, said in ((of_a_thread, "threading.local"), (of_a_table, "40000 bytes")):
        with torch.no_grad(), hotfuse.jit(function, settings=INLINE) as fast:
            for _ in range(4):
                fast(torch.ones(3))
            assert fast.wait(60) and fast.stats()["graph_calls"] == 0
            assert said in str(fast.explain())


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
        assert captures[-1] <= captures[60] + 1 <= MAX_SHORT_LIVED and len(model.seen) == 120  # ever more rarely
        assert "the model changed" in str(fast.explain()) and "that its code reads" in str(fast.explain())


def containers(values: list[Any]) -> tuple[list[Any], list[Any]]:
    found = reads((), values=values)
    return found.dicts, found.lists


def test_bounds() -> None:
    many: list[Any] = [{"a": k} for k in range(MAX_CONTAINERS)]
    dicts, lists = containers(
        [many[:9], list(range(MAX_ENTRIES + 1)), {Config(): 3}, {k: k for k in range(MAX_ENTRIES + 1)}]
    )
    assert (len(dicts), len(lists)) == (9, 1)
    dicts, lists = containers([(d,) for d in many] + [[1]])
    assert len(dicts) == MAX_CONTAINERS and not lists
    loop: list[Any] = []
    loop.append(loop)
    assert containers([loop, loop]) == ([], [loop])
    assert containers([torch, nn.Linear, nn.Linear(1, 1), torch.ones(1), len, torch.float32, None]) == (
        [],
        [],
    )


def test_what_code_names_is_read_and_nothing_else() -> None:
    model = Reads()
    found = reads([model])
    held = {id(d) for d in (*found.dicts, *found.lists)}
    assert {id(model.config.nested), id(model.parts), id(vars(model.space)), id(OPTIONS)} <= held
    assert id(model.others) not in held


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
