"""What the command line says of the machine and its model: refusals, models that do not fit, traffic that nobody counts."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from hotfuse.base.errors import InputError
from hotfuse.cli import app, cost_report, machine_limits
from hotfuse.cli.calibrate import MAX_REASONS
from hotfuse.compile.host import this_host
from hotfuse.compile.learn import calibrate as calibrating
from hotfuse.compile.learn import learned
from hotfuse.compile.learn.calibrate import Report
from hotfuse.compile.request_context import RequestContext, used_by
from hotfuse.hpm import model
from hotfuse.hpm.evaluation import HeldOut
from hotfuse.hpm.model import TrainingRows
from hotfuse.hpm.plot import draw
from hotfuse.hpm.work import NAMES
from hotfuse.ir.hash import structural_hash
from hotfuse.ir.text import parse
from hotfuse.machine.memory_traffic import Moved
from hotfuse.profile.rows import SubgraphProfile
from hotfuse.profile.store import Store

GRAPH = "graph main(%x: f32[64, 64]) {\n  %y: f32[64, 64] = aten.relu.default(%x)\n  return %y\n}"


def test_calibrate_says_what_it_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    many = Counter({f"reason {n}": 100 - n for n in range(MAX_REASONS + 2)})
    monkeypatch.setattr(calibrating, "calibrate", lambda *_a, **_k: Report(measured=3, refused=many))
    done = CliRunner().invoke(app, ["calibrate", "--store", str(tmp_path / "p.sqlite"), "--budget", "1s"])
    assert done.exit_code == 0, done.output
    assert f"{sum(many.values())} kernels were left out" in done.stdout and "reason 0" in done.stdout
    assert f"reason {MAX_REASONS}" not in done.stdout and "2 more reasons" in done.stdout


@pytest.mark.parametrize("fits", [False, True])
def test_costs_say_that_a_model_was_left_aside_and_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fits: bool
) -> None:
    place = tmp_path / "p.sqlite"
    with Store.open(place) as store:
        machine = this_host(store, measure_peaks=False).machine
        if not fits:
            store.save_model(model.NAME, {"width": np.zeros(1)}, {"features": ["of another version"]}, machine)
    learned.forget()
    with used_by(RequestContext(str(place), False).header()):
        cost_report.show_costs(parse(GRAPH), [(64, 64)], as_json=False)
        said = capsys.readouterr().out
        cost_report.show_costs(parse(GRAPH), [(64, 64)], as_json=True)
    found = json.loads(capsys.readouterr().out)
    learned.forget()
    assert found["predictor"] == "rooflines" and "predicted by rooflines" in said
    assert ("left aside" in said) is not fits and bool(found["notes"]) is not fits
    told = CliRunner().invoke(app, ["hpm", "--store", str(place)])
    assert told.exit_code == 0 and ("left aside" in told.stdout) is not fits, told.output
    assert ("no performance model for this machine yet" in told.stdout) is fits


CHAIN = """graph main(%x: f32[8, 64]) {
  %a: f32[8, 64] = aten.relu.default(%x)
  %b: f32[8, 64] = aten.tanh.default(%a)
  %y: f32[8, 64] = aten.mul.Tensor(%b, %a)
  return %y
}"""


def test_costs_have_the_times_of_what_served_and_name_the_sizes(tmp_path: Path) -> None:
    """A group that served stands with its time at the sizes of the calls; where other sizes are asked for, those are named."""
    place, graph = tmp_path / "p.sqlite", parse(CHAIN)
    with Store.open(place) as store:
        host = this_host(store, measure_peaks=False)
        ops = " ".join(n.op for n in graph.nodes)
        store.record_subgraphs([SubgraphProfile(structural_hash(graph), ops, "8x64", host.at.threads, 1, 20, 3e3, 2e3, 3e3, 4e3,
                                                2048.0, 1024.0, 1.0, "memory", {})], host.machine)  # fmt: skip
    learned.forget()
    with used_by(RequestContext(str(place), False).header()):
        found = cost_report.costs(graph, [(8, 64)])
        other = cost_report.costs(parse(CHAIN.replace("8,", "16,")), [(16, 64)])
    learned.forget()
    (group,) = found["groups"]
    assert group["measured_us"] == 3.0 and not found["notes"]
    assert {e["source"] for e in found["edges"]} == {"derived"}
    assert other["groups"][0]["measured_us"] is None
    assert other["notes"] == ["nothing served at 16x64; groups of these operators did at 8x64"]


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_predictions_are_drawn_against_measurements(tmp_path: Path, ending: str) -> None:
    times = np.geomspace(1e-6, 1e-3, 12)
    samples = TrainingRows(np.ones((12, len(NAMES))), times, np.zeros(12), np.arange(12))
    path = tmp_path / f"p.{ending}"
    draw(HeldOut(samples, times * 1.1), path)
    assert path.read_bytes()[:8].lstrip(b"\x89<?").startswith(b"PNG" if ending == "png" else b"xml")
    with pytest.raises(InputError, match="no picture"):
        draw(HeldOut(samples, times), tmp_path / "p.txt")


@pytest.mark.parametrize(
    ("found", "counted", "want"),
    [
        ((None, "no controller"), "", "derived from cache misses, 64 bytes each: no controller"),
        ((None, "no controller"), "not here", "derived from operands: no controller"),
        ((Moved(1e9, 5e8, 1.0, "counted", "the whole machine"), ""), "", "counted: 1.50 GB/s just now, the whole machine"),
    ],
)
def test_doctor_says_who_counts_memory_traffic(
    monkeypatch: pytest.MonkeyPatch, found: tuple[Moved | None, str], counted: str, want: str
) -> None:
    monkeypatch.setattr(machine_limits, "look", lambda: found)
    seen: Any = machine_limits._traffic()  # pyright: ignore[reportPrivateUsage]
    known = machine_limits.MachineLimits(None, "", {"cache_misses": counted}, seen, (), {}, {})
    assert machine_limits._traffic_row(known) == ("memory_traffic", want)  # pyright: ignore[reportPrivateUsage]
    assert known.to_dict()["memory_traffic"]["source"] == ("counted" if found[0] else "derived")
