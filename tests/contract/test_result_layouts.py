"""How results of rewritten nodes lie: operators on zeros say what meta kernels say, and import nothing for it."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from hotfuse.analysis import inferred_types
from hotfuse.analysis.inferred_types import relaid
from hotfuse.ir.graph import Graph
from hotfuse.ir.text import parse, show

LAYER = """graph g(%x: f32[s0, 6, 8], %ids: i64[s0, 6], %t: f32[9, 8], %w: f32[16, 8], %b: f32[16], %d: i64[s0, 6]) {
  %e: f32[s0, 6, 8] = aten.embedding.default(%t, %ids)
  %a: f32[s0, 6, 8] = aten.add.Tensor(%x, %e)
  %n: f32[s0, 6, 8] = aten.layer_norm.default(%a, [8])
  %l: f32[s0, 6, 16] = aten.linear.default(%n, %w, %b)
  %p: f32[s0, 16, 6] = aten.transpose.int(%l, 1, 2)
  %g: f32[s0, 16, 6] = aten.gelu.default(%p)
  %q: i64[s0, 6] = aten.floor_divide.default(%ids, %d)
  %r: f32[s0, 16, 6] = aten.rand_like.default(%g)
  return %g, %q, %r
}"""


def found(graph: Graph) -> str:
    return show(relaid(graph, {v.name for n in graph.nodes for v in n.outs}, {"s0": 3}))


def test_zeros_and_meta_kernels_say_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = parse(LAYER)
    state = torch.get_rng_state()
    by_zeros = found(graph)
    assert torch.equal(torch.get_rng_state(), state)  # nothing was drawn
    assert "{0,2,1}" in by_zeros  # a transposed result and what keeps its order
    kernels = inferred_types._Kernels  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(kernels, "_on_zeros", lambda *_: None)
    assert found(graph) == by_zeros


def test_a_serving_process_imports_no_dynamo_for_it() -> None:
    lines = LAYER.splitlines()
    text = "\n".join([*lines[:7], "  return %g", "}"])
    code = (
        "import sys; from hotfuse.ir.text import parse; from hotfuse.analysis.inferred_types import relaid\n"
        f"g = parse({text!r}); relaid(g, {{v.name for n in g.nodes for v in n.outs}}, {{'s0': 3}})\n"
        "print('torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]
