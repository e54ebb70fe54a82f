"""The whole-model benchmark's bookkeeping: who is compared, who is left out and why, and what counts as best."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from benchmarks import frozen, model_rows, models, quiet
from benchmarks.peers import PEERS, Absent, Call, first_line


def test_who_answers_something_else_is_not_timed() -> None:
    calls: dict[str, Call] = {name: (lambda: [np.ones(3, np.float32)]) for name in (models.OURS, models.TIER0, "ort")}
    calls["openvino"] = lambda: [np.full(3, 1.01, np.float32)]
    calls["eager"] = lambda: [np.ones((3, 1), np.float32)]
    row = models.Row("m", 1, {"x": [3]})
    models.time_agreeing(row, calls, "ort", rounds=2)
    assert set(row.timings) == {models.OURS, models.TIER0, "ort"} == set(row.ratios)
    assert "differ from ort's" in row.absent["openvino"] and row.errors["eager"] == float("inf")
    assert row.best is not None and row.best[0] == "ort"
    text = "\n".join(row.lines())
    assert "x the best (ort)" in text and "openvino absent" in text


def test_who_is_in_another_process_is_compared_and_timed_too() -> None:
    asked: list[tuple[float, float]] = []

    def seconds(warm_s: float, turn_s: float) -> float:
        asked.append((warm_s, turn_s))
        return 5.0

    calls: dict[str, Call] = {models.OURS: lambda: [np.ones(3, np.float32)], "eager": lambda: [np.ones(3, np.float32)]}
    row = models.Row("m", 1)
    others = {"inductor": ([np.ones(3)], seconds), "wrong": ([np.zeros(3)], seconds)}
    models.time_agreeing(row, calls, "eager", 3, others)
    assert row.timings["inductor"]["median_ms"] == 5000 and len(asked) == 3 and row.ratios["inductor"] > 1
    assert "differ from eager's" in row.absent["wrong"] and "wrong" not in row.timings


def test_nobody_is_told_of_a_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer's telemetry forks this process for every message, into everybody's turns."""
    here = ModuleType("openvino")
    monkeypatch.setitem(sys.modules, "openvino", here)
    monkeypatch.setitem(sys.modules, "openvino_telemetry", ModuleType("openvino_telemetry"))
    assert quiet.openvino() is here
    with pytest.raises(ImportError):
        importlib.import_module("openvino_telemetry")


def test_rows_are_kept_under_what_they_were_measured_with(tmp_path: Path) -> None:
    row = models.Row("m", 2, timings={models.OURS: {"median_ms": 2.0}}, ratios={models.OURS: 1.0, "ort": 1.5})
    model_rows.keep(tmp_path, row, "now")
    assert model_rows.kept(tmp_path, "m", 2, "now") == row == model_rows.kept(tmp_path, "m", 2)
    assert (
        model_rows.kept(tmp_path, "m", 2, "other sources") is None and model_rows.kept(tmp_path, "m", 1, "now") is None
    )
    (found,) = model_rows.all_kept(tmp_path, ["m", "n"], [1, 2])
    assert any("| m | 2 | 2 | 1.50 | 1.50 (ort) |" in line for line in model_rows.table([found]))
    machine = {"identity": {"arch": "x"}}
    assert model_rows.measured_with(machine, rounds=1) != model_rows.measured_with(machine, rounds=2)


def test_a_row_that_was_measured_is_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[str] = []

    def measure(name: str, threads: int, _arguments: list[str]) -> models.Row:
        measured.append(f"{name} {threads}")
        return models.Row(name, threads, absent={models.OURS: "fake"})

    monkeypatch.setattr(models, "in_a_process", measure)
    run = ["models", "--models", "magika,bert-base", "--results", str(tmp_path), "--threads", "1"]
    for arguments in (run, run, [*run, "2"], [*run, "--again"]):
        monkeypatch.setattr("sys.argv", arguments)
        assert models.main() == 0
    once = ["magika 1", "bert-base 1"]
    assert measured == [*once, "magika 2", "bert-base 2", *once]


def test_a_model_without_torch_code_is_no_work_for_inductor() -> None:
    with pytest.raises(Absent, match="no torch code|not|network"):
        frozen.Frozen("magika", 1, reduced=True, limit_s=120)


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
    assert (found["native"], found["library"], found["library_nodes"]) == (1, 1, 3) and "tier 1" in model_rows.told(
        found
    )
    with pytest.raises(Absent, match="no captured graph: too odd"):
        models.served({"sites": [], "decisions": [{"action": "refuse", "why": "too odd", "evidence": {}}]})


def test_a_peer_that_has_nothing_to_run_says_so() -> None:
    from benchmarks.zoo import ZooModel

    model = ZooModel("m", "onnx", 3, lambda _s, _v: {}, path=Path("m.onnx"))
    with pytest.raises(Absent, match="no torch code"):
        PEERS["eager"](model, {}, 1)
    assert first_line(ValueError("one\ntwo")) == "ValueError: one"
