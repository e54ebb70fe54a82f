"""What serves, as values: `fast.plans()` -> plan -> `kernels` -> `text("tile" | "llvm" | "asm")`, `cost`, `measured`.

    for plan in fast.plans():
        print(plan.tier, plan.call, plan.measured_us)
        for kernel in plan.kernels:
            print(kernel.name, kernel.cost, kernel.measured)
            print(kernel.text("asm"))

The same values are behind `explain()` (its `kernels`) and `hotfuse show`. They are snapshots: a plan that is exchanged later stays
what it was. Texts are made when they are asked for; `llvm` and `asm` load the compiler, which serving itself does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any

from hotfuse.backends import registry
from hotfuse.base.errors import InputError
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.base.structure import describe
from hotfuse.ir.text import show
from hotfuse.runtime.engine import Engine
from hotfuse.runtime.plan import Plan
from hotfuse.runtime.site import Entry
from hotfuse.tile.compressed import StoredKernel
from hotfuse.tile.program import Kernel


def kernel_text(kernel: Kernel, stage: str, backend: str = registry.AUTO) -> str:
    """A kernel's code at one of its back end's stages: tile assembly, LLVM IR, machine code."""
    own = registry.kernels(backend)
    if stage not in own.stages:
        raise InputError(f"the back end {own.name} has no stage {stage!r}", hint=f"one of {', '.join(own.stages)}")
    return own.text(stage, kernel)


@dataclass(frozen=True, slots=True)
class KernelCost:
    """What a kernel has to do, at the sizes of the call it was made for."""

    flops: int | None
    bytes: int | None
    """To and from memory; None where only data decide."""
    predicted_us: float | None
    """By the performance model of this machine; None where there is none."""


@dataclass(frozen=True, slots=True)
class KernelTimes:
    """What the worker measured when it made a kernel, at the sizes of the call it was made for."""

    kernel_us: float
    library_us: float
    """The same nodes, by torch's own kernels."""


@dataclass(frozen=True, slots=True)
class PlanKernel:
    """A generated kernel of a plan."""

    number: int
    name: str
    cost: KernelCost
    measured: KernelTimes | None
    """None for one that serves some sizes only, and was not timed at those of the call."""
    stored: StoredKernel = field(repr=False)
    backend: str = registry.AUTO
    """The back end it was made by, as the settings name it."""

    def text(self, stage: str = "tile") -> str:
        """Its code: `tile`, `llvm` or `asm`, or whatever stages its back end has."""
        return kernel_text(self.stored.kernel(), stage, self.backend)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, without the code."""
        times = self.measured
        return {
            "number": self.number, "name": self.name, "flops": self.cost.flops, "bytes": self.cost.bytes,
            "predicted_us": self.cost.predicted_us,
            "kernel_us": None if times is None else times.kernel_us, "library_us": None if times is None else times.library_us,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class ServedPlan:
    """A plan that serves some calls of a model."""

    call: str
    """The calls: their structure."""
    sizes: Mapping[str, int]
    """Of a plan for recurring sizes; empty for one that serves all of its captured graph."""
    tier: int
    calls: int
    """Of its captured graph, all plans of it together."""
    measured_us: float | None
    """Of a call, as live calls showed it."""
    kernels: tuple[PlanKernel, ...]
    notes: tuple[str, ...]
    plan: Plan = field(repr=False)

    def text(self) -> str:
        """Its graph."""
        return show(self.plan.graph)


def kernels_of(plan: Plan, backend: str = registry.AUTO) -> tuple[PlanKernel, ...]:
    """The generated kernels of a plan, in the order of their numbers."""
    return tuple(_kernel(number, kept, backend) for number, kept in sorted(plan.kernels.stored.items()))


def _kernel(number: int, kept: StoredKernel, backend: str) -> PlanKernel:
    facts = kept.facts
    timed = "kernel_us" in facts and "library_us" in facts
    times = KernelTimes(facts["kernel_us"], facts["library_us"]) if timed else None
    flops, moved = (int(facts[n]) if n in facts else None for n in ("flops", "traffic"))
    return PlanKernel(number, kept.name, KernelCost(flops, moved, facts.get("predicted_us")), times, kept, backend)


def measured_us(entry: Entry) -> float | None:
    """What a call takes: by the audit's rounds, else by the calls that were looked at."""
    audit = entry.audits.get(None)
    found = audit.typical_us() if audit is not None else None
    return entry.seconds / entry.heat * 1e6 if found is None and entry.heat and entry.seconds else found


def plans_of(engine: Engine) -> tuple[ServedPlan, ...]:
    """The plans of a served model, each captured graph's general one before those for sizes that recur."""
    found: list[ServedPlan] = []
    for site in list(engine.sites.values()):
        for entry in site.entries:
            every = [(dict[str, int](), entry.plan, measured_us(entry))]
            every += [(dict(zip(entry.symbols, s, strict=True)), p, None) for s, p in entry.versions.items()]
            found += [
                ServedPlan(describe(site.spec), sizes, plan.tier, entry.calls, us, kernels_of(plan, engine.settings.backend),
                           (*entry.notes, *plan.notes), plan)
                for sizes, plan, us in every
            ]  # fmt: skip
    return tuple(found)
