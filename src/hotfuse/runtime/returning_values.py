"""Numbers and texts among the arguments that differ from call to call: only values that return are worth a graph.

They are constants of a graph. A call with a new one is a new structure, and the first call of every structure is captured: sixteen
graphs that no second call can use, after which nothing else is captured either. So once some structures differ in nothing else, and
no call has been in their graphs, a further value is captured when it is met a second time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import replace

from hotfuse.base.structure import Spec
from hotfuse.runtime.site import Site

MAX_UNUSED = 4
"""Structures that differ in values alone and in whose graphs no call has been, from which on values have to return."""
MAX_MET = 256
"""Structures met once that are remembered; the oldest are forgotten first."""
SAID = "numbers or texts among the arguments differ from call to call, and only values that return are captured"


class ReturningValues:
    """What one engine has met of them; its callers hold the lock of its plans."""

    def __init__(self) -> None:
        self._met: OrderedDict[Spec, None] = OrderedDict()
        self.passed = 0
        """Calls that were not captured because their values had not been met before."""

    def worth_a_graph(self, spec: Spec, sites: Iterable[Site]) -> bool:
        """Whether the first call of a structure is to be captured."""
        form = without_values(spec)
        if form == spec:
            return True
        unused = [s for s in sites if not any(e.calls for e in s.entries) and without_values(s.spec) == form]
        if len(unused) < MAX_UNUSED or spec in self._met:
            self._met.pop(spec, None)
            return True
        self._met[spec] = None
        if len(self._met) > MAX_MET:
            self._met.popitem(last=False)
        self.passed += 1
        return False


def without_values(spec: Spec) -> Spec:
    """The structure with every number and text left open; truth values choose what a call does, and stay."""
    if spec.kind == "float" or (spec.kind == "constant" and spec.cls in (int, str, bytes)):
        return replace(spec, detail=None)
    if not spec.children:
        return spec
    return replace(spec, children=tuple(map(without_values, spec.children)))
