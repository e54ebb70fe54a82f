"""What a first plan of kernels waits for, and what waits for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from hotfuse.compile.value import CompileProgress
from hotfuse.runtime.tierup import tier1
from hotfuse.runtime.tierup.attempt import Attempt, AttemptContext
from hotfuse.runtime.tierup.improve import Improver
from hotfuse.specialize.table import PART_OF_TIER1, TIER1


def parts_tried(monkeypatch: pytest.MonkeyPatch, steps: Sequence[tuple[float, tuple[float, float]]]) -> list[Attempt]:
    """Unfinished plans that are tried when so much of the saving was decided, and of the work done, at such times."""
    tried, now = list[Attempt](), [0.0]
    monkeypatch.setattr(tier1, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(tier1, "demand_of", lambda context, entry: None)

    def improve(*_: Any, progress: Callable[[Any, CompileProgress], None], demand: Any) -> str:
        for at, decided in steps:
            now[0] = at
            progress(lambda: "a part", CompileProgress(*decided))
        return "the whole"

    samples = SimpleNamespace(inputs=lambda: [torch.zeros(1)], several=lambda n: [[torch.zeros(1)]])
    entry: Any = SimpleNamespace(samples=samples, baseline=SimpleNamespace(graph=None), weights={}, plan=None)
    over = list[str]()

    def at_once(attempt: Attempt) -> Callable[[], None]:
        tried.append(attempt)
        return lambda: over.append("the part")

    attempt = tier1.fused(cast(AttemptContext, SimpleNamespace(improve=improve, vet=lambda _: None)), entry, at_once)
    assert attempt is not None and attempt.make() == "the whole"
    assert len(over) == len(tried), "a part is over before the whole is measured"
    return tried


def test_an_unfinished_plan_is_tried_where_the_rest_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = parts_tried(monkeypatch, [(5.0, (0.2, 0.2)), (30.0, (0.55, 0.55)), (40.0, (0.7, 0.7))])
    assert [(a.key, a.about) for a in tried] == [(PART_OF_TIER1, {"decided": 0.55})]


def test_it_is_not_where_the_whole_comes_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever proves and races a part takes time from the worker, for what is there for a moment."""
    assert parts_tried(monkeypatch, [(4.0, (0.5, 0.3)), (7.0, (0.5, 0.5)), (11.0, (0.6, 0.6)), (20.0, (0.9, 0.9))]) == []


def test_what_calls_use_is_tried_before_what_they_do_not_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nearly all of the saving is decided, and most of the work, for a branch that nobody takes, is still ahead."""
    tried = parts_tried(monkeypatch, [(4.0, (0.96, 0.1)), (6.0, (0.97, 0.5)), (12.0, (0.99, 0.6))])
    assert [a.about for a in tried] == [{"decided": 0.97}]
    assert parts_tried(monkeypatch, [(6.0, (0.6, 0.5)), (9.0, (0.96, 0.9))]) == [], "the whole comes soon"


@pytest.mark.parametrize(
    ("trying", "refused", "serving", "awaited"),
    [(TIER1, (), "tier 0", True), (TIER1, (), "a part", True), (None, (), "tier 0", True),
     (None, (TIER1,), "tier 0", False), (None, (), "tier 1", False)],
)  # fmt: skip
def test_a_first_plan_is_awaited_until_it_serves_or_is_refused(trying: Any, refused: Any, serving: str, awaited: bool) -> None:
    entry: Any = SimpleNamespace(trying=trying, refused=refused, plan=serving, baseline="tier 0")
    assert Improver.first_plan_awaited(cast(Improver, None), entry) is awaited

