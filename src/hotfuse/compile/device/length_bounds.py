"""Whether a mask of positions hides anything of what is filled: bounds of integers, as multiples of the length and a number.

    arange(s + 1) <= arange(1) + s     elements 0 to s, and s: true everywhere, for every length

The mask of a step that looks at everything before it says nothing, and kernels of attention that take no mask read the keys of
grouped heads where they lie.
"""

from __future__ import annotations

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.graph import Node, Value
from hotfuse.ops.schema import argument
from hotfuse.ops.table import packet

_SAME = frozenset(f"aten.{n}" for n in ("unsqueeze", "squeeze", "expand", "view", "reshape", "permute", "transpose", "alias",
                                        "clone"))  # fmt: skip
_AND = frozenset(f"aten.{n}" for n in ("bitwise_and", "logical_and", "__and__"))
Linear = tuple[int, int]
"""So many times the length, and so many more."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What the elements in filled rows are at least and at most."""

    least: Linear
    most: Linear


TRUE = Bounds((0, 1), (0, 1))


class KnownBounds:
    """Known bounds of a graph's values, filled in node by node."""

    def __init__(self) -> None:
        self._known: dict[str, Bounds] = {}

    def of(self, v: Value) -> Bounds | None:
        """None where nothing is known."""
        return self._known.get(v.name)

    def note(self, node: Node, positions: Bounds | None = None, added: Linear | None = None) -> None:
        """A node of the graph as it was captured; `positions` where it counts them, `added` the size that it adds."""
        if len(node.outs) != 1:
            return
        found = positions if positions is not None else self._bounds(node, added)
        if found is not None:
            self._known[node.outs[0].name] = found

    def _bounds(self, node: Node, added: Linear | None) -> Bounds | None:
        given = [self.of(v) for v in node.ins]
        match packet(node.op):
            case op if op in _SAME and given:
                return given[0]
            case "aten.new_ones" | "aten.ones":
                return TRUE
            case "aten.add" if given and given[0] is not None and not node.attrs:
                more = argument(node, "other")
                more = (0, more) if isinstance(more, int) else added
                return None if more is None else Bounds(_plus(given[0].least, more), _plus(given[0].most, more))
            case "aten.le" if len(given) == 2 and given[0] is not None and given[1] is not None:
                return TRUE if _never_above(given[0].most, given[1].least) else None
            case "aten.ge" if len(given) == 2 and given[0] is not None and given[1] is not None:
                return TRUE if _never_above(given[1].most, given[0].least) else None
            case op if op in _AND and len(given) == 2:
                return TRUE if given == [TRUE, TRUE] else None
            case _:
                return None


def _plus(a: Linear, b: Linear) -> Linear:
    return a[0] + b[0], a[1] + b[1]


def _never_above(a: Linear, b: Linear) -> bool:
    """Whether one is at most the other, whatever the length is."""
    return a[0] <= b[0] and a[1] <= b[1]
