"""Where an element of a value comes from, one step back: memory, a view's source, an op's operands, one of several pieces.

The evaluator (`lower.common.tile_values`) writes instructions along these steps; planning (`lower.common.value_needs`,
`lower.common.loop_positions`) only follows them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.dims import Dim
from hotfuse.ir.graph import Graph, Node, Value, sources
from hotfuse.ir.types import TensorType
from hotfuse.lower.common.algebra import add, at_most, not_negative, same, sub
from hotfuse.lower.common.effort import effort
from hotfuse.lower.common.errors import CannotLower, NotInOneNest
from hotfuse.lower.common.positions import Coord, Position, Space, SplitLoop, counters_in
from hotfuse.lower.ops import expand
from hotfuse.lower.ops.views import Alias, MaskedElement, Picked, Pieces, broadcast, is_move, move, shape_of

Key = tuple[str, Position]


@dataclass(frozen=True, slots=True)
class Load:
    """The element lies in memory."""

    value: Value
    position: Position


@dataclass(frozen=True, slots=True)
class Apply:
    """The element is a function of operands' elements."""

    node: Node
    operands: tuple[Alias, ...]


@dataclass(frozen=True, slots=True)
class Fold:
    """The element is a reduction's."""

    node: Node
    position: Position


Step = Load | Apply | Fold | Alias | Pieces | MaskedElement | Picked


class Definitions:
    """Where the values of a group come from: its sources, what has been stored, what is being stored, and its nodes."""

    def __init__(self, graph: Graph, stored: Iterable[str] = (), storing: Iterable[str] = ()) -> None:
        self.graph = graph
        self.sources = {v.name for v in sources(graph)} | set(stored)
        self.storing = frozenset(storing)
        self.nodes = {v.name: (n, i) for n in graph.nodes for i, v in enumerate(n.outs)}
        self._effort = effort()
        self._space: Space | None = None
        self._known: dict[Key, Step] = {}
        """Steps in that space: planning follows the same elements for several questions."""

    def step(self, value: Value, position: Position, space: Space) -> Step:
        """One step back from a value's element; raises CannotLower where the lowering has taken too many."""
        self._effort.spend()
        if value.name in self.sources:
            return Load(value, position)
        if space is not self._space:
            self._space, self._known = space, {}
        key = (value.name, position)
        if key not in self._known:
            self._known[key] = self._followed(value, position, space)
        return self._known[key]

    def _followed(self, value: Value, position: Position, space: Space) -> Step:
        node, out = self.nodes[value.name]
        if is_move(node.op):
            moved = move(node, out, position, space)
            if isinstance(moved, Picked) and moved.value.name not in self.sources:
                raise NotInOneNest(moved.value, f"{node.op} picks from what the same loops compute", where=str(node.loc))
            return moved
        if node.op == "lower.stored":
            if value.name in self.storing:
                return Alias(node.ins[0], position)
            raise NotInOneNest(value, f"%{node.ins[0].name} is read at many places", where=str(node.loc))
        if node.op.startswith(("lower.reduce.", "lower.scan.")):
            return Fold(node, position)
        if not expand.known(node.op):
            raise CannotLower(f"there is no expansion of {node.op}", where=str(node.loc))
        shape = shape_of(value)
        operands = [v for v in node.ins if isinstance(v.type, TensorType) and expand.reads(node, v)]
        return Apply(node, tuple(Alias(v, broadcast(position, shape, shape_of(v))) for v in operands))


def choose(pieces: Pieces, space: Space, running: Mapping[int, int]) -> Alias | float | None:
    """The piece at hand while each counter's loop is in the segment `running` says; None if the segments do not matter yet.

    Raises `SplitLoop` where a loop has to stop between two pieces.
    """
    content = pieces.parts[0].content
    sides = [_reached(pieces.along, part.start, space, running) for part in pieces.parts[1:]]
    for part, side in zip(pieces.parts[1:], sides, strict=True):
        if side is None:
            return None
        if not side:
            break
        content = part.content
    return content


def _reached(along: Coord, start: Dim, space: Space, running: Mapping[int, int]) -> bool | None:
    limits = space.bounds(along)
    if limits is not None:
        if at_most(start, limits[0], space.positive):
            return True
        if at_most(add(limits[1], 1), start, space.positive):
            return False
    if len(along.terms) != 1 or counters_in(along.offset):
        raise CannotLower("a piece begins in the middle of a loop that runs along several dims")
    (counter, factor), = along.terms
    at = _first(factor, sub(start, along.offset))
    for i, cut in enumerate(space.cuts[counter]):
        if same(cut, at):
            return None if counter not in running else (running[counter] > i) == (factor == 1 or not_negative(factor))
    raise SplitLoop(counter, at)


def _first(factor: Dim, distance: Dim) -> Dim:
    """Going up, the first counter with counter * factor >= distance; going down, the first one without."""
    if factor == 1:
        return distance
    if factor == -1:
        return sub(1, distance)
    if not isinstance(factor, int) or not isinstance(distance, int):  # the order of such cuts would not be known
        raise CannotLower(f"a piece begins at {distance}, which steps of {factor} may pass by")
    return -(-distance // factor) if factor > 0 else -distance // -factor + 1
