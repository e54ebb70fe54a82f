"""What calls change of a model is known to later processes: no capture fails first, and results are eager's (decision 390)."""

from __future__ import annotations

import copy
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hotfuse
from hotfuse import api
from hotfuse.base.settings import Settings
from hotfuse.compile import changed_state
from hotfuse.compile.changed_state import remember_state, remembered_state
from hotfuse.frontends.lifted_state import LiftedState, StatePlaces
from hotfuse.frontends.naming import structure_name

D = 32


class Stream(nn.Module):
    """A buffer that calls write, an attribute that they set, and a count."""

    sums: torch.Tensor

    def __init__(self, width: int = D) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.LayerNorm(D), nn.Linear(D, width), nn.GELU(), nn.Linear(width, D))
        self.register_buffer("sums", torch.zeros(D))
        self.last: torch.Tensor | None = None
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        last = x if self.last is None else self.last
        self.sums.mul_(0.5).add_(x.mean(0))
        self.calls += 1
        self.last = y = self.layers(x + 0.1 * last) + self.sums
        return y * self.calls


def _stream() -> Stream:
    torch.manual_seed(0)
    return Stream().eval()


def _serve(settings: Settings) -> dict[str, Any]:
    """A start of the model: calls until a graph of it serves, each compared with eager's; what was decided."""
    net = _stream()
    eager = copy.deepcopy(net)
    with hotfuse.jit(net, settings=settings) as fast, torch.no_grad():
        until = time.monotonic() + 90
        while time.monotonic() < until and not fast.stats()["plans"]:
            x = torch.randn(4, D)
            assert torch.allclose(fast(x) / net.calls, eager(x) / eager.calls, atol=1e-4)
        assert fast.stats()["plans"], fast.explain(full=True)
        assert net.calls == eager.calls and torch.allclose(net.sums, eager.sums, atol=1e-5)
        return fast.explain(full=True).to_dict()


def _refused(found: dict[str, Any]) -> list[str]:
    return [d["evidence"].get("because", "") for d in found["decisions"] if d["action"] == "refuse"]


def test_a_second_start_lifts_what_the_first_saw_change(tmp_path: Path) -> None:
    settings = Settings(cache_dir=tmp_path, threads=1, idle=False, watch=False)
    first, second = _serve(settings), _serve(settings)
    known = "calls of an earlier process changed calls, last, sums"
    assert _refused(first) and known not in _refused(first)
    assert _refused(second) == [known]


def test_it_is_known_whatever_the_attributes_hold_and_of_no_other_model(tmp_path: Path) -> None:
    settings = Settings(cache_dir=tmp_path)
    state = StatePlaces(frozenset({"sums"}), frozenset({"calls", "last"}))
    net = _stream()
    assert remembered_state(net, settings) is None
    remember_state(net, state, settings)
    later = _stream()
    later.calls, later.last = 7, torch.ones(4, D)
    assert remembered_state(later, settings) == state
    assert remembered_state(Stream(2 * D).eval(), settings) is None, "another structure"
    assert remembered_state(_stream().train(), settings) is None, "another mode"
    assert remembered_state(lambda x: x, settings) is None


def test_a_model_with_its_state_lifted_has_one_name_whatever_it_holds_and_whoever_named_the_places() -> None:
    net, later, other = _stream(), _stream(), _stream()
    later.calls, later.last = 7, torch.ones(4, D)
    other.layers = nn.Sequential(nn.Linear(D, D))
    read: list[str] = json.loads('["sums", "calls", "last"]')  # equal texts, though not the objects that the module has
    names = [api.name_of(LiftedState(m, (read[0],), (read[1], read[2]))) for m in (later, other)]
    assert api.name_of(LiftedState(net, ("sums",), ("calls", "last"))) == names[0] != names[1]


def test_models_that_brought_no_state_are_remembered_beside_each_other(tmp_path: Path) -> None:
    settings = Settings(cache_dir=tmp_path)
    small, large = StatePlaces(frozenset({"sums"})), StatePlaces(frozenset(), frozenset({"calls"}))
    remember_state(_stream(), small, settings)
    remember_state(Stream(2 * D).eval(), large, settings)
    assert remembered_state(_stream(), settings) == small
    assert remembered_state(Stream(2 * D).eval(), settings) == large


def test_many_models_of_a_class_that_change_the_same_take_one_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, state, named = Settings(cache_dir=tmp_path), StatePlaces(frozenset({"sums"})), list[nn.Module]()
    for width in range(1, 9):
        remember_state(Stream(width).eval(), state, settings)
    other = StatePlaces(frozenset({"none_of_theirs"}))
    remember_state(Stream(9).eval(), other, settings)

    def counted(model: nn.Module, without: Any) -> str:
        named.append(model)
        return structure_name(model, without)

    monkeypatch.setattr(changed_state, "structure_name", counted)
    assert remembered_state(Stream(1).eval(), settings) == state
    assert remembered_state(Stream(10).eval(), settings) is None
    assert len(named) == 2


@pytest.mark.parametrize(("buffers", "attributes"), [((), ()), (("no",), ()), (("sums",), ("no",)), ((), ("layers",))])
def test_what_a_model_does_not_have_is_not_lifted(buffers: tuple[str, ...], attributes: tuple[str, ...]) -> None:
    assert not StatePlaces(frozenset(buffers), frozenset(attributes)).can_be_lifted(_stream())
    assert StatePlaces(frozenset({"sums"}), frozenset({"calls"})).can_be_lifted(_stream())
