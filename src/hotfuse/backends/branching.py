"""A control node whose branches, or whose repeated body, run in plans of their own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from hotfuse.backends.library import control_meaning
from hotfuse.backends.protocol import Artifact, Run
from hotfuse.backends.pycode import flat_function
from hotfuse.ir.control_bodies import branches
from hotfuse.ir.graph import Graph

NAME = "branches"


def branching(piece: Graph, made: Sequence[tuple[Run, Sequence[Artifact]]], weights: Mapping[str, Any]) -> Artifact:
    """A graph of one control node with its compiled bodies, each given with the artifacts it is made of."""
    (node,) = piece.nodes
    bodies: list[Run] = []
    for b, (run, _) in zip(branches(piece, node), made, strict=True):
        bodies.append(_taking(len(b.graph.inputs) - len(b.takes), b.takes, run))
    meaning = control_meaning(node, bodies)
    run, _ = flat_function(piece, lambda _node: (meaning, True), weights)
    about = [f"{g.name}: {_counted(artifacts)}" for g, (_, artifacts) in zip(node.graphs, made, strict=True)]
    return Artifact(piece, run, NAME, "; ".join(about))


def _taking(own: int, takes: tuple[int, ...], run: Run) -> Run:
    """A body of its own arguments and all captures, which hands on the captures that it takes."""
    return lambda *args: run(*args[:own], *[args[own + i] for i in takes])


def _counted(artifacts: Sequence[Artifact]) -> str:
    return ", ".join(f"{n} {name}" for name, n in Counter(a.backend for a in artifacts).items())
