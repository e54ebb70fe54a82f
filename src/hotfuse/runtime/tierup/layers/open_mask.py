"""Plans for calls whose mask lets everything through: the graph without it (`specialize.masks`), behind a guard on the mask itself.

The guard is asked on every call, of the very tensor that came: a mask that hides something is served by the plan there was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hotfuse.analysis.call_facts import AllEqual, Dense, Facts, inputs_of
from hotfuse.base.errors import InternalError
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.graph import Graph
from hotfuse.ir.types import DType, TensorType
from hotfuse.profile.predict import ALL
from hotfuse.runtime.plan import BetCount, Plan
from hotfuse.runtime.serve.partition_guard import guarded
from hotfuse.runtime.tierup.layers.layer import Call, Composer, Layer, composed, filtered
from hotfuse.runtime.tierup.tiers import MIN_SAMPLES
from hotfuse.specialize.masks import all_alike
from hotfuse.specialize.table import OPEN_MASK, AttemptKey, row

_MASKS = frozenset({DType.BOOL, DType.I64, DType.I32, DType.U8, DType.I8})
Predictable = Callable[[str], tuple[int, float, int] | None]
"""What is expected of the valid part of a named value: (class, accuracy, predictions)."""


@dataclass(frozen=True, slots=True)
class OpenMaskLayer(Layer):
    """An input that is all one number, in most calls."""

    name: str
    number: int | float | bool

    @property
    def key(self) -> AttemptKey:
        """The input and the number."""
        return AttemptKey(OPEN_MASK, f"all of {self.name} is {self.number}")

    def holds(self, graph: Graph, call: Call) -> bool:
        """Whether a call is of that kind."""
        return bool((call[_at(graph, self.name)] == self.number).all())

    def build(self, graph: Graph, calls: Sequence[Call], inner: tuple[Layer, ...], composer: Composer) -> Plan:
        """Behind the guard the graph without the mask, else the graph as it is."""
        less = all_alike(graph, self.name, self.number)
        if less is None:
            return composer.plan(graph, calls, inner)
        at = _at(graph, self.name)
        of = graph.inputs[at].type
        assert isinstance(of, TensorType)
        fast = composer.plan(less, filtered(calls, lambda c: self.holds(graph, c)), inner)
        other = composer.plan(graph, calls, inner)
        about = tuple(f for f in composer.facts if inputs_of(f) == (at,))
        guard = guarded(fast.run, (*about, AllEqual(at, of.dtype, self.number)), other.run, len(graph.inputs), composer.submit)

        def counters() -> dict[str, int]:
            return {"mask_hits": guard.hits, "mask_misses": sum(guard.misses.values())}

        said = f"where {self.key.about}: {len(less.nodes)} nodes instead of {len(graph.nodes)}; else as before"

        def counted() -> BetCount:
            return BetCount(guard.hits, sum(guard.misses.values()), values=(self.name,))

        return composed(graph, guard, "guarded", said, (fast, other), counters=counters, counts=(self.key, counted))


def _at(graph: Graph, name: str) -> int:
    found = next((i for i, v in enumerate(graph.inputs) if v.name == name), None)
    if found is None:
        raise InternalError(f"{graph.name!r} has no input %{name}")
    return found


@dataclass(frozen=True, slots=True)
class OpenMask:
    """A mask worth a plan without it."""

    layer: OpenMaskLayer
    accuracy: float
    """How often it was as expected."""
    samples: int


def open_mask(
    graph: Graph, facts: Facts, expected: Predictable, calls: Sequence[Call], refused: Callable[[AttemptKey], bool]
) -> OpenMask | None:
    """A mask that may be worth a plan without it; `calls` are kept ones, `refused` says what was tried before or serves.

    Asked on the call path, so it goes through no graph: a value of which something is expected here is one that others depend on as
    a mask (`runtime.observe.watch_points`), and whether the graph is smaller without it the attempt finds out.
    """
    for i, v in enumerate(graph.inputs):
        if not isinstance(v.type, TensorType) or v.type.dtype not in _MASKS:
            continue
        seen = expected(v.name)
        dense = any(isinstance(f, Dense) and f.input == i and f.order is None and f.yes for f in facts)
        if seen is None or seen[0] != ALL or seen[1] < row(OPEN_MASK).share or seen[2] < MIN_SAMPLES or not dense:
            continue
        shown = next((c[i].flatten()[0].item() for c in calls if c[i].numel() and bool((c[i] == c[i].flatten()[0]).all())), None)
        if not shown:  # no kept call is of that kind, or what it shows is a mask that hides everything
            continue
        layer = OpenMaskLayer(v.name, shown)
        if not refused(layer.key):
            return OpenMask(layer, seen[1], seen[2])
    return None
