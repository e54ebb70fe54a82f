"""Lowering for GPUs: a group of graph nodes becomes one tile kernel whose parallel loops are a grid of programs.

The same evaluator (`lower.common.tile_values`) writes what a value is at a place; what differs from `lower.cpu` is the structure:
large tiles whose extents are powers of 2, one program for each, no packed weights, no memory between stages. Sizes are numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from hotfuse.analysis.attention import BOUNDED, FUSED, PACKED, written
from hotfuse.ir.graph import Graph, Value, map_node
from hotfuse.ir.types import TensorType
from hotfuse.lower.common.activation_products import is_product
from hotfuse.lower.common.effort import limited
from hotfuse.lower.common.errors import CannotLower
from hotfuse.lower.common.lowered import Lowered
from hotfuse.lower.common.recognize_gelu import recognized
from hotfuse.lower.gpu.attention import attention_tilings, lower_attention
from hotfuse.lower.gpu.gemm import gemm_tilings, lower_products
from hotfuse.lower.gpu.packed_attention import lower_packed_attention, packed_attention_tilings
from hotfuse.lower.gpu.row_kernels import lower_rows, row_tilings
from hotfuse.lower.gpu.tiling import GpuTiling
from hotfuse.ops.table import packet


def lower_gpu(graph: Graph, tiling: GpuTiling, strides: Mapping[str, tuple[int, ...]] | None = None) -> Lowered:
    """The kernel of a closed group; raises CannotLower with the reason where there is none."""
    with limited():
        found = recognized(placeless(graph))
        given, name = strides or {}, _name(found)
        if any(packet(n.op) == BOUNDED for n in found.nodes):
            return lower_packed_attention(found, tiling, given, name)
        if _is_attention(found):
            return lower_attention(found, tiling, given, name)
        if any(is_product(n) for n in found.nodes):
            return lower_products(found, tiling, given, name)
        return lower_rows(found, tiling, given, name)


def gpu_tilings(graph: Graph, *, bulk: bool = False, every: bool = False) -> Sequence[GpuTiling]:
    """Tilings that are worth a trial, the likeliest first; `bulk`: the device has a copy engine for blocks of matrices. `every`:
    all that there are, in any order, where a performance model chooses."""
    found = recognized(placeless(graph))
    if any(packet(n.op) == BOUNDED for n in found.nodes):
        return packed_attention_tilings(found)
    if _is_attention(found):
        return attention_tilings(found, every=every)
    if any(is_product(n) for n in found.nodes):
        return gemm_tilings(found, bulk=bulk, every=every)
    return row_tilings(found, every=every)


def placeless(graph: Graph) -> Graph:
    """The graph without its device: lowering speaks of memory, wherever that is."""
    values = [*graph.inputs, *(p.value for p in graph.params), *(v for n in graph.nodes for v in n.outs)]
    moved = {v.name: _placeless(v) for v in values}
    nodes = tuple(map_node(n, dict(moved), tuple(moved[v.name] for v in n.outs)) for n in graph.nodes)
    params = tuple(replace(p, value=moved[p.value.name]) for p in graph.params)
    outputs = tuple(moved[o.name] if isinstance(o, Value) else o for o in graph.outputs)
    return Graph(graph.name, tuple(moved[v.name] for v in graph.inputs), params, nodes, outputs, graph.guards)


def _placeless(v: Value) -> Value:
    return Value(v.name, replace(v.type, device="cpu")) if isinstance(v.type, TensorType) else v


def _is_attention(graph: Graph) -> bool:
    if any(packet(n.op) == PACKED for n in graph.nodes):
        raise CannotLower("packed attention is left to the library on GPUs")
    return any(packet(n.op) == FUSED for n in graph.nodes) or bool(written(graph))


def _name(graph: Graph) -> str:
    """What the kernel is called in listings: the ops it computes."""
    ops = dict.fromkeys(packet(n.op).partition(".")[2] for n in graph.nodes)
    return "_".join(ops)[:60]


__all__ = ["CannotLower", "GpuTiling", "gpu_tilings", "lower_gpu", "placeless"]
