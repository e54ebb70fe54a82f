"""Where a graph's tensors are."""

from __future__ import annotations

import torch

from hotfuse.ir.graph import Graph
from hotfuse.ir.types import TensorType


def accelerator_of(graph: Graph) -> torch.device | None:
    """The one accelerator that a graph's tensors are on; None where all are on the CPU, or on several accelerators."""
    values = [*graph.inputs, *(p.value for p in graph.params), *(v for n in graph.nodes for v in n.outs)]
    found = {v.type.device for v in values if isinstance(v.type, TensorType)} - {"cpu", "meta"}
    return torch.device(next(iter(found))) if len(found) == 1 else None
