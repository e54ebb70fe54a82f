"""What a device reaches at best, as measured there with the library's kernels.

    products by type, its memory, its second-level cache, a launch, a node of a replayed graph, copies from and to the host

Each figure is the best of several rounds, by the device's own clock where it has one. All of it takes a few seconds, on a device
that does nothing else: for `hotfuse calibrate --device`, never beside calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import torch

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.machine.device_clock import device_seconds

ROUNDS = 5
TIMES = 8
"""Runs of one round."""
AHEAD_S = 0.005
"""What the device sleeps while a round is launched."""
KERNELS = 256
"""Of the chain that tells what a launch and a node cost."""
_Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class PeakSizes:
    """Sizes of the data that peaks are measured with, so large that nothing but the figure in question counts."""

    product: int = 8192
    """Rows, columns and steps of products of 16 bits and fewer."""
    wide: int = 4096
    """The same of 32 bits."""
    memory: int = 1 << 30
    cache: int = 8 << 20
    copied: int = 64 << 20


@dataclass(frozen=True, slots=True)
class DevicePeaks:
    """Operations (a multiply-add is two) and bytes a second, and seconds."""

    name: str
    products: Mapping[str, float]
    """By the type of the operands."""
    missing: Mapping[str, str]
    """What could not be measured, and why."""
    memory: float
    """Read and written."""
    cache: float
    launch_s: float
    """On the host, for one kernel."""
    kernel_s: float
    """On the device, of a kernel that does next to nothing behind another one."""
    node_s: float | None
    """The same in a graph that is replayed; None where there are no such graphs."""
    to_device: float
    from_device: float
    at: float
    """Seconds since 1970."""

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def peaks_from(data: Mapping[str, Any]) -> DevicePeaks:
    """The reverse of `to_dict`; raises ValueError where it is something else."""
    try:
        found = DevicePeaks(
            str(data["name"]), {str(k): float(v) for k, v in data["products"].items()},
            {str(k): str(v) for k, v in data["missing"].items()}, float(data["memory"]), float(data["cache"]),
            float(data["launch_s"]), float(data["kernel_s"]), None if data["node_s"] is None else float(data["node_s"]),
            float(data["to_device"]), float(data["from_device"]), float(data["at"]),
        )  # fmt: skip
    except (KeyError, TypeError, AttributeError) as e:
        raise ValueError(f"these are no peaks of a device: {e}") from e
    if not all(n > 0 for n in (*found.products.values(), found.memory, found.cache, found.to_device, found.from_device)):
        raise ValueError("these are no peaks of a device: a rate is not positive")
    return found


def measured_peaks(device: torch.device, sizes: PeakSizes | None = None) -> DevicePeaks:
    """Measure; the caller sees to it that the device does nothing else."""
    sizes = sizes or PeakSizes()
    products: dict[str, float] = {}
    missing: dict[str, str] = {}
    with torch.no_grad():
        for name, (dtype, size, product) in _products(sizes).items():
            try:
                products[name] = 2 * size**3 / _seconds(_product_run(dtype, size, product, device), device)
            except RuntimeError as e:
                missing[name] = (str(e).strip().splitlines() or [type(e).__name__])[0][:200]
        memory, cache = (_copy_rate(n, device) for n in (sizes.memory, sizes.cache))
        launch_s, kernel_s, node_s = _launches(device)
        to_device, from_device = _transfers(sizes.copied, device)
    if node_s is None:
        missing["graph node"] = f"nothing is recorded on {device.type} devices here"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return DevicePeaks(name, products, missing, memory, cache, launch_s, kernel_s, node_s, to_device, from_device, time.time())


def _products(sizes: PeakSizes) -> dict[str, tuple[torch.dtype, int, _Product]]:
    narrow, wide = sizes.product, sizes.wide
    int_mm: _Product = torch._int_mm  # pyright: ignore[reportPrivateUsage] - torch has no public product of bytes
    return {
        "f16": (torch.float16, narrow, torch.mm), "bf16": (torch.bfloat16, narrow, torch.mm), "i8": (torch.int8, narrow, int_mm),
        "tf32": (torch.float32, wide, _in_tf32), "f32": (torch.float32, wide, _in_f32),
    }  # fmt: skip


def _in_tf32(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return _with_precision("high", a, b)


def _in_f32(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return _with_precision("highest", a, b)


def _with_precision(precision: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        return torch.mm(a, b)
    finally:
        torch.set_float32_matmul_precision(before)


def _product_run(dtype: torch.dtype, size: int, product: _Product, device: torch.device) -> Callable[[], object]:
    shape = (size, size)
    if dtype is torch.int8:
        a, b = (torch.randint(-8, 8, shape, dtype=dtype, device=device) for _ in range(2))
        b = b.t()  # the library reads the second operand by columns
    else:
        a, b = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
    return lambda: product(a, b)


def _seconds(run: Callable[[], object], device: torch.device, times: int = TIMES) -> float:
    """The least of several rounds, for one run."""
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return min(device_seconds(run, device, AHEAD_S, times) for _ in range(ROUNDS))
    found: list[float] = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        for _ in range(times):
            run()
        found.append((time.perf_counter() - begin) / times)
    return min(found)


def _copy_rate(size: int, device: torch.device) -> float:
    """Bytes read and written a second, of a copy inside the device's memory or cache."""
    source = torch.zeros(size // 4, device=device)
    target = torch.empty_like(source)
    return 2 * size / _seconds(lambda: target.copy_(source), device)


def _launches(device: torch.device) -> tuple[float, float, float | None]:
    """Seconds of one launch in a chain of small kernels: on the host, on the device, and in a replayed graph."""
    x = torch.zeros(64, device=device)

    def chain() -> None:
        for _ in range(KERNELS):
            x.add_(1.0)

    kernel_s = _seconds(chain, device, 1) / KERNELS
    host: list[float] = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        chain()
        host.append((time.perf_counter() - begin) / KERNELS)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    if device.type != "cuda":
        return min(host), kernel_s, None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    return min(host), kernel_s, _seconds(graph.replay, device, 1) / KERNELS


def _transfers(size: int, device: torch.device) -> tuple[float, float]:
    """Bytes a second to a device and back, of memory as programs have it."""
    here = torch.zeros(size, dtype=torch.uint8)
    there = here.to(device)

    def took(copy: Callable[[], object]) -> float:
        found: list[float] = []
        for _ in range(ROUNDS):
            begin = time.perf_counter()
            copy()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            found.append(time.perf_counter() - begin)
        return size / min(found)

    return took(lambda: there.copy_(here)), took(lambda: here.copy_(there))
