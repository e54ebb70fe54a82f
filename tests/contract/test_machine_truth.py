"""Counters, energy and drift: what is there is counted, what is not says why, what is guessed is labelled."""

from __future__ import annotations

import errno
import time
from pathlib import Path

import pytest

from hotfuse.machine import counters as counting
from hotfuse.machine import energy as metering
from hotfuse.machine.assumed import assumed_core
from hotfuse.machine.counters import EVENTS, Counters, availability
from hotfuse.machine.energy import EnergyMeter, nvml_meters, rapl_meters, watts_per_core
from hotfuse.machine.speed_drift import IN_A_ROW, DriftWatch, ProbeRun, SpeedChange
from hotfuse.machine.topology import stated_hz, topology
from hotfuse.profile.rows import SpeedRow
from hotfuse.profile.store import Store
from hotfuse.runtime.tierup.objective import CoreSeconds

# --- counters


def work() -> int:
    return sum(i * i for i in range(200_000))


def test_every_event_is_counted_or_says_why_not() -> None:
    counters = Counters()
    assert (
        set(counters.names) | counters.missing.keys() == set(EVENTS)
        and not set(counters.names) & counters.missing.keys()
    )
    assert all(counters.missing.values())
    assert {n for n, why in availability().items() if not why} == set(counters.names)
    with counters:
        work()
    first = counters.read()
    assert counters.read() == first, "stopped counters stand still"
    for name, count in first.items():
        assert count.value >= 0 and 0 < count.share <= 1, name
    counters.close()
    assert counters.names == ()


def test_the_clock_of_the_thread() -> None:
    counters = Counters(("task_clock_ns",))
    if not counters.names:
        pytest.skip(f"task_clock_ns: {counters.missing['task_clock_ns']}")
    start = time.thread_time_ns()
    with counters:
        work()
    taken = time.thread_time_ns() - start
    once = counters.read()["task_clock_ns"].value
    assert 0.3 * taken < once <= taken * 1.5
    with counters:
        pass
    assert counters.read().get("task_clock_ns", counting.Count(0, 1)).value < once / 2, "a start begins at zero"
    counters.close()


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (errno.ENOENT, "does not offer"),
        (errno.EACCES, "paranoid"),
        (errno.ENOSYS, "no perf_event_open"),
        (errno.EMFILE, "many"),
    ],
)
def test_refusals_are_kept_per_event(monkeypatch: pytest.MonkeyPatch, code: int, says: str) -> None:
    import os

    def refuse(kind: int, number: int, *, inherit: bool) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(counting, "_open", refuse)
    counters = Counters()
    with counters:
        work()
    assert counters.read() == {} and all(says in why for why in counters.missing.values())


# --- energy


def powercap(root: Path, zones: dict[str, dict[str, str]]) -> Path:
    for zone, files in zones.items():
        (root / zone).mkdir()
        for name, text in files.items():
            (root / zone / name).write_text(text + "\n")
    return root


def test_rapl_counts_packages_and_goes_round(tmp_path: Path) -> None:
    package = {"name": "package-0", "energy_uj": "1000000", "max_energy_range_uj": "5000000"}
    root = powercap(tmp_path, {"intel-rapl:0": package, "intel-rapl:0:0": package | {"name": "core"}, "other": {}})
    (meter,), why = rapl_meters(root)
    assert meter.name == "cpu package-0" and why == ""
    clock = CoreSeconds([meter])
    (root / "intel-rapl:0" / "energy_uj").write_text("3500000")
    first = clock()
    assert first * watts_per_core() == pytest.approx(2.5) and clock.source == "measured"
    (root / "intel-rapl:0" / "energy_uj").write_text("500000")
    assert (clock() - first) * watts_per_core() == pytest.approx(2.0)


def test_power_and_frequency_are_what_the_system_states(tmp_path: Path) -> None:
    package = {"constraint_0_power_limit_uw": "90000000"}
    top = topology()
    cores = top.physical_cores or top.logical_cpus
    stated = powercap(tmp_path, {"intel-rapl:0": package, "intel-rapl:0:0": package, "intel-rapl:1": package})
    assert watts_per_core(stated) == pytest.approx(180 / cores), "parts inside a package are counted with it"
    assert watts_per_core(tmp_path / "none") == assumed_core().watts
    (tmp_path / "cpuinfo").write_text("processor\t: 0\ncpu MHz\t\t: 2100.5\nprocessor\t: 1\ncpu MHz\t\t: 1800.0\n")
    assert stated_hz(tmp_path, tmp_path) == pytest.approx(2.1005e9)
    assert stated_hz(tmp_path, tmp_path / "none") == assumed_core().hz
    cpufreq = tmp_path / "devices/system/cpu/cpu0/cpufreq"
    cpufreq.mkdir(parents=True)
    (cpufreq / "cpuinfo_max_freq").write_text("3400000\n")
    assert stated_hz(tmp_path, tmp_path / "other") == pytest.approx(3.4e9)


