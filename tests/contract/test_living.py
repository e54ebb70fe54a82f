"""Objects that there are: a walk through them goes on while others come and go."""

from __future__ import annotations

import gc

import pytest
import torch

from hotfuse.base.living import Living
from hotfuse.frontends.onnx import packed_weights
from hotfuse.frontends.onnx.packed_weights import PackedWeight


class Member:
    """Anything that can be referred to weakly."""


def test_a_walk_goes_through_those_that_there_were() -> None:
    members, kept = Living[Member](), [Member() for _ in range(3)]
    for member in kept:
        members.add(member)
        members.add(member)
    found: list[Member] = []
    for member in members:  # a WeakSet: "Set changed size during iteration"
        found.append(member)
        kept.append(Member())
        members.add(kept[-1])
    assert found == kept[:3] and len(members) == 6
    members.discard(kept[0])
    members.discard(Member())
    assert set(members) == set(kept[1:])
    del member, found, kept[1:]
    gc.collect()
    assert not members and list(members) == []


def test_weights_are_packed_while_another_thread_packs_its_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other thread's weight joins the holders while memory of all is counted."""
    more: list[PackedWeight] = []

    class Counted(PackedWeight):
        @property
        def bytes(self) -> int:
            more.append(PackedWeight(lambda: torch.zeros(1), 4))
            packed_weights._STORE.holders.add(more[-1])  # pyright: ignore[reportPrivateUsage]
            return super().bytes

    monkeypatch.setattr(packed_weights._STORE, "holders", type(packed_weights._STORE.holders)())  # pyright: ignore[reportPrivateUsage]
    first, second = Counted(lambda: torch.zeros(1), 4), Counted(lambda: torch.zeros(1), 4)
    assert first.get() is not None and second.get() is not None and more
