"""What is made ready beside a known model's first call: it serves if it gives the model's own answer, and only then."""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hotfuse
from hotfuse import api
from hotfuse.base.settings import Settings

WON = "it won in an earlier process, and was proven again"
DURING: dict[str, Any] = {}
"""What the model does in its forward pass, by name; not read by its code's own names."""


def _during() -> None:
    if (todo := DURING.get("now")) is not None:
        todo()


class Net(nn.Module):
    """Three layers of which kernels are made."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Plain."""
        return self.layers(x)


class Served(Net):
    """Calls what a test wants while the first call is under way, before it reads its weights."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As a module's own."""
        _during()
        return super().__call__(*args, **kwargs)


def _net() -> Net:
    torch.manual_seed(0)
    return Served().eval()


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """Settings with a cache in which a plan of the model has won."""
    settings = Settings(cache_dir=tmp_path_factory.mktemp("home"), threads=1, idle=False, watch=False)
    with hotfuse.jit(_net(), settings=settings) as fast, torch.no_grad():
        until = time.monotonic() + 100
        while time.monotonic() < until and not fast.stats()["calls_per_tier"]["1"]:
            fast(torch.randn(16, 64))
        assert fast.wait(60) and fast.stats()["calls_per_tier"]["1"], fast.explain(full=True)
    return settings


def _served(fast: Any, net: nn.Module) -> list[str]:
    """Calls until a plan of kernels answers, each compared; why plans were deployed, in order."""
    until = time.monotonic() + 60
    with torch.no_grad():
        while time.monotonic() < until and not fast.stats()["calls_per_tier"]["1"]:
            x = torch.randn(16, 64)
            assert float((fast(x) - net(x)).abs().max()) < 1e-4
    fast.wait(30)
    return [d["why"] for d in fast.explain(full=True).to_dict()["decisions"] if d["action"] == "deploy"]


def test_it_serves_before_tier_0_is_compared(taught: Settings) -> None:
    net = _net()
    with hotfuse.jit(net, settings=taught) as fast:
        assert _served(fast, net)[:1] == [WON]
        assert "not_recalled" not in fast.stats()["events"]


