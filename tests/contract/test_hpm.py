"""The performance model: rows and features of every family, forests as arrays, corrections, calibration that goes on."""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks import hpm_selection
from hotfuse.analysis.resources import Work
from hotfuse.base.errors import InputError
from hotfuse.cli.calibrate import seconds
from hotfuse.compile.host import Host, host_core
from hotfuse.compile.learn import learned, measure
from hotfuse.compile.learn.calibrate import Calibration, Slice, calibrate, items
from hotfuse.compile.requests import Here
from hotfuse.compile.value import Facts, Learned, RooflineEstimator
from hotfuse.hpm import evaluation, forest, model
from hotfuse.hpm.compiled import tree_walk
from hotfuse.hpm.drawn_problems import Problem, draws
from hotfuse.hpm.features import NAMES, derive
from hotfuse.hpm.model import CostPredictor, PerformanceModel, TrainingRows
from hotfuse.hpm.roofline import Roofline, least, machine_roofline
from hotfuse.hpm.row_cache import RowCache
from hotfuse.hpm.work import COLUMN, FAMILIES, Candidate, UnknownWork, families
from hotfuse.hpm.work import NAMES as ROW_NAMES
from hotfuse.ir.build import GraphBuilder
from hotfuse.ir.graph import Graph
from hotfuse.ir.types import DType, TensorType
from hotfuse.lower.cpu.tiling import Core
from hotfuse.machine.fingerprint import fingerprint
from hotfuse.machine.topology import topology
from hotfuse.native.target import host
from hotfuse.profile.store import Store

CORE = Core(16, 32)
AT = Roofline(1, 100e9, (3e4, 8e5, 1.6e7, 6e7), (2e11, 1e11, 5e10, 2e10), 1e-7, 0.0, True, 2.5e9)


def lstm() -> Graph:
    b = GraphBuilder("group")
    x, h, c = (
        b.input(n, TensorType(DType.F32, shape)) for n, shape in (("x", (5, 1, 8)), ("h", (1, 1, 4)), ("c", (1, 1, 4)))
    )
    w = tuple(b.param(n, TensorType(DType.F32, (16, k)), n) for n, k in (("a", 8), ("b", 4)))
    types = tuple(TensorType(DType.F32, shape) for shape in ((5, 1, 4), (1, 1, 4), (1, 1, 4)))
    args = (x, (h, c), w, False, 1, 0.0, False, False, False)
    return b.finish(b.add_many("aten.lstm.input", args, types)[0])


def drawn(count: int, only: str | None = None, seed: int = 3) -> list[Problem]:
    return list(itertools.islice(draws(seed, only), count))


def candidates(problems: list[Problem]) -> list[Candidate]:
    return [Candidate(p.graph, s, core) for p in problems for s in p.sizes for core in (CORE, None)]


def invented(count: int, seed: int = 0) -> TrainingRows:
    """Samples whose times follow a law that features show: 1.2 to 3 times the roofline, by how much a row computes."""
    found = candidates(drawn(count, seed=seed))
    table = RowCache(measure.tile_of).rows(found)
    known = derive(table, AT)
    ratio = 1.2 + 1.8 / (1 + np.exp(known.x[:, NAMES.index("compute")]))
    group = np.array([hash(id(c.graph)) & 0xFFFFFFF for c in found])
    return TrainingRows(table, known.roofline.seconds * ratio, np.full(len(found), 0.01), group)


def test_what_slowed_the_machine_for_a_while_is_not_learned() -> None:
    """40% of the rows at 1.2 times their time, in two phases; the law is found all the same, and the model says so."""
    quiet, fresh = invented(110), invented(40, seed=9)
    quiet = replace(quiet, group=np.cumsum(np.diff(quiet.group, prepend=0) != 0))  # the same folds in every run
    at = np.floor(np.arange(len(quiet)) / 60.0) * 2.0
    part = np.arange(len(quiet)) / len(quiet)
    slow = ((part > 0.1) & (part < 0.3)) | (part > 0.8)
    disturbed = replace(quiet, seconds=quiet.seconds * np.where(slow, 1.2, 1.0))
    found = derive(fresh.table, AT)

    def off(samples: TrainingRows) -> tuple[float, dict[str, float]]:
        made = model.fit(samples, AT)
        return float(np.median(np.log(made.seconds(found) / fresh.seconds))), made.facts["slowed"]

    blind, nothing = off(disturbed)
    seeing, told = off(replace(disturbed, at=at))
    assert blind > 0.05 and nothing == {"rows": 0.0, "by": 0.0}
    assert abs(seeing) < 0.02 and 0.3 < told["rows"] < 0.6 and 0.1 < told["by"] < 0.25


