"""On a CUDA device: what programs do beside a model that is recorded, and what they find behind a recording that failed.
`make test-gpu`, one test at a time: some take all memory."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hotfuse
from hotfuse.base.settings import Settings

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device: make test-gpu", allow_module_level=True)

SETTINGS = Settings(record=False, idle=False, cache="off")
WAIT_S = 20.0


def block(width: int = 128, layers: int = 12) -> nn.Module:
    parts = [nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()) for _ in range(layers)]
    return nn.Sequential(*parts).cuda().eval()


def rows() -> torch.Tensor:
    return torch.randn(8, 128, device="cuda")


def own(fast: hotfuse.Jit) -> dict[str, Any]:
    return fast.explain().to_dict()["own_recordings"]


def until(reached: Callable[[], Any], call: Callable[[], Any]) -> bool:
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end and not reached():
        call()
        torch.cuda.synchronize()
    return bool(reached())


class Synchronizes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        return y * 2 if y.sum().item() > 0 else y - 1


class LooksUnlessRecorded(Synchronizes):
    """As transformers does with masks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        for _ in range(12):
            y = self.inner(y).relu()
        hidden = torch.cuda.is_current_stream_capturing() or bool((x > 1e9).any().item())
        return y + 1 if hidden else y + 1.0


@torch.inference_mode()
def test_a_recording_that_failed_leaves_torch_as_it_was() -> None:
    for _ in range(2):
        model = Synchronizes().cuda().eval()
        with hotfuse.jit(model, settings=SETTINGS.with_(tiers=1)) as fast:
            assert until(lambda: own(fast).get("not_recordable"), lambda: fast(torch.randn(4, 64, device="cuda")))
            assert "recording to mempool" not in own(fast)["kinds"][0]["because"], own(fast)
            x = torch.randn(4, 64, device="cuda")  # random numbers can still be drawn
            assert torch.allclose(fast(x), model(x), atol=1e-5)
    held = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    del held
    torch.cuda.empty_cache()
    freed = torch.cuda.memory_reserved()
    held = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    del held
    torch.cuda.empty_cache()  # what is cached goes again
    assert torch.cuda.memory_reserved() == freed


@torch.inference_mode()
def test_code_that_has_to_be_told_is_recorded_in_the_next_call() -> None:
    model = LooksUnlessRecorded().cuda().eval()
    with hotfuse.jit(model, settings=SETTINGS) as fast:
        assert until(lambda: own(fast).get("replays", 0) > 3, lambda: fast(torch.randn(4, 64, device="cuda"))), own(fast)
        x = torch.randn(4, 64, device="cuda")
        assert torch.allclose(fast(x), model(x), atol=1e-5)


@torch.inference_mode()
def test_recorded_again_behind_recordings_that_are_gone() -> None:
    model = block()
    with hotfuse.jit(model, settings=SETTINGS.with_(tiers=1)) as fast:
        for times in range(1, 3):
            assert until(lambda n=times: own(fast).get("recorded", 0) >= n, lambda: fast(rows())), own(fast)
            model[0][1].weight.data = torch.randn(128, 128, device="cuda")
            x = rows()
            assert torch.allclose(fast(x), model(x), atol=1e-3)


@torch.inference_mode()
def test_other_threads_draw_wait_and_empty_caches_while_models_are_recorded() -> None:
    stop, errors, done = threading.Event(), list[str](), dict[str, int]()
    others = {"rand": lambda: torch.rand(4, device="cuda"), "wait": torch.cuda.synchronize, "empty": torch.cuda.empty_cache}

    def beside(name: str) -> None:
        while not stop.is_set():
            try:
                torch.cuda.synchronize() if name == "wait" else others[name]()
                done[name] = done.get(name, 0) + 1
            except Exception as e:
                errors.append(f"{name}: {str(e).splitlines()[0]}")
            time.sleep(0.001)

    threads = [threading.Thread(target=beside, args=(name,)) for name in others]
    for t in threads:
        t.start()
    recorded = 0
    try:
        for _ in range(8):
            model = block()
            with hotfuse.jit(model, settings=SETTINGS.with_(tiers=1)) as fast:
                x = torch.ones(8, 128, device="cuda")
                until(lambda f=fast: own(f).get("recorded") or own(f).get("not_recordable"), lambda f=fast, x=x: f(x))
                recorded += own(fast).get("recorded", 0)
                assert torch.allclose(fast(x), model(x), atol=1e-3)
    finally:
        stop.set()
        for t in threads:
            t.join()
    print(recorded, "recorded", done)
    assert not errors and len(done) == 3, errors[:5]


class FixedCache:
    def __init__(self, rows: int = 512) -> None:
        self.rows, self.kept = rows, torch.zeros(rows, 128, device="cuda")
        self.filled = torch.zeros((), dtype=torch.long, device="cuda")


