"""What the hypergraph's functions promise: the verifier's invariants, subgraphs, rewriting, liveness, sizes, cost."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from hotfuse.analysis.cost import Cost, graph_cost, node_cost
from hotfuse.analysis.liveness import last_uses
from hotfuse.analysis.shapes import Mismatch, bind
from hotfuse.base.errors import InternalError, ModelError
from hotfuse.ir import dims
from hotfuse.ir.build import GraphBuilder
from hotfuse.ir.dims import Sym, expr, sym
from hotfuse.ir.graph import Graph, Kind, Node, Param, Value
from hotfuse.ir.rewrite import SIZE, Context, Measure, Replacement, Rule, apply
from hotfuse.ir.subgraph import extract
from hotfuse.ir.text import parse, show
from hotfuse.ir.types import DType, Layout, ScalarKind, ScalarType, SequenceType, TensorType
from hotfuse.ir.verify import invariants, verify

BASE = parse("""
graph main(%x: f32[s0, 64], %c: bool[], %seq: seq<f32[s0]>) where (2 <= s0) {
  param %w: f32[64, 64] = "w"
  %h: f32[s0, 64] = aten.linear.default(%x, %w, None, k=1)  @ "model.py":12 "fc"
  %t: f32[s0, 64]@cuda:0 = transfer.copy(%h)
  %i: f32[s0, 64] = control.if(%c, [%h]) {
    graph then(%a: f32[s0, 64]) {
      return %a
    }
    graph else(%a: f32[s0, 64]) {
      %n: f32[s0, 64] = aten.neg.default(%a)
      return %n
    }
  }
  %l: f32[s0, 64], %ls: f32[u0, 4] = control.loop(%c, None, [%h], [%w]) {
    graph body(%it: i64[], %go: bool[], %s: f32[s0, 64], %v: f32[64, 64]) {
      %e: f32[4] = aten.sum.dim_IntList(%v, [1])
      return %go, %s, %e
    }
  }
  %sc: f32[64], %so: f32[s0, 64] = control.scan([%w], [%x], [], in_axes=[0]) {
    graph body(%s: f32[64], %slice: f32[64]) {
      return %s, %slice
    }
  }
  %m: seq<f32[s0]> = control.map([%seq], [%h]) {
    graph body(%e: f32[s0], %h: f32[s0, 64]) {
      return %e
    }
  }
  %nz: i64[u1, 2] = aten.nonzero.default(%h)
  return %i, [%l, %nz], 3
}
""")


def node(graph: Graph, at: int, **changes: Any) -> Graph:
    nodes = list(graph.nodes)
    nodes[at] = replace(nodes[at], **changes)
    return replace(graph, nodes=tuple(nodes))


def nested(at: int, which: int, change: Callable[[Graph], Graph]) -> Graph:
    graphs = list(BASE.nodes[at].graphs)
    graphs[which] = change(graphs[which])
    return node(BASE, at, graphs=tuple(graphs))


def typed(v: Value, **changes: Any) -> Value:
    return Value(v.name, replace(v.type, **changes))


X, C, SEQ = BASE.inputs
W = BASE.params[0]
LINEAR, COPY, IF, LOOP, SCAN, MAP, NONZERO = BASE.nodes
H, S0 = LINEAR.outs[0], sym("s0")
LAST = len(BASE.nodes) - 1
COUNT = ScalarType(ScalarKind.INT, 0)
F32, F16 = TensorType(DType.F32, (4,)), TensorType(DType.F16, (4,))


def more_inputs(*types: Any) -> Graph:
    return replace(BASE, inputs=(*BASE.inputs, *(Value(f"q{i}", t) for i, t in enumerate(types))))


def tensor(*shape: dims.Dim) -> TensorType:
    return TensorType(DType.F32, shape)


def deep() -> Graph:
    inner = Graph("g", (), (), (), ())
    for _ in range(70):
        inner = Graph("g", (), (), (Node(Kind.CONTROL, "control.if", (True, ()), (), (), (inner, inner)),), ())
    return inner


BROKEN: list[tuple[int, str, Callable[[], Graph]]] = [
    (1, "graph name", lambda: replace(BASE, name="")),
    (1, "value name", lambda: node(BASE, LAST, outs=(Value("", F32),))),
    (1, "op name", lambda: node(BASE, 0, op="")),
    (1, "attribute name", lambda: node(BASE, 0, attrs=(("", 1),))),
    (1, "param key", lambda: replace(BASE, params=(Param(W.value, ""),))),
    (2, "node output", lambda: node(BASE, LAST, outs=(replace(NONZERO.outs[0], name="h"),))),
    (2, "two inputs", lambda: replace(BASE, inputs=(X, X, C, SEQ))),
    (2, "param and input", lambda: replace(BASE, params=(Param(X, "k"), W))),
    (3, "node", lambda: node(BASE, 0, args=(NONZERO.outs[0], W.value, None))),
    (3, "inside a tuple", lambda: node(BASE, LAST, args=((Value("ghost", F32),),))),
    (3, "in an attribute", lambda: node(BASE, LAST, attrs=(("k", Value("ghost", F32)),))),
    (3, "outputs", lambda: replace(BASE, outputs=((Value("ghost", F32),),))),
    (3, "nested graph reads from outside", lambda: nested(2, 0, lambda g: replace(g, outputs=(H,)))),
    (4, "dtype", lambda: node(BASE, LAST, args=(typed(H, dtype=DType.F64),))),
    (4, "device", lambda: node(BASE, LAST, args=(typed(H, device="cuda:1"),))),
    (4, "outputs", lambda: replace(BASE, outputs=(typed(H, shape=(1,)),))),
    (5, "two params", lambda: replace(BASE, params=(W, Param(Value("w2", W.value.type), "w")))),
    (6, "no namespace", lambda: node(BASE, 0, op="linear")),
    (6, "blank", lambda: node(BASE, 0, op="aten.linear default")),
    (6, "empty part", lambda: node(BASE, 0, op="aten..default")),
    (7, "list", lambda: node(BASE, LAST, args=([H],))),
    (7, "output", lambda: replace(BASE, outputs=(b"bytes",))),  # type: ignore[arg-type]
    (8, "twice", lambda: node(BASE, 0, attrs=(("k", 1), ("k", 2)))),
    (9, "unsorted sum", lambda: more_inputs(tensor(Sym("+", (1, S0))))),
    (9, "negative", lambda: node(BASE, LAST, outs=(Value("q", tensor(-1)),))),
    (10, "too long", lambda: more_inputs(replace(F32, layout=Layout((0, 1))))),
    (10, "in a sequence", lambda: more_inputs(SequenceType(replace(F32, layout=Layout((1,)))))),
    (11, "input", lambda: more_inputs(tensor(expr("//", sym("z"), 2)))),
    (11, "node output", lambda: node(BASE, LAST, outs=(Value("q", tensor(expr("*", sym("y"), sym("z")))),))),
    (12, "symbol of a node", lambda: replace(BASE, guards=(Sym("<=", (2, sym("u1"))),))),
    (12, "no predicate", lambda: replace(BASE, guards=(S0,))),
    (13, "kind", lambda: node(BASE, 2, kind=Kind.OPERATOR)),
    (13, "op", lambda: node(BASE, 0, kind=Kind.CONTROL)),
    (13, "unknown control", lambda: node(BASE, 2, op="control.while")),
    (13, "graphs", lambda: node(BASE, 0, graphs=IF.graphs)),
    (14, "no input", lambda: node(BASE, 1, args=())),
    (14, "two outputs", lambda: node(BASE, 1, outs=(*COPY.outs, Value("q", F32)))),
    (15, "params", lambda: nested(2, 0, lambda g: replace(g, params=(Param(Value("p", F32), "p"),)))),
    (15, "guards", lambda: nested(2, 0, lambda g: replace(g, guards=BASE.guards))),
    (15, "depth", deep),
    (16, "one graph", lambda: node(BASE, 2, graphs=IF.graphs[:1])),
    (16, "captures", lambda: node(BASE, 2, args=(C, (H, H)))),
    (16, "flat captures", lambda: node(BASE, 2, args=(C, H))),
    (16, "outputs", lambda: node(BASE, 2, outs=(*IF.outs, Value("q", F32)))),
    (17, "arguments", lambda: node(BASE, 3, args=LOOP.args[:3])),
    (17, "carried", lambda: node(BASE, 3, args=(C, None, (H, H), (W.value,)))),
    (17, "fewer outputs", lambda: node(nested(3, 0, lambda g: replace(g, outputs=g.outputs[:1])), 3, outs=())),
    (17, "body outputs", lambda: nested(3, 0, lambda g: replace(g, outputs=g.outputs[1:]))),
    (17, "trip count", lambda: node(BASE, 3, args=("many", *LOOP.args[1:]))),
    (18, "arguments", lambda: node(BASE, 4, args=SCAN.args[:2])),
    (18, "body inputs", lambda: nested(4, 0, lambda g: replace(g, inputs=g.inputs[:1], outputs=(1, 2)))),
    (18, "outputs", lambda: node(BASE, 4, outs=SCAN.outs[:1])),
    (19, "arguments", lambda: node(BASE, 5, args=MAP.args[:1])),
    (19, "outputs", lambda: node(BASE, 5, outs=(*MAP.outs, Value("q", F32)))),
    (20, "capture", lambda: nested(2, 0, lambda g: replace(g, inputs=(Value("a", F16),), outputs=(1,)))),
    (20, "result", lambda: node(BASE, 2, outs=(typed(IF.outs[0], dtype=DType.F16),))),
    (21, "iteration", lambda: nested(3, 0, lambda g: replace(g, inputs=(Value("it", COUNT), *g.inputs[1:])))),
    (21, "state", lambda: nested(4, 0, lambda g: replace(g, inputs=(Value("s", COUNT), g.inputs[1]), outputs=(1, 2)))),
]


def test_base_is_well_formed_and_the_list_complete() -> None:
    assert verify(BASE) is BASE
    assert set(invariants()) == {number for number, _, _ in BROKEN} == set(range(1, 22))


@pytest.mark.parametrize(
    ("number", "graph"), [(n, graph) for n, _, graph in BROKEN], ids=[f"{n} {what}" for n, what, _ in BROKEN]
)
def test_each_invariant_is_checked(number: int, graph: Callable[[], Graph]) -> None:
    with pytest.raises(InternalError, match=rf"breaks invariant {number}:"):
        verify(graph())


def test_verify_shows_the_place() -> None:
    with pytest.raises(InternalError) as e:
        verify(node(BASE, 2, args=(C, H)))
    text = str(e.value)
    assert "graph 'main', node 3 of 7" in text
    assert "-> %i: f32[s0, 64] = control.if(%c, %h) {" in text
    assert "%h: f32[s0, 64] = aten.linear.default" in text
    assert "= control.scan(" in text
    assert "aten.nonzero" not in text  # two before and two after
    with pytest.raises(InternalError, match=r"graph 'main', node 3, nested graph 2 'else', node 1 of 1"):
        verify(nested(2, 1, lambda g: node(g, 0, op="neg")))


# -- dims


def test_dims_text_and_normal_form() -> None:
    for text in ["(s0 + 1)", "max(s0, 3)", '"batch size"', "((s0 * 2) // (s1 % 3))", "and((2 <= s0), not((s0 == 4)))"]:
        assert dims.show(dims.parse(text)) == text
    assert dims.parse("(1 + s0 + 2)") == expr("+", sym("s0"), 3)
    assert dims.parse("((2 * 3) + 1)") == 7
    malformed = ["", "(s0", "s0)", "(s0 + )", "(s0 + 1 * 2)", "not(s0, s0)", "(max + 1", "1.5", '"a', "(s0 )) s0)"]
    for bad in [*malformed, "(2 ** -1)", "(9 ** (9 ** 9))"]:
        with pytest.raises(ModelError):
            dims.parse(bad)


def test_solve() -> None:
    assert dims.solve(dims.parse("((s0 * 2) + 3)"), 11, {}) == {"s0": 4}
    assert dims.solve(dims.parse("((s0 * 2) + 3)"), 12, {}) is None
    assert dims.solve(dims.parse("(s0 + s1)"), 12, {"s1": 5}) == {"s0": 7}
    assert dims.solve(dims.parse("(s0 // 2)"), 3, {"s0": 7}) == {}
    with pytest.raises(LookupError):
        dims.solve(dims.parse("(s0 // 2)"), 3, {})
    with pytest.raises(LookupError):
        dims.solve(dims.parse("(s0 + s1)"), 3, {})


# -- building, extracting


def test_builder_makes_names_unique_and_params_once() -> None:
    b = GraphBuilder()
    x = b.input("x", F32)
    w = b.param("w", F32, key="fc.weight")
    assert b.param("w", F32, key="fc.weight") is w
    y = b.add("aten.add.Tensor", (x, w), F32, name="x")
    z = b.add("aten.add.Tensor", (y, w), F32, name="x")
    graph = b.finish(z)
    assert [n.outs[0].name for n in graph.nodes] == ["x_1", "x_2"]
    with pytest.raises(InternalError):
        b.finish(Value("nobody", F32))


CHAIN = parse("""
graph main(%x: f32[s0, 4], %unused: f32[s1]) where (2 <= s0), (s1 <= 9) {
  param %w: f32[4] = "w"
  param %v: f32[4] = "v"
  %a: f32[s0, 4] = aten.add.Tensor(%x, %w)
  %b: f32[s0, 4] = aten.mul.Tensor(%a, %a)
  %c: f32[s0, 4] = aten.sub.Tensor(%b, %v)
  %d: f32[s0, 4] = aten.add.Tensor(%a, %c)
  return %d, %b
}
""")


def test_extract() -> None:
    assert show(verify(extract(CHAIN, [2, 1], "part"))) == """\
