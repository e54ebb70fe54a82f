"""Kernels as assembly text: `parse(show(k)) == k`.

    kernel bias_relu(M, N) {
      input x: f32[M, N]
      const b: f32[N]
      output y: f32[M, N]
      for m in 0..M parallel {
        for n in 0..N step 16 {
          %0: f32[16] = load x[m, n] axes(1) valid((N + (n * -1)))
          %1: f32[16] = load b[n] axes(0) valid((N + (n * -1)))
          %2: f32[16] = map.add %0, %1
          store y[m, n] axes(1) valid((N + (n * -1))), %2  @ "model.py":12 "fc"
        }
      }
    }

    kernel  ::= "kernel" name "(" name, ... ")" [loc] "{" buffer* stmt* "}"
    buffer  ::= kind name ":" dtype "[" dim, ... "]" ["stride" "(" dim, ... ")"]
    stmt    ::= instr | loop | when
    instr   ::= [tile, ... "="] op (operand, ... | "()") ["{" name "=" attr, ... "}"] [loc]
    loop    ::= [tile, ... "="] "for" name "in" dim ".." dim ["step" int] ["parallel" | "unroll"]
                ["carry" "(" tile "=" %name, ... ")"] "{" stmt* ["yield" %name, ...] "}"
              | "for" name "in" dim ".." dim "at" access "{" stmt* "}"
    when    ::= "if" pred "{" stmt* "}"
    operand ::= %name | access | dim | number | "float" "(" number ")"
    access  ::= name "[" dim, ... "]" ["axes" "(" int, ... ")"] ["step" "(" dim, ... ")"] ["valid" "(" (dim | "*"), ... ")"]
    tile    ::= %name ":" dtype "[" int, ... "]"
    loc     ::= "@" [string ":" line] [string]

Strides are written where they are not row-major. A name that is not a plain word is written in quotes, `#` starts a comment,
line breaks mean nothing. Text is untrusted: whatever is wrong with it ends in a `ModelError` that gives line and column. It may
be well written and still make no sense; that is for `verify` to find.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import TypeVar

from hotfuse.base.errors import HotfuseError
from hotfuse.ir import dims
from hotfuse.ir.dims import MAX_DEPTH, NAME, Dim, quote
from hotfuse.ir.graph import Loc
from hotfuse.ir.reader import BLANK, TokenReader
from hotfuse.ir.text import constant
from hotfuse.ir.types import DType
from hotfuse.tile.isa import rows
from hotfuse.tile.program import (
    Attr,
    Buffer,
    BufferKind,
    Instr,
    Kernel,
    Loop,
    LoopKind,
    Operand,
    Stmt,
    Tile,
    TileAccess,
    TileType,
    When,
    row_major,
)
from hotfuse.tile.type_rules import show_type

T = TypeVar("T")

_PLAIN = re.compile(r"[A-Za-z0-9_]+")
_TOKEN = re.compile(
    rf"[{BLANK}]*(%{_PLAIN.pattern}|%?{dims.STRING}|{NAME.pattern}|-?[0-9]+(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|-inf"
    rf"|#[^\n]*|\.\.|\*\*|//|==|!=|<=|[^{BLANK}])"
)
_DTYPES = {d.value: d for d in DType}
_KINDS = {k.value: k for k in BufferKind}
_SPECIAL = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


# ---------------------------------------------------------------------------------------------- printing


def show(kernel: Kernel) -> str:
    """The text of a kernel."""
    lines = [f"kernel {_word(kernel.name)}({', '.join(map(_word, kernel.sizes))}){_loc(kernel.loc)} {{"]
    lines += ["  " + show_buffer(b) for b in kernel.buffers]
    for stmt in kernel.body:
        lines += show_stmt(stmt, "  ")
    return "\n".join([*lines, "}", ""])


def show_buffer(buffer: Buffer) -> str:
    """`input x: f32[M, N] stride(1, M)`"""
    text = f"{buffer.kind.value} {_word(buffer.name)}: {buffer.dtype.value}[{_list(buffer.shape)}]"
    return text if buffer.stride == row_major(buffer.shape) else f"{text} stride({_list(buffer.stride)})"


def show_stmt(stmt: Stmt, indent: str = "") -> list[str]:
    """The lines of a statement, its body included."""
    found: list[str] = []
    _show_into(stmt, indent, found)
    return found


def _show_into(stmt: Stmt, indent: str, found: list[str]) -> None:
    if isinstance(stmt, Instr):
        found.append(indent + show_head(stmt))
        return
    found.append(f"{indent}{show_head(stmt)} {{")
    for inner in stmt.body:
        _show_into(inner, indent + "  ", found)
    if isinstance(stmt, Loop) and stmt.yields:
        found.append(f"{indent}  yield {', '.join(_tile(t) for t in stmt.yields)}")
    found.append(indent + "}")


def show_head(stmt: Stmt) -> str:
    """An instruction, or the first line of a loop or condition."""
    if isinstance(stmt, When):
        return f"if {dims.show(stmt.pred)}"
    text = ", ".join(map(_defined, stmt.outs)) + (" = " if stmt.outs else "")
    if isinstance(stmt, Instr):
        args = ", ".join(map(_operand, stmt.args))
        attrs = ", ".join(f"{_word(name)}={_attr(value)}" for name, value in stmt.attrs)
        return text + stmt.op + (f" {args}" if args else "()") + (f" {{{attrs}}}" if attrs else "") + _loc(stmt.loc)
    # A name swallows the dots behind it, so a bare one keeps its distance.
    dots = " .. " if isinstance(stmt.lo, dims.Sym) and stmt.lo.op == "sym" else ".."
    text += f"for {_word(stmt.var)} in {dims.show(stmt.lo)}{dots}{dims.show(stmt.hi)}"
    text += "" if stmt.step == 1 else f" step {stmt.step}"
    text += "" if stmt.kind is LoopKind.SERIAL else f" {stmt.kind.value}"
    text += "" if stmt.given is None else f" at {_operand(stmt.given)}"
    carried = ", ".join(f"{_defined(inner)} = {_tile(first)}" for inner, first in stmt.carried)
    return text + (f" carry({carried})" if carried else "")


def _operand(arg: Operand) -> str:
    match arg:
        case Tile():
            return _tile(arg)
        case float():
            return repr(arg) if math.isfinite(arg) else f"float({arg!r})"
        case TileAccess():
            text = f"{_word(arg.buffer)}[{_list(arg.index)}]"
            text += f" axes({', '.join(map(str, arg.axes))})" if arg.axes else ""
            text += f" step({_list(arg.step)})" if arg.step else ""
            valid = ", ".join("*" if v is None else dims.show(v) for v in arg.valid)
            return text + (f" valid({valid})" if valid else "")
        case _:
            return dims.show(arg)


def _attr(value: Attr) -> str:
    match value:
        case str():
            return quote(value)
        case tuple():
            return "[" + ", ".join(map(str, value)) + "]"
        case int():
            return str(int(value))
        case _:
            return repr(value)


def _list(parts: Sequence[Dim]) -> str:
    return ", ".join(map(dims.show, parts))


def _tile(tile: Tile) -> str:
    return "%" + (tile.name if _PLAIN.fullmatch(tile.name) else quote(tile.name))


def _defined(tile: Tile) -> str:
    return f"{_tile(tile)}: {show_type(tile.type)}"


def _word(name: str) -> str:
    return name if NAME.fullmatch(name) else quote(name)


def _loc(loc: Loc) -> str:
    if loc == Loc():
        return ""
    place = f" {quote(loc.file)}:{loc.line}" if loc.file or loc.line else ""
    return "  @" + place + (f" {quote(loc.name)}" if loc.name or not place else "")


# ---------------------------------------------------------------------------------------------- parsing


def parse(text: str) -> Kernel:
    """Read one kernel; anything else in the text is an error."""
    reader = _KernelReader(text)
    kernel = reader.kernel()
    reader.end("kernel")
    return kernel


class _KernelReader(TokenReader):
    __slots__ = ("tiles",)

    subject, lexemes, names = "kernel", _TOKEN, NAME

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.tiles: dict[str, Tile] = {}

    # -- small parts

    def several(self, item: Callable[[], T], end: str) -> list[T]:
        """Items between commas, up to and with `end`."""
        found: list[T] = []
        while not self.accept(end):
            if found:
                self.expect(",")
            found.append(item())
        return found

    def real(self) -> float:
        try:
            number = float(self.token)
        except ValueError as e:
            self.fail("a number expected", cause=e)
        self.at += 1
        return float(constant(number).real)

    def dtype(self) -> DType:
        dtype = _DTYPES.get(self.token)
        if dtype is None:
            self.fail("an element type expected")
        self.at += 1
        return dtype

    def loc(self) -> Loc:
        if not self.accept("@"):
            return Loc()
        if self.tokens[self.at + 1] != ":":
            return Loc(name=self.string())
        file = self.string()
        self.at += 1
        line = self.integer()
        return Loc(file, line, self.string() if self.token[:1] == '"' else "")

    # -- tiles and operands

    def tile(self) -> Tile:
        at = self.at
        name = self.local_name("tile")
        if name not in self.tiles:
            self.fail(f"%{name} is not defined before its use", at)
        return self.tiles[name]

    def defined(self) -> Tile:
        name = self.local_name("tile")
        self.expect(":")
        dtype = self.dtype()
        self.expect("[")
        return Tile(name, TileType(dtype, tuple(self.several(self.integer, "]"))))

    def define(self, tiles: Sequence[Tile]) -> None:
        for tile in tiles:
            if tile.name in self.tiles:
                self.fail(f"%{tile.name} is defined twice")
            self.tiles[tile.name] = tile

    def operand(self) -> Operand:
        token, follows = self.token, self.tokens[self.at + 1]
        if token[:1] == "%":
            return self.tile()
        if follows == "[" and (token[:1] == '"' or NAME.fullmatch(token)):
            return self.access()
        if token == "float" and follows == "(":
            self.at += 2
            if self.token not in _SPECIAL:
                self.fail("inf, -inf or nan expected")
            number = self.real()
            self.expect(")")
            return number
        return self.real() if _is_real(token) else self.dim()

    def access(self) -> TileAccess:
        buffer = self.word()
        self.at += 1
        index = self.several(self.dim, "]")
        axes = self.several(self.integer, ")") if self.field("axes") else []
        step = self.several(self.dim, ")") if self.field("step") else []
        valid = self.several(self.count, ")") if self.field("valid") else []
        return TileAccess(buffer, tuple(index), tuple(axes), tuple(step), tuple(valid))

    def field(self, name: str) -> bool:
        if self.token == name and self.tokens[self.at + 1] == "(":
            self.at += 2
            return True
        return False

    def count(self) -> Dim | None:
        return None if self.accept("*") else self.dim()

    def attr(self) -> tuple[str, Attr]:
        name = self.word()
        self.expect("=")
        token = self.token
        if token[:1] == '"':
            return name, self.string()
        if self.accept("["):
            return name, tuple(self.several(self.integer, "]"))
        return name, self.real() if _is_real(token) or token in _SPECIAL else self.integer()

    # -- statements

    def block(self, depth: int) -> tuple[tuple[Stmt, ...], tuple[Tile, ...]]:
        """Statements and what they yield, up to the closing bracket; what they define is not seen behind it."""
        if depth > MAX_DEPTH:
            self.fail("statements nested too deeply")
        outside = dict(self.tiles)
        stmts: list[Stmt] = []
        yields: list[Tile] = []
        while not self.accept("}"):
            if self.token == "yield":
                self.at += 1
                yields.append(self.tile())
                while self.accept(","):
                    yields.append(self.tile())
                self.expect("}")
                break
            stmts.append(self.stmt(depth))
        self.tiles = outside
        return tuple(stmts), tuple(yields)

    def stmt(self, depth: int) -> Stmt:
        at = self.at
        if self.accept("if"):
            pred = self.dim()
            self.expect("{")
            body, yields = self.block(depth + 1)
            if yields:
                self.fail("a condition yields nothing", at)
            return When(pred, body)
        outs: list[Tile] = []
        if self.token[:1] == "%":
            outs.append(self.defined())
            while self.accept(","):
                outs.append(self.defined())
            self.expect("=")
        stmt = self.loop(tuple(outs), depth) if self.accept("for") else self.instr(tuple(outs))
        self.define(outs)
        return stmt

    def instr(self, outs: tuple[Tile, ...]) -> Instr:
        op = self.token
        if op not in rows():
            self.fail("an instruction expected")
        self.at += 1
        args: list[Operand] = []
        if self.token == "(" and self.tokens[self.at + 1] == ")":
            self.at += 2
        else:
            args.append(self.operand())
            while self.accept(","):
                args.append(self.operand())
        attrs = self.several(self.attr, "}") if self.accept("{") else []
        return Instr(op, tuple(args), outs, tuple(attrs), self.loc())

    def loop(self, outs: tuple[Tile, ...], depth: int) -> Loop:
        var = self.word()
        self.expect("in")
        lo = self.dim()
        self.expect("..")
        hi = self.dim()
        step = self.integer() if self.accept("step") else 1
        kind = LoopKind.SERIAL
        if self.token in (LoopKind.PARALLEL.value, LoopKind.UNROLL.value):
            kind = LoopKind(self.token)
            self.at += 1
        given = self.access() if self.accept("at") else None
        outside = dict(self.tiles)
        carried = self.several(self.carry, ")") if self.field("carry") else []
        self.define([inner for inner, _ in carried])
        self.expect("{")
        body, yields = self.block(depth + 1)
        self.tiles = outside
        return Loop(var, lo, hi, step, kind, body, tuple(carried), yields, outs, given)

    def carry(self) -> tuple[Tile, Tile]:
        inner = self.defined()
        self.expect("=")
        return inner, self.tile()

    def kernel(self) -> Kernel:
        self.expect("kernel")
        name = self.word()
        self.expect("(")
        sizes = self.several(self.word, ")")
        loc = self.loc()
        self.expect("{")
        buffers: list[Buffer] = []
        while self.token in _KINDS:
            buffers.append(self.buffer())
        body, yields = self.block(0)
        if yields:
            self.fail("a kernel yields nothing", self.at - 1)
        return Kernel(name, tuple(sizes), tuple(buffers), body, loc)

    def buffer(self) -> Buffer:
        at = self.at
        kind = _KINDS[self.token]
        self.at += 1
        name = self.word()
        self.expect(":")
        dtype = self.dtype()
        self.expect("[")
        shape = tuple(self.several(self.dim, "]"))
        if self.field("stride"):
            return Buffer(name, kind, dtype, shape, tuple(self.several(self.dim, ")")))
        try:
            return Buffer(name, kind, dtype, shape, row_major(shape))
        except (HotfuseError, ValueError) as e:
            self.fail("a shape without strides", at, e)


def _is_real(token: str) -> bool:
    """Whether a token is a number that is not an integer."""
    return token[:1] in "-0123456789" and any(c in token for c in ".eE") and token[-1:].isdigit()
