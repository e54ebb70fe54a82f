"""What calls of an entry were seen to bring, put together for planners, in the background.

Sampled calls tell what partitions take and what masks hide. Before there are any, the call that the plan was raced on tells what
partitions take; both become weights of the graph (`runtime.observe.graph_weights`). Kept calls tell which sizes data have. Counts
of calls tell how often which sizes come. Nothing of it is asked for on the path of a call.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import torch

from hotfuse.analysis.shapes import Mismatch, bind
from hotfuse.base.events import Action, EventLog, Why
from hotfuse.base.faults import error_text
from hotfuse.ir.graph import Graph
from hotfuse.profile.records import Flag
from hotfuse.profile.snapshot import GraphSeen
from hotfuse.profile.traffic import NOTHING_SEEN, MaskShare, MeasuredPiece, SizesShare, TrafficSeen
from hotfuse.runtime.observe.call_sampler import CallSampler
from hotfuse.runtime.observe.data_sizes import MAX_CALLS, data_sizes
from hotfuse.runtime.observe.findings import COUNTED, PartitionQuestion, microjoules, questions
from hotfuse.runtime.samples import CallSamples
from hotfuse.runtime.site import Entry

MAX_PIECES = 48
"""Partitions whose times are told, the slowest."""
MAX_SIZES = 4
"""Sizes of calls that are planned for at once: predictions are asked for at each of them."""
MAIN_KIND_SHARE = 2 / 3
"""Calls of one kind that are a larger part than this of those of late are what a plan is for alone."""
MIN_SHARE = 0.05
"""Calls of a size that are a smaller part are not planned for."""
MIN_SAMPLES = 4
"""Samples of a mask before anything is said of it; times of partitions are believed as far as they are many."""


ONE_SAMPLE = 0.5
"""How far off a single sample may be, relative; less with more of them."""


def traffic_of(sampler: CallSampler, entry: Entry, log: EventLog) -> Callable[[Graph], TrafficSeen]:
    """What is told of an entry's calls when a graph is planned for them: the entry's own, or one made of it. Where that cannot be
    found out, plans are made without it.
    """
    calls = partial(entry.samples.several, MAX_CALLS if entry.samples.real else 0)
    sizes = cache(lambda: data_sizes(entry.baseline.graph, entry.weights, calls()))

    def told(graph: Graph) -> TrafficSeen:
        try:
            return seen(graph)
        except Exception as e:  # kept calls are run for it, and what they raise is no reason to go without a plan
            log.count("traffic_unknown")
            log.decide(Action.NOTICE, Why.BACKGROUND_FAILED, "what calls bring", error=error_text(e))
            return NOTHING_SEEN

    def seen(graph: Graph) -> TrafficSeen:
        known = sampler.known(entry.key)
        masks = ()
        if known is not None:
            number, found, names = known
            masks = _masks(found, lambda item: names.item_name(number, item))
            weigh(sampler, entry)
        return TrafficSeen(sizes(), masks, mix_of(entry.samples, graph), entry.weighed.pieces())

    return told


def weigh(sampler: CallSampler, entry: Entry) -> None:
    """Take what sampled calls showed of the serving plan's partitions into the weights of its graph; in the background."""
    plan, known = entry.plan, sampler.known(entry.key)
    if known is None or plan is entry.baseline:
        return
    number, found, names = known
    pieces = tuple(map(piece, questions(plan, found, number, names, torch.get_num_threads(), MAX_PIECES)))
    if plan is entry.plan:  # else they are of a plan that serves no longer
        entry.weighed = entry.weighed.updated(pieces)


def as_planned(entry: Entry) -> Callable[[Graph], TrafficSeen]:
    """What the plan that serves was made by: a plan that changes single kernels of it is grouped as it is."""
    account = entry.plan.account
    return lambda _graph: NOTHING_SEEN if account is None else account.seen


def piece(q: PartitionQuestion) -> MeasuredPiece:
    """A partition's weight, as measured; what a few samples happen to have in common is no evidence that it is steady."""
    cycles = q.seen.counters[COUNTED.index("cycles")] if q.seen.counters else None
    t = q.times
    noise = max(t.noise, ONE_SAMPLE / t.n)
    return MeasuredPiece(t.graph, t.sizes, t.library, round(t.us, 3), round(noise, 3), t.n, t.bytes, cycles, microjoules(q))


def mix_of(samples: CallSamples, graph: Graph) -> tuple[SizesShare, ...]:
    """The sizes that calls of a graph have, where no kind of call is most of them; nothing where they do not fit it."""
    shares = {s: share for s, share in samples.shares().items() if share >= MIN_SHARE}
    if len(shares) < 2 or next(iter(shares.values())) > MAIN_KIND_SHARE:
        return ()
    found: list[SizesShare] = []
    for signature, share in list(shares.items())[:MAX_SIZES]:
        inputs = samples.inputs(signature)
        if inputs is None or len(inputs) != len(graph.inputs):
            continue
        sizes = bind(graph, [tuple(t.shape) for t in inputs])
        if not isinstance(sizes, Mismatch):
            found.append(SizesShare(dict(sizes), round(share, 3)))
    return tuple(found) if len(found) > 1 else ()


def _masks(found: GraphSeen, name: Callable[[int], str]) -> tuple[MaskShare, ...]:
    return tuple(MaskShare(name(v.item), round(v.valid.mean, 4), round(v.valid.std, 4), v.valid.n)
                 for v in found.values if v.flags & Flag.MASK and v.valid.n >= MIN_SAMPLES)  # fmt: skip
