"""`hotfuse hpm`: how well the performance model predicts this machine, what it looks at, how the machine drifted."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from hotfuse.base.errors import InputError
from hotfuse.base.settings import from_env
from hotfuse.cli.db import At
from hotfuse.cli.output import heading, print_json, reports_errors, rows


@reports_errors
def hpm(
    plot: Annotated[Path | None, typer.Option(help="Draw predicted against measured times: a PNG, SVG or PDF file.")] = None,
    at: At = None,
    threads: Annotated[int, typer.Option(help="Threads that kernels run on.", min=1)] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Accuracy on held-out problems, the features that matter, versions, and how the machine drifted."""
    from hotfuse.compile.host import this_host
    from hotfuse.hpm import calibrate, judge, model
    from hotfuse.profile.place import location
    from hotfuse.profile.store import Store

    place = at or location(from_env())
    if "://" not in place and not Path(place).expanduser().exists():
        raise InputError(f"there is no profile store at {place}", hint="hotfuse calibrate")
    with Store.open(place) as store:
        host = this_host(store, threads, measure_peaks=False)
        made = model.load(store, host.machine)
        if made is None:
            raise InputError("there is no performance model for this machine", hint="hotfuse calibrate")
        samples = calibrate.samples(store, host.machine, threads)
        versions = store.model_versions(model.NAME)
        drift = store.drift(machine=host.machine, limit=20)
    if len(samples) < model.LEAST_SAMPLES:
        raise InputError(f"{len(samples)} measurements with {threads} threads are too few", hint="hotfuse calibrate")
    held = judge.held_out(samples, host.at)
    if plot is not None:
        from hotfuse.hpm.plot import draw

        draw(held, plot)
    found: dict[str, Any] = {
        "version": made.version, "versions": versions, "samples": len(samples), "trees": made.facts.get("trees"),
        "kind": made.facts.get("kind"), "held_out": held.overall, "by_family": held.by_family(),
        "roofline_alone": judge.roofline_alone(samples, host.at),
        "interval": {"stated": model.KEPT, "held": judge.coverage(made, samples, held.predicted, host.at)},
        "importance": judge.importance(made),
        "drift": [{"probe": d.probe, "ratio": d.ratio, "at": d.at} for d in drift],
    }  # fmt: skip
    if as_json:
        print_json(found)
        return
    scores = {"all": found["held_out"], **found["by_family"], "roofline alone": found["roofline_alone"]}
    heading(f"version {made.version}: {made.facts.get('trees')} trees ({made.facts.get('kind')}), {len(samples)} samples")
    shown = [(n, *_score(s)) for n, s in scores.items()]
    rows(("held out, over 5 µs", "kernels", "MAPE", "within 10%", "within 20%"), shown)
    interval = found["interval"]
    heading(f"\nintervals that should hold {interval['stated']:.0%} of measurements hold {interval['held']:.0%}")
    heading("\nwhat trees ask for")
    rows(("feature", "part"), [(n, f"{v:.1%}") for n, v in list(found["importance"].items())[:12]], header=False)
    if drift:
        heading("\ndrift, newest first")
        rows(("probe", "times slower"), [(d.probe, f"{d.ratio:.2f}") for d in drift])


def _score(s: dict[str, float]) -> tuple[str, str, str, str]:
    return f"{s['n']:.0f}", f"{s['mape']:.1%}", f"{s['within10']:.0%}", f"{s['within20']:.0%}"
