"""Strings: NumPy object arrays of `str`, since torch has no such tensors."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hotfuse.base.errors import ModelError
from hotfuse.frontends.onnx.elements import Array, Value
from hotfuse.frontends.onnx.registry import Ctx, onnx_op


def _strings(items: Sequence[str], shape: Sequence[int]) -> Array:
    return np.array(items, dtype=object).reshape(tuple(shape))


@onnx_op("StringConcat")
def string_concat(ctx: Ctx, a: Array, b: Array) -> Array:
    left, right = np.broadcast_arrays(a, b)
    return _strings([x + y for x, y in zip(left.flat, right.flat, strict=True)], left.shape)


@onnx_op("StringSplit")
def string_split(ctx: Ctx, x: Array, *, delimiter: str = "", maxsplit: int | None = None) -> tuple[Array, Tensor]:
    """Parts along a new last axis, filled up with empty strings; and how many there were."""
    parts = [text.split(delimiter or None, -1 if maxsplit is None else maxsplit) for text in x.flat]
    counts = [len(p) for p in parts]
    width = max(counts, default=0)
    texts = [part for p in parts for part in [*p, *[""] * (width - len(p))]]
    return _strings(texts, (*x.shape, width)), torch.tensor(counts, dtype=torch.int64).reshape(x.shape)


_CASES = {"NONE": str, "LOWER": str.lower, "UPPER": str.upper}


@onnx_op("StringNormalizer")
def string_normalizer(
    ctx: Ctx,
    x: Array,
    *,
    case_change_action: str = "NONE",
    is_case_sensitive: int = 0,
    locale: str = "",
    stopwords: Sequence[str] | None = None,
) -> Array:
    """Drop stop words, then change case. Python's case mapping is Unicode's and the same in every locale."""
    if case_change_action not in _CASES:
        raise ModelError(f"StringNormalizer has case_change_action {case_change_action!r}", hint="NONE, LOWER or UPPER")
    if x.ndim not in (1, 2) or (x.ndim == 2 and x.shape[0] != 1):
        raise ModelError(f"StringNormalizer was given shape {list(x.shape)}", because="it takes [C] or [1, C]")
    fold = str if is_case_sensitive else str.lower
    stops = {fold(w) for w in stopwords or ()}
    kept = [_CASES[case_change_action](text) for text in x.flat if fold(text) not in stops] or [""]
    return _strings(kept, (1, len(kept)) if x.ndim == 2 else (len(kept),))


@onnx_op("RegexFullMatch")
def regex_full_match(ctx: Ctx, x: Array, *, pattern: str) -> Tensor:
    try:
        regex = re.compile(pattern)
    except re.error as e:
        raise ModelError(f"RegexFullMatch has the pattern {pattern!r}", because=str(e)) from e
    found = [regex.fullmatch(text) is not None for text in x.flat]
    return torch.tensor(found, dtype=torch.bool).reshape(x.shape)


@onnx_op("TfIdfVectorizer")
def tf_idf_vectorizer(
    ctx: Ctx,
    x: Value,
    *,
    mode: str,
    ngram_counts: Sequence[int],
    ngram_indexes: Sequence[int],
    min_gram_length: int,
    max_gram_length: int,
    max_skip_count: int,
    pool_int64s: Sequence[int] | None = None,
    pool_strings: Sequence[str] | None = None,
    weights: Sequence[float] | None = None,
) -> Tensor:
    """Count the pool's n-grams in each row, taken at every distance up to the skip count."""
    pool: list[Any] = list(pool_strings or pool_int64s or ())
    known = _pool_grams(pool, ngram_counts, min_gram_length, max_gram_length)
    array: Array = x.cpu().numpy() if isinstance(x, Tensor) else x
    rows = array.reshape(1, -1) if array.ndim < 2 else array
    counts = np.zeros((rows.shape[0], max(ngram_indexes) + 1), dtype=np.float32)
    for at, row in enumerate(rows.tolist()):
        grams = _row_grams(row, min_gram_length, max_gram_length, max_skip_count)
        for gram, n in grams.items():
            if gram in known:
                counts[at, ngram_indexes[known[gram]]] += n
    if mode == "IDF":
        counts = (counts > 0).astype(np.float32)
    if mode in ("IDF", "TFIDF") and weights:
        counts = counts * np.asarray(weights, dtype=np.float32)
    return torch.from_numpy(counts if array.ndim == 2 else counts[0])


def _pool_grams(pool: list[Any], starts: Sequence[int], shortest: int, longest: int) -> dict[tuple[Any, ...], int]:
    """Each n-gram of a wanted length, and its number in the pool. The pool holds 1-grams, then 2-grams, and so on."""
    grams: dict[tuple[Any, ...], int] = {}
    number = 0
    for n, (start, end) in enumerate(zip(starts, [*starts[1:], len(pool)], strict=True), 1):
        for i in range(start, end - n + 1, n):
            if shortest <= n <= longest:
                grams[tuple(pool[i : i + n])] = number
            number += 1
    return grams


def _row_grams(row: list[Any], shortest: int, longest: int, skips: int) -> Counter[tuple[Any, ...]]:
    """Distance does not matter to a 1-gram, so those count once."""
    grams: Counter[tuple[Any, ...]] = Counter()
    for n in range(shortest, longest + 1):
        for distance in range(1, (skips if n > 1 else 0) + 2):
            reach = distance * (n - 1) + 1
            grams.update(tuple(row[i : i + reach : distance]) for i in range(len(row) - reach + 1))
    return grams
