"""Always the wrong bet: every strategy is deployed on the traffic that it is for, and then traffic flips between that and what it
is not for: every call, every 10, every 1,000.

    python -m benchmarks.inputs flips [--contenders "open mask,sizes"] [--quick]

In turns with our plan without specializations (tier 1 is its highest, and nothing is watched) and with eager; every answer is
compared with eager's. On one thread calls are timed by the processor time of the calling thread, which holds on a busy machine,
else by the clock. A line says whether the strategy was in the plan when its traffic began, and when it ended: what loses is
withdrawn.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import hotfuse
from benchmarks.inputs.padding import VOCABULARY, Encoder
from benchmarks.inputs.repeated import UNSPECIALIZED, TwoTowers, compiled, image, plans, text
from hotfuse.specialize.table import BRANCH, DUPLICATES, OPEN_MASK, PADDING, REPEATED, SIZES, ZERO_ROWS

Call = tuple[torch.Tensor, ...]
LEARN_S = 30.0
"""Seconds of calls for the strategy to be deployed."""
SETTLE_S = 5.0
"""Seconds of mixed calls before anything is measured: plans for what was never seen so far are made then."""
SLICE_S = 6.0
"""Seconds of calls for each kind of traffic."""
TOLERANCE = 1e-3


class Attends(nn.Module):
    """A layer of attention with a mask, and what is behind it."""

    def __init__(self, dim: int = 128) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        b, s, d = x.shape
        q, k, v = self.qkv(x).view(b, s, 3, d // 32, 32).permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :])
        return torch.relu(self.out(seen.transpose(1, 2).reshape(b, s, d)))


class Chooses(nn.Module):
    """Two ways to go, as data say."""

    def __init__(self, dim: int = 256) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.last(x))
        y = torch.cond(x.sum() > 0, lambda t: torch.relu(self.first(t)), lambda t: self.second(t) * 2, (h,))
        return self.last(y)


class Sparse(nn.Module):
    """A wide layer behind a ReLU: whole rows of zeros where the input is far below zero."""

    def __init__(self, dim: int = 512) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)
        nn.init.constant_(self.up.bias, -0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(torch.relu(x))))


def perceptron(dim: int = 256) -> nn.Module:
    return nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim), nn.LayerNorm(dim), nn.Linear(dim, dim))


@dataclass(frozen=True)
class FlipCase:
    """A strategy, a model, calls that it is for and calls that it is not for."""

    row: str
    model: Callable[[], nn.Module]
    good: Callable[[], Call]
    bad: Callable[[], Call]


def tokens(rows: int, length: int) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (rows, length))


def padded(share: float) -> Call:
    rows, length = 8, 64
    return tokens(rows, length), (torch.arange(length)[None] < torch.full((rows, 1), round(share * length))).long()


def doubled(kinds: int) -> Call:
    order = torch.cat([torch.randperm(kinds), torch.randint(0, kinds, (16 - kinds,))])
    return tokens(kinds, 32)[order], torch.ones(16, 32, dtype=torch.int64)


def masked(hidden: int) -> Call:
    return torch.randn(2, 64, 128), torch.arange(64).expand(2, 64) >= hidden


def zeroed(share: float) -> Call:
    """Rows that a ReLU makes zeros of, no two of which are equal: else the batch has duplicates."""
    x = torch.randn(64, 512)
    return (torch.where(torch.rand(64, 1) < share, -x.abs(), x),)


KEPT = text(4)
CASES: tuple[FlipCase, ...] = (
    FlipCase(OPEN_MASK, Attends, lambda: masked(0), lambda: masked(9)),
    FlipCase(PADDING, lambda: Encoder(2, 128), lambda: padded(0.25), lambda: padded(1.0)),
    FlipCase(BRANCH, Chooses, lambda: (torch.rand(4, 256),), lambda: (-torch.rand(4, 256),)),
    FlipCase(ZERO_ROWS, Sparse, lambda: zeroed(0.9), lambda: zeroed(0.0)),
    FlipCase(REPEATED, lambda: TwoTowers(96, 2), lambda: (image(24), KEPT), lambda: (image(24), text(4))),
    FlipCase(DUPLICATES, lambda: Encoder(2, 128), lambda: doubled(4), lambda: doubled(16)),
    FlipCase(SIZES, perceptron, lambda: (torch.randn(24, 256),), lambda: (torch.randn(int(torch.randint(2, 90, ())), 256),)),
)


def flipping(case: FlipCase, every: int) -> Iterator[Call]:
    return (make() for make in itertools.cycle((case.good, case.bad)) for _ in range(every))


def deployed(fast: Any, row: str) -> bool:
    if row == ZERO_ROWS:
        return any(p.sides is not None for p in plans(fast))
    if row == SIZES:
        return any(e.versions for s in fast._engine.sites.values() for e in s.entries)
    return any(key.row == row for p in plans(fast) for key in p.layers)


def learn(fast: Any, calls: Iterator[Call], done: Callable[[], bool]) -> float:
    begin = time.perf_counter()
    while time.perf_counter() < begin + LEARN_S and not done():
        fast(*next(calls))
    fast.wait(10)
    return time.perf_counter() - begin


def sizes_open(case: FlipCase, fast: Any) -> None:
    """Calls that show which sizes change, before those that recur."""
    for _ in range(40 if case.row == SIZES else 0):
        fast(*case.bad())


def in_turns(runs: dict[str, Any], calls: Iterator[Call]) -> tuple[dict[str, float], dict[str, float], int, int]:
    """Mean and median milliseconds of a call by contender, calls, and answers that were not eager's."""
    spent: dict[str, list[float]] = {name: [] for name in runs}
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    wrong, names, until = 0, list(runs), time.perf_counter() + SLICE_S
    n = 0
    while time.perf_counter() < until:
        given, answers = next(calls), dict[str, torch.Tensor]()
        for name in (*names[n % len(names) :], *names[: n % len(names)]):  # each is first as often: contents are cold then
            begin = clock()
            answers[name] = runs[name](*given)
            spent[name].append(clock() - begin)
        n += 1
        wrong += not torch.allclose(answers["ours"], answers["eager"], rtol=TOLERANCE, atol=TOLERANCE)
    return _milliseconds(spent, statistics.fmean), _milliseconds(spent, statistics.median), n, wrong


