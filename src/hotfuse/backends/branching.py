"""A control node whose branches run in plans of their own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from hotfuse.backends.protocol import Artifact, Run
from hotfuse.backends.pycode import flat_function
from hotfuse.ir.branches import branches
from hotfuse.ir.graph import Graph
from hotfuse.ops import control

NAME = "branches"


def branching(piece: Graph, made: Sequence[tuple[Run, Sequence[Artifact]]], weights: Mapping[str, Any]) -> Artifact:
    """A graph of one `if` with its compiled branches, each given with the artifacts it is made of."""
    (node,) = piece.nodes
    then, other = (_taking(b.takes, run) for b, (run, _) in zip(branches(piece, node), made, strict=True))

    def choose(cond: Any, captures: Sequence[Any]) -> tuple[Any, ...]:
        return control.run_if(cond, then, other, captures)

    run, _ = flat_function(piece, lambda _node: (choose, True), weights)
    about = [f"{g.name}: {_counted(artifacts)}" for g, (_, artifacts) in zip(node.graphs, made, strict=True)]
    return Artifact(piece, run, NAME, "; ".join(about))


def _taking(takes: tuple[int, ...], run: Run) -> Run:
    """A body of all captures that hands on those it takes."""
    return lambda *captures: run(*[captures[i] for i in takes])


def _counted(artifacts: Sequence[Artifact]) -> str:
    return ", ".join(f"{n} {name}" for name, n in Counter(a.backend for a in artifacts).items())
