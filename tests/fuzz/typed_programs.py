"""Random typed programs: steps over inputs of several element types, right at several sets of sizes, from a seed.

a value   its tensors at each set of sizes, so that a step stands only where it is right for all of them, and whether it is
          exact: made of the inputs without rounding, so that comparing, flooring or sorting it gives the same everywhere
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.fuzz.typed_ops import (
    ANY_BINARY,
    EXACT_BINARY,
    EXACT_FLOAT,
    EXACT_UNARY,
    FLOAT_BINARY,
    FLOAT_UNARY,
    INT_BINARY,
    INT_UNARY,
    safe,
)

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTS = (torch.int64, torch.int32, torch.uint8, torch.int8)
MOST = 4000
"""Elements of a value."""


@dataclass
class Served:
    """A program of steps over its inputs; calling it runs them."""

    seed: int
    kinds: list[str] = field(default_factory=list[str])
    steps: list[tuple[str, Callable[..., Any], tuple[int, ...]]] = field(default_factory=list[Any])
    outputs: list[int] = field(default_factory=list[int])
    coarsest: torch.dtype = torch.float64

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        values = list(inputs)
        for _, fn, of in self.steps:
            values.append(fn(*(values[i] for i in of)))
        return tuple(values[i] for i in self.outputs)

    def __str__(self) -> str:
        lines = [f"seed {self.seed}; inputs {', '.join(self.kinds)}"]
        lines += [f"  v{len(self.kinds) + i} = {name}{of}" for i, (name, _, of) in enumerate(self.steps)]
        return "\n".join([*lines, f"  return {self.outputs}"])


@dataclass
class _Value:
    at: list[Tensor]
    """At each set of sizes."""
    exact: bool

    @property
    def dtype(self) -> torch.dtype:
        return self.at[0].dtype

    @property
    def rank(self) -> int:
        return self.at[0].dim()


class ServedMaker:
    """Draws a program, and calls of it."""

    def __init__(self, seed: int) -> None:
        self.r = r = random.Random(seed)
        self.seed, self.program = seed, Served(seed)
        self.specials = r.random() < 0.35
        self.strided = r.random() < 0.5
        halves = r.random() < 0.3
        self.floats = FLOATS if halves else FLOATS[:1] if r.random() < 0.6 else FLOATS[:2]
        many = [1, 2, 3, 5, 8, 16, 17, 33]
        self.sizes = [{"b": r.choice(many), "n": r.choice(many)} for _ in range(3)]
        if r.random() < 0.3:
            self.sizes.append({"b": r.choice([0, 1]), "n": r.choice(many)})
        self.k = r.choice([1, 3, 4, 8, 16, 19])
        self.shapes: list[tuple[Any, ...]] = []
        self.types: list[torch.dtype] = []
        forms = [
            ("b", "n", self.k),
            ("b", "n", self.k),
            ("n", self.k),
            (self.k,),
            ("b", 1, self.k),
            ("b", "n", 1),
            ("b", self.k),
            (),
        ]
        for i in range(r.randint(1, 4)):
            self.shapes.append(forms[0] if i == 0 else r.choice(forms))
            pool = [*self.floats, *self.floats, *self.floats, *INTS, torch.bool]
            self.types.append(r.choice(self.floats) if i == 0 else r.choice(pool))
        self.program.kinds = [f"{str(t)[6:]}{list(s)}" for t, s in zip(self.types, self.shapes, strict=True)]
        self.values = [
            _Value(list(at), exact=True) for at in zip(*(self.inputs(s, seed) for s in self.sizes), strict=True)
        ]

    def inputs(self, sizes: dict[str, int], seed: int, fill: int = 0) -> list[Tensor]:
        """Of a call; `fill`: zeros, ones and such now and then."""
        g, r = torch.Generator().manual_seed(seed), random.Random(seed)
        made: list[Tensor] = []
        for shape, dtype in zip(self.shapes, self.types, strict=True):
            dims = [sizes[d] if isinstance(d, str) else d for d in shape]
            if dtype in FLOATS:
                x = torch.randn(dims, generator=g, dtype=torch.float64).to(dtype) * (1.0 if fill != 2 else 0.0)
                if self.specials and x.numel() and fill != 1:
                    for number in (float("nan"), float("inf"), -float("inf"), -0.0, 1e-30):
                        if r.random() < 0.4:
                            x.view(-1)[r.randrange(x.numel())] = number
            elif dtype is torch.bool:
                x = torch.rand(dims, generator=g) < (0.5 if fill != 2 else 1.1)
            else:
                info = torch.iinfo(dtype)
                low, high = (max(info.min, -40), 40) if r.random() < 0.8 else (info.min, info.max)
                x = torch.randint(low, high, dims, generator=g, dtype=torch.int64).to(dtype)
                if fill == 2:
                    x = torch.zeros_like(x)
            made.append(self._laid(x, r))
        return made

    def _laid(self, x: Tensor, r: random.Random) -> Tensor:
        """In an order of memory of its own."""
        if not self.strided or not x.dim():
            return x
        match r.randrange(5):
            case 0 if x.dim() >= 2:
                return x.transpose(0, -1).contiguous().transpose(0, -1)
            case 1:
                return torch.stack([x, x], -1)[..., 0]
            case 2:
                return torch.cat([x, x], 0)[: x.shape[0]] if r.random() < 0.5 else torch.cat([x, x], 0)[x.shape[0] :]
            case 3 if x.shape[0]:
                return x[:1].expand(x.shape)
            case _:
                return x

    # -- steps

    def add(self, name: str, fn: Callable[..., Any], *of: int, exact: bool = False) -> bool:
        """The step, where it is right at all sizes."""
        try:
            at = [fn(*(self.values[i].at[k] for i in of)) for k in range(len(self.sizes))]
        except (RuntimeError, IndexError, TypeError, ValueError):
            return False
        if (
            not all(isinstance(t, Tensor) and t.numel() <= MOST and t.dim() <= 5 for t in at)
            or len({(t.dtype, t.dim()) for t in at}) > 1
        ):
            return False
        if at[0].dtype not in (*FLOATS, *INTS, torch.int16, torch.bool):
            return False
        self.values.append(_Value(at, exact and all(self.values[i].exact for i in of)))
        self.program.steps.append((name, fn, of))
        return True

    def pick(self) -> int:
        n = len(self.values)
        return max(self.r.randrange(n), self.r.randrange(n))

    def step(self) -> None:
        r, at = self.r, self.pick()
        x = self.values[at]
        kinds = {
            "unary": 9,
            "binary": 12,
            "cast": 3,
            "view": 8,
            "reduce": 5,
            "norm": 3,
            "matmul": 2,
            "index": 4,
            "write": 4,
            "sort": 2,
            "join": 3,
            "conv": 1,
            "attention": 1,
        }
        getattr(self, "_" + r.choices(list(kinds), list(kinds.values()))[0])(at, x)

    def _unary(self, at: int, x: _Value) -> None:
        r, kind = self.r, self.r.random()
        if x.dtype.is_floating_point and kind < 0.7:
            name = r.choice(list(FLOAT_UNARY))
            self.add(name, FLOAT_UNARY[name], at)
        elif x.dtype.is_floating_point and x.exact and kind < 0.85:
            name = r.choice(list(EXACT_FLOAT))
            self.add(name, EXACT_FLOAT[name], at, exact=True)
        elif not x.dtype.is_floating_point and x.dtype is not torch.bool and kind < 0.7:
            name = r.choice(list(INT_UNARY))
            self.add(name, INT_UNARY[name], at, exact=True)
        elif x.exact:
            name = r.choice(list(EXACT_UNARY))
            self.add(name, EXACT_UNARY[name], at, exact=True)

    def _binary(self, at: int, x: _Value) -> None:
        r, other = self.r, self.pick()
        y = self.values[other]
        table, exact = ANY_BINARY, False
        if x.dtype.is_floating_point and y.dtype.is_floating_point and r.random() < 0.4:
            table = FLOAT_BINARY
        elif not x.dtype.is_floating_point and not y.dtype.is_floating_point and r.random() < 0.6:
            table, exact = INT_BINARY, True
        elif x.exact and y.exact and r.random() < 0.5:
            table, exact = EXACT_BINARY, True
        name = r.choice(list(table))
        if name == "where" and not x.exact:
            return
        both = not x.dtype.is_floating_point and not y.dtype.is_floating_point
        self.add(
            name,
            table[name],
            *((at, other) if r.random() < 0.5 or name == "where" else (other, at)),
            exact=exact or both,
        )

    def _cast(self, at: int, x: _Value) -> None:
        to = self.r.choice([*self.floats, *self.floats, *INTS, torch.bool])
        name = f"to_{str(to)[6:]}"
        if to.is_floating_point:
            self.add(name, lambda t: t.to(to), at, exact=not x.dtype.is_floating_point and x.exact)
        elif x.exact or not x.dtype.is_floating_point:
            bound = 0 if to is torch.uint8 else -9
            self.add(
                name, lambda t: safe(t).clamp(min=bound).to(to) if t.is_floating_point() else t.to(to), at, exact=True
            )

    def _view(self, at: int, x: _Value) -> None:
        r, rank = self.r, x.rank
        if not rank:
            self.add("unsqueeze", lambda t: t.unsqueeze(0), at, exact=True)
            return
        d, e = r.randrange(rank), r.randrange(-rank, rank)
        n = min(t.shape[d] for t in x.at)
        lo = r.randint(-2, max(n, 0))
        step = r.choice([1, 1, 2, 3])
        head = (slice(None),) * d
        forms: dict[str, Callable[[Tensor], Tensor]] = {
            f"transpose{d, e}": lambda t: t.transpose(d, e),
            f"flip{d}": lambda t: t.flip(d),
            "flatten": lambda t: t.reshape(-1),
            f"flatten{d}": lambda t: t.flatten(0, d),
            f"slice{d, lo, step}": lambda t: t[(*head, slice(lo, None, step))],
            f"front{d, lo}": lambda t: t[(*head, slice(None, lo))],
            f"unsqueeze{d}": lambda t: t.unsqueeze(d),
            f"expand{d}": lambda t: t.unsqueeze(d).expand(*t.shape[:d], 3, *t.shape[d:]),
            f"select{d, e}": lambda t: t.select(d, 0),
            f"last{d}": lambda t: t.select(d, -1),
            f"roll{d, lo}": lambda t: t.roll(lo, d),
            f"squeeze{e}": lambda t: t.squeeze(e),
            f"chunk{d}": lambda t: t.chunk(2, d)[0],
            f"split{d}": lambda t: t.split(2, d)[-1],
            f"repeat{d}": lambda t: t.repeat(*[1] * d, 2, *[1] * (rank - 1 - d)),
            f"pad{lo}": lambda t: F.pad(t, (1, 2), value=1),
            f"movedim{d, e}": lambda t: t.movedim(d, e),
            "tril": torch.tril,
            "triu": lambda t: torch.triu(t, 1),
            "diagonal": lambda t: t.diagonal(0, -2, -1),
            f"interleave{d}": lambda t: t.repeat_interleave(2, d),
            f"unfold{d}": lambda t: t.unfold(d, 2, 1),
            "T": lambda t: t.mT,
            f"crop{d}": lambda t: F.pad(t, (-1, 1)),
            f"narrow{d}": lambda t: t.narrow(d, t.shape[d] // 2, t.shape[d] - t.shape[d] // 2),
        }
        name = r.choice(list(forms))
        self.add(name, forms[name], at, exact=True)

    def _reduce(self, at: int, x: _Value) -> None:
        r, rank = self.r, x.rank
        dims = sorted(r.sample(range(rank), r.randint(1, rank))) if rank else []
        if not dims:
            return
        d, keep = dims[0], r.random() < 0.6
        whole = not x.dtype.is_floating_point
        forms: dict[str, tuple[Callable[[Tensor], Any], bool]] = {
            "sum": (lambda t: t.sum(dims, keepdim=keep), whole),
            "amax": (lambda t: t.amax(dims, keepdim=keep), True),
            "amin": (lambda t: t.amin(dims, keepdim=keep), True),
            "any": (lambda t: (t > 0).any(d, keepdim=keep), True),
            "all": (lambda t: (t > -2).all(d, keepdim=keep), True),
            "count": (lambda t: torch.count_nonzero(t > 1, d), True),
            "argmax": (lambda t: t.argmax(d, keepdim=keep), True),
            "argmin": (lambda t: t.argmin(d), True),
            "max_of": (lambda t: t.max(d, keepdim=keep)[1], True),
            "prod": (lambda t: (t * 0.5 if not whole else t % 3).prod(d, keepdim=keep), whole),
            "sum_all": (lambda t: t.sum(), whole),
            "max_all": (lambda t: t.max(), True),
            "aminmax": (lambda t: t.aminmax(dim=d)[1], True),
            "cummax": (lambda t: t.cummax(d)[0], True),
        }
        if not whole:
            forms |= {
                "mean": (lambda t: t.mean(dims, keepdim=keep), False),
                "var": (lambda t: t.var(dims, correction=0, keepdim=keep), False),
                "std": (lambda t: (t.var(d, correction=0) + 0.1).sqrt(), False),
                "norm": (lambda t: torch.linalg.vector_norm(t, 2, dims, keepdim=keep), False),
                "logsumexp": (lambda t: t.logsumexp(dims, keepdim=keep), False),
                "norm1": (lambda t: t.norm(1, d), False),
                "nansum": (lambda t: t.nansum(d), False),
                "sum64": (lambda t: t.sum(d, dtype=torch.float64), False),
            }
        name = r.choice(list(forms))
        fn, exact = forms[name]
        if exact and not x.exact and name in ("any", "all", "count", "argmax", "argmin", "max_of"):
            return
        if name in ("argmax", "argmin", "max_of") and not whole:
            return  # which of two equal ones is found differs
        self.add(f"{name}{dims, keep}", fn, at, exact=exact)

    def _norm(self, at: int, x: _Value) -> None:
        r, rank = self.r, x.rank
        if not rank:
            return
        d, whole = r.randrange(rank), not x.dtype.is_floating_point
        if whole:
            self.add(f"cumsum{d}", lambda t: t.cumsum(d), at, exact=True)
            return
        last, g = {t.shape[-1] for t in x.at}, torch.Generator().manual_seed(self.seed)
        k = last.pop()
        weight = torch.randn(k, generator=g).to(x.dtype)
        forms: dict[str, Callable[[Tensor], Tensor]] = {
            f"softmax{d}": lambda t: t.softmax(d),
            f"log_softmax{d}": lambda t: t.log_softmax(d),
            f"cumsum{d}": lambda t: t.cumsum(d),
            f"softmax32{d}": lambda t: t.softmax(d, dtype=torch.float32).to(t.dtype),
            f"cumprod{d}": lambda t: t.clamp(-1, 1).cumprod(d),
            "rms": lambda t: t * (t.float().pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt().to(t.dtype),
            f"normalize{d}": lambda t: F.normalize(t, dim=d),
            f"logcumsumexp{d}": lambda t: t.logcumsumexp(d),
        }
        if not last:
            forms |= {
                "layer_norm": lambda t: F.layer_norm(t, (k,), weight, weight),
                "rms_norm": lambda t: F.rms_norm(t, (k,), weight),
            }
        name = r.choice(list(forms))
        self.add(name, forms[name], at)

    def _matmul(self, at: int, x: _Value) -> None:
        r, last = self.r, {t.shape[-1] for t in x.at if t.dim()}
        if x.rank < 2:
            return
        g = torch.Generator().manual_seed(self.seed)
        if len(last) == 1 and x.dtype.is_floating_point and r.random() < 0.7:
            k, n = last.pop(), r.choice([1, 5, 16, 33])
            w, b = (
                (torch.randn(n, k, generator=g) / max(k, 1) ** 0.5).to(x.dtype),
                torch.randn(n, generator=g).to(x.dtype),
            )
            bias = r.random() < 0.6
            self.add(f"linear{n, bias}", lambda t: F.linear(t, w, b if bias else None), at)
        elif x.dtype.is_floating_point and r.random() < 0.5:
            self.add("einsum", lambda t: torch.einsum("...ij,...kj->...ik", t, t), at)
        else:
            self.add("gram", lambda t: t @ t.mT, at, exact=not x.dtype.is_floating_point)

    def _conv(self, at: int, x: _Value) -> None:
        if x.rank != 3 or x.dtype not in FLOATS[:2] or len({t.shape[1] for t in x.at}) > 1:
            return
        c, g, r = x.at[0].shape[1], torch.Generator().manual_seed(self.seed), self.r
        w = torch.randn(r.choice([1, 4, 9]), c, r.choice([1, 3]), generator=g).to(x.dtype)
        stride, dilation = r.choice([1, 2]), r.choice([1, 2])
        self.add(f"conv{tuple(w.shape), stride, dilation}", lambda t: F.conv1d(t, w, None, stride, 2, dilation), at)

    def _attention(self, at: int, x: _Value) -> None:
        if x.rank != 3 or not x.dtype.is_floating_point:
            return
        match self.r.randrange(3):
            case 0:
                self.add("attention", lambda t: F.scaled_dot_product_attention(t, t, t), at)
            case 1:
                self.add("causal", lambda t: F.scaled_dot_product_attention(t, t * 0.5, t, is_causal=True), at)
            case _:
                masks = [i for i, v in enumerate(self.values) if v.exact and v.rank == 3]
                if masks:
                    self.add(
                        "masked",
                        lambda t, m: F.scaled_dot_product_attention(
                            t, t, t, attn_mask=(m.amax(-1)[:, None] > 0) | torch.eye(t.shape[1], dtype=torch.bool)
                        ),
                        at,
                        self.r.choice(masks),
                    )

    def _index(self, at: int, x: _Value) -> None:
        r = self.r
        whole = [i for i, v in enumerate(self.values) if v.dtype in (torch.int64, torch.int32, torch.uint8) and v.exact]
        if not whole or not x.rank:
            return
        by, d = r.choice(whole), r.randrange(x.rank)

        def numbers(t: Tensor, i: Tensor) -> Tensor:
            return i.long() % max(t.shape[d], 1)

        forms: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
            f"index{d}": lambda t, i: t[(*[slice(None)] * d, numbers(t, i))],
            f"index_select{d}": lambda t, i: t.index_select(d, numbers(t, i).reshape(-1)[:7]),
            f"gather{d}": lambda t, i: t.gather(d, numbers(t, i)),
            f"along{d}": lambda t, i: t.take_along_dim(numbers(t, i), d),
            f"negative{d}": lambda t, i: t[(*[slice(None)] * d, numbers(t, i) - t.shape[d])],
            f"scatter{d}": lambda t, i: (
                torch.zeros_like(t).scatter_add(d, numbers(t, i), t)
                if not t.is_floating_point()
                else t.gather(d, numbers(t, i))
            ),
            f"put{d}": lambda t, i: t.index_put(
                (*[torch.arange(1)] * d, numbers(t, i).reshape(-1)[:5]), torch.ones((), dtype=t.dtype)
            ),
            f"embedding{d}": lambda t, i: F.embedding(i.long() % t.shape[0], t),
            f"amaxes{d}": lambda t, i: t.scatter_reduce(d, numbers(t, i), t, "amax"),
            f"index_add{d}": lambda t, i: t.index_add(d, torch.arange(t.shape[d]).flip(0), t) if i.dim() else t,
            f"index_fill{d}": lambda t, i: t.index_fill(d, numbers(t, i).reshape(-1)[:3], 2),
        }
        name = r.choice(list(forms))
        self.add(name, forms[name], at, by, exact="add" not in name)

    def _write(self, at: int, x: _Value) -> None:
        """In place, into a copy, a view of one, or rows of one."""
        r, other = self.r, self.pick()
        y = self.values[other]

        def viewed(t: Tensor) -> Tensor:
            c = t.clone(memory_format=torch.contiguous_format)
            c.view(-1)[: c.numel() // 2].mul_(2) if c.dtype != torch.bool else c.view(-1)[:1].fill_(True)
            return c

        def added(t: Tensor) -> Tensor:
            c = t.clone()
            c[..., 1:] += c[..., :-1].clone() if c.dtype != torch.bool else c[..., 1:]
            return c

        def copied(t: Tensor, u: Tensor) -> Tensor:
            c = t.clone()
            c[..., : c.shape[-1] // 2].copy_(u[..., : c.shape[-1] // 2])
            return c

        def masked(t: Tensor) -> Tensor:
            c = t.clone()
            c[c > 1] = 0
            return c

        def strided(t: Tensor) -> Tensor:
            c = t.clone()
            c[..., ::2] = 1
            return c.transpose(0, -1).add_(1) if c.dtype != torch.bool else c

        whole = not x.dtype.is_floating_point
        match r.randrange(6):
            case 0:
                self.add("viewed", viewed, at, exact=True)
            case 1:
                self.add("added", added, at, exact=whole)
            case 2 if not y.dtype.is_floating_point or x.dtype.is_floating_point:
                self.add("copied", copied, at, other, exact=x.dtype == y.dtype or not x.dtype.is_floating_point)
            case 3 if x.exact:
                self.add("masked_write", masked, at, exact=True)
            case 4:
                self.add("strided", strided, at, exact=whole)
            case 5 if x.exact:
                self.add(
                    "in_place",
                    lambda t: t.clone().clamp_(-2, 2).neg_() if t.dtype not in (torch.bool, torch.uint8) else t,
                    at,
                    exact=True,
                )
            case _:
                pass

    def _sort(self, at: int, x: _Value) -> None:
        r = self.r
        if not x.rank:
            return
        d, most = r.randrange(x.rank), r.random() < 0.5
        match r.randrange(3):
            case 0:
                self.add(f"sort{d, most}", lambda t: t.sort(dim=d, descending=most, stable=True)[0], at, exact=True)
            case 1 if x.exact and x.dtype is not torch.bool:
                self.add(f"argsort{d, most}", lambda t: t.argsort(dim=d, descending=most, stable=True), at, exact=True)
            case _:
                k = min(min(t.shape[d] for t in x.at), r.randint(1, 3))
                self.add(f"topk{k, d, most}", lambda t: t.topk(k, d, most)[0], at, exact=True)

    def _join(self, at: int, x: _Value) -> None:
        r, other = self.r, self.pick()
        if not x.rank:
            return
        d = r.randrange(x.rank)
        exact = not x.dtype.is_floating_point or x.dtype == self.values[other].dtype
        if r.random() < 0.7:
            self.add(f"cat{d}", lambda a, b: torch.cat([a, b, a], d), at, other, exact=exact)
        else:
            self.add(f"stack{d}", lambda a, b: torch.stack([a, b], d), at, other, exact=exact)


def served_program(seed: int) -> tuple[Served, ServedMaker]:
    """The program of a seed, and who makes its calls."""
    m = ServedMaker(seed)
    target = m.r.randint(3, 22)
    for _ in range(6 * target):
        if len(m.program.steps) < target:
            m.step()
    if not m.program.steps:
        m.add("neg", lambda t: -t, 0, exact=True)
    read = {i for _, _, of in m.program.steps for i in of}
    made = range(len(m.shapes), len(m.values))
    m.program.outputs = [i for i in made if i not in read][-4:]
    order = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
    found = [v.dtype for v in m.values if v.dtype.is_floating_point]
    m.program.coarsest = max(found, key=order.index, default=torch.float64)
    return m.program, m
