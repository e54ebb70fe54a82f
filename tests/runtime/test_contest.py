"""Contests between kernels: a candidate has to win whenever it is looked at."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from hotfuse.compile.host import host_core
from hotfuse.compile.learn import measure
from hotfuse.compile.learn.measure import BoundCall
from hotfuse.compile.unit import measuring_gate
from hotfuse.compile.unit.measuring_gate import UnitContests
from hotfuse.ir.text import parse
from hotfuse.native.target import host

SIDE = (parse("graph g(%x: f32[4]) {\n  %y: f32[4] = aten.relu.default(%x)\n  return %y\n}"), True)
"""What the library does: nothing is compiled for it."""
Looks = Iterator[tuple[float, float]]


def held(looks: Looks, monkeypatch: pytest.MonkeyPatch) -> tuple[str, float]:
    """A contest in which each look adds a turn of so many microseconds to what there is, and to the candidate."""

    def timed(batch: Sequence[BoundCall], _passes: int, _until: float) -> None:
        for b, micro in zip(batch, next(looks), strict=True):
            b.times.append(micro * 1e-6)

    monkeypatch.setattr(measure, "timed", timed)

    def build(_: object) -> None:
        raise AssertionError("nothing is to be built")

    return UnitContests(build, host_core(host()), {})([SIDE], [SIDE])  # pyright: ignore[reportArgumentType]


def test_a_candidate_that_wins_once_by_luck_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter([(30.0, 24.0), (20.0, 25.0)])  # what there is had no fast moment in the first look
    objection, saved = held(looks, monkeypatch)
    assert objection == "measured 24.0 us, what there is 20.0" and saved == pytest.approx(-4e-6)
    assert next(looks, None) is None


def test_a_candidate_that_wins_again_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter([(30.0, 24.0), *[(31.0, 23.0)] * (measuring_gate.WINS_IN_A_ROW - 1)])
    objection, saved = held(looks, monkeypatch)
    assert not objection and saved == pytest.approx(7e-6)
    assert next(looks, None) is None


def test_one_that_loses_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter([(20.0, 19.9), (20.0, 1.0)])  # better by less than counts
    objection, _ = held(looks, monkeypatch)
    assert objection and next(looks) == (20.0, 1.0)
