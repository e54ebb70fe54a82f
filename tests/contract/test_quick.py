"""What `make test` leaves to `make test-all`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import quick

CASES = [f"tests/a.py::test_x[{i}]" for i in range(10)]
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("seconds", "budget_s", "left"),
    [(0.0, 1.0, 10), (0.1, 1.0, 10), (0.25, 1.0, 4), (2.0, 1.0, 1), (3.0, 9.0, 3), (quick.MAX_S + 1, 1.0, 0),
     (quick.MAX_S + 1, 4.5 * (quick.MAX_S + 1), 4)],
)  # fmt: skip
def test_as_many_cases_as_fit(seconds: float, budget_s: float, left: int) -> None:
    known, budgets = {"tests/a.py::test_x": seconds}, {"tests/a.py::test_x": budget_s}
    found = quick.drawn(CASES, known, budgets)
    assert len(found) == left and found <= set(CASES)
    other = "tests/b.py::test_y"
    assert quick.drawn([other, *reversed(CASES)], known, budgets) == found | {other}, "whatever else runs"


def test_what_takes_long_begins_first_and_the_rest_stays_in_order() -> None:
    known = {"a::long": quick.FIRST_S, "a::longer": 2 * quick.FIRST_S, "a::short": quick.FIRST_S / 2}
    names = ["a::x", "a::short[1]", "a::long[1]", "a::y", "a::longer", "a::long[2]"]
    assert quick.long_ones_first(names, known) == ["a::longer", "a::long[1]", "a::long[2]", "a::x", "a::short[1]", "a::y"]


def test_what_was_measured_is_read_again_and_the_rest_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quick, "COSTS", tmp_path / "costs.txt")
    quick.write({"a::f[1]": 3.0, "a::f[2]@group": 1.0, "a::g": 9.0, "a::cheap": 0.1})
    assert quick.costs() == {"a::f": 2.0, "a::g": 9.0}
    quick.write({"a::g": 0.2})
    assert quick.costs() == {"a::f": 2.0}


def test_costs_are_of_tests_that_there_are() -> None:
    gone = [name for name in quick.costs()
            if not (ROOT / name.partition("::")[0]).exists()
            or f"def {name.rpartition('::')[2]}(" not in (ROOT / name.partition("::")[0]).read_text()]  # fmt: skip
    assert not gone, "take them off tests/costs.txt"
