"""What workers are asked for, one frozen value per kind of request; and the request as a whole.

    request ::= kind, version, the body's fields, what the kernels have to be, which stores it speaks of
                (`compile.workers.checked_json`)  (`request_context.RequestSettings`)  (`request_context.RequestContext`)

A request is made of all three, so that none can be forgotten, and read as a whole before anything is done. A worker that speaks
another version refuses. The schemas stand in `tests/golden/requests.txt`: a changed field needs another `VERSION`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, ClassVar, Literal, Protocol

from hotfuse.base.errors import InternalError
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.base.settings import Settings
from hotfuse.compile.request_context import RequestContext, RequestSettings, context_of, settings_of
from hotfuse.compile.workers.checked_json import decoded, encoded
from hotfuse.lower.cpu.tiling import Core
from hotfuse.profile.traffic import NOTHING_SEEN, TrafficSeen

Sizes = Mapping[str, int]
Json = Mapping[str, Any]
"""Something that has a text form of its own."""


class RequestBody(Protocol):
    """What one kind of request says."""

    kind: ClassVar[str]
    """Its name on the wire."""


# --- capturing


@dataclass(frozen=True, slots=True)
class ReadyRequest:
    """Load what captures of a front end take, so that the one that follows begins at once."""

    kind: ClassVar[str] = "ready"
    front: Literal["torch", "onnx"]


@dataclass(frozen=True, slots=True)
class TorchCapture:
    """A PyTorch model, which comes along as a blob."""

    kind: ClassVar[str] = "torch"
    call: Json
    """`wire.call_to_json`"""


@dataclass(frozen=True, slots=True)
class OnnxCapture:
    """An ONNX model, which comes along as a blob."""

    kind: ClassVar[str] = "onnx"
    call: Json


@dataclass(frozen=True, slots=True)
class PresentCapture:
    """A model that cannot be sent, in a process that has it."""

    kind: ClassVar[str] = "present"
    number: int
    call: Json


# --- kernels


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """How a graph is grouped at the sizes of a real call, by what calls were seen to bring."""

    kind: ClassVar[str] = "plan"
    graph: str
    dims: Sizes
    seen: TrafficSeen = NOTHING_SEEN


@dataclass(frozen=True, slots=True)
class UnitRequest:
    """A kernel for nodes of graphs that the worker has seen, or that come along as blobs."""

    kind: ClassVar[str] = "unit"
    group: str
    """What kind of group it is."""
    dims: Sizes
    alike: tuple[tuple[str, tuple[int, ...]], ...]
    """All its uses: the graph by its name, and the nodes. They are cut as the first is."""
    texts: tuple[str, ...] = ()
    """The graphs that come along, in the order of the blobs."""
    split: bool = True
    """Whether it may be cut."""
    joined: bool = False
    """Whether it is joined from two, so that its uses may turn out to differ."""
    beat: float | None = None
    """Microseconds of the two kernels that it has to beat."""
    variants: bool = False
    """Whether other kernels for other sizes are looked for."""


@dataclass(frozen=True, slots=True)
class RunsRequest:
    """Native runs for a graph that is cut into kernels."""

    kind: ClassVar[str] = "runs"
    body: Json
    """`compile.parts.body_to_json`"""
    dims: Sizes
    kernels: tuple[Json, ...]
    """`lower.common.codec.to_json`, each with its variants."""
    bridges_s: float | None = None
    """Seconds for kernels that runs need besides; None for as many as there are by default, 0 where the plan is unfinished."""


@dataclass(frozen=True, slots=True)
class ProbesRequest:
    """Code that looks at tensors."""

    kind: ClassVar[str] = "probes"


@dataclass(frozen=True, slots=True)
class CountingRequest:
    """Kernels that count at their stores."""

    kind: ClassVar[str] = "counting"
    numbers: tuple[int, ...]
    kernels: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DevicePlanRequest:
    """How a graph on a GPU is grouped."""

    kind: ClassVar[str] = "device plan"
    graph: str
    folded: bool = False
    """Whether products take in the layer norms between them."""


@dataclass(frozen=True, slots=True)
class DeviceUnitRequest:
    """Kernels for one group on a GPU."""

    kind: ClassVar[str] = "device unit"
    graph: str
    strides: Mapping[str, tuple[int, ...]]
    target: tuple[str, str, int]
    """`backends.device_code.GpuTarget`"""
    tf32: bool
    share: tuple[int, int]
    """Which of its tilings: every `share[1]`-th from `share[0]` on, so that several workers make the kernels of one group."""
    device: str = ""
    """Whose performance model chooses among all tilings, by name; empty: a count of what each program has to do."""
    every: bool = False
    """All tilings there are: to be measured for such a model."""
    wanted: str = ""
    """The one tiling that an earlier process chose; others are made where there is none of that name."""


# --- learning


@dataclass(frozen=True, slots=True)
class DeviceKernelTime:
    """What one kernel took on a device."""

    problem: str
    work: Mapping[str, float]
    """`hpm.device.work`"""
    seconds: float


@dataclass(frozen=True, slots=True)
class DeviceTimesRequest:
    """Keep what kernels took on a device, and make a model of them where there are enough more."""

    kind: ClassVar[str] = "device times"
    device: str
    """Its name."""
    arch: str
    shape: Json
    """`hpm.device.features.DeviceShape`"""
    times: tuple[DeviceKernelTime, ...]
    calibrated: bool = False
    """Whether nothing else ran meanwhile; else they were tried beside calls."""
    train: bool = False
    """Make a model however few are new."""


@dataclass(frozen=True, slots=True)
class KernelRequest:
    """A kernel for a group, cut for a given core: to be measured."""

    kind: ClassVar[str] = "kernel"
    graph: str
    core: Core


@dataclass(frozen=True, slots=True)
class LearnedRequest:
    """Numbers to add to those that are remembered."""

    kind: ClassVar[str] = "learned"
    more: Mapping[str, Mapping[str, tuple[float, ...]]]


@dataclass(frozen=True, slots=True)
class IdleRequest:
    """Measure kernels for some seconds."""

    kind: ClassVar[str] = "idle"
    seconds: float


@dataclass(frozen=True, slots=True)
class PartitionTimes:
    """What a partition took while it served."""

    graph: str
    sizes: Sizes
    library: bool
    """Whether the library runs it."""
    us: float
    n: int
    """Samples."""
    noise: float
    balance: float
    """How evenly its work goes round among threads, 0 to 1."""
    flops: int
    """By the branches that calls took, where it has any; -1: not known."""
    bytes: int
    """The same of what it moves."""


@dataclass(frozen=True, slots=True)
class ProfileRequest:
    """What limits partitions that took so long."""

    kind: ClassVar[str] = "profile"
    parts: tuple[PartitionTimes, ...]


BODIES: tuple[type[Any], ...] = (
    ReadyRequest, TorchCapture, OnnxCapture, PresentCapture, PlanRequest, UnitRequest, RunsRequest, ProbesRequest, CountingRequest,
    DevicePlanRequest, DeviceUnitRequest, DeviceTimesRequest, KernelRequest, LearnedRequest, IdleRequest, ProfileRequest,
)  # fmt: skip
_BY_KIND: Mapping[str, type[Any]] = {b.kind: b for b in BODIES}
_AROUND = frozenset({"kind", "version", "profiles", "record", "cache"} | {f.name for f in fields(RequestSettings)})
"""What stands beside the body's fields."""


@dataclass(frozen=True, slots=True)
class Request:
    """A question to a worker."""

    body: RequestBody
    asked: RequestSettings
    """What its kernels have to be."""
    context: RequestContext | None = None
    """The stores it speaks of; None where it reads and writes none."""

    def header(self) -> dict[str, Any]:
        """As it travels."""
        place = {} if self.context is None else self.context.header()
        return {"kind": self.body.kind, **encoded(self.body), **self.asked.header(), **place}


def request_of(body: RequestBody, settings: Settings, strategies: tuple[str, ...] = (), focus: str = "") -> Request:
    """A request as the user's settings ask it."""
    return Request(body, settings_of(settings, strategies, focus), context_of(settings))


def body_of(header: Mapping[str, Any]) -> Any:
    """What a request says, checked; raises InternalError where it says something else."""
    kind = str(header.get("kind"))
    if kind not in _BY_KIND:
        raise InternalError(f"no request of kind {kind!r}")
    own = {k: v for k, v in header.items() if k not in _AROUND}
    return decoded(_BY_KIND[kind], own, f"a request of kind {kind!r}")
