"""A convolution between row-major tensors: a copy with channels innermost is priced, measured, taken where it paid, and right."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F

from hotfuse.base.settings import Settings
from hotfuse.compile.host import host_core
from hotfuse.compile.unit.kernel_cache import host_peaks
from hotfuse.compile.unit.layouts import laid_out
from hotfuse.fusion.forecast import RooflinePredictor
from hotfuse.fusion.fusion_engine import FusionChoice, FusionPlanner, Side
from hotfuse.fusion.kinds import CandidateKind
from hotfuse.fusion.layout import CONVERTS, entered
from hotfuse.ir.graph import Graph, Node, Token
from hotfuse.ir.text import parse
from hotfuse.ir.verify import verify
from hotfuse.native.target import host
from hotfuse.pipeline import compile_tier0

CHANNELS = 32
LAST = ("memory_format", Token("memory_format", "channels_last"))


def layer(channels: int = CHANNELS, step: int = 1, readers: int = 1) -> Graph:
    """Convolutions of one row-major image, whose results are added."""
    n = 9 if step == 1 else 5
    made = f"f32[2, 24, {n}, {n}] = aten.conv2d.default(%x, %w, %b, [{step}, {step}], [1, 1], [1, 1], 1)"
    convs = "\n".join(f"  %h{i}: {made}" for i in range(readers))
    last = f"%h{readers - 1}"
    return parse(f"""graph layer(%x: f32[2, {channels}, 9, 9]) {{
  param %w: f32[24, {channels}, 3, 3] = "w"
  param %b: f32[24] = "b"
{convs}
  %s: f32[2, 24, {n}, {n}] = aten.add.Tensor(%h0, {last})
  %y: f32[2, 24, {n}, {n}] = aten.relu.default(%s)
  return %y }}""")


def copies(graph: Graph) -> list[Node]:
    """Of row-major images into channels-last ones."""
    return [n for n in graph.nodes if n.op == CONVERTS and LAST in n.attrs]


def arranged(graph: Graph, pays: bool) -> tuple[Graph, list[FusionChoice], int]:
    """The graph where a copy pays or does not, the decisions, and how many contests were held."""
    held: list[bool] = []

    def contest(_old: Sequence[Side], new: Sequence[Side]) -> tuple[str, float]:
        held.append(any(copies(g) for g, _ in new))
        return ("", 1e-3) if pays and held[-1] else ("it is slower", -1e-3)

    core = host_core(host())
    made, choices = laid_out(graph, {}, FusionPlanner(RooflinePredictor(host_peaks(core)), core), contest)
    return verify(made), choices, len(held)


@pytest.mark.parametrize("readers", [1, 2])
def test_a_copy_that_pays_is_made_once_and_computes_the_same(readers: int) -> None:
    graph = layer(readers=readers)
    made, choices, _ = arranged(graph, pays=True)
    (copy,) = copies(made)
    convolutions = [n for n in made.nodes if n.op == "aten.conv2d.default"]
    assert len(convolutions) == readers and all(n.ins[0] == copy.outs[0] for n in convolutions)
    first, second = choices
    assert first.kind is CandidateKind.LAYOUT and first.accepted and "saves 1000.0 us, measured" in first.because
    assert second.accepted and "2 conversions" in second.because
    torch.manual_seed(3)
    weights = {"w": torch.randn(24, CHANNELS, 3, 3), "b": torch.randn(24)}
    plan = compile_tier0(made, weights, Settings(capture="inline"))
    for x in (torch.randn(2, CHANNELS, 9, 9), torch.randn(9, 9, CHANNELS, 2).permute(3, 2, 0, 1).contiguous()):
        (got,) = plan.run(x)
        want = F.relu(2 * F.conv2d(x.double(), weights["w"].double(), weights["b"].double(), padding=1))
        assert got.is_contiguous() and (got - want).abs().max() < 1e-4 * want.abs().max()


def test_a_copy_that_does_not_pay_is_refused_with_what_was_measured() -> None:
    made, choices, held = arranged(layer(), pays=False)
    assert not copies(made) and held == 2
    assert not choices[0].accepted and "it is slower" in choices[0].because


def test_nobody_measures_a_copy_for_few_channels_or_windows_that_do_not_overlap() -> None:
    for graph in (layer(channels=3), layer(step=2)):
        made, choices, held = arranged(graph, pays=True)
        assert not copies(made) and len(choices) == 1 and held == 1


def test_without_measuring_no_copy_is_made() -> None:
    core = host_core(host())
    graph = layer()
    made, choices = laid_out(graph, {}, FusionPlanner(RooflinePredictor(host_peaks(core)), core), None)
    assert entered(graph, frozenset({0}), core.lanes) == {0}
    assert not copies(made) and len(choices) == 1
