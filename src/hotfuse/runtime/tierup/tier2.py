"""Tier 2: plans that bet on what calls have in common, one more specialization at a time (`specialize.table`).

Each stands behind a guard, or decides in its own code; none is deployed before it won.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from hotfuse.base.errors import InternalError
from hotfuse.base.events import Action, EvidenceValue, Why
from hotfuse.compile.value import FEW_TILINGS, GENERATE
from hotfuse.hpm.bottleneck import Strategy
from hotfuse.runtime.epochs import epochs
from hotfuse.runtime.plan import Plan
from hotfuse.runtime.samples import Signature
from hotfuse.runtime.serve.device_packing import DevicePackedRun
from hotfuse.runtime.serve.distinct_rows import DistinctRowsRun
from hotfuse.runtime.serve.packing import MOSTLY_LIVE, PackedRun, Padded
from hotfuse.runtime.site import Entry, Site
from hotfuse.runtime.tierup.attempt import PROVEN_ON, Attempt, AttemptContext, bet_context, exchange, sizes_of
from hotfuse.runtime.tierup.layers.compose import composer_of
from hotfuse.runtime.tierup.layers.distinct_rows import DistinctRowsLayer
from hotfuse.runtime.tierup.layers.layer import Layer, specialized, with_layer
from hotfuse.runtime.tierup.layers.zero_rows import ZeroRowsLayer
from hotfuse.runtime.tierup.padding import NotPadded, PaddedTraffic, PaddingLayer, padded_traffic
from hotfuse.runtime.tierup.skipping import products
from hotfuse.runtime.tierup.tier1 import fused
from hotfuse.specialize.distinct_rows import rowwise
from hotfuse.specialize.outcomes import SpecializationOutcomes
from hotfuse.specialize.recurring_sizes import at_sizes
from hotfuse.specialize.row_demands import CannotPack
from hotfuse.specialize.table import DEVICE_KERNELS, DUPLICATES, PADDING, ZERO_ROWS, AttemptKey, sizes_key

BET_ON = 16
"""Kept calls that a bet is made up and proven with."""
FIRST_VALUE = 0.15
"""Part of the calls' time that packing must be expected to save to come before tier 1: as much as that saves as a rule."""
PACKED, PACKED_BY_LIBRARY = AttemptKey(PADDING), AttemptKey(PADDING, "on library kernels")
PADDED_CALLS = AttemptKey(PADDING, "calls that are not packed")
Alongside = Callable[[], Callable[[], None]]
"""Begins something, and gives what waits until it is over."""


def for_sizes(context: AttemptContext, site: Site, entry: Entry, signature: Signature, share: float = 1.0) -> Attempt | None:
    """Kernels for sizes that recur, in plans with the layers that the entry's has."""
    inputs, key = entry.samples.inputs(signature), sizes_key(signature)
    if inputs is None:
        entry.mark_not_kept(key)
        return None
    composer, on_device = composer_of(context, entry), any(t.is_cuda for t in inputs)

    def make() -> Plan:
        fixed = at_sizes(entry.baseline.graph, dict(zip(entry.symbols, signature, strict=True)))
        used = replace(composer, demand=replace(composer.demand, strategies=(GENERATE,))) if on_device else composer
        return specialized(used.plan(fixed, [inputs], used.layers), used.layers)

    def deploy(better: Plan) -> None:
        present = entry.versions  # a call that fails takes them all away meanwhile
        if len(present) >= context.plans.settings.max_versions:
            shares = entry.samples.shares()
            rarest = min(present, key=lambda s: shares.get(s, 0.0))
            site.remove_version(entry, rarest)
            epochs.retire(present[rarest])
            context.decide(Action.DROP, Why.RARE, tier=2, sizes=sizes_of(entry, rarest), share=round(shares.get(rarest, 0), 3))
        if not site.admit_version(entry, signature, better):
            context.refuse(entry, key, Why.TOO_MANY, "the site serves too many kinds of calls", tier=2,
                         sizes=sizes_of(entry, signature))  # fmt: skip

    addresses = (entry.findings[0].bottleneck, Strategy.SPECIALIZE) if entry.findings else None
    return Attempt(key, make, lambda: entry.plan, [inputs], deploy, addresses, {"sizes": sizes_of(entry, signature)},
                   signature, share=share)


