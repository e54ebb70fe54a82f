"""A kept graph that gives another answer than the model's own code is captured anew: it is not tried again, and the model is not
given up."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch import nn

import hotfuse
from hotfuse.api import name_of
from hotfuse.base.settings import Settings
from hotfuse.compile import captures
from hotfuse.compile.captures import Known, known


class Net(nn.Module):
    def __init__(self, gain: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.gain = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32)), gain

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) * self.gain


def _start(net: Net, settings: Settings) -> list[str]:
    """A start of the model: calls until a graph serves, each compared with eager's; why graphs of earlier processes did not."""
    with hotfuse.jit(net, settings=settings) as fast, torch.no_grad():
        until = time.monotonic() + 60
        while time.monotonic() < until and not fast.stats()["plans"]:
            x = torch.randn(4, 32)
            assert torch.allclose(fast(x), net(x), atol=1e-5)
            time.sleep(0.005)
        assert fast.wait(60) and fast.stats()["plans"], fast.explain(full=True)
        for _ in range(10):
            x = torch.randn(4, 32)
            assert torch.allclose(fast(x), net(x), atol=1e-5)
        return [d["why"] for d in fast.explain(full=True).to_dict()["decisions"] if "made" in d["evidence"]]


def _place(net: Net, settings: Settings) -> Known:
    found = known("torch", lambda: name_of(net), settings)
    assert found is not None
    return found


def test_a_graph_of_another_model_under_its_name(tmp_path: Path) -> None:
    settings = Settings(cache_dir=tmp_path, watch=False, threads=1)
    one, other = (Net(gain).eval() for gain in (2.0, 3.0))
    assert _start(one, settings) == []
    source, place = _place(one, settings), _place(other, settings)
    [(structure, call)] = source.remembered()
    message = source.folder.get(source.capture(structure, call))
    assert message is not None
    place.folder.put(place.capture(structure, call), *message)
    place.remember(structure, call)
    assert _start(other, settings) == ["outputs disagreed with the model's own"]
    captures.believe_again()  # as another process, which finds what this one captured
    assert _start(other, settings) == []