graph part(%a: f32[s0, 4]) where (2 <= s0) {
  param %v: f32[4] = "v"
  %b: f32[s0, 4] = aten.mul.Tensor(%a, %a)
  %c: f32[s0, 4] = aten.sub.Tensor(%b, %v)
  return %b, %c
}
"""
    assert [p.key for p in extract(CHAIN, range(4), "all").params] == ["w", "v"]
    with pytest.raises(InternalError, match="cannot stand alone"):
        extract(CHAIN, [0, 3], "hole")
    with pytest.raises(InternalError, match="no node"):
        extract(CHAIN, [4], "beyond")


# -- rewriting


def _rename_neg(n: Node, _context: Context) -> Replacement | None:
    return Replacement((replace(n, op="aten.neg.default"),)) if n.op == "aten.relu.default" else None


def _drop(n: Node, _context: Context) -> Replacement | None:
    return Replacement(values={n.outs[0].name: n.args[0]}) if n.op == "aten.neg.default" else None


NEGS = parse("""
graph main(%x: f32[4]) {
  %a: f32[4] = aten.relu.default(%x)
  %b: f32[4] = aten.neg.default(%a)
  %i: f32[4] = control.if(True, [%b]) {
    graph then(%y: f32[4]) {
      %n: f32[4] = aten.neg.default(%y)
      %m: f32[4] = aten.neg.default(%n)
      return %m
    }
    graph else(%y: f32[4]) {
      return %y
    }
  }
  return %i, %b
}
""")


def test_apply_rewrites_nested_graphs_and_outputs() -> None:
    graph, trace = apply(NEGS, [Rule("drop-neg", _drop, "a node less", ops=frozenset({"aten.neg"}))])
    assert [n.op for n in verify(graph).nodes] == ["aten.relu.default", "control.if"]
    assert graph.outputs[1] == graph.nodes[0].outs[0]
    assert graph.nodes[1].graphs[0].outputs == graph.nodes[1].graphs[0].inputs
    assert [(t.rule, t.graph) for t in trace] == [("drop-neg", "then"), ("drop-neg", "then"), ("drop-neg", "main")]
    assert str(trace[2]) == "drop-neg: %b: f32[4] = aten.neg.default(%a)  =>  nothing (%b -> %a)"


def test_apply_gives_the_same_graph_when_nothing_fires() -> None:
    graph, trace = apply(NEGS, [Rule("never", lambda n, c: None, "")])
    assert graph is NEGS
    assert trace == ()


def test_a_rule_that_does_not_shrink_its_measure_is_named() -> None:
    wrong = r"(?s)rule relu-to-neg is wrong.*does not shrink.*\(1, 1\) became \(1, 1\)"
    with pytest.raises(InternalError, match=wrong):
        apply(NEGS, [Rule("relu-to-neg", _rename_neg, "it does not")])
    relus = Measure("relus", lambda n: (int(n.op == "aten.relu.default"),))
    graph, _ = apply(NEGS, [Rule("relu-to-neg", _rename_neg, "a relu less", relus)])
    assert graph.nodes[0].op == "aten.neg.default"
    assert verify(graph)
    with pytest.raises(InternalError, match="do not share a measure"):
        apply(NEGS, [Rule("one", _rename_neg, "", relus), Rule("two", _drop, "", SIZE)])


def test_a_rule_that_forgets_an_output_or_changes_a_type_is_named() -> None:
    with pytest.raises(InternalError, match=r"(?s)forgetful is wrong.*still used"):
        apply(NEGS, [Rule("forgetful", lambda n, c: Replacement(), "")])
    other = Value("x", TensorType(DType.F64, (4,)))
    with pytest.raises(InternalError, match=r"(?s)caster is wrong.*f32\[4\] became f64\[4\]"):
        apply(NEGS, [Rule("caster", lambda n, c: Replacement(values={n.outs[0].name: other}), "")])


# -- liveness, sizes, cost


def test_last_uses() -> None:
    graph = parse("""
