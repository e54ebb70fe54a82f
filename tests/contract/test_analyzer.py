"""What the analyzer makes of records: statistics, drift at its stated rate, predictions that keep score."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time

import numpy as np
import pytest

from hotfuse.profile import predict, traffic_drift
from hotfuse.profile.analyzer import Analyzer
from hotfuse.profile.analyzer_memory import MAX_SIGNATURES, AnalyzerMemory
from hotfuse.profile.daemon import Daemon
from hotfuse.profile.records import COUNTS, Batch, Flag, Subject
from hotfuse.profile.ring import Ring
from hotfuse.profile.snapshot import from_json, to_json
from hotfuse.profile.stats import DECAY, Decayed, Fractions, Outcomes, RecentRange, Sizes
from tests.seeds import generator

# --- statistics that forget ---------------------------------------------------------------------------------------------


def test_decayed_mean_and_variance() -> None:
    x = generator().normal(3, 2, 500)
    d = Decayed()
    for v in x:
        d.add(v)
    w = DECAY ** np.arange(len(x))[::-1]
    mean = (w * x).sum() / w.sum()
    assert d.mean == pytest.approx(mean) and d.var == pytest.approx((w * (x - mean) ** 2).sum() / w.sum())
    d.add(math.nan)
    assert d.n == 500


def test_fractions_leave_out_what_is_none() -> None:
    f = Fractions()
    for x in (0.0, 1.0, 0.5, 1.5, -1.0):
        f.add(x)
    assert f.of.n == 3 and f.of.mean == pytest.approx(0.5, abs=0.01)


def test_quantiles_of_sizes() -> None:
    s = Sizes()
    x = generator().lognormal(8, 1, 5000)
    for v in x:
        s.add(v)
    w = DECAY ** np.arange(len(x))[::-1]
    order = np.argsort(x)
    for q in (0.1, 0.5, 0.9):
        exact = x[order][np.searchsorted(np.cumsum(w[order]) / w.sum(), q)]
        assert 2**-0.26 < s.quantile(q) / exact < 2**0.26
    assert Sizes().quantile(0.5) == 0


def test_ranges_and_outcomes_forget() -> None:
    r = RecentRange(epoch=4)
    for x in (100.0, 1, 1, 1, 2, 2, 2, 2, 3):
        r.add(-x, x)
    assert (r.low, r.high) == (-3, 3)
    o = Outcomes(limit=2)
    for k in (7, 7, 7, 8, 9):
        o.add(k)
    assert [k for k, _ in o.shares()] == [7, 9] and sum(w for _, w in o.shares()) == pytest.approx(1)


# --- drift ---------------------------------------------------------------------------------------------------------------


def alarms(xs: np.ndarray, streams: int, rate: float) -> int:
    s = traffic_drift.Stream()
    return sum(s.add(float(x), lambda: streams, rate) is not None for x in xs)


@pytest.mark.parametrize("kind", ["normal", "lognormal", "coin", "rare", "mixture"])
def test_false_alarms_stay_below_the_stated_rate(kind: str) -> None:
    # At a rate of 1 in 5 blocks the bound can be tested in little time; it holds for all streams of a graph together.
    rng, rate, streams, samples = generator(), 0.2, 4, 32 * 100
    draw = {
        "normal": lambda n: rng.normal(size=n), "lognormal": lambda n: rng.lognormal(4, 1, n),
        "coin": lambda n: rng.integers(0, 2, n), "rare": lambda n: rng.random(n) < 0.02,
        "mixture": lambda n: np.where(rng.random(n) < 0.5, rng.normal(0, 1, n), rng.normal(9, 1, n)),
    }[kind]  # fmt: skip
    runs = 3
    total = sum(alarms(draw(samples), streams, rate) for _ in range(runs * streams))
    blocks = runs * samples / traffic_drift.SHORT
    allowed = rate * blocks
    assert total <= allowed + 4 * math.sqrt(allowed), f"{total} false alarms in {blocks} blocks, at most {allowed} expected"


def test_a_stationary_stream_at_the_real_rate_is_quiet() -> None:
    rng = generator()
    total = sum(alarms(rng.normal(size=20_000), 10, traffic_drift.RATE) for _ in range(10))  # ten streams of one graph
    assert total <= 6, "more would be a chance of one in a million"
    assert traffic_drift.RATE * 20_000 / traffic_drift.SHORT < 0.7


@pytest.mark.parametrize("shift", ["mean", "coin", "spread"])
def test_shifts_are_noticed(shift: str) -> None:
    rng = generator()
    before, after = {
        "mean": (rng.normal(0, 1, 1000), rng.normal(4, 1, 1000)),
        "coin": (rng.random(1000) < 0.02, rng.random(1000) < 0.98),
        "spread": (rng.normal(0, 1, 1000), rng.normal(0, 30, 1000)),
    }[shift]
    within = 2 * traffic_drift.SHORT if shift != "spread" else 4 * traffic_drift.LONG
    s = traffic_drift.Stream()
    for x in before:
        s.add(float(x), lambda: 30)
    for i, x in enumerate(after):
        if s.add(float(x), lambda: 30) is not None:
            assert i < within
            break
    else:
        pytest.fail("not noticed")
    # The new state is the reference now: no second alarm for it, but one for going back.
    rest = after[i + 1 :]
    assert sum(s.add(float(x), lambda: 30) is not None for x in rest) <= 1
    assert sum(s.add(float(x), lambda: 30) is not None for x in before) >= 1


def test_distance_is_that_of_kolmogorov_and_smirnov() -> None:
    assert traffic_drift.distance([1, 2, 3], [1, 2, 3]) == 0 and traffic_drift.distance([1, 2], [3, 4]) == 1
    assert traffic_drift.distance([0, 0, 0, 1], [0, 1, 1, 1]) == 0.5


# --- predictions ------------------------------------------------------------------------------------------------------


def guess(outcomes: list[int]) -> predict.Guess:
    p = predict.StreamPredictor()
    for o in outcomes:
        p.see(o)
    found = p.guess()
    assert found is not None
    return found


def test_predictors_find_what_is_predictable() -> None:
    constant = guess([1] * 50)
    assert (constant.value, constant.n) == (1, 49) and constant.accuracy == 1
    turns = guess([0, 1] * 100)
    assert turns.by == predict.FOLLOWS and turns.value == 0 and turns.accuracy > 0.95
    runs = guess(([3] * 20 + [4] * 20) * 5)
    assert runs.accuracy > 0.9 and runs.value == 4
    rng = generator()
    coin = guess(rng.integers(0, 2, 3000).tolist())
    assert 0.3 < coin.accuracy < 0.75  # nobody predicts a fair coin
    biased = guess((rng.random(3000) < 0.9).astype(int).tolist())
    assert biased.value == 1 and biased.accuracy > 0.75
    assert predict.StreamPredictor().guess() is None


def test_a_prediction_is_made_before_the_event() -> None:
    p = predict.StreamPredictor()
    for o in (1, 2, 3, 4, 5, 6):  # never the same twice: whoever peeked would be right
        p.see(o)
    found = p.guess()
    assert found is not None and found.accuracy == 0 and found.n == 5


def test_classes() -> None:
    assert [predict.class_of(x) for x in (0, 0.1, 0.5, 0.95, 1)] == [0, 1, 2, 3, 4] == list(range(len(predict.CLASSES)))


# --- the book ---------------------------------------------------------------------------------------------------------


def value(
    batch: Batch, s: Subject, item: int, zero: float, flags: int = 0, valid: float = 1.0, rows: int = 10, cols: int = 10
) -> None:
    """A value's record as a probe would have filled it."""
    at = batch.value(s, item, 0, (rows, cols), rows, cols, flags)
    n = rows * cols
    counts = {"zeros": round(zero * n), "zero_rows": round(zero * rows), "valid": round(valid * n)}
    batch.write(at, np.array([counts.get(c, 0) for c in COUNTS], np.int64).tobytes() + np.array([-1.0, 2.0, 2.0]).tobytes())