class Continues(nn.Module):
    """Adds a row to what the caller keeps, and looks at all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = block()

    def forward(self, x: torch.Tensor, cache: FixedCache) -> Any:
        y = self.inner(x)
        cache.kept.index_copy_(0, cache.filled.reshape(1) % cache.rows, y)
        cache.filled.add_(1)
        return (y @ cache.kept.T).softmax(-1) @ cache.kept, cache


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_a_call_writes_is_written_by_replays_where_it_lies(mode: Any) -> None:
    with mode():
        model = Continues().cuda().eval()
        with hotfuse.jit(model, settings=SETTINGS) as fast:
            for _ in range(3):
                mine, theirs = FixedCache(), FixedCache()
                for step in range(120):
                    x = torch.randn(1, 128, device="cuda")
                    got, back = fast(x, mine)
                    want, _ = model(x, theirs)
                    assert back is mine and torch.allclose(got, want, atol=1e-3), step
                    assert torch.allclose(mine.kept, theirs.kept, atol=1e-3) and int(mine.filled) == int(theirs.filled), step
            assert own(fast).get("replays", 0) > 20, own(fast)


def test_a_static_cache_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(hidden_size=128, num_hidden_layers=3, intermediate_size=256, num_attention_heads=4,
                                      num_key_value_heads=2, vocab_size=100)  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval().cuda()
    with torch.no_grad(), hotfuse.jit(model, settings=SETTINGS) as fast:
        for _ in range(2):
            caches = [transformers.StaticCache(config=config, max_cache_len=128) for _ in range(2)]
            prompt = torch.randint(0, 100, (1, 7), device="cuda")
            at = torch.arange(7, device="cuda")
            fast(input_ids=prompt, past_key_values=caches[0], cache_position=at)
            model(input_ids=prompt, past_key_values=caches[1], cache_position=at)
            for step in range(60):
                token, at = torch.randint(0, 100, (1, 1), device="cuda"), torch.tensor([7 + step], device="cuda")
                got = fast(input_ids=token, past_key_values=caches[0], cache_position=at)
                want = model(input_ids=token, past_key_values=caches[1], cache_position=at)
                assert torch.allclose(got.logits, want.logits, atol=1e-4), step
                assert got.past_key_values is caches[0]
        print(own(fast))
        if "it changes its arguments" in str(own(fast)):
            pytest.skip("the caches of this transformers count their tokens in Python")
        assert own(fast).get("replays", 0) > 10, own(fast)


@pytest.mark.parametrize("dtype", [torch.float32, torch.half])
def test_a_cache_that_grows_is_one_recording(dtype: torch.dtype) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(hidden_size=256, num_hidden_layers=4, intermediate_size=512, num_attention_heads=4,
                                      num_key_value_heads=2, vocab_size=100)  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval().cuda().to(dtype)
    exact = transformers.LlamaForCausalLM(config).eval().cuda().double()
    exact.load_state_dict(model.state_dict())
    close = 1e-4 if dtype is torch.float32 else 2e-2
    errors, steps = [0.0, 0.0], 0

    def replays() -> int:
        plans = [p for s in fast.explain().to_dict()["sites"] for p in s["plans"]]
        return sum(p["counters"].get("replays", 0) for p in plans if "moved_in" in p["counters"])

    with torch.no_grad(), hotfuse.jit(model, settings=SETTINGS) as fast:
        end = time.monotonic() + 60
        texts = 0
        while time.monotonic() < end and replays() < 300:
            caches = [transformers.DynamicCache(config=config) for _ in range(3)]
            prompt = torch.randint(0, 100, (1, 7 + texts % 5), device="cuda")
            served = replays() > 0
            fast(input_ids=prompt, past_key_values=caches[0])
            model(input_ids=prompt, past_key_values=caches[1])
            if served:
                exact(input_ids=prompt, past_key_values=caches[2])
            for step in range(150):
                token = torch.randint(0, 100, (1, 1), device="cuda")
                got = fast(input_ids=token, past_key_values=caches[0])
                want = model(input_ids=token, past_key_values=caches[1])
                assert torch.allclose(got.logits, want.logits, atol=close), (texts, step)
                assert torch.allclose(caches[0].layers[2].values, caches[1].layers[2].values, atol=close), (texts, step)
                if served:
                    steps += 1
                    right = exact(input_ids=token, past_key_values=caches[2]).logits
                    for side, logits in enumerate((got.logits, want.logits)):
                        errors[side] += float((logits.double() - right).norm() / right.norm())
            texts += 1
        assert replays() >= 300, str(fast.explain(full=True))
        rounding = steps * (1e-6 if dtype is torch.float32 else 0.0)  # sums in another order are off by as much
        assert 0 < errors[0] < max(1.5 * errors[1], rounding), errors  # about as far from float64 as eager is, on the average


@torch.inference_mode()
def test_under_autocast() -> None:
    model = block()
    with hotfuse.jit(model, settings=SETTINGS) as fast:
        for dtype in (torch.half, torch.bfloat16):
            with torch.autocast("cuda", dtype=dtype):
                before = own(fast).get("replays", 0)
                assert until(lambda b=before: own(fast).get("replays", 0) > b + 10, lambda: fast(rows())), own(fast)
            model[0][1].weight.mul_(-1.5)
            with torch.autocast("cuda", dtype=dtype):
                x = rows()
                got, want = fast(x), model(x)
                assert got.dtype == want.dtype and torch.allclose(got, want, atol=5e-2)


@torch.inference_mode()
@pytest.mark.parametrize("room", [1.1, 2.5])
def test_near_the_end_of_memory_calls_are_answered_where_the_model_answers(room: float) -> None:
    """And where there is room for it, the program has as much memory between calls as the model has in them."""
    model = block(1024, 24).half()
    x = torch.randn(16384, 1024, device="cuda").half()
    want = model(x).cpu()  # which takes nothing of the device
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    model(x)
    need = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    gc.collect()
    torch.cuda.empty_cache()
    held = torch.empty(int(torch.cuda.mem_get_info()[0] - need * room - (64 << 20)), dtype=torch.uint8, device="cuda")
    try:
        for _ in range(3):
            model(x)
        with hotfuse.jit(model, settings=SETTINGS) as fast:
            end = time.monotonic() + 6
            while time.monotonic() < end:
                got = fast(x).cpu()
                assert torch.allclose(got, want, atol=2e-2)
                if room > 2:
                    theirs = torch.empty(need, dtype=torch.uint8, device="cuda")
                    del theirs
            print(own(fast))
    finally:
        del held
        gc.collect()
        torch.cuda.empty_cache()