graph main(%x: f32[4], %y: f32[4]) {
  param %w: f32[4] = "w"
  %a: f32[4] = aten.add.Tensor(%x, %w)
  %dead: f32[4] = aten.add.Tensor(%a, %a)
  %b: f32[4] = aten.add.Tensor(%a, %x)
  %c: f32[4] = aten.add.Tensor(%b, %w)
  return %b, [%c]
}
""")
    assert [[v.name for v in dying] for dying in last_uses(graph)] == [[], ["dead"], ["a", "x"], []]


SIZES = parse("""
graph main(%n: int(s2), %x: f32[s0, (s0 * s1), 3], %y: f32[(s1 + 1)], %o: object) where (2 <= s0), ((s0 % s1) == 0) {
  return %x
}
""")


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        ([5, (4, 8, 3), (3,), None], {"s0": 4, "s1": 2, "s2": 5}),
        ([5, (4, 8, 3), (3,)], "3 arguments for 4 inputs"),
        ([5, (4, 8), (3,), None], "x: shape (4, 8), not a tensor of 3 dimensions"),
        ([5, (4, 8, 4), (3,), None], "x: dimension 2 is 4, the graph has 3"),
        ([5, (4, 9, 3), (3,), None], "x: dimension 1 is 9, the graph has (s0 * s1) with s0 = 4"),
        ([5, (4, 8, 3), (4,), None], "y: dimension 0 is 4, the graph has (s1 + 1) with s1 = 2"),
        ([5, (4, 0, 3), (1,), None], "guard: ((s0 % s1) == 0) does not hold with s0 = 4, s1 = 0"),
        ([5, (1, 1, 3), (2,), None], "guard: (2 <= s0) does not hold with s0 = 1"),
        ([5, (4, -4, 3), (0,), None], "too small"),
        ([None, (4, 8, 3), (3,), None], "n: a NoneType, not an integer"),
        ([5, 7, (3,), None], "x: a int, not a tensor of 3 dimensions"),
    ],
)
def test_bind(shapes: list[Any], expected: dict[str, int] | str) -> None:
    found = bind(SIZES, shapes)
    if isinstance(expected, str):
        assert isinstance(found, Mismatch)
        assert expected in str(found)
    else:
        assert found == expected


def test_bind_same_symbol_twice() -> None:
    graph = parse("graph main(%x: f32[s0], %y: f32[s0]) { return %x }")
    assert bind(graph, [(3,), (3,)]) == {"s0": 3}
    assert "but s0 is 3 elsewhere" in str(bind(graph, [(3,), (4,)]))


def test_cost() -> None:
    graph = parse("""
