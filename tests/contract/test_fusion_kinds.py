"""Every kind of candidate is proposed for modules as people write them, with what it would cost and why it is taken or left."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.export.graph_signature import InputKind

from hotfuse.analysis.resources import CorePeaks
from hotfuse.compile.unit.kernel_cache import kernel_cache
from hotfuse.compile.unit.layouts import laid_out
from hotfuse.frontends.fx import PlaceholderRole, to_graph
from hotfuse.fusion.decision_lines import line
from hotfuse.fusion.forecast import RooflinePredictor
from hotfuse.fusion.fusion_engine import FusionChoice, FusionPlanner, apart
from hotfuse.fusion.groups import group
from hotfuse.fusion.kinds import CandidateKind
from hotfuse.fusion.layout import channels_last
from hotfuse.fusion.recomputed_operands import with_own_operands
from hotfuse.ir.graph import Graph
from hotfuse.simplify import simplify


class Block(nn.Module):
    """A transformer's layer with wide rows between its products, and a gate that several read."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)
        self.up, self.down, self.norm = nn.Linear(64, 512), nn.Linear(512, 64), nn.LayerNorm(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        y = self.norm(x + torch.tanh(q) * k + v)
        gate = torch.sigmoid(y * 2)
        mixed = torch.softmax(gate * q, -1) + torch.softmax(gate * k, -1)
        return self.down(nn.functional.gelu(self.up(mixed)))


class Images(nn.Module):
    """Convolutions whose neighbours are row-major."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(16, 32, 3, padding=1), nn.Conv2d(32, 32, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.flatten(self.two(torch.relu(self.one(x))), 1)


def captured(module: nn.Module, x: torch.Tensor) -> Graph:
    with torch.no_grad():
        program = torch.export.export(module.eval(), (x,), strict=False)
    specs = program.graph_signature.input_specs
    roles = [PlaceholderRole("input" if s.kind is InputKind.USER_INPUT else "param", s.target or "") for s in specs]
    return simplify(to_graph(program.graph_module, roles).graph)[0]


def engine() -> FusionPlanner:
    return FusionPlanner(RooflinePredictor(CorePeaks()), replace(kernel_cache().core, l2=CorePeaks().l2))


@pytest.fixture(scope="module")
def proposed() -> dict[CandidateKind, list[FusionChoice]]:
    """What is said about a layer at 2,048 rows, begun with single nodes and with the groups of the rule."""
    graph = with_own_operands(channels_last(captured(Block(), torch.randn(2048, 64))))
    found: dict[CandidateKind, list[FusionChoice]] = {}
    for groups in (apart(graph, group(graph)), group(graph)):
        for choice in engine().plan(graph, groups, {}).choices:
            found.setdefault(choice.kind, []).append(choice)
    return found


@pytest.mark.parametrize("kind", [k for k in CandidateKind if k is not CandidateKind.LAYOUT])
def test_a_layer_is_offered_every_kind_of_change(proposed: dict[CandidateKind, list[FusionChoice]], kind: CandidateKind) -> None:
    choices = proposed.get(kind, [])
    assert choices, sorted(k.value for k in proposed)
    assert all(c.reasons and line(c) for c in choices)
    viable = [c for c in choices if c.before.known and c.after.known]
    assert viable and all(c.accepted or c.because for c in choices)


def test_convolutions_are_offered_another_layout() -> None:
    graph = captured(Images(), torch.randn(1, 16, 28, 28))
    _, choices = laid_out(graph, {}, engine(), None, other=False)
    assert [c.kind for c in choices] == [CandidateKind.LAYOUT] and choices[0].before.known and "conversions" in line(choices[0])
