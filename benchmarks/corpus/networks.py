"""Small networks of families that no installed library builds offline, written as their papers' code is."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def _conv(a: int, b: int, k: int = 3, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(a, b, k, stride, k // 2, bias=False), nn.BatchNorm2d(b), nn.SiLU())


class C2f(nn.Module):
    """YOLOv8's block: a split, bottlenecks in a chain, all of them concatenated."""

    def __init__(self, channels: int, depth: int) -> None:
        super().__init__()
        half = channels // 2
        self.first, self.last = _conv(channels, channels, 1), _conv(half * (2 + depth), channels, 1)
        self.blocks = nn.ModuleList(nn.Sequential(_conv(half, half), _conv(half, half)) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        parts = list(self.first(x).chunk(2, 1))
        for block in self.blocks:
            parts.append(parts[-1] + block(parts[-1]))
        return self.last(torch.cat(parts, 1))


class Detector(nn.Module):
    """YOLOv8-shaped: three chained pools, an upsampling neck, heads over three scales."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        sizes = [width * m for m in (1, 2, 4, 8)]
        self.stem = _conv(3, sizes[0], 3, 2)
        self.stages = nn.ModuleList(nn.Sequential(_conv(a, b, 3, 2), C2f(b, 1)) for a, b in itertools.pairwise(sizes))
        self.reduce, self.expand = _conv(sizes[3], sizes[3] // 2, 1), _conv(sizes[3] * 2, sizes[3], 1)
        self.up1, self.up2 = _conv(sizes[3] + sizes[2], sizes[2], 1), _conv(sizes[2] + sizes[1], sizes[1], 1)
        self.heads = nn.ModuleList(nn.Conv2d(s, 64 + 20, 1) for s in sizes[1:])

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        kept: list[Tensor] = []
        for stage in self.stages:
            kept.append(x := stage(x))
        y = [self.reduce(kept[2])]
        for _ in range(3):
            y.append(F.max_pool2d(y[-1], 5, 1, 2))
        a = self.expand(torch.cat(y, 1))
        b = self.up1(torch.cat([F.interpolate(a, scale_factor=2.0), kept[1]], 1))
        c = self.up2(torch.cat([F.interpolate(b, scale_factor=2.0), kept[0]], 1))
        flat = torch.cat([h(v).flatten(2) for h, v in zip(self.heads, (c, b, a), strict=True)], 2)
        box, scores = flat.split((64, 20), 1)
        bins = box.view(box.shape[0], 4, 16, -1).softmax(2)
        return torch.cat([(bins * torch.arange(16.0, dtype=bins.dtype).view(1, 1, 16, 1)).sum(2), scores.sigmoid()], 1)


class UNet(nn.Module):
    """Segmentation with transposed convolutions."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        w = [width, width * 2, width * 4]
        self.down = nn.ModuleList([_conv(3, w[0]), _conv(w[0], w[1]), _conv(w[1], w[2])])
        self.up = nn.ModuleList([nn.ConvTranspose2d(w[2], w[1], 2, 2), nn.ConvTranspose2d(w[1], w[0], 2, 2)])
        self.merge = nn.ModuleList([_conv(w[1] * 2, w[1]), _conv(w[0] * 2, w[0])])
        self.head = nn.Conv2d(w[0], 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.down[0](x)
        b = self.down[1](F.max_pool2d(a, 2))
        c = self.down[2](F.max_pool2d(b, 2))
        d = self.merge[0](torch.cat([self.up[0](c), b], 1))
        return self.head(self.merge[1](torch.cat([self.up[1](d), a], 1))).log_softmax(1)


class SuperResolution(nn.Module):
    """EDSR: residual blocks without norms, then pixel shuffle."""

    def __init__(self, width: int = 32, depth: int = 4) -> None:
        super().__init__()
        conv = lambda a, b: nn.Conv2d(a, b, 3, padding=1)  # noqa: E731
        self.head, self.tail = conv(3, width), nn.Sequential(conv(width, width * 4), nn.PixelShuffle(2), conv(width, 3))
        self.body = nn.ModuleList(nn.Sequential(conv(width, width), nn.ReLU(), conv(width, width)) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        y = first = self.head(x)
        for block in self.body:
            y = y + 0.1 * block(y)
        return self.tail(y + first)


class GraphConvolutions(nn.Module):
    """GCN over a dense adjacency."""

    def __init__(self, features: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(features, features) for _ in range(3))

    def forward(self, x: Tensor, adj: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.relu(adj @ layer(x)) + x
        return x.log_softmax(-1)


class GraphAttention(nn.Module):
    """GAT over a list of edges: gathers, a softmax over each node's neighbours by scatter, sums by scatter."""

    def __init__(self, features: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.value = nn.ModuleList(nn.Linear(features, features) for _ in range(2))
        self.score = nn.ModuleList(nn.Linear(2 * features, heads) for _ in range(2))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges[0], edges[1]
        for value, score in zip(self.value, self.score, strict=True):
            v = value(x)
            e = F.leaky_relu(score(torch.cat([v[source], v[target]], -1)), 0.2).clamp(-10, 10).exp()
            total = torch.zeros(x.shape[0], self.heads, dtype=x.dtype).index_add(0, target, e)
            weight = (e / (total[target] + 1e-6)).repeat_interleave(x.shape[1] // self.heads, 1)
            x = F.elu(torch.zeros_like(x).index_add(0, target, v[source] * weight)) + x
        return x


class SelectiveScan(nn.Module):
    """A diagonal state-space layer, step by step in Python."""

    def __init__(self, width: int = 64, state: int = 8) -> None:
        super().__init__()
        self.rates = nn.Parameter(torch.rand(width, state) + 0.5)
        self.project, self.out = nn.Linear(width, width + 2 * state), nn.Linear(width, width)
        self.width, self.state = width, state

    def forward(self, x: Tensor) -> Tensor:
        step, b, c = self.project(x).split((self.width, self.state, self.state), -1)
        step = F.softplus(step)
        h, found = torch.zeros(x.shape[0], self.width, self.state, dtype=x.dtype), list[Tensor]()
        for t in range(x.shape[1]):
            h = (-step[:, t, :, None] * self.rates).exp() * h + step[:, t, :, None] * b[:, t, None] * x[:, t, :, None]
            found.append((h * c[:, t, None]).sum(-1))
        return self.out(torch.stack(found, 1)) + x


class LongConvolution(nn.Module):
    """S4's convolution form: filters as long as the sequence, by FFT."""

    def __init__(self, width: int = 64, length: int = 256) -> None:
        super().__init__()
        self.filters = nn.Parameter(torch.randn(width, length) * torch.exp(-torch.arange(length) / 32))
        self.mix, self.norm, self.length = nn.Linear(width, 2 * width), nn.LayerNorm(width), length

    def forward(self, x: Tensor) -> Tensor:
        size = 2 * self.length
        y = torch.fft.irfft(torch.fft.rfft(x.mT, n=size) * torch.fft.rfft(self.filters, n=size), n=size)[..., : self.length]
        return self.norm(F.glu(self.mix(F.gelu(y.mT)), -1) + x)


class Pitch(nn.Module):
    """CREPE-shaped: wide one-dimensional convolutions in two dimensions, norms behind activations."""

    def __init__(self) -> None:
        super().__init__()
        sizes = ((1, 64, 256, 4), (64, 32, 32, 1), (32, 32, 32, 1), (32, 64, 32, 1))
        self.blocks = nn.ModuleList(nn.Sequential(
            nn.ZeroPad2d((0, 0, k // 2 - 1, k - k // 2)), nn.Conv2d(a, b, (k, 1), (s, 1)), nn.ReLU(), nn.BatchNorm2d(b),
            nn.MaxPool2d((2, 1))) for a, b, k, s in sizes)
        self.last = nn.Linear(64 * 16, 360)

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, None, :, None]
        for block in self.blocks:
            x = block(x)
        return self.last(x.permute(0, 2, 1, 3).reshape(x.shape[0], -1)).sigmoid()


class Separable(nn.Module):
    """A speech model of depthwise convolutions in one dimension (QuartzNet)."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.first = nn.Conv1d(64, width, 11, 2, 5)
        self.blocks = nn.ModuleList(nn.Sequential(
            nn.Conv1d(width, width, k, padding=k // 2, groups=width), nn.Conv1d(width, width, 1), nn.BatchNorm1d(width), nn.ReLU())
            for k in (13, 17, 21, 25))
        self.last = nn.Conv1d(width, 29, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x) + x
        return self.last(x).transpose(1, 2).log_softmax(-1)


class WaveNet(nn.Module):
    """Dilated causal convolutions with gates: audio, and most temporal convolutional networks."""

    def __init__(self, width: int = 48, depth: int = 6) -> None:
        super().__init__()
        self.first, self.last = nn.Conv1d(1, width, 1), nn.Conv1d(width, 1, 1)
        self.gates = nn.ModuleList(nn.Conv1d(width, 2 * width, 3, dilation=2**i) for i in range(depth))
        self.mixes = nn.ModuleList(nn.Conv1d(width, 2 * width, 1) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x, skips = self.first(x), torch.zeros((), dtype=x.dtype)
        for i, (gate, mix) in enumerate(zip(self.gates, self.mixes, strict=True)):
            a, b = gate(F.pad(x, (2 ** (i + 1), 0))).chunk(2, 1)
            y, skip = mix(a.tanh() * b.sigmoid()).chunk(2, 1)
            x, skips = x + y, skips + skip
        return self.last(F.relu(skips))


class Recurrent(nn.Module):
    """Two LSTM layers in both directions: tagging, time series."""

    def __init__(self, width: int = 96, features: int = 32) -> None:
        super().__init__()
        self.cells, self.last = nn.LSTM(features, width, 2, batch_first=True, bidirectional=True), nn.Linear(2 * width, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.cells(x)[0]).softmax(-1)


class Forecast(nn.Module):
    """A GRU encoder whose last state is unrolled for some steps (DeepAR)."""

    def __init__(self, width: int = 64, steps: int = 12) -> None:
        super().__init__()
        self.encoder, self.cell = nn.GRU(4, width, 2, batch_first=True), nn.GRUCell(2, width)
        self.last, self.steps = nn.Linear(width, 2), steps

    def forward(self, x: Tensor) -> Tensor:
        h = self.encoder(x)[1][-1]
        y, found = self.last(h), list[Tensor]()
        for _ in range(self.steps):
            h = self.cell(y, h)
            found.append(y := self.last(h))
        mean, scale = torch.stack(found, 1).unbind(-1)
        return torch.stack([mean, F.softplus(scale)], -1)


class NBeats(nn.Module):
    """Fully connected blocks that subtract what they explain."""

    def __init__(self, back: int = 96, ahead: int = 24, width: int = 256) -> None:
        super().__init__()
        self.back, self.ahead = back, ahead
        self.blocks = nn.ModuleList(nn.Sequential(
            nn.Linear(back, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, back + ahead))
            for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros(x.shape[0], self.ahead, dtype=x.dtype)
        for block in self.blocks:
            explained, ahead = block(x).split((self.back, self.ahead), -1)
            x, total = x - explained, total + ahead
        return total


class Recommender(nn.Module):
    """DLRM-shaped: embedding bags, pairwise products, small layers."""

    def __init__(self, tables: int = 8, width: int = 32) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(1000, width, mode="sum") for _ in range(tables))
        self.bottom = nn.Sequential(nn.Linear(13, 64), nn.ReLU(), nn.Linear(64, width), nn.ReLU())
        pairs = (tables + 1) * tables // 2
        self.top = nn.Sequential(nn.Linear(width + pairs, 64), nn.ReLU(), nn.Linear(64, 1))
        rows, columns = torch.triu_indices(tables + 1, tables + 1, 1)
        self.register_buffer("rows", rows)
        self.register_buffer("columns", columns)

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        x = self.bottom(dense)
        all_ = torch.stack([x, *(table(ids[:, i]) for i, table in enumerate(self.tables))], 1)
        pairs = (all_ @ all_.mT)[:, self.rows, self.columns]
        return self.top(torch.cat([x, pairs], 1)).sigmoid()


class Mlp(nn.Module):
    """Three layers: what quantizers are tried on."""

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(256, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 64))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Cnn(nn.Module):
    """A plain convolutional network: what quantizers are tried on."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        block = lambda a, b, s: nn.Sequential(nn.Conv2d(a, b, 3, s, 1), nn.BatchNorm2d(b), nn.ReLU())  # noqa: E731
        wide = 2 * width
        self.body = nn.Sequential(block(3, width, 2), block(width, wide, 2), block(wide, wide, 1), block(wide, 2 * wide, 2))
        self.head = nn.Linear(4 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean((2, 3)))