def with_device_kernels(context: AttemptContext, entry: Entry, key: AttemptKey) -> Attempt | None:
    """Kernels generated for the device, where the graph's sizes are numbers, in a plan with the layers that the entry's has: the
    likeliest first, or all that are worth a trial."""
    calls = entry.samples.several(PROVEN_ON)
    if not calls:
        return None
    composer = composer_of(context, entry)
    strategies = (GENERATE, FEW_TILINGS) if key == DEVICE_KERNELS else (GENERATE,)
    used = replace(composer, demand=replace(composer.demand, strategies=strategies))

    def make() -> Plan:
        plan = used.plan(entry.baseline.graph, calls, used.layers)
        return replace(plan, tier=2, layers=(*(x.key for x in used.layers), DEVICE_KERNELS))

    def deploy(better: Plan) -> None:
        exchange(entry, better, used.layers)

    return Attempt(key, make, lambda: entry.plan, calls, deploy)


def add_layer(
    context: AttemptContext, site: Site, entry: Entry, new: Layer, key: AttemptKey, about: Mapping[str, EvidenceValue],
    share: float, meant: Callable[[Sequence[torch.Tensor]], bool] | None = None,
    calls: Sequence[Sequence[torch.Tensor]] | None = None, made_well: Callable[[Plan], None] | None = None,
    alongside: Alongside | None = None,
) -> Attempt | None:  # fmt: skip
    """The entry's plan with one more layer, or one that goes on from a layer it has.

    `meant`: the calls that the layer is for. It is raced on one of them and proven on all. `made_well` raises where the plan lacks
    what the layer is for. `alongside` begins what is tried while the plan is made; it is over before anything is measured.
    """
    kept = list(entry.samples.several(BET_ON) if calls is None else calls)
    if meant is not None:
        kept = sorted(kept, key=lambda c: not meant(c))
    if not kept or (meant is not None and not meant(kept[0])):
        entry.mark_not_kept(key)
        return None
    layers, composer = with_layer(entry.layers, new), composer_of(context, entry)

    def make() -> Plan:
        used = composer if alongside is None else replace(composer, quiet=alongside())
        try:
            better = used.plan(entry.baseline.graph, kept, layers)
        finally:
            used.quiet()
        if made_well is not None:
            made_well(better)
        kept.extend(c for c in entry.samples.several(PROVEN_ON) if all(c is not k for k in kept))  # what came meanwhile proves, too
        return specialized(better, layers)

    def deploy(better: Plan) -> None:
        if composer.reused and entry.plan is not composer.serving:
            entry.mark_refused(key, "the plan behind it was exchanged meanwhile")
            return
        entry.bets = composer.placed
        if better.sides is not None:
            better.sides.begin()
        exchange(entry, better, layers, kept=bool(composer.reused))
        for signature, version in list(entry.versions.items()):  # they lack the layer; such sizes get new ones
            site.remove_version(entry, signature)
            epochs.retire(version)

    return Attempt(key, make, lambda: entry.plan, kept, deploy, about=about, meant=meant, share=share)


def without_rows(context: AttemptContext, site: Site, entry: Entry) -> Attempt | None:
    """Products whose input has rows of zeros, with a side that leaves them out."""
    calls, key = entry.samples.several(BET_ON), AttemptKey(ZERO_ROWS)
    found = products(entry.plan, entry.weights, calls, context.compile)
    if isinstance(found, str):
        context.refuse(entry, key, Why.NO_ZERO_ROWS, found, tier=2, what=ZERO_ROWS, because=found)
        return None
    share = round(found.share, 3)
    context.decide(Action.SPECIALIZE, Why.RECURS, what=ZERO_ROWS, products=len(found.focus), share=share, samples=len(calls))

    def leaves_out(better: Plan) -> None:
        if better.sides is None:
            raise InternalError(f"the plan leaves no {found.what} out", because="; ".join(better.notes)[:300])

    layer = ZeroRowsLayer(found.focus, found.what)
    return add_layer(context, site, entry, layer, key, {"share": share}, found.share, None, found.calls, leaves_out)


def packed_first(
    context: AttemptContext, site: Site, entry: Entry, outcomes: SpecializationOutcomes,
    at_once: Callable[[Callable[[], Attempt | None]], Callable[[], None]],
) -> Attempt | None:  # fmt: skip
    """Live rows of padded batches as an entry's first plan, while the rest stays on library kernels; None where tier 1, which
    computes every row, is expected to save as much. `at_once` tries the packed graph on library kernels while others are made.
    """

    known: list[PaddedTraffic] = []

    def early() -> Attempt | None:
        return without_padding(context, site, entry, lambda _live: True, key=PACKED_BY_LIBRARY, known=known)

    def worth(live: float) -> bool:
        return outcomes.promise(PADDING, bet_context(entry, 1 - live)) * (1 - live) >= FIRST_VALUE

    return without_padding(context, site, entry, worth, alongside=partial(at_once, early), known=known)


