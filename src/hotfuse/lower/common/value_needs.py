"""What computing some values needs, without writing a kernel: loads, reductions, and which counters must stay apart.

The loops are planned from this. Pieces (`cat`, `pad`) are followed in all their parts, since the loops will see each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import field

from hotfuse.analysis.vector_loops import HEAVY
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.graph import Node, Value
from hotfuse.lower.common.errors import CannotLower, NotInOneNest
from hotfuse.lower.common.positions import Position, Space, counters_in, counters_of
from hotfuse.lower.common.steps import Apply, Definitions, Fold, Key, Load, choose
from hotfuse.lower.ops.views import Alias, MaskedElement, Pick, Picked, Pieces
from hotfuse.ops.table import packet

POSITIONAL = {"aten.arange", "aten.tril", "aten.triu", "aten.eye"}
"""Ops that use where an element is, not only what it is."""


@dataclass(slots=True)
class ValueTrace:
    """What was met on the way, operands before what uses them."""

    computed: dict[Key, Value] = field(default_factory=dict[Key, Value])
    """Pointwise results."""
    loads: dict[Key, Value] = field(default_factory=dict[Key, Value])
    folds: dict[Key, Node] = field(default_factory=dict[Key, Node])
    scans: dict[Key, Node] = field(default_factory=dict[Key, Node])
    """Running sums: they are computed in the same loop as what uses them, so their operands are followed too."""
    picks: dict[Pick, None] = field(default_factory=dict[Pick, None])
    apart: set[int] = field(default_factory=set[int])
    """Counters whose own value matters."""
    heavy: list[Position] = field(default_factory=list[Position])
    """Where functions are computed that cost much more than reading their result from a cache would."""
    stopped: dict[Key, Value] = field(default_factory=dict[Key, Value])
    """Where `stop` said not to look further."""


def scanned_dim(node: Node) -> int:
    """The dim that a running sum goes along."""
    dim = node.attr("dim")
    if not isinstance(dim, int):
        raise CannotLower(f"a running sum along {dim}")
    return dim


def _never(_: Key) -> bool:
    return False


def trace(
    definitions: Definitions,
    space: Space,
    wanted: Iterable[tuple[Value, Position]],
    *,
    stop: Callable[[Key], bool] = _never,
    running: Mapping[int, int] | None = None,
    undecided: bool = True,
) -> ValueTrace:
    """Follow values back; of pieces that the `running` segments do not decide between, all, or none."""
    found = ValueTrace()
    seen: set[Key] = set()

    def visit(value: Value, position: Position) -> None:
        key = (value.name, position)
        if key in seen:
            return
        seen.add(key)
        if stop(key):
            found.stopped[key] = value
            return
        for c in position:
            found.apart |= counters_in(c.offset)
        step = definitions.step(value, position, space)
        match step:
            case Load(source, where):
                found.loads[source.name, where] = source
            case Alias(other, where):
                visit(other, where)
            case Pieces():
                try:
                    one = choose(step, space, running or {})
                except CannotLower as e:  # in loops of its own shape, pieces lie one behind the other
                    raise NotInOneNest(value, e.because) from e
                chosen = [one] if one is not None else [p.content for p in step.parts] if undecided else []
                for content in chosen:
                    if isinstance(content, Alias):
                        visit(content.value, content.position)
            case MaskedElement(along, _, content, _):
                visit(content.value, content.position)
                found.apart |= counters_of((along,))
            case Picked(source, where, picks):
                for p in picks:
                    visit(p.index.value, p.index.position)
                    found.picks[p] = None
                found.loads[source.name, where] = source
            case Fold(node) if node.op.startswith("lower.scan."):
                visit(node.ins[0], position)
                found.scans[key] = node
                found.apart |= counters_of((position[scanned_dim(node)],))
            case Fold(node):
                found.folds[key] = node
            case Apply(node, operands):
                for o in operands:
                    visit(o.value, o.position)
                name = packet(node.op)
                found.computed[key] = value
                if name in HEAVY:
                    found.heavy.append(position)
                if name in POSITIONAL:
                    found.apart |= counters_of(position)

    for value, position in wanted:
        visit(value, position)
    return found
