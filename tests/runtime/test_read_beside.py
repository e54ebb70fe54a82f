# pyright: reportPrivateUsage=false
"""What a model's code reads beside its own attributes and its arguments' contents: classes of arguments, members of enumerations,
results that functions keep, tensors from elsewhere, hooks of all modules. It may change between two calls."""

from __future__ import annotations

import dataclasses
import enum
import functools
import random
import sys
import types
import weakref
from array import array
from collections import ChainMap, Counter, UserDict, UserList, defaultdict, deque
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hotfuse
from hotfuse import Settings
from hotfuse.base.structure import flatten
from hotfuse.frontends.naming import call_name
from hotfuse.native import requires
from hotfuse.runtime.weights.cached_calls import cached_calls

D = 8
INLINE = Settings(capture="inline", watch=False, tiers=0)
Change = Callable[[], None]


@dataclasses.dataclass
class Options:
    x: Tensor
    gain: float = 2.0
    LIMIT: ClassVar[float] = 0.5

    def scaled(self) -> Tensor:
        return self.x * self.gain

    @property
    def shifted(self) -> Tensor:
        return self.x + ELSEWHERE["shift"]


class Two(NamedTuple):
    a: Tensor
    b: Tensor


class Pair(Two):
    weight = 2.0


class Mode(enum.Enum):
    SOFT = 1

    @property
    def factor(self) -> float:
        return FACTORS[self.value]


class Registered:
    factor = 2.0


FACTORS = {1: 2.0}
ELSEWHERE = {"shift": 1.0}
TABLES = {D: torch.arange(float(D))}


class Held:
    table = torch.arange(float(D))
    layer = nn.Linear(D, D)


@functools.lru_cache
def layer() -> nn.Linear:
    return nn.Linear(D, D)


@functools.lru_cache(maxsize=4)
def table(n: int) -> Tensor:
    return torch.arange(float(n))


@functools.cache
def constants() -> dict[str, list[Any]]:
    return {"tables": [torch.ones(D)], "gains": [2.0]}


def _put(owner: Any, name: str, value: Any) -> Change:
    return lambda: setattr(owner, name, value)


def _filled(owner: dict[Any, Any], key: Any, value: float) -> Change:
    return lambda: owner.__setitem__(key, value)


CHANGES: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Any, ...]], Change]] = {
    "value of an argument's class": (
        lambda o: o.x.clamp(max=o.LIMIT), lambda: (Options(torch.randn(4, D)),), _put(Options, "LIMIT", 0.1)),
    "through type()": (
        lambda o: o.x.clamp(max=type(o).LIMIT), lambda: (Options(torch.randn(4, D)),), _put(Options, "LIMIT", 0.2)),
    "method of an argument": (
        lambda o: o.scaled(), lambda: (Options(torch.randn(4, D)),), _put(Options, "scaled", lambda self: self.x * 7)),
    "property that reads a variable": (
        lambda o: o.shifted, lambda: (Options(torch.randn(4, D)),), _filled(ELSEWHERE, "shift", 5.0)),
    "class of a named tuple": (
        lambda p: p.a * p.weight + p.b, lambda: (Pair(torch.randn(4, D), torch.randn(4, D)),), _put(Pair, "weight", 5.0)),
    "member of an enumeration": (
        lambda x, mode: x * mode.factor, lambda: (torch.randn(4, D), Mode.SOFT), _filled(FACTORS, 1, 5.0)),
    "class as an argument": (
        lambda x, cls: x * cls.factor, lambda: (torch.randn(4, D), Registered), _put(Registered, "factor", 5.0)),
    "tensor in a dict": (
        lambda x: x + TABLES[D], lambda: (torch.randn(4, D),), lambda: TABLES[D].mul_(3)),  # type: ignore[dict-item]
    "tensor in a class": (
        lambda x: x + Held.table, lambda: (torch.randn(4, D),), lambda: Held.table.mul_(3)),  # type: ignore[dict-item]
    "result that a function keeps": (
        lambda x: x + table(D), lambda: (torch.randn(4, D),), lambda: table(D).mul_(3)),  # type: ignore[dict-item]
    "inside of such a result": (
        lambda x: x * constants()["tables"][0], lambda: (torch.randn(4, D),),
        lambda: constants()["tables"][0].mul_(3)),
    "number inside of such a result": (
        lambda x: x * constants()["gains"][0], lambda: (torch.randn(4, D),),
        lambda: constants()["gains"].__setitem__(0, 7.0)),
    "weight of a module in a class": (
        lambda x: Held.layer(x), lambda: (torch.randn(4, D),), lambda: nn.init.ones_(Held.layer.weight)),  # type: ignore[dict-item]
    "module in a class": (lambda x: Held.layer(x), lambda: (torch.randn(4, D),), _put(Held, "layer", nn.Linear(D, D))),
    "weight of a module that a function keeps": (
        lambda x: layer()(x), lambda: (torch.randn(4, D),), lambda: nn.init.ones_(layer().weight)),  # type: ignore[dict-item]
    "module that a function keeps": (lambda x: layer()(x), lambda: (torch.randn(4, D),), lambda: layer.cache_clear()),
    "method of tensors": (
        lambda x: x.sigmoid(), lambda: (torch.randn(4, D),), _put(Tensor, "sigmoid", lambda self: self * 5)),
}  # fmt: skip


