"""Labels of benchmarks: one that was disturbed throughout is found by the other one, and replaced by a label that agrees."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import labels
from hotfuse.ir.text import parse


def times(*seconds: float) -> labels.Times:
    return np.array([(s, 0.01) for s in seconds]).reshape(-1, 2)


def test_labels_that_agree_and_calls_that_did_not_run_are_left_alone() -> None:
    assert labels.apart([times(1.0, 0.0, 5.0), times(1.09, 0.0, 4.7)]) == []
    assert labels.apart([times(1.0, 2.0), times(1.0, 0.9)]) == [1]
    assert labels.apart([times(), times()]) == []


@pytest.mark.parametrize(("first", "second", "new", "left"), [
    (2.3, 1.0, 1.01, (1.01, 1.0)),  # the first was disturbed
    (1.0, 2.3, 1.01, (1.0, 1.01)),  # the second was
    (1.0, 2.0, 4.0, (1.0, 2.0)),    # the new one was, most of all
    (1.0, 2.0, 0.0, (1.0, 2.0)),    # it did not run this time
])  # fmt: skip
def test_the_two_that_agree_best_count(first: float, second: float, new: float, left: tuple[float, float]) -> None:
    found = [times(first, 7.0), times(second, 7.1)]
    labels.agreed(found, {0: (new, 0.02)})
    assert (found[0][0, 0], found[1][0, 0]) == left
    assert found[0][1, 0] == 7.0 and found[1][1, 0] == 7.1


def test_disturbed_labels_are_measured_again_until_two_agree(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[tuple[str, list[int]]] = []
    said: dict[str, dict[int, tuple[float, float]]] = {
        "times-0": {0: (1.0, 0.0), 1: (1.0, 0.0)}, "times-1": {0: (1.0, 0.0), 1: (2.0, 0.0)},
        "again-0": {1: (1.4, 0.0)}, "again-1": {1: (1.02, 0.0)},
    }  # fmt: skip

    def other(_path: Path, name: str, _until: float, _passes: int, only: Any = ()) -> dict[int, tuple[float, float]]:
        asked.append((name, list(only)))
        return said[name]

    monkeypatch.setattr(labels, "_by_another", other)
    first, second = labels.labelled(tmp_path / "kernels.bin", 2, 0.0)
    assert [name for name, _ in asked] == ["times-0", "times-1", "again-0", "again-1"]
    assert asked[2][1] == asked[3][1] == [1]
    assert first[:, 0].tolist() == [1.0, 1.0] and second[:, 0].tolist() == [1.0, 1.02]


def test_all_ways_of_a_problem_take_turns_in_one_batch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine that becomes slower between two batches would turn the order of ways that it lies between."""

    class Bound:
        bytes = 100

        def call(self) -> None:
            """It runs."""

        def figure(self) -> tuple[float, float]:
            return 1.0, 0.0

    monkeypatch.setattr(labels, "BATCH_BYTES", 150)
    monkeypatch.setattr(labels.measure, "bind", lambda *_a: Bound())
    monkeypatch.setattr(labels.measure, "timed", lambda *_a: None)
    graph = parse("graph main(%x: f32[4]) {\n  %y: f32[4] = aten.relu.default(%x)\n  return %y\n}")
    path, out = tmp_path / "kernels.bin", tmp_path / "times-0.jsonl"
    labels.compiled([labels.Work(problem, graph, ({},), None) for problem in "aabbbc"], path)
    assert labels.label(path, out, float("inf"), 1)
    batches = [[row[0] for row in json.loads(line)] for line in out.read_text().splitlines()]
    assert batches == [[0, 1], [2, 3, 4], [5]]
