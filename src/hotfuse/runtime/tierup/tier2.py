"""Tier 2: plans that bet on what calls have in common: sizes that recur, a branch that goes one way, a mask that hides nothing,
rows of zeros.

Each stands behind a guard, or decides in its own code; none is deployed before it won.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from hotfuse.base.errors import InternalError
from hotfuse.base.events import Action, Why
from hotfuse.compile.request_context import EVERY
from hotfuse.compile.value import GENERATE
from hotfuse.compile.variants.skips import SKIP
from hotfuse.hpm.bottleneck import Strategy
from hotfuse.ir.graph import Graph
from hotfuse.runtime.epochs import epochs
from hotfuse.runtime.plan import Plan
from hotfuse.runtime.samples import Signature
from hotfuse.runtime.site import Entry, Site, named, way
from hotfuse.runtime.tierup.attempt import PROVEN_ON, Attempt, AttemptContext, demand_of, exchange, sizes_of
from hotfuse.runtime.tierup.bets import BranchBet, place
from hotfuse.runtime.tierup.padding import PADDING, NotPadded, packed_plan, padded_traffic, paying_share
from hotfuse.runtime.tierup.skipping import all_finite, products
from hotfuse.runtime.tierup.unmask import Open, opened
from hotfuse.specialize.row_demands import CannotPack
from hotfuse.specialize.shapes import at_sizes

BET_ON = 16
"""Kept calls that a bet on a branch is made up and proven with."""


def for_sizes(context: AttemptContext, site: Site, entry: Entry, signature: Signature) -> Attempt | None:
    """Kernels for sizes that recur."""
    inputs, what = entry.samples.inputs(signature), named(signature)
    if inputs is None:
        entry.mark_refused(what, "no inputs of this kind are kept")
        return None

    def make() -> Plan:
        fixed = at_sizes(entry.baseline.graph, dict(zip(entry.symbols, signature, strict=True)))
        demand = demand_of(entry)
        if entry.plan.sides is not None and all_finite(entry.weights):
            demand = replace(demand, strategies=(SKIP,), focus=EVERY)
        if any(t.is_cuda for t in inputs):
            demand = replace(demand, strategies=(GENERATE,))
        return replace(context.improve(fixed, entry.weights, inputs, demand=demand), tier=2)

    def deploy(better: Plan) -> None:
        present = entry.versions  # a call that fails takes them all away meanwhile
        if len(present) >= context.plans.settings.max_versions:
            shares = entry.samples.shares()
            rarest = min(present, key=lambda s: shares.get(s, 0.0))
            site.remove_version(entry, rarest)
            epochs.retire(present[rarest])
            context.decide(Action.DROP, Why.RARE, tier=2, sizes=sizes_of(entry, rarest), share=round(shares.get(rarest, 0), 3))
        if not site.admit_version(entry, signature, better):
            context.refuse(entry, what, Why.TOO_MANY, "the site serves too many kinds of calls", tier=2,
                         sizes=sizes_of(entry, signature))  # fmt: skip

    addresses = (entry.findings[0].bottleneck, Strategy.SPECIALIZE) if entry.findings else None
    return Attempt(what, make, lambda: entry.plan, [inputs], deploy, addresses, {"sizes": sizes_of(entry, signature)},
                   signature)


def with_device_kernels(context: AttemptContext, entry: Entry) -> Attempt | None:
    """Kernels generated for the device, where the graph's sizes are numbers."""
    inputs = entry.samples.inputs()
    if inputs is None:
        return None

    def make() -> Plan:
        demand = replace(demand_of(entry), strategies=(GENERATE,))
        return replace(context.improve(entry.baseline.graph, entry.weights, inputs, demand=demand), tier=2)

    return Attempt(GENERATE, make, lambda: entry.plan, entry.samples.several(PROVEN_ON), partial(exchange, entry))


def on_branch(context: AttemptContext, entry: Entry, at: int, outcome: bool, name: str) -> Attempt:
    """The branch that is taken, written out behind its condition."""
    graph, calls = entry.baseline.graph, entry.samples.several(BET_ON)
    before = entry.bets.get(name)
    made: list[BranchBet] = []

    def fast(piece: Graph, call: Sequence[torch.Tensor]) -> Plan:
        return context.improve(piece, entry.weights, call)

    def plain(piece: Graph, _call: Sequence[torch.Tensor]) -> Plan:
        return context.compile(piece, entry.weights)

    def make() -> Plan:
        made.append(place(graph, at, outcome, name, calls, fast, plain, before))
        return made[0].plan(graph)

    def deploy(better: Plan) -> None:
        entry.bets = {**entry.bets, name: made[0]}
        exchange(entry, better)

    about = {"condition": name, "outcome": outcome}
    return Attempt(way(name, outcome), make, lambda: entry.plan, calls, deploy, about=about)


