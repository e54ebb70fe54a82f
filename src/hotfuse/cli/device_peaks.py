"""`hotfuse calibrate --device cuda`: what a device reaches and what kernels take there, measured, shown and kept."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from hotfuse.base.errors import InputError
from hotfuse.base.settings import Settings
from hotfuse.cli.output import console, heading, print_json, rows

if TYPE_CHECKING:
    import torch

LEARNING_S = 12.0
"""What is kept of the budget for making a model."""


def calibrate_device(name: str, budget: float, at: str | None, seed: int, *, as_json: bool) -> None:
    """Measure a device that does nothing else; raises InputError where there is none of that name."""
    import torch

    from hotfuse.compile.device.kept_peaks import keep_peaks
    from hotfuse.machine.device_peaks import measured_peaks

    try:
        device = torch.device(name)
    except RuntimeError as e:
        raise InputError(f"{name!r} names no device", hint="cuda or cuda:0") from e
    if device.type != "cuda":
        raise InputError(f"the peaks of {name} are not measured so", hint="without --device the processor is calibrated")
    if not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count():
        raise InputError(f"there is no device {name} here", hint="hotfuse doctor lists the devices")
    begin, device = time.monotonic(), torch.device("cuda", device.index or 0)
    settings = Settings() if at is None else Settings().with_(profiles=at)
    peaks = measured_peaks(device)
    kept = keep_peaks(peaks, settings)
    kernels = _kernels(device, settings, budget - (time.monotonic() - begin), seed, quiet=as_json or not console().is_terminal)
    if as_json:
        print_json({**peaks.to_dict(), "kept": kept, "kernels": dict(kernels)})
        return
    heading(peaks.name)
    shown = [(f"products of {dtype}", f"{rate / 1e12:.0f} TFLOP/s") for dtype, rate in peaks.products.items()]
    shown += [("memory", f"{peaks.memory / 1e9:.0f} GB/s"), ("second-level cache", f"{peaks.cache / 1e9:.0f} GB/s"),
              ("a launch, on the host", f"{peaks.launch_s * 1e6:.1f} us"), ("a small kernel", f"{peaks.kernel_s * 1e6:.2f} us")]
    if peaks.node_s is not None:
        shown.append(("the same in a recording", f"{peaks.node_s * 1e6:.2f} us"))
    shown += [("to the device", f"{peaks.to_device / 1e9:.1f} GB/s"), ("from the device", f"{peaks.from_device / 1e9:.1f} GB/s")]
    shown += [(f"{what}: not measured", why) for what, why in peaks.missing.items()]
    rows(("what", "reached"), shown, header=False)
    heading("kept for predictions" if kept else "not kept: the cache is off")
    heading(_told(kernels))


def _kernels(device: torch.device, settings: Settings, seconds: float, seed: int, *, quiet: bool) -> Mapping[str, Any]:
    """Kernels of drawn problems, and the model that was made of them; or why there is none."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from hotfuse.backends import registry
    from hotfuse.compile.device.calibration import CalibrationReport, kept_and_learned, timed_kernels
    from hotfuse.compile.workers.worker_pool import machine_pool

    if why := registry.device_kernels().unavailable():
        return {"measured": 0, "because": why}
    with machine_pool() as pool:
        columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console(), disable=quiet) as bar:
            task = bar.add_task("calibrating", total=1.0)

            def told(done: float, so_far: CalibrationReport) -> None:
                bar.update(task, completed=done, description=f"{len(so_far.kernels)} kernels measured")

            report = timed_kernels(pool, device, settings, max(1.0, seconds - LEARNING_S), seed, told)
        learned = kept_and_learned(pool, device, settings, report.kernels)
    return {"measured": len(report.kernels), "problems": report.problems, "refused": dict(report.refused),
            "interrupted": report.interrupted,
            **asdict(learned)}  # fmt: skip


def _told(kernels: Mapping[str, Any]) -> str:
    if why := kernels.get("because"):
        return f"no kernels were learned from: {why}"
    head = f"{kernels['measured']} kernels of {kernels['problems']} problems measured, {kernels['rows']} kept"
    if (held := kernels.get("held_out")) is None:
        return f"{head}; too few for a model: give it more time"
    use = "chooses what is compiled" if kernels["chooses"] else "is left aside"
    return (f"{head}; on problems that it had not seen the model is off by {held['median']:.0%} (median; mean {held['mape']:.0%}), "
            f"and what it ranks first takes {held['regret']:.1%} longer than the best: it {use}")  # fmt: skip
