"""The machine's speed, watched while models are served: a micro-probe, the store that keeps its looks, a decision per change."""

from __future__ import annotations

from hotfuse.backends import registry
from hotfuse.backends.protocol import SpeedProbe
from hotfuse.base.events import Action, EventLog, Why
from hotfuse.machine.fingerprint import Fingerprint, fingerprint
from hotfuse.machine.peaks import from_dict
from hotfuse.machine.speed_drift import INTERVAL_S, DriftWatch, ProbeRun, SpeedChange
from hotfuse.profile.rows import SpeedRow
from hotfuse.profile.store import Store


def speed_watch(
    store: Store,
    log: EventLog,
    *,
    who: Fingerprint | None = None,
    probe: SpeedProbe | None = None,
    interval_s: float = INTERVAL_S,
) -> DriftWatch:
    """A watch, not started yet: it compares with the peaks that the store has of this machine, or with its own first look."""
    machine = store.machine(who or fingerprint())
    run = probe or registry.host().speed_probe()
    baseline: dict[str, float] = {}
    if (kept := store.peaks(machine)) is not None:
        try:
            baseline = run.baseline(from_dict(kept))
        except ValueError as e:
            log.decide(Action.NOTICE, Why.STORE_DAMAGED, "measured peaks", detail=str(e))

    def record(looks: list[ProbeRun]) -> None:
        store.record_drift([SpeedRow(one.probe, one.seconds, one.baseline, one.at) for one in looks], machine)

    def changed(change: SpeedChange) -> None:
        log.decide(Action.NOTICE, Why.SPEED_CHANGED, "machine", probe=change.probe, slower_by=round(change.ratio, 3))

    return DriftWatch(run, baseline, record, changed, interval_s=interval_s)