def without_mask(context: AttemptContext, entry: Entry, found: Open) -> Attempt | None:
    """The graph without a mask, behind a guard on the mask."""
    calls = sorted(entry.samples.several(BET_ON), key=lambda c: not found.holds(c))  # raced on one that is meant, proven on all
    before = entry.plan
    if not calls or not found.holds(calls[0]):
        entry.mark_refused(found.attempt, "no inputs of this kind are kept")
        return None

    def make() -> Plan:
        fast = context.improve(found.graph, entry.weights, calls[0], demand=demand_of(entry))
        return opened(found, fast, before, entry.baseline.graph, entry.facts, context.plans.in_background)

    def deploy(better: Plan) -> None:
        if entry.plan is not before:
            entry.mark_refused(found.attempt, "the plan behind it was exchanged meanwhile")
            return
        entry.plan = better  # what it replaces goes on serving behind it
        entry.reset_hotness()

    return Attempt(found.attempt, make, lambda: before, calls, deploy, about={"mask": found.name}, meant=found.holds)


def without_rows(context: AttemptContext, site: Site, entry: Entry) -> Attempt | None:
    """Products whose input has rows of zeros, with a side that leaves them out."""
    calls = entry.samples.several(BET_ON)
    found = products(entry.plan, entry.weights, calls, context.compile)
    if isinstance(found, str):
        context.refuse(entry, SKIP, Why.NO_ZERO_ROWS, found, tier=2, what=SKIP, because=found)
        return None
    share = round(found.share, 3)
    context.decide(Action.SPECIALIZE, Why.RECURS, what=SKIP, products=len(found.focus), share=share, samples=len(calls))

    def make() -> Plan:
        demand = replace(demand_of(entry), strategies=(SKIP,), focus=",".join(found.focus))
        better = context.improve(entry.baseline.graph, entry.weights, found.calls[0], demand=demand)
        if better.sides is None:
            raise InternalError("the plan leaves no rows out", because="; ".join(better.notes)[:300])
        return replace(better, tier=2, attempt=SKIP)

    def deploy(better: Plan) -> None:
        if better.sides is not None:
            better.sides.begin()
        exchange(entry, better)
        for signature, version in list(entry.versions.items()):  # they multiply every row; such sizes get new ones
            site.remove_version(entry, signature)
            epochs.retire(version)

    return Attempt(SKIP, make, lambda: entry.plan, found.calls, deploy, about={"share": share})


def without_padding(context: AttemptContext, site: Site, entry: Entry) -> Attempt | None:
    """Live rows of padded batches, packed; calls with too many of them run as before."""
    calls, before = entry.samples.several(BET_ON), entry.plan
    try:
        found = padded_traffic(entry.baseline.graph, entry.weights, calls, context.plans.settings.padding == "ignore")
    except (CannotPack, NotPadded) as e:
        context.refuse(entry, PADDING, Why.NOT_PACKED, str(e), isinstance(e, NotPadded), tier=2, what=PADDING, because=str(e))
        return None
    if not all_finite(entry.weights):
        said = "weights are not finite, which dead rows would spread"
        context.refuse(entry, PADDING, Why.NOT_PACKED, said, tier=2, what=PADDING, because=said)
        return None
    share, packing = round(found.share, 3), found.packing
    context.decide(Action.SPECIALIZE, Why.RECURS, what=PADDING, mask=packing.mask.name, live=share, products=packing.products,
                 samples=len(calls))
    limits: list[float] = []

    def make() -> Plan:
        sample = found.calls[0]
        given = found.packer(sample)
        if not isinstance(given, tuple):
            raise InternalError("a kept call cannot be packed any more", because=given)
        fast = context.improve(packing.graph, entry.weights, [*sample, *given], demand=demand_of(entry))
        limits.append(paying_share(found.packer, fast.run, before.run, sample))
        return packed_plan(found, fast, before, entry.baseline.graph, limits[0])

    def meant(inputs: Sequence[torch.Tensor]) -> bool:
        return bool(limits) and found.packer.share(inputs) <= limits[0]

    def deploy(better: Plan) -> None:
        if entry.plan is not before:
            entry.mark_refused(PADDING, "the plan behind it was exchanged meanwhile", later=True)
            return
        entry.plan = better  # what it replaces goes on serving behind it
        entry.reset_hotness()
        for signature, version in list(entry.versions.items()):  # they compute every row
            site.remove_version(entry, signature)
            epochs.retire(version)

    about = {"mask": packing.mask.name, "live": share}
    shown = found.shown if packing.ignored else None
    return Attempt(PADDING, make, lambda: before, found.calls, deploy, about=about, meant=meant, shown=shown)
