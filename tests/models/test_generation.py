"""Generation with small random language models: the same tokens as without, and the plans are what gave them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import hotfuse
from hotfuse import Settings

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()
T = transformers

SMALL: dict[str, Any] = {"vocab_size": 97, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 96}


def llama() -> Any:
    return T.LlamaForCausalLM(T.LlamaConfig(**SMALL, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                                            num_attention_heads=4, num_key_value_heads=2))


def mistral() -> Any:
    return T.MistralForCausalLM(T.MistralConfig(**SMALL, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                                                num_attention_heads=4, num_key_value_heads=2, sliding_window=8))


def gpt2() -> Any:
    return T.GPT2LMHeadModel(T.GPT2Config(**SMALL, n_embd=32, n_layer=2, n_head=4, n_positions=64))


def t5() -> Any:
    return T.T5ForConditionalGeneration(T.T5Config(
        vocab_size=97, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0))


def mamba() -> Any:
    return T.MambaForCausalLM(T.MambaConfig(**SMALL, hidden_size=32, state_size=4, num_hidden_layers=2, expand=2))


def prompt(batch: int = 1, length: int = 7) -> dict[str, torch.Tensor]:
    ids = torch.randint(2, 96, (batch, length))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def check(model: Any, least: float, calls: int = 4, capture: str = "inline", **how: Any) -> hotfuse.Jit:
    """Generate with other prompts a few times; at least this part of the forward calls of the last runs in plans."""
    model = model.eval()
    fast = hotfuse.jit(model, settings=Settings(capture=capture))  # type: ignore[arg-type]
    share = 0.0
    for k in range(calls):
        inputs = how.pop("inputs", None) or prompt()
        settings = {"max_new_tokens": 12, "do_sample": False, **how}
        torch.manual_seed(k)
        want = model.generate(**inputs, **settings)
        torch.manual_seed(k)
        before = fast.stats()
        got = fast.generate(**inputs, **settings)
        after = fast.stats()
        assert torch.equal(got, want), f"call {k}:\n{got}\n{want}\n{fast.explain(full=True)}"
        share = (after["graph_calls"] - before["graph_calls"]) / (after["calls"] - before["calls"])
    assert share >= least, f"{share:.0%} of the calls ran in plans\n{fast.explain(full=True)}"
    return fast


@pytest.mark.budget_s(10)
@pytest.mark.parametrize("make", [llama, gpt2, t5, mamba], ids=lambda f: f.__name__)
def test_greedy(make: Any) -> None:
    check(make(), 0.9 if make is not mamba else 0.0)


def test_sliding_windows() -> None:
    check(mistral(), 0.5, max_new_tokens=20)


def test_sampling() -> None:
    check(llama(), 0.9, do_sample=True, temperature=0.8, top_k=20)


def test_beams() -> None:
    check(llama(), 0.9, num_beams=3, num_return_sequences=2)


def test_assisted() -> None:
    check(llama(), 0.1, assistant_model=llama().eval(), calls=6)


def test_static_cache() -> None:
    check(llama(), 0.9, cache_implementation="static")


def test_left_padding() -> None:
    model = llama().eval()
    fast = hotfuse.jit(model, settings=Settings(capture="inline"))
    for pads in (2, 4, 3):
        inputs = prompt(batch=2)
        inputs["attention_mask"][0, :pads] = 0
        inputs["input_ids"][0, :pads] = 0
        want = model.generate(**inputs, max_new_tokens=10, do_sample=False)
        assert torch.equal(fast.generate(**inputs, max_new_tokens=10, do_sample=False), want)
    assert fast.stats()["graph_calls"] >= 20


def test_a_cache_that_is_kept_forked_and_cropped() -> None:
    """One cache per branch of a conversation: what one adds, the others do not see."""
    model = llama().eval()
    fast = hotfuse.jit(model, settings=Settings(capture="inline"))

    def run(step: Any, seed: int) -> list[torch.Tensor]:
        torch.manual_seed(seed)
        found: list[torch.Tensor] = []

        def go(ids: torch.Tensor, cache: Any) -> None:
            found.append(step(input_ids=ids, past_key_values=cache, use_cache=True).logits)

        def token() -> torch.Tensor:
            return torch.randint(2, 96, (1, 1))

        first = T.DynamicCache(config=model.config)
        go(torch.randint(2, 96, (1, 5)), first)
        for _ in range(3):
            go(token(), first)
        keys = [layer.keys for layer in first.layers]
        second = copy.deepcopy(first)
        third = T.DynamicCache(config=model.config)
        for mine, theirs in zip(third.layers, first.layers, strict=True):  # shares its tensors
            mine.lazy_initialization(theirs.keys, theirs.values)
            mine.keys, mine.values = theirs.keys, theirs.values
        for _ in range(3):
            for cache in (first, second, third):
                go(token(), cache)
        first.crop(-2)
        for _ in range(2):
            go(token(), first)
            go(token(), third)
        found += [*keys, *(t for c in (first, second, third) for layer in c.layers for t in (layer.keys, layer.values))]
        return [t.clone() for t in found]

    with torch.no_grad():
        for seed in range(4):
            for got, want in zip(run(fast, seed), run(model, seed), strict=True):
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert fast.stats()["graph_calls"] > 30, str(fast.explain(full=True))


def test_in_the_background_at_tier_1() -> None:
    model = llama().eval()
    with hotfuse.jit(model, settings=Settings()) as fast:
        for _ in range(200):
            inputs = prompt()
            want = model.generate(**inputs, max_new_tokens=12, do_sample=False)
            assert torch.equal(fast.generate(**inputs, max_new_tokens=12, do_sample=False), want)
            fast.wait(20)
            if fast.stats()["calls_per_tier"]["1"] > 30:
                break
        else:
            pytest.fail(str(fast.explain(full=True)))


def whisper() -> Any:
    return T.WhisperForConditionalGeneration(T.WhisperConfig(
        vocab_size=97, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=64, decoder_ffn_dim=64, num_mel_bins=8, max_source_positions=16, max_target_positions=40,
        decoder_start_token_id=1, pad_token_id=0, bos_token_id=1, eos_token_id=96, suppress_tokens=None,
        begin_suppress_tokens=None))  # fmt: skip


def test_speech() -> None:
    model = whisper().eval()
    model.generation_config.max_length = 20
    fast = hotfuse.jit(model, settings=Settings(capture="inline"))
    for _ in range(3):
        features = torch.randn(1, 8, 32)
        want = model.generate(features, max_new_tokens=10, do_sample=False)
        assert torch.equal(fast.generate(features, max_new_tokens=10, do_sample=False), want)
    assert fast.stats()["graph_calls"] >= 12, str(fast.explain(full=True))


def test_a_pipeline_takes_a_served_model() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {f"w{i}": i for i in range(97)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w2"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = T.PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="w0", eos_token="w96", unk_token="w2")
    model = llama().eval()
    fast = hotfuse.jit(model, settings=Settings(capture="inline"))
    mine = T.pipeline("text-generation", model=fast, tokenizer=tokenizer, device="cpu")
    theirs = T.pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")
    for text in ("w5 w6 w7 w8", "w9 w10 w11 w12", "w20 w21 w22 w23"):
        got, want = (p(text, max_new_tokens=8, do_sample=False) for p in (mine, theirs))
        assert got == want
    assert fast.stats()["graph_calls"] >= 12, str(fast.explain(full=True))
