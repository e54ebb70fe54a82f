"""What the cache knows of a model is made ready while the model's own code answers its first call.

    first call   own code ..............answer
    beside it    name, graph, code, packed weights | one run, compared with that answer, serves | tier 0 is made and compared

A plan that won in an earlier process and gives the model's own answer serves before tier 0 has been made and compared, which takes
as long as reading all of that plan, and a call's time once more. Until it has, the model's own code stands in for tier 0. A plan
that was proven there and no more takes turns with the model's own code at once; one that was not even proven is proven and raced
when tier 0 serves. What changed during the call (a cache that a first call makes) shows in the watch over the model, and everything
is made again as for a model that nobody knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.base.structure import Spec
from hotfuse.frontends.captured import CallSpec
from hotfuse.runtime.plan import Plan
from hotfuse.runtime.plans import Capture

MadeOf = tuple[int, int, list[int]]
"""What a plan has copies of: the generation of the model's plans, of checksums of its weights, and the weights' versions."""


@runtime_checkable
class Recalls(Protocol):
    """A model that the cache may know."""

    def recall(self, spec: Spec, call: CallSpec) -> Capture | None:
        """A graph for calls like these that an earlier process captured, bound; None where there is none. Raises CaptureError."""
        ...

    def other_sizes(self, spec: Spec, call: CallSpec) -> Sequence[CallSpec]:
        """Calls of earlier processes that differ from this one in nothing but sizes."""
        ...

    def fix_sizes(self, spec: Spec) -> None:
        """A graph that leaves open in what such calls differ cannot be had: later processes need not try."""
        ...

    def disbelieve(self) -> None:
        """A graph of an earlier process gave another answer than the model: what is kept of it is made anew."""
        ...


@dataclass(frozen=True, slots=True)
class RecalledStart:
    """What was made ready."""

    calls: CallSpec
    """That the graph is for: those of an earlier process may have shown more dims that vary than the first one here does."""
    done: Capture
    baseline: Plan | None
    """Tier 0; None where that is made behind `better`, which won in an earlier process."""
    better: Plan | None
    """The plan of kernels that an earlier process made, with this process's weights."""
    generation: int
    """Of the model's plans when it was begun."""
    taken: int
    """What `Originals.take` said before weights were copied."""
    versions: list[int]
    """Of the weights, before they were copied."""

    @property
    def proven(self) -> Plan | None:
        """That plan where it was proven there: it may answer calls as soon as it gave the model's own answer here."""
        recipe = self.better.recipe if self.better is not None else None
        return self.better if recipe is not None and (recipe.proven or recipe.verdict is not None) else None

    @property
    def made_of(self) -> MadeOf:
        """What its copies of weights are of."""
        return self.generation, self.taken, self.versions

    def holds(self, call: CallSpec, generation: int) -> bool:
        """Whether it is what a call needs now, of a model that has not changed since."""
        return self.calls.takes(call) and generation == self.generation and self.done.watch.same_now()

    def is_narrower(self, call: CallSpec, own: CallSpec, generation: int) -> bool:
        """Whether it is for the sizes of a call itself, though not for all that vary by now."""
        return call.paths is None and not self.holds(call, generation) and self.holds(own, generation)
