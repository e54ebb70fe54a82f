"""A graph on another device: every tensor of it there, and whatever its nodes make made there."""

from __future__ import annotations

from dataclasses import replace

from hotfuse.ir.graph import Arg, Graph, Token
from hotfuse.ir.retype import retyped
from hotfuse.ir.types import TensorType, Type


def placed(graph: Graph, device: str) -> Graph:
    """The same graph with all tensors on that device; sizes, guards and structure stay."""

    def there(t: Type) -> Type:
        return replace(t, device=device) if isinstance(t, TensorType) else t

    return replace(_args_placed(retyped(graph, there, nested=True), device), guards=graph.guards)


def _args_placed(graph: Graph, device: str) -> Graph:
    nodes = (
        replace(
            n, args=tuple(_arg(a, device) for a in n.args), attrs=tuple((name, _arg(a, device)) for name, a in n.attrs),
            graphs=tuple(_args_placed(g, device) for g in n.graphs),
        )
        for n in graph.nodes
    )  # fmt: skip
    return replace(graph, nodes=tuple(nodes))


def _arg(arg: Arg, device: str) -> Arg:
    if isinstance(arg, tuple):
        return tuple(_arg(a, device) for a in arg)
    return Token("device", device) if isinstance(arg, Token) and arg.kind == "device" else arg
