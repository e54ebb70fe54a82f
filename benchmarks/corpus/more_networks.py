"""Further small networks that no installed library builds offline: the operators that papers' code has besides layers."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence


class GatedUNet(nn.Module):
    """Attention U-Net: skips pass gates, bilinear upsampling with aligned corners."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        wide = 2 * width
        block = lambda a, b: nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(inplace=True))  # noqa: E731
        self.down, self.bottom, self.merge = block(3, width), block(width, wide), block(wide, width)
        larger = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)
        self.up = nn.Sequential(larger, nn.Conv2d(wide, width, 3, padding=1))
        self.of_gate, self.of_skip = nn.Conv2d(width, width // 2, 1), nn.Conv2d(width, width // 2, 1)
        self.gate, self.head = nn.Sequential(nn.Conv2d(width // 2, 1, 1), nn.BatchNorm2d(1), nn.Sigmoid()), nn.Conv2d(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.down(x)
        up = self.up(self.bottom(F.max_pool2d(skip, 2)))
        kept = skip * self.gate(F.relu(self.of_gate(up) + self.of_skip(skip), inplace=True))
        return self.head(self.merge(torch.cat((kept, up), 1)))


class GlobalResponse(nn.Module):
    """ConvNeXt-V2: wide depthwise convolutions, and a norm over pixels that is weighed among channels."""

    def __init__(self, width: int = 48, depth: int = 3) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, width, 4, 4), nn.Linear(width, 10)
        self.mixes = nn.ModuleList(nn.Conv2d(width, width, 7, padding=3, groups=width) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))
        self.wide = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(depth))
        self.narrow = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(depth))
        self.scale = nn.Parameter(torch.randn(depth, 4 * width) * 0.1)
        self.shift = nn.Parameter(torch.randn(depth, 4 * width) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for i, (mix, norm, wide, narrow) in enumerate(zip(self.mixes, self.norms, self.wide, self.narrow, strict=True)):
            y = F.gelu(wide(norm(mix(x).permute(0, 2, 3, 1))))
            size = torch.norm(y, p=2, dim=(1, 2), keepdim=True)
            y = self.scale[i] * (y * (size / (size.mean(-1, keepdim=True) + 1e-6))) + self.shift[i] + y
            x = x + narrow(y).permute(0, 3, 1, 2)
        return self.head(x.mean((-2, -1)))


class ChannelShuffle(nn.Module):
    """ShuffleNet-V2: halves of channels, one of them through depthwise convolutions, mixed by a transpose."""

    def __init__(self, width: int = 64, depth: int = 4) -> None:
        super().__init__()
        half = width // 2
        self.stem, self.head = nn.Conv2d(3, width, 3, 4, 1), nn.Linear(width, 10)
        self.blocks = nn.ModuleList(nn.Sequential(
            nn.Conv2d(half, half, 1, bias=False), nn.BatchNorm2d(half), nn.ReLU(),
            nn.Conv2d(half, half, 3, 1, 1, groups=half, bias=False), nn.BatchNorm2d(half),
            nn.Conv2d(half, half, 1, bias=False), nn.BatchNorm2d(half), nn.ReLU()) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            left, right = x.chunk(2, 1)
            y = torch.cat((left, block(right)), 1)
            n, c, h, w = y.shape
            x = y.view(n, 2, c // 2, h, w).transpose(1, 2).contiguous().view(n, c, h, w)
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


class FourierOperator(nn.Module):
    """FNO: products with complex weights of the low frequencies, written into zeros."""

    def __init__(self, width: int = 16, modes: int = 8, depth: int = 2) -> None:
        super().__init__()
        self.first, self.last, self.modes = nn.Conv2d(1, width, 1), nn.Conv2d(width, 1, 1), modes
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(2, width, width, modes, modes, 2) / width) for _ in range(depth))
        self.mixes = nn.ModuleList(nn.Conv2d(width, width, 1) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x, m = self.first(x), self.modes
        for weights, mix in zip(self.weights, self.mixes, strict=True):
            seen, of = torch.fft.rfft2(x), torch.view_as_complex(weights)
            kept = torch.zeros_like(seen)
            kept[:, :, :m, :m] = torch.einsum("bixy,ioxy->boxy", seen[:, :, :m, :m], of[0])
            kept[:, :, -m:, :m] = torch.einsum("bixy,ioxy->boxy", seen[:, :, -m:, :m], of[1])
            x = F.gelu(torch.fft.irfft2(kept, s=x.shape[-2:]) + mix(x))
        return self.last(x)


class NeighbourGraph(nn.Module):
    """DGCNN: a graph of nearest neighbours in every layer, made of what the layer before gave."""

    def __init__(self, neighbours: int = 8) -> None:
        super().__init__()
        self.neighbours = neighbours
        self.layers = nn.ModuleList(nn.Sequential(nn.Conv2d(2 * a, b, 1, bias=False), nn.BatchNorm2d(b), nn.LeakyReLU(0.2))
                                    for a, b in ((3, 32), (32, 64)))
        self.head = nn.Linear(96, 10)

    def forward(self, x: Tensor) -> Tensor:
        found = list[Tensor]()
        for layer in self.layers:
            b, c, n = x.shape
            squares = (x**2).sum(1, keepdim=True)
            near = (2 * x.mT @ x - squares - squares.mT).topk(self.neighbours, -1)[1]
            flat = (near + torch.arange(b).view(-1, 1, 1) * n).view(-1)
            mine = x.transpose(2, 1).contiguous()
            others = mine.view(b * n, c)[flat].view(b, n, self.neighbours, c)
            mine = mine.view(b, n, 1, c).repeat(1, 1, self.neighbours, 1)
            x = layer(torch.cat((others - mine, mine), 3).permute(0, 3, 1, 2).contiguous()).max(-1)[0]
            found.append(x)
        return self.head(torch.cat(found, 1).max(-1)[0])


class MessagePassing(nn.Module):
    """GIN over a list of edges, with means of each graph of the batch by scatter."""

    def __init__(self, features: int = 32, graphs: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(
            nn.Linear(features, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, features), nn.ReLU()) for _ in range(3))
        self.head, self.graphs = nn.Linear(3 * features, 2), graphs

    def forward(self, x: Tensor, edges: Tensor, graph: Tensor) -> Tensor:
        found = list[Tensor]()
        for layer in self.layers:
            x = layer(x + torch.zeros_like(x).index_add_(0, edges[1], x.index_select(0, edges[0])))
            empty = torch.zeros(self.graphs, x.shape[1], dtype=x.dtype)
            found.append(empty.scatter_reduce(0, graph[:, None].expand_as(x), x, "mean", include_self=False))
        return self.head(torch.cat(found, 1))


class ModulatedConvolution(nn.Module):
    """StyleGAN2: the weights of a grouped convolution are made from each row of the batch."""

    def __init__(self, width: int = 48, style: int = 64, depth: int = 2) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.randn(1, width, 16, 16))
        self.styles = nn.ModuleList(nn.Linear(style, width) for _ in range(depth))
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(width, width, 3, 3)) for _ in range(depth))
        self.last = nn.Conv2d(width, 3, 1)

    def forward(self, z: Tensor) -> Tensor:
        x = self.start.repeat(z.shape[0], 1, 1, 1)
        b, c, h, w = x.shape
        for style, weight in zip(self.styles, self.weights, strict=True):
            of = weight[None] * (style(z) + 1)[:, None, :, None, None]
            of = of * torch.rsqrt(of.pow(2).sum((2, 3, 4), keepdim=True) + 1e-8)
            x = F.conv2d(x.reshape(1, b * c, h, w), of.view(-1, c, 3, 3), padding=1, groups=b).view(b, -1, h, w)
            x = F.leaky_relu(x, 0.2) * math.sqrt(2)
        return self.last(x)


