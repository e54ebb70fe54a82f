"""Random models under the compiler: each call gives what the model gives, whichever plan answers it."""

from __future__ import annotations

import pytest

from tests.fuzz.served import serve
from tests.fuzz.typed_programs import served_program
from tests.races import kernels_win, new_plans_win


@pytest.mark.budget_s(3)
@pytest.mark.parametrize("seed", [1012, 1023, 2001, 2004, 2007])
def test_calls_give_what_the_model_gives(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    new_plans_win(monkeypatch, 0.002)
    kernels_win(monkeypatch)
    found = serve(seed, 24)
    assert not found.wrong, found.wrong
    assert found.tiers["1"] or found.tiers["0"], found.tiers


def test_the_same_seed_makes_the_same_program() -> None:
    assert str(served_program(7)[0]) == str(served_program(7)[0]) != str(served_program(8)[0])
