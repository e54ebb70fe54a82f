"""`hotfuse calibrate --device cuda`: what a device reaches, measured, shown and kept."""

from __future__ import annotations

from hotfuse.base.errors import InputError
from hotfuse.base.settings import from_env
from hotfuse.cli.output import heading, print_json, rows


def calibrate_device(name: str, *, as_json: bool) -> None:
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
    peaks = measured_peaks(torch.device("cuda", device.index or 0))
    kept = keep_peaks(peaks, from_env())
    if as_json:
        print_json({**peaks.to_dict(), "kept": kept})
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