def with_padded_calls(context: AttemptContext, site: Site, entry: Entry) -> Attempt | None:
    """Generated kernels for calls that are not packed, in a plan that packs the others; all alone where there are no others now."""
    try:
        padded_traffic(entry.baseline.graph, entry.weights, entry.samples.several(BET_ON), ignore_outputs=_ignores(context))
    except NotPadded:
        return fused(context, entry, lambda _unfinished: lambda: None)
    except CannotPack:  # cannot be: the plan that serves does
        pass
    return without_padding(context, site, entry, key=PADDED_CALLS)


def _ignores(context: AttemptContext) -> bool:
    return context.plans.settings.padding == "ignore"


def without_padding(
    context: AttemptContext, site: Site, entry: Entry, first: Callable[[float], bool] | None = None,
    key: AttemptKey = PACKED, alongside: Alongside | None = None, known: list[PaddedTraffic] | None = None,
) -> Attempt | None:  # fmt: skip
    """Live rows of padded batches, packed; calls with too many of them run as before.

    `first`: nothing serves but library kernels, and by the share of live rows it says whether packing should be the first to
    change that. Where it should not, nothing is refused. `known` holds what an attempt before this one found, or gets it.
    """
    calls, ignore = entry.samples.several(BET_ON), _ignores(context)
    try:
        found = known[0] if known else padded_traffic(entry.baseline.graph, entry.weights, calls, ignore_outputs=ignore)
    except (CannotPack, NotPadded) as e:
        later = isinstance(e, NotPadded)
        if not later or first is None:
            refuse = context.postpone if later else context.refuse
            refuse(entry, key, Why.NOT_PACKED, str(e), tier=2, what=PADDING, because=str(e))
        return None
    if first is not None and not first(found.share):
        return None
    if known is not None and not known:
        known.append(found)
    share, packing = round(found.share, 3), found.packing
    context.decide(Action.SPECIALIZE, Why.RECURS, what=str(key), mask=packing.mask.name, live=share, products=found.packer.products,
                   samples=len(found.calls), before_tier_1=first is not None)
    limits: list[float] = []

    def limited(better: Plan) -> None:
        run = better.run
        limits.append(run.packer.limit if isinstance(run, PackedRun) else run.limit if isinstance(run, DevicePackedRun) else 1.0)

    def meant(inputs: Sequence[torch.Tensor]) -> bool:
        share = found.packer.share(inputs)
        if key == PADDED_CALLS:
            return share > MOSTLY_LIVE or isinstance(found.packer(inputs), Padded)
        return share <= (limits[0] if limits else 1.0)

    about = {"mask": packing.mask.name, "live": share}
    layer = PaddingLayer(ignore, compiled=first is None, by_library=key == PACKED_BY_LIBRARY, known=[found])
    made = add_layer(context, site, entry, layer, key, about, 1 - found.share, meant, found.calls, limited, alongside)
    return made if made is None or not packing.ignored else replace(made, shown=found.shown)


def without_duplicates(context: AttemptContext, site: Site, entry: Entry, share: float) -> Attempt | None:
    """Distinct rows of batches in which rows come twice."""
    calls, key = entry.samples.several(BET_ON), AttemptKey(DUPLICATES)
    try:
        found = rowwise(entry.baseline.graph, entry.weights)
    except CannotPack as e:
        context.refuse(entry, key, Why.NOT_ROW_BY_ROW, str(e), tier=2, what=DUPLICATES, because=str(e))
        return None
    run = DistinctRowsRun(found.inputs, found.outputs, entry.plan.run, entry.plan.run)

    def meant(inputs: Sequence[torch.Tensor]) -> bool:
        return run.kinds(inputs) is not None

    def limited(better: Plan) -> None:
        run.limit = better.run.limit if isinstance(better.run, DistinctRowsRun) else 1.0

    about = {"distinct": round(share, 3)}
    return add_layer(context, site, entry, DistinctRowsLayer(), key, about, 1 - share, meant, calls, limited)
