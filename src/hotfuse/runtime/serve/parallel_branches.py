"""Independent calls of a plan's native runs go side by side where that was measured to be faster than one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from hotfuse.runtime.plan import Plan
from hotfuse.runtime.tierup.race import race


def measured(plan: Plan, sample: Sequence[torch.Tensor], seconds: float) -> Plan:
    """The plan, not serving yet, with its switches set to the faster of both on a real call; its notes say what was measured."""
    if not plan.switches or torch.get_num_threads() < 2:
        return plan

    def variant(*, on: bool) -> Callable[..., Any]:
        def run(*inputs: torch.Tensor) -> Any:
            set_all(plan, on=on)
            return plan.run(*inputs)

        return run

    trial = race(variant(on=False), variant(on=True), sample, seconds)
    set_all(plan, on=trial.won)
    lanes = [n for r in plan.runs for n in r.code.forks]
    about = f"{sum(lanes)} independent parts in {len(lanes)} {'stretch' if len(lanes) == 1 else 'stretches'}"
    times = f"side by side {trial.new_us:.1f} us, one after the other {trial.old_us:.1f} us, {trial.rounds} rounds"
    return replace(plan, notes=(*plan.notes, f"{about} run {'side by side' if trial.won else 'one after the other'}: {times}"))


def set_all(plan: Plan, *, on: bool) -> None:
    """Have all runs fork, or none."""
    for switch in plan.switches:
        switch.on = on
