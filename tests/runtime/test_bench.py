"""The side-by-side's bookkeeping, with contenders that crash, answer something else or are slow; and comparing two runs."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks.side import plots, records, report, stats
from benchmarks.side.__main__ import pictures_of
from benchmarks.side.cases import CASES, SUITES, Case, Model
from benchmarks.side.contenders import CONTENDERS
from benchmarks.side.records import Record
from benchmarks.side.traffic import TRACES, Trace
from benchmarks.side.turns import Process, Table, environment, roof_ms
from hotfuse.cli import app
from hotfuse.machine.peaks import Bandwidth, MachinePeaks, Rate

FAKE = """
import json, os, signal, sys
import numpy as np
name, folder = sys.argv[1:3]
rounds = 0
for line in sys.stdin:
    do = json.loads(line)["do"]
    if do == "load":
        if name == "eager-trap":
            os.kill(os.getpid(), signal.SIGILL)
        if name == "tired":
            print(json.dumps({"absent": "NotImplementedError: no such op"}), flush=True)
            continue
        np.savez(folder + "/" + name, np.ones(3) * (1.5 if name == "liar" else 1))
        answer = {"load_s": 0.1, "first_s": 0.2, "settled_s": 0.3, "worst_ms": 1.0, "outputs": folder + "/" + name + ".npz"}
        if name == "eager":
            answer |= {"flops": 2e6, "bytes": 1000}
    elif do == "round":
        rounds += 1
        if name == "dies" and rounds == 2:
            sys.exit("cannot go on")
        answer = {"ms": {"slow": 30.0, "eager": 2.0}.get(name, 1.0), "calls": 1}
    elif do == "serve":
        ms = 100.0 if name == "slow" else 10.0
        answer = {"calls": [[i * ms / 1e3, ms] for i in range(int(1e3 / ms))], "spent_s": 1.0}
    else:
        answer = {"about": {"tier": 1}}
    print(json.dumps(answer), flush=True)
