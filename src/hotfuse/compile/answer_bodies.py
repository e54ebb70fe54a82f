"""What workers answer, one frozen value per kind of answer; and the answer as a whole.

    answer  ::= answer: its kind, version, the body's fields (`compile.workers.checked_json`), and blobs beside them
    refusal ::= the same of kind "refusal": an error, and why

An answer is read as a whole before anything is done with it. One that does not fit what was asked is refused by name, as an
error of the request, and counted (`base.faults`): `stats()` and `explain()` show it. The schemas stand in
`tests/golden/answers.txt`: a changed field needs another `VERSION`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol, TypeVar

from hotfuse.analysis.resources import CorePeaks, Work
from hotfuse.base.errors import CaptureError, InternalError
from hotfuse.base.events import Why
from hotfuse.base.faults import faults
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.compile.workers.checked_json import decoded, encoded
from hotfuse.compile.workers.wire import Message

VERSION = 2
"""Of the answers' schema: a reader refuses answers of another one."""
Json = Mapping[str, Any]
"""Something that has a text form of its own."""
Histories = Mapping[str, Mapping[str, tuple[float, ...]]]
"""`compile.learn.strategy_history`: numbers by name, of everything that is remembered."""


class AnswerBody(Protocol):
    """What one kind of answer says."""

    kind: ClassVar[str]
    """Its name on the wire."""


Answered = tuple[AnswerBody, list[bytes]]
"""An answer in the worker: what it says, and the blobs that travel beside it."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why there is no answer."""

    kind: ClassVar[str] = "refusal"
    what: str
    where: str
    because: str
    hint: str
    why: str
    """A `base.events.Why`, by its name."""


# --- capturing


@dataclass(frozen=True, slots=True)
class ReadyAnswer:
    """What captures take is loaded."""

    kind: ClassVar[str] = "ready"


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """A constant of a graph, whose data are a blob."""

    dtype: str
    shape: tuple[int, ...]
    device: str


@dataclass(frozen=True, slots=True)
class CaptureAnswer:
    """A captured graph as text (`frontends.captured.Captured`); the data of its constants are the blobs, in their order."""

    kind: ClassVar[str] = "capture"
    graph: str
    shared: Mapping[str, int]
    constants: Mapping[str, TensorHeader]
    asks_grad_mode: bool
    notes: tuple[str, ...]
    written: tuple[int, ...]
    returned: tuple[tuple[int, int], ...]
    draws: tuple[tuple[str, tuple[int, ...], str], ...]
    """Op, shape and dtype of each."""
    warned: tuple[tuple[str, str, str, int, str], ...]
    """The fields of `frontends.captured.Warned`."""
    paths: int
    logged: tuple[tuple[str, int], ...]
    asked: tuple[tuple[str, int], ...]
    """The fields of `frontends.captured.Asked`."""


# --- kernels


@dataclass(frozen=True, slots=True)
class MadeKernel:
    """A kernel as its text, with what is known of it; its object code is a blob."""

    kernel: str
    """This and the four behind it: `lower.common.codec.to_json`."""
    header: str
    instructions: tuple[str, ...]
    arguments: tuple[Json, ...]
    strides: tuple[tuple[str, tuple[str, ...]], ...]
    ops: str
    """What of the graph it computes."""
    compile_s: float
    kernel_us: float | None = None
    """What it took in its trial; None for one that serves some sizes only."""
    library_us: float | None = None
    """What the library took there."""
    predicted_us: float | None = None
    """None where no model knows this machine."""
    multiplies: str = ""
    """Which instructions multiply."""
    kinds: str = ""
    """Which precision variants were compared."""
    use: Json | None = None
    """`analysis.resources.ResourceUse`"""
    variants: Json | None = None
    """`compile.variants.variant_table`"""
    skips: Json | None = None
    """`compile.variants.skips`"""

    def lowered(self) -> dict[str, Any]:
        """What `lower.common.codec` makes a kernel of."""
        return {"kernel": self.kernel, "header": self.header, "instructions": self.instructions, "arguments": self.arguments,
                "strides": self.strides}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """A group of nodes: how many, what kind; and of one that may get a kernel its key, its work, and what is thought of it."""

    nodes: int
    kind: str
    key: str | None = None
    """Equal for groups that are the same but for their names; None for one that stays with the library."""
    ops: str = ""
    work: Work | None = None
    library_s: float | None = None
    roofline_s: float | None = None
    kernel_s: float | None = None
    """Predicted, where a model knows this machine, or measured while it served."""
    high_s: float | None = None
    """What it takes at most, with the stated confidence."""
    measured_us: float | None = None
    """What its kernel took while it served."""
    open: float | None = None
    """The part of its keys that masks left open."""
    library_measured: bool = False
    """Whether the library's time is one of serving."""


