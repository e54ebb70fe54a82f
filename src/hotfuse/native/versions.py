"""Where a tensor keeps its version and a dict its tag: numbers that grow with every change, one load each.

Neither place is documented, so both are *found* on live objects, then proven on every way to change one. A tensor's version lies
behind a pointer in its C++ part that a `detach()` shares with it and a `.data` does not. A dict's tag (PEP 509) is a word of the
object that is another one after every change. Where a search or a proof fails there is a reason instead, and callers ask Python.
"""

from __future__ import annotations

import ctypes
import functools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from hotfuse.base.errors import InternalError
from hotfuse.base.faults import error_text
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.native import tensors

_IMPL_WORDS = 24
_COUNTER_HALVES = 8
"""How much of what keeps the version is searched, in words of 32 bits: no smaller block comes from an allocator."""


@dataclass(frozen=True, slots=True)
class VersionPlaces:
    """Where a tensor's version lies, in bytes."""

    counter_at: int
    """The pointer to what keeps the version, in the C++ part; null for tensors of inference mode."""
    number_at: int
    """The version, 32 bits, in there."""


def _impl(t: torch.Tensor) -> list[int]:
    return list((ctypes.c_uint64 * _IMPL_WORDS).from_address(t._cdata))  # pyright: ignore[reportPrivateUsage]


def _halves(address: int) -> list[int]:
    return list((ctypes.c_uint32 * _COUNTER_HALVES).from_address(address))


def _specimens() -> list[torch.Tensor]:
    with torch.inference_mode(False):
        return [torch.zeros(3, 4), nn.Parameter(torch.zeros(5)), torch.zeros((), dtype=torch.int64), torch.zeros(0, 2)]


def _only(candidates: Sequence[set[int]], what: str) -> int:
    common = set[int].intersection(*candidates)
    if len(common) != 1:
        raise InternalError(f"{len(common)} places may hold {what}")
    return common.pop()


def _counter_at(ts: Sequence[torch.Tensor]) -> int:
    found: list[set[int]] = []
    for t in ts:
        own, shared, apart, other = _impl(t), _impl(t.detach()), _impl(t.data), _impl(t.detach().clone())
        found.append({i for i in range(_IMPL_WORDS) if own[i] == shared[i] and own[i] not in (apart[i], other[i])})
    return 8 * _only(found, "a tensor's version")


def _number_at(ts: Sequence[torch.Tensor], counter_at: int) -> int:
    found: list[set[int]] = []
    for t in ts:
        counter = _impl(t)[counter_at // 8]
        for times in (1, 2, 5):
            before, version = _halves(counter), t._version  # pyright: ignore[reportPrivateUsage]
            with torch.no_grad():
                for _ in range(times):
                    t.add_(0)
            after = _halves(counter)
            found.append({i for i in range(_COUNTER_HALVES) if before[i] == version and after[i] == version + times})
    return 4 * _only(found, "the number of a tensor's version")


@functools.cache
def version_places() -> VersionPlaces | str:
    """Where versions lie, or why that is not known."""
    if why := tensors.unavailable():
        return why
    try:
        ts = _specimens()
        counter_at = _counter_at(ts)
        places = VersionPlaces(counter_at, _number_at(ts, counter_at))
        for t in ts:
            for view in (t, t.detach(), t.view(-1), t.data, nn.Parameter(t.detach(), requires_grad=False)):
                if read_version(view, places) != view._version:  # pyright: ignore[reportPrivateUsage]
                    raise InternalError("native code reads another version of a tensor than Python")
        return places
    except Exception as e:  # whatever another torch does otherwise is a reason to ask Python
        return error_text(e)


def read_version(t: torch.Tensor, places: VersionPlaces) -> int:
    """What native code would read."""
    return ctypes.c_uint32.from_address(_impl(t)[places.counter_at // 8] + places.number_at).value


# --- dicts


class _Plain:
    """Attributes without a `__setattr__` of its own: stores to it take the interpreter's fast ways."""

    def __init__(self) -> None:
        self.a = 1


def _changes() -> list[tuple[dict[Any, Any], Callable[[], object]]]:
    """Dicts, each with one change of it."""
    plain, module = _Plain(), nn.Linear(2, 2, device="meta")  # whose weights draw no random numbers of the program's
    kinds: list[Callable[[], dict[Any, Any]]] = [lambda: {"a": 1, "b": 2}, lambda: OrderedDict(a=1, b=2)]
    found: list[tuple[dict[Any, Any], Callable[[], object]]] = []
    for kind in kinds:
        changes: list[Callable[[dict[Any, Any]], object]] = [
            lambda d: d.__setitem__("a", 3), lambda d: d.__setitem__("new", 3), lambda d: d.__delitem__("a"), lambda d: d.pop("b"),
            lambda d: d.popitem(), lambda d: d.clear(), lambda d: d.update(a=5), lambda d: d.setdefault("z", 1),
            lambda d: d.__ior__({"a": 7}),
        ]  # fmt: skip
        for change in changes:
            d = kind()
            found.append((d, functools.partial(change, d)))

    def store() -> None:
        for i in range(64):  # so often that the interpreter has specialized it
            plain.a = i

    found += [
        (plain.__dict__, store),
        (plain.__dict__, lambda: setattr(plain, "a", object())),
        (plain.__dict__, lambda: delattr(plain, "a")),
        (module.__dict__, lambda: setattr(module, "in_features", 3)),
        (module.__dict__, lambda: setattr(module, "more", 3)),
        (module.__dict__, lambda: module.train(not module.training)),
        (module.__dict__, lambda: object.__setattr__(module, "in_features", 4)),
        (module._parameters, lambda: setattr(module, "weight", nn.Parameter(torch.zeros(1)))),  # pyright: ignore[reportPrivateUsage]
        (module._forward_hooks, lambda: module.register_forward_hook(lambda *_a: None)),  # pyright: ignore[reportPrivateUsage]
        (module._modules, lambda: module.add_module("child", None)),  # pyright: ignore[reportPrivateUsage]
    ]  # fmt: skip
    return found


@functools.cache
def dict_tag_at() -> int | str:
    """Where a dict's tag lies, in bytes, or why there is none: then its values must be looked up one by one."""
    words = dict.__basicsize__ // 8

    def read(d: dict[Any, Any]) -> list[int]:
        return list((ctypes.c_uint64 * words).from_address(id(d)))

    candidates = set(range(2, words))  # behind what every object begins with
    seen: dict[int, set[int]] = {i: set() for i in candidates}
    for d, change in _changes():
        before = read(d)
        values = dict(d)  # reading is no change
        if read(d)[2:] != before[2:] or values != d:
            return "reading a dict changes it"
        change()
        after = read(d)
        candidates = {i for i in candidates if after[i] != before[i] and after[i] not in seen[i]}
        for i in candidates:
            seen[i] |= {before[i], after[i]}
    return 8 * candidates.pop() if len(candidates) == 1 else f"{len(candidates)} words of a dict tell of every change"
