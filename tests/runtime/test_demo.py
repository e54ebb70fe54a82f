"""The demonstration's parts, with a session that is a fake: figures, plain lines, the live picture, the report."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from benchmarks import table
from benchmarks.show import report
from benchmarks.show.lines import LONG, SHORT, reader, text_lines
from benchmarks.show.run import Baseline, Run, Served
from benchmarks.show.view import Plain, picture
from benchmarks.side.records import PER_REQUEST, Record, finish
from benchmarks.side.stats import Estimate


class Explained:
    def __init__(self, decisions: list[dict[str, Any]]) -> None:
        self._decisions = decisions

    def to_dict(self) -> dict[str, Any]:
        return {"decisions": self._decisions}

    def text(self, full: bool) -> str:
        return "<all of it>" if full else "<the first lines>"


class Session:
    """Deploys once, after some looks."""

    explained = 0

    def stats(self) -> dict[str, Any]:
        return {"events": {"deploy.faster": 1}, "calls_per_tier": {"module": 3, "0": 2, "1": 5, "2": 0}}

    def explain(self) -> Explained:
        self.explained += 1
        why = "it measured faster on a real call"
        return Explained([{"at": 1.5, "action": "deploy", "why": why, "subject": "rec",
                           "evidence": {"tier": 1, "us_before": 9000.0, "us_after": 5000.0}}])

    def get_modelmeta(self) -> Any:
        return type("Meta", (), {"custom_metadata_map": {"character": "a\nb"}})


@pytest.fixture
def run() -> Run:
    made = Run(10.0, [Baseline("ort", {SHORT: 20.0, LONG: 40.0})], 0.5)
    for i in range(100):
        kind = SHORT if i < 50 else LONG
        made.add(Served(i / 10, {SHORT: 0.02, LONG: 0.02}[kind], kind))
    made.look(Session())
    return made


def test_speed_is_held_against_the_lines_that_came(run: Run) -> None:
    assert run.against(run.baselines[0], 0.0, 5.0) == pytest.approx(1.0)
    assert run.against(run.baselines[0], 5.0, 10.0) == pytest.approx(2.0), "long lines take others twice as long"
    assert run.against(run.baselines[0], 20.0, 30.0) is None and run.per_s(0.0, 10.0) == pytest.approx(50.0)
    assert run.tier() == "tier 1: fused kernels, compiled beside the traffic (50% of the calls)"
    assert run.events(5) == ["   1.5 s  swapped in tier 1, 9.0 -> 5.0 ms a call: it measured faster on a real call"]
    assert "1.00x at the beginning, 2.00x in the last quarter" in run.verdict()
    assert Run(1.0, [], 0.5).verdict() == "no line was read" and Run(1.0, [], 0.5).tier() == "starting"


def test_explaining_is_asked_for_only_when_something_happened(run: Run) -> None:
    session = Session()
    run.look(session)
    run.look(session)
    assert session.explained == 0, "the counters are those of the first look"


def test_plain_lines_tell_each_swap_once(run: Run) -> None:
    said: list[str] = []
    view = Plain(said.append)
    assert view.due(run) and not view.due(run)
    view.show(run, "abc", "abd")
    view.show(run, "abc", "abd")
    assert sum("swapped in tier 1" in line for line in said) == 1 and sum("read 'abd'" in line for line in said) == 2


def test_the_live_picture_shows_what_matters(run: Run) -> None:
    console = Console(file=io.StringIO(), width=120)
    run.begun -= 10.0
    console.print(picture(run, "abc", "abd"))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "abd" in text and "tier 1" in text and "swapped in tier 1" in text and "the lines are longer now" in text


def test_the_report_is_one_file(run: Run, tmp_path: Path) -> None:
    page = report.write(tmp_path / "new", run, Session().explain()).read_text(encoding="utf-8")
    assert "<svg" in page and "&lt;all of it&gt;" in page and "swapped in tier 1" in page
    assert "<script" not in page and "<link" not in page and "<img" not in page, "nothing is loaded from elsewhere"
    assert "No call was served" in report.write(tmp_path, Run(1.0, [], 0.5), Explained([])).read_text(encoding="utf-8")


def test_lines_are_seeded_and_read_back() -> None:
    short, again, long = text_lines(SHORT), text_lines(SHORT), text_lines(LONG)
    assert all(np.array_equal(a.image, b.image) and a.text == b.text for a, b in zip(short, again, strict=True))
    assert len({line.image.shape for line in short}) > 3 and short[0].image.shape[:3] == (1, 3, 48)
    assert min(line.image.shape[3] for line in long) > np.median([line.image.shape[3] for line in short])
    scores = np.zeros((1, 6, 4), np.float32)
    scores[0, range(6), [1, 1, 0, 1, 3, 2]] = 1
    assert reader(Session())(scores) == "aa b"


def test_tables_of_a_run() -> None:
    found = [Record("models", "m", n, 1) for n in ("hotfuse", "eager", "ort")]
    found.append(Record("models", "m", "tvm", 1, "crashed", "died"))
    for r, ms in zip(found[:3], (10.0, 20.0, 9.0), strict=True):
        r.times = [ms] * 8
    finish(found)
    ours = Record("traffic", "lengths", "hotfuse", 1, unit=PER_REQUEST, time=Estimate(5.0, 4.0, 6.0, 9), extra={"worst_ms": 77.0})
    run = {"machine": {"tuning": {"cpu": "a CPU", "usable_cpus": "2"}}, "versions": {"torch": "2", "jax": "not installed"}}
    text = table.render(run, [*found, ours])
    for part in ("| m | 10 | 2.00× | **0.90×** |", "geomean 0.90×", "- tvm: died", "lengths 77 ms"):
        assert part in text
