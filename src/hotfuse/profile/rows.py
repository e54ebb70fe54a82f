"""What the profile store keeps, as plain frozen values.

Everything is numbers and text. What comes out of a file is checked for that and for nothing else being there: a row that was
damaged or written by somebody else is skipped and counted, and reading one never runs code.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import field
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from hotfuse.base.errors import InputError
from hotfuse.base.lazy_dataclass import dataclass

Source = Literal["calibrate", "serve", "race"]
"""Who measured: calibration, the plan that serves, or a race between two plans."""
SOURCES: tuple[str, ...] = get_args(Source)
DTYPES = frozenset({"f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "b1"})
"""Element types of stored arrays, as NumPy names them without the byte order: little-endian always."""
Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class StoredMachine:
    """A machine that the store knows."""

    id: int
    name: str
    """A digest of both parts of its fingerprint, as people name it."""
    identity: Mapping[str, str]
    tuning: Mapping[str, str]
    peaks: Mapping[str, Any] | None
    seen_at: float

    @property
    def is_device(self) -> bool:
        """Whether it is a device, which executes none of the code for processors."""
        return "device" in self.identity


@dataclass(frozen=True, slots=True)
class Measurement:
    """One kernel's time on one machine."""

    kernel: str
    """Hash of its tile program."""
    family: str
    features: Mapping[str, float]
    dtype: str
    threads: int
    time_ns: float
    noise: float
    """Relative: how far repeated measurements of this kernel lie apart."""
    source: Source
    at: float = 0.0
    """Seconds since 1970; 0 is now."""
    machine: int | None = None


@dataclass(frozen=True, slots=True)
class PartitionProfile:
    """What a partition of a model took, for one signature of its inputs."""

    graph: str
    partition: str
    signature: str
    calls: int
    mean_ns: float
    p10_ns: float
    p50_ns: float
    p90_ns: float
    bytes: float
    flops: float
    bottleneck: str = ""
    """What limits it, where somebody looked."""
    at: float = 0.0
    machine: int | None = None
    evidence: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Utilizations, counters and joules with where they come from, and what is proposed: plain data."""


@dataclass(frozen=True, slots=True)
class SubgraphProfile:
    """What a piece of any model took on a machine: named by what it computes."""

    subgraph: str
    """Hash of its normal form: models that share it share its profiles."""
    ops: str
    sizes: str
    threads: int
    tier: int
    calls: int
    mean_ns: float
    p10_ns: float
    p50_ns: float
    p90_ns: float
    bytes: float
    flops: float
    share: float
    """Its part of the time of the model it was seen in."""
    bottleneck: str
    evidence: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Utilizations, counters and joules with where they come from, and what was predicted: plain data."""
    at: float = 0.0
    machine: int | None = None
    origin: str = ""
    """The store it was sent from; empty for what was seen here."""


@dataclass(frozen=True, slots=True)
class StoredDecision:
    """A decision with its evidence; predictions stand next to measurements."""

    graph: str
    action: str
    why: str
    subject: str = ""
    evidence: Mapping[str, str | int | float | bool | None] = field(default_factory=dict[str, Any])
    predicted_ns: float | None = None
    measured_ns: float | None = None
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class SpeedRow:
    """One look at how fast the machine is now."""

    probe: str
    value: float
    baseline: float
    at: float = 0.0
    machine: int | None = None

    @property
    def ratio(self) -> float:
        """Above 1: slower than it was when the baseline was taken."""
        return self.value / self.baseline if self.baseline else math.nan


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A performance model: named arrays and plain facts about them."""

    name: str
    version: int
    arrays: Mapping[str, Array]
    facts: Mapping[str, Any]
    at: float = 0.0
    machine: int | None = None


# --- to and from text ---------------------------------------------------------------------------------------------------


def numbers_to_text(numbers: Mapping[str, Any]) -> str:
    """Features as JSON; what is not a finite number is the caller's error."""
    for name, value in numbers.items():
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise InputError(f"feature {name!r} is {value!r}, not a finite number")
    return json.dumps({str(k): float(v) for k, v in sorted(numbers.items())}, separators=(",", ":"))


def numbers_from_text(text: str) -> dict[str, float]:
    """The reverse; raises ValueError where the text holds something else."""
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError("features are not an object")
    for value in found.values():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"{value!r} is not a finite number")
    return {str(k): float(v) for k, v in found.items()}


def object_from_text(text: str) -> dict[str, Any]:
    """A JSON object; raises ValueError where the text holds something else."""
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError("not a JSON object")
    return found


def list_from_text(text: str) -> list[float]:
    """A JSON list of numbers; raises ValueError where the text holds something else."""
    found = json.loads(text)
    if not isinstance(found, list):
        raise ValueError("not a list")
    return list(numbers_from_text(json.dumps(dict(enumerate(found)))).values())


def array_to_row(name: str, array: Array) -> dict[str, Any]:
    """An array as its element type, extents and bytes."""
    kind = f"{array.dtype.kind}{array.dtype.itemsize}"
    if kind not in DTYPES:
        raise InputError(f"array {name!r} holds {array.dtype}", because="only plain numbers are stored")
    little = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False)
    return {"name": name, "dtype": kind, "shape": json.dumps(list(array.shape)), "data": little.tobytes()}


def array_from_row(dtype: str, shape: str, data: bytes) -> Array:
    """The reverse, on a copy of the bytes; raises ValueError where they do not fit together."""
    if dtype not in DTYPES:
        raise ValueError(f"element type {dtype!r}")
    extents = json.loads(shape)
    if not isinstance(extents, list) or any(type(n) is not int or n < 0 for n in extents):
        raise ValueError(f"extents {shape!r}")
    kind = np.dtype("<" + dtype)
    if math.prod(extents) * kind.itemsize != len(data):
        raise ValueError(f"{len(data)} bytes for {dtype}{extents}")
    return np.frombuffer(data, kind).reshape(extents).astype(kind.newbyteorder("="))
