"""Whether generated kernels work on the devices of this machine: one is compiled, loaded, launched, recorded and replayed.

For `hotfuse doctor`, in a process of its own: asking a device starts CUDA there.
"""

from __future__ import annotations

from typing import Any

import torch

from hotfuse.backends import registry
from hotfuse.backends.device_code import LaunchShape
from hotfuse.base.errors import HotfuseError
from hotfuse.ir.types import DType
from hotfuse.tile.build import KernelBuilder
from hotfuse.tile.program import Kernel

ELEMENTS = 4096
BLOCK = 1024


def report() -> list[dict[str, Any]]:
    """Every CUDA device, with why generated kernels cannot be used there; empty where they can."""
    found: list[dict[str, Any]] = []
    for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        p: Any = torch.cuda.get_device_properties(i)
        about = {"device": f"cuda:{i}", "name": p.name, "memory_bytes": p.total_memory, "capability": f"{p.major}.{p.minor}"}
        found.append({**about, "kernels": unusable(torch.device("cuda", i))})
    return found


def unusable(device: torch.device) -> str:
    """Why generated kernels cannot serve on a device; empty where one did."""
    backend = registry.device_kernels()
    if why := backend.unavailable():
        return why
    try:
        function = backend.load(backend.compile(doubling(), backend.target(device), LaunchShape(4, 1)), device)

        def run(x: torch.Tensor) -> tuple[torch.Tensor]:
            y = torch.empty_like(x)
            function.launch([x.data_ptr(), y.data_ptr()], int(torch.cuda.current_stream(device).cuda_stream))
            return (y,)

        recorder = registry.device(device.type)
        if recorder is None:
            return f"nothing can be recorded on {device.type} devices"
        recorded = recorder.recorded(run, device, lambda: False, _difference)
        with torch.cuda.device(device), torch.no_grad():
            given = [torch.randn(ELEMENTS, device=device) for _ in range(4)]
            right = all(torch.equal(recorded(x)[0], x * 2) for x in given)
        if not recorded.counters()["replays"]:
            return "a kernel could not be recorded"
    except (HotfuseError, RuntimeError) as e:
        said = str(e).strip().splitlines()
        return said[0][:200] if said else type(e).__name__
    return "" if right else "a kernel gave wrong results"


def _difference(got: tuple[Any, ...], want: tuple[Any, ...]) -> str:
    return "" if torch.equal(got[0], want[0]) else "a replay gave other results"


def doubling() -> Kernel:
    """y = x * 2."""
    b = KernelBuilder("doubling")
    x, y = (make(name, DType.F32, (ELEMENTS,)) for make, name in ((b.input, "x"), (b.output, "y")))
    with b.parallel("i", ELEMENTS, BLOCK) as i:
        b.store(y, (i.var,), b.map("mul", b.load(x, (i.var,), (BLOCK,)), 2.0))
    return b.finish()
