"""What `hotfuse doctor` says of the machine's limits: measured peaks, counters, energy, and the store that keeps them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.base.settings import Settings
from hotfuse.cli.output import heading, rows
from hotfuse.machine.counters import availability
from hotfuse.machine.energy import meters
from hotfuse.machine.fingerprint import Fingerprint
from hotfuse.machine.memory_traffic import LINE, look
from hotfuse.machine.peaks import LEVELS, MachinePeaks, from_dict


@dataclass(frozen=True, slots=True)
class MachineLimits:
    """The machine's limits as far as they are known here."""

    peaks: MachinePeaks | None
    peaks_note: str
    """Where they come from, or why there are none."""
    counters: dict[str, str]
    traffic: dict[str, Any]
    """Bytes a second to and from memory just now, or why nobody counts them."""
    meters: tuple[str, ...]
    no_meters: dict[str, str]
    store: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """A plain dict for JSON."""
        return {
            "peaks": None if self.peaks is None else self.peaks.to_dict(),
            "peaks_note": self.peaks_note,
            "counters": self.counters,
            "memory_traffic": self.traffic,
            "energy": {"meters": list(self.meters), "missing": self.no_meters},
            "store": self.store,
        }


def limits(settings: Settings, who: Fingerprint, *, measure: bool) -> MachineLimits:
    """Look, and with `measure` also measure and keep; without it nothing is written."""
    peaks, note, store = _peaks(settings, who, measure=measure)
    found, missing = meters()
    return MachineLimits(peaks, note, availability(), _traffic(), tuple(m.name for m in found), missing, store)


def _peaks(settings: Settings, who: Fingerprint, *, measure: bool) -> tuple[MachinePeaks | None, str, dict[str, Any]]:
    from hotfuse.profile.store import Store
    from hotfuse.profile.store_place import location

    place = location(settings)
    if not measure and "://" not in place and not Path(place).exists():
        return None, "not measured yet: hotfuse doctor --peaks", {"path": place, "rows": {}, "notes": []}
    with Store.open(place) as store:
        number = store.machine(who)
        if measure:
            from hotfuse.backends import registry

            peaks: MachinePeaks | None = registry.host().measure_peaks()
            note = "measured now"
            store.machine(who, peaks.to_dict())
        else:
            peaks, note = _kept(store.peaks(number))
        return peaks, note, store.info()


def _traffic() -> dict[str, Any]:
    moved, why = look()
    if moved is None:
        return {"source": "derived", "missing": why, "per_s": None}
    return {"source": moved.source, "missing": "", "per_s": round(moved.per_s), "of": moved.of}


def _kept(found: dict[str, Any] | None) -> tuple[MachinePeaks | None, str]:
    if found is None:
        return None, "not measured yet: hotfuse doctor --peaks"
    try:
        return from_dict(found), "kept from an earlier measurement"
    except ValueError as e:
        return None, f"what was kept cannot be read ({e}): hotfuse doctor --peaks"


def show_limits(found: MachineLimits) -> None:
    """Print the limits on a terminal."""
    heading(f"\nmeasured limits ({found.peaks_note})")
    if found.peaks is not None:
        rows(("what", "threads", "figure", "noise"), peak_rows(found.peaks))
        for what, why in found.peaks.missing:
            rows(("what", "why"), [(what, why)], header=False)
    heading("\ncounters")
    rows(("event", "state"), [*((n, why or "counted") for n, why in found.counters.items()), _traffic_row(found)], header=False)
    if any(found.counters.values()):
        heading("what is not counted is derived from time, operations and bytes against the peaks, and labelled so")
    heading("\nenergy")
    body = [(name, "measured") for name in found.meters] + [(kind, why) for kind, why in found.no_meters.items()]
    rows(("meter", "state"), body, header=False)
    heading("\nprofile store")
    held = ", ".join(f"{n} {t}" for t, n in found.store["rows"].items() if n) or "empty"
    rows(("fact", "value"), [("place", found.store["path"]), ("rows", held)], header=False)
    for note in found.store["notes"]:
        heading(note)


def _traffic_row(found: MachineLimits) -> tuple[str, str]:
    traffic = found.traffic
    if traffic["per_s"] is not None:
        return "memory_traffic", f"counted: {traffic['per_s'] / 1e9:.2f} GB/s just now, {traffic['of']}"
    instead = f"derived from cache misses, {LINE} bytes each" if not found.counters.get("cache_misses") else "derived from operands"
    return "memory_traffic", f"{instead}: {traffic['missing']}"


def peak_rows(peaks: MachinePeaks) -> list[tuple[str, int, str, str]]:
    """One line per figure."""
    body = [(f"multiply-add {r.dtype}", r.threads, f"{r.per_s / 1e9:.1f} Gop/s", f"{r.noise:.1%}") for r in peaks.rates]
    for level in LEVELS:
        for b in peaks.bandwidths:
            if b.level == level:
                body.append((f"{level} {b.direction}", b.threads, f"{b.per_s / 1e9:.1f} GB/s", f"{b.noise:.1%}"))
    for f in peaks.forks:
        body.append(("fork and join, hot", f.threads, f"{f.hot_ns / 1e3:.2f} us", ""))
        body.append(("fork and join, after a rest", f.threads, f"{f.idle_ns / 1e3:.2f} us", ""))
    return [*body, ("native call", 1, f"{peaks.call_ns:.0f} ns", "")]