def raw_of(batch: Batch) -> np.ndarray:
    return np.frombuffer(b"".join(batch.record(i) for i in range(batch.count)), np.uint8).reshape(batch.count, -1)


def call(book: AnalyzerMemory, i: int, signature: int = 1, zero: float = 0.5, branch: int = 1, valid: float = 1.0) -> list:
    batch = Batch(5)
    s = Subject(2, signature, i, i)
    value(batch, s, 0, zero, Flag.MASK | Flag.INPUT, valid)
    batch.control(s, 1, branch, loop=False)
    batch.control(s, 2, 3 + i % 2, loop=True)
    batch.partition(s, 3, 1000 * signature, 64, 128, (5, 6, 7))
    batch.call(s, 1, 2000 * signature, 10)
    return book.add(raw_of(batch))


def test_a_book_of_calls() -> None:
    book = AnalyzerMemory()
    for i in range(200):
        call(book, i, signature=1 + (i % 4 == 0), zero=0.25, branch=int(i % 10 != 0), valid=0.3)
    shot = from_json(to_json(book.snapshot()))
    assert shot == book.snapshot().__class__(1, 1000, 0, 0, shot.graphs)
    g = shot.graphs[2]
    assert g.samples == 200 and {s.signature for s in g.signatures} == {1, 2}
    assert g.signatures[0].signature == 1 and 0.7 < g.signatures[0].share < 0.8
    (v,) = g.values
    assert v.zero.mean == pytest.approx(0.25) and v.valid.mean == pytest.approx(0.3) and v.shape == (10, 10)
    assert (v.min, v.max, v.absmax) == (-1, 2, 2) and v.flags == Flag.MASK | Flag.INPUT
    branch, loop = g.controls
    assert dict(branch.outcomes)[1] == pytest.approx(0.9, abs=0.05) and not branch.loop
    assert loop.loop and dict(loop.outcomes)[3] == pytest.approx(0.5, abs=0.05)
    (p,) = g.partitions
    assert p.n == 200 and p.bytes == 64 and p.flops == 128 and p.counters == pytest.approx((5, 6, 7))
    (t,) = g.signatures[0].calls
    assert t.item == 1 and 1700 < t.p50 < 2300
    assert shot.predictable("branch", (2, 1)) is not None
    found = shot.predictable("trips", (2, 2))
    assert found is not None and found[1] > 0.95 and found[2] == 199
    assert shot.predictable("sparsity", (2, 0)) == (1, 1.0, 199) and shot.predictable("valid", (2, 0)) == (1, 1.0, 199)
    assert shot.predictable("shape", (2, 0)) is not None and shot.predictable("branch", (9, 9)) is None
    assert not g.drifts and g.streams == 6


