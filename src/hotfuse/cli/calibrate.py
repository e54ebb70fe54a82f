"""`hotfuse calibrate`: learn how fast kernels are on this machine."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from hotfuse.base.errors import InputError
from hotfuse.base.settings import Settings
from hotfuse.cli.device_peaks import calibrate_device
from hotfuse.cli.output import console, heading, print_json, reports_errors, rows
from hotfuse.cli.stores import At

MAX_REASONS = 8
"""Reasons for leaving kernels out that a terminal is shown, the commonest."""


def seconds(text: str) -> float:
    """`60s`, `3m` or a number of seconds."""
    units = {"s": 1.0, "m": 60.0, "h": 3600.0}
    number, unit = (text[:-1], units[text[-1]]) if text and text[-1] in units else (text, 1.0)
    try:
        found = float(number) * unit
    except ValueError as e:
        raise InputError(f"{text!r} is no time", hint="60s, 3m or a number of seconds") from e
    if not 1.0 <= found <= 86_400.0:
        raise InputError(f"a budget of {text} cannot be kept", hint="between 1s and 24h")
    return found


@reports_errors
def calibrate(
    budget: Annotated[str, typer.Option(help="How long: 60s, 3m.")] = "60s",
    threads: Annotated[int, typer.Option(help="Threads that kernels run on; 0 for as many as torch has.", min=0)] = 0,
    at: At = None,
    device: Annotated[str, typer.Option(help="cuda or cuda:0: measure that device and its kernels instead.")] = "",
    seed: Annotated[int, typer.Option(help="Which problems are drawn; the same ones are not measured twice.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Measure kernels on this machine and train its performance model. Ctrl-C ends it early with what there is."""
    wanted = seconds(budget)
    if device:
        calibrate_device(device, wanted, at, seed, as_json=as_json)
        return
    import torch

    threads = threads or torch.get_num_threads()
    from hotfuse.compile.learn.calibrate import Report
    from hotfuse.compile.learn.calibrate import calibrate as run
    from hotfuse.compile.workers.worker_pool import machine_pool
    from hotfuse.hpm.trust import judged
    from hotfuse.profile.store import Store
    from hotfuse.profile.store_place import location

    with Store.open(at or location(Settings())) as store, machine_pool() as pool:
        if console().is_terminal and not as_json:
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            with Progress(TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn(), console=console()) as bar:
                task = bar.add_task("calibrating", total=1.0)

                def told(done: float, report: Report) -> None:
                    bar.update(task, completed=done, description=f"{report.measured} kernels measured")

                report = run(store, wanted, executor=pool, threads=threads, progress=told, seed=seed)
                bar.update(task, completed=1.0)
        else:
            report = run(store, wanted, executor=pool, threads=threads, seed=seed)
        place = str(store.path or "memory")
    made = report.model
    found: dict[str, Any] = {
        "store": place, "measured": report.measured, "compiled": report.compiled, "skipped": report.skipped,
        "refused": dict(report.refused), "seconds": round(report.seconds, 2), "interrupted": report.interrupted,
        "version": None if made is None else made.version, "samples": 0 if made is None else made.facts["samples"],
        "held_out": {} if made is None else made.facts["held_out"],
        "trust": None if made is None else judged(made.facts).trust.value,
    }  # fmt: skip
    if as_json:
        print_json(found)
        return
    shown = [(k, v) for k, v in found.items() if k not in ("refused", "held_out") and v is not None]
    rows(("fact", "value"), shown, header=False)
    if report.refused:
        reasons = sorted(report.refused.items(), key=lambda kv: -kv[1])
        heading(f"{sum(report.refused.values())} kernels were left out:")
        rows(("why", "kernels"), [(why, n) for why, n in reasons[:MAX_REASONS]], header=False)
        if len(reasons) > MAX_REASONS:
            heading(f"and {len(reasons) - MAX_REASONS} more reasons: --json lists all")
    if made is None:
        heading("too few measurements for a model: give it more time")
        return
    believed, score = judged(made.facts), made.facts["held_out"]
    within = f"{score['within10']:.0%} within 10%, {score['within20']:.0%} within 20%"
    heading(f"problems it had not seen: MAPE {score['mape']:.1%}, {within}")
    heading(f"the model is {believed.trust.value}: {believed.because}")
