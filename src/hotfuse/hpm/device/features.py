"""What the model of a device reads of kernels: amounts of `hpm.device.work` held against what the device reaches.

    first guess   the longest of: multiplying, moving what is distinct, moving what programs load through the second-level cache,
                  issuing loads, and the rounds of a program one after another
    features      each of these against the first guess, how programs fill processors, and the shape of a program

The forest learns how far from the first guess kernels stay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.hpm.device.work import NAMES, Row
from hotfuse.machine.device_peaks import DevicePeaks
from hotfuse.machine.device_rates import DeviceRates

Vector = npt.NDArray[np.float64]
REGISTERS = 65536.0
"""Of one multiprocessor; threads have at most `MAX_REGISTERS` of them and some for addresses."""
MAX_REGISTERS, OWN_REGISTERS = 255.0, 40.0
MAX_THREADS = 2048.0
LANES, CYCLES = 128.0, 1.7e9
"""Elements that a multiprocessor computes in a cycle, and cycles of a second, about: trees correct what is wrong with it."""
ROUND_S, BEGIN_S = 6e-7, 1.5e-6
"""What a round waits for memory where nothing is fetched before, and what a kernel takes that does nothing."""
TENSOR_CORES = 15.0
"""Times as many products of 16 bits as operations of fp32, where nobody measured."""
_TINY = 1e-9


@dataclass(frozen=True, slots=True)
class DeviceShape:
    """A device as predictions read it."""

    processors: int
    shared: int
    """Bytes of shared memory of one multiprocessor."""
    cache: int
    """Bytes of the second-level cache."""
    product: float
    """Operations a second of 16-bit products, and of f32."""
    wide: float
    memory: float
    """Bytes a second, and of the second-level cache."""
    near: float

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def shape_from(data: Mapping[str, Any]) -> DeviceShape:
    """The reverse of `to_dict`; raises ValueError where it is something else."""
    try:
        found = DeviceShape(
            int(data["processors"]), int(data["shared"]), int(data["cache"]), float(data["product"]), float(data["wide"]),
            float(data["memory"]), float(data["near"]),
        )  # fmt: skip
    except (KeyError, TypeError, ValueError) as e:
        raise ValueError(f"this describes no device: {e}") from e
    if not all(n > 0 for n in asdict(found).values()):
        raise ValueError("this describes no device: a figure is not positive")
    return found


def shape_of_device(processors: int, shared: int, cache: int, peaks: DevicePeaks | None, stated: DeviceRates) -> DeviceShape:
    """A device by what was measured of it, else by what it states."""
    if peaks is not None and {"f16", "f32"} <= peaks.products.keys():
        return DeviceShape(processors, shared, cache, peaks.products["f16"], peaks.products["f32"], peaks.memory, peaks.cache)
    return DeviceShape(processors, shared, cache, TENSOR_CORES * stated.flops, stated.flops, stated.memory, stated.memory)


def table_of(rows: Sequence[Row]) -> npt.NDArray[np.float64]:
    """Rows by the order of their names."""
    return np.array([[row[n] for n in NAMES] for row in rows], np.float64).reshape(len(rows), len(NAMES))


def features(table: npt.NDArray[np.float64], at: DeviceShape) -> tuple[npt.NDArray[np.float64], Vector]:
    """Columns for a forest, and the first guess in seconds."""
    c = dict(zip(NAMES, table.T, strict=True))
    cores = float(at.processors)
    threads = c["warps"] * 32
    peak = np.where(c["width"] >= 4, at.wide, at.product)
    staged = np.maximum(c["looped"] * np.maximum(c["stages"], 1) * (c["rounds"] > 1), 1.0)
    alone = c["tile"] * (c["sums"] == 0) * 2
    registers = np.maximum((c["sums"] + alone + c["operands"] / 4) / threads + OWN_REGISTERS, 32.0)
    fitting = np.minimum(np.floor(at.shared / staged), np.floor(REGISTERS / (np.minimum(registers, MAX_REGISTERS) * threads)))
    together = np.clip(np.minimum(fitting, MAX_THREADS / threads), 1, 32)
    programs = np.where(c["turns"] > 0, np.minimum(c["programs"], c["turns"]), c["programs"])
    waves = programs / (cores * together)
    per_core = np.ceil(c["programs"] / cores)
    in_turn = np.where(c["turns"] > 0, np.ceil(c["programs"] / np.maximum(c["turns"], 1)), 1)

    least = 2 * c["multiply_adds"] * c["programs"] / peak
    moved = c["distinct"] / at.memory
    one = 2 * c["multiply_adds"] / (peak / cores)
    multiplied = per_core * one
    loaded = c["loaded"] * c["programs"] / (1.5 * at.near)
    waited = np.where(c["rounds"] > 1, c["rounds"] * ROUND_S / np.maximum(c["stages"] - 1, 1), 1e-6)
    chained = np.maximum(waited, one) * np.ceil(waves) * in_turn
    computed = per_core * (c["light"] + 8 * c["heavy"] + 4 * c["reduced"]) / (LANES * CYCLES)
    issued = per_core * np.where(c["bulk"] > 0, 0.0, c["loaded"]) / c["aligned"] / 32 / CYCLES
    guess = BEGIN_S + np.maximum.reduce([multiplied, moved, loaded, chained, issued]) + 0.5 * computed

    amounts = [np.log(v + _TINY) for v in (least, moved, multiplied, loaded, chained, computed, issued)]
    log = np.log(guess)
    columns = [
        *amounts, *(a - log for a in amounts), log,
        np.log(c["programs"]), np.log(waves), waves / np.ceil(waves), programs / cores / np.ceil(programs / cores), together,
        np.log(registers), np.log(staged), np.minimum(together, np.ceil(programs / cores)) * c["warps"], np.log(c["rounds"]),
        np.log2(c["rows"]), np.log2(c["columns"]), np.log2(c["depth"]), c["warps"], c["stages"], c["bulk"], c["split"],
        c["turns"] > 0, c["nests"], c["width"], np.log(c["tile"] / threads), c["sums"] / threads, np.log(c["heavy"] + 1),
        np.log(c["reduced"] + 1), np.log(c["light"] + 1), np.log(c["stored"] + 1), np.log(c["loaded"] + 1),
        np.log((c["loaded"] * c["programs"] + 1) / c["distinct"]), np.log(c["distinct"] / at.cache), c["loaded"] / threads,
        np.log2(c["aligned"]), c["cut"] / np.maximum(c["loaded"], 1), c["rounds"] * 16 / c["aligned"] / np.maximum(c["stages"], 1),
    ]  # fmt: skip
    return np.stack([np.asarray(v, np.float64) for v in columns], 1), guess
