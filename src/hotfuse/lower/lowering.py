"""The kernel of a group: which family of kernels computes it, by what the group has at its centre."""

from __future__ import annotations

from dataclasses import replace

from hotfuse.analysis.attention import FUSED, PACKED, written
from hotfuse.ir.graph import Graph, Node, Value, sources
from hotfuse.lower.common.activation_products import PRODUCTS, is_product
from hotfuse.lower.common.effort import limited
from hotfuse.lower.common.errors import CannotLower
from hotfuse.lower.common.lowered import BufferArgument, BufferRole, Lowered
from hotfuse.lower.common.positions import Refine
from hotfuse.lower.common.recognize_gelu import recognized
from hotfuse.lower.cpu.attention.attention_group import lower_attention
from hotfuse.lower.cpu.attention.packed import lower_packed
from hotfuse.lower.cpu.averages import is_average, lower_average
from hotfuse.lower.cpu.conv.conv_group import is_convolution, lower_convolution
from hotfuse.lower.cpu.expert_order import lower_order
from hotfuse.lower.cpu.gemm.bmm import lower_product
from hotfuse.lower.cpu.gemm.grouped import lower_grouped
from hotfuse.lower.cpu.gemm.nibbles import lower_nibbles
from hotfuse.lower.cpu.gemm.product_group import lower_contraction
from hotfuse.lower.cpu.group import Options, lower_group
from hotfuse.lower.cpu.prefetch import with_prefetches
from hotfuse.lower.cpu.recurrent.recurrent_group import is_recurrent, lower_recurrent
from hotfuse.lower.cpu.softmax_rows import is_rows, lower_rows
from hotfuse.lower.cpu.tiling import Core
from hotfuse.lower.ops.views import is_move
from hotfuse.lower.primitives.conv import by_planes
from hotfuse.ops.contract import is_contraction
from hotfuse.ops.own.experts import ORDER, PRODUCT
from hotfuse.ops.own.nibbles import PRODUCT as NIBBLE_PRODUCT
from hotfuse.ops.schema import argument
from hotfuse.ops.table import packet


def lower(graph: Graph, core: Core) -> Lowered:
    """The kernel of a closed group; raises CannotLower with the reason where there is none."""
    try:
        with limited():
            lowered = _lowered(recognized(graph), core)
    except Refine as e:  # kernels around a product, a convolution or a scan have loops of their own
        raise CannotLower(
            "an operand is put together of pieces, and the loops of this kernel cannot stop between two of them"
        ) from e
    there = {v.name for v in sources(graph)}
    for a in lowered.arguments:
        if isinstance(a, BufferArgument) and a.role is BufferRole.INPUT and a.value not in there:
            raise CannotLower(f"%{a.value} is computed in the group, and its kernel reads it from memory")
    return lowered


def _lowered(graph: Graph, core: Core) -> Lowered:
    if any(packet(n.op) == PACKED for n in graph.nodes):
        return lower_packed(graph, core, name=_name(graph))
    if any(packet(n.op) == PRODUCT for n in graph.nodes):
        return lower_grouped(graph, core, name=_name(graph))
    if any(packet(n.op) == ORDER for n in graph.nodes):
        return lower_order(graph, name=_name(graph))
    if any(packet(n.op) == NIBBLE_PRODUCT for n in graph.nodes):
        return lower_nibbles(graph, name=_name(graph))
    if any(packet(n.op) == FUSED for n in graph.nodes) or written(graph):
        return lower_attention(graph, core, name=_name(graph))
    if any(is_product(n) and _between(graph, n) for n in graph.nodes):
        return lower_product(graph, core, name=_name(graph))
    if any(is_contraction(n) for n in graph.nodes):
        return lower_contraction(graph, core, name=_name(graph))
    if any(is_convolution(n) for n in graph.nodes) and not by_planes(graph):
        return lower_convolution(graph, core, name=_name(graph))
    if any(is_recurrent(n) for n in graph.nodes):
        return lower_recurrent(graph, core, name=_name(graph))
    if is_rows(graph, core):
        return lower_rows(graph, core, name=_name(graph))
    if is_average(graph, core):
        return lower_average(graph, core, name=_name(graph))
    found = lower_group(replace(graph, name=_name(graph)), Options(vector_bytes=core.lanes * 4))
    return replace(found, kernel=with_prefetches(found.kernel, core))


def _between(graph: Graph, node: Node) -> bool:
    """Whether a product's right operand is an activation or a view; bytes that the group itself makes numbers of are neither."""
    right = argument(node, PRODUCTS[packet(node.op)][1])
    made = {v.name: n for n in graph.nodes for v in n.outs}
    seen = False
    while isinstance(right, Value) and right.name in made and is_move(made[right.name].op):
        right, seen = made[right.name].ins[0], True
    if not isinstance(right, Value) or right.name in made:
        return False
    return seen or right.name not in {p.value.name for p in graph.params}


def _name(graph: Graph) -> str:
    """What the kernel is called in profiles and disassembly: the ops it computes."""
    ops = dict.fromkeys(packet(n.op).partition(".")[2] for n in graph.nodes)
    return "_".join(ops)[:60]
