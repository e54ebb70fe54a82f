"""One list of passes from capture to link: types fit, faults name their pass, and the engine and workers run no other."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import hotfuse
from hotfuse import pipeline
from hotfuse.backends import registry
from hotfuse.base import passes
from hotfuse.base.errors import InternalError
from hotfuse.base.passes import Pass, flattened, run, run_all, verifying
from hotfuse.base.settings import Settings
from hotfuse.cli import app
from hotfuse.compile.freeze import WeightedGraph
from hotfuse.compile.unit.grouping import GROUPING, GroupedGraph, GroupingJob
from hotfuse.ir.graph import Graph
from hotfuse.ir.text import parse, show
from hotfuse.ir.verify import verify
from hotfuse.lower.cpu.tiling import Core

GRAPH = """graph main(%x: f32[4, 8]) {
  param %w: f32[8, 8] = "w"
  param %h: f32[] = "h"
  %t: f32[8, 8] = aten.t.default(%w)
  %y: f32[4, 8] = aten.mm.default(%x, %t)
  %z: f32[4, 8] = aten.mul.Tensor(%y, %h)
  return %z
}
"""

EVERY = [p for steps in pipeline.BRANCHES.values() for _, p in flattened(steps)]


def test_every_pass_takes_what_the_one_before_gives() -> None:
    bound = pipeline.PASSES[:3]
    for steps in (pipeline.PASSES, *((*bound, *more) for more in (pipeline.TIER0, pipeline.RECORDED, pipeline.GENERATED))):
        for before, step in itertools.pairwise(steps):
            assert before.gives is step.takes, f"{before.name} -> {step.name}"
    given = {p.gives for p in EVERY} | {p.takes for p in pipeline.PASSES}
    begin = {"GroupUse", "DeviceGroup", "Graph", "LevelParts"}  # parts of what the pass around them has
    missing = [p.name for p in EVERY if p.takes not in given and p.takes.__name__ not in begin]
    assert missing == []


def test_names_are_unique() -> None:
    by_name = {p.name: p for p in EVERY}
    assert [p.name for p in EVERY if by_name[p.name] is not p] == []


def test_a_pass_is_held_to_its_types_and_its_result_verified() -> None:
    good = parse(GRAPH)
    broken = replace(good, nodes=good.nodes[1:])  # %t is read and not made
    step: Pass[Graph, Graph, None] = Pass("breaks", Graph, Graph, lambda *_: broken, lambda made, _: verify(made))
    with verifying(on=False):
        assert run(step, good, None) is broken, "in production, results of our own passes are believed"
        with pytest.raises(InternalError, match="pass breaks is not well-formed"):
            run(replace(step, always=True), good, None)
    with verifying(), pytest.raises(InternalError, match="pass breaks is not well-formed"):
        run(step, good, None)
    with pytest.raises(InternalError, match="pass breaks takes Graph"):
        run(step, "a text", None)  # type: ignore[arg-type]
    with pytest.raises(InternalError, match="pass breaks gives Graph"):
        run(replace(step, run=lambda *_: None), good, None)  # type: ignore[arg-type]


def test_branches_are_grouped_by_themselves_whatever_their_sizes_are_made_of() -> None:
    """A branch's input may show a size behind two strides alone; who runs the branch knows what it is made of."""
    branch = parse("""graph then(%x: f32[1, 16, (((u0 + -1) // 4) + 1)]) {
  %y: f32[1, 16, (((u0 + -1) // 4) + 1)] = aten.exp.default(%x)
  %z: f32[1, 16, (((u0 + -1) // 4) + 1)] = aten.relu.default(%y)
  return %z
}
""")
    with pytest.raises(InternalError, match="breaks invariant 11"):
        verify(branch)
    job = GroupingJob({"u0": 9}, Core(8, 16), lambda _piece: "", outer_symbols=frozenset({"u0"}))
    with verifying():
        made: GroupedGraph = run_all(GROUPING, branch, job)
    assert [len(g.nodes) for g in made.groups] == [2]


def test_tests_verify_behind_every_pass() -> None:
    assert passes._everywhere  # pyright: ignore[reportPrivateUsage]


def test_prepare_folds_constants_and_writes_numbers() -> None:
    weights = {"w": torch.randn(8, 8), "h": torch.tensor(0.5)}
    made: WeightedGraph = run_all(pipeline.PREPARE, WeightedGraph(parse(GRAPH), weights), Settings())
    assert [n.op for n in made.graph.nodes] == ["aten.mm.default", "aten.mul.Tensor"]
    assert made.graph.nodes[1].args[1] == 0.5


def test_a_served_model_goes_through_every_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that is not in the list is found here: every pass runs, in its place."""
    seen: list[str] = []
    plain = passes.run

    def noted(step: Pass[Any, Any, Any], value: Any, job: Any) -> Any:
        if not seen or seen[-1] != step.name:
            seen.append(step.name)
        return plain(step, value, job)

    from hotfuse import api
    from hotfuse.compile import capture_passes
    from hotfuse.compile.unit import kernel_cache
    from hotfuse.pipeline import host_passes, plan_passes

    for module in (passes, pipeline, host_passes, plan_passes, capture_passes, kernel_cache, api):
        monkeypatch.setattr(module, "run", noted)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 16)).eval()
    x = torch.randn(8, 16)
    with torch.no_grad():
        fast = hotfuse.jit(model, settings=Settings(capture="inline", backend="interp", hot_calls=1))  # kernels need not be faster
        for _ in range(12):
            torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
    names = [p.name for _, p in flattened(pipeline.PASSES)]
    assert set(seen) >= set(names) - {"drivers", "bridges"}, set(names) - set(seen)
    first = [seen.index(p.name) for p in pipeline.PASSES]
    assert first == sorted(first), seen


def test_a_group_is_lowered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Grouping asks whether a group has a kernel, compiling makes code of it, and readers look at it: of one lowering."""
    backend = type(registry.backend("interp"))
    lowered: list[str] = []
    plain = backend.lower

    def noted(self: Any, graph: Graph, core: Any) -> Any:
        lowered.append(show(graph))
        return plain(self, graph, core)

    monkeypatch.setattr(backend, "lower", noted)
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, activation="gelu", batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    with torch.no_grad():
        fast = hotfuse.jit(model, settings=Settings(capture="inline", backend="interp", hot_calls=1))
        for _ in range(6):
            fast(torch.randn(2, 5, 16))
    assert lowered and sorted(lowered) == sorted(set(lowered))


def test_the_command_line_lists_them() -> None:
    done = CliRunner().invoke(app, ["show", "none.onnx", "--stage", "passes", "--json"])
    assert done.exit_code == 0, done.output
    assert [p["pass"] for p in json.loads(done.output)["passes"]] == [p.name for p in EVERY]


def test_sizes_of_a_group_may_be_told_by_its_caller() -> None:
    """A group behind a window knows its input's size as an expression of the call's, and reads the call's beside it."""
    piece = parse("""graph group(%x: f32[s0, (((s1 + -192) // 256) + 1)]) {
      %y: f32[s0, (((s1 + -192) // 256) + 1)] = aten.relu.default(%x)
      return %y
    }""")
    with pytest.raises(InternalError, match="nothing tells s1"):
        verify(piece)
    assert verify(piece, {"s0": 1, "s1": 576}) is piece
