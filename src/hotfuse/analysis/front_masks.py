"""Where a graph asks whether the rows that live lie in front of all others, in every sequence.

    %front = all(%real[:, 1:] <= %real[:, :-1])          true for padding behind sequences, false for holes and padding before them

Encoders of torch do that (`frontends.as_in_eager.nested`), and show padded rows or not by the answer.
"""

from __future__ import annotations

from hotfuse.ir.graph import Graph, Node, Value, makers
from hotfuse.ops.schema import argument
from hotfuse.ops.table import packet

_END = 2**63 - 1


def front_tests(graph: Graph) -> dict[str, Value]:
    """By the name of each answer: the mask, [sequences, rows], that it is of."""
    maker = makers(graph)

    def of(v: object, op: str) -> Node | None:
        node = graph.nodes[maker[v.name]] if isinstance(v, Value) and v.name in maker else None
        return node if node is not None and packet(node.op) == op else None

    found: dict[str, Value] = {}
    for node in graph.nodes:
        if node.op != "aten.all.default" or (compared := of(node.args[0], "aten.le")) is None or len(compared.args) != 2:
            continue
        later, earlier = (of(x, "aten.slice") for x in compared.args)
        if later is None or earlier is None or later.args[0] != earlier.args[0] or not isinstance(mask := later.args[0], Value):
            continue
        if _along_rows(later, 1, (_END,)) and _along_rows(earlier, 0, (-1,)):
            found[node.outs[0].name] = mask
    return found


def _along_rows(node: Node, start: int, ends: tuple[int, ...]) -> bool:
    begin = argument(node, "start", 0)
    return (
        argument(node, "dim", 0) in (1, -1) and (begin or 0) == start and argument(node, "end", _END) in ends
        and argument(node, "step", 1) == 1
    )  # fmt: skip
