"""A model of the host on a device: weights copied once, inputs copied in, results copied back, where live calls are faster so.

Settings must allow it (`devices="auto"`). What a call would take there is predicted first, of the graph's cost, the device's rates
and measured copies (`analysis.placement`); what is not predicted to be faster than calls are is not tried. The rest is as for
any plan: proof on real calls, a race on live ones, an audit, and copies of weights that are watched for writes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from hotfuse.analysis.placement import TransferredGraph, placement_cost, with_transfers
from hotfuse.backends.protocol import Artifact, Run
from hotfuse.base.errors import InternalError
from hotfuse.base.events import Why
from hotfuse.compile.device.kept_peaks import known_rates
from hotfuse.ir.graph import output_values
from hotfuse.ir.subgraph import extract
from hotfuse.partition.cut import CutReason, Partition, Partitioning
from hotfuse.runtime.plan import Plan, PlanMemory, PlanUnit
from hotfuse.runtime.site import Entry
from hotfuse.runtime.tierup.attempt import PROVEN_ON, Attempt, AttemptContext, demand_of, exchange
from hotfuse.specialize.table import PLACED

MAX_OF_FREE = 0.5
"""Part of a device's free memory that copies of weights may take."""
MAX_TIME_RATIO = 0.8
"""Part of what calls take now that a prediction must stay below."""


def idle_device() -> torch.device | None:
    """The CUDA device with the most free memory; None where there is none."""
    if not torch.cuda.is_available():
        return None
    free = [torch.cuda.mem_get_info(i)[0] for i in range(torch.cuda.device_count())]
    return torch.device("cuda", free.index(max(free))) if free else None


def placed_elsewhere(context: AttemptContext, entry: Entry) -> Attempt | None:
    """An attempt at the entry's graph on a device; None, with its reason told, where that promises nothing."""
    device, calls = idle_device(), entry.samples.several(PROVEN_ON)
    if device is None:
        context.refuse(entry, PLACED, Why.NO_DEVICE, "torch sees no CUDA device")
        return None
    if not calls:
        return None
    graph, now_us = entry.baseline.graph, entry.seconds / max(1, entry.heat) * 1e6
    sizes = dict(zip(entry.symbols, entry.signature(*calls[0]), strict=True))
    rates = known_rates(device, context.plans.settings)
    cost = placement_cost(graph, sizes, rates)
    free = torch.cuda.mem_get_info(device)[0]
    if cost is None:
        context.refuse(entry, PLACED, Why.UNPROMISING, "what it would take there depends on data", device=str(device))
        return None
    predicted: dict[str, Any] = {
        "device": str(device), "us_predicted": round(cost.total_s * 1e6, 1), "us_transfers": round(cost.transfer_s * 1e6, 1),
        "us_now": round(now_us, 1), "rates": "measured" if rates.measured else "stated",
    }
    if cost.weight_bytes > MAX_OF_FREE * free:
        said = f"its weights take {cost.weight_bytes >> 20} MiB, {free >> 20} are free"
        context.refuse(entry, PLACED, Why.TOO_MUCH_MEMORY, said, **predicted)
        return None
    if now_us and cost.total_s * 1e6 > MAX_TIME_RATIO * now_us:
        said = f"{cost.total_s * 1e6:.0f} us predicted instead of {now_us:.0f}"
        context.refuse(entry, PLACED, Why.UNPROMISING, said, **predicted)
        return None

    def make() -> Plan:
        moved = with_transfers(graph, str(device))
        weights = {p.key: entry.weights[p.key].to(device) for p in graph.params}
        body = context.improve(moved.inside, weights, [t.to(device) for t in calls[0]], demand=demand_of(context, entry))
        note = (f"placed on {device}: {cost.total_s * 1e6:.0f} us predicted, {cost.transfer_s * 1e6:.0f} of them for transfers; "
                f"{cost.weight_bytes >> 20} MiB of weights are copied there")
        return between_transfers(moved, body, weights, device, note)

    return Attempt(PLACED, make, lambda: entry.plan, calls, lambda better: exchange(entry, better), about=predicted)


def between_transfers(
    moved: TransferredGraph, body: Plan, weights: Mapping[str, torch.Tensor], device: torch.device, note: str
) -> Plan:
    """A plan that begins and ends on the host, of one that runs on a device."""
    graph, first, last = moved.graph, moved.to, len(moved.graph.nodes) - moved.back
    if len(body.graph.inputs) != len(graph.inputs):
        raise InternalError("a placed graph has other inputs than the one it was made of")
    parts = (Partition(0, 0, first, CutReason.TRANSFER, str(device)), Partition(1, first, last, CutReason.DEVICE, str(device)),
             Partition(2, last, len(graph.nodes), CutReason.TRANSFER, "cpu"))  # fmt: skip
    runs: tuple[Run, ...] = (_to(device), _precisely(body.run, convolves=graph_has_convolutions(moved)), _back)
    sides = ("transfer", body.artifacts[0].backend, "transfer")
    pieces = [extract(graph, range(p.first, p.last), f"{graph.name}.p{p.index}") for p in parts if len(p)]
    inside = [p for p in parts if len(p)]
    artifacts = tuple(Artifact(piece, runs[p.index], sides[p.index], "") for p, piece in zip(inside, pieces, strict=True))
    parts = tuple(replace(p, index=i) for i, p in enumerate(inside))
    units = (
        PlanUnit((0,), graph.inputs, moved.inside.inputs, runs[0]),
        PlanUnit((1,), moved.inside.inputs, output_values(moved.inside), runs[1]),
        PlanUnit((2,), output_values(moved.inside), output_values(graph), runs[2]),
    )

    def run(*inputs: torch.Tensor) -> tuple[Any, ...]:
        return runs[2](*runs[1](*runs[0](*inputs)))

    held = sum(w.nbytes for w in weights.values())
    return Plan(
        Partitioning(graph, parts), artifacts, run, 2, notes=(note, *body.notes), units=units if len(parts) == 3 else (),
        weights=weights, memory=PlanMemory(constants=held), counters=body.counters, layers=(PLACED,),
    )  # fmt: skip


def graph_has_convolutions(moved: TransferredGraph) -> bool:
    """Whether torch would round operands to tf32 there, which no library of the host does."""
    return any("conv" in n.op for n in moved.inside.nodes)


def _to(device: torch.device) -> Run:
    def to(*inputs: torch.Tensor) -> tuple[Any, ...]:
        return tuple([t.to(device, non_blocking=True) for t in inputs])

    return to


def _back(*outs: Any) -> tuple[Any, ...]:
    return tuple([_home(o) for o in outs])


def _home(out: Any) -> Any:
    if isinstance(out, Sequence):
        return [_home(o) for o in out]
    return out.cpu() if isinstance(out, torch.Tensor) else out


def _precisely(run: Run, *, convolves: bool) -> Run:
    if not convolves:
        return run

    def precisely(*inputs: Any) -> tuple[Any, ...]:
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            return run(*inputs)

    return precisely
