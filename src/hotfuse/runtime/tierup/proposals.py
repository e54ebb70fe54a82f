"""What each row of `specialize.table` proposes for an entry: a function a row, asked after calls that are looked at.

A proposal says what part of a call's time it may save and in what part of the calls, so that rows can be compared: its expected
value is the chance that it wins its race, times both. Looking takes microseconds; whatever takes longer is behind `attempt`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from functools import partial

from hotfuse.base.events import EvidenceValue, Why
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.control_bodies import control_name
from hotfuse.profile.predict import ALL
from hotfuse.profile.records import Flag
from hotfuse.profile.snapshot import GraphSeen, ValueSeen
from hotfuse.runtime.site import Entry, Site
from hotfuse.runtime.tierup.attempt import Attempt, AttemptContext, bet_context, sizes_of
from hotfuse.runtime.tierup.bets import BranchLayer
from hotfuse.runtime.tierup.layers.distinct_rows import MAX_DISTINCT, distinct_share
from hotfuse.runtime.tierup.layers.open_mask import open_mask
from hotfuse.runtime.tierup.layers.repeated import repeated_inputs
from hotfuse.runtime.tierup.padding import MIN_CALLS, PaddingLayer, enough_seen, may_be_padded
from hotfuse.runtime.tierup.skipping import suspected
from hotfuse.runtime.tierup.tier2 import (
    BET_ON,
    PADDED_CALLS,
    add_layer,
    for_sizes,
    with_padded_calls,
    without_duplicates,
    without_padding,
    without_rows,
)
from hotfuse.runtime.tierup.tiers import MIN_SAMPLES, recurring
from hotfuse.specialize import table
from hotfuse.specialize.branches import conditions
from hotfuse.specialize.masks import all_alike
from hotfuse.specialize.outcomes import SpecializationOutcomes
from hotfuse.specialize.table import AttemptKey, branch_key, sizes_key

MIN_VALUE = 0.005
"""Part of the calls' time that a specialization must be expected to save: less is not worth a compile."""
MIN_OTHERS = 0.1
"""Part of the calls of late that must be mostly live rows for kernels that compute all of them, where packing came first."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """A specialization that may pay for an entry."""

    key: AttemptKey
    saves: float
    """Part of a call's time, in calls for which the bet holds."""
    share: float
    """Part of the calls for which it does."""
    attempt: Callable[[], Attempt | None]
    evidence: Mapping[str, EvidenceValue] = field(default_factory=dict[str, EvidenceValue])
    """What the decision to try it says; nothing where trying finds that out."""

    def value(self, outcomes: SpecializationOutcomes, entry: Entry) -> float:
        """The part of the calls' time that it is expected to save."""
        return outcomes.promise(self.key.row, bet_context(entry, self.share)) * self.saves * self.share


Proposer = Callable[[AttemptContext, Site, Entry], Proposal | None]


def _branch(context: AttemptContext, site: Site, entry: Entry) -> Proposal | None:
    """A condition that sampled calls showed to go one way, and that has no code for it."""
    graph = entry.baseline.graph
    for at in conditions(graph):
        name = control_name(graph.nodes[at])
        seen = context.plans.call_sampler.predictable(entry.key, "branch", name)
        if seen is None or seen[1] < table.row(table.BRANCH).share or seen[2] < MIN_SAMPLES:
            continue
        outcome = bool(seen[0])
        placed = next((x for x in entry.layers if isinstance(x, BranchLayer)), None)
        if placed is not None and (placed.name != name or outcome in placed.outcomes):
            continue
        key = branch_key(name, outcome=outcome)
        if key in entry.refused:
            continue
        layer = BranchLayer(name, (outcome,) if placed is None else (*placed.outcomes, outcome))
        about = {"condition": name, "outcome": outcome}
        attempt = partial(add_layer, context, site, entry, layer, key, about, seen[1])
        evidence = {**about, "accuracy": round(seen[1], 3), "samples": seen[2]}
        return Proposal(key, table.row(table.BRANCH).saves, seen[1], attempt, evidence)
    return None


