"""What bets on the structure of indices, masks and loops could save at most: models that make no use of what their calls always
bring, in turns with the same models with that written into their code. Both are served by us, in plans that are made before
anything is timed; the second is the upper bound of a specialization behind a guard, whose price would come on top.

    python -m benchmarks.inputs structure [--quick]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._higher_order_ops.while_loop import while_loop

import hotfuse
from benchmarks.inputs.repeated import Call, in_turns

WARM_CALLS = 6
LEAST, MOST = -6.0e4, 6.0e4
"""What a clamp allows that keeps activations within the range of fp16, as T5's layers have one."""


class Embeddings(nn.Module):
    """What encoders begin with; positions come as an input, and are 0, 1, 2, … in every call."""

    def __init__(self, dim: int, length: int, *, sliced: bool) -> None:
        super().__init__()
        self.words, self.places, self.norm = nn.Embedding(30522, dim), nn.Embedding(512, dim), nn.LayerNorm(dim)
        self.sliced, self.length = sliced, length

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        places = self.places.weight[: self.length][None] if self.sliced else self.places(positions)
        return self.norm(self.words(ids) + places)


class Rotary(nn.Module):
    """Rotated queries of a decoder, whose angles follow from positions; they are 0, 1, 2, … in every call."""

    def __init__(self, dim: int, length: int, *, known: bool) -> None:
        super().__init__()
        self.q, self.out, self.known = nn.Linear(dim, dim), nn.Linear(dim, dim), known
        self.register_buffer("steps", 10000.0 ** (-torch.arange(0, 64, 2) / 64))
        self.register_buffer("angles", torch.cat([torch.arange(length)[:, None] * self.steps] * 2, -1)[None])

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        b, s, d = x.shape
        if self.known:
            angles = self.angles
        else:
            angles = positions[:, :, None] * self.steps
            angles = torch.cat([angles, angles], -1)
        q = self.q(x).view(b, s, d // 64, 64).transpose(1, 2)
        turned = torch.cat([-q[..., 32:], q[..., :32]], -1)
        q = q * angles.cos()[:, None] + turned * angles.sin()[:, None]
        return self.out(q.transpose(1, 2).reshape(b, s, d))


class Clamped(nn.Module):
    """A feed-forward layer whose result is clamped, which never acts."""

    def __init__(self, dim: int, *, clamps: bool) -> None:
        super().__init__()
        self.norm, self.up, self.down, self.clamps = nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim), clamps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + self.down(torch.relu(self.up(self.norm(x))))
        return y.clamp(LEAST, MOST) if self.clamps else y


class Passes(nn.Module):
    """A chain of cheap operators over much data with clamps and wheres that never act: where they would cost most."""

    def __init__(self, *, acts: bool) -> None:
        super().__init__()
        self.acts = acts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2.0 + 1.0
        if self.acts:
            y = torch.where(y > MOST, torch.full_like(y, MOST), y.clamp(LEAST, MOST))
        return y * y


class Bags(nn.Module):
    """Sparse features of a recommender: many short rows of large tables, by indices of eight or of four bytes."""

    def __init__(self, tables: int, dim: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(20000, dim) for _ in range(tables))

    def forward(self, at: torch.Tensor) -> torch.Tensor:
        return torch.cat([table(at[i]) for i, table in enumerate(self.tables)], -1)


class Repeats(nn.Module):
    """A loop that data end, after four trips in every call; or the four trips written out."""

    def __init__(self, dim: int, *, unrolled: bool) -> None:
        super().__init__()
        self.step, self.unrolled = nn.Linear(dim, dim), unrolled

    def forward(self, x: torch.Tensor, trips: torch.Tensor) -> torch.Tensor:
        if self.unrolled:
            for _ in range(4):
                x = torch.tanh(self.step(x))
            return x
        return while_loop(lambda i, _x, t: i < t, lambda i, x, t: (i + 1, torch.tanh(self.step(x)), t.clone()),
                          (torch.zeros((), dtype=torch.int64), x, trips))[1]  # fmt: skip


@dataclass(frozen=True)
class Pair:
    """A model, the same with what is bet on written into it, and calls of each, made of the same generator."""

    name: str
    general: nn.Module
    special: nn.Module
    calls: Callable[[], Call]
    special_calls: Callable[[Call], Call] = lambda call: call


def pairs(quick: bool) -> list[Pair]:
    """Every bet on a model that it would be for."""
    dim = 128 if quick else 768

    def positions(rows: int, length: int) -> torch.Tensor:
        return torch.arange(length).expand(rows, length).contiguous()

    def encoded(rows: int, length: int) -> Call:
        return torch.randint(0, 30522, (rows, length)), positions(rows, length)

    return [
        Pair("positions that are a slice, embeddings b8 s128", Embeddings(dim, 128, sliced=False),
             Embeddings(dim, 128, sliced=True), lambda: encoded(8, 128)),
        Pair("positions that are a slice, angles b1 s128", Rotary(dim, 128, known=False), Rotary(dim, 128, known=True),
             lambda: (torch.randn(1, 128, dim), positions(1, 128))),
        Pair("a clamp that never acts, layer b1 s128", Clamped(dim, clamps=True), Clamped(dim, clamps=False),
             lambda: (torch.randn(1, 128, dim),)),
        Pair("clamp and where that never act, alone, 16 MB", Passes(acts=True), Passes(acts=False),
             lambda: (torch.randn(4, 1024, 1024),)),
        Pair("int64 that fits int32, 26 tables x 32, b512", tables := Bags(26, 32), tables,
             lambda: (torch.randint(0, 20000, (26, 512)),), lambda call: (call[0].int(),)),
        Pair("four trips of a loop, b1 x 128", Repeats(128, unrolled=False), Repeats(128, unrolled=True),
             lambda: (torch.randn(1, 128), torch.tensor(4))),
        Pair("four trips of a loop, b32 x 512", Repeats(512, unrolled=False), Repeats(512, unrolled=True),
             lambda: (torch.randn(32, 512), torch.tensor(4))),
    ]  # fmt: skip


def rows(quick: bool) -> list[dict[str, Any]]:
    """One line a bet."""
    torch.manual_seed(0)
    found: list[dict[str, Any]] = []
    with torch.no_grad():
        for pair in pairs(quick):
            pair.special.load_state_dict(pair.general.state_dict())
            general, special = (hotfuse.jit(m.eval(), settings=hotfuse.Settings(capture="inline", hot_calls=2, watch=False))
                                for m in (pair.general, pair.special))  # fmt: skip
            for _ in range(WARM_CALLS):
                given = pair.calls()
                general(*given)
                special(*pair.special_calls(given))

            def calls(pair: Pair = pair) -> Iterator[tuple[Any, ...]]:
                while True:
                    call = pair.calls()
                    yield call, pair.special_calls(call)

            def own(of: Any, which: int) -> Callable[..., Any]:
                return lambda *both: of(*both[which])

            runs = {"ours": own(special, 1), "without": own(general, 0), "eager": own(pair.general, 0)}
            ms = in_turns(runs, calls(), 40 if quick else 300, settle=10)
            found.append({
                "": pair.name, **{k: round(ms[n], 4) for k, n in (("special", "ours"), ("general", "without"), ("eager", "eager"))},
                "tiers": f"{tier(special)}, {tier(general)}", "at most": round(ms["without"] / ms["ours"], 3),
            })  # fmt: skip
            print(found[-1], flush=True)
            general.close()
            special.close()
    return found


def tier(fast: Any) -> int:
    """Of the plan that serves."""
    return max((e.plan.tier for site in fast._engine.sites.values() for e in site.entries), default=-1)
