"""What a unit of compilation is worth: the time it saves while it is used, less the time it takes to make.

    value = saving per run x expected runs a call (`compile.frequency`) / seconds to compile

The estimator is a function that is passed in; one knows only rooflines and what compiling units of the same kind took, the other
believes what the performance model predicted, where the profile store of the worker holds one.
How often the model is called makes all of it more or less, so units are ordered by what they save per second of compiling.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import field
from typing import TYPE_CHECKING

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.fusion.kinds import GroupKind
from hotfuse.profile.snapshot import ControlSeen
from hotfuse.profile.traffic import NOTHING_SEEN, TrafficSeen

if TYPE_CHECKING:
    from hotfuse.analysis.resources import Work
    from hotfuse.compile.frequency import Outcomes
    from hotfuse.ir.graph import Graph

_FIRST_GUESS: dict[str, float] = {
    GroupKind.ATTENTION: 0.8, GroupKind.GEMM_WEIGHT: 0.08, GroupKind.GEMM_ACTIVATION: 0.08, GroupKind.CONVOLUTION: 0.15,
    GroupKind.RECURRENT: 0.15, GroupKind.EXPERTS: 0.3, GroupKind.NIBBLES: 0.1,
}  # fmt: skip
"""Seconds to compile a kernel, by kind, before one was seen."""
_SHRINK = 0.3
"""How far one observation moves the estimate of its kind."""
LIBRARY_REACH = 0.85
"""The part of the roofline that the library's kernels reach, as a rule."""
RISK = 0.5
"""How much of the distance to an interval's far end counts against a kernel that nobody has built."""
UNKNOWN_SAVING = 5e-6
"""Seconds a unit of data-dependent size is thought to save."""
FIRST_PLAN_GAIN = 0.4
"""The part of its calls' time that a model's first plan of kernels is expected to save, and with it the capture before."""
LATER_PLAN_GAIN = 0.08
"""The same of a plan behind the first: for sizes that recur, or against a bottleneck."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of a unit before it is compiled."""

    kind: str
    work: Work
    library_s: float | None
    """The library's time, guessed or measured; None where it depends on data."""
    roofline_s: float | None = None
    """The least time of a single kernel."""
    ops: str = ""
    """What it computes, for a reader."""
    kernel_s: float | None = None
    """A single kernel's time, predicted; None where no model knows this machine."""
    high_s: float | None = None
    """What it hardly exceeds."""


@dataclass(frozen=True, slots=True)
class Expected:
    """An estimate."""

    saving_s: float
    """Per call of the unit."""
    compile_s: float


Estimator = Callable[[Facts], Expected]


def _nothing_seen(_graph: Graph) -> TrafficSeen:
    return NOTHING_SEEN


@dataclass(frozen=True, slots=True)
class Demand:
    """What a graph is compiled for: the library's time per call if known, what is to be tried, and what calls bring."""

    library_us: float | None = None
    strategies: tuple[str, ...] = ()
    """Candidates that are to be tried alone: what they are worth against a bottleneck is to be found out."""
    focus: str = ""
    """The groups that they are about, as `compile.request_context.text_id` calls them, between commas; empty for grouping."""
    gain: float = LATER_PLAN_GAIN
    """The part of the calls' time that is expected to be saved: how much of a busy machine the work may count on."""
    replanned: str = ""
    """Not empty where a graph that is served is planned again by weights as measured: what they are, in short."""
    serving: str = ""
    """The grouping that serves then (`Account.grouping`): where planning comes to the same, nothing is compiled."""
    of_late: Callable[[], Sequence[tuple[int, ...]] | None] | None = field(default=None, compare=False, repr=False)
    """Asked while the graph is compiled: the shapes of inputs that most calls bring by then; None where no kind is most."""
    outcomes: Callable[[], Outcomes] = field(default=dict[str, ControlSeen], compare=False, repr=False)
    """Asked while the graph is compiled: which way calls went at its branches, and how many trips its loops made."""
    seen: Callable[[Graph], TrafficSeen] = field(default=_nothing_seen, compare=False, repr=False)
    """Asked of the graph to be planned, when that begins: what calls were seen to bring."""


GENERATE = "generated device kernels"
"""The strategy that asks for kernels generated for a device, where library kernels already serve as recordings."""
FEW_TILINGS = "few tilings of each group"
"""Beside it: a first plan of such kernels, made of the tilings that are likeliest to be fast, while nothing better serves."""
ANY_DEMAND = Demand()
"""Nothing is known of its calls."""


@dataclass(slots=True)
class RooflineEstimator:
    """The estimator that needs no measurements, and learns compile times as it goes."""

    compile_s: dict[str, float] = field(default_factory=lambda: dict(_FIRST_GUESS))

    def __call__(self, facts: Facts) -> Expected:
        """The library's guessed time against a single kernel on the roofline."""
        compile_s = self.compile_s.get(facts.kind, 0.01 + 0.004 * facts.work.nodes)
        if facts.roofline_s is None or facts.library_s is None:
            return Expected(UNKNOWN_SAVING, compile_s)
        return Expected(max(0.0, facts.library_s / LIBRARY_REACH - facts.roofline_s), compile_s)

    def learn(self, kind: str, seconds: float) -> None:
        """A unit of this kind took so long to compile."""
        old = self.compile_s.get(kind)
        if kind in _FIRST_GUESS or old is not None:
            self.compile_s[kind] = seconds if old is None else old + _SHRINK * (seconds - old)


@dataclass(slots=True)
class Learned(RooflineEstimator):
    """The estimator that believes predictions where a unit has them, and rooflines where it has none."""

    def __call__(self, facts: Facts) -> Expected:
        """The library's time less the kernel's, with a margin for not knowing."""
        plain = RooflineEstimator.__call__(self, facts)
        if facts.kernel_s is None or facts.library_s is None:
            return plain
        likely = facts.kernel_s + RISK * max(0.0, (facts.high_s or facts.kernel_s) - facts.kernel_s)
        saving = facts.library_s - likely
        return Expected(saving if math.isfinite(saving) and saving > 0 else 0.0, plain.compile_s)


def worth(expected: Expected, runs: float) -> float:
    """Seconds saved per call and second of compiling, for what runs so often in a call."""
    return expected.saving_s * runs / max(expected.compile_s, 1e-3)


@dataclass(frozen=True, slots=True)
class CompileProgress:
    """How far a compilation is."""

    decided: float
    """The part of the expected saving that is decided, 0 to 1."""
    worked: float
    """The part of the work that is done: what is left may take long and be worth little, as branches are that calls seldom take."""
