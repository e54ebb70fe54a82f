"""Tier 0 of models whose weights nobody can reach: convolutions become one with what follows them (`ops.folded_conv`).

Only what runs is another: the plan's graph stays as it was captured. Which operators become one is found in the whole graph
(`ops.conv_chain`), with where its images have to be put back into rows; then `rules` put folded convolutions in their place.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from hotfuse.backends.pycode import Meaning, flat_function
from hotfuse.ir.graph import Arg, Graph, Kind, Node, Value, map_node, map_values, output_values, unused_name
from hotfuse.ir.rewrite import Context, Measure, Replacement, Rule, apply
from hotfuse.ir.subgraph import extract
from hotfuse.ir.types import TensorType
from hotfuse.ops.conv_chain import Chain, ChainLink, ChainRole, chains, to_rows
from hotfuse.ops.folded_conv import Affine, FoldedConv, Window, is_floats, of_arithmetic, of_norm
from hotfuse.ops.table import is_mutating

_FOLDED = "hotfuse.folded_conv"
UNFOLDED = Measure("nodes that are no folded convolution", lambda n: (int(n.op != _FOLDED),))
_ARITHMETIC = {"aten.add.Tensor": "add", "aten.sub.Tensor": "sub", "aten.mul.Tensor": "mul", "aten.div.Tensor": "div"}
_ANY_ORDER = frozenset(f"aten.{name}" for name in (
    "abs.default", "add.Tensor", "avg_pool2d.default", "batch_norm.default", "cat.default", "clamp.default",
    "conv2d.default", "conv_transpose2d.input", "div.Tensor", "erf.default", "exp.default", "gelu.default",
    "hardsigmoid.default", "leaky_relu.default", "max_pool2d.default", "mean.dim", "mul.Tensor", "neg.default", "pad.default",
    "sigmoid.default", "silu.default", "sqrt.default", "sub.Tensor", "sym_size.int", "tanh.default",
    "upsample_bilinear2d.vec", "upsample_nearest2d.vec",
))  # fmt: skip
"""Operators that take images in any order of memory without copying them."""


def folded(graph: Graph, meaning: Meaning, weights: Mapping[str, Any]) -> tuple[Graph, Meaning, int] | None:
    """What to run instead: nodes, their callables, and the memory of new weights; None where there is no such convolution."""
    constants: dict[str, Any] = {p.value.name: weights[p.key] for p in graph.params}
    if any(n.kind is Kind.OPERATOR and is_mutating(n.op) for n in graph.nodes):
        return None
    links = [_link(n, constants) for n in graph.nodes]
    outputs = [v.name for v in output_values(graph)]
    found = {c.places[0]: c for c in chains(links, outputs)}
    if not found:
        return None
    convs = {chain.makes: _conv(graph, chain, constants, meaning, weights) for chain in found.values()}
    gone = frozenset(p for c in found.values() for p in c.places[1:])
    laid_out = _in_rows(graph, to_rows(links, found, gone, outputs))
    made, _ = apply(laid_out, rules(graph, tuple(found.values())))

    def also(node: Node) -> tuple[Callable[..., Any], bool]:
        return (convs[node.outs[0].name], False) if node.op == _FOLDED else meaning(node)

    return made, also, sum(c.bytes for c in convs.values())


def rules(graph: Graph, found: Sequence[Chain]) -> tuple[Rule, ...]:
    """Two rules for the chains of a graph: the last node of one becomes a folded convolution, and those before it go."""
    ends = {chain.makes: graph.nodes[chain.places[0]] for chain in found}
    inside = {v.name for chain in found for place in chain.places[:-1] for v in graph.nodes[place].outs}

    def at_top(context: Context) -> bool:
        """Inside branches, which have no params, the same name may be another value."""
        return bool(context.graph.params)

    def fold(node: Node, context: Context) -> Replacement | None:
        if node.op == _FOLDED or len(node.outs) != 1 or node.outs[0].name not in ends or not at_top(context):
            return None
        conv = context.producer(ends[node.outs[0].name].outs[0])
        assert conv is not None  # it goes after what reads it
        return Replacement((Node(Kind.OPERATOR, _FOLDED, (conv.args[0],), node.outs, loc=conv.loc),))

    def drop(node: Node, context: Context) -> Replacement | None:
        unread = bool(node.outs) and all(v.name in inside and not context.is_used(v) for v in node.outs)
        return Replacement() if unread and at_top(context) else None

    return (
        Rule("fold-convolution", fold, "one node less that is not folded", UNFOLDED),
        Rule("drop-folded", drop, "one node less that is not folded", UNFOLDED),
    )


def _in_rows(graph: Graph, rows: tuple[dict[int, tuple[Hashable, ...]], tuple[Hashable, ...]]) -> Graph:
    """The graph with images put into rows before those that read them so, and at its end."""
    values = {v.name: v for v in graph.inputs} | {v.name: v for n in graph.nodes for v in n.outs}
    taken = set(values) | {p.value.name for p in graph.params}
    now: dict[str, Arg] = {}
    nodes: list[Node] = []

    def put_in_rows(name: Hashable) -> None:
        value = values[str(name)]
        new = Value(unused_name(f"{value.name}_rows", taken), value.type)
        taken.add(new.name)
        nodes.append(Node(Kind.OPERATOR, "aten.contiguous.default", (now.get(value.name, value),), (new,)))
        now[value.name] = new

    before, last = rows
    for place, node in enumerate(graph.nodes):
        for name in before.get(place, ()):
            put_in_rows(name)
        nodes.append(map_node(node, now))
    for name in last:
        put_in_rows(name)
    return replace(graph, nodes=tuple(nodes), outputs=tuple(map_values(o, now) for o in graph.outputs))


def _link(node: Node, constants: Mapping[str, Any]) -> ChainLink:
    reads = tuple(v.name for v in node.ins if v.name not in constants)
    makes = tuple(v.name for v in node.outs if isinstance(v.type, TensorType))
    role, numbers, channels = ChainRole.OTHER, None, 0
    if node.kind is Kind.OPERATOR and len(node.outs) == 1 and reads:
        role, numbers, channels = _role(node, reads, constants)
    return ChainLink(role, reads, makes, numbers, channels)


def _role(node: Node, reads: tuple[str, ...], constants: Mapping[str, Any]) -> tuple[ChainRole, Affine | None, int]:
    match node.op:
        case "aten.conv2d.default" if len(reads) == 1 and _window(node, constants) is not None:
            return ChainRole.CONV, None, int(_constant(node.args[1], constants).shape[0])
        case "aten.relu.default":
            return ChainRole.RELU, None, 0
        case "aten.hardswish.default":
            return ChainRole.HARDSWISH, None, 0
        case "aten.mul.Tensor" if len(reads) == 2:
            return ChainRole.TIMES, None, 0
        case "aten.clamp.default" if tuple(node.args[1:]) == (0.0, 6.0) and not node.attrs:
            return ChainRole.CLIP, None, 0
        case _ if len(reads) == 1 and (numbers := _affine(node, constants)) is not None:
            return ChainRole.AFFINE, numbers, 0
        case _:
            return (ChainRole.ANY_ORDER if node.op in _ANY_ORDER else ChainRole.OTHER), None, 0


def _constant(arg: Arg, constants: Mapping[str, Any]) -> Any:
    return constants.get(arg.name) if isinstance(arg, Value) else arg


def _window(node: Node, constants: Mapping[str, Any]) -> Window | None:
    """A plain convolution of float32 images; None for others."""
    args = (*node.args, *(None, None, None, None, None)[len(node.args) - 2 :])
    if node.attrs or not isinstance(args[0], Value) or args[0].name in constants:
        return None
    weight, bias = _constant(args[1], constants), _constant(args[2], constants)
    if not is_floats(weight, 4) or min(weight.shape) == 0 or not (args[2] is None or is_floats(bias, 1)):
        return None
    pairs = [_pair(a, default) for a, default in ((args[3], 1), (args[4], 0), (args[5], 1))]
    groups = 1 if args[6] is None else args[6]
    if any(p is None for p in pairs) or not isinstance(groups, int):
        return None
    stride, pads, dilation = (p for p in pairs if p is not None)
    return Window(stride, pads, dilation, groups)


def _pair(arg: Arg, default: int) -> tuple[int, int] | None:
    if arg is None:
        return default, default
    numbers = arg if isinstance(arg, tuple) else (arg,)
    if len(numbers) == 1:
        numbers = (numbers[0], numbers[0])
    first, second = numbers if len(numbers) == 2 else (None, None)
    return (first, second) if isinstance(first, int) and isinstance(second, int) else None


def _affine(node: Node, constants: Mapping[str, Any]) -> Affine | None:
    """A node that scales and shifts by constants, one number or one for each channel."""
    if node.op == "aten.batch_norm.default":
        trains, epsilon = (*node.args, None, None, None)[5], (*node.args, None, None, None)[7]
        if trains is not False or not isinstance(epsilon, float):
            return None
        return of_norm([_constant(a, constants) for a in node.args[1:5]], epsilon)
    if (name := _ARITHMETIC.get(node.op)) is None or node.attrs or len(node.args) != 2:
        return None
    first = isinstance(node.args[0], Value) and node.args[0].name not in constants
    return of_arithmetic(name, _constant(node.args[1 if first else 0], constants), first=first)


def _conv(
    graph: Graph, chain: Chain, constants: Mapping[str, Any], meaning: Meaning, weights: Mapping[str, Any]
) -> FoldedConv:
    node = graph.nodes[chain.places[0]]
    window = _window(node, constants)
    assert window is not None  # it is a chain
    weight, bias = (_constant(a, constants) for a in (*node.args, None)[1:3])

    def plain(x: Tensor) -> Tensor:
        """The nodes as they stand, for inputs that the folded convolution is not made for: rare, so made when asked for."""
        run, _ = flat_function(extract(graph, chain.places, f"{graph.name}.plain"), meaning, weights)
        return run(x)[0]

    return FoldedConv(weight, bias, window, chain.before, chain.activation, chain.after, plain)
