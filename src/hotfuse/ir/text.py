"""The graph as text: `parse(show(g)) == g`, for any stage to be printed, kept in a file and started from again.

    graph main(%x: f32[s0, 64], %c: bool[]) where (2 <= s0) {
      param %w: f32[64, 64] = "fc.weight"
      %h: f32[s0, 64] = aten.linear.default(%x, %w, None)  @ "model.py":12 "fc"
      %y: f32[s0, 64] = control.if(%c, [%h]) {
        graph then(%h: f32[s0, 64]) {
          return %h
        }
        graph else(%h: f32[s0, 64]) {
          %n: f32[s0, 64] = aten.neg.default(%h)
          return %n
        }
      }
      return %y
    }

    graph  ::= "graph" name "(" value, ... ")" ["where" pred, ...] "{" param* node* "return" arg, ... "}"
    param  ::= "param" value "=" string
    node   ::= [value, ... "="] [kind] op "(" arg, ..., name "=" arg, ... ")" ["{" graph+ "}"] ["@" loc]
    value  ::= %name ":" type
    arg    ::= %name | number | complex(re, im) | string | True | False | None | dtype | $kind(name) | "[" arg, ... "]"
    loc    ::= [string ":" line] [string]

A name that is not a plain word is written in quotes: `%"a b"`. The kind of a node is written where its op's
first word does not tell it. `#` starts a comment. Line breaks mean nothing. Text is untrusted: whatever is wrong
with it ends in a `ModelError` that gives line and column.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from functools import cache

from hotfuse.base.errors import InternalError
from hotfuse.ir import dims
from hotfuse.ir.dims import MAX_DEPTH, Dim, Sym, quote
from hotfuse.ir.graph import Arg, Graph, Kind, Loc, Node, Param, Token, Value
from hotfuse.ir.reader import TokenReader
from hotfuse.ir.types import (
    ROW_MAJOR,
    STRIDED,
    DType,
    Layout,
    ObjectType,
    OptionalType,
    ScalarKind,
    ScalarType,
    SequenceType,
    TensorType,
    Type,
)

_WORD = r"[A-Za-z_][A-Za-z0-9_.]*(?:::[A-Za-z0-9_.]+)*"
_PLAIN = re.compile(r"[A-Za-z0-9_./$-]+")
_PLAIN_WORD = re.compile(_WORD)
_DEVICE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(?::[0-9]+)?")
_TOKEN = re.compile(
    rf"[ \t\r\n]*(%{_PLAIN.pattern}|%?{dims.STRING}|{_WORD}|-?[0-9]+(?:\.[0-9]*)?(?:[eE][-+]?[0-9]+)?|-inf"
    rf"|@{_DEVICE.pattern}|#[^\n]*|\*\*|//|==|!=|<=|[^ \t\r\n])"
)
_CONSTANTS: dict[str, Arg] = {"True": True, "False": False, "None": None, "nan": math.nan, "inf": math.inf,
                              "-inf": -math.inf, **{d.value: d for d in DType}}
_DTYPES = {d.value: d for d in DType}
_SCALARS = {k.value: k for k in ScalarKind}
_KINDS = {k.value: k for k in Kind}


def implied_kind(op: str) -> Kind:
    """The kind a node has unless its text says otherwise: told by the op's first word."""
    return _KINDS.get(op.partition(".")[0], Kind.OPERATOR)


@cache
def nan_complex(real: str, imag: str) -> complex:
    """One object per complex NaN, so that graphs holding it compare equal (as `math.nan` does for floats)."""
    return complex(float(real), float(imag))


def constant(number: complex) -> complex:
    """The number, with every NaN as the one object that compares equal to itself inside tuples."""
    if not isinstance(number, complex):
        return math.nan if number != number else number
    return nan_complex(repr(number.real), repr(number.imag)) if number != number else number


# ---------------------------------------------------------------------------------------------- printing


def show(graph: Graph, *, sources: bool = True) -> str:
    """The text of a graph; without `sources` it does not say which lines of a user's files its nodes are from."""
    return "\n".join(_graph_lines(graph, "", sources=sources)) + "\n"


def show_value(value: Value) -> str:
    """`%x: f32[s0]`"""
    return f"{_value(value.name)}: {show_type(value.type)}"


def show_type(t: Type) -> str:
    """`f32[s0, 64]{1,0}@cuda:0`"""
    match t:
        case TensorType(dtype, shape, layout, device):
            text = f"{dtype.value}[{', '.join(map(dims.show, shape))}]"
            if layout != ROW_MAJOR:
                if layout.order is not None:
                    text += "{" + ",".join(map(str, layout.order)) + "}"
                text += "" if not layout.strided else "{*}" if layout.order is None else "*"
            if device != "cpu":
                text += "@" + (device if _DEVICE.fullmatch(device) else quote(device))
            return text
        case ScalarType(kind, expr):
            return kind.value if expr is None else f"{kind.value}({dims.show(expr)})"
        case SequenceType(elem):
            return f"seq<{show_type(elem)}>"
        case OptionalType(elem):
            return f"opt<{show_type(elem)}>"
        case ObjectType():
            return "object"


