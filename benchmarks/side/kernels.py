"""The kernels of the side-by-side as torch modules."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Linear(nn.Module):
    """A layer of a transformer's feed-forward part."""

    def __init__(self, columns: int, outputs: int) -> None:
        super().__init__()
        self.layer = nn.Linear(columns, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(self.layer(x))


class Attention(nn.Module):
    """From projections to heads, attention, and back."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        heads = [t.view(t.shape[0], t.shape[1], 12, 64).transpose(1, 2) for t in (q, k, v)]
        return F.scaled_dot_product_attention(*heads).transpose(1, 2).reshape(q.shape)


class Norm(nn.Module):
    """The sum of two values, normalized."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(columns)
        nn.init.normal_(self.norm.weight)
        nn.init.normal_(self.norm.bias)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.norm(x + y)


class Conv(nn.Module):
    """A convolution with what usually follows it."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layer = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.layer(x))


class Chain(nn.Module):
    """Pointwise work into a softmax."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x * torch.sigmoid(y) + 0.5 * torch.tanh(x), -1)


class Mlp(nn.Module):
    """Next to nothing to compute: all that shows is overhead."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(F.relu(self.first(x)))
