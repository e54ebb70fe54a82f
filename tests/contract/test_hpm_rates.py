"""Rates that are fitted, rows of what only looks into its operands, data that candidates share."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from hotfuse.compile.learn import measure
from hotfuse.hpm import drawn_problems, fitted, model
from hotfuse.hpm.drawn_problems import draws
from hotfuse.hpm.features import derive
from hotfuse.hpm.model import TrainingRows
from hotfuse.hpm.roofline import Roofline
from hotfuse.hpm.row_cache import RowCache
from hotfuse.hpm.work import COLUMN, FAMILIES, Candidate, families
from hotfuse.ir.build import GraphBuilder
from hotfuse.ir.types import DType, Layout, TensorType
from hotfuse.lower.cpu.tiling import Core
from hotfuse.profile.store import Store

CORE = Core(16, 32)
AT = Roofline(1, 100e9, (3e4, 8e5, 1.6e7, 6e7), (2e11, 1e11, 5e10, 2e10), 1e-7, 0.0, True, 2.5e9)


def drawn(count: int, seed: int = 5) -> list[Candidate]:
    return [
        Candidate(p.graph, s, core)
        for p in itertools.islice(draws(seed), count)
        for s in p.sizes
        for core in (CORE, None)
    ]


def row(candidate: Candidate) -> dict[str, float]:
    found = RowCache(measure.tile_of).rows([candidate])[0]
    return {n: float(found[i]) for n, i in COLUMN.items()}


def test_rates_are_found_again_and_hold_beyond_the_samples() -> None:
    """Times that are sums of amounts are learned from few samples, and predicted far outside of them."""
    rng = np.random.default_rng(0)
    found = derive(RowCache(measure.tile_of).rows(drawn(120)), AT)
    true = rng.uniform(0.5, 2.0, fitted.NONE.shape)
    seconds = fitted.base(found.amounts, found.family, true, found.roofline.seconds)
    small = seconds < np.median(seconds)
    rates = fitted.fit(found.amounts[small], found.family[small], seconds[small], np.ones(int(small.sum())))
    assert (rates >= 0).all()
    known = np.isin(found.family, [f for f in range(len(FAMILIES)) if rates[fitted.shared(f)].any()])
    off = np.log(fitted.base(found.amounts, found.family, rates, found.roofline.seconds) / seconds)
    assert np.abs(off[small & known]).max() < 0.15
    assert np.median(np.abs(off[~small & known])) < 0.2


@pytest.mark.parametrize(("seen", "asked"), [(8, 16), (16, 8)])
def test_a_machine_of_other_vectors_is_not_taken_for_one_where_they_cost_nothing(seen: int, asked: int) -> None:
    """Samples of narrow vectors alone left nothing for rates of full ones: kernels there were predicted to take a twentieth."""
    candidates = [Candidate(p.graph, s, lanes) for p in itertools.islice(draws(5, "pointwise"), 300) for s in p.sizes
                  for lanes in (Core(seen, 32), Core(asked, 32))]  # fmt: skip
    table, at = RowCache(measure.tile_of).rows(candidates), replace(AT, flops=6.25e9 * seen)
    found, there = derive(table[::2], at), derive(table[1::2], replace(AT, flops=6.25e9 * asked))
    true = np.full_like(fitted.NONE, 1.5)
    seconds, would = (fitted.base(f.amounts, f.family, true, f.roofline.seconds) for f in (found, there))
    rates = fitted.fit(found.amounts, found.family, seconds, np.ones(len(seconds)))
    assert len(seconds) >= fitted.APART
    off = np.log(fitted.base(there.amounts, there.family, rates, there.roofline.seconds) / would)
    assert np.abs(off).max() < 1.0, np.quantile(off, (0, 0.1, 0.5, 0.9, 1))


def test_without_rates_the_roofline_stands() -> None:
    found = derive(RowCache(measure.tile_of).rows(drawn(10)), AT)
    assert np.array_equal(fitted.base(found.amounts, found.family, fitted.NONE, found.roofline.seconds), found.roofline.seconds)


def test_a_rate_that_little_tells_of_stays_small() -> None:
    """One row has a trace of something, and takes longer: a rate for that would explain this row, and spoil others."""
    rng, n = np.random.default_rng(5), 60
    terms = np.zeros((n, len(fitted.TERMS)))
    terms[:, fitted.TERMS.index("light")] = rng.uniform(1, 100, n) * 1e-6
    seconds = 2 * terms[:, fitted.TERMS.index("light")]
    terms[7, fitted.TERMS.index("picked")] = 1e-3 * seconds[7]
    seconds[7] *= 1.3
    rates = fitted.fit(terms, np.zeros(n, np.int64), seconds, np.ones(n))
    own = rates[fitted.shared(0)]
    assert own[fitted.TERMS.index("light")] == pytest.approx(2.0, rel=0.02)
    assert own[fitted.TERMS.index("picked")] < 1.0, "300 where a rate costs nothing"


@pytest.mark.parametrize("spoil", ["negative", "nan", "shape"])
def test_spoilt_rates_are_left_aside(tmp_path: Path, spoil: str) -> None:
    found = drawn(30)
    table = RowCache(measure.tile_of).rows(found)
    group = np.arange(len(found), dtype=np.int64) // 4
    made = model.fit(TrainingRows(table, derive(table, AT).roofline.seconds * 1.5, np.full(len(found), 0.01), group), AT)
    bad = made.rates.copy()
    bad[0, 0] = {"negative": -1.0, "nan": np.nan, "shape": 0.0}[spoil]
    bad = bad[:, :-1] if spoil == "shape" else bad
    with Store.open(tmp_path / "s.sqlite") as store:
        model.save(store, made, None)
        assert model.load(store) is not None
        model.save(store, model.PerformanceModel(made.forest, made.width, made.facts, rates=bad), None)
        assert model.load(store) is None and any("rates" in n for n in store.notes)


def test_a_table_counts_as_what_is_read_of_it() -> None:
    b = GraphBuilder("group")
    table = b.param("t", TensorType(DType.F32, (30_000, 768)), "t")
    at = b.input("i", TensorType(DType.I64, (128,)))
    out = b.add("aten.embedding.default", (table, at), TensorType(DType.F32, (128, 768)))
    found = row(Candidate(b.finish(out), {}, CORE))
    assert found["elements"] == 128 * 768 and found["bytes_const"] == 128 * 768 * 4 == found["bytes_out"]
    assert found["skipped"] == (30_000 - 128) * 768 * 4 and found["moved"] < 3 * 128 * 768 * 4 + 2048


def test_a_pool_is_a_reduction_over_windows() -> None:
    b, last = GraphBuilder("group"), Layout((0, 2, 3, 1))
    x = b.input("x", TensorType(DType.F32, (1, 64, 56, 56), last))
    out = b.add("aten.max_pool2d.default", (x, (3, 3), (2, 2), (1, 1)), TensorType(DType.F32, (1, 64, 28, 28), last))
    table = RowCache(measure.tile_of).rows([Candidate(b.finish(out), {}, CORE)])
    assert (
        FAMILIES[families(table)[0]] == "reduction" and table[0, COLUMN["window"]] == 9 and table[0, COLUMN["mma"]] == 0
    )
    assert table[0, COLUMN["pooled"]] == 64 * 28 * 28 * 9


def test_what_lies_the_other_way_round_is_told() -> None:
    b = GraphBuilder("group")
    x = b.input("x", TensorType(DType.F32, (64, 32)))
    turned = b.add("aten.transpose.int", (x, 0, 1), TensorType(DType.F32, (32, 64)))
    out = b.add("aten.relu.default", (turned,), TensorType(DType.F32, (32, 64)))
    assert row(Candidate(b.finish(out), {}, CORE))["turned"] == 32 * 64


def test_candidates_of_a_problem_run_on_the_same_memory() -> None:
    problem = next(p for p in draws(1, "pointwise") if len(p.graph.nodes) == 1)
    shelf, sizes = measure.Shelf(), {"n": 4}
    first, second = (
        measure.bind(Candidate(problem.graph, sizes, core), problem.key, measure.make(problem.graph, core), shelf)
        for core in (CORE, Core(8, 32))
    )
    (out,), (also,) = first.keep[2], second.keep[2]
    assert out.data_ptr() == also.data_ptr() and all(a is b for a, b in zip(first.keep[3], second.keep[3], strict=True))
    first.call()
    want = out.clone()
    out.fill_(7.0)
    second.call()
    assert torch.allclose(out, want, rtol=1e-5, atol=1e-6)
    apart = measure.bind(Candidate(problem.graph, sizes, CORE), problem.key, measure.make(problem.graph, CORE))
    assert apart.keep[2][0].data_ptr() != out.data_ptr()


def test_problems_of_every_kind_are_drawn() -> None:
    ops = {n.op for p in itertools.islice(draws(0), 600) for n in p.graph.nodes}
    assert {
        "aten.embedding.default",
        "aten.max_pool2d.default",
        "aten.adaptive_avg_pool2d.default",
        "aten.transpose.int",
    } <= ops
    assert drawn_problems._stem(random.Random(0)).graph.nodes[0].op == "aten.conv2d.default"  # pyright: ignore[reportPrivateUsage]


def told_apart(count: int, seed: int, by: float) -> TrainingRows:
    """Problems that lie apart by chance, and ways that differ by a law: narrow vectors take `by` longer, in logarithms."""
    rng = np.random.default_rng(seed)
    problems = list(itertools.islice(draws(seed, "pointwise"), count))
    found = [Candidate(p.graph, s, core) for p in problems for s in p.sizes for core in (CORE, Core(8, 32))]
    luck = np.repeat(rng.normal(0, 0.2, len(found) // 2), 2)
    table = RowCache(measure.tile_of).rows(found)
    narrow = table[:, COLUMN["lanes"]] == 8
    group = np.repeat(np.arange(len(problems)), [2 * len(p.sizes) for p in problems])
    seconds = derive(table, AT).roofline.seconds * 2 * np.exp(luck + by * narrow)
    return TrainingRows(table, seconds, np.full(len(found), 0.01), group)


def test_tilings_of_a_problem_are_told_apart_where_problems_differ_by_more(tmp_path: Path) -> None:
    made = model.fit(told_apart(120, 1, 0.06), AT)
    assert made.tilings is not None and made.facts["tells_tilings_apart"] is True
    other = derive(told_apart(40, 2, 0.06).table, AT)
    seconds = made.seconds(other)
    ratio = np.log(seconds[1::2] / seconds[::2])
    assert (ratio > 0).mean() > 0.95 and abs(float(np.median(ratio)) - 0.06) < 0.04
    with Store.open(tmp_path / "s.sqlite") as store:
        model.save(store, made, None)
        back = model.load(store)
    assert back is not None and np.array_equal(back.seconds(other), seconds)


def test_tilings_that_do_not_differ_are_left_alone() -> None:
    assert model.fit(told_apart(60, 1, 0.0), AT).tilings is None
