"""What a product's node is given, by the names of torch's schema, and what its sums become with it."""

from __future__ import annotations

from hotfuse.ir.graph import Node, Value
from hotfuse.lower.common.errors import CannotLower
from hotfuse.lower.common.lowered import tensor_type
from hotfuse.lower.common.positions import Position
from hotfuse.lower.common.tile_values import Evaluator
from hotfuse.lower.ops.views import broadcast, shape_of
from hotfuse.ops.schema import argument
from hotfuse.tile.program import Tile


def tensor(node: Node, name: str) -> Value:
    """An argument that has to be a value of the graph."""
    found = argument(node, name)
    if not isinstance(found, Value):
        raise CannotLower(f"{node.op} takes {found} as {name}", where=str(node.loc))
    return found


def factor(node: Node, name: str) -> float:
    """A factor, 1 where none is given."""
    found = argument(node, name, 1)
    if not isinstance(found, int | float):
        raise CannotLower(f"{node.op} takes {found} as {name}", where=str(node.loc))
    return float(found)


def completed(
    at: Evaluator, sums: Tile, out: Value, position: Position, scale: float, bias: Value | None, bias_scale: float
) -> Tile:
    """scale * sums + bias_scale * bias at a place of a product's result, in its type."""
    b = at.builder
    if scale != 1:
        sums = b.map("mul", sums, scale)
    if bias is not None:
        tile = b.cast(at.tile(bias, broadcast(position, shape_of(out), shape_of(bias))), sums.type.dtype)
        sums = b.map("add", sums, tile if bias_scale == 1 else b.map("mul", tile, bias_scale))
    return b.cast(sums, tensor_type(out).dtype)
