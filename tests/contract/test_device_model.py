"""The performance model of a device: kernels on paper, what is learned of how long they take, and what is compiled by it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hotfuse.backends import registry
from hotfuse.base.errors import CaptureError
from hotfuse.base.settings import Settings
from hotfuse.compile.answer_bodies import DeviceTimesAnswer, DeviceUnitAnswer, message, received, refusal
from hotfuse.compile.device import units
from hotfuse.compile.device.described import untaught
from hotfuse.compile.learn import device_times, learned
from hotfuse.compile.learn.device_times import COMPILED_TILINGS, program_shape
from hotfuse.compile.request_bodies import DeviceKernelTime, DeviceTimesRequest, DeviceUnitRequest, request_of
from hotfuse.compile.requests import answer
from hotfuse.hpm import fleet
from hotfuse.hpm.device import kernel_model
from hotfuse.hpm.device.features import DeviceShape, features, shape_from, table_of
from hotfuse.hpm.device.kernel_model import TimedWork, device_fingerprint
from hotfuse.hpm.device.problems import device_problems
from hotfuse.hpm.device.work import NAMES, work_of
from hotfuse.ir.graph import Graph
from hotfuse.ir.normal import normalized
from hotfuse.ir.text import parse, show
from hotfuse.lower.gpu import GpuTiling, gpu_tilings, lower_gpu
from hotfuse.profile.store import Store
from hotfuse.profile.store_place import location
from tests.contract.kernel_work import kernel_work

SHAPE = DeviceShape(132, 227 << 10, 60 << 20, 7.6e14, 5.1e13, 4.3e12, 3.9e12)
DEVICE = "a device of tests"
LINEAR = """graph group(%v0: f16[200, 320]) {
  param %v1: f16[96, 320] = "k0"
  %v2: f16[200, 96] = aten.linear.default(%v0, %v1)
  return %v2
}
"""


def works(graph: Graph) -> list[tuple[GpuTiling, dict[str, float]]]:
    return [(t, work_of(lower_gpu(graph, t).kernel, program_shape(t))) for t in gpu_tilings(graph, bulk=True, every=True)]


def test_a_product_on_paper_is_what_its_tiles_are() -> None:
    assert works(parse(LINEAR))
    for tiling, work in works(parse(LINEAR)):
        rows, columns = math.ceil(200 / tiling.rows), math.ceil(96 / tiling.columns)
        assert work["programs"] == rows * columns * tiling.split, str(tiling)
        padded = rows * tiling.rows * columns * tiling.columns * math.ceil(320 / tiling.depth) * tiling.depth
        assert work["multiply_adds"] * work["programs"] == padded, str(tiling)
        assert work["distinct"] == 2 * (200 * 320 + 96 * 320 + 200 * 96)
        assert work["aligned"] == 16 and work["width"] == 2 and work["sums"] == tiling.rows * tiling.columns
        assert work["rounds"] * tiling.split == math.ceil(320 / tiling.depth)
        assert work["stored"] == 2 * tiling.rows * tiling.columns


def test_rows_with_an_odd_pitch_are_not_read_in_vectors() -> None:
    odd = parse(LINEAR.replace("320", "321"))
    assert {work["aligned"] for _, work in works(odd)} == {2.0}


def test_every_drawn_problem_is_counted_and_predicted_to_take_some_time() -> None:
    drawn = list(itertools.islice(device_problems(5), 24))
    assert [show(g) for g in drawn] == [show(g) for g in itertools.islice(device_problems(5), 24)]
    for graph in drawn:
        found = [work for _, work in works(normalized(graph))]
        assert found and all(work.keys() == set(NAMES) and all(np.isfinite(v) for v in work.values()) for work in found)
        x, guess = features(table_of(found), SHAPE)
        assert np.isfinite(x).all() and (guess > 0).all(), show(graph)


def test_a_row_says_what_its_kernel_executes() -> None:
    """By a second walk of the same tile programs, round by round: decision 274."""
    for graph in map(normalized, itertools.islice(device_problems(5), 24)):
        for tiling in gpu_tilings(graph, bulk=True, every=True):
            kernel = lower_gpu(graph, tiling).kernel
            row, executed = work_of(kernel, program_shape(tiling)), kernel_work(kernel, {})
            mapped = sum(made for op, made in executed.elements.items() if op.startswith("map."))
            assert row["programs"] * row["multiply_adds"] == pytest.approx(executed.multiply_adds), str(tiling)
            assert row["programs"] * (row["light"] + row["heavy"]) == pytest.approx(mapped), str(tiling)


def law(work: dict[str, float]) -> float:
    """A device that reads what programs load, and computes what they multiply."""
    turns = max(1.0, work["programs"] / 264)
    return 2e-6 + turns * (work["loaded"] / 3e10 + work["multiply_adds"] / 2e12)


def rows(count: int, seconds: Any = law) -> list[TimedWork]:
    found: list[TimedWork] = []
    for number, graph in enumerate(device_problems(7)):
        if len(found) >= count:
            return found
        some = works(normalized(graph))[number % 3 :: 3]
        alike = {repr(work): work for _, work in some}  # some tilings come to the same
        found += [TimedWork(f"p{number}", work, seconds(work)) for work in alike.values()]
    raise AssertionError


@pytest.mark.budget_s(4)
def test_problems_that_it_has_not_seen_are_foreseen_and_ranked() -> None:
    made = kernel_model.fit(rows(420), SHAPE)
    held = made.facts["held_out"]
    assert held["median"] < 0.2 and held["regret"] < 0.1 and made.chooses, held
    unseen = [work for _, work in works(parse(LINEAR))]
    predicted, took = made.seconds(unseen), np.array([law(w) for w in unseen])
    assert took[int(predicted.argmin())] < np.median(took)


@pytest.mark.budget_s(4)
def test_a_model_of_chance_is_left_aside() -> None:
    rng = np.random.default_rng(3)
    made = kernel_model.fit(rows(330, lambda _work: float(np.exp(rng.normal(-11, 1)))), SHAPE)
    assert made.facts["held_out"]["regret"] > kernel_model.MAX_REGRET and not made.chooses


@pytest.mark.budget_s(4)
def test_kept_and_read_back_and_a_damaged_one_is_left_aside(tmp_path: Path) -> None:
    some = rows(320)
    with Store.open(tmp_path / "profiles.sqlite") as store:
        machine = store.machine(device_fingerprint(DEVICE, "cuda 90"), SHAPE.to_dict())
        assert kernel_model.record(store, machine, some, "calibrate") == len(some)
        back = kernel_model.recorded(store, machine)
        assert sorted(r.problem for r in back) == sorted(r.problem for r in some)
        assert sorted(r.seconds for r in back) == pytest.approx(sorted(r.seconds for r in some))
        assert kernel_model.due(store, machine, len(back)) and not kernel_model.due(store, machine, kernel_model.MIN_ROWS - 1)
        made = kernel_model.fit(back, SHAPE)
        assert kernel_model.save(store, made, machine) == 1 and not kernel_model.due(store, machine, len(back) + 1)
        read = kernel_model.load(store, machine)
        assert read is not None and read.shape == SHAPE and read.version == 1
        assert np.allclose(read.seconds([r.work for r in some]), made.seconds([r.work for r in some]))
        store.save_model(kernel_model.NAME, {**made.forest.arrays(), "feature": np.full(3, 999, np.int32)}, made.facts, machine)
        assert kernel_model.load(store, machine) is None and any("left aside" in n for n in store.notes)
        assert fleet.machines(store) == []  # a device says nothing of processors


@pytest.mark.parametrize("damage", [{"processors": 0}, {"memory": "fast"}, {"cache": None}])
def test_what_describes_no_device_is_refused(damage: dict[str, Any]) -> None:
    assert shape_from(SHAPE.to_dict()) == SHAPE
    with pytest.raises(ValueError, match="describes no device"):
        shape_from({**SHAPE.to_dict(), **damage})


@pytest.fixture
def settings(tmp_path: Path) -> Iterator[Settings]:
    learned.forget()
    device_times._read.clear()
    yield Settings(cache_dir=tmp_path, profiles=str(tmp_path / "profiles.sqlite"))
    learned.flush()
    learned.forget()
    device_times._read.clear()


def times(some: list[TimedWork]) -> DeviceTimesRequest:
    measured = tuple(DeviceKernelTime(r.problem, r.work, r.seconds) for r in some)
    return DeviceTimesRequest(DEVICE, "cuda 90", SHAPE.to_dict(), measured)


def asked(body: Any, settings: Settings) -> tuple[dict[str, Any], list[bytes]]:
    return answer(request_of(body, settings).header(), [])


@pytest.mark.budget_s(8)
def test_workers_learn_from_trials_and_compile_what_is_likely(settings: Settings) -> None:
    unit = DeviceUnitRequest(LINEAR, {}, ("cuda", "90", 32), tf32=False, share=(0, 1), device=DEVICE)
    some = rows(330)
    first, _ = received(asked(times(some[:100]), settings), DeviceTimesAnswer)
    assert (first.rows, first.model) == (100, None)
    second, _ = received(asked(times(some[100:]), settings), DeviceTimesAnswer)
    assert second.rows == len(some) and second.model == 1 and second.chooses, second
    again, _ = received(asked(times(some[:3]), settings), DeviceTimesAnswer)
    assert again.rows == len(some) and again.model is None  # the same kernels teach nothing new
    with Store.open(location(settings)) as store:
        (kept,) = [m for m in store.machines() if m.is_device]
        assert kept.identity["device"] == DEVICE
    if registry.device_kernels().unavailable():
        return
    likely, codes = received(asked(unit, settings), DeviceUnitAnswer)
    plain, _ = received(asked(replace(unit, device="another"), settings), DeviceUnitAnswer)
    assert len(codes) == COMPILED_TILINGS < len(plain.kernels)
    assert (likely.by, plain.by) == (units.BY_MODEL, units.BY_COUNT)
    best = sorted((law(work), str(t)) for t, work in works(parse(LINEAR)))
    assert {k.tiling for k in likely.kernels} & {t for _, t in best[: len(best) // 2]}
    wanted = best[-1][1]  # which nobody would choose by the model
    once, _ = received(asked(replace(unit, wanted=wanted), settings), DeviceUnitAnswer)
    assert [k.tiling for k in once.kernels] == [wanted] and once.by == units.BY_WINNER


def test_without_a_store_nothing_is_kept_and_a_count_decides() -> None:
    told, _ = received(asked(times(rows(20)), Settings(record=False, profiles=":memory:")), DeviceTimesAnswer)
    assert told.rows == 0 and "no store" in told.because


def test_a_note_says_where_times_were_not_kept() -> None:
    def done(result: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(result)
        return future

    assert untaught(None) == untaught(Future()) == untaught(done(message(DeviceTimesAnswer(3)))) == ""
    assert untaught(done(asked(times(rows(20)), Settings(record=False, profiles=":memory:")))).endswith("no store to write to")
    assert untaught(done(refusal(CaptureError("a worker", because="it was killed")))).endswith("it was killed")