def show_arg(arg: Arg) -> str:
    """An argument; enums and booleans before the strings and numbers they also are."""
    match arg:
        case Value(name=name):
            return _value(name)
        case None | bool():
            return str(arg)
        case DType():
            return arg.value
        case str():
            return quote(arg)
        case tuple():
            return "[" + ", ".join(map(show_arg, arg)) + "]"
        case int() | float():
            return repr(arg)
        case complex():
            return f"complex({arg.real!r}, {arg.imag!r})"
        case Token(kind, name):
            return f"${_word(kind)}({_word(name)})"
    raise InternalError(f"a {type(arg).__name__} is not a graph argument")


def show_node(node: Node, indent: str = "", *, sources: bool = True) -> Iterator[str]:
    """The lines of a node, nested graphs included."""
    op = node.op if "." in node.op and _PLAIN_WORD.fullmatch(node.op) else quote(node.op)
    args = [*map(show_arg, node.args), *(f"{_word(name)}={show_arg(arg)}" for name, arg in node.attrs)]
    line = indent + ", ".join(map(show_value, node.outs)) + (" = " if node.outs else "")
    if node.kind is not implied_kind(node.op):
        line += node.kind.value + " "
    line += f"{op}({', '.join(args)})"
    if node.graphs:
        yield line + " {"
        for graph in node.graphs:
            yield from _graph_lines(graph, indent + "  ", sources=sources)
        line = indent + "}"
    loc = node.loc if sources else Loc(name=node.loc.name)
    if loc != Loc():
        line += "  @"
        if loc.file or loc.line:
            line += f" {quote(loc.file)}:{loc.line}"
        if loc.name or not (loc.file or loc.line):
            line += " " + quote(loc.name)
    yield line


def _graph_lines(graph: Graph, indent: str, *, sources: bool) -> Iterator[str]:
    where = " where " + ", ".join(map(dims.show, graph.guards)) if graph.guards else ""
    yield f"{indent}graph {_word(graph.name)}({', '.join(map(show_value, graph.inputs))}){where} {{"
    inner = indent + "  "
    for param in graph.params:
        yield f"{inner}param {show_value(param.value)} = {quote(param.key)}"
    for node in graph.nodes:
        yield from show_node(node, inner, sources=sources)
    yield f"{inner}return {', '.join(map(show_arg, graph.outputs))}".rstrip()
    yield indent + "}"


def _value(name: str) -> str:
    return "%" + (name if _PLAIN.fullmatch(name) else quote(name))


def _word(name: str) -> str:
    return name if _PLAIN_WORD.fullmatch(name) else quote(name)


# ---------------------------------------------------------------------------------------------- parsing


def parse(text: str) -> Graph:
    """Read one graph; anything else in the text is an error."""
    reader = _GraphReader(text)
    graph = reader.graph(0)
    reader.end("graph")
    return graph


