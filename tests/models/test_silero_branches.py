"""A real model whose branch flips with its input: silero-vad takes another way at 8 kHz than at 16.

Races are run for real; only the verdict is given, so that what is deployed does not depend on how busy the machine is.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import hotfuse
from hotfuse import Settings
from tests.models.test_zoo_onnx import agree, load, reference
from tests.races import SLOWER_S, raced, samples_cost_nothing

pytestmark = pytest.mark.zoo

SIZES = {16000: 576, 8000: 288}


def bets_of(session: Any) -> dict[bool, tuple[Any, Any]]:
    """Straight-line code by the outcome it is for, with the captured graph it belongs to."""
    entries = [e for s in session._engine.sites.values() for e in s.entries]
    return {outcome: (e, bet) for e in entries for bet in e.bets.values() for outcome in bet.hot}


def straight(plan: Any) -> bool:
    """No branch is left, or only one that is bet on in turn."""
    return plan.bet is not None or not any(n.op.startswith("control.") for n in plan.graph.nodes)


def test_the_branch_of_silero_flips_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    races = raced(monkeypatch, lambda: (SLOWER_S, 0.0))
    samples_cost_nothing(monkeypatch)
    model = load("silero-vad")
    peer, rng = reference(model), np.random.default_rng(0)
    settings = Settings(capture="inline", hot_calls=2, watch_rate=2, race_s=0.02)
    with hotfuse.InferenceSession(model.path, settings=settings) as session:

        def serve(rate: int) -> None:
            """Calls until what they showed has been analyzed and acted upon; every answer is ONNX Runtime's."""
            for _ in range(3):
                for n in range(60):
                    feeds = {"input": rng.standard_normal((1, SIZES[rate])).astype(np.float32) / 10,
                             "state": rng.standard_normal((2, 1, 128)).astype(np.float32) / 10, "sr": np.array(rate)}  # fmt: skip
                    agree(session.run(None, feeds), peer.run(None, feeds), f"{rate} Hz, call {n}")
                assert session._engine.call_sampler._shared.analyzer.flush(120)

        def outcomes() -> list[dict[int, float]]:
            entries = [e for s in session._engine.sites.values() for e in s.entries]
            seen = [session._engine.call_sampler.seen(e.key) for e in entries]
            return [dict(c.outcomes) for s in seen if s is not None for c in s.controls if not c.loop and c.item == 0]

        serve(16000)
        assert outcomes() == [{1: 1.0}], "every call took one side"
        entry, bet = bets_of(session)[True]
        assert straight(bet.hot[True]) and entry.plan.tier == 2
        outside = len(entry.baseline.graph.nodes)
        assert len(bet.hot[True].graph.nodes) > outside, "what was behind the branch and what comes after it are one graph"
        assert bet.outcomes.hits > 0 and bet.outcomes.misses == 0
        misses = session.stats()["guard_misses"]
        serve(8000)  # right from the first call, which `serve` asks
        assert session.stats()["guard_misses"] > misses, "the first call fitted no plan that there was"
        assert set(bets_of(session)) == {True, False} and {1: 1.0} in outcomes() and {0: 1.0} in outcomes()
        before, hits = session.stats(), bet.outcomes.hits
        serve(16000)  # back again: everything is there
        after = session.stats()
        for count in ("captures", "swaps", "guard_misses"):
            assert after[count] == before[count], count
        assert after["events"]["specialize.recurs"] == before["events"]["specialize.recurs"]
        assert bet.outcomes.hits - hits == 180 and bet.outcomes.misses == 0
    assert races and all(r.found.rounds > 0 and r.found.old_us > r.found.new_us > 0 for r in races)
