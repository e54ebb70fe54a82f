"""The whole-model benchmark's bookkeeping: who is compared, who is left out and why, and what counts as best."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import models
from benchmarks.peers import PEERS, Absent, first_line


def test_who_answers_something_else_is_not_timed() -> None:
    calls = {name: (lambda: [np.ones(3, np.float32)]) for name in (models.OURS, models.TIER0, "ort")}
    calls["openvino"] = lambda: [np.full(3, 1.01, np.float32)]
    calls["eager"] = lambda: [np.ones((3, 1), np.float32)]
    row = models.Row("m", 1, {"x": [3]})
    models.time_agreeing(row, calls, "ort", rounds=2)
    assert set(row.timings) == {models.OURS, models.TIER0, "ort"} == set(row.ratios)
    assert "differ from ort's" in row.absent["openvino"] and row.errors["eager"] == float("inf")
    assert row.best is not None and row.best[0] == "ort"
    text = "\n".join(row.lines())
    assert "x the best (ort)" in text and "openvino absent" in text


def test_without_hotfuse_nothing_is_timed() -> None:
    row = models.Row("m", 1, absent={models.OURS: "no"})
    models.time_agreeing(row, {"ort": lambda: [np.ones(1)]}, "ort", rounds=1)
    assert not row.timings and row.best is None and "nothing to compare with" in row.lines()[0]


@pytest.mark.parametrize(
    ("got", "error"), [([1.0, 2.0], 0.0), ([1.0, 2.2], 0.1), ([1.0, float("nan")], float("inf")), ([1.0], float("inf"))]
)
def test_differences(got: list[float], error: float) -> None:
    assert models.difference([np.array(got)], [np.array([1.0, 2.0])]) == pytest.approx(error)


def test_summary_takes_the_best_peer_of_each_model() -> None:
    rows = [
        models.Row("a", 1, ratios={models.OURS: 1.0, models.TIER0: 0.5, "ort": 2.0, "eager": 4.0}),
        models.Row("b", 1, ratios={models.OURS: 1.0, "ort": 0.5}),
        models.Row("c", 1, absent={models.OURS: "crashed"}),
    ]
    (line,) = models.summary(rows)
    assert "geomean 1.000x" in line and "2 of 3 models" in line and "worst 0.50x (b)" in line


def test_what_served_is_read_off_the_explanation() -> None:
    part = {"backend": "llvm", "nodes": 4}
    plan = {"tier": 1, "calls": 9, "nodes": 7, "notes": [], "partitions": [part, {"backend": "library", "nodes": 3}]}
    found = models.served({"sites": [{"plans": [plan]}], "decisions": []})
    assert (found["native"], found["library"], found["library_nodes"]) == (1, 1, 3) and "tier 1" in models.told(found)
    with pytest.raises(Absent, match="no captured graph: too odd"):
        models.served({"sites": [], "decisions": [{"action": "refuse", "why": "too odd", "evidence": {}}]})


def test_a_peer_that_has_nothing_to_run_says_so() -> None:
    from pathlib import Path

    from benchmarks.zoo import ZooModel

    model = ZooModel("m", "onnx", 3, lambda _s, _v: {}, path=Path("m.onnx"))
    for name in ("eager", "inductor"):
        with pytest.raises(Absent, match="no torch code"):
            PEERS[name](model, {}, 1)
    assert first_line(ValueError("one\ntwo")) == "ValueError: one"
