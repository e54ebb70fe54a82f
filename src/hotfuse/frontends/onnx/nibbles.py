"""Constants of four bits that are only dequantized become constants of eight bits, which torch and kernels have.

Torch has no integers of four bits, so such values are NumPy arrays (a byte each, too), and an operator that reads one runs in every
call, by itself. As bytes the same numbers are folded, traced and compiled like any other weights. What else reads such a constant
(a cast, a reshape, an output) asks for its type: there it stays.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import torch

from hotfuse.frontends.onnx.model_file import OnnxGraph
from hotfuse.frontends.onnx.values import Value

_WIDER = {np.dtype(ml_dtypes.int4): np.int8, np.dtype(ml_dtypes.uint4): np.uint8}
_READS = {"DequantizeLinear": (0, 2)}
"""Operators that read numbers, whatever their type, and at which inputs."""


def widened(graph: OnnxGraph) -> OnnxGraph:
    """The graph with such constants as bytes."""
    narrow = {name for name, v in graph.initializers.items() if isinstance(v, np.ndarray) and v.dtype in _WIDER}
    narrow -= {p.name for p in graph.inputs}
    if narrow:
        narrow -= set(_otherwise(graph, narrow))
    if not narrow:
        return graph
    return replace(graph, initializers={name: _bytes(v) if name in narrow else v for name, v in graph.initializers.items()})


def _bytes(v: Value) -> torch.Tensor:
    array: Any = v
    return torch.from_numpy(array.astype(_WIDER[array.dtype]))


def _otherwise(graph: OnnxGraph, names: set[str]) -> Iterator[str]:
    """Those of the names that something else reads, here or in graphs inside."""
    yield from (p.name for p in graph.outputs if p.name in names)
    for n in graph.nodes:
        reads = _READS.get(n.op, ()) if not n.domain else ()
        yield from (name for at, name in enumerate(n.inputs) if name in names and at not in reads)
        for a in n.attrs.values():
            for g in a if isinstance(a, list) else (a,):
                if isinstance(g, OnnxGraph):
                    yield from _otherwise(g, names)
