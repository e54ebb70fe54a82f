# pyright: reportPrivateUsage=false
"""What a call of a fully native plan costs beyond its kernels: guard, dispatch, results, entry.

    python -m benchmarks.dispatch [--models a,b] [--rounds N] [--json]

Contenders take turns: the whole call `fast(x...)`, the plan alone (`plan.run`), and the kernels alone, entered back to back in one
native loop on memory of their own. What is left of the first without the last is what Hotfuse costs; the bar is 5 us. What is
left of the first without the second is finding the plan and putting the result together (`dispatch_us`, of 10 inputs; the bar is
2 us).
The last line of output is one JSON document with `--json`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import nn

import hotfuse
from benchmarks.repeated_run import Repeated
from benchmarks.timing import summarize
from hotfuse.base.settings import Settings
from hotfuse.runtime.plan import Plan

LIMIT_US = 5.0
INNER = 50


class Sums(nn.Module):
    """Many inputs, next to no work."""

    def __init__(self, count: int, width: int = 64) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.count = count

    def forward(self, *xs: torch.Tensor) -> torch.Tensor:
        total = xs[0]
        for x in xs[1:]:
            total = total + x
        return torch.relu(self.layer(total))


class Step(nn.Module):
    """One step of an LSTM."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width)

    def forward(self, x: torch.Tensor, h: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y, (h1, c1) = self.lstm(x, (h, c))
        return y, h1, c1


def cases() -> dict[str, tuple[nn.Module, list[torch.Tensor]]]:
    """Models with their inputs."""
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    return {
        "mlp-64": (mlp, [torch.randn(1, 64)]),
        **{f"{n} inputs": (Sums(n), [torch.randn(1, 64) for _ in range(n)]) for n in (1, 2, 10)},
        "lstm-step-128": (Step(), [torch.randn(1, 1, 128), torch.randn(1, 1, 128), torch.randn(1, 1, 128)]),
    }


@dataclass(frozen=True, slots=True)
class Row:
    """One model, in microseconds."""

    model: str
    call_us: float
    plan_us: float
    kernels_us: float
    beyond_us: float
    eager_us: float
    runs: int


def serving(fast: hotfuse.Jit) -> Plan:
    """The plan that calls run in now."""
    return next(e.plan for s in fast._engine.sites.values() for e in s.entries)


def measured(name: str, model: nn.Module, inputs: Sequence[torch.Tensor], rounds: int) -> Row | str:
    """One row, or why there is none."""
    fast = hotfuse.jit(model.eval(), settings=Settings().with_(hot_calls=2, tiers=1))
    for _ in range(5):
        fast(*inputs)
        fast.wait(120)
    for _ in range(300):
        fast(*inputs)
    fast.wait(120)
    plan = serving(fast)
    if len(plan.runs) != 1 or len(plan.units) != 1:
        return f"{name}: not one native run: tier {plan.tier}, {[a.backend for a in plan.artifacts]}"
    order = {v.name: t for v, t in zip(plan.graph.inputs, inputs, strict=True)}
    alone = Repeated(plan.runs[0], [order[i.name] for i in plan.runs[0].code.inputs])
    run = plan.run
    contenders: dict[str, Callable[[], float]] = {
        "call": lambda: looped(lambda: fast(*inputs)),
        "plan": lambda: looped(lambda: run(*inputs)),
        "kernels": lambda: alone.ns(INNER) / 1e3,
        "eager": lambda: looped(lambda: model(*inputs)),
        "empty": lambda: looped(lambda: None),
    }
    times: dict[str, list[float]] = {n: [] for n in contenders}
    for i in range(rounds):
        for n in contenders if i % 2 == 0 else reversed(contenders):
            times[n].append(contenders[n]())
    us = {n: summarize(t).median for n, t in times.items()}
    call, ours, eager = (us[n] - us["empty"] for n in ("call", "plan", "eager"))
    fast.close()
    return Row(name, round(call, 2), round(ours, 2), round(us["kernels"], 2), round(call - us["kernels"], 2), round(eager, 2),
               len(plan.artifacts))  # fmt: skip


def looped(call: Callable[[], object]) -> float:
    """Microseconds of one call, as the mean over a short burst."""
    begin = time.perf_counter()
    for _ in range(INNER):
        call()
    return (time.perf_counter() - begin) / INNER * 1e6


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(cases()))
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[Row] = []
    with torch.no_grad():
        print(f"{'model':16} {'call':>8} {'plan':>8} {'kernels':>8} {'beyond':>8} {'eager':>8}   us")
        for name, (model, inputs) in ((n, cases()[n]) for n in args.models.split(",")):
            row = measured(name, model, inputs, args.rounds)
            if isinstance(row, str):
                print(row)
                continue
            rows.append(row)
            numbers = (row.call_us, row.plan_us, row.kernels_us, row.beyond_us, row.eager_us)
            print(f"{row.model:16} " + " ".join(f"{us:8.2f}" for us in numbers))
    if args.json:
        worst = max((r.beyond_us for r in rows), default=None)
        ten = next((round(r.call_us - r.plan_us, 3) for r in rows if r.model == "10 inputs"), None)
        print(json.dumps({"rows": [asdict(r) for r in rows], "worst_beyond_us": worst, "limit_us": LIMIT_US, "dispatch_us": ten}))


if __name__ == "__main__":
    main()
