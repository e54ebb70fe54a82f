"""On a CUDA device: the model's own kernels are replayed within a second, and stop where the model or the call is another one."""

from __future__ import annotations

import gc
import time
from typing import Any

import pytest
import torch
from torch import nn

import hotfuse
from hotfuse.backends.cuda import first_use
from hotfuse.base.settings import Settings

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device: make test-gpu", allow_module_level=True)

SETTINGS = Settings(record=False, idle=False, cache="off")
CALLS = 60


def block(width: int = 128) -> Any:
    return nn.Sequential(*[nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU()) for _ in range(24)])


def fresh(rows: int = 8) -> torch.Tensor:
    return torch.randn(rows, 128, device="cuda")


def own(fast: hotfuse.Jit) -> dict[str, Any]:
    return fast.explain().to_dict()["own_recordings"]


def called(fast: hotfuse.Jit, model: nn.Module) -> None:
    """So often that a race is over, right each time."""
    for _ in range(CALLS):
        x = fresh()
        got, want = fast(x), model(x)
        torch.cuda.synchronize()
        assert torch.allclose(got, want, rtol=1e-3, atol=1e-3)


@torch.inference_mode()
def test_replayed_within_a_second_and_as_the_model_answers() -> None:
    model = block().cuda().eval()
    model(fresh())
    torch.cuda.synchronize()
    with hotfuse.jit(model, settings=SETTINGS) as fast:
        begin = time.perf_counter()
        while not own(fast).get("replays") and time.perf_counter() < begin + 10:
            fast(fresh())
            torch.cuda.synchronize()
        took = time.perf_counter() - begin
        called(fast, model)
        told = own(fast)
        assert told["kinds"][0]["state"] == "replayed", str(fast.explain(full=True))
        print(f"first replay after {took:.3f} s; {told}")
        assert "recorded" in str(fast.explain(full=True))


@torch.no_grad()
def test_other_weights_streams_modes_and_the_users_own_graph() -> None:
    model = block().cuda().eval()
    with hotfuse.jit(model, settings=SETTINGS) as fast:
        called(fast, model)
        assert own(fast).get("replays", 0) > 0, str(fast.explain(full=True))
        model[0][1].weight.mul_(-2)
        called(fast, model)
        model[1][1].weight.data = torch.randn_like(model[1][1].weight)
        called(fast, model)
        with torch.inference_mode():
            called(fast, model)
        with torch.cuda.stream(torch.cuda.Stream()):
            called(fast, model)
        x = fresh()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = fast(x)
        x.copy_(fresh())
        graph.replay()
        assert torch.allclose(y, model(x), rtol=1e-3, atol=1e-3)
        with torch.autocast("cuda", dtype=torch.float16):
            assert fast(x).dtype is model(x).dtype
    with torch.enable_grad(), hotfuse.jit(model, settings=SETTINGS) as fast:
        assert fast(fresh()).requires_grad


class Syncs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x) * (2.0 if float(x[0, 0]) > 0 else 1.0)


class MakesOnHost(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x) + torch.tensor([1.0, 2.0]).to(x.device).sum()


class Drops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x) + nn.functional.dropout(x, 0.5, training=True) * 0


@pytest.mark.parametrize("cls", [Syncs, MakesOnHost, Drops])
@torch.inference_mode()
def test_what_cannot_be_recorded_says_why_and_stays_right(cls: type[nn.Module]) -> None:
    model = cls().cuda().eval()
    with hotfuse.jit(model, settings=SETTINGS) as fast:
        called(fast, model)
        told = own(fast)
        print(told)
        assert told["replays"] == 0 and told["not_recordable"] == 1 and told["kinds"][0]["because"], told


@torch.inference_mode()
def test_memory_is_given_back() -> None:
    model = block(1024).cuda().eval()
    x = torch.randn(4096, 1024, device="cuda")
    for _ in range(3):
        model(x)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    with hotfuse.jit(model, settings=SETTINGS.with_(tiers=1)) as fast:
        until = time.monotonic() + 20  # what the model is made of is looked through beside
        while time.monotonic() < until and not own(fast).get("recorded"):
            fast(x)
            torch.cuda.synchronize()
        assert own(fast).get("recorded") == 1, own(fast)
        held = own(fast)["device_bytes"]
        fast.wait(60)
    del fast
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert held > 0
    print(f"{held} bytes held, {torch.cuda.memory_reserved() - before} more than before are reserved")


class Branches(nn.Module):
    """Its Python reads its data, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = (nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(8)]) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.one(x)
        return self.other(h) if h.sum().item() > 0 and bool(x[0, 0] > 0) else h - 1


def test_a_way_through_code_that_reads_its_data_is_replayed() -> None:
    model = Branches().cuda().eval()
    with torch.no_grad(), hotfuse.jit(model) as fast:
        usual = torch.randn(4, 64, device="cuda").abs() + 0.1
        usual = usual if model.one(usual).sum() > 0 else -usual
        end = time.monotonic() + 60

        def replays() -> int:
            return sum(p["counters"].get("replays", 0) for s in fast.explain().to_dict()["sites"] for p in s["plans"])

        while time.monotonic() < end and replays() < 50:
            for number in range(40):
                x = usual + 0.01 * torch.randn_like(usual) if number % 20 else torch.randn_like(usual)
                assert torch.allclose(fast(x), model(x), atol=1e-4)
        assert replays() >= 50, str(fast.explain(full=True))
        for _ in range(20):
            x = torch.randn_like(usual)
            assert torch.allclose(fast(x), model(x), atol=1e-4)


def test_what_recordings_load_first_is_loaded_when_a_model_is_taken() -> None:
    held = torch.cuda.memory_allocated()
    with hotfuse.jit(block().cuda().eval(), settings=SETTINGS):
        prepared = first_use._prepare.cache_info()  # pyright: ignore[reportPrivateUsage]
        assert prepared.currsize == 1
    with hotfuse.jit(block().cuda().eval(), settings=SETTINGS):
        assert first_use._prepare.cache_info().misses == prepared.misses, "once in a process"  # pyright: ignore[reportPrivateUsage]
    gc.collect()
    assert torch.cuda.memory_allocated() <= held + (1 << 20)