def test_no_meter_says_why_and_energy_is_estimated(tmp_path: Path) -> None:
    assert rapl_meters(tmp_path) == ([], f"there is no RAPL under {tmp_path}")
    assert nvml_meters("libnothing.so.7")[0] == [] and "libnothing" in nvml_meters("libnothing.so.7")[1]
    assert nvml_meters("libc.so.6")[0] == [] and "nvmlInit" in nvml_meters("libc.so.6")[1]
    clock, start = CoreSeconds([]), time.process_time()
    work()
    assert clock.source == "estimated" and clock() >= start


def test_a_gpu_alone_does_not_stand_for_the_processor() -> None:
    assert CoreSeconds([EnergyMeter("gpu 0", lambda: 5, 1e-3)]).source == "estimated"


def test_meters_of_this_machine() -> None:
    found, missing = metering.meters()
    assert ("rapl" in missing) != any(m.name.startswith("cpu") for m in found)
    for meter in found:
        assert meter.read() >= 0


# --- drift


class Machine:
    """Speeds that a test sets."""

    def __init__(self) -> None:
        self.now = {"fma": 1e-4, "l2": 2e-4}
        self.at = 0.0

    def __call__(self) -> dict[str, float]:
        self.at += 1.0
        return dict(self.now)


def test_a_change_that_holds_is_told_once() -> None:
    machine, looks, told = Machine(), list[ProbeRun](), list[SpeedChange]()
    watch = DriftWatch(machine, {"fma": 1e-4}, looks.extend, told.append, clock=lambda: machine.at)
    for _ in range(10):
        watch.look()
    assert told == [] and len(looks) == 20 and watch.baseline["l2"] == 2e-4
    machine.now["fma"] = 1.4e-4
    for _ in range(10):
        watch.look()
    (change,) = told
    assert change.probe == "fma" and change.ratio == pytest.approx(1.4) and change.at == 9 + IN_A_ROW
    assert watch.ratio("fma") == pytest.approx(1.4) and watch.ratio("l2") == 1.0
    machine.now["fma"] = 1e-4
    for _ in range(10):
        watch.look()
    assert len(told) == 2 and told[1].ratio == pytest.approx(1.0)


def test_single_outliers_and_noise_are_no_drift() -> None:
    machine, told = Machine(), list[SpeedChange]()
    watch = DriftWatch(machine, {"fma": 1e-4, "l2": 2e-4}, lambda looks: None, told.append)
    for i in range(60):
        machine.now = {"fma": 9e-4 if i % 5 == 0 else 1e-4, "l2": 2e-4 * (1 + 0.1 * (i % 2))}
        watch.look()
    assert told == []


def test_looks_are_recorded_in_the_store(tmp_path: Path) -> None:
    machine, store = Machine(), Store.open(tmp_path / "p.sqlite")

    def record(looks: list[ProbeRun]) -> None:
        store.record_drift([SpeedRow(one.probe, one.seconds, one.baseline, one.at) for one in looks])

    watch = DriftWatch(machine, {"fma": 5e-5}, record, clock=lambda: 100.0 + machine.at)
    watch.look()
    assert [(d.probe, d.ratio, d.at) for d in store.drift(probe="fma")] == [("fma", 2.0, 100.0)]


def test_the_thread_outlives_errors_and_ends_when_told() -> None:
    calls: list[int] = []

    def probe() -> dict[str, float]:
        calls.append(1)
        if len(calls) % 2:
            raise OSError("no")
        return {"fma": 1.0}

    watch = DriftWatch(probe, {}, lambda looks: None, interval_s=0.001)
    watch.start()
    watch.start()
    end = time.monotonic() + 100
    while len(calls) < 6 and time.monotonic() < end:
        time.sleep(0.001)
    watch.stop()
    seen = len(calls)
    assert seen >= 6 and watch.errors["OSError"] >= 3 and watch.looks >= 2
    time.sleep(0.01)
    assert len(calls) == seen
