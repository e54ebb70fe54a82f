"""A group whose kernel won its trial keeps it, also where timing at other sizes says that the library always wins."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from hotfuse.compile.alternatives import LIBRARY, Question, Range
from hotfuse.compile.crossing import Crossing
from hotfuse.fusion.crossover import Crossovers, Interval, Way
from tests.contract.crossings import forgets, question

__all__ = ["forgets"]


@pytest.mark.usefixtures("forgets")
def test_a_choice_between_kernels_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def predicted(_self: Crossing, _question: Question, ways: Sequence[Way], _within: Range) -> Crossovers:
        return Crossovers("s0", (Interval(0, None, [w.name for w in ways].index(LIBRARY)),))

    monkeypatch.setattr(Crossing, "_predicted", predicted)
    found = question(lambda way, _n: 1e-6 if way.name == LIBRARY else 1e-3).found()
    assert found.ways is None and not found.made
    assert any("one kernel for all sizes" in n for n in found.notes)
