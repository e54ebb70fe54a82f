"""Calls of a known structure: found exactly where taking them apart gives the same."""

from __future__ import annotations

import collections
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from hotfuse.base.known_structure import KnownStructures, matcher
from hotfuse.base.structure import take_call


class Layer:
    def __init__(self, rows: int = 4, scale: float = 1.0, name: str = "k") -> None:
        self.keys, self.rows, self.scale, self.name, self.on = torch.zeros(abs(rows)), rows, scale, name, True


class Cache:
    def __init__(self, *layers: Any) -> None:
        self.layers, self.seen, self.window = list(layers), {"a": 1, "b": torch.ones(2)}, slice(1, None)


class Sized(Cache):
    """An attribute that the class has a say in."""

    @property
    def layers(self) -> Any:
        return self.__dict__["layers"]

    @layers.setter
    def layers(self, given: Any) -> None:
        self.__dict__["layers"] = given


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass(slots=True)
class Slotted:
    x: torch.Tensor


SHARED = Layer()
CALLS: list[Any] = [
    torch.ones(2), torch.nn.Parameter(torch.ones(2)), 1, True, 1.0, -0.0, 0.0, math.nan, 1j, "a", None, torch.float32,
    slice(1, 2), slice(1, 3), (), (1,), (torch.ones(1), 2), [torch.ones(1)], [], {"a": 1}, {"a": True}, {"b": 1},
    {"a": 1, "b": 2}, {"b": 2, "a": 1}, torch.Size([2, 3]), Pair(1, torch.ones(2)), (1, torch.ones(2)),
    collections.OrderedDict(a=1), Slotted(torch.ones(2)), Layer(), Layer(5), Layer(-1), Layer(scale=2.0), Layer(name="v"),
    Cache(), Cache(Layer()), Cache(Layer(), Layer()), Cache(SHARED, SHARED), Sized(Layer()), Cache(Cache(Layer())),
    [SHARED, SHARED], [Layer(), SHARED], np.float64(0.0), np.float64(-0.0), np.complex128(1j),
]  # fmt: skip


def same(got: Any, want: Any) -> None:
    assert got.spec == want.spec and len(got.leaves) == len(want.leaves)
    assert all(a is b or torch.equal(a, b) for a, b in zip(got.leaves, want.leaves, strict=True))
    assert list(map(id, got.holders)) == list(map(id, want.holders))


@pytest.mark.parametrize("known", range(len(CALLS)))
def test_a_matcher_finds_what_has_its_spec_and_nothing_else(known: int) -> None:
    given = (CALLS[known], torch.ones(1))
    spec = take_call(given, {"k": CALLS[known]}).spec
    match = matcher(spec)
    if match is None:
        assert type(CALLS[known]) in (collections.OrderedDict, Slotted, Sized)
        return
    for other in CALLS:
        both = (other, torch.ones(1))
        for args, kwargs in [(both, {"k": other}), (both, {"k": CALLS[known]}), ((other, 1), {"k": other}),
                             ((other,), {"k": other}), (both, {"l": other})]:  # fmt: skip
            want, got = take_call(args, kwargs), match(args, kwargs)
            assert (got is not None) is (want.spec == spec), (other, args)
            if got is not None:
                same(got, want)


def test_counts_are_read_anew_and_changed_objects_are_noticed() -> None:
    known, cache = KnownStructures(), Cache(Layer(), Layer())
    for step in range(6):
        cache.layers[0].rows = step
        same(known.take((cache,), {})[0], take_call((cache,), {}))
    first, structure = known.take((cache,), {})
    again, same_one = known.take((cache,), {})
    assert structure is not None and again.spec is first.spec and same_one is structure
    assert [first.leaves[i] for i in structure.tensors] == [t for t in first.leaves if t.dtype is not torch.bool]
    assert len(structure.counts) == 3 and {*structure.counts, *structure.tensors} == set(range(len(first.leaves)))
    cache.layers[1].name = "other"
    same(known.take((cache,), {})[0], take_call((cache,), {}))
    cache.layers[1] = cache.layers[0]
    same(known.take((cache,), {})[0], take_call((cache,), {}))
    cache.layers.append(Layer())
    same(known.take((cache,), {})[0], take_call((cache,), {}))
    del cache.seen["a"]
    same(known.take((cache,), {})[0], take_call((cache,), {}))


def test_a_dozen_structures_of_one_kind_of_call_are_all_known() -> None:
    """A mode, a factor and a tag that take turns: a program has that many kinds of calls under the same names."""
    known = KnownStructures()
    kinds = [(mode, scale, tag) for mode in ("mean", "max") for scale in (None, 1.5) for tag in ("a", "b", "c")]
    for _ in range(3):
        for mode, scale, tag in kinds:
            for _ in range(2):
                known.take((), {"x": torch.ones(2), "mode": mode, "scale": scale, "tag": tag})
    for mode, scale, tag in kinds:
        taken, structure = known.take((), {"x": torch.ones(2), "mode": mode, "scale": scale, "tag": tag})
        assert structure is not None and taken.spec is structure.spec
