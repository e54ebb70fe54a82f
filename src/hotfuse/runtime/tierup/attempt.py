# pyright: reportPrivateUsage=false
# A tensor's version has no public name.
"""An attempt at a better plan as a value: how it is made, what it is raced against, on which calls, and how it would be swapped in.

The modules that propose one (`runtime.tierup.tier1`, `runtime.tierup.tier2`, `runtime.tierup.strategies`) say these things;
`runtime.tierup.attempt_runner` carries all of them out in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import field
from functools import cache, partial
from typing import Any, Protocol, runtime_checkable

import torch

from hotfuse.backends.protocol import Run
from hotfuse.base.events import Action, EvidenceValue, Why
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.compile.frequency import Outcomes
from hotfuse.compile.value import FIRST_PLAN_GAIN, LATER_PLAN_GAIN, CompileProgress, Demand
from hotfuse.hpm.bottleneck import Bottleneck, Strategy
from hotfuse.ir.graph import Graph
from hotfuse.runtime.epochs import epochs
from hotfuse.runtime.observe.control_outcomes import MAX_CALLS as CALLS_ASKED
from hotfuse.runtime.observe.control_outcomes import outcomes_of
from hotfuse.runtime.observe.traffic import traffic_of
from hotfuse.runtime.plan import Plan
from hotfuse.runtime.plans import Plans
from hotfuse.runtime.samples import CallSamples, Signature
from hotfuse.runtime.serve.other_paths import fits
from hotfuse.runtime.site import Entry
from hotfuse.runtime.tierup.layers.layer import Layer
from hotfuse.runtime.tierup.lull import Lull
from hotfuse.runtime.warm_start import MadeOf
from hotfuse.specialize.outcomes import BetContext, family_of
from hotfuse.specialize.table import BRANCH, AttemptKey

PROVEN_ON = 4
"""Kinds of calls a plan is proven on."""
MAX_CALLS = 2 / 3
"""Calls of one kind that are a larger part than this of those of late are what a compilation is for."""

Weights = Mapping[str, torch.Tensor]
Compile = Callable[[Graph, Weights], Plan]
"""A graph as a tier-0 plan, at once."""
Progress = Callable[[Callable[[], Plan], CompileProgress], None]
"""Told while kernels are made: a plan of those there are, made on demand, and how far that is."""


class Improve(Protocol):
    """A graph as a plan of a higher tier; may take seconds; raises a HotfuseError where there is none."""

    def __call__(
        self, graph: Graph, weights: Weights, sample: Sequence[torch.Tensor], /, progress: Progress | None = None,
        demand: Demand | None = None,
    ) -> Plan:
        """`demand`: how much the graph is used; `progress` may deploy what there is before all of it is done."""
        ...


@runtime_checkable
class Remembers(Protocol):
    """What makes plans may know those that earlier processes made."""

    def remembered(self, graph: Graph, weights: Weights, sample: Sequence[torch.Tensor], /) -> Plan | None:
        """The plan of a graph, linked; None where there is none."""
        ...


@runtime_checkable
class WorksAhead(Protocol):
    """What makes plans in other processes may begin before a plan is asked for."""

    def ahead(self, graph: Graph, weights: Weights, sample: Sequence[torch.Tensor], /) -> None:
        """Begin what a first plan of a graph takes; returns at once."""
        ...


@runtime_checkable
class CalledOff(Protocol):
    """What makes plans in other processes can be told that nobody wants them any more."""

    def call_off(self) -> None:
        """End what runs, and whatever would begin from now on."""
        ...


@dataclass(frozen=True, slots=True)
class AttemptContext:
    """What attempts for the plans of one model are made with."""

    plans: Plans
    compile: Compile
    improve: Improve

    def decide(self, action: Action, why: Why, **evidence: EvidenceValue) -> None:
        """Say what was decided, and on what evidence."""
        self.plans.log.decide(action, why, self.plans.model.name, **evidence)

    def vet(self, entry: Entry) -> None:
        """Where a graph has some paths through code that reads its data, of kept calls those are let go that take others: they say
        nothing of a plan, but that a further path is wanted. In the background."""
        if (balance := entry.balance) is None:
            return
        lull, inline = Lull(), self.plans.settings.capture == "inline"

        def has(call: Sequence[torch.Tensor]) -> bool:
            return fits(entry.baseline.run, call, nullcontext() if inline else lull.computing())

        balance.vetted(*entry.samples.vet(has))

    def refuse(self, entry: Entry, attempt: AttemptKey, why: Why, reason: str, /, **evidence: EvidenceValue) -> None:
        """Refuse an attempt: it is not tried again until what it rested on changes."""
        entry.mark_refused(attempt, reason)
        self.decide(Action.REFUSE, why, **evidence)

    def postpone(self, entry: Entry, attempt: AttemptKey, why: Why, reason: str, /, **evidence: EvidenceValue) -> None:
        """Refuse an attempt for now: it is tried again after a while."""
        entry.mark_refused(attempt, reason, later=True)
        self.decide(Action.REFUSE, why, **evidence)


@dataclass(frozen=True, slots=True)
class Attempt:
    """A plan that may be better for some calls of an entry."""

    key: AttemptKey
    """What was refused under it is not tried again."""
    make: Callable[[], Plan]
    """May take seconds; raises where there is none. It may add to `calls`."""
    rival: Callable[[], Plan]
    """What it must beat, asked when it is there."""
    calls: Sequence[Sequence[torch.Tensor]]
    """It is proven on all of them, and raced on the first."""
    deploy: Callable[[Plan], None]
    addresses: tuple[Bottleneck, Strategy] | None = None
    """What it is meant to help against, and how, where its outcome is a lesson about that."""
    about: Mapping[str, EvidenceValue] = field(default_factory=dict[str, EvidenceValue])
    """What its decision says besides."""
    signature: Signature | None = None
    """The only sizes it is for; None: any."""
    meant: Callable[[Sequence[torch.Tensor]], bool] | None = None
    """Which calls it is for, where not all: live calls that it is not for do not count."""
    shown: Callable[[Sequence[torch.Tensor], Sequence[Any]], tuple[Any, ...]] | None = None
    """What of a call's outputs has to agree, where the user says that not all of it does; None: everything."""

    remembered: bool = False
    """Whether an earlier process made it: what that one found out is not found out again."""
    made_of: MadeOf | None = None
    """What its plan has copies of, where it was made before it is tried."""

    share: float = 1.0
    """The part of the calls that it is for."""

    def compared(self, run: Run) -> Run:
        """A run as its proof sees it."""
        shown = self.shown
        return run if shown is None else lambda *inputs: shown(inputs, run(*inputs))

    @property
    def tier(self) -> int:
        """The tier its plan would be of."""
        return self.key.tier


