"""The watch over the machine's speed, put together: probe, store, decisions."""

from __future__ import annotations

from pathlib import Path

import pytest

import hotfuse.backends.llvm.peak_kernels as peaks_module
from hotfuse.backends.llvm.peak_kernels import MicroProbe
from hotfuse.base.events import EventLog, Why
from hotfuse.machine.fingerprint import Fingerprint
from hotfuse.machine.peaks import Bandwidth, MachinePeaks, Rate
from hotfuse.profile.store import Store
from hotfuse.runtime.observe.speed import speed_watch

WHO = Fingerprint((("arch", "x"),), (("cores", "2"),))


class Slow(MicroProbe):
    """The real probe with a factor on its times."""

    factor = 1.0

    def __call__(self) -> dict[str, float]:
        return {n: self.baseline(PEAKS)[n] * self.factor for n in super().__call__()}


PEAKS = MachinePeaks("x", (Rate("f32", 1, 1e11, 0.0),), (Bandwidth("L2", "read", 1, 1e11, 0.0, 1024),), (), 50.0, 1.0, 1.0, (), 3e9)


def test_a_slower_machine_is_recorded_and_decided_on(tmp_path: Path) -> None:
    log, probe = EventLog(), Slow(tries=1)
    with Store.open(tmp_path / "p.sqlite") as store:
        machine = store.machine(WHO, PEAKS.to_dict())
        watch = speed_watch(store, log, who=WHO, probe=probe)
        for _ in range(4):
            watch.look()
        assert not log.decisions
        probe.factor = 1.6
        for _ in range(4):
            watch.look()
        assert [(d.why, d.evidence["probe"], d.evidence["slower_by"]) for d in log.decisions] == [
            (Why.SPEED_CHANGED, "fma", 1.6), (Why.SPEED_CHANGED, "l2", 1.6), (Why.SPEED_CHANGED, "clock", 1.6),
        ]  # fmt: skip
        kept = store.drift(machine=machine, probe="fma")
        assert [d.ratio for d in kept] == pytest.approx([1.6] * 4 + [1.0] * 4)


def test_without_peaks_the_first_look_is_the_measure(tmp_path: Path) -> None:
    log = EventLog()
    with Store.open(tmp_path / "p.sqlite") as store:
        assert speed_watch(store, log, who=WHO, probe=Slow(tries=1)).look()[0].ratio == 1.0
        store.machine(WHO, {"target": "damaged"})
        assert speed_watch(store, log, who=WHO, probe=Slow(tries=1)).look()[0].ratio == 1.0
    assert [d.why for d in log.decisions] == [Why.STORE_DAMAGED]


def test_the_real_probe(tmp_path: Path) -> None:
    with Store.open(tmp_path / "p.sqlite") as store:
        watch = speed_watch(store, EventLog(), interval_s=0.001)
        watch.start()
        while watch.looks < 3 and not watch.errors:
            pass
        watch.stop()
        assert not watch.errors and {d.probe for d in store.drift()} == {"fma", "l2", "clock"}


def test_nothing_is_compiled_before_the_first_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store is opened when a plan is about to be made, and calls wait for that one."""
    asked: list[object] = []

    def functions(target: object) -> object:
        asked.append(target)
        return made(target)  # pyright: ignore[reportArgumentType]

    made = peaks_module._functions  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(peaks_module, "_functions", functions)
    with Store.open(tmp_path / "p.sqlite") as store:
        store.machine(WHO, PEAKS.to_dict())
        watch = speed_watch(store, EventLog(), who=WHO)
        assert watch.baseline and not asked
        for _ in range(2):
            assert {one.probe for one in watch.look()} == watch.baseline.keys()
    assert len(asked) == 1
