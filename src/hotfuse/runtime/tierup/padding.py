"""Plans for batches that are mostly padding: live rows alone (`specialize.packing`), or everything where most rows live.

Kept calls show which input is a mask of two numbers and how many rows live. What packing takes is a straight line in that share:
its ends are measured against the plan there is, and where the line meets it is the share up to which a call is packed.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from typing import Any

import torch

from hotfuse.analysis.attention import HIDES, attends, pools
from hotfuse.analysis.mask_facts import MaskInput, mask_axes
from hotfuse.backends.library import meaning
from hotfuse.backends.protocol import Run
from hotfuse.backends.pycode import flat_function
from hotfuse.base.errors import InternalError
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.compile.literals import with_numbers
from hotfuse.ir.graph import Graph, Value
from hotfuse.ir.types import DType, TensorType
from hotfuse.ops.schema import argument
from hotfuse.ops.table import packet
from hotfuse.runtime.plan import BetCount, Plan
from hotfuse.runtime.serve.packing import MOSTLY_LIVE, Maker, MaskPacker, PackedRun, Padded, magnitude
from hotfuse.runtime.tierup.device_padding import device_packed_plan
from hotfuse.runtime.tierup.layers.layer import Call, Composer, Layer, composed
from hotfuse.runtime.tierup.packing_share import break_even_share
from hotfuse.runtime.tierup.skipping import all_finite
from hotfuse.simplify import simplify
from hotfuse.specialize.derived_masks import DerivedMask, derived_mask, derived_masks
from hotfuse.specialize.packing import Packing, packed_graph
from hotfuse.specialize.row_demands import CannotPack
from hotfuse.specialize.table import PADDING, AttemptKey, row

MAX_LIVE = 1 - row(PADDING).share
"""The mean share of live rows above which nobody tries."""
MIN_CALLS = 3
"""Kept calls that have to be seen."""
MIN_SEQUENCES = 6
"""Sequences of kept calls that are as good: one batch of them tells what masks are like."""
MEASURE_S = 1.0
"""Seconds for measuring up to which share packing pays, unless one round takes longer."""
LIBRARY_LIVE = 0.75
"""The share of live rows up to which library kernels run packed. Nothing is measured for it: such a plan serves until generated
kernels are there, each run beside calls holds those up, and what it saves of rows is more than gathering them takes."""
ROOM = 4.0
"""How many times as large as it is as a rule an input may be where masks lower scores by 10,000. Scores grow like its square as
long as nothing is normalized, and are some hundreds as a rule; so masks that lower them further leave more room."""
LARGEST = 1e12
"""Numbers that are larger may have squares that no float holds: dead rows would then spread NaN."""
SLOW_S = 0.1
"""A first run that takes so long counts like others: what warming up adds does not show in it."""
_MASKS = frozenset({DType.BOOL, DType.I64, DType.I32, DType.I8, DType.U8, DType.F32})


def may_be_padded(graph: Graph) -> bool:
    """Whether a graph has attention, or pools rows, and an input that could be a mask, or tell lengths that one is made of."""
    return any(_is_mask(v) or _tells_lengths(v) for v in graph.inputs) and (attends(graph) or pools(graph))


def enough_seen(graph: Graph, taken: int, calls: Sequence[Call]) -> bool:
    """Whether kept calls, of so many that were looked at, tell what masks are like."""
    at = next((i for i, v in enumerate(graph.inputs) if _is_mask(v)), None)
    if taken >= MIN_CALLS or at is None:
        return taken >= MIN_CALLS
    return sum(call[at].shape[mask_axes(graph.inputs[at])[0]] for call in calls) >= MIN_SEQUENCES


def _tells_lengths(v: Value) -> bool:
    return isinstance(v.type, TensorType) and v.type.dtype in (DType.I64, DType.I32) and len(mask_axes(v)) == 1


def _is_mask(v: Value) -> bool:
    """Sequences and their rows, and nothing else."""
    return isinstance(v.type, TensorType) and v.type.dtype in _MASKS and len(mask_axes(v)) == 2


@dataclass(frozen=True, slots=True)
class PaddedTraffic:
    """A mask that kept calls bring, and the graph for its live rows."""

    packer: MaskPacker
    share: float
    """Mean part of rows that live."""
    calls: tuple[Call, ...]
    """The most ordinary first: that one decides the race."""
    graph: Graph
    """What they are calls of."""

    @property
    def packing(self) -> Packing:
        """The graph, and what it asks; of the first mask where there are two."""
        return self.packer.packing

    def shown(self, inputs: Call, outputs: Sequence[Any]) -> tuple[Any, ...]:
        """Outputs with 0 at the dead rows that do not matter: what is compared of them."""
        mask = self.packer.mask_of(inputs).detach()
        live = mask.reshape([mask.shape[i] for i in self.packer.axes]) == self.packing.mask.live
        found = list(outputs)
        for i, places in self.packing.ignored:
            b, s = places.sequence, places.row
            assert b is not None and s is not None
            sizes = [live.shape[0] if a == b.axis else live.shape[1] if a == s.axis else 1 for a in range(found[i].dim())]
            here = live if b.axis < s.axis else live.t()
            found[i] = torch.where(here.reshape(sizes), found[i], torch.zeros_like(found[i]))
        return tuple(found)


class NotPadded(Exception):
    """There is too little padding at the moment."""


def padded_traffic(
    graph: Graph, weights: Mapping[str, torch.Tensor], calls: Sequence[Call], *, ignore_outputs: bool
) -> PaddedTraffic:
    """What calls show of padding; raises CannotPack, or NotPadded where there is little of it now."""
    packer = _first_packer(with_numbers(graph, weights), weights, calls, ignore_outputs=ignore_outputs)
    able = [c for c in calls if not isinstance(packer(c), Padded)]
    if not able:
        raise NotPadded(f"no kept call can be packed: {packer(calls[0])}")
    packer = _limited(_with_another(packer, weights, able), able)
    _require_hidden_weights(graph, weights, packer, able)
    shares = [packer.share(c) for c in calls]
    mean = statistics.fmean(shares)
    ordered = [calls[c] for c in sorted(range(len(calls)), key=lambda c: abs(shares[c] - mean))]
    first = next(c for c in ordered if not isinstance(packer(c), Padded))
    return PaddedTraffic(packer, mean, tuple([first, *(c for c in ordered if c is not first)]), graph)


def _first_packer(
    graph: Graph, weights: Mapping[str, torch.Tensor], calls: Sequence[Call], *, ignore_outputs: bool
) -> MaskPacker:
    """By the mask that calls bring and that leaves most out; by one that the graph makes where no such mask packs anything."""
    why, hidden, most = "no input is a mask of two numbers, and no mask of rows is made of inputs", False, 0.0
    best: tuple[float, MaskPacker] | None = None
    for given, mask, derived in _masks(graph, calls):
        if derived is not None and best is not None and best[1].maker is None:
            break
        try:
            packing = packed_graph(given, mask, weights, ignore_outputs=ignore_outputs)
        except CannotPack as e:
            if (e.hides_keys or not hidden) and (derived is None or (e.hides_keys and not hidden)):
                why = str(e)
            hidden = hidden or e.hides_keys
            continue
        packer = _packer(graph, given, replace(packing, graph=simplify(packing.graph)[0]), derived, weights)
        mean = statistics.fmean(packer.share(c) for c in calls)
        if mean > MAX_LIVE:
            most = max(most, mean)
        elif best is None or packing.products * (1 - mean) > best[0]:
            best = packing.products * (1 - mean), packer
    if best is None:
        raise NotPadded(f"{most:.0%} of all rows live") if most else CannotPack(why)
    return best[1]


def _with_another(packer: MaskPacker, weights: Mapping[str, torch.Tensor], calls: Sequence[Call]) -> MaskPacker:
    """The packed graph packed by another mask too, of rows of its own: a model that is given two padded batches has two."""
    if not attends(packer.graph) or packer.packing.ignored or packer.mask_of(calls[0]).device.type != "cpu":
        return packer
    try:
        then = _first_packer(packer.graph, weights, calls, ignore_outputs=False)
    except (CannotPack, NotPadded):
        return packer
    both = replace(packer, then=replace(then, floats=()))  # which are asked already
    return packer if all(isinstance(both(c), Padded) for c in calls) else both


def _limited(packer: MaskPacker, calls: Sequence[Call]) -> MaskPacker:
    """With how large an input's numbers may be for masks to hide them: calls tell what they are like as a rule."""
    floats = ((i, [magnitude(c[i]) for c in calls]) for i, _ in packer.floats)
    return replace(packer, floats=tuple((i, _reach(packer, usual)) for i, usual in floats))