def test_it_serves_before_tier_0_is_made(taught: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """What won answers calls while tier 0, which takes as long as reading all of that plan, is still to come; then it is there."""
    make, net, shown = api.compile_tier0, _net(), list[int]()

    def held(*args: Any, **kwargs: Any) -> Any:
        until = time.monotonic() + 30
        while time.monotonic() < until and not fast.stats()["calls_per_tier"]["1"]:
            time.sleep(0.002)
        shown.append(fast.stats()["calls_per_tier"]["1"])
        return make(*args, **kwargs)

    monkeypatch.setattr(api, "compile_tier0", held)
    with hotfuse.jit(net, settings=taught) as fast:
        assert _served(fast, net) == [WON, "outputs agreed with the model's own"]
        assert shown and shown[0] > 0
        (entry,) = next(iter(fast._engine.sites.values())).entries  # pyright: ignore[reportPrivateUsage]
        x = torch.randn(16, 64)
        with torch.no_grad():
            assert entry.baseline.artifacts and float((entry.baseline.run(x)[0] - net(x)).abs().max()) < 1e-4


def test_calls_that_show_more_sizes_meanwhile_keep_a_graph_that_takes_them(tmp_path: Path) -> None:
    """The kept graph leaves the dims open that vary; the first call alone does not show that any do."""
    settings = Settings(cache_dir=tmp_path, threads=1, idle=False, watch=False)
    with hotfuse.jit(_net(), settings=settings) as fast, torch.no_grad():
        until, rows = time.monotonic() + 100, 16
        while time.monotonic() < until and not fast.stats()["calls_per_tier"]["1"]:
            rows = 16 + (rows - 15) % 9
            fast(torch.randn(rows, 64))
        assert fast.wait(60) and fast.stats()["calls_per_tier"]["1"], fast.explain(full=True)
    net = _net()
    with hotfuse.jit(net, settings=settings) as fast:

        def call_with_other_sizes() -> None:
            DURING.clear()
            for rows in (17, 19, 21):
                fast(torch.randn(rows, 64))

        DURING["now"] = call_with_other_sizes
        assert _served(fast, net)[:1] == [WON]
        assert "not_recalled" not in fast.stats()["events"], fast.explain(full=True)


def test_a_graph_for_one_size_serves_it_where_others_are_called_too(taught: Settings, tmp_path: Path) -> None:
    """The calls of the process that kept it had one size; here they vary from the first on, and the rest is captured beside."""
    shutil.copytree(str(taught.cache_dir), tmp_path / "home")
    net = _net()
    with hotfuse.jit(net, settings=taught.with_(cache_dir=tmp_path / "home")) as fast:

        def call_with_other_sizes() -> None:
            DURING.clear()
            for rows in (17, 19, 21):
                fast(torch.randn(rows, 64))

        DURING["now"] = call_with_other_sizes
        assert _served(fast, net)[:1] == [WON]
        assert "not_recalled" not in fast.stats()["events"], fast.explain(full=True)
        before, until = fast.stats()["calls_per_tier"]["module"], time.monotonic() + 60
        with torch.no_grad():
            for rows in (17, 16, 18, 19, 16):
                x = torch.randn(rows, 64)
                assert float((fast(x) - net(x)).abs().max()) < 1e-4
            assert fast.stats()["calls_per_tier"]["module"] > before  # it takes no other sizes
            captured = [d["why"] for d in fast.explain(full=True).to_dict()["decisions"] if d["action"] == "capture"]
            while time.monotonic() < until and len(captured) < 2:
                fast(torch.randn(18, 64))
                captured = [d["why"] for d in fast.explain(full=True).to_dict()["decisions"] if d["action"] == "capture"]
        assert len(captured) >= 2, fast.explain(full=True)


@pytest.mark.parametrize("behind", [False, True], ids=["a write that torch shows", "a write behind torch's back"])
def test_weights_written_during_the_first_call_are_not_served_old(taught: Settings, *, behind: bool) -> None:
    """Everything is packed by then; what is packed is not what the model answers with."""
    net = _net()
    linear = net.layers[1]
    assert isinstance(linear, nn.Linear)

    def write() -> None:
        DURING.clear()
        seen.wait(20)
        with torch.no_grad():
            (linear.weight.data if behind else linear.weight).mul_(-3.0)

    seen = threading.Event()
    DURING["now"] = write
    try:
        with hotfuse.jit(net, settings=taught) as fast:
            fast._engine._capturer.graphs.remembered = _telling(fast._engine._capturer.graphs.remembered, seen)
            _served(fast, net)
            assert seen.is_set()
    finally:
        DURING.clear()


def _telling(recall: Any, seen: threading.Event) -> Any:
    def told(*args: Any) -> Any:
        found = recall(*args)
        seen.set()
        return found

    return told


def test_a_first_call_that_changes_the_model_is_begun_again(taught: Settings) -> None:
    net = _net()
    DURING["now"] = lambda: (DURING.clear(), time.sleep(0.3), setattr(net, "cache", 1))
    try:
        with hotfuse.jit(net, settings=taught) as fast:
            x = torch.randn(16, 64)
            with torch.no_grad():
                assert torch.equal(fast(x), net(x))
            fast.wait(60)
            with torch.no_grad():
                assert float((fast(x) - net(x)).abs().max()) < 1e-4
            assert fast.stats()["events"]["not_recalled"] >= 1
    finally:
        DURING.clear()


def test_a_first_call_that_raises_leaves_nothing_pending(taught: Settings) -> None:
    net, x = _net(), torch.randn(16, 64)

    def fail() -> None:
        DURING.clear()
        raise RuntimeError("this once")

    DURING["now"] = fail
    with hotfuse.jit(net, settings=taught) as fast, torch.no_grad():
        with pytest.raises(RuntimeError, match="this once"):
            fast(x)
        assert fast.wait(30)
        assert float((fast(x) - net(x)).abs().max()) < 1e-4


class Counting(Net):
    """Notes how often it is pickled, which holds the interpreter lock up for the next calls."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """As a module's own."""
        PICKLED.append(threading.current_thread().name)
        return super().__reduce_ex__(protocol)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As a module's own."""
        _during()
        return super().__call__(*args, **kwargs)


PICKLED: list[str] = []


@pytest.mark.parametrize("changes", [False, True], ids=["as it was", "another model behind its first call"])
def test_a_model_is_pickled_once_to_be_sent_and_once_to_be_named(tmp_path: Path, *, changes: bool) -> None:
    settings = Settings(cache_dir=tmp_path, threads=1, idle=False, watch=False, tiers=0)
    net = Counting().eval()

    def change() -> None:
        DURING.clear()
        until = time.monotonic() + 20
        while fast._engine.model._packed is None and time.monotonic() < until:
            time.sleep(0.001)
        net.layers.append(nn.ReLU())

    PICKLED.clear()
    try:
        with hotfuse.jit(net, settings=settings) as fast, torch.no_grad():
            if changes:
                DURING["now"] = change
            for _ in range(4):
                x = torch.randn(16, 64)
                assert torch.equal(fast(x), net(x))
            assert fast.wait(60)
            assert fast._engine.model._packed is None
            assert fast(x).shape == x.shape and float((fast(x) - net(x)).abs().max()) < 1e-5
            assert fast.stats()["calls_per_tier"]["0"], fast.explain(full=True)
    finally:
        DURING.clear()
    assert len(PICKLED) == (4 if changes else 2), PICKLED