def _repeated(context: AttemptContext, site: Site, entry: Entry) -> Proposal | None:
    """Inputs that come again while others change."""
    if any(x.key.row == table.REPEATED for x in entry.layers) or not entry.repeats.due(MIN_SAMPLES):
        return None
    call = entry.samples.inputs()
    found = None if call is None else repeated_inputs(entry.baseline.graph, entry.repeats, call)
    if found is None or found.layer.key in entry.refused:
        return None
    evidence = {"inputs": found.layer.key.about, "share": round(found.share, 3), "work": round(found.work, 3),
                "samples": found.pairs}  # fmt: skip
    attempt = partial(add_layer, context, site, entry, found.layer, found.layer.key, evidence, found.share)
    return Proposal(found.layer.key, found.work, found.share, attempt, evidence)


def _duplicates(context: AttemptContext, site: Site, entry: Entry) -> Proposal | None:
    """Batches in which rows come twice; kept calls are looked through now and then."""
    key = AttemptKey(table.DUPLICATES)
    if key in entry.refused or any(x.key == key for x in entry.layers) or entry.samples.taken % MIN_SAMPLES:
        return None
    share = distinct_share(entry.baseline.graph, entry.samples.several(MIN_CALLS))
    if share > MAX_DISTINCT:
        return None
    evidence = {"what": table.DUPLICATES, "distinct": round(share, 3), "samples": entry.samples.taken}
    return Proposal(key, 1 - share, 1.0, partial(without_duplicates, context, site, entry, share), evidence)


def _open_mask(context: AttemptContext, site: Site, entry: Entry) -> Proposal | None:
    """A mask that sampled calls showed to let everything through."""
    graph, expected = entry.baseline.graph, partial(context.plans.call_sampler.predictable, entry.key, "valid")
    if all((seen := expected(v.name)) is None or seen[0] != ALL for v in graph.inputs):
        return None
    serving = {x.key for x in entry.layers}
    found = open_mask(graph, entry.facts, expected, entry.samples.several(BET_ON),
                      lambda key: key in entry.refused or key in serving)  # fmt: skip
    if found is None:
        return None
    layer = found.layer

    def attempt() -> Attempt | None:
        if all_alike(graph, layer.name, layer.number) is None:
            said = "the graph is the same without it"
            context.refuse(entry, layer.key, Why.UNPROMISING, said, row=table.OPEN_MASK, mask=layer.name)
            return None
        return add_layer(context, site, entry, layer, layer.key, {"mask": layer.name}, found.accuracy,
                         partial(layer.holds, graph))  # fmt: skip

    evidence = {"mask": layer.name, "all": layer.number, "accuracy": round(found.accuracy, 3), "samples": found.samples}
    return Proposal(layer.key, table.row(table.OPEN_MASK).saves, found.accuracy, attempt, evidence)


def packs(context: AttemptContext, entry: Entry) -> bool:
    """Whether live rows of padded batches are worth a look: calls bring a mask, and nobody looked in vain."""
    return _may_pack(context, entry) and _masks_seen(entry)


def packs_later(context: AttemptContext, entry: Entry) -> bool:
    """Whether that is not known yet: the next kept calls will tell."""
    return not any(isinstance(x, PaddingLayer) for x in entry.layers) and _may_pack(context, entry) and not _masks_seen(entry)


def _may_pack(context: AttemptContext, entry: Entry) -> bool:
    refused = AttemptKey(table.PADDING) in entry.refused or context.plans.settings.padding == "keep"
    return not refused and may_be_padded(entry.baseline.graph)


def _masks_seen(entry: Entry) -> bool:
    return enough_seen(entry.baseline.graph, entry.samples.taken, entry.samples.several(MIN_CALLS))


