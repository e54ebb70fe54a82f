"""Sentiment of sentences with a pipeline of transformers: a DistilBERT with random weights and a tokenizer of whole words.

The changed line is `pipeline(..., model=hotfuse.jit(model))`: tokenizing, batching and reading off labels stay the pipeline's.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import DistilBertConfig, DistilBertForSequenceClassification, PreTrainedTokenizerFast, pipeline

import hotfuse
from examples.recipes.common import Outcome, compared

WORDS = ("the", "a", "this", "film", "book", "meal", "was", "is", "not", "very", "quite", "good", "bad", "dull", "fine", "great",
         "and", "but", "I", "liked", "found", "it", "never", "again")  # fmt: skip


def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: i for i, word in enumerate(["[PAD]", "[UNK]", *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]")


def close(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> bool:
    return all(x["label"] == y["label"] and abs(x["score"] - y["score"]) < 1e-4 for x, y in zip(a, b, strict=True))


def main(tiny: bool = False) -> Outcome:
    """Before and after."""
    torch.manual_seed(0)
    size = {"dim": 32, "n_layers": 1, "n_heads": 2, "hidden_dim": 64} if tiny else {"n_layers": 4}
    model = DistilBertForSequenceClassification(DistilBertConfig(vocab_size=64, **size)).eval()
    fast = hotfuse.jit(model)
    before, after = (pipeline("text-classification", model=m, tokenizer=tokenizer(), device="cpu") for m in (model, fast))
    texts = ["the film was not very good", "I liked this book", "a meal and a film it was never dull but fine"]
    return compared("text pipeline", lambda: before(texts), lambda: after(texts), fast, close, 0.0 if tiny else 15.0)


if __name__ == "__main__":
    main("--tiny" in sys.argv)