@pytest.mark.parametrize("family", ["pointwise", "broadcast", "reduction", "contraction", "convolution", "attention"])
def test_features_are_finite_and_families_are_told(family: str) -> None:
    found = candidates(drawn(12, family))
    table = RowCache(measure.tile_of).rows(found)
    known = derive(table, AT)
    assert table.shape == (len(found), len(ROW_NAMES)) and known.x.shape == (len(found), len(NAMES))
    assert np.isfinite(table).all() and np.isfinite(known.x).all() and (known.roofline.seconds > 0).all()
    told = [FAMILIES[k] for k in families(table)]
    assert set(told[1::2]) == {"library"}
    own = {"pointwise": {"pointwise"}, "broadcast": {"broadcast"}}.get(family, {family})
    assert set(told[::2]) == own


def test_a_recurrent_layer_has_features() -> None:
    table = RowCache(measure.tile_of).rows([Candidate(lstm(), {}, CORE)])
    assert FAMILIES[families(table)[0]] == "recurrent" and np.isfinite(derive(table, AT).x).all()
    assert table[0, COLUMN["steps"]] == 5


def test_no_candidates_no_predictions() -> None:
    row_cache = RowCache(measure.tile_of)
    assert len(CostPredictor(model.fit(invented(30), AT), AT, row_cache).predict([]).seconds) == 0


def test_more_rows_take_longer() -> None:
    problem = drawn(1, "contraction")[0]
    table = RowCache(measure.tile_of).rows([Candidate(problem.graph, {"n": n}, CORE) for n in (2, 20, 200)])
    seconds = least(table, AT).seconds
    assert seconds[0] < seconds[1] < seconds[2]
    assert (np.diff(table[:, COLUMN["mma"]]) > 0).all()


def test_rows_are_the_same_however_they_come_about() -> None:
    """Kept rows of nodes, in any order and company, give what a new row_cache gives."""
    found = candidates(drawn(10))
    row_cache = RowCache(measure.tile_of)
    together = row_cache.rows(found)
    again = row_cache.rows(found[::-1])[::-1]
    alone = np.vstack([RowCache(measure.tile_of).rows([c]) for c in found])
    assert np.array_equal(together, again) and np.array_equal(together, alone)


def test_the_tile_is_the_one_lowering_chooses() -> None:
    tile = measure.tile_of(CORE, 512, 96, 64)
    small = measure.tile_of(Core(16, 16), 512, 96, 64)
    assert (tile.rows, tile.vectors) == (512 / 57, 3) and tile.padding == 0.0  # 57 blocks of 9 rows, or 8
    assert small.vectors <= 2


def test_work_that_depends_on_data_is_refused() -> None:
    problem = drawn(1, "pointwise")[0]
    with pytest.raises((UnknownWork, KeyError)):
        RowCache(measure.tile_of).rows([Candidate(problem.graph, {}, CORE)])


@pytest.mark.parametrize("few", [1, 10**9])
def test_a_forest_predicts_what_scikit_learn_predicts_and_survives_the_store(few: int, tmp_path: Path) -> None:
    from sklearn.ensemble import ExtraTreesRegressor, GradientBoostingRegressor

    r = np.random.default_rng(0)
    x = r.normal(size=(300, len(NAMES)))
    y = x[:, 0] * 2 + np.sin(x[:, 1])
    grown = forest.grow(x, y, few=few)
    boosted = GradientBoostingRegressor(**forest.BOOSTED, random_state=0)
    kind = boosted if few == 1 else ExtraTreesRegressor(**forest.EXTRA, random_state=0)
    fresh = r.normal(size=(57, len(NAMES)))
    want = kind.fit(x.astype(np.float32), y).predict(fresh.astype(np.float32))
    assert np.abs(grown.predict(fresh) - want).max() < 1e-9
    with Store.open(tmp_path / "p.sqlite") as store:
        store.save_model("f", grown.arrays())
        kept = store.load_model("f")
    assert kept is not None
    assert np.array_equal(forest.from_arrays(kept.arrays, len(NAMES)).predict(fresh), grown.predict(fresh))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("feature", lambda a: a + 10_000), ("first", lambda a: a + 10**6), ("first", lambda a: -a - 1),
        ("value", lambda a: a * np.nan), ("roots", lambda a: a + 10**6), ("value", lambda a: a[:-1]),
        ("threshold", lambda a: np.zeros_like(a)),
    ],
)  # fmt: skip
def test_numbers_that_are_no_forest_are_refused(name: str, change: object) -> None:
    r = np.random.default_rng(0)
    arrays = forest.grow(r.normal(size=(60, len(NAMES))), r.normal(size=60)).arrays()
    arrays[name] = change(arrays[name])  # type: ignore[operator]
    with pytest.raises(ValueError):
        forest.from_arrays(arrays, len(NAMES))