def _padding(context: AttemptContext, site: Site, entry: Entry) -> Proposal | None:
    """Where calls bring a mask, kept ones tell how much it hides. Where packing came first, calls that it is not for may follow."""
    key = AttemptKey(table.PADDING)
    placed = next((x for x in entry.layers if isinstance(x, PaddingLayer)), None)
    if placed is None:
        attempt = partial(without_padding, context, site, entry)
        saves = _hidden(context.plans.call_sampler.seen(entry.key))
        return Proposal(key, saves, 1.0, attempt) if packs(context, entry) else None
    others = max((count().outgrown for of, count in entry.plan.bets if of == key), default=0.0)
    if placed.compiled or PADDED_CALLS in entry.refused or others < MIN_OTHERS:
        return None
    evidence = {"what": str(PADDED_CALLS), "share": round(others, 3)}
    saves = table.row(table.PADDING).saves
    return Proposal(PADDED_CALLS, saves, others, partial(with_padded_calls, context, site, entry), evidence)


def _zero_rows(context: AttemptContext, site: Site, entry: Entry) -> Proposal | None:
    """Rows of zeros somewhere; which products see them is found out behind."""
    key, seen = AttemptKey(table.ZERO_ROWS), context.plans.call_sampler.seen(entry.key)
    if key in entry.refused or entry.plan.sides is not None or entry.plan is entry.baseline or not suspected(seen):
        return None
    worth = [(_multiplies(context, entry, v), max(v.zero_rows.mean, v.zero.mean)) for v in seen.values] if seen is not None else []
    saves, share = max(worth, key=lambda w: w[0] * w[1], default=(table.row(key.row).saves, 0.0))
    if saves * share < MIN_VALUE:  # zeros of what no product multiplies, a mask say; what products multiply may not be seen yet
        return None
    return Proposal(key, saves, share, partial(without_rows, context, site, entry))


def _multiplies(context: AttemptContext, entry: Entry, value: ValueSeen) -> float:
    """The part of a call's time that products of a value take, as sampled calls showed; of those too fast to be told apart, at most
    what the others leave. What such rows save as a rule where nothing was sampled.
    """
    told = [f for f in entry.findings if f.tier == entry.plan.tier]
    known = context.plans.call_sampler.known(entry.key) if told else None
    if known is None:
        return table.row(table.ZERO_ROWS).saves
    name = known[2].item_name(known[0], value.item)
    of_it = sum(f.share for f in told if name in f.products)
    return of_it or max(0.0, 1.0 - sum(f.share for f in told))


def _hidden(seen: GraphSeen | None) -> float:
    """The part of the rows that masks of the calls hide, as sampled calls showed: what packing may save at most."""
    masks = [v for v in seen.values if v.flags & Flag.MASK and v.flags & Flag.INPUT and v.valid.n >= MIN_CALLS] if seen else []
    return max((1.0 - v.valid.mean for v in masks), default=table.row(table.PADDING).saves)


def _sizes(context: AttemptContext, site: Site, entry: Entry) -> Proposal | None:
    """Sizes that recur and have no version."""
    if not entry.symbols or entry.plan is entry.baseline:
        return None
    found = recurring(entry.samples.shares(), entry.samples.taken, context.plans.settings.max_versions)
    new = next((b for b in found if b.value not in entry.versions and sizes_key(b.value) not in entry.refused), None)
    if new is None:
        return None
    evidence = {"sizes": sizes_of(entry, new.value), "share": round(new.share, 3), "samples": new.samples}
    attempt = partial(for_sizes, context, site, entry, new.value, new.share)
    return Proposal(sizes_key(new.value), table.row(table.SIZES).saves, new.share, attempt, evidence)


PROPOSERS: Mapping[str, Proposer] = {
    table.BRANCH: _branch, table.REPEATED: _repeated, table.DUPLICATES: _duplicates, table.OPEN_MASK: _open_mask,
    table.PADDING: _padding, table.ZERO_ROWS: _zero_rows, table.SIZES: _sizes,
}  # fmt: skip
"""A function for every row of the table."""



def proposals(
    context: AttemptContext, site: Site, entry: Entry, outcomes: SpecializationOutcomes, rows: Sequence[str]
) -> list[Proposal]:
    """What of these rows may pay for an entry, the highest expected value first."""
    found = [p for name in rows if (p := PROPOSERS[name](context, site, entry)) is not None]
    return sorted(found, key=lambda p: -p.value(outcomes, entry))
