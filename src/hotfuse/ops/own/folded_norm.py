"""A layer norm in three pieces, so that the products around it can take it in: on a device no kernel of its own is launched for it.

    x = ... @ w + r      the product that makes rows: its kernel also stores what each block of columns is like (`MEAN`, `SPREAD`)
    layer_norm(x) @ v    the product that reads them: put together, these give a row's mean and variance (`NORMALIZED`)

A spread is the sum of squared distances from the block's own mean. Put together so, the variance is as exact as that of two passes
over the row, however large the mean is.
"""

from __future__ import annotations

import torch
from torch import Tensor

MEAN, SPREAD, NORMALIZED = "hotfuse.block_mean", "hotfuse.block_spread", "hotfuse.normalized"
BLOCK = 32
"""Columns of a block: no tile of a product is narrower, or it is not for this."""


@torch.library.custom_op("hotfuse::block_mean", mutates_args=())
def _mean(x: Tensor) -> Tensor:
    return _blocks(x).mean(-1)


@torch.library.custom_op("hotfuse::block_spread", mutates_args=())
def _spread(x: Tensor) -> Tensor:
    return _blocks(x).var(-1, correction=0) * BLOCK


@torch.library.custom_op("hotfuse::normalized", mutates_args=())
def _normalized(x: Tensor, means: Tensor, spreads: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    mean = means.mean(-1, keepdim=True)
    squares = spreads.sum(-1, keepdim=True) + BLOCK * (means - mean).square().sum(-1, keepdim=True)
    rows = (x.float() - mean) * torch.rsqrt(squares / x.shape[-1] + eps)
    return (rows * weight.float() + bias.float()).to(x.dtype)


def _blocks(x: Tensor) -> Tensor:
    return x.float().unflatten(-1, (-1, BLOCK))


@_mean.register_fake
@_spread.register_fake
def _of_blocks(x: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // BLOCK), dtype=torch.float32)


@_normalized.register_fake
def _like(x: Tensor, means: Tensor, spreads: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return torch.empty_like(x)