class Translator(nn.Module):
    """An LSTM encoder and a decoder with attention that reads its own best tokens, step by step in Python."""

    def __init__(self, width: int = 64, words: int = 500, steps: int = 8) -> None:
        super().__init__()
        self.words, self.encoder = nn.Embedding(words, width), nn.LSTM(width, width, batch_first=True)
        self.cell, self.last, self.steps = nn.LSTMCell(2 * width, width), nn.Linear(2 * width, words), steps

    def forward(self, source: Tensor) -> Tensor:
        memory, (h, c) = self.encoder(self.words(source))
        h, c = h[0], c[0]
        token, context, found = torch.ones(source.shape[0], dtype=torch.int64), torch.zeros_like(h), list[Tensor]()
        for _ in range(self.steps):
            h, c = self.cell(torch.cat((self.words(token), context), -1), (h, c))
            weights = torch.bmm(memory, h.unsqueeze(2)).squeeze(2).softmax(-1)
            context = torch.bmm(weights.unsqueeze(1), memory).squeeze(1)
            found.append(self.last(torch.cat((h, context), -1)))
            token = found[-1].argmax(-1)
        return torch.stack(found, 1)


class PackedTagger(nn.Module):
    """A GRU in both directions over packed sequences."""

    def __init__(self, features: int = 24, width: int = 64) -> None:
        super().__init__()
        self.cells, self.last = nn.GRU(features, width, 2, batch_first=True, bidirectional=True), nn.Linear(2 * width, 9)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return self.last(pad_packed_sequence(self.cells(packed)[0], batch_first=True, total_length=x.shape[1])[0])