@dataclass(frozen=True, slots=True)
class GroupedBody:
    """A graph in the order its groups need, or that of a branch."""

    graph: str
    id: str
    groups: tuple[GroupFacts, ...]
    branches: Mapping[str, tuple[int, ...]]
    """By the number of a group that is a control node: which of the bodies its branches are."""
    choices: tuple[str, ...]
    """What the fusion engine decided."""
    predicted_us: float | None = None
    """What the whole graph is predicted to take, said of the first body."""


@dataclass(frozen=True, slots=True)
class PlanAnswer:
    """How a graph is grouped."""

    kind: ClassVar[str] = "plan"
    bodies: tuple[GroupedBody, ...]
    peaks: CorePeaks
    history: Histories


@dataclass(frozen=True, slots=True)
class UnitMissing:
    """Graphs that the worker has not seen: they are to come along."""

    kind: ClassVar[str] = "unit: missing"
    missing: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class UnitKernel:
    """A kernel that won its trial; its code is the first blob, that of the others behind it."""

    kind: ClassVar[str] = "unit: kernel"
    kernel: MadeKernel
    text: str
    """A name for the group in its normal form."""
    also: tuple[MadeKernel, ...]
    """For other sizes."""
    notes: tuple[str, ...]
    keys: tuple[str, ...] = ()
    """The keys of all uses, where they may differ."""


@dataclass(frozen=True, slots=True)
class UnitCut:
    """Where the group is cut, and the two pieces that each use becomes."""

    kind: ClassVar[str] = "unit: cut"
    split: int
    why: str
    pieces: tuple[tuple[GroupFacts, ...], ...]


@dataclass(frozen=True, slots=True)
class UnitRefused:
    """Why the group stays with the library."""

    kind: ClassVar[str] = "unit: refused"
    refused: str


@dataclass(frozen=True, slots=True)
class RunsAnswer:
    """A body with its runs, and the kernels they need besides: their code comes first, then that of the runs' drivers."""

    kind: ClassVar[str] = "runs"
    body: Json
    """`compile.parts.runs_from`"""
    kernels: tuple[MadeKernel, ...]
    drivers: int
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ProbesAnswer:
    """The names of probes, one a blob."""

    kind: ClassVar[str] = "probes"
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CountingAnswer:
    """Kernels that count, by number, one a blob; why others cannot."""

    kind: ClassVar[str] = "counting"
    numbers: tuple[int, ...]
    kernels: tuple[str, ...]
    refused: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DevicePlanAnswer:
    """How a graph on a GPU is grouped: of each group its nodes and its kind."""

    kind: ClassVar[str] = "device plan"
    graph: str
    groups: tuple[tuple[int, str], ...]
    foldable: bool
    """Whether taking norms into products makes fewer groups."""


@dataclass(frozen=True, slots=True)
class MadeDeviceKernel:
    """A kernel for a GPU in one tiling; its code is a blob."""

    lowered: Json
    """`lower.common.codec`"""
    built: Json
    """`backends.device_code.BuiltDeviceKernel` without its code"""
    tiling: str
    work: Mapping[str, float]
    """`hpm.device.work`"""


@dataclass(frozen=True, slots=True)
class DeviceUnitAnswer:
    """A group's kernels to try, or why there is none."""

    kind: ClassVar[str] = "device unit"
    kernels: tuple[MadeDeviceKernel, ...]
    because: str
    by: str = ""
    """Who chose the tilings."""


# --- learning


@dataclass(frozen=True, slots=True)
class DeviceTimesAnswer:
    """How many rows there are, and what a new model is worth, where one was made."""

    kind: ClassVar[str] = "device times"
    rows: int
    because: str = ""
    """Why nothing was kept."""
    model: int | None = None
    """The new model's number."""
    held_out: Json | None = None
    """Its errors on problems that it has not seen."""
    chooses: bool | None = None
    """Whether it ranks well enough to choose."""


