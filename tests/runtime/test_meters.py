"""Hardware counters in the records of sampled calls: those of a made-up processor, as this one may have none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hotfuse import Settings
from hotfuse.ir.text import parse
from hotfuse.ir.verify import verify
from hotfuse.machine.counters import Count
from hotfuse.pipeline import compile_tier0
from hotfuse.profile.names import Names
from hotfuse.profile.records import Batch, Flag, RecordKind, split
from hotfuse.runtime.observe import instrument
from hotfuse.runtime.observe.meters import EVENTS, Meters, part_of


class Fake:
    """Counters that count as they are told."""

    def __init__(self, events: tuple[str, ...], missing: tuple[str, ...] = ()) -> None:
        self.names = tuple(e for e in events if e not in missing)
        self.calls: list[str] = []
        self.closed = False

    def start(self) -> None:
        self.calls.append("start")

    def stop(self) -> None:
        self.calls.append("stop")

    def read(self) -> dict[str, Count]:
        return {n: Count(100.0 * (i + 1), 1.0) for i, n in enumerate(self.names)}

    def close(self) -> None:
        self.closed = True


def test_a_call_is_counted_where_every_event_may_be() -> None:
    meters: Any = Meters(Fake)  # type: ignore[arg-type]
    meters.start()
    assert meters.stop() == (100, 200, 300)
    some: Any = Meters(lambda events: Fake(events, ("cycles",)))  # type: ignore[arg-type,return-value]
    some.start()
    assert some.stop() is None


def test_partitions_share_what_a_call_counted_by_their_times() -> None:
    assert part_of((100, 200, 300), 25, 100) == (25, 50, 75) and part_of((100, 200, 300), 5, 5) == (100, 200, 300)
    assert part_of(None, 5, 5) is None and part_of((1, 1, 1), 0, 0) is None
    assert len(EVENTS) == 3


@pytest.mark.parametrize("counted", [(100, 200, 300), None])
def test_counts_are_in_the_records_of_partitions(
    monkeypatch: pytest.MonkeyPatch, counted: tuple[int, int, int] | None
) -> None:
    class Told:
        def start(self) -> None: ...
        def stop(self) -> tuple[int, int, int] | None:
            return counted

    monkeypatch.setattr(instrument, "_meters", Told())
    graph = verify(parse("graph main(%x: f32[4]) {\n  %y: f32[4] = aten.relu.default(%x)\n  return %y\n}"))
    names = Names()
    plan = compile_tier0(graph, {}, Settings())
    variant = instrument.InstrumentedPlan(plan, {}, names.graph("g"), names, lambda *_a, **_k: True)
    seen: list[Batch] = []
    variant(1, [torch.randn(4)], seen.append)
    raw = np.stack([np.frombuffer(seen[0].record(i), np.uint8) for i in range(seen[0].count)])
    (row,) = split(raw)[RecordKind.PARTITION]
    assert bool(row["flags"] & Flag.COUNTERS) is (counted is not None)
    assert (int(row["cycles"]), int(row["instructions"]), int(row["misses"])) == (counted or (0, 0, 0))
