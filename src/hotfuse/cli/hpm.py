"""`hotfuse hpm`: how well the performance model predicts this machine, what corrects it, how the machine drifted."""

from __future__ import annotations

import math
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hotfuse.base.errors import InputError
from hotfuse.base.settings import Settings
from hotfuse.cli.output import heading, print_json, reports_errors, rows
from hotfuse.cli.stores import At

if TYPE_CHECKING:
    from hotfuse.compile.host import Host
    from hotfuse.hpm.model import PerformanceModel
    from hotfuse.profile.store import Store

SHOWN = 30
"""Looks at the machine's speed."""


@reports_errors
def hpm(
    plot: Annotated[Path | None, typer.Option(help="Draw predicted against measured times: a PNG, SVG or PDF file.")] = None,
    at: At = None,
    threads: Annotated[int, typer.Option(help="Threads that kernels run on; 0 for as many as torch has.", min=0)] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Accuracy on held-out problems, what serving and idle time have added, corrections, and how the machine drifted."""
    import torch

    from hotfuse.compile.host import this_host
    from hotfuse.hpm import model
    from hotfuse.profile.store import Store
    from hotfuse.profile.store_place import location

    threads = threads or torch.get_num_threads()
    place = at or location(Settings())
    if "://" not in place and not Path(place).expanduser().exists():
        raise InputError(f"there is no profile store at {place}", hint="hotfuse calibrate, or serve a model")
    with Store.open(place) as store:
        host = this_host(store, threads, measure_peaks=False)
        made = model.load(store, host.machine, threads=threads)
        found = {**_learned(store, host), **_accuracy(store, host, made, plot)}
    if as_json:
        print_json(found)
        return
    if made is None or not found["held_out"]:
        heading("no accuracy to show: " + found["because"])
    else:
        _show_accuracy(found)
    _show_learned(found)


def _learned(store: Store, host: Host) -> dict[str, Any]:
    """What was measured by whom, which versions there are, what corrects them, what promises were worth, the machine's speed."""
    from hotfuse.compile.learn.learned import Foresight
    from hotfuse.compile.request_context import ARMS, STRATEGIES
    from hotfuse.hpm import model

    sources = Counter(m.source for m in store.measurements(machine=host.machine))
    dates = store.model_dates(model.named(host.at.threads), host.machine)
    ahead = Foresight.of(store, host)
    off = None if ahead is None else ahead.online.drifted
    return {
        "measurements": dict(sources), "problems": len(store.problems()),
        "trained": [
            {"version": v, "at": at, "samples": f.get("samples"), "held_out": f.get("held_out")} for v, (at, f) in dates.items()
        ],
        "versions": list(dates),
        "correction": None if off is None else {
            "samples": off.samples, "everything": math.exp(off.everything),
            "family": {n: math.exp(x) for n, x in off.family.items()}, "level": {n: math.exp(x) for n, x in off.level.items()},
        },
        "promises": store.remembered(ARMS, host.machine), "strategies": store.remembered(STRATEGIES, host.machine),
        "drift": [{"probe": d.probe, "ratio": d.ratio, "at": d.at} for d in store.drift(machine=host.machine, limit=SHOWN)],
    }  # fmt: skip


def _accuracy(store: Store, host: Host, made: PerformanceModel | None, plot: Path | None) -> dict[str, Any]:
    from hotfuse.hpm import calibrate, evaluation, model, phases
    from hotfuse.hpm.trust import judged

    samples = calibrate.samples(store, host.machine, host.at.threads)
    nothing = {"version": None, "samples": len(samples), "held_out": {}, "by_family": {}, "importance": {}}
    if made is None:
        none = "there is no performance model for this machine yet"
        aside = next((n for n in store.notes if "left aside" in n), none)
        return {**nothing, "because": f"{aside}; `hotfuse calibrate`, or let it idle"}
    if len(samples) < model.MIN_SAMPLES:
        return {**nothing, "version": made.version, "because": f"{len(samples)} measurements are too few"}
    believed = judged(made.facts)
    held = evaluation.held_out(samples, host.at)
    raw = held.as_measured
    if plot is not None:
        from hotfuse.hpm.plot import draw

        draw(held, plot)
    return {
        "version": made.version, "samples": len(samples), "trees": made.facts.get("trees"),
        "kind": made.facts.get("kind"), "held_out": held.overall, "held_out_as_measured": raw.overall,
        "by_family": held.by_family(), "slowed": {**phases.summary(held.slow), "corrected": "slowed" in made.facts},
        "roofline_alone": evaluation.roofline_alone(held.samples, host.at),
        "interval": {
            "stated": model.KEPT, "held": evaluation.coverage(made, held, host.at),
            "held_as_measured": evaluation.coverage(made, raw, host.at),
        },
        "importance": evaluation.importance(made), "trust": {"is": believed.trust.value, "because": believed.because},
    }  # fmt: skip


def _show_accuracy(found: dict[str, Any]) -> None:
    """Scores on times without slow phases, which the model is trained on and its intervals are made of; on those of the clock
    where the two differ.
    """
    slow, interval = found["slowed"], found["interval"]
    slowed = slow["rows"] > 0
    believed = found["trust"]
    scores = {"all": found["held_out"], **found["by_family"], "roofline alone": found["roofline_alone"]}
    if slowed:
        scores["all, as measured"] = found["held_out_as_measured"]
    heading(f"version {found['version']}: {found['trees']} trees ({found['kind']}), {found['samples']} samples")
    heading(f"{believed['is']}: {believed['because']}\n")
    rows(("held out, over 5 µs", "kernels", "MAPE", "within 10%", "within 20%"), [(n, *_score(s)) for n, s in scores.items()])
    if slowed:
        heading(f"\n{slow['rows']:.0%} of all rows were measured while the machine was slow, by about {slow['by']:.0%}: "
                "taken out of what is learned and judged, but for 'as measured'")  # fmt: skip
        if not slow["corrected"]:
            heading("this version was trained by an older program, with such rows as they are")
    told = f"\nintervals that should hold {interval['stated']:.0%} of measurements hold {interval['held']:.0%}"
    heading(f"{told} (as measured: {interval['held_as_measured']:.0%})" if slowed else told)
    heading("\nwhat trees ask for")
    rows(("feature", "part"), [(n, f"{v:.1%}") for n, v in list(found["importance"].items())[:12]], header=False)


def _show_learned(found: dict[str, Any]) -> None:
    who = {"calibrate": "calibration and idle time", "race": "trials of kernels", "serve": "partitions that served"}
    heading(f"\nmeasured here; {found['problems']} groups of served models are known")
    rows(("by", "rows"), [(who[s], n) for s, n in found["measurements"].items()], header=False)
    if found["trained"]:
        heading("\ntrained")
        shown = [(t["version"], _date(t["at"]), t["samples"] or "?", _mape(t["held_out"])) for t in found["trained"][-8:]]
        rows(("version", "at", "samples", "MAPE, held out"), shown)
    off = found["correction"]
    if off is not None:
        factors = {"everything": off["everything"], **off["family"], **off["level"]}
        said = ", ".join(f"{n} x{f:.2f}" for n, f in factors.items() if abs(f - 1) > 0.005) or "nothing"
        heading(f"\ncorrected by the newest {off['samples']} measurements of serving: {said}")
    if found["promises"]:
        heading("\nwhat became of predicted gains")
        shown = [(k, f"{n:.0f}", f"{s / n:.0%}") for k, (n, s, _) in found["promises"].items()]
        rows(("kind", "tried", "part that came true"), shown)
    if found["strategies"]:
        heading("\nstrategies against bottlenecks")
        shown = [(k, f"{n:.0f}", f"{h:.0f}") for k, (n, h, _) in found["strategies"].items()]
        rows(("bottleneck and strategy", "tried", "helped"), shown)
    if found["drift"]:
        heading("\nthe machine's speed, newest first")
        rows(("probe", "at", "times slower"), [(d["probe"], _date(d["at"]), f"{d['ratio']:.2f}") for d in found["drift"]])


def _mape(held: dict[str, float] | None) -> str:
    """Another version may have kept other facts of its models."""
    return f"{held['mape']:.1%}" if held and "mape" in held else "?"


def _date(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def _score(s: dict[str, float]) -> tuple[str, str, str, str]:
    return f"{s['n']:.0f}", f"{s['mape']:.1%}", f"{s['within10']:.0%}", f"{s['within20']:.0%}"