class _GraphReader(TokenReader):
    __slots__ = ()

    subject, lexemes, names = "graph", _TOKEN, _PLAIN_WORD

    def type(self, depth: int = 0) -> Type:
        token = self.tokens[self.at]
        if depth > MAX_DEPTH:
            self.fail("type nested too deeply")
        self.at += 1
        follows = self.tokens[self.at]
        if follows == "[" and token in _DTYPES:
            return self.tensor(_DTYPES[token])
        if token in _SCALARS:
            if follows != "(":
                return ScalarType(_SCALARS[token])
            self.at += 1
            expr = self.dim()
            self.expect(")")
            return ScalarType(_SCALARS[token], expr)
        if token == "object":
            return ObjectType()
        if token not in ("seq", "opt"):
            self.fail("a type expected", self.at - 1)
        self.expect("<")
        elem = self.type(depth + 1)
        self.expect(">")
        return SequenceType(elem) if token == "seq" else OptionalType(elem)

    def tensor(self, dtype: DType) -> Type:
        self.at += 1
        shape: list[Dim] = []
        while not self.accept("]"):
            if shape:
                self.expect(",")
            shape.append(self.dim())
        layout, device = ROW_MAJOR, "cpu"
        if self.accept("{"):
            layout = self.layout()
        token = self.tokens[self.at]
        if token[:1] == "@":
            self.at += 1
            device = token[1:] or self.string()
        return TensorType(dtype, tuple(shape), layout, device)

    def layout(self) -> Layout:
        if self.accept("*"):
            self.expect("}")
            return STRIDED
        order: list[int] = []
        while not self.accept("}"):
            if order:
                self.expect(",")
            order.append(self.integer())
        return Layout(tuple(order), strided=self.accept("*"))

    def value(self, scope: dict[str, Value]) -> Value:
        """A definition, `%x: f32[s0]`; `scope` maps "%x" to it."""
        at = self.at
        name = self.local_name("value")
        self.expect(":")
        key = "%" + name
        if key in scope:
            self.fail(f"{key} is defined twice", at)
        value = scope[key] = Value(name, self.type())
        return value

    def arg(self, scope: dict[str, Value], depth: int = 0) -> Arg:
        token = self.tokens[self.at]
        first = token[:1]
        if first == "%":
            at = self.at
            key = "%" + self.local_name("value")
            if key not in scope:
                self.fail(f"{key} is not defined before its use", at)
            return scope[key]
        if token == "[":
            return self.sequence(scope, depth)
        if first == '"':
            return self.string()
        if first == "$":
            self.at += 1
            kind = self.word()
            self.expect("(")
            name = self.word()
            self.expect(")")
            return Token(kind, name)
        if token == "complex":
            return self.complex_number()
        self.at += 1
        if token in _CONSTANTS:
            return _CONSTANTS[token]
        try:
            return int(token) if "." not in token and "e" not in token and "E" not in token else float(token)
        except ValueError as e:
            self.fail("an argument expected", self.at - 1, e)

    def sequence(self, scope: dict[str, Value], depth: int) -> Arg:
        if depth > MAX_DEPTH:
            self.fail("argument nested too deeply")
        self.at += 1
        items: list[Arg] = []
        while not self.accept("]"):
            if items:
                self.expect(",")
            items.append(self.arg(scope, depth + 1))
        return tuple(items)

    def complex_number(self) -> complex:
        self.at += 1
        self.expect("(")
        real = self.real()
        self.expect(",")
        imag = self.real()
        self.expect(")")
        return constant(complex(real, imag))

    def real(self) -> float:
        try:
            number = float(self.tokens[self.at])
        except ValueError as e:
            self.fail("a number expected", cause=e)
        self.at += 1
        return number

    def loc(self) -> Loc:
        file, line, name = "", 0, ""
        if self.tokens[self.at + 1] == ":":
            file = self.string()
            self.at += 1
            line = self.integer()
            # A string that a bracket follows is the op of the next node.
            if self.tokens[self.at][:1] == '"' and self.tokens[self.at + 1] != "(":
                name = self.string()
        else:
            name = self.string()
        return Loc(file, line, name)

    def node(self, scope: dict[str, Value], depth: int) -> Node:
        outs: list[Value] = []
        made: dict[str, Value] = {}
        if self.tokens[self.at][:1] == "%":
            outs.append(self.value(made))
            while self.accept(","):
                outs.append(self.value(made))
            self.expect("=")
        kind = _KINDS.get(self.tokens[self.at])
        if kind:
            self.at += 1
        op = self.word()
        self.expect("(")
        args: list[Arg] = []
        attrs: list[tuple[str, Arg]] = []
        while not self.accept(")"):
            if args or attrs:
                self.expect(",")
            if self.tokens[self.at + 1] == "=":
                name = self.word()
                self.at += 1
                attrs.append((name, self.arg(scope)))
            elif attrs:
                self.fail("a positional argument after a named one")
            else:
                args.append(self.arg(scope))
        graphs: list[Graph] = []
        if self.accept("{"):
            while not self.accept("}"):
                graphs.append(self.graph(depth + 1))
        loc = Loc()
        if self.accept("@"):
            loc = self.loc()
        for key, value in made.items():
            if key in scope:
                self.fail(f"{key} is defined twice")
            scope[key] = value
        return Node(kind or implied_kind(op), op, tuple(args), tuple(outs), tuple(attrs), tuple(graphs), loc)

    def graph(self, depth: int) -> Graph:
        if depth > MAX_DEPTH:
            self.fail("graph nested too deeply")
        self.expect("graph")
        name = self.word()
        scope: dict[str, Value] = {}
        inputs: list[Value] = []
        self.expect("(")
        while not self.accept(")"):
            if inputs:
                self.expect(",")
            inputs.append(self.value(scope))
        guards: list[Sym] = []
        if self.accept("where"):
            guards.append(self.guard())
            while self.accept(","):
                guards.append(self.guard())
        self.expect("{")
        params: list[Param] = []
        while self.accept("param"):
            value = self.value(scope)
            self.expect("=")
            params.append(Param(value, self.string()))
        nodes: list[Node] = []
        while not self.accept("return"):
            nodes.append(self.node(scope, depth))
        outputs: list[Arg] = []
        while not self.accept("}"):
            if outputs:
                self.expect(",")
            outputs.append(self.arg(scope))
        return Graph(name, tuple(inputs), tuple(params), tuple(nodes), tuple(outputs), tuple(guards))

    def guard(self) -> Sym:
        at = self.at
        guard = self.dim()
        if isinstance(guard, int):
            self.fail("a predicate expected", at)
        return guard
