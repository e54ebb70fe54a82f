"""Generated code has names for profilers, which lead back to the model's ops."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import hotfuse
from hotfuse import Settings
from hotfuse.base.errors import HotfuseError, InputError
from hotfuse.native import perf_map
from hotfuse.native.jit import compile_object
from hotfuse.native.target import host
from tests.races import kernels_win, slow_library

TWO = """
define void @first(ptr %a, ptr %b) {
  call void @second(ptr %a)
  ret void
}
define internal void @second(ptr %a) noinline {
  store volatile i32 7, ptr %a
  ret void
}
"""


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "perf.map"
    monkeypatch.setattr(perf_map, "place", lambda: place)
    slow_library(monkeypatch)
    kernels_win(monkeypatch)
    with torch.no_grad():
        yield place


def test_every_function_of_an_object_has_its_place(named: Path) -> None:
    code = compile_object(TWO, host()).code
    found = {f.name: f for f in perf_map.functions(code)}
    assert set(found) == {"first", "second"} and all(f.size > 0 for f in found.values())
    assert perf_map.note(code, "first", 0x10000, "linear\n+ gelu") == 2
    lines = dict((line.split(" ", 2)[2], line.split()) for line in named.read_text().splitlines())
    assert set(lines) == {"hotfuse linear + gelu", "hotfuse linear + gelu: second"}
    begin, size = (int(x, 16) for x in lines["hotfuse linear + gelu"][:2])
    assert (begin, size) == (0x10000, found["first"].size)
    assert int(lines["hotfuse linear + gelu: second"][0], 16) == 0x10000 - found["first"].at + found["second"].at


def test_what_is_no_object_is_said(named: Path) -> None:
    with pytest.raises(HotfuseError, match="format"):
        perf_map.functions(b"MZ nothing")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.up(x), -1)


@pytest.mark.parametrize("wanted", [True, False])
def test_kernels_lead_back_to_the_model(named: Path, wanted: bool) -> None:
    fast = hotfuse.jit(Net().eval(), settings=Settings(capture="inline", hot_calls=1, perf_map=wanted))
    for _ in range(4):
        fast(torch.randn(5, 32))
    assert fast.stats()["calls_per_tier"]["1"] >= 1
    if not wanted:
        assert not named.exists()
        return
    text = named.read_text()
    assert "linear" in text and "native run of parts" in text and "test_perf_map.py" in text, text


def test_the_environment_switches_it_on(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not Settings().perf_map
    monkeypatch.setenv("HOTFUSE_PERF_MAP", "1")
    assert Settings().perf_map and not Settings(perf_map=False).perf_map
    monkeypatch.setenv("HOTFUSE_PERF_MAP", "yes")
    with pytest.raises(InputError, match="HOTFUSE_PERF_MAP"):
        Settings()