"""
ROOMS = (Bandwidth("L1", "read", 1, 1e9, 0.0, 4096), Bandwidth("memory", "read", 1, 1e8, 0.0, 1 << 26))
PEAKS = MachinePeaks("x86", (Rate("f32", 1, 1e9, 0.0),), ROOMS, (), 10.0, 0.0, 0.0)


class Fakes(Table):
    """Contenders that do what their names say."""

    def _start(self, name: str, folder: Path) -> Process:
        return Process([sys.executable, "-c", FAKE, name, str(folder)], environment(1, folder))


def measured(names: Sequence[str], suite: Any = "kernels", trace: str = "") -> tuple[dict[str, Record], list[str]]:
    case = Case(suite, "fake", Model, dict, tuple(names), "onnx", trace=trace)
    said: list[str] = []
    table = Fakes(case, 1, names, rounds=4, seconds=2.0, say=said.append, peaks=PEAKS)
    return {r.contender: r for r in table.measure()}, said


def test_crashes_and_wrong_answers_are_lines_and_the_rest_is_timed() -> None:
    found, said = measured(["hotfuse", "eager", "slow", "liar", "tired", "dies", "eager-trap"])
    assert {n: r.status for n, r in found.items()} == {
        "hotfuse": "ok", "eager": "ok", "slow": "ok", "liar": "wrong", "tired": "absent", "dies": "crashed",
        "eager-trap": "crashed",
    }  # fmt: skip
    assert "SIGILL" in found["eager-trap"].why and "cannot go on" in found["dies"].why
    assert "differ from eager's by 5.0e-01" in found["liar"].why and not found["dies"].times
    slow, best = found["slow"].ratio, records.best(found.values())
    assert slow is not None and slow.median == 30.0 and len(found["slow"].times) == 4
    assert best is not None and best.contender == "eager" and best.ratio is not None and best.ratio.median == 2.0
    assert found["hotfuse"].roofline == pytest.approx(2.0) and found["hotfuse"].extra["about"] == {"tier": 1}
    assert len(said) == 4
    text = "\n".join(report.case_lines(list(found.values())))
    assert "2.00x the best of the others (eager)" in text and "eager-trap         crashed: died of SIGILL" in text
    assert "geomean 2.00x" in report.summary(found.values())[0] and "slow 30.00x" in report.summary(found.values())[0]


def test_startup_takes_a_fresh_process_for_every_sample() -> None:
    found, _ = measured(["hotfuse", "eager-trap", "slow"], "startup")
    assert found["hotfuse"].times == [pytest.approx(200.0)] and found["eager-trap"].status == "crashed"


def test_compiling_tells_what_calls_waited() -> None:
    found, _ = measured(["hotfuse", "slow"], "compile")
    assert found["hotfuse"].times == [pytest.approx(300.0)]
    assert "the longest wait of a call 200 ms" in report.case_lines(list(found.values()))[1]


def test_traffic_counts_loading() -> None:
    found, _ = measured(["hotfuse", "slow"], "traffic", "lengths")
    ours, slow = found["hotfuse"], found["slow"]
    assert ours.unit == records.PER_REQUEST and ours.extra["calls"][0] == [0.0, 200.0]
    assert ours.time is not None and ours.time.median > 10.0 and ours.extra["worst_ms"] == 200.0
    assert slow.ratio is not None and 5 < slow.ratio.median < 10


def test_traffic_tells_the_first_seconds_from_the_last() -> None:
    served = [[0.0, 900.0], *([t / 10, 90.0] for t in range(10, 60)), *([t / 10, 10.0] for t in range(60, 150))]
    assert records.parts(served, 15.0) == {"cold_ms": pytest.approx((900 + 40 * 90) / 41), "warm_ms": 10.0}
    assert records.parts(served, 6.0) == {"warm_ms": pytest.approx((20 * 90 + 90 * 10) / 110)}
    assert records.parts([[0.0, 15000.0]], 15.0) == {"cold_ms": 15000.0}  # a single call that took all the time

    def stream(name: str, cold: float, warm: float) -> Record:
        extra = {"per_s": 1.0, "p99_ms": 1.0, "worst_ms": 1.0, "cold_ms": cold, "warm_ms": warm}
        return Record("traffic", "lengths", name, 1, unit=records.PER_REQUEST, time=stats.Estimate(1.0, 1.0, 1.0, 9), extra=extra)

    rows = [stream("hotfuse", 20.0, 5.0), stream("ort", 10.0, 10.0), stream("eager", 30.0, 20.0)]
    records.finish(rows)
    assert records.part_ratios(rows, "cold_ms") == {"ort": 0.5, "eager": 1.5}
    assert records.part_ratios(rows[1:], "cold_ms") == {}
    assert "10 ms (0.50x) in the first 5 s; 10 ms (2.00x) in the last third" in report.case_lines(rows)[2]
    told = report.summary(rows)
    assert "in the first 5 s: geomean 0.50x the best of the others" in told[1] and "in the last third: geomean 2.00x" in told[2]


def test_medians_come_with_intervals_that_hold() -> None:
    assert stats.estimate([3.0]) == stats.Estimate(3.0, 3.0, 3.0, 1)
    rng, inside = random.Random(5), 0
    for _ in range(400):
        e = stats.estimate([rng.expovariate(1.0) for _ in range(15)])
        inside += e.low <= np.log(2) <= e.high
    assert inside >= 0.93 * 400, "95% of the intervals hold the median of the distribution"
    assert stats.estimate(list(range(1, 16))).high < 15, "and they are narrower than everything seen"
    blocks = stats.of_blocks([1.0] * 50 + [3.0] * 50)
    assert blocks.median == 2.0 and 1.0 <= blocks.low < 2.0 < blocks.high <= 3.0


def series(ours: float, eager: float, seed: int, noise: float = 0.02, mood: float = 1.0) -> list[Record]:
    """A case of both, on a machine that wavers."""
    rng = random.Random(seed)
    found = [Record("models", "m", n, 1) for n in ("hotfuse", "eager")]
    for _ in range(15):
        moment = mood * rng.uniform(1.0, 1.3)
        for r, t in zip(found, (ours, eager), strict=True):
            r.times.append(t * moment * rng.gauss(1, noise))
    records.finish(found)
    return found


@pytest.mark.parametrize("seed", range(5))
def test_compare_flags_what_became_slower_and_not_noise(seed: int) -> None:
    (same,) = records.compare(series(10, 20, seed), series(10, 20, seed + 100, mood=1.4))
    assert same.verdict == "same" and same.against == "eager", "a machine that is slower for all is nobody's regression"
    (worse,) = records.compare(series(10, 20, seed), series(11.5, 20, seed + 100))
    assert worse.verdict == "REGRESSION" and worse.factor == pytest.approx(1.15, rel=0.05)
    (better,) = records.compare(series(10, 20, seed), series(8.5, 20, seed + 100))
    assert better.verdict == "faster"
    assert "REGRESSION" in report.changes([better, worse])[0]


def test_a_case_that_no_longer_works_is_a_regression() -> None:
    gone = [Record("models", "m", "hotfuse", 1, "crashed", "died of SIGSEGV")]
    (change,) = records.compare(series(10, 20, 0), gone)
    assert change.verdict == "REGRESSION" and "SIGSEGV" in change.against
    assert records.compare(gone, series(10, 20, 0)) == []


def test_results_are_read_as_written_and_drawn(tmp_path: Path) -> None:
    found = series(10, 20, 0)
    traffic, _ = measured(["hotfuse", "slow"], "traffic", "lengths")
    found[1].extra |= {"flops": 2e6, "bytes": 1000}
    found[0].roofline = found[1].roofline = 0.5
    everything = [*found, *traffic.values(), Record("models", "n", "hotfuse", 1, "absent", "no")]
    records.write(tmp_path / "r.jsonl", {"machine": {"key": "k"}}, everything)
    run, again = records.read(tmp_path / "r.jsonl")
    assert run == {"machine": {"key": "k"}} and [r.key for r in again] == [r.key for r in everything]
    assert again[1].ratio == found[1].ratio
    written = {p.name for p in plots.draw(again, PEAKS, tmp_path / "plots", ("svg",))}
    assert written == {"ratios-models-1.svg", "ratios-traffic-1.svg", "traffic-fake-1.svg", "roofline.svg"}


def test_pictures_lie_beside_the_results_whatever_their_name(tmp_path: Path) -> None:
    assert pictures_of(tmp_path / "a.jsonl") == tmp_path / "a"
    assert pictures_of(tmp_path / "a") != tmp_path / "a"


def test_starts_are_not_held_against_the_roof() -> None:
    work = {"flops": 2e6, "bytes": 1000}
    rows = [Record("models", "m", "eager", 1, times=[2.0], roofline=0.5, extra=dict(work)),
            Record("models", "m", "ort", 1, times=[4.0]),
            Record("startup", "m", "eager", 1, times=[900.0], extra=dict(work))]  # fmt: skip
    records.finish(rows)
    assert plots.reached(rows) == {"eager": [(2000.0, 1.0)]}


def test_the_roof_is_the_binding_resource() -> None:
    assert roof_ms(PEAKS, 1e6, 100, 1) == pytest.approx(1.0)
    assert roof_ms(PEAKS, 1.0, 2000, 1) == pytest.approx(2e-3), "fits the first level"
    assert roof_ms(PEAKS, 1.0, 1e6, 1) == pytest.approx(10.0), "comes from memory"


@pytest.mark.parametrize("name", TRACES)
def test_traces_are_seeded(name: str) -> None:
    a, b = Trace(TRACES[name]), Trace(TRACES[name])
    for i in range(30):
        x, y = a.next(i / 30), b.next(i / 30)
        assert x.pause_s == y.pause_s and all(np.array_equal(x.feed[n], y.feed[n]) for n in x.feed)
    if name == "padded":
        shares = [Trace(TRACES[name], s).next(0.0).feed["attention_mask"].mean() for s in range(40)]
        assert min(shares) > 0.2 and max(shares) < 0.7


def test_cases_are_well_formed() -> None:
    assert {c.suite for c in CASES} == set(SUITES) == {c.suite for c in CASES if c.quick}
    assert len({(c.suite, c.name) for c in CASES}) == len(CASES)
    assert all(n in CONTENDERS for c in CASES for n in c.contenders) and all("hotfuse" in c.contenders for c in CASES)


def test_the_command_says_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hotfuse.cli import bench

    done = CliRunner().invoke(app, ["bench", "--compare", str(tmp_path / "none.jsonl"), "--json"])
    assert done.exit_code == 2 and "no earlier run" in json.loads(done.stdout)["what"]
    monkeypatch.setattr(bench, "__file__", str(tmp_path / "a" / "b" / "c" / "bench.py"))
    done = CliRunner().invoke(app, ["bench", "--json"])
    assert done.exit_code == 2 and "not part of the installed package" in json.loads(done.stdout)["what"]
