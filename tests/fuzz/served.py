"""Random models that are served over time: typed programs, called with sizes, values and strides that change.

The other generators make groups of float32; here are integers, booleans, halves and doubles beside each other, in-place
writes, numbers that are none, and whole calls: what a guard lets through, what a plan for one size does with another, what is
bet on values. `python -m tests.fuzz.served` calls models of a new seed and prints what was wrong.
"""

from __future__ import annotations

import argparse
import random
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hotfuse
from hotfuse.analysis.closeness import relative_error, same_specials
from hotfuse.base.settings import Settings
from tests.fuzz.typed_programs import Served, served_program
from tests.races import kernels_win, new_plans_win

LIMITS = {torch.float64: 1e-9, torch.float32: 3e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Errors over the largest number of a result, by the coarsest type that the program computes in."""
SETTINGS = Settings(capture="inline", hot_calls=2, watch_rate=4, idle=False, record=False)


class OfSteps(nn.Module):
    """The same as a module."""

    def __init__(self, program: Served) -> None:
        super().__init__()
        self.program = program

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return self.program(*inputs)


def differing(got: Sequence[Tensor], want: Sequence[Tensor], coarsest: torch.dtype) -> str:
    """What is wrong of results, in words; empty where nothing is."""
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        if a.dtype is not b.dtype or a.shape != b.shape:
            return f"output {i} is {a.dtype}{list(a.shape)} instead of {b.dtype}{list(b.shape)}"
        if not b.dtype.is_floating_point:
            if not torch.equal(a, b):
                at = tuple((a != b).nonzero()[0].tolist())
                return f"output {i} at {at}: {a[at].item()} instead of {b[at].item()}; {int((a != b).sum())} of {a.numel()}"
            continue
        if not same_specials(a, b):
            nans, infinities = (int((f(a) != f(b)).sum()) for f in (torch.isnan, torch.isinf))
            return f"output {i}: {nans} nans and {infinities} infinities differ"
        kept = torch.isfinite(b)
        if kept.any() and (error := relative_error(a[kept].double(), b[kept].double())) > LIMITS[coarsest]:
            return f"output {i}: off by {error:.2e} of its largest number"
    return ""


@dataclass
class Outcome:
    """What calls of a program gave."""

    wrong: str
    tiers: dict[str, int]
    calls: int


def _answer(serves: Callable[..., Any], inputs: Sequence[Tensor]) -> Sequence[Tensor] | str:
    """What a call gives, or what it raises."""
    try:
        return serves(*inputs)
    except (RuntimeError, IndexError, ValueError) as e:
        return type(e).__name__


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) if a.is_floating_point() else torch.equal(a, b)


def serve(seed: int, calls: int, seconds: float = 60.0, settings: Settings = SETTINGS) -> Outcome:
    """Call a program under the compiler with sizes, values and strides that change, and compare each answer with its own."""
    program, maker = served_program(seed)
    rounds, r, until = 0, random.Random(seed), time.monotonic() + seconds
    with torch.no_grad(), hotfuse.jit(OfSteps(program).eval(), settings=settings) as fast:
        for n in range(calls):
            phase = n // max(1, calls // 6)
            sizes = maker.sizes[0] if phase in (0, 3) or r.random() < 0.5 else r.choice(maker.sizes)
            inputs = maker.inputs(sizes, seed * 1000 + n, r.choice([0, 0, 0, 1, 2]))
            kept = [t.clone() for t in inputs]
            want, got = _answer(program, inputs), _answer(fast, inputs)
            rounds += 1
            if isinstance(want, str) or isinstance(got, str):
                wrong = "" if want == got else f"{got} instead of {want}"[:300]
            else:
                wrong = differing(got, want, program.coarsest)
            wrong = wrong or ("" if all(map(_same, inputs, kept)) else "an input was written to")
            if wrong:
                return Outcome(
                    f"call {n} of sizes {sizes}: {wrong}\n{program}\n{fast.stats()['calls_per_tier']}", {}, rounds
                )
            if n % 4 == 3:
                fast.wait(30)
            if time.monotonic() > until:
                break
        return Outcome("", dict(fast.stats()["calls_per_tier"]), rounds)


def main(argv: list[str] | None = None) -> int:
    """Serve random programs and print what is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.served", description="Random models, served over time.")
    parser.add_argument("--programs", type=int, default=30)
    parser.add_argument("--calls", type=int, default=120)
    parser.add_argument("--seconds", type=float, default=20.0, help="that one program may take (default: 20)")
    parser.add_argument("--seed", type=int, default=None, help="the first seed (default: a new one)")
    given = parser.parse_args(argv)
    first = secrets.randbelow(1 << 20) if given.seed is None else given.seed
    print(f"seed {first}", flush=True)
    wrong, total, tiers = 0, 0, dict[str, int]()
    with pytest.MonkeyPatch.context() as patch:
        new_plans_win(patch, 0.002)
        kernels_win(patch)
        for seed in range(first, first + given.programs):
            found = serve(seed, given.calls, given.seconds)
            wrong, total = wrong + bool(found.wrong), total + found.calls
            for tier, n in found.tiers.items():
                tiers[tier] = tiers.get(tier, 0) + n
            if found.wrong:
                print(f"seed {seed}: {found.wrong}", flush=True)
            if (seed - first) % 10 == 9:
                print(f"{seed - first + 1} programs, {total} calls, by tier {tiers}: {wrong} wrong", flush=True)
    print(f"{given.programs} programs, {total} calls, by tier {tiers}: {wrong} wrong", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