graph main(%x: f32[s0, 8], %c: bool[]) {
  param %w: f16[16, 8] = "w"
  %m: f32[s0, 16] = aten.mm.default(%x, %w)
  %v: f32[(s0 * 16)] = aten.view.default(%m, [-1])
  %l: f32[s0, 16] = control.loop(5, None, [%m], []) {
    graph body(%i: i64[], %go: bool[], %m: f32[s0, 16]) {
      %n: f32[s0, 16] = aten.add.Tensor(%m, %m)
      return %go, %n
    }
  }
  %u: i64[u0, 2] = aten.nonzero.default(%m)
  return %l, %v, %u
}
""")
    env = {"s0": 10}
    mm, view, loop, nonzero = (node_cost(n, env) for n in graph.nodes)
    assert mm == Cost(2 * 10 * 8 * 16, 4 * 10 * 8 + 2 * 16 * 8 + 4 * 10 * 16)
    assert view == Cost(0, 0)
    assert loop.bytes == 5 * 2 * 4 * 160  # one tensor read, one written, five times
    assert loop.flops == 5 * (node_cost(graph.nodes[2].graphs[0].nodes[0], env).flops or 0) > 0
    assert nonzero.bytes is None
    assert graph_cost(graph, env).bytes is None
    assert graph_cost(replace(graph, nodes=graph.nodes[:3]), env).bytes == sum(c.bytes or 0 for c in (mm, view, loop))
    assert node_cost(graph.nodes[0], {}) == Cost(None, None)


def test_cost_of_a_scan_counts_its_steps() -> None:
    graph = parse("""