@pytest.mark.parametrize(
    "name, capture",
    [*((n, "inline") for n in CHANGES), ("method of an argument", "background"), ("result that a function keeps", "background")],
)
def test_what_code_reads_beside_its_model_is_watched(name: str, capture: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, arguments, change = CHANGES[name]
    for owner, attribute in ((Options, "LIMIT"), (Options, "scaled"), (Pair, "weight"), (Registered, "factor"), (Held, "layer")):
        monkeypatch.setattr(owner, attribute, getattr(owner, attribute))  # and what it was behind the test
    monkeypatch.setattr(Tensor, "sigmoid", Tensor.sigmoid)
    monkeypatch.setitem(FACTORS, 1, 2.0)
    monkeypatch.setitem(ELSEWHERE, "shift", 1.0)
    with hotfuse.jit(model, settings=INLINE.with_(capture=capture)) as fast:
        for i in range(14):
            if i == 8:
                assert fast.stats()["graph_calls"] > 0, str(fast.explain(full=True))
                change()
            given = arguments()
            with torch.no_grad():
                torch.testing.assert_close(fast(*given), model(*given))
            assert fast.wait(60)


class Defaults(dict[str, float]):
    def __missing__(self, key: str) -> float:
        return FACTORS[1]


class Numbers(list[float]):
    pass


@functools.singledispatch
def dispatched(_key: Any, x: Tensor) -> Tensor:
    return x


@dispatched.register
def _(_key: int, x: Tensor) -> Tensor:
    return x * 2


class Box:
    factor = 2.0


BOX = Box()


def _imports(x: Tensor, _: Any) -> Tensor:
    import hotfuse_test_module  # type: ignore[import-not-found]

    return x * hotfuse_test_module.FACTOR


HELD: dict[str, tuple[Callable[[], Any], Callable[[Tensor, Any], Tensor], Callable[[Any], Any]]] = {
    "deque": (lambda: deque([2.0, 3.0]), lambda x, d: x * d[0], lambda d: d.__setitem__(0, 5.0)),
    "default dict": (lambda: defaultdict(lambda: 2.0), lambda x, d: x * d["a"], lambda d: d.__setitem__("a", 5.0)),
    "counter": (lambda: Counter(a=2), lambda x, d: x * d["a"], lambda d: d.update(a=3)),
    "chain map": (lambda: ChainMap({}, {"a": 2.0}), lambda x, d: x * d["a"], lambda d: d.maps[1].__setitem__("a", 5.0)),
    "user dict": (lambda: UserDict(a=2.0), lambda x, d: x * d["a"], lambda d: d.__setitem__("a", 5.0)),
    "user list": (lambda: UserList([2.0]), lambda x, d: x * d[0], lambda d: d.__setitem__(0, 5.0)),
    "class of dicts": (Defaults, lambda x, d: x * d["a"], lambda d: d.__setitem__("a", 5.0)),
    "what such a class gives": (Defaults, lambda x, d: x * d["a"], lambda _: FACTORS.__setitem__(1, 5.0)),
    "class of lists": (lambda: Numbers([2.0]), lambda x, d: x * d[0], lambda d: d.__setitem__(0, 5.0)),
    "array": (lambda: array("f", [2.0]), lambda x, d: x * d[0], lambda d: d.__setitem__(0, 5.0)),
    "bytes": (lambda: bytearray(b"\x02"), lambda x, d: x * d[0], lambda d: d.__setitem__(0, 5)),
    "weak reference": (lambda: weakref.ref(BOX), lambda x, d: x * d().factor, lambda d: setattr(d(), "factor", 5.0)),
    "weak dict": (
        lambda: (box := Box(), weakref.WeakKeyDictionary({box: 2.0})), lambda x, d: x * d[1][d[0]],
        lambda d: d[1].__setitem__(d[0], 5.0)),
    "single dispatch": (lambda: 1, lambda x, d: dispatched(d, x), lambda _: dispatched.register(int, lambda _k, x: x * 5)),
    "array of objects": (
        lambda: np.array([2.0, None], dtype=object), lambda x, d: x * d[0], lambda d: d.__setitem__(0, 5.0)),
    "import": (lambda: None, _imports, lambda _: setattr(sys.modules["hotfuse_test_module"], "FACTOR", 5.0)),
}  # fmt: skip
OWN_CODE = {"array of objects"}
"""No look would show that these change."""


@pytest.mark.parametrize("name", HELD)
def test_what_code_holds_is_watched(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, read, change = HELD[name]
    module = types.ModuleType("hotfuse_test_module")
    vars(module)["FACTOR"] = 2.0
    monkeypatch.setitem(sys.modules, "hotfuse_test_module", module)
    monkeypatch.setitem(FACTORS, 1, 2.0)
    held = make()
    with hotfuse.jit(lambda x: read(x, held), settings=INLINE) as fast:
        for i in range(16):
            if i == 8:
                assert (fast.stats()["graph_calls"] > 0) is (name not in OWN_CODE), str(fast.explain(full=True))
                change(held)
            x = torch.randn(4, D)
            torch.testing.assert_close(fast(x), read(x, held))
            assert fast.wait(60)


def test_looking_leaves_dicts_as_they_are() -> None:
    """A dict that makes what is not there is not asked by key."""
    held: defaultdict[str, float] = defaultdict(lambda: 2.0, a=1.0)
    with hotfuse.jit(lambda x: x * held["a"], settings=INLINE) as fast:
        for i in range(16):
            if i == 8:
                del held["a"]
                held["b"] = 3.0
            fast(torch.randn(4, D))
            assert i != 8 or sorted(held) == ["a", "b"]  # what the model's own code made
            assert fast.wait(60)


def test_functions_that_forget_their_results() -> None:
    factor = [1.0]

    @functools.lru_cache
    def made(n: int) -> Tensor:
        return torch.arange(float(n)) * factor[0]

    with hotfuse.jit(lambda x: x + made(D), settings=INLINE) as fast:
        for i in range(20):
            if i == 8:
                factor[0] = 4.0  # what is kept stays as it is
            if i == 14:
                made.cache_clear()
            x = torch.randn(4, D)
            torch.testing.assert_close(fast(x), x + made(D))
            assert fast.wait(60)
        assert fast.stats()["graph_calls"] > 0


def test_results_that_make_room_are_no_change() -> None:
    @functools.lru_cache(maxsize=1)
    def made(n: int) -> Tensor:
        return torch.arange(float(n))

    with hotfuse.jit(lambda x: x + made(x.shape[-1]), settings=INLINE) as fast:
        for i in range(40):
            x = torch.randn(4, D + i % 2)
            torch.testing.assert_close(fast(x), x + torch.arange(float(x.shape[-1])))
            assert fast.wait(60)
        assert fast.stats()["graph_calls"] > 15 and not [e for e in fast.stats()["events"] if e.startswith("drop")]


@pytest.mark.parametrize("size", [None, 1, 8])
def test_what_a_function_keeps_is_found(size: int | None) -> None:
    @functools.lru_cache(maxsize=size)
    def made(n: int, m: int = 2) -> list[int]:
        return [n, m]

    results = [made(1), made(2, m=3)][-(size or 2) :]
    kept = cached_calls(made)
    assert kept is not None and all(any(r is k for k in kept.results) for r in results) and not kept.forgotten()
    made(5)
    assert not kept.forgotten()
    made.cache_clear()
    assert kept.forgotten()


def test_data_of_tensors_from_elsewhere_that_code_reads() -> None:
    limit = torch.tensor(2.0)
    with hotfuse.jit(lambda x: x * limit.item(), settings=INLINE) as fast:
        for i in range(16):
            if i == 8:
                assert fast.stats()["graph_calls"] > 0
                limit.fill_(3.0)
            x = torch.randn(4, D)
            torch.testing.assert_close(fast(x), x * limit.item())
            assert fast.wait(60)


def test_hooks_of_all_modules() -> None:
    model, heard, hooks = nn.Sequential(nn.Linear(D, D), nn.ReLU()), list[str](), list[Any]()
    with torch.no_grad(), hotfuse.jit(model, settings=INLINE) as fast:
        for i in range(20):
            if i == 8:
                assert fast.stats()["graph_calls"] > 0
                hooks.append(nn.modules.module.register_module_forward_hook(lambda m, _a, _r: heard.append(type(m).__name__)))
            if i == 12:
                hooks[0].remove()
            fast(torch.randn(4, D))
            assert fast.wait(60)
        assert heard == ["Linear", "ReLU", "Sequential"] * 4
        assert fast.stats()["graph_calls"] > 0


class OfItself(nn.Module):
    """Asks whether it is given its own weight, and writes to what it is given."""

    weight: Tensor

    def __init__(self, *, writes: bool) -> None:
        super().__init__()
        self.writes = writes
        self.register_buffer("weight", torch.randn(4, D))

    def forward(self, x: Tensor) -> Tensor:
        if self.writes:
            x.add_(1)
            return x + self.weight
        return x * 2 if x is self.weight else x * 3


@pytest.mark.parametrize("writes", [False, True])
def test_weights_as_arguments(*, writes: bool) -> None:
    model, same = OfItself(writes=writes), OfItself(writes=writes)
    same.load_state_dict(model.state_dict())
    with torch.no_grad(), hotfuse.jit(model, settings=INLINE) as fast:
        for i in range(20):
            x = torch.randn(4, D)
            own = i > 8 and i % 2
            torch.testing.assert_close(fast(model.weight if own else x.clone()), same(same.weight if own else x.clone()))
            torch.testing.assert_close(model.weight, same.weight)
            assert fast.wait(60)
        assert fast.stats()["graph_calls"] >= 8 and fast.stats()["events"]["calls_unlike_captured"] == 6


KINDS: list[Any] = [slice(0, True), slice(0, 1), slice(0.0, 1), slice(np.int64(0), 1), {1: 2}, {True: 2}, {1.0: 2}, {"a": {1: 2}},
         {"a": {True: 2}}]  # fmt: skip


def test_what_is_equal_and_of_another_type_is_another_structure() -> None:
    specs = [flatten(kind)[1] for kind in KINDS]
    assert len(set(specs)) == len(KINDS) == len({repr(s) for s in specs})
    assert [flatten(kind)[1] for kind in KINDS] == specs


def test_slices_and_keys_of_another_type() -> None:
    def model(x: Tensor, part: slice, table: dict[Any, float]) -> Tensor:
        return x[0 : int(part.stop)] * (2 if part.stop is True else 3) * (5 if type(next(iter(table))) is bool else 7)

    with hotfuse.jit(model, settings=INLINE) as fast:
        for i in range(24):
            late = i > 9
            given = torch.randn(4, D), slice(0, True if late and i % 2 else 1), {True if late and i % 3 else 1: 1.0}
            torch.testing.assert_close(fast(*given), model(*given))
            assert fast.wait(60)
        assert fast.stats()["graph_calls"] > 12


def test_tensors_in_slices_are_arguments() -> None:
    begin = torch.tensor(1)
    with hotfuse.jit(lambda x, part: x[part] * 2, settings=INLINE) as fast:
        for i in range(12):
            begin.fill_(1 + i % 3)
            x = torch.randn(4, D)
            torch.testing.assert_close(fast(x, slice(begin, None)), x[int(begin) :] * 2)
            assert fast.wait(60)


def test_calls_are_known_by_what_their_classes_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = flatten(Options(torch.randn(4, D)))[1]
    before = call_name(spec)
    assert before == call_name(spec) != repr(spec) and call_name(flatten([torch.ones(1)])[1]).isprintable()
    monkeypatch.setattr(Options, "LIMIT", 0.25)
    assert call_name(spec) != before


def test_random_numbers_of_the_program_are_its_own() -> None:
    """Nothing that is done beside calls, or to serve them, draws from generators of the process."""
    model = nn.Sequential(nn.Linear(D, D), nn.GELU(), nn.Linear(D, D)).eval()

    def states() -> tuple[Any, ...]:
        return torch.get_rng_state().tolist(), random.getstate(), repr(np.random.get_state(legacy=False))

    with torch.no_grad(), hotfuse.jit(model, settings=Settings(capture="inline", hot_calls=2)) as fast:
        x = torch.randn(4, D)
        before = states()
        for _ in range(12):
            fast(x)
            assert fast.wait(60)
        assert fast.stats()["graph_calls"] > 0
        requires._found()  # once in a process, as soon as a model is hot
        assert states() == before