def test_a_model_learns_predicts_and_is_versioned(tmp_path: Path) -> None:
    train = invented(120)
    made = model.fit(train, AT)
    unseen = invented(20, seed=9)
    score = model.accuracy(unseen.seconds, made.seconds(derive(unseen.table, AT)))
    alone = evaluation.roofline_alone(unseen, AT)
    assert score["mape"] < 0.1 < alone["mape"]
    with Store.open(tmp_path / "p.sqlite") as store:
        machine = store.machine(fingerprint())
        assert [model.save(store, made, machine) for _ in range(2)] == [1, 2]
        back = model.load(store, machine)
        assert back is not None and back.version == 2
        assert np.array_equal(back.seconds(derive(unseen.table, AT)), made.seconds(derive(unseen.table, AT)))
        assert model.load(store, machine + 1) is None


def test_a_model_of_other_features_is_left_aside(tmp_path: Path) -> None:
    made = model.fit(invented(30), AT)
    with Store.open(tmp_path / "p.sqlite") as store:
        store.save_model(model.NAME, {**made.forest.arrays(), "width": made.width}, {**made.facts, "features": ["a"]})
        assert model.load(store) is None and any("other features" in n for n in store.notes)
        store.notes.clear()
        store.save_model(model.NAME, {**made.forest.arrays(), "width": made.width[:2]}, made.facts)
        assert model.load(store) is None and any("left aside" in n for n in store.notes)


def test_predictions_stay_above_the_roof_and_say_more_than_time() -> None:
    train = invented(60)
    made = model.fit(train, AT)
    below = PerformanceModel(forest.Forest(made.forest.feature, made.forest.threshold, made.forest.first, made.forest.value - 9,
                                made.forest.roots, made.forest.depth, made.forest.base, made.forest.scale), made.width)  # fmt: skip
    found = derive(train.table, AT)
    assert (below.seconds(found) >= found.roofline.bound * (1 - 1e-9)).all()
    said = CostPredictor(made, AT, RowCache(measure.tile_of)).of_rows(train.table)
    assert (said.low_s <= said.seconds).all() and (said.seconds <= said.high_s).all()
    assert (
        (said.joules > 0).all()
        and (said.cycles > 0).all()
        and (said.memory > 0).all()
        and said.energy_source == "estimated"
    )


def test_stated_intervals_hold_on_problems_that_were_not_seen() -> None:
    r = np.random.default_rng(1)
    train, unseen = invented(150), invented(80, seed=5)
    noisy = TrainingRows(train.table, train.seconds * np.exp(r.normal(0, 0.1, len(train))), train.noise, train.group)
    made = model.fit(noisy, AT)
    found = derive(unseen.table, AT)
    predicted = made.seconds(found)
    off = np.abs(np.log(unseen.seconds * np.exp(r.normal(0, 0.1, len(unseen))) / predicted))
    assert 0.65 < (off <= made.widths(found, predicted)).mean() < 0.95


# --- forests and what judges them -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 17])
def test_any_number_of_rows_walks_down_the_same_leaves(rows: int) -> None:
    r = np.random.default_rng(rows)
    x = r.normal(size=(200, 5))
    grown = forest.grow(x, x[:, 0] + x[:, 1] ** 2)
    fresh = r.normal(size=(rows, 5)).astype(np.float32)
    total = np.zeros(rows)
    for k in range(rows):
        for root in grown.roots:
            at = int(root)
            while grown.first[at] != at:
                at = int(grown.first[at]) + int(fresh[k, grown.feature[at]] > grown.threshold[at])
            total[k] += grown.value[at]
    assert np.abs(grown.predict(fresh) - (grown.base + grown.scale * total)).max() < 1e-12