@dataclass(frozen=True, slots=True)
class KernelAnswer:
    """A kernel to be measured; its code is the blob."""

    kind: ClassVar[str] = "kernel"
    lowered: Json
    """`lower.common.codec`"""
    seconds: Mapping[str, float]
    """Of compiling, by phase."""


@dataclass(frozen=True, slots=True)
class LearnedAnswer:
    """What is remembered by now."""

    kind: ClassVar[str] = "learned"
    history: Histories


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a model that idle time trained is worth."""

    samples: int
    mape: float
    kind: str


@dataclass(frozen=True, slots=True)
class IdleAnswer:
    """What idle time was used for."""

    kind: ClassVar[str] = "idle"
    measured: int
    left: bool
    """Whether there is more to measure."""
    model: int | None = None
    """The number of a model that was trained."""
    facts: ModelFacts | None = None
    refused: Mapping[str, int] | None = None
    """Kernels that could not be made, by why."""
    because: str = ""
    """Why nothing was done."""


@dataclass(frozen=True, slots=True)
class PartitionDiagnosis:
    """What limits a partition."""

    bottleneck: str
    because: str
    overhead: float
    utilization: Mapping[str, float]
    source: str
    measured_rooflines: bool
    hz: float
    predicted_us: float | None


@dataclass(frozen=True, slots=True)
class ProfileAnswer:
    """Diagnoses in the order of the partitions that were asked about; none where there is no store."""

    kind: ClassVar[str] = "profile"
    parts: tuple[PartitionDiagnosis, ...]
    model: int
    """The number of the model that predicted; 0: none did."""


BODIES: tuple[type[Any], ...] = (
    Refusal, ReadyAnswer, CaptureAnswer, PlanAnswer, UnitMissing, UnitKernel, UnitCut, UnitRefused, RunsAnswer, ProbesAnswer,
    CountingAnswer, DevicePlanAnswer, DeviceUnitAnswer, DeviceTimesAnswer, KernelAnswer, LearnedAnswer, IdleAnswer, ProfileAnswer,
)  # fmt: skip
UNIT = (UnitMissing, UnitKernel, UnitCut, UnitRefused)
"""What a request for a unit may be answered."""
_AROUND = frozenset({"answer", "version", "usage"})
"""What stands beside the body's fields."""
T = TypeVar("T", bound=AnswerBody)


def message(body: AnswerBody, blobs: Sequence[bytes] = ()) -> Message:
    """An answer as it travels, and as it is kept."""
    return {"answer": body.kind, "version": VERSION, **encoded(body)}, list(blobs)


def refusal(e: CaptureError) -> Message:
    """An error as it travels."""
    return message(Refusal(e.what, e.where, e.because, e.hint, e.why.name))


def checked(answer: Message) -> Message:
    """The message, or the refusal that it carries raised."""
    header, _ = answer
    if header.get("answer") == Refusal.kind:
        said, _ = _read(answer, (Refusal,))
        why = Why.__members__.get(said.why, Why.WRONG_ANSWER)  # a worker of changed sources may know reasons that nobody here knows
        raise CaptureError(said.what, where=said.where, because=said.because, hint=said.hint, why=why)
    return answer


def received(answer: Message, *kinds: type[T]) -> tuple[T, list[bytes]]:
    """What a worker says, as one of these kinds, and its blobs; raises the CaptureError that it refused with. What fits none of
    them is counted, and raised as one too."""
    return _read(checked(answer), kinds)


def kept_body(answer: Message, kind: type[T], where: str) -> T:
    """What an answer said that was kept: what its address rests on makes it one of this version."""
    return decoded(kind, _own(answer[0]), where)


def _read(answer: Message, kinds: tuple[type[T], ...]) -> tuple[T, list[bytes]]:
    header, blobs = answer
    said = str(header.get("answer"))
    try:
        if (version := header.get("version")) != VERSION:
            raise InternalError(f"an answer of version {version}", because=f"this process reads version {VERSION}")
        kind = next((k for k in kinds if k.kind == said), None)
        if kind is None:
            asked = " or ".join(k.kind for k in kinds)
            raise InternalError(f"an answer of kind {said!r}", because=f"what was asked is answered by {asked}")
        return decoded(kind, _own(header), f"an answer of kind {said!r}"), blobs
    except InternalError as e:
        faults.note("a worker's answer", e)
        raise CaptureError(e.what, because=e.because, why=Why.WRONG_ANSWER) from e


def _own(header: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in header.items() if k not in _AROUND}