def _reach(packer: MaskPacker, usual: Sequence[float]) -> float:
    """How large numbers may be that are so large in calls."""
    lowers = min(packer.packing.lowers, packer.then.packing.lowers if packer.then is not None else math.inf)
    return min(LARGEST, ROOM * math.sqrt(max(1.0, lowers / HIDES)) * max(1.0, statistics.median(usual)))


def _require_hidden_weights(graph: Graph, weights: Mapping[str, torch.Tensor], packer: MaskPacker, calls: Sequence[Call]) -> None:
    """Raise CannotPack where weights are not finite, or an index may bring a row of a table that is too large to be hidden: indices
    do not show how large.
    """
    if not all_finite({p.key: weights[p.key] for p in packer.graph.params}):
        raise CannotPack("weights are not finite, which dead rows would spread")
    places = {v.name: i for i, v in enumerate(graph.inputs)}
    keys = {p.value.name: p.key for p in graph.params}
    for n in graph.nodes:
        if packet(n.op) != "aten.embedding":
            continue
        table, index = argument(n, "weight"), argument(n, "indices")
        if isinstance(table, Value) and isinstance(index, Value) and table.name in keys and index.name in places:
            rows = weights[keys[table.name]]
            found = [c[places[index.name]] for c in calls]
            if not magnitude(rows) <= _reach(packer, [magnitude(rows[i.to(rows.device)]) for i in found]):
                raise CannotPack("a table has rows that are much larger than those of calls, which the mask may not hide")


