"""Inputs of corpus models: one function a kind, seeded, so that every process asks with the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Feed = dict[str, torch.Tensor]
MakeFeed = Callable[[torch.Generator], Feed]


def normal(scale: float = 1.0, **shapes: tuple[int, ...]) -> MakeFeed:
    """Normal numbers by name."""
    return lambda rng: {n: torch.randn(*s, generator=rng) * scale for n, s in shapes.items()}


def pixels(batch: int, side: int, name: str = "pixel_values") -> MakeFeed:
    """Square pictures of three channels."""
    return normal(**{name: (batch, 3, side, side)})


def tokens(vocabulary: int, batch: int, length: int, *, mask: bool = True, name: str = "input_ids") -> MakeFeed:
    """Token ids, none of which is a special one, and a mask of ones."""

    def make(rng: torch.Generator) -> Feed:
        found = {name: torch.randint(5, vocabulary, (batch, length), generator=rng)}
        return found | {"attention_mask": torch.ones(batch, length, dtype=torch.int64)} if mask else found

    return make


def adjacency(nodes: int, features: int) -> MakeFeed:
    """Nodes with features and a normalized dense adjacency."""

    def make(rng: torch.Generator) -> Feed:
        linked = (torch.rand(nodes, nodes, generator=rng) < 8 / nodes).float() + torch.eye(nodes)
        return {"x": torch.randn(nodes, features, generator=rng), "adj": linked / linked.sum(1, keepdim=True)}

    return make


def edges(nodes: int, features: int, count: int) -> MakeFeed:
    """Nodes with features and a list of edges."""

    def make(rng: torch.Generator) -> Feed:
        return {"x": torch.randn(nodes, features, generator=rng), "edges": torch.randint(0, nodes, (2, count), generator=rng)}

    return make


def integers(**wanted: tuple[int, tuple[int, ...]]) -> MakeFeed:
    """Numbers below a limit by name: limit and shape."""
    return lambda rng: {n: torch.randint(0, limit, shape, generator=rng) for n, (limit, shape) in wanted.items()}


def joined(*makers: MakeFeed) -> MakeFeed:
    """Several kinds in one feed."""

    def make(rng: torch.Generator) -> Feed:
        found: Feed = {}
        for maker in makers:
            found |= maker(rng)
        return found

    return make


def ones(dtype: Any = torch.float32, **shapes: tuple[int, ...]) -> MakeFeed:
    """Masks that let everything through."""
    return lambda _rng: {n: torch.ones(*s, dtype=dtype) for n, s in shapes.items()}
