"""Which nodes are convolutions, and which only put zeros around an image for one."""

from __future__ import annotations

from hotfuse.ir.graph import Graph, Node, Value, output_values
from hotfuse.ir.types import TensorType
from hotfuse.ops.schema import argument
from hotfuse.ops.table import packet

STRAIGHT = frozenset({"aten.conv1d", "aten.conv2d", "aten.conv3d", "aten.convolution"})
TURNED = frozenset({"aten.conv_transpose1d", "aten.conv_transpose2d", "aten.conv_transpose3d"})
CONVOLUTIONS = STRAIGHT | TURNED
_PADS = frozenset({"aten.pad", "aten.constant_pad_nd"})

Pads = tuple[tuple[int, int], ...]
"""Per spatial dim, before and after."""


def is_convolution(node: Node) -> bool:
    """Whether a node is a convolution, transposed or not."""
    return packet(node.op) in CONVOLUTIONS


def is_transposed(node: Node) -> bool:
    """Whether it is a transposed one."""
    return packet(node.op) in TURNED or argument(node, "transposed", default=False) is True


def windows_overlap(node: Node) -> bool:
    """Whether windows move by one over an image and all sum over all channels: what neighbours share can be computed once."""
    weight, x = node.args[1], node.args[0]
    if is_transposed(node) or not isinstance(weight, Value) or not isinstance(weight.type, TensorType):
        return False
    if not isinstance(x, Value) or not isinstance(x.type, TensorType) or weight.type.shape[1] != x.type.shape[1]:
        return False
    steps = (argument(node, "stride", 1), argument(node, "dilation", 1))
    return any(n != 1 for n in weight.type.shape[2:]) and all(s == 1 or (isinstance(s, tuple) and set(s) <= {1}) for s in steps)


def zero_padding(node: Node) -> Pads | None:
    """Zeros that a node puts around an image, before and after per spatial dim; None where it does something else."""
    if packet(node.op) not in _PADS:
        return None
    x, pad = node.args[0], argument(node, "pad")
    if not isinstance(x, Value) or not isinstance(x.type, TensorType) or not isinstance(pad, tuple):
        return None
    if argument(node, "mode", "constant") != "constant" or argument(node, "value", 0) not in (None, 0, 0.0):
        return None
    numbers = [n for n in pad if isinstance(n, int) and n >= 0]
    rank = len(x.type.shape) - 2
    if len(numbers) != len(pad) or len(pad) % 2:
        return None
    pairs = list(zip(numbers[::2], numbers[1::2], strict=True))  # the last dim comes first
    if any(p != (0, 0) for p in pairs[rank:]):
        return None
    return (*((0, 0),) * (rank - len(pairs)), *reversed(pairs[:rank]))


def padding_in_front(graph: Graph, conv: Node) -> tuple[Node, Pads] | None:
    """The node that puts zeros around a convolution's input, and does so for it alone."""
    x = conv.args[0]
    maker = next((n for n in graph.nodes if isinstance(x, Value) and x in n.outs), None)
    if maker is None or is_transposed(conv) or (pads := zero_padding(maker)) is None:
        return None
    alone = sum(x in n.ins for n in graph.nodes) == 1 and x not in output_values(graph)
    return (maker, pads) if alone else None