def _masks(graph: Graph, calls: Sequence[Call]) -> Iterator[tuple[Graph, MaskInput, DerivedMask | None]]:
    """What may be a mask: inputs of two numbers, then what the graph makes of inputs by itself; and the graph that is given it.

    Inputs that calls do not bring are a packed graph's own.
    """
    brought = graph.inputs[: len(calls[0])]
    for i, v in enumerate(brought):
        for mask in _candidates(v, [call[i] for call in calls]):
            yield graph, mask, None
    for v in derived_masks(graph):
        cut = derived_mask(graph, v)
        for mask in _candidates(v, []) if set(cut.made.inputs) <= set(brought) else ():
            yield cut.graph, mask, cut


def _packer(
    graph: Graph, given: Graph, packing: Packing, derived: DerivedMask | None, weights: Mapping[str, torch.Tensor]
) -> MaskPacker:
    names = [x.name for x in graph.inputs]
    floats = tuple((k, LARGEST) for k, x in enumerate(graph.inputs) if x.name != packing.mask.name and _is_float(x))
    indices = tuple((names.index(n), size) for n, size in packing.indices)
    axes = mask_axes(next(v for v in given.inputs if v.name == packing.mask.name))
    maker = None if derived is None else _maker(derived.made, names, weights)
    place = None if packing.told is None else _maker(packing.told, [x.name for x in given.inputs], weights)
    at = names.index(packing.mask.name) if derived is None else -1
    return MaskPacker(packing, at, floats, indices, axes, maker=maker, place=place)


def _maker(made: Graph, names: Sequence[str], weights: Mapping[str, torch.Tensor]) -> Maker:
    run, _ = flat_function(made, meaning, {p.key: weights[p.key] for p in made.params})
    read = {v.name for n in made.nodes if packet(n.op) != "aten.sym_size" for v in n.ins}
    takes = tuple(names.index(v.name) for v in made.inputs)
    return Maker(run, takes, tuple(i for i in takes if names[i] in read))


def _is_float(v: Value) -> bool:
    return isinstance(v.type, TensorType) and v.type.dtype in (DType.F32, DType.F64, DType.F16, DType.BF16)


def _candidates(v: Value, brought: Sequence[torch.Tensor]) -> list[MaskInput]:
    """The masks that a value may be: two numbers, either of which may mean that a row is dead."""
    if not _is_mask(v) or not isinstance(v.type, TensorType):
        return []
    found: set[float | bool] = set()
    for t in brought:
        found.update(torch.unique(t.detach().cpu()).tolist()[:3])
        if len(found) > 2:
            return []
    if v.type.dtype is DType.BOOL:
        found = {False, True}
    elif len(found) == 1 and found <= {0, 1}:
        found = {0, 1}
    if len(found) != 2:
        return []
    low, high = sorted(found)
    sequences, rows = (v.type.shape[i] for i in mask_axes(v))
    return [MaskInput(v.name, low, high, sequences, rows), MaskInput(v.name, high, low, sequences, rows)]


def paying_share(packer: MaskPacker, packed: Run, padded: Run, call: Call) -> float:
    """The share of live rows up to which packing pays, by the ends of the line: a call as it came, and with every row alive.

    Where a packed call takes long it is not measured: six runs beside calls held these up for 13 seconds. Packed rows then serve up
    to the share from which on a padded plan is likely to be the faster one, which is a tenth below where lines were seen to meet.
    """
    with torch.no_grad():
        return _break_even(packer, packed, padded, call)


def _break_even(packer: MaskPacker, packed: Run, padded: Run, call: Call) -> float:
    few, (everything, all_) = packer(call), packer.with_all_rows(call)
    if isinstance(few, Padded) or isinstance(all_, Padded):
        raise CannotPack(f"a kept call cannot be packed: {few if isinstance(few, Padded) else all_}")
    begin = time.perf_counter()
    packed(*call, *few)
    if time.perf_counter() - begin >= SLOW_S:
        return max(MOSTLY_LIVE, packer.share(call))
    runs: list[Callable[[], object]] = [
        lambda: padded(*call), lambda: packed(*call, *few), lambda: packed(*everything, *all_)
    ]  # fmt: skip
    before, some, whole = least_times(runs)
    return break_even_share(before, some, whole, packer.share(call))