def test_drift_of_a_branch_and_of_sparsity() -> None:
    book = AnalyzerMemory()
    for i in range(128):
        assert not call(book, i)
    found = [d for i in range(64) for d in call(book, i, zero=0.95, branch=0)]
    assert {(d.item, d.metric) for d in found} == {(0, "zero fraction"), (1, "outcome")}
    assert all(d.graph == 2 and d.distance >= d.threshold for d in found)
    assert set(book.snapshot().graphs[2].drifts) == set(found)


def test_a_book_is_bounded() -> None:
    book = AnalyzerMemory()
    for i in range(3 * MAX_SIGNATURES):
        call(book, i, signature=i)
    assert len(book.graphs[2].signatures) <= MAX_SIGNATURES and len(book.graphs[2].shares.weights) <= MAX_SIGNATURES
    assert len(to_json(book.snapshot())) < 8_000  # a call reads it, twice a second


def test_empty_values_and_unknown_records() -> None:
    book = AnalyzerMemory()
    batch = Batch(1)
    batch.value(Subject(0, 1, 0, 0), 0, 0, (0, 4), 0, 4, 0)
    book.add(raw_of(batch))
    assert book.snapshot().graphs[0].values[0].n == 1 and book.snapshot().graphs[0].values[0].zero.n == 0
    wrong = raw_of(batch).copy()
    wrong[0, 0] = 99
    book.add(wrong)
    assert book.unknown == 1


