"""On a CUDA device: plans are replayed as CUDA graphs, right under other sizes, threads, streams, weights. `make test-gpu`."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch import nn

import hotfuse

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device: make test-gpu", allow_module_level=True)

WAIT_S = 60.0


def block(width: int = 128) -> nn.Module:
    """Many small kernels; of classes that a fresh worker can import, as CUDA in use means that it is no fork."""
    layers = [nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU()) for _ in range(24)]
    return nn.Sequential(*layers)


class Syncs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x)[: int((x[:, 0] > 0).sum().item()) + 1]


def close(got: torch.Tensor, want: torch.Tensor) -> bool:
    return torch.allclose(got, want, rtol=1e-3, atol=1e-3)


def replays(fast: hotfuse.Jit) -> int:
    """Of plans, and of the model's own kernels, which plans must beat."""
    told = fast.explain().to_dict()
    own = told["own_recordings"].get("replays", 0)
    return own + sum(p["counters"].get("replays", 0) for s in told["sites"] for p in s["plans"])


def served(model: nn.Module, x: torch.Tensor) -> hotfuse.Jit:
    """Until calls of this kind are replayed, and not only in turns with what served before."""
    fast = hotfuse.jit(model)
    until = time.monotonic() + WAIT_S
    while time.monotonic() < until and not replays(fast):
        for _ in range(50):
            fast(x)
            torch.cuda.synchronize()  # as programs do; recording beside would break it
    return fast


@torch.inference_mode()
def test_replayed_and_right_for_fresh_data_and_other_sizes() -> None:
    model = block().cuda().eval()
    with served(model, torch.randn(8, 128, device="cuda")) as fast:
        assert replays(fast) > 0, str(fast.explain(full=True))
        for rows in (8, 1, 3, 8, 3, 3, 1, 1, 0, 0, 17):
            x = torch.randn(rows, 128, device="cuda")
            assert close(fast(x), model(x))
        strided = torch.randn(128, 8, device="cuda").t()
        for _ in range(4):
            assert close(fast(strided), model(strided))


@torch.inference_mode()
def test_results_are_the_callers_own() -> None:
    model = block().cuda().eval()
    with served(model, torch.randn(8, 128, device="cuda")) as fast:
        xs = [torch.randn(8, 128, device="cuda") for _ in range(10)]
        ys = [fast(x) for x in xs]
        assert all(close(y, model(x)) for x, y in zip(xs, ys, strict=True))


@torch.inference_mode()
def test_threads_on_streams_of_their_own() -> None:
    model = block().cuda().eval()
    wrong: list[int] = []
    with served(model, torch.randn(8, 128, device="cuda")) as fast:

        def go(seed: int) -> None:
            with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(50):
                    x = torch.randn(8, 128, device="cuda")
                    y = fast(x)
                    want = model(x)
                    torch.cuda.current_stream().synchronize()
                    if not close(y, want):
                        wrong.append(seed)

        threads = [threading.Thread(target=go, args=(i,)) for i in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    assert not wrong


@torch.inference_mode()
def test_weights_changed_in_place_are_read() -> None:
    model = block().cuda().eval()
    x = torch.randn(8, 128, device="cuda")
    with served(model, x) as fast:
        model[0][1].weight.mul_(-2)
        assert close(fast(x), model(x))


@torch.inference_mode()
def test_a_call_inside_the_users_own_graph() -> None:
    model = block().cuda().eval()
    x = torch.randn(8, 128, device="cuda")
    with served(model, x) as fast:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = fast(x)
        x.copy_(torch.randn(8, 128, device="cuda"))
        graph.replay()
        assert close(y, model(x))


@torch.inference_mode()
def test_a_model_that_synchronizes_stays_right() -> None:
    model = Syncs().cuda().eval()
    fast = hotfuse.jit(model)
    for _ in range(40):
        x = torch.randn(8, 128, device="cuda")
        assert close(fast(x), model(x))
    fast.wait(30)
    for _ in range(10):
        x = torch.randn(8, 128, device="cuda")
        assert close(fast(x), model(x))
    fast.close()


@torch.inference_mode()
def test_weights_whose_memory_is_gone_are_not_read() -> None:
    """A replay is launched before the model is looked at: what it reads must still be there."""
    model = block(512).cuda().eval()
    x = torch.randn(8, 512, device="cuda")
    with served(model, x) as fast:
        for _ in range(3):
            for layer in model.children():
                layer[1].weight.data = torch.randn(512, 512, device="cuda") / 16
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            for _ in range(40):
                assert close(fast(x), model(x))
                torch.cuda.synchronize()
