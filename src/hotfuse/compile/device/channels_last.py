"""Images whose channels lie last in memory, for the library's convolutions of 16 bits: tensor cores sum over channels.

    y = relu(conv2d(x, w)): f16[1, 64, 56, 56]    ->    x' = contiguous(x, channels last)
                                                        y  = relu(conv2d(x', w)): f16[1, 64, 56, 56]{0,2,3,1}

The library has kernels for that order alone, and turns planes around in front of every convolution and behind it where they come in
another: 54 kernels and 155 of 590 us of a ResNet-50. The library's own kernels keep the order of what they are given, so the first
convolution is given images in that order; kernels that are generated store what their results' types say, which is that order then.
What a call returns lies as it does without.

Not every convolution is faster so: both orders are timed on the device (`faster`), for all convolutions of a graph together, since
turning images around between them costs more than it saves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from hotfuse.analysis.convolution import is_convolution
from hotfuse.backends.library import meaning
from hotfuse.backends.pycode import flat_function
from hotfuse.ir.graph import Arg, Graph, Kind, Node, Token, Value, map_node, map_values, output_values, unused_name
from hotfuse.ir.normal import normalized
from hotfuse.ir.subgraph import extract
from hotfuse.ir.text import show
from hotfuse.ir.types import ROW_MAJOR, STRIDED, DType, Layout, TensorType
from hotfuse.ops.table import Access, lookup, packet
from hotfuse.ops.torch_dtypes import torch_dtype

LAST = Layout((0, 2, 3, 1))
_SHORT = (DType.F16, DType.BF16)
_POOLS = frozenset({"aten.max_pool2d", "aten.avg_pool2d", "aten.adaptive_avg_pool2d"})
_KEEP_ORDER = frozenset({"aten.batch_norm", *_POOLS})

Seconds = Callable[[Callable[[], object]], float]
"""What a device takes for a run."""


def channels_last(graph: Graph) -> Graph:
    """The graph with channels last wherever images lie between convolutions; the same graph where there are none of 16 bits."""
    read = {n.args[0].name for n in graph.nodes if reads_images(n) and isinstance(n.args[0], Value)}
    returned = {v.name: v for v in output_values(graph) if _is_image(v)}
    if not read or any(n.graphs for n in graph.nodes) or any(_order(v) is None for v in returned.values()):
        return graph
    taken = {v.name for v in graph.inputs} | {p.value.name for p in graph.params} | {v.name for n in graph.nodes for v in n.outs}
    given: dict[str, Arg] = {}
    results: dict[str, Arg] = {}
    nodes: list[Node] = []
    weights = {n.args[1].name for n in graph.nodes if reads_images(n) and isinstance(n.args[1], Value) and _has_windows(n.args[1])}
    for v in (*graph.inputs, *(p.value for p in graph.params)):
        if v.name in read or v.name in weights:
            nodes.append(_copied("contiguous", v, LAST, taken))
            given[v.name] = nodes[-1].outs[0]
    for node in graph.nodes:
        keeps = _keeps_order(node)
        outs = tuple(_retyped(v, LAST) if keeps else v for v in node.outs)
        nodes.append(map_node(node, given, outs))
        for v, was in zip(outs, node.outs, strict=True):
            given[v.name] = v
            if v.name in read and not keeps:
                nodes.append(_copied("contiguous", v, LAST, taken))
                given[v.name] = nodes[-1].outs[0]
            if keeps and v.name in returned and isinstance(was.type, TensorType):
                nodes.append(_copied("clone", v, was.type.layout, taken))
                results[v.name] = nodes[-1].outs[0]
    return replace(graph, nodes=tuple(nodes), outputs=tuple(map_values(o, results) for o in graph.outputs))


def faster(graph: Graph, weights: Mapping[str, torch.Tensor], device: torch.device, seconds: Seconds) -> tuple[float, float]:
    """Microseconds of all convolutions of images together, as they are and with channels last."""
    found: dict[str, tuple[float, float]] = {}
    total = [0.0, 0.0]
    chance = torch.Generator(device).manual_seed(0)  # the program's own numbers stay as they are
    for i, node in enumerate(graph.nodes):
        if not reads_images(node):
            continue
        piece = extract(graph, range(i, i + 1), "convolution")
        key = show(normalized(piece))
        if key not in found:
            run, _ = flat_function(piece, meaning, weights)
            plain = [_made_up(v, chance) for v in piece.inputs]
            last = [t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t for t in plain]
            found[key] = seconds(lambda run=run, x=plain: run(*x)) * 1e6, seconds(lambda run=run, x=last: run(*x)) * 1e6
        total = [have + more for have, more in zip(total, found[key], strict=True)]
    return total[0], total[1]


def reads_images(node: Node) -> bool:
    """Whether a node is a convolution of images of 16 bits whose sizes are numbers."""
    if node.kind is not Kind.OPERATOR or not is_convolution(node) or not isinstance(node.args[0], Value):
        return False
    return _is_image(node.args[0])


def _is_image(v: Value) -> bool:
    t = v.type
    if not isinstance(t, TensorType) or t.dtype not in _SHORT or len(t.shape) != 4:
        return False
    return all(isinstance(n, int) and n > 0 for n in t.shape)


def _keeps_order(node: Node) -> bool:
    """Whether the library's results lie as what it is given."""
    return is_convolution(node) or packet(node.op) in _KEEP_ORDER or lookup(node.op).access is Access.POINTWISE


def _has_windows(weight: Value) -> bool:
    """Whether the order of a weight's dims matters: the library turns it around in every call, by a slower kernel."""
    return _is_image(weight) and isinstance(weight.type, TensorType) and weight.type.shape[2:] != (1, 1)


def _order(v: Value) -> str | None:
    """torch's name for how an image lies; None where it has none."""
    layout = v.type.layout if isinstance(v.type, TensorType) else STRIDED
    return "channels_last" if layout == LAST else "contiguous_format" if layout == ROW_MAJOR else None


def _retyped(v: Value, layout: Layout) -> Value:
    return Value(v.name, replace(v.type, layout=layout)) if _is_image(v) and isinstance(v.type, TensorType) else v


def _copied(op: str, v: Value, layout: Layout, taken: set[str]) -> Node:
    """A copy that lies so; what is contiguous is none where it does already."""
    made = _retyped(Value(unused_name(f"{v.name}_lies", taken), v.type), layout)
    order = Token("memory_format", _order(made) or "")
    return Node(Kind.OPERATOR, f"aten.{op}.default", (v,), (made,), (("memory_format", order),))


def _made_up(v: Value, chance: torch.Generator) -> torch.Tensor:
    """Numbers as large as those of a network; what they are makes no difference to the time."""
    assert isinstance(v.type, TensorType)
    shape = [n for n in v.type.shape if isinstance(n, int)]
    return torch.randn(shape, device=chance.device, generator=chance).to(torch_dtype(v.type.dtype))