# --- the process ------------------------------------------------------------------------------------------------------


def test_the_daemon_step_by_step() -> None:
    ring, said, now = Ring.create(64), [], [0.0]
    daemon = Daemon(ring, said.append, lambda: now[0])
    assert daemon.step() == 0 and not said
    batch = Batch(1)
    batch.call(Subject(0, 1, 0, 0), 0, 5, 1)
    ring.publish(batch)
    assert daemon.step() == 1 and [x[:1] for x in said] == [b"S"]
    ring.publish(batch)
    daemon.step()
    assert len(said) == 1  # too soon for another
    daemon.flush(2)
    daemon.step()
    assert [x[:1] for x in said] == [b"S", b"S", b"F"] and from_json(said[1][1:]).records == 2


def publish(analyzer: Analyzer, n: int) -> None:
    for i in range(n):
        batch = Batch(2)
        s = Subject(0, 1, i, i)
        batch.control(s, 1, 1, loop=False)
        batch.call(s, 0, 100, 1)
        analyzer.publish(batch)


def test_the_analyzer_in_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOTFUSE_WORKER_NICE", raising=False)
    analyzer = Analyzer()
    try:
        assert analyzer.snapshot.records == 0 and analyzer.pid is None
        publish(analyzer, 40)
        assert analyzer.flush(100)
        shot = analyzer.snapshot
        assert shot.records == 80 and shot.graphs[0].samples == 40 and analyzer.snapshot is shot
        assert shot.predictable("branch", (0, 1)) == (1, 1.0, 39)
        assert analyzer.pid is not None and os.getpriority(os.PRIO_PROCESS, analyzer.pid) >= 10
        assert analyzer.stats()["records"] == 80 and analyzer.stats()["analyzer_restarts"] == 0
    finally:
        pid = analyzer.pid
        analyzer.stop()
    assert analyzer.pid is None and pid is not None and not os.path.exists(f"/proc/{pid}")
    publish(analyzer, 1)  # nothing happens, and nothing starts
    assert analyzer.pid is None


def test_drift_reaches_the_listener() -> None:
    analyzer, heard = Analyzer(), []
    analyzer.on_drift(heard.append)
    try:
        for i in range(160):
            batch = Batch(1)
            batch.control(Subject(0, 1, i, i), 4, int(i >= 96), loop=False)
            analyzer.publish(batch)
        assert analyzer.flush(100)
        assert [(d.graph, d.item, d.metric) for d in heard] == [(0, 4, "outcome")]
    finally:
        analyzer.stop()


_PARENT = """
import os, sys, time
from hotfuse.profile.analyzer import Analyzer
from hotfuse.profile.records import Batch, Subject
a = Analyzer()
b = Batch(1)
b.call(Subject(0, 1, 0, 0), 0, 5, 1)
a.publish(b)
assert a.flush(100)
print(a.pid, flush=True)
if sys.argv[1] == "fork":
    if os.fork() == 0:
        a.after_fork()
        a.publish(b)
        assert a.pid is None and a.flush(0.1)
        os._exit(0 if a.stats()["records"] == 0 else 1)
    assert os.wait()[1] == 0
    a.publish(b)
    assert a.flush(100) and a.snapshot.records == 2
    a.stop()
else:
    os._exit(0)
"""


@pytest.mark.parametrize("how", ["killed", "fork"])
def test_it_dies_with_its_parent_and_forks_disable_it(how: str) -> None:
    done = subprocess.run([sys.executable, "-c", _PARENT, how], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    pid = int(done.stdout)
    until = time.monotonic() + 100
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < until:
        time.sleep(0.05)
    assert not os.path.exists(f"/proc/{pid}")