graph main(%s: f32[3], %x: f32[3, s0]) {
  %t: f32[3], %ys: f32[s0, 3] = control.scan([%s], [%x], [], in_axes=[1]) {
    graph body(%s: f32[3], %e: f32[3]) {
      %n: f32[3] = aten.add.Tensor(%s, %e)
      return %n, %n
    }
  }
  return %t, %ys
}
""")
    assert node_cost(graph.nodes[0], {"s0": 7}).bytes == 7 * 3 * 3 * 4
    assert node_cost(graph.nodes[0], {}) == Cost(None, None)


class _CountedName(str):
    """A name that counts how often it is hashed."""

    asked = 0

    def __hash__(self) -> int:
        type(self).asked += 1
        return super().__hash__()


def test_an_expression_is_hashed_once_however_often_it_is_looked_up() -> None:
    name = _CountedName("a")
    d: Sym = Sym("sym", (name,))
    for _ in range(8):
        d = Sym("max", (d, d))  # written out, 256 places
    known = {d: 1}
    assert known[d] == 1 and _CountedName.asked == 1
    other = pickle.loads(pickle.dumps(expr("+", sym("a"), 3)))
    assert other == expr("+", sym("a"), 3) and other._hash is None, "hashes of names are of one process"


@pytest.mark.parametrize(("text", "divisor"), [
    ("12", 12), ("0", 1), ("s0", 1), ("(s0 * 6)", 6), ("((s0 * 6) + (s1 * 4))", 2), ("((s0 * 6) + 3)", 3), ("(s0 * s1 * -8)", 8),
    ("(((s0 * 4) + 8) * s1 * 3)", 12), ("((s0 * 6) // 2)", 1),
])  # fmt: skip
def test_a_number_that_divides_an_expression(text: str, divisor: int) -> None:
    d = dims.parse(text)
    assert dims.factor(d) == divisor
    assert all(dims.evaluate(d, {"s0": a, "s1": b}) % divisor == 0 for a in range(4) for b in range(4))