def _milliseconds(spent: dict[str, list[float]], of: Callable[[list[float]], float]) -> dict[str, float]:
    """By contender; what is made first in a process lies otherwise in memory: one without was made before ours, and one behind."""
    ms = {k: 1e3 * of(v) for k, v in spent.items()}
    return {"ours": ms["ours"], "without": (ms["before"] + ms["behind"]) / 2, "eager": ms["eager"]}


def measured(case: FlipCase, every: Sequence[int]) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    model, found = case.model().eval(), list[dict[str, Any]]()
    with (torch.no_grad(), hotfuse.jit(model, settings=UNSPECIALIZED) as before_it, hotfuse.jit(model) as fast,
          hotfuse.jit(model, settings=UNSPECIALIZED) as behind_it):  # fmt: skip
        good = flipping(FlipCase(case.row, case.model, case.good, case.good), 1)
        runs = {"before": before_it, "ours": fast, "behind": behind_it, "eager": model}
        for served in (before_it, fast, behind_it):
            sizes_open(case, served)
        learn(before_it, good, lambda: compiled(before_it))
        took = learn(fast, good, lambda: deployed(fast, case.row))
        learn(behind_it, good, lambda: compiled(behind_it))
        mixed, until = flipping(case, 3), time.perf_counter() + SETTLE_S
        while time.perf_counter() < until:
            given = next(mixed)
            for served in (before_it, fast, behind_it):
                served(*given)
        fast.wait(10)
        streams = [("what it is for", good), *((f"flips every {n}", flipping(case, n)) for n in every)]
        for label, stream in streams:
            begins = deployed(fast, case.row)
            mean, middle, calls, wrong = in_turns(runs, stream)
            assert not any(deployed(served, case.row) for served in (before_it, behind_it)), "all sides bet: nothing is compared"
            found.append({
                "strategy": case.row, "traffic": label, "after s": round(took, 1),
                "deployed": f"{begins}, {deployed(fast, case.row)}", "calls": calls, "wrong": wrong,
                **{k: round(v, 3) for k, v in mean.items()}, "over without": round(mean["without"] / mean["ours"], 3),
                "by medians": round(middle["without"] / middle["ours"], 3), "over eager": round(mean["eager"] / mean["ours"], 2),
            })  # fmt: skip
    return found


def rows(quick: bool, contenders: Sequence[str] = ()) -> list[dict[str, Any]]:
    """One line a strategy and kind of traffic."""
    every = (1, 10) if quick else (1, 10, 1000)
    return [line for case in CASES if not contenders or case.row in contenders for line in measured(case, every)]