def test_forests_that_do_not_fit_the_native_form_are_refused() -> None:
    far = np.array([tree_walk.MAX_FEATURES])
    with pytest.raises(ValueError, match="columns"):
        tree_walk.packed(far, np.zeros(1, np.float32), np.zeros(1, np.int64))


def test_drift_is_judged_by_all_bars_and_harm_by_what_there_was_without_a_correction() -> None:
    r = np.random.default_rng(5)
    problems = [p for f in ("pointwise", "reduction", "contraction") for p in drawn(6, f)]
    table = RowCache(measure.tile_of).rows([Candidate(p.graph, s, CORE) for p in problems for s in p.sizes] * 4)
    predicted = least(table, AT).seconds + 2e-5
    samples = TrainingRows(
        table, predicted * np.exp(r.normal(0, 0.05, len(table))), np.zeros(len(table)), np.arange(len(table))
    )
    found = hpm_selection.drift_samples(samples, predicted, AT, most=40)
    assert found.samples["nothing"] == 0 and found.worst <= 1 + hpm_selection.HARM and not found.lost
    assert 0 < found.error_only["everything"] <= found.samples["everything"] <= 20
    harmful = predicted * np.where(
        np.arange(len(table)) % 2, 1.0, 1.8
    )  # misses half of everything: no bar is kept anyway
    assert hpm_selection.drift_samples(samples, harmful, AT, most=30).worst >= 1.0


# --- calibration -------------------------------------------------------------------------------------------------------------


def quick(store: Store, problems: list[Problem]) -> Calibration:
    at = Host(store.machine(fingerprint()), host_core(host()), machine_roofline(None, topology(), 16))
    return Calibration(store, at, Here(), problems=problems)


def small(count: int) -> list[Problem]:
    return [Problem(p.family, p.graph, ({"n": 2}, {"n": 5})) for p in drawn(count, "pointwise")]


def test_calibration_goes_on_where_it_stopped(tmp_path: Path) -> None:
    with Store.open(tmp_path / "p.sqlite") as store:
        first = quick(store, small(3))
        added = first.step(100, passes=2)
        assert added == first.report.measured >= 6
        kept = store.measurements(machine=first.host.machine)
        assert len(kept) == added and all(m.time_ns > 0 for m in kept)
    with Store.open(tmp_path / "p.sqlite") as store:
        second = quick(store, small(4))
        assert second.step(100, passes=2) == second.report.measured
        assert second.report.skipped == added, "what is in the store is not measured again"
        assert len(store.measurements()) == added + second.report.measured