class Capsules(nn.Module):
    """Capsules with routing by agreement."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 32, 9), nn.Conv2d(32, 64, 9, 2)
        self.weights = nn.Parameter(torch.randn(10, 288, 16, 8) * 0.05)

    def forward(self, x: Tensor) -> Tensor:
        u = self.second(F.relu(self.first(x)))
        u = _squashed(u.view(u.shape[0], 8, 8, 6, 6).permute(0, 1, 3, 4, 2).reshape(u.shape[0], -1, 8))
        told = torch.einsum("jiod,bid->bjio", self.weights, u)
        logits = torch.zeros(told.shape[:3], dtype=x.dtype)
        for _ in range(2):
            out = _squashed((logits.softmax(1)[..., None] * told).sum(2))
            logits = logits + (told * out[:, :, None]).sum(-1)
        return _squashed((logits.softmax(1)[..., None] * told).sum(2)).norm(dim=-1)


def _squashed(x: Tensor) -> Tensor:
    size = (x**2).sum(-1, keepdim=True)
    return size / (1 + size) * x / torch.sqrt(size + 1e-8)


class Splines(nn.Module):
    """A KAN layer: B-splines by their recursion over slices of a grid."""

    def __init__(self, features: int = 16, outputs: int = 32, intervals: int = 5, order: int = 3) -> None:
        super().__init__()
        grid = torch.arange(-order, intervals + order + 1) * (2 / intervals) - 1
        self.register_buffer("grid", grid.expand(features, -1).contiguous())
        self.plain, self.order = nn.Linear(features, outputs), order
        self.splines = nn.Linear(features * (intervals + order), outputs)

    def forward(self, x: Tensor) -> Tensor:
        grid, at = self.grid, x.tanh().unsqueeze(-1)
        b = ((at >= grid[:, :-1]) & (at < grid[:, 1:])).to(x.dtype)
        for k in range(1, self.order + 1):
            left = (at - grid[:, : -(k + 1)]) / (grid[:, k:-1] - grid[:, : -(k + 1)])
            right = (grid[:, k + 1 :] - at) / (grid[:, k + 1 :] - grid[:, 1:-k])
            b = left * b[:, :, :-1] + right * b[:, :, 1:]
        return self.plain(F.silu(x)) + self.splines(b.flatten(1))


class Suppression(nn.Module):
    """Non-maximum suppression as code without torchvision writes it: a row of truth values after another, in place."""

    def __init__(self, kept: int = 40) -> None:
        super().__init__()
        self.kept = kept

    def forward(self, boxes: Tensor, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        middle, size = boxes[:, :2].sigmoid(), boxes[:, 2:].sigmoid() * 0.3
        corners, (scores, label) = torch.cat((middle - size / 2, middle + size / 2), 1), logits.softmax(-1).max(-1)
        order = scores.argsort(descending=True)[: self.kept]
        corners, scores, label = corners[order], scores[order], label[order]
        low, high = torch.maximum(corners[:, None, :2], corners[:, :2]), torch.minimum(corners[:, None, 2:], corners[:, 2:])
        shared, area = (high - low).clamp(min=0).prod(-1), (corners[:, 2:] - corners[:, :2]).prod(-1)
        overlap, keep = shared / (area[:, None] + area - shared), torch.ones(self.kept, dtype=torch.bool)
        for i in range(self.kept):
            keep[i + 1 :] &= ~((overlap[i, i + 1 :] > 0.5) & keep[i])
        return corners * keep[:, None], scores * keep, label


class SpectralMask(nn.Module):
    """Speech enhancement: a mask over a short-time Fourier transform, and back."""

    def __init__(self, size: int = 256, width: int = 64) -> None:
        super().__init__()
        self.register_buffer("window", torch.hann_window(size))
        self.size, self.cells, self.last = size, nn.GRU(size // 2 + 1, width, batch_first=True), nn.Linear(width, size // 2 + 1)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.stft(x, self.size, self.size // 4, window=self.window, return_complex=True)
        mask = self.last(self.cells(z.abs().clamp(min=1e-6).log().transpose(1, 2))[0]).sigmoid().transpose(1, 2)
        return torch.istft(z * mask, self.size, self.size // 4, window=self.window, length=x.shape[-1])
