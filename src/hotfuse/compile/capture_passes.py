"""The first passes: a model as the user has it becomes a graph without needless nodes. Workers run them; so do Dynamo's graphs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.base.passes import Pass, Where, run
from hotfuse.frontends.captured import Captured


@dataclass(frozen=True, slots=True)
class BoundFrontEnd:
    """A front end with a model and a call: all that is left is to run it."""

    run: Callable[[], Captured]


def _simplified(done: Captured, _job: None) -> Captured:
    """Without nodes that change nothing, and without what is of use to those alone."""
    from hotfuse.simplify import simplify_captured  # by processes that capture alone

    graph, notes = simplify_captured(done.graph)
    used = {p.key for p in graph.params}
    return replace(
        done, graph=graph, shared={k: n for k, n in done.shared.items() if k in used},
        constants={k: c for k, c in done.constants.items() if k in used}, notes=(*done.notes, *notes),
    )  # fmt: skip


def _well_formed(done: Captured, _job: object) -> object:
    from hotfuse.ir.verify import verify

    return verify(done.graph)


CAPTURE = Pass("capture", BoundFrontEnd, Captured, lambda front, _: front.run(), _well_formed, Where.WORKER, always=True)
SIMPLIFY = Pass("simplify", Captured, Captured, _simplified, _well_formed, Where.WORKER, always=True)


def captured(front: Callable[[], Captured]) -> Captured:
    """What a front end gives, as every tier begins with it."""
    return run(SIMPLIFY, run(CAPTURE, BoundFrontEnd(front), None), None)