def test_an_interrupt_keeps_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = measure.timed, itertools.count()

    def interrupted(*args: object, **kwargs: object) -> None:
        if next(calls):
            raise KeyboardInterrupt
        real(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr("hotfuse.compile.learn.calibrate.timed", interrupted)
    monkeypatch.setattr("hotfuse.compile.learn.calibrate.BATCH", 4)
    monkeypatch.setattr("hotfuse.backends.llvm.peak_kernels.measure", lambda *_a: pytest.fail("peaks are known"))
    monkeypatch.setattr(
        "hotfuse.compile.learn.calibrate.this_host", lambda s, *_a: Host(s.machine(fingerprint()), host_core(host()), AT)
    )
    with Store.open(tmp_path / "p.sqlite") as store:
        report = calibrate(store, 60.0, executor=Here(), problems=small(12))
        assert report.interrupted and report.measured > 0 and report.model is None
        assert len(store.measurements()) == report.measured


def test_idle_slices_add_rows_bit_by_bit(tmp_path: Path) -> None:
    with Store.open(tmp_path / "p.sqlite") as store:
        at = Host(store.machine(fingerprint()), host_core(host()), AT)
        work = Slice(store, at, Here(), kernels=2)
        for _ in range(2000):
            work.step()
            if work.report.measured:
                break
        assert work.report.measured > 0 and len(store.measurements()) == work.report.measured


def test_problems_are_drawn_alike_and_cover_every_family() -> None:
    first, second = drawn(60), drawn(60)
    assert [p.key for p in first] == [p.key for p in second] and len({p.key for p in first}) == 60
    assert {p.family for p in first} >= {"pointwise", "broadcast", "reduction", "contraction", "convolution"}
    ways = list(itertools.islice(items(first, CORE), 200))
    assert any(i.core is None for i in ways) and len({i.core for i in ways}) > 3


def test_bound_kernels_compute_what_the_library_computes() -> None:
    import torch

    for family in ("pointwise", "reduction", "contraction", "convolution"):
        p = drawn(1, family)[0]
        sizes = p.sizes[0]
        candidate, shelf = Candidate(p.graph, sizes, CORE), measure.Shelf()
        bound = measure.bind(candidate, p.key, measure.make(p.graph, host_core(host())), shelf)
        bound.call()
        data, weights, out = shelf.of(candidate, p.key)
        inputs = [data[v.name] for v in p.graph.inputs]
        from hotfuse.backends.library import LibraryBackend

        with torch.no_grad():
            want = LibraryBackend().compile(p.graph, weights).run(*inputs)
        torch.testing.assert_close(out[0], want[0], rtol=1e-3, atol=1e-3)


# --- the estimator ---------------------------------------------------------------------------------------------------------------


def test_units_are_valued_by_the_model_where_the_store_holds_one(tmp_path: Path) -> None:
    work = Work(2, 1000, 1000, 1000, 10)
    plain = Facts("rows", work, 50e-6, 10e-6)
    assert Learned()(plain) == RooflineEstimator()(plain), "no prediction: by rooflines"
    predicted = Facts("rows", work, 50e-6, 10e-6, "", 20e-6, 24e-6)
    assert Learned()(predicted).saving_s == pytest.approx(28e-6)
    assert Learned()(Facts("rows", work, 50e-6, 10e-6, "", 80e-6, 90e-6)).saving_s == 0.0
    with Store.open(tmp_path / "p.sqlite") as store:
        assert learned.Foresight.of(store) is None
        machine = store.machine(fingerprint())
        model.save(store, model.fit(invented(60), AT), machine)
        ahead = learned.Foresight.of(store)
        assert ahead is not None
        p = drawn(1, "contraction")[0]
        seen = ahead.of_group(p.graph, p.sizes[0])
        assert seen is not None and 0 < seen.kernel_s <= seen.high_s and seen.library_s > 0
        assert ahead.of_group(p.graph, {}) is None and ahead.unknown == 1


def test_nothing_of_the_model_is_pickled() -> None:
    for name, module in sys.modules.items():
        if name.startswith(("hotfuse.hpm", "hotfuse.profile")):
            assert not {"pickle", "joblib", "cloudpickle"} & set(vars(module)), name


# --- judging ------------------------------------------------------------------------------------------------------------------


def test_regret_is_scored_on_other_labels() -> None:
    lucky = hpm_selection.SelectionTrial(np.array([1.0, 2.0]), np.array([1.1, 1.0]), np.array([1.0, 1.1]))
    assert hpm_selection.regret([lucky])[0] == 0.0
    wrong = hpm_selection.SelectionTrial(np.array([1.0, 2.0]), np.array([2.0, 1.0]), np.array([2.0, 1.0]))
    assert hpm_selection.regret([wrong])[0] == 1.0 and hpm_selection.regret([wrong], top=2)[0] == 0.0
    assert hpm_selection.pair_accuracy([wrong]) == 0.0 and np.isnan(hpm_selection.pair_accuracy([lucky]))


# --- commands ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "wanted"), [("60s", 60.0), ("3m", 180.0), ("90", 90.0)])
def test_budgets_are_times(text: str, wanted: float) -> None:
    assert seconds(text) == wanted


@pytest.mark.parametrize("text", ["", "s", "fast", "0", "-5s", "nan", "99h"])
def test_budgets_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(InputError):
        seconds(text)


def test_without_a_model_the_command_says_what_to_do(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from hotfuse.cli import app

    path = tmp_path / "p.sqlite"
    missing = CliRunner().invoke(app, ["hpm", "--store", str(path), "--json"])
    Store.open(path).close()
    empty = CliRunner().invoke(app, ["hpm", "--store", str(path), "--json"])
    assert (missing.exit_code, empty.exit_code) == (2, 0)
    assert (
        "hotfuse calibrate" in missing.output
        and "no performance model" in empty.output
        and '"drift": []' in empty.output
    )
