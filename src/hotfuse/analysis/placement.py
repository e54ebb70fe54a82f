"""Where a graph's tensors are, what it takes to have it elsewhere, and what that costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from hotfuse.analysis.cost import graph_cost, value_bytes
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.graph import Arg, Graph, Kind, Node, Token, Value, output_values
from hotfuse.ir.placed import placed
from hotfuse.ir.types import TensorType
from hotfuse.machine.device_rates import DeviceRates

TRANSFER = "aten._to_copy.default"


def accelerator_of(graph: Graph) -> torch.device | None:
    """The one accelerator that a graph's tensors are on; None where all are on the CPU, or on several accelerators."""
    values = [*graph.inputs, *(p.value for p in graph.params), *(v for n in graph.nodes for v in n.outs)]
    found = {v.type.device for v in values if isinstance(v.type, TensorType)} - {"cpu", "meta"}
    return torch.device(next(iter(found))) if len(found) == 1 else None


@dataclass(frozen=True, slots=True)
class TransferredGraph:
    """A graph on another device between transfers: inputs and results are where they were, weights are there."""

    graph: Graph
    inside: Graph
    """What is between the transfers."""
    to: int
    """Transfers in front."""
    back: int
    """Transfers behind."""


def with_transfers(graph: Graph, device: str) -> TransferredGraph:
    """A graph of the host on a device, with a transfer node for each of its inputs and results."""
    inside = placed(graph, device)
    there = {v.name: v for v in inside.inputs}
    inputs = tuple(Value(f"{v.name}_here", v.type) for v in graph.inputs)
    to = tuple(_transfer(i, there[v.name], device) for i, v in zip(inputs, graph.inputs, strict=True) if v.name in there)
    host = {v.name: v.type for v in output_values(graph)}
    named = {v.name: Value(f"{v.name}_back", host[v.name]) for v in output_values(inside)}
    tensors = [v for v in output_values(inside) if isinstance(v.type, TensorType)]
    back = tuple(_transfer(v, named[v.name], "cpu") for v in dict.fromkeys(tensors))
    outputs = tuple(_renamed(o, {v.name: named[v.name] for v in tensors}) for o in inside.outputs)
    whole = replace(inside, inputs=inputs, nodes=(*to, *inside.nodes, *back), outputs=outputs)
    return TransferredGraph(whole, inside, len(to), len(back))


def _transfer(given: Value, made: Value, device: str) -> Node:
    return Node(Kind.TRANSFER, TRANSFER, (given,), (made,), attrs=(("device", Token("device", device)),))


def _renamed(arg: Arg, names: Mapping[str, Value]) -> Arg:
    if isinstance(arg, tuple):
        return tuple(_renamed(a, names) for a in arg)
    return names.get(arg.name, arg) if isinstance(arg, Value) else arg


@dataclass(frozen=True, slots=True)
class PlacementCost:
    """Predicted seconds of a call that runs on a device and begins and ends on the host."""

    transfer_s: float
    compute_s: float
    weight_bytes: int

    @property
    def total_s(self) -> float:
        """All of it."""
        return self.transfer_s + self.compute_s


def placement_cost(graph: Graph, sizes: Mapping[str, int], rates: DeviceRates) -> PlacementCost | None:
    """What a graph would take on a device, transfers included; None where that depends on data."""
    cost = graph_cost(graph, sizes)
    to, back = ([value_bytes(v, sizes) for v in values] for values in (graph.inputs, output_values(graph)))
    weights = [value_bytes(p.value, sizes) for p in graph.params]
    if cost.flops is None or cost.bytes is None or None in to or None in back or None in weights:
        return None
    transfer = rates.transfer_s(sum(n or 0 for n in to), sum(n or 0 for n in back), len(to) + len(back))
    return PlacementCost(transfer, rates.seconds(cost.flops, cost.bytes, len(graph.nodes)), sum(n or 0 for n in weights))
