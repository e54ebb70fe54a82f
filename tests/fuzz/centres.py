"""Random groups around a product, a convolution, an attention or a pool: a centre with constants, and what follows it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

Tensor = torch.Tensor

AFTER: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu, "gelu": F.gelu, "silu": F.silu, "tanh": torch.tanh, "sigmoid": torch.sigmoid,
    "hardswish": F.hardswish, "half": lambda x: x * 0.5 + 1, "clamp": lambda x: x.clamp(-1, 1), "square": torch.square,
}  # fmt: skip
HALVES = (torch.float16, torch.bfloat16)


@dataclass
class Centre:
    """A function of tensors that closes over constants; in double precision, they are cast with the rest."""

    seed: int
    name: str
    inputs: list[Tensor]
    weights: list[Tensor]
    body: Callable[..., Tensor]
    after: list[tuple[str, Callable[[Tensor], Tensor]]]
    residual: Tensor | None

    def __call__(self, *tensors: Tensor) -> Tensor:
        wide = any(t.dtype is torch.float64 for t in tensors)
        inputs = tensors[: len(self.inputs)]
        x = self.body(*inputs, *(w.double() if wide and w.is_floating_point() else w for w in self.weights))
        for _, fn in self.after:
            x = fn(x)
        return x if self.residual is None else x + tensors[-1]

    @property
    def tensors(self) -> list[Tensor]:
        """What a call is given."""
        return self.inputs if self.residual is None else [*self.inputs, self.residual]

    def __str__(self) -> str:
        shapes = ", ".join(f"{str(t.dtype)[6:]}{list(t.shape)}" for t in (*self.tensors, *self.weights))
        return f"seed {self.seed}: {self.name} of {shapes}, then {[n for n, _ in self.after]}, residual {self.residual is not None}"


def _linear(r: random.Random, g: torch.Generator) -> Any:
    k, n = r.choice([1, 3, 16, 33, 64, 100]), r.choice([1, 5, 16, 48, 65])
    shape = (*[r.choice([1, 2, 5, 19]) for _ in range(r.randint(1, 3))], k)
    weights = [torch.randn(n, k, generator=g) / k**0.5] + ([torch.randn(n, generator=g)] if r.random() < 0.5 else [])
    return [torch.randn(shape, generator=g)], weights, F.linear


def _bytes(r: random.Random, g: torch.Generator) -> Any:
    k, n, m = r.choice([4, 16, 33, 100]), r.choice([1, 5, 16, 48]), r.choice([1, 3, 17])
    x = torch.randint(0, 256, (m, k), generator=g, dtype=torch.uint8)
    w = torch.randint(-127, 128, (n, k), generator=g, dtype=torch.int8)
    zero = float(r.randint(0, 255))

    def body(x: Tensor, w: Tensor) -> Tensor:
        return F.linear((x.to(torch.float32) - zero) * 0.05, w.to(torch.float32) * 0.02)

    return [x], [w], body


def _convolution(r: random.Random, g: torch.Generator) -> Any:
    dims, groups = r.choice([1, 2, 2, 2]), r.choice([1, 1, 1, 2, 4])
    ic, oc = groups * r.choice([1, 2, 3, 8]), groups * r.choice([1, 4, 5, 16])
    window, stride, dilation = r.choice([1, 2, 3, 3, 5]), r.choice([1, 1, 2]), r.choice([1, 1, 2])
    pad = r.randint(0, window // 2 * dilation)
    sizes = [r.randint(dilation * (window - 1) + 1, 14) for _ in range(dims)]
    weights = [torch.randn(oc, ic // groups, *[window] * dims, generator=g) / (ic * window**dims) ** 0.5]
    weights += [torch.randn(oc, generator=g)] if r.random() < 0.5 else []
    fn = (F.conv1d, F.conv2d)[dims - 1]

    def body(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        return fn(x, w, b, stride, pad, dilation, groups)

    x = torch.randn(r.choice([1, 2]), ic, *sizes, generator=g)
    return [x.contiguous(memory_format=torch.channels_last) if dims == 2 and r.random() < 0.5 else x], weights, body


def _attention(r: random.Random, g: torch.Generator) -> Any:
    dtype = r.choice([torch.float32, torch.float32, *HALVES])
    batch, heads, width = r.choice([1, 2]), r.choice([1, 3]), r.choice([8, 16, 33])
    few, many = r.choice([1, 5, 17]), r.choice([5, 17, 40])
    q, k, v = (torch.randn(batch, heads, n, width, generator=g).to(dtype) for n in (few, many, many))
    causal = r.random() < 0.3 and few == many

    def body(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return [q, k, v], [], body


def _product(r: random.Random, g: torch.Generator) -> Any:
    m, n, k, batch = r.choice([1, 5, 17]), r.choice([1, 8, 33]), r.choice([1, 7, 40]), r.choice([1, 3])
    a, b = torch.randn(batch, m, k, generator=g), torch.randn(batch, k, n, generator=g)
    if r.random() < 0.5:
        b = b.transpose(1, 2).contiguous().transpose(1, 2)
    return [a, b], [], torch.bmm


CENTRES = {"linear": _linear, "bytes": _bytes, "convolution": _convolution, "attention": _attention, "product": _product}


def random_centre(seed: int) -> Centre:
    """The group of a seed."""
    r, g = random.Random(seed), torch.Generator().manual_seed(seed)
    name = r.choice(list(CENTRES))
    inputs, weights, body = CENTRES[name](r, g)
    after = [(n, AFTER[n]) for n in r.choices(list(AFTER), k=r.choice([0, 1, 2, 3]))] if name != "attention" else []
    made = Centre(seed, name, inputs, weights, body, after, None)
    if r.random() < 0.4 and name != "attention":
        made.residual = torch.randn(made(*inputs).shape, generator=g)
    return made
