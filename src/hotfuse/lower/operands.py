"""What a product's node is given, by the names of torch's schema."""

from __future__ import annotations

from hotfuse.ir.graph import Node, Value
from hotfuse.lower.errors import CannotLower
from hotfuse.ops.schema import argument


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