def least_times(runs: Sequence[Callable[[], object]]) -> list[float]:
    """What each of some runs takes at least, measured in turns for a second, and twice."""
    took: list[list[float]] = [[] for _ in runs]
    end = time.perf_counter() + MEASURE_S
    for times, run in zip(took, runs, strict=True):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    if min(times[0] for times in took) < SLOW_S:
        took, end = [[] for _ in runs], time.perf_counter() + MEASURE_S
    while len(took[0]) < 2 or (time.perf_counter() < end and len(took[0]) < 15):
        for times, run in zip(took, runs, strict=True):
            begin = time.perf_counter()
            run()
            times.append(time.perf_counter() - begin)
    return [min(t) for t in took]


def packed_plan(found: PaddedTraffic, fast: Plan, plan: Plan, graph: Graph, limit: float, *, compiled: bool = True) -> Plan:
    """A plan of tier 2: live rows alone in `fast` up to a share of them, else `plan`, which may have generated kernels."""
    run = PackedRun(replace(found.packer, limit=limit), fast.run, plan.run)
    names = found.packer.names(graph.inputs)

    def counters() -> dict[str, int]:
        told = {f"padded_{why.name.lower()}": n for why, n in sorted(run.why_not.items())}
        return {"packed_calls": run.calls, "padded_calls": run.why_not.total() + run.unread, "padded_unread": run.unread, **told}

    hides = ("a mask made of " if found.packer.maker is not None else "") + ", ".join(names)
    about = (
        f"rows that {hides} hides are not computed where at most {limit:.0%} live ({found.share:.0%} do): "
        f"{found.packer.products} products and attentions on packed rows; else {'as before' if compiled else 'on library kernels'}"
    )

    def counted() -> BetCount:
        missed, outgrown = run.why_not.total() + run.unread, 0.0 if compiled else run.mostly_live
        return BetCount(run.calls, missed, outgrown=outgrown, values=names)

    return composed(graph, run, "packed", about, (fast, plan), counters=counters, begin=run.begin,
                    counts=(AttemptKey(PADDING), counted))


@dataclass(frozen=True, slots=True)
class PaddingLayer(Layer):
    """Batches that are mostly padding."""

    ignore: bool
    """Whether rows of outputs that a mask hides may be anything."""
    compiled: bool = True
    """Whether calls that are not packed have generated kernels; where nearly all are packed, those would be made in vain."""
    by_library: bool = False
    """Whether packed calls run on library kernels: a plan that is there at once, and serves until the generated ones are."""
    known: list[PaddedTraffic] = field(default_factory=list[PaddedTraffic], compare=False, repr=False)
    """What was found when the layer was proposed; building it takes that, so that no kept call outlives it."""

    @property
    def key(self) -> AttemptKey:
        """There is one of it."""
        return AttemptKey(PADDING)

    @property
    def on_library(self) -> bool:
        """What packed calls run on."""
        return self.by_library

    def build(self, graph: Graph, calls: Sequence[Call], inner: tuple[Layer, ...], composer: Composer) -> Plan:
        """Live rows alone up to the share of them that is measured to pay; a graph that cannot be packed stays as it is."""
        try:
            if self.known and self.known[-1].graph is graph:
                found = self.known.pop()  # of weights that may have been written since
                able = [c for c in found.calls if not isinstance(found.packer(c), Padded)]
                _require_hidden_weights(graph, composer.weights, found.packer, able)
            else:
                found = padded_traffic(graph, composer.weights, calls, ignore_outputs=self.ignore)
        except (CannotPack, NotPadded):
            return composer.plan(graph, calls, inner)
        sample = found.calls[0]
        if found.packer.mask_of(sample).device.type != "cpu":
            return device_packed_plan(graph, found.packer, found.share, found.calls, inner, composer)
        given = found.packer(sample)
        if not isinstance(given, tuple):
            raise InternalError("a kept call cannot be packed any more", because=given)
        packed = found.packer.graph
        fast = composer.plain(packed) if self.by_library else composer.plan(packed, [[*sample, *given]], inner)
        other = composer.plan(graph, calls, inner) if self.compiled else composer.plain(graph)
        composer.quiet()
        limit = LIBRARY_LIVE if self.by_library else paying_share(found.packer, fast.run, other.run, sample)
        return packed_plan(found, fast, other, graph, limit, compiled=self.compiled)
