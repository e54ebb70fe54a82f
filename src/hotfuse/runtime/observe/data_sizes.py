"""Sizes that only a call's data tell, as kept calls have them: how many rows a mask picks, how many boxes survive.

No kernel is cut or tried at a size that nobody knows. So a few kept calls are run through the library's operators, beside serving,
and what they show is planned for where it is about the same in most of them (`profile.traffic`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hotfuse.backends.library import meaning
from hotfuse.backends.pycode import flat_function
from hotfuse.ir.graph import Graph, Kind, Node, Value
from hotfuse.ir.types import ScalarType, TensorType, dims_of
from hotfuse.machine.device_stream import in_own_stream
from hotfuse.profile.traffic import DataSize, data_size
from hotfuse.specialize.data_sizes import data_symbols, unsuited

MAX_CALLS = 8
"""Kept calls that are run for it."""
MAX_SIZES = 16
"""Sizes of one graph that are looked at."""
Shown = Mapping[str, tuple[int, int]]
"""By symbol: which output of a node shows it, and on which axis; -1 for a number."""


def data_sizes(
    graph: Graph, weights: Mapping[str, torch.Tensor], calls: Sequence[Sequence[torch.Tensor]]
) -> tuple[DataSize, ...]:
    """What calls show of such sizes, by symbol; nothing where the graph has none, or a control node decides where they are made."""
    wanted = sorted(data_symbols(graph))[:MAX_SIZES]
    if not wanted or not calls:
        return ()
    seen: dict[str, list[int]] = {s: [] for s in wanted}
    left = set(wanted)
    places: dict[int, Shown] = {}
    for i, node in enumerate(graph.nodes):
        found = {s: at for k, v in enumerate(node.outs) for s, at in _shown(v, k).items() if s in left}
        left -= found.keys()
        if found and node.kind is Kind.OPERATOR:
            places[i] = found
    at = {id(n): i for i, n in enumerate(graph.nodes)}

    def looked(node: Node) -> tuple[Callable[..., Any], bool]:
        fn, several = meaning(node)
        shown = places.get(at.get(id(node), -1))
        return (fn, several) if shown is None else (_looking(fn, shown, seen, several=several or len(node.outs) > 1), several)

    run, _ = flat_function(graph, looked, weights)
    with torch.no_grad():
        for inputs in calls[:MAX_CALLS]:
            with in_own_stream(inputs):
                run(*inputs)
    refused = unsuited(graph)
    return tuple(data_size(s, sizes, refused.get(s, "")) for s, sizes in seen.items() if sizes)


def _shown(value: Value, number: int) -> dict[str, tuple[int, int]]:
    """Symbols that a value shows as they are."""
    if isinstance(value.type, ScalarType):
        return {str(d.args[0]): (number, -1) for d in dims_of(value.type) if not isinstance(d, int) and d.op == "sym"}
    if not isinstance(value.type, TensorType):
        return {}
    return {str(d.args[0]): (number, axis) for axis, d in enumerate(value.type.shape) if not isinstance(d, int) and d.op == "sym"}


def _looking(fn: Callable[..., Any], shown: Shown, seen: dict[str, list[int]], *, several: bool) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        out = fn(*args, **kwargs)
        for symbol, (number, axis) in shown.items():
            value = out[number] if several else out
            seen[symbol].append(int(value) if axis < 0 else int(value.shape[axis]))
        return out

    return call
