"""The structural hash sees structure, all of it, and nothing else."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotfuse.ir.graph import Graph
from hotfuse.ir.hash import canonical, structural_hash
from hotfuse.ir.text import parse, show
from tests.fuzz.graphs import disguised, graphs


@settings(deadline=None, max_examples=150)
@given(graphs(), st.integers(0, 2**32))
def test_names_and_order_do_not_matter(graph: Graph, seed: int) -> None:
    other = disguised(graph, random.Random(seed))
    assert show(canonical(other).graph) == show(canonical(graph).graph)
    assert structural_hash(other) == structural_hash(graph)


@settings(deadline=None)
@given(graphs())
def test_the_representative_is_its_own(graph: Graph) -> None:
    c = canonical(graph)
    assert canonical(c.graph).graph == c.graph
    assert sorted(c.nodes) == list(range(len(graph.nodes)))
    assert sorted(c.keys) == sorted(p.key for p in graph.params)


BASE = """graph main(%x: f32[s0, 64], %y: f32[s0, 64]) where (2 <= s0) {
  param %w: f32[64, 64] = "a"
  param %v: f32[64, 64] = "b"
  %h: f32[s0, 64] = aten.linear.default(%x, %w, None)
  %k: f32[s0, 64] = aten.linear.default(%y, %v, None)
  %d: f32[s0, 64] = aten.sub.Tensor(%h, %k, alpha=1)
  %i: f32[s0, 64] = control.if(True, [%d]) {
    graph then(%a: f32[s0, 64]) {
      return %a
    }
    graph else(%a: f32[s0, 64]) {
      %n: f32[s0, 64] = aten.neg.default(%a)
      return %n
    }
  }
  return %i, %h
}
"""
CHANGES = [
    ("aten.neg.default", "aten.relu.default"),  # another op, in a nested graph
    ("alpha=1", "alpha=1.0"),
    ("alpha=1", "alpha=True"),
    ("alpha=1", "beta=1"),
    ("aten.sub.Tensor(%h, %k", "aten.sub.Tensor(%k, %h"),  # argument order
    ("aten.linear.default(%y, %v", "aten.linear.default(%y, %w"),  # wiring
    ("param %w: f32[64, 64]", "param %w: f32[64, 64]{1,0}"),
    ("param %w: f32[64, 64]", "param %w: f32[64, 64]@cuda:0"),
    ("return %i, %h", "return %h, %i"),
    ("return %i, %h", "return %i, %k"),
    ("return %i, %h", "return %i"),
    ("(2 <= s0)", "(3 <= s0)"),
    ("control.if(True", "control.if(False"),
    ("      return %n", "      return %a"),
    ("%y: f32[s0, 64])", "%y: f32[s1, 64])"),
    ("graph main(%x: f32[s0, 64], %y: f32[s0, 64])", "graph main(%y: f32[s0, 64], %x: f32[s0, 64])"),
    ("= aten.linear.default(%x", "= transfer aten.linear.default(%x"),
]


@pytest.mark.parametrize(("old", "new"), CHANGES)
def test_every_difference_shows(old: str, new: str) -> None:
    assert BASE.count(old) == 1
    assert structural_hash(parse(BASE.replace(old, new))) != structural_hash(parse(BASE))


def test_symbols_shared_with_a_nested_graph_are_told_apart() -> None:
    text = """graph main(%x: f32[a, b]) {{
  %y: object = control.if(True, [%x]) {{
    graph t(%x: object) {{
      %z: f32[{0}] = aten.f.g(%x)
      return %z
    }}
    graph e(%x: object) {{
      return %x
    }}
  }}
  return %y
}}"""
    assert structural_hash(parse(text.format("a"))) != structural_hash(parse(text.format("b")))


def test_interchangeable_branches_in_any_order() -> None:
    head = "graph g(%x: f32[4]) {\n"
    lines = ["  %a1: f32[4] = aten.relu.default(%x)", "  %b1: f32[4] = aten.relu.default(%x)",
             "  %a2: f32[4] = aten.neg.default(%a1)", "  %b2: f32[4] = aten.neg.default(%b1)"]
    tail = "\n  %s: f32[4] = aten.add.Tensor(%a2, %b2)\n  return %s\n}"
    orders = [(0, 1, 2, 3), (0, 1, 3, 2), (1, 0, 2, 3), (0, 2, 1, 3), (1, 3, 0, 2)]
    assert len({structural_hash(parse(head + "\n".join(lines[i] for i in o) + tail)) for o in orders}) == 1


def test_another_process_agrees() -> None:
    code = (
        "import sys; from hotfuse.ir.hash import structural_hash; from hotfuse.ir.text import parse; "
        "print(structural_hash(parse(sys.stdin.read())))"
    )
    env = {**os.environ, "PYTHONHASHSEED": "4242"}
    done = subprocess.run([sys.executable, "-c", code], input=BASE, capture_output=True, text=True, env=env, check=True)
    assert done.stdout.strip() == structural_hash(parse(BASE))


def test_pinned() -> None:
    """Caches outlive a release: a change of this value throws every stored entry away, so it must be meant."""
    assert structural_hash(parse(BASE)) == PINNED


def test_loc_and_graph_name_do_not_matter() -> None:
    graph = parse(BASE)
    assert structural_hash(replace(graph, name="other")) == structural_hash(graph)


PINNED = "b5743e88feb2d81ea891e0892d6582c567112a77d834793f1191ecb6533cde1d"
