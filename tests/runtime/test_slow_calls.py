"""Calls that take long are not run beside calls to learn what is known already."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

import hotfuse
from hotfuse import Settings
from hotfuse.runtime.serve.packing import MOSTLY_LIVE
from hotfuse.runtime.tierup.attempt_runner import as_served, recipe_verdict
from hotfuse.runtime.tierup.judge import LONG_S, screen
from hotfuse.runtime.tierup.objective import Trade
from hotfuse.runtime.tierup.padding import SLOW_S, paying_share
from hotfuse.runtime.tierup.proof import prove
from hotfuse.runtime.tierup.race import Trial
from tests.padded import PaddedEncoder, batch
from tests.races import new_plans_win


@pytest.mark.parametrize("takes", [SLOW_S, 0.0])
def test_the_share_up_to_which_packing_pays_is_measured_on_quick_calls_only(
    monkeypatch: pytest.MonkeyPatch, takes: float
) -> None:  # fmt: skip
    new_plans_win(monkeypatch)
    with torch.no_grad():
        fast: Any = hotfuse.jit(PaddedEncoder().eval(), settings=Settings(capture="inline", hot_calls=2))
        for _ in range(40):
            fast(*batch(3, 16, 0.4))
    entry = next(iter(fast._engine.sites.values())).entries[0]
    packer, ran = entry.plan.run.packer, {"packed": 0, "padded": 0}

    def run(what: str) -> Any:
        def one(*_inputs: Any) -> tuple[()]:
            ran[what] += 1
            time.sleep(takes)
            return ()

        return one

    share = paying_share(packer, run("packed"), run("padded"), batch(3, 16, 0.4))
    if takes:
        assert ran == {"packed": 1, "padded": 0} and share == MOSTLY_LIVE
    else:
        assert ran["packed"] > 2 and ran["padded"] > 1
    fast.close()


def test_a_proof_tells_what_its_first_call_took() -> None:
    proof = prove(lambda x: (x,), lambda x: (x,), [[torch.ones(2)], [torch.ones(2)]], 1e-3, lambda noise=0: lambda x: (x,))
    assert len(proof.first) == 1 and len(proof.rounds) == 1


def test_a_glance_at_long_calls_runs_nothing() -> None:
    ran: list[int] = []

    def plan(*_inputs: Any) -> None:
        ran.append(1)

    assert screen(plan, plan, [], [(2 * LONG_S, LONG_S / 2)]) == (2 * LONG_S, LONG_S / 2) and not ran
    screen(plan, plan, [], [(LONG_S / 2, LONG_S / 4)])
    assert len(ran) == 4


def test_a_proof_speaks_of_what_serves_by_the_race_that_it_won() -> None:
    trade = Trade((3000.0, 1000.0), (0.0, 0.0), "estimated", (0, 0))
    assert as_served([(0.9, 0.2)], trade) == [(pytest.approx(0.3), 0.2)]
    assert as_served([(0.9, 0.2)], None) == []


@pytest.mark.parametrize(
    ("won", "decided", "first_us", "verdict"),
    [
        (True, True, None, True),
        (False, True, None, False),
        (False, False, None, None),  # it looked twice as fast, and nothing was decided
        (False, True, 30.0, True),  # a part of it serves, which won against a baseline of 30 us
        (False, True, 10.0, False),
        (False, False, 30.0, None),
    ],
)
def test_a_race_that_decided_nothing_leaves_no_verdict(
    won: bool, decided: bool, first_us: float | None, verdict: bool | None
) -> None:
    assert recipe_verdict(Trial(20.0, 10.0, 5, won=won, decided=decided), first_us) is verdict
