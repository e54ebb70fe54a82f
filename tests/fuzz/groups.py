"""Random groups: functions made of pointwise ops, views, reductions, windows, lookups, writes and sorts, from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

Tensor = torch.Tensor

UNARY: list[Callable[[Tensor], Tensor]] = [
    torch.relu, torch.sigmoid, torch.tanh, torch.exp, torch.neg, torch.abs, torch.square, F.gelu, F.silu, F.hardswish,
    F.elu, F.softplus, torch.floor, torch.sin, torch.erf, lambda x: x * 0.5 + 1, lambda x: 2 - x, lambda x: x.clamp(-1, 1),
    lambda x: torch.sqrt(x.abs() + 0.1), lambda x: torch.where(x > 0, x, x * 0.1), lambda x: x.masked_fill(x < -1, 0.25),
]  # fmt: skip
BINARY: list[Callable[[Tensor, Tensor], Tensor]] = [
    torch.add, torch.sub, torch.mul, torch.maximum, torch.minimum, lambda a, b: a / (b.abs() + 1),
    lambda a, b: torch.where(a > b, a, b * 0.5), lambda a, b: torch.add(a, b, alpha=0.5), lambda a, b: a.lerp(b, 0.3),
]  # fmt: skip
SIZES = [1, 1, 2, 3, 4, 5, 7, 8, 16, 17, 33]


@dataclass
class Step:
    """One op on earlier values, by number."""

    name: str
    fn: Callable[..., Any]
    of: tuple[int, ...]


@dataclass
class RandomGroup:
    """A function of tensors; calling it runs the steps."""

    seed: int
    inputs: list[Tensor]
    steps: list[Step]
    outputs: list[int]

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        values = list(tensors)
        for s in self.steps:
            values.append(s.fn(*(values[i] for i in s.of)))
        return tuple(values[i] for i in self.outputs)

    def __str__(self) -> str:
        shapes = ", ".join(str(tuple(t.shape)) for t in self.inputs)
        lines = [f"seed {self.seed}; inputs {shapes}"]
        lines += [f"  v{len(self.inputs) + i} = {s.name}{s.of}" for i, s in enumerate(self.steps)]
        return "\n".join([*lines, f"  return {self.outputs}"])


class _Maker:
    def __init__(self, seed: int) -> None:
        self.r = random.Random(seed)
        self.values: list[Tensor] = []
        self.steps: list[Step] = []
        self.inputs = 0

    def add(self, name: str, fn: Callable[..., Any], *of: int) -> None:
        self.values.append(fn(*(self.values[i] for i in of)))
        self.steps.append(Step(name, fn, of))

    def pick(self) -> int:
        """Later values more often, so that chains grow."""
        n = len(self.values)
        return max(self.r.randrange(n), self.r.randrange(n))

    def partner(self, at: int) -> int | None:
        shape = self.values[at].shape
        fits = [i for i, v in enumerate(self.values) if _broadcast(v.shape, shape)]
        return self.r.choice(fits) if fits else None

    def step(self) -> None:
        at = self.pick()
        x = self.values[at]
        if x.numel() > 6000:
            at = 0
            x = self.values[0]
        kinds = ["unary", "binary", "view", "reduce", "norm", "join", "window", "pick", "border", "sort", "write"]
        match self.r.choices(kinds, [8, 10, 10, 4, 2, 4, 2, 2, 1, 1, 2])[0]:
            case "unary":
                i = self.r.randrange(len(UNARY))
                self.add(f"unary{i}", UNARY[i], at)
            case "binary":
                other = self.partner(at)
                if other is not None:
                    i = self.r.randrange(len(BINARY))
                    pair = (at, other) if self.r.random() < 0.5 else (other, at)
                    self.add(f"binary{i}", BINARY[i], *pair)
            case "view":
                self.view(at, x)
            case "reduce":
                self.reduce(at, x)
            case "norm":
                self.norm(at, x)
            case "window":
                self.window(at, x)
            case "pick":
                self.pick_from(x)
            case "border":
                self.border(at, x)
            case "sort":
                self.sort(at, x)
            case "write":
                self.write(at, x)
            case _:
                self.join(at, x)

    def view(self, at: int, x: Tensor) -> None:
        r, rank = self.r, x.dim()
        match r.randrange(8):
            case 0 if rank >= 2:
                a, b = r.sample(range(rank), 2)
                self.add(f"transpose{a, b}", lambda t: t.transpose(a, b), at)
            case 1 if rank >= 2:
                order = r.sample(range(rank), rank)
                self.add(f"permute{order}", lambda t: t.permute(order), at)
            case 2 if rank >= 2:
                d = r.randrange(rank - 1)
                self.add(f"flatten{d}", lambda t: t.flatten(d, d + 1), at)
            case 3 if rank >= 1 and rank < 5:
                d = r.randrange(rank)
                n = x.shape[d]
                factors = [f for f in range(2, n) if n % f == 0]
                if factors:
                    f = r.choice(factors)
                    self.add(f"unflatten{d, f}", lambda t: t.unflatten(d, (f, n // f)), at)
            case 4 if rank >= 1:
                d = r.randrange(rank)
                n = x.shape[d]
                lo = r.randrange(n)
                hi, step = r.randint(lo + 1, n), r.choice([1, 1, 2])
                index = (*[slice(None)] * d, slice(lo, hi, step))
                self.add(f"slice{d, lo, hi, step}", lambda t: t[index], at)
            case 5 if rank < 5:
                d, n = r.randint(0, rank), r.choice([1, 2, 5])
                self.add(f"expand{d, n}", lambda t: t.unsqueeze(d).expand(*t.shape[:d], n, *t.shape[d:]), at)
            case 6 if rank >= 1:
                d = r.randrange(rank)
                self.add(f"flip{d}", lambda t: t.flip(d), at)
            case 7 if rank >= 1:
                d = r.randrange(rank)
                i = r.randrange(-x.shape[d], x.shape[d])
                self.add(f"select{d, i}", lambda t: t.select(d, i), at)
            case _:
                pass

    def reduce(self, at: int, x: Tensor) -> None:
        r, rank = self.r, x.dim()
        dims = sorted(r.sample(range(rank), r.randint(1, rank))) if rank else []
        if not dims:
            return
        keep = r.random() < 0.6
        fn = r.choice(["sum", "mean", "amax", "amin"])
        self.add(f"{fn}{dims, keep}", lambda t: getattr(t, fn)(dim=dims, keepdim=keep), at)

    def norm(self, at: int, x: Tensor) -> None:
        r, rank = self.r, x.dim()
        if not rank:
            return
        d = r.randrange(rank)
        match r.randrange(4):
            case 3:
                self.add(f"cumsum{d}", lambda t: t.cumsum(d), at)
            case 0:
                self.add(f"softmax{d}", lambda t: torch.softmax(t, d), at)
            case 1:
                shape = x.shape[d:]
                self.add(f"layer_norm{d}", lambda t: F.layer_norm(t, shape), at)
            case _:
                self.add(f"log_softmax{d}", lambda t: torch.log_softmax(t, d), at)

    def window(self, at: int, x: Tensor) -> None:
        """A pool or a resize of the last one or two dims."""
        r, rank = self.r, x.dim()
        spatial = 2 if rank == 4 else 1
        if rank not in (3, 4) or min(x.shape[-spatial:]) < 2:
            return
        size, stride = r.choice([1, 2, 2, 3]), r.choice([1, 1, 2, 3])
        pad = r.randint(0, size // 2)
        if min(x.shape[-spatial:]) + 2 * pad < size:
            return
        ceil, counts = r.random() < 0.3, r.random() < 0.5
        least, most = ((F.max_pool1d, F.avg_pool1d), (F.max_pool2d, F.avg_pool2d))[spatial - 1]
        match r.randrange(4):
            case 0:
                self.add(f"max_pool{size, stride, pad, ceil}", lambda t: least(t, size, stride, pad, ceil_mode=ceil), at)
            case 1:
                self.add(f"avg_pool{size, stride, pad, ceil, counts}",
                         lambda t: most(t, size, stride, pad, ceil_mode=ceil, count_include_pad=counts), at)  # fmt: skip
            case 2 if x.numel() < 2000:
                times = r.choice([2, 3])
                self.add(f"nearest{times}", lambda t: F.interpolate(t, scale_factor=times), at)
            case _ if x.numel() < 2000:
                shape = [r.choice([2, 5, 9]) for _ in range(spatial)]
                mode, corners = ("linear", "bilinear")[spatial - 1], r.random() < 0.5
                self.add(f"linear{shape, corners}",
                         lambda t: F.interpolate(t, size=shape, mode=mode, align_corners=corners), at)  # fmt: skip
            case _:
                pass

    def pick_from(self, x: Tensor) -> None:
        """Rows of an input by numbers made from another value, or elements along a dim."""
        r = self.r
        at = r.randrange(self.inputs)
        table = self.values[at]
        if not table.dim() or not table.numel():
            return
        by = self.pick()
        d = r.randrange(table.dim())
        n = table.shape[d]

        def numbers(t: Tensor) -> Tensor:
            return (t.detach() > 0).long() * (n - 1)

        if self.values[by].numel() * table.numel() // n > 4000 or self.values[by].dim() + table.dim() > 5:
            return
        match r.randrange(3):
            case 0 if table.dim() == 2:
                self.add("embedding", lambda t, i: F.embedding((i > 0).long() * (t.shape[0] - 1), t), at, by)
            case 1 if self.values[by].dim() == 1:
                self.add(f"index_select{d}", lambda t, i: t.index_select(d, numbers(i)), at, by)
            case _:
                index = (*[slice(None)] * d,)
                self.add(f"index{d}", lambda t, i: torch.ops.aten.index(t, [*[None] * len(index), -numbers(i)]), at, by)

    def border(self, at: int, x: Tensor) -> None:
        r, rank = self.r, x.dim()
        if rank not in (3, 4) or x.shape[-1] < 2:
            return
        amount = [r.randint(0, min(3, x.shape[-1] - 1)) for _ in range(2)]
        mode = r.choice(["reflect", "replicate", "circular"])
        if rank == 4:
            amount += [0, 0]
        self.add(f"{mode}{amount}", lambda t: F.pad(t, amount, mode=mode), at)

    def sort(self, at: int, x: Tensor) -> None:
        """Values only: which of two nearly equal ones comes first depends on rounding."""
        r, rank = self.r, x.dim()
        if not rank:
            return
        d, most = r.randrange(rank), r.random() < 0.5
        if r.random() < 0.5:
            self.add(f"sort{d, most}", lambda t: torch.sort(t, dim=d, descending=most, stable=True)[0], at)
        else:
            k = r.randint(1, x.shape[d])
            self.add(f"topk{k, d, most}", lambda t: torch.topk(t, k, d, most)[0], at)

    def write(self, at: int, x: Tensor) -> None:
        """At places that data say, or places one behind the other: torch leaves open which of two at one place stays."""
        r, rank = self.r, x.dim()
        if not rank or x.numel() > 2000:
            return
        d = r.randrange(rank)
        n = x.shape[d]
        m = r.randint(1, n)
        part = (*[slice(None)] * d, slice(0, m))

        def order(t: Tensor) -> Tensor:
            return torch.arange(m).flip(0).view(m, *[1] * (rank - 1 - d)).expand(t[part].shape)

        match r.randrange(5):
            case 0:
                self.add(f"scatter_add{d, m}", lambda t: t.scatter_add(d, (t[part] > 0).long() * (n - 1), t[part]), at)
            case 1:
                self.add(f"scatter_number{d, m}", lambda t: t.scatter(d, (t[part] > 0).long() * (n - 1), 0.5), at)
            case 2:
                self.add(f"scatter{d, m}", lambda t: t.scatter(d, order(t), t[part] * 2), at)
            case 3:
                self.add(f"index_put{d, m}",
                         lambda t: torch.ops.aten.index_put(t, [*[None] * d, torch.arange(m) - n], t[part] * 2), at)  # fmt: skip
            case _ if rank < 5 and x.numel() < 500:
                self.add("one_hot", lambda t: F.one_hot((t > 0).long(), 3).to(t.dtype), at)
            case _:
                pass

    def join(self, at: int, x: Tensor) -> None:
        r, rank = self.r, x.dim()
        if not rank:
            return
        d = r.randrange(rank)
        fits = [i for i, v in enumerate(self.values) if v.dim() == rank and _same_but(v.shape, x.shape, d)]
        if r.random() < 0.5:
            of = tuple(r.choice(fits) for _ in range(r.randint(1, 2)))
            self.add(f"cat{d}", lambda *t: torch.cat(t, d), at, *of)
        else:
            amount = [0] * (2 * (rank - 1 - d)) + [r.randint(0, 3), r.randint(0, 3)]
            self.add(f"pad{amount}", lambda t: F.pad(t, amount, value=0.5), at)


def _broadcast(shape: torch.Size, to: torch.Size) -> bool:
    return len(shape) <= len(to) and all(a in (1, b) for a, b in zip(reversed(shape), reversed(to), strict=False))


def _same_but(a: torch.Size, b: torch.Size, d: int) -> bool:
    return all(i == d or m == n for i, (m, n) in enumerate(zip(a, b, strict=True)))


def random_group(seed: int) -> RandomGroup:
    """The group of a seed: inputs that broadcast against each other, some steps, some outputs."""
    m = _Maker(seed)
    generator = torch.Generator().manual_seed(seed)
    rank = m.r.randint(1, 4)
    full = [m.r.choice(SIZES) for _ in range(rank)]
    for _ in range(m.r.randint(1, 3)):
        shape = [n if m.r.random() < 0.75 else 1 for n in full][m.r.choice([0, 0, 0, m.r.randrange(rank)]):]
        m.values.append(torch.randn(shape, generator=generator))
        if m.r.random() < 0.2 and len(shape) >= 2:  # not contiguous
            m.values[-1] = m.values[-1].transpose(0, 1).contiguous().transpose(0, 1)
    inputs = list(m.values)
    m.inputs = len(inputs)
    target = m.r.randint(1, 8)
    for _ in range(4 * target):
        if len(m.steps) < target:
            m.step()
    if not m.steps:
        m.add("relu", torch.relu, 0)
    made = range(len(inputs), len(m.values))
    outputs = sorted({len(m.values) - 1, *(m.r.choice(made) for _ in range(m.r.choice([0, 0, 1, 2])))})
    return RandomGroup(seed, inputs, m.steps, outputs)