def exchange(entry: Entry, better: Plan, layers: tuple[Layer, ...] = (), *, kept: bool = False) -> None:
    """Swap the plan of an entry: one reference store. `kept`: the old one goes on serving inside of the new one."""
    old, entry.plan, entry.layers, entry.weighed = entry.plan, better, layers, entry.weighed.exchanged()
    if not any(layer.key.row == BRANCH for layer in layers):
        entry.bets = {}
    if old is not entry.baseline and not kept:
        epochs.retire(old)
    entry.reset_hotness()


def demand_of(context: AttemptContext, entry: Entry) -> Demand:
    """What a call takes, from the calls looked at since the plan was exchanged. And, asked while units are compiled: which sizes
    most calls have, since what no worker has begun by then is compiled for those; and which way calls go at branches and loops,
    since that says how often units run. And, asked when the graph is planned: what its calls were seen to bring.

    How often the graph is called is left open: a model that serves is expected to go on serving, so no unit is given up because
    its estimated saving is small. Trials decide that.
    """
    took = entry.seconds / entry.heat * 1e6 if entry.heat and entry.seconds else None
    gain = FIRST_PLAN_GAIN if entry.plan is entry.baseline else LATER_PLAN_GAIN
    return Demand(library_us=took, gain=gain, of_late=lambda: _most(entry.samples), outcomes=_outcomes(context, entry),
                  seen=traffic_of(context.plans.call_sampler, entry, context.plans.log))


def _outcomes(context: AttemptContext, entry: Entry) -> Callable[[], Outcomes]:
    """What sampled calls did at branches and loops; before the first one, what kept calls do, which are run once for it."""
    calls = partial(entry.samples.several, CALLS_ASKED if entry.samples.real else 0)
    kept = cache(lambda: outcomes_of(entry.baseline.graph, entry.weights, calls()))
    return lambda: context.plans.call_sampler.outcomes(entry.key) or kept()


def _most(samples: CallSamples) -> list[tuple[int, ...]] | None:
    """The shapes of inputs that most calls bring of late; None where no kind of calls is most, or none of it is kept."""
    signature, share = next(iter(samples.shares().items()), ((), 0.0))
    inputs = samples.inputs(signature) if share > MAX_CALLS else None
    return None if inputs is None else [tuple(t.shape) for t in inputs]


def versions_of(weights: Weights) -> list[int]:
    """How often each was written in place, as far as torch says."""
    return [t._version for t in weights.values() if not t.is_inference()]


def sizes_of(entry: Entry, signature: Signature) -> str:
    """Sizes by their names, for a reader."""
    return ", ".join(f"{s}={n}" for s, n in zip(entry.symbols, signature, strict=True))


def bet_context(entry: Entry, share: float) -> BetContext:
    """What a bet on an entry is made in: how often it holds, what model it is, and what a call takes now."""
    return BetContext(share, family_of(entry.baseline.graph), entry.trade.us[1] if entry.trade is not None else None)
