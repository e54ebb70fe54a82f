"""Random well-formed graphs: nested control, symbolic shapes, odd names and attributes. They compute nothing."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from hotfuse.ir import dims
from hotfuse.ir.dims import Dim, Sym, expr, sym
from hotfuse.ir.graph import Arg, Graph, Kind, Loc, Node, Param, Token, Value, map_values
from hotfuse.ir.text import constant
from hotfuse.ir.types import (
    DType,
    Layout,
    ObjectType,
    OptionalType,
    ScalarKind,
    ScalarType,
    SequenceType,
    TensorType,
    Type,
    dims_of,
    with_dims,
)

ANY_TEXT = st.text(st.characters(), max_size=6) | st.text("ab \"\\\n%@#{}[](),:=/\u2028\ud83d\ude00", max_size=5)
_NAMES = ["x", "h", "w.1", "a b", "%q", '"', "é", "/m/MatMul_0", "onnx::Add_1", "0", "param", "return"]
NAMES = st.sampled_from(_NAMES) | ANY_TEXT
SYMBOLS = ["s0", "s1", "batch size", "max", "u+1", "N"]
OPS = [
    "aten.add.Tensor", "aten.linear.default", "onnx.ai.onnx.ml::Scaler", "sym.mul", "custom.op-1", "aten.nothing.default",
    "aten.transpose.int", "aten.permute.default", "aten.view.default", "aten.dropout.default", "aten.to.dtype",
    "aten.sym_size.int", "aten.clone.default", "aten.add_.Tensor", "aten.rand.default",
]  # fmt: skip
SCALARS: st.SearchStrategy[Any] = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats().map(constant), st.complex_numbers().map(constant), ANY_TEXT,
    st.sampled_from(DType), st.builds(Token, st.sampled_from(["device", "memory_format", "odd kind"]), ANY_TEXT),
    st.sampled_from([math.nan, -0.0, math.inf, -math.inf, 1, 1.0, True, "f32", "nan", DType.F32]),
)  # fmt: skip


class _Maker:
    def __init__(self, draw: st.DrawFn, symbols: list[str], depth: int) -> None:
        self.draw, self.depth = draw, depth
        self.bound = list(symbols)
        self.names: set[str] = set()
        self.scope: list[Value] = []

    def name(self) -> str:
        name = self.draw(NAMES) or "v"
        while name in self.names:
            name += str(len(self.names))
        self.names.add(name)
        return name

    def dim(self, fresh: bool) -> Dim:
        pick = self.draw(st.integers(0, 5))
        if pick <= 1 or not (self.bound or fresh):
            return self.draw(st.integers(0, 512))
        if pick == 2 and fresh:
            name = self.draw(st.sampled_from(SYMBOLS))
            if name not in self.bound:
                self.bound.append(name)
            return sym(name)
        if not self.bound:
            return 7
        a, b = (sym(self.draw(st.sampled_from(self.bound))) for _ in range(2))
        n = self.draw(st.integers(2, 9))
        forms = [a, expr("+", a, n), expr("*", a, b), expr("+", expr("*", a, n), b), expr("//", a, n), expr("%", b, n),
                 expr("max", a, expr("+", b, -1)), expr("ceildiv", a, n), expr("**", a, 2), expr("min", a, b, n)]
        return self.draw(st.sampled_from(forms))

    def type(self, fresh: bool) -> Type:
        pick = self.draw(st.integers(0, 9))
        if pick <= 5:
            shape = tuple(self.dim(fresh) for _ in range(self.draw(st.integers(0, 3))))
            order = tuple(self.draw(st.permutations(range(len(shape)))))
            layouts = [Layout(), Layout(), Layout(order), Layout(None, True), Layout(order, True)]
            layout = self.draw(st.sampled_from(layouts))
            device = self.draw(st.sampled_from(["cpu", "cpu", "cuda:0", "meta", "odd device"]))
            return TensorType(self.draw(st.sampled_from(DType)), shape, layout, device)
        if pick == 6:
            return ScalarType(ScalarKind.INT, self.dim(fresh))
        if pick == 7:
            return ScalarType(self.draw(st.sampled_from(ScalarKind)))
        return self.draw(st.sampled_from([SequenceType, OptionalType]))(self.type(fresh)) if pick == 8 else ObjectType()

    def define(self, fresh: bool) -> Value:
        return Value(self.name(), self.type(fresh))

    def arg(self, depth: int = 0) -> Arg:
        pick = self.draw(st.integers(0, 6))
        if pick <= 3 and self.scope:
            return self.draw(st.sampled_from(self.scope))
        if pick == 4 and depth < 3:
            return tuple(self.arg(depth + 1) for _ in range(self.draw(st.integers(0, 3))))
        return self.draw(SCALARS)

    def loc(self) -> Loc:
        some = [Loc(), Loc("m.py", 3), Loc(name="fc"), Loc("a\n.py", 0, "b"), Loc("", 7, "")]
        return self.draw(st.sampled_from(some))

    def node(self) -> Node:
        pick = self.draw(st.integers(0, 9))
        if pick == 0 and self.scope:
            return Node(Kind.TRANSFER, self.draw(st.sampled_from(["transfer.copy", "aten.to.device"])),
                        (self.draw(st.sampled_from(self.scope)), 1), (self.define(True),), loc=self.loc())
        if pick == 1 and self.depth < 2:
            return self.control()
        outs = tuple(self.define(True) for _ in range(self.draw(st.integers(0, 2))))
        args = tuple(self.arg() for _ in range(self.draw(st.integers(0, 3))))
        attrs = {name or "k": self.arg() for name in self.draw(st.lists(NAMES, max_size=2))}
        return Node(Kind.OPERATOR, self.draw(st.sampled_from(OPS)), args, outs, tuple(attrs.items()), (), self.loc())

    def some(self) -> tuple[Arg, ...]:
        return tuple(self.draw(st.lists(st.sampled_from(self.scope), max_size=2))) if self.scope else ()

    def control(self) -> Node:
        kind = self.draw(st.sampled_from(["if", "loop", "scan", "map"]))
        captures, carried, scanned = self.some(), self.some(), self.some()
        extra = self.draw(st.integers(0, 1))
        obj = ObjectType()

        def like(args: tuple[Arg, ...], element: bool = False) -> list[Type]:
            return [a.type if isinstance(a, Value) and not element else obj for a in args]

        def unsaid(types: list[Type]) -> list[Type]:  # a number that changes is typed without its value
            return [ScalarType(t.kind) if isinstance(t, ScalarType) else t for t in types]

        def nested(takes: list[Type], gives: int) -> Graph:
            return self.draw(graphs(takes=takes, gives=gives, symbols=tuple(self.bound), depth=self.depth + 1))

        # Outputs are objects, so that dtypes always agree.
        if kind == "if":
            args: tuple[Arg, ...] = (True, captures)
            n = self.draw(st.integers(0, 2))
            inner = (nested(like(captures), n), nested(like(captures), n))
        elif kind == "loop":
            args, n = (None, None, carried, captures), len(carried) + extra
            inner = (nested([obj, obj, *unsaid(like(carried)), *like(captures)], n + 1),)
        elif kind == "scan":
            args, n = (carried, scanned, captures), len(carried) + extra
            inner = (nested([*unsaid(like(carried)), *like(scanned, True), *like(captures)], n),)
        else:
            args, n = (scanned, captures), extra + 1
            inner = (nested([*like(scanned, True), *like(captures)], n),)
        outs = tuple(Value(self.name(), obj) for _ in range(n))
        return Node(Kind.CONTROL, f"control.{kind}", args, outs, (), inner, self.loc())

    def graph(self, takes: list[Type] | None, gives: int | None) -> Graph:
        if takes is None:
            inputs = tuple(self.define(True) for _ in range(self.draw(st.integers(0, 3))))
            count = self.draw(st.integers(0, 2))
            params = tuple(Param(self.define(True), f"{self.draw(NAMES)}{i}") for i in range(count))
        else:
            inputs, params = tuple(Value(self.name(), t) for t in takes), ()
        self.scope += [*inputs, *(p.value for p in params)]
        guards: list[Sym] = []
        if self.bound and takes is None and self.draw(st.booleans()):
            one = expr("<=", 2, sym(self.draw(st.sampled_from(self.bound))))
            guards = [g for g in (one, expr("or", one, expr("not", one))) if isinstance(g, Sym)]
        nodes: list[Node] = []
        for _ in range(self.draw(st.integers(0, 6 - 2 * self.depth))):
            nodes.append(self.node())
            self.scope += nodes[-1].outs
        count = self.draw(st.integers(0, 3)) if gives is None else gives
        # Nested outputs are plain numbers or objects, whose dtypes cannot disagree with the control node's.
        outputs = tuple(self.arg() for _ in range(count))
        return Graph(self.draw(NAMES) or "g", inputs, params, tuple(nodes), outputs, tuple(guards))


@st.composite
def graphs(
    draw: st.DrawFn, takes: list[Type] | None = None, gives: int | None = None, symbols: tuple[str, ...] = (),
    depth: int = 0,
) -> Graph:  # fmt: skip
    return _Maker(draw, list(symbols), depth).graph(takes, gives)


# -- the same graph, said differently


def disguised(graph: Graph, rng: random.Random) -> Graph:
    """Other names for everything, other param order, no locations, independent nodes in another order."""
    names: dict[str, str] = {}

    def new_symbol(name: str) -> str:
        if name not in names:
            names[name] = f"z{rng.randrange(10**9)}"
        return names[name]

    def type_of(t: Type) -> Type:
        return with_dims(t, tuple(dims.rename(d, {s: new_symbol(s) for s in dims.symbols(d)}) for d in dims_of(t)))

    def one(g: Graph) -> Graph:
        values: dict[str, Arg] = {}

        def define(v: Value) -> Value:
            made = values[v.name] = Value(f"n{rng.randrange(10**9)}.{len(values)}", type_of(v.type))
            return made

        inputs = tuple(define(v) for v in g.inputs)
        params = [Param(define(p.value), f"key{rng.randrange(10**9)}") for p in g.params]
        rng.shuffle(params)
        todo, nodes = list(g.nodes), list[Node]()
        while todo:
            ready = [n for n in todo if all(v.name in values for v in n.ins)]
            node = rng.choice(ready)
            todo = [n for n in todo if n is not node]
            args = tuple(map_values(a, values) for a in node.args)
            attrs = tuple((k, map_values(a, values)) for k, a in node.attrs)
            outs = tuple(define(v) for v in node.outs)
            nodes.append(Node(node.kind, node.op, args, outs, attrs, tuple(map(one, node.graphs)), Loc("other.py", 9)))
        guards = [dims.rename(p, {s: new_symbol(s) for s in dims.symbols(p)}) for p in g.guards]
        rng.shuffle(guards)
        outputs = tuple(map_values(a, values) for a in g.outputs)
        return replace(g, name="other", inputs=inputs, params=tuple(params), nodes=tuple(nodes), outputs=outputs,
                       guards=tuple(guards))  # type: ignore[arg-type]

    return one(graph)
