"""Writing LLVM IR as text: modules, functions, vectors, and where a line goes.

A tile becomes rows of chunks: every row (all axes but the last) is cut along the last axis into vectors of the target's
lane count. The last chunk of a row may be a narrower power of two and may hold lanes that do not exist; their contents
mean nothing, and only loads, stores and reductions have to care. A width of 1 is a plain number, not a vector.

Values in registers: f16 and bf16 are their 16 bits, bool is one bit; everything else is LLVM's own type.
"""

from __future__ import annotations

import contextlib
import math
import struct
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import field
from functools import reduce

from hotfuse.base.errors import InternalError
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.dims import Dim, Sym, substitute, symbols
from hotfuse.ir.types import DType
from hotfuse.native.division import floored
from hotfuse.native.target import CpuTarget
from hotfuse.tile.program import Kernel, TileType

Lines = list["str | Lines"]
"""Text in order; an inner list is a place where lines are still to be added."""

_TYPE = {
    DType.F64: "double", DType.F32: "float", DType.F16: "i16", DType.BF16: "i16", DType.BOOL: "i1",
    DType.I64: "i64", DType.I32: "i32", DType.I16: "i16", DType.I8: "i8",
    DType.U64: "i64", DType.U32: "i32", DType.U16: "i16", DType.U8: "i8",
}  # fmt: skip
FLOATS = frozenset({DType.F64, DType.F32, DType.F16, DType.BF16})
HALVES = frozenset({DType.F16, DType.BF16})
UNSIGNED = frozenset({DType.U8, DType.U16, DType.U32, DType.U64, DType.BOOL})


def element(dtype: DType) -> str:
    """LLVM's type of one number in a register."""
    if dtype not in _TYPE:
        raise InternalError(f"no code generation for {dtype.value} tiles")
    return _TYPE[dtype]


def stored(dtype: DType) -> str:
    """LLVM's type of one number in memory."""
    return "i8" if dtype is DType.BOOL else element(dtype)


def vec(ty: str, width: int) -> str:
    """A vector type; a width of 1 is the number itself."""
    return ty if width == 1 else f"<{width} x {ty}>"


def suffix(ty: str, width: int) -> str:
    """How an intrinsic's name spells a type."""
    short = {"float": "f32", "double": "f64", "half": "f16", "ptr": "p0"}.get(ty, ty)
    return short if width == 1 else f"v{width}{short}"


def number(ty: str, value: float) -> str:
    """A literal of an LLVM type; fp32 is written as the double it equals."""
    if ty == "float":
        value = _as_f32(value)
    if ty in ("float", "double"):
        return f"0x{struct.unpack('<Q', struct.pack('<d', value))[0]:016X}"
    if ty == "i1":
        return "true" if value else "false"
    wrap = 1 << int(ty[1:])
    return str(int(value) % wrap)


def _as_f32(value: float) -> float:
    if math.isnan(value) or math.isinf(value):
        return value
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


def is_constant(operand: str) -> bool:
    """Whether an operand is a literal."""
    return not operand.startswith(("%", "@"))


@dataclass(slots=True)
class Val:
    """A tile in registers: for every row its chunks' names, with the chunks' widths."""

    type: TileType
    rows: list[list[str]]
    widths: tuple[int, ...]
    quads: list[str] | None = None
    """For four rows of bytes, or two of bf16, that were loaded column by column: per chunk, the columns as 32-bit lanes."""

    @property
    def cols(self) -> int:
        """Extent of the last axis."""
        return self.type.shape[-1] if self.type.shape else 1

    @property
    def ty(self) -> str:
        """LLVM's element type."""
        return element(self.type.dtype)


def row_count(shape: Sequence[int]) -> int:
    """How many rows a tile has."""
    return math.prod(shape[:-1])


@dataclass(slots=True)
class Module:
    """Functions, declarations and constants that become one object."""

    target: CpuTarget
    declared: dict[str, str] = field(default_factory=dict[str, str])
    defined: dict[str, Lines] = field(default_factory=dict[str, Lines])
    constants: dict[str, str] = field(default_factory=dict[str, str])
    attributes: str = ""

    def text(self) -> str:
        """The module as LLVM reads it."""
        lines: list[str] = [f'target triple = "{self.target.triple}"', ""]
        lines.extend(self.constants.values())
        lines.extend(text for name, text in self.declared.items() if name not in self.defined)
        for body in self.defined.values():
            lines.append("")
            lines.extend(flat(body))
        wide = (
            f'"prefer-vector-width"="{self.target.vl_bytes * 8}" "min-legal-vector-width"="{self.target.vl_bytes * 8}"'
        )
        tune = f' "tune-cpu"="{self.target.tune}"' if self.target.tune else ""
        lines.extend(["", f'attributes #0 = {{ nounwind "frame-pointer"="none" {wide}{tune} }}', "!0 = !{}", ""])
        return "\n".join(lines)


def flat(lines: Lines) -> Iterator[str]:
    """All lines, places filled in."""
    for line in lines:
        if isinstance(line, str):
            yield line
        else:
            yield from flat(line)


@dataclass(slots=True)
class CodeScope:
    """A loop's body or the function's entry: where lines go that depend on nothing further in."""

    depth: int
    lines: Lines
    memo: dict[object, str] = field(default_factory=dict[object, str])


class Fn:
    """A function being written: fresh names, the current block, and scopes to hoist into."""

    def __init__(self, module: Module, name: str, params: str, kernel: Kernel, result: str = "void") -> None:
        self.module = module
        self.target = module.target
        self.kernel = kernel
        entry: Lines = []
        self.allocas: Lines = []
        self.out: Lines = []
        self.block = "entry"
        self.scopes = [CodeScope(0, entry)]
        self.depth_of: dict[str, int] = {}
        """Depth of the scope in which a symbol gets its value."""
        self.symbol: dict[str, str] = {}
        """Symbols' operands: sizes and loop variables."""
        self.known: dict[str, int] = {}
        """Loop variables that are numbers: the loops around are written out."""
        self.tile_rows = 0
        """Rows of the tiles of a matrix unit that the function has taken; 0 where it has not."""
        self.at_exit: list[Callable[[], object]] = []
        """What gives back what the function took, written where it ends."""
        self._count = 0
        linkage = "" if result == "void" and params == "ptr %buffers, ptr %sizes" else "internal "
        module.defined[name] = [
            f"define {linkage}{result} @{name}({params}) #0 {{", "entry:", self.allocas, entry, self.out, "}",
        ]  # fmt: skip

    def fresh(self, stem: str = "v") -> str:
        """A name not used before."""
        self._count += 1
        return f"%{stem}{self._count}"

    def do(self, line: str) -> None:
        """A line without a result."""
        self.out.append("  " + line)

    def val(self, line: str) -> str:
        """A line with a result."""
        name = self.fresh()
        self.out.append(f"  {name} = {line}")
        return name

    def label(self, name: str) -> None:
        """Start a block."""
        self.out.append(f"{name}:")
        self.block = name

    def leave(self) -> None:
        """The function's end."""
        for give_back in reversed(self.at_exit):
            give_back()
        self.do("ret void")

    def labels(self, *stems: str) -> tuple[str, ...]:
        """Fresh block names of one construct."""
        self._count += 1
        return tuple(f"{s}{self._count}" for s in stems)

    def call(self, name: str, result: str, *args: tuple[str, str]) -> str:
        """Call a function, declaring it on first use."""
        self.module.declared.setdefault(name, f"declare {result} @{name}({', '.join(t for t, _ in args)})")
        text = f"call {result} @{name}({', '.join(f'{t} {v}' for t, v in args)})"
        if result == "void":
            self.do(text)
            return ""
        return self.val(text)

    def alloca(self, text: str) -> str:
        """Stack memory of the function, whatever block asks for it."""
        name = self.fresh("m")
        self.allocas.append(f"  {name} = alloca {text}")
        return name

    # ---- integer expressions -------------------------------------------------------------------------------------

    def fold(self, d: Dim) -> Dim:
        """The expression with the variables of written-out loops replaced by numbers."""
        if isinstance(d, int) or not self.known or symbols(d).isdisjoint(self.known):
            return d
        return substitute(d, self.known)

    def scope_of(self, d: Dim) -> CodeScope:
        """The outermost scope in which an expression has its value."""
        return self.scopes[max((self._depth(s) for s in symbols(d)), default=0)]

    def _depth(self, name: str) -> int:
        if name not in self.depth_of:
            raise InternalError(f"{name!r} is neither a size nor a loop variable here", where=self.kernel.name)
        return self.depth_of[name]

    @contextlib.contextmanager
    def at(self, scope: CodeScope) -> Generator[None]:
        """Write into a scope's beginning for a while; no block may be started there."""
        out, self.out = self.out, scope.lines
        try:
            yield
        finally:
            self.out = out

    def i64(self, d: Dim) -> str:
        """The operand of an integer expression, computed once per value of its variables."""
        d = self.fold(d)
        if isinstance(d, int):
            return str(d)
        if d.op == "sym":
            name = str(d.args[0])
            self._depth(name)
            return self.symbol[name]
        scope = self.scope_of(d)
        found = scope.memo.get(d)
        if found is None:
            operands = [self.i64(a) for a in d.args if not isinstance(a, str)]
            with self.at(scope):
                found = scope.memo[d] = self._integer(d, operands)
        return found

    def truth(self, d: Dim) -> str:
        """A predicate as one bit."""
        d = self.fold(d)
        if isinstance(d, int):
            return "true" if d else "false"
        return self.val(f"icmp ne i64 {self.i64(d)}, 0")

    def _integer(self, d: Sym, a: list[str]) -> str:
        chain = {"+": "add nsw i64", "*": "mul nsw i64"}
        if d.op in chain:
            return reduce(lambda x, y: self.val(f"{chain[d.op]} {x}, {y}"), a)
        if d.op in ("max", "min"):
            intrinsic = f"llvm.s{d.op}.i64"
            return reduce(lambda x, y: self.call(intrinsic, "i64", ("i64", x), ("i64", y)), a)
        compare = {"==": "eq", "!=": "ne", "<": "slt", "<=": "sle"}
        if d.op in compare:
            bit = self.val(f"icmp {compare[d.op]} i64 {a[0]}, {a[1]}")
            return self.val(f"zext i1 {bit} to i64")
        if d.op in ("and", "or", "not"):
            flags = [self.val(f"icmp {'eq' if d.op == 'not' else 'ne'} i64 {x}, 0") for x in a]
            bit = reduce(lambda x, y: self.val(f"{d.op} i1 {x}, {y}"), flags)
            return self.val(f"zext i1 {bit} to i64")
        if d.op in ("//", "%", "ceildiv"):
            return self._divide(d.op, a[0], a[1])
        if d.op == "**" and isinstance(d.args[1], int) and 0 < d.args[1] <= 8:
            return reduce(lambda x, y: self.val(f"mul nsw i64 {x}, {y}"), a[:1] * d.args[1])
        raise InternalError(f"no code generation for {d} in an index", where=self.kernel.name)

    def _divide(self, op: str, a: str, b: str) -> str:
        """Division rounding down; a divisor of zero gives anything, but never traps, because lines move out of branches."""
        if op == "ceildiv":
            negated = self.val(f"sub nsw i64 0, {a}")
            return self.val(f"sub nsw i64 0, {self._divide('//', negated, b)}")
        if is_constant(b) and int(b) > 0 and int(b) & (int(b) - 1) == 0:
            return self.val(f"ashr i64 {a}, {int(b).bit_length() - 1}" if op == "//" else f"and i64 {a}, {int(b) - 1}")
        if not is_constant(b):
            zero = self.val(f"icmp eq i64 {b}, 0")
            b = self.val(f"select i1 {zero}, i64 1, i64 {b}")
        elif int(b) == 0:
            b = "1"
        return floored(self.val, op, a, b)

    # ---- vectors -------------------------------------------------------------------------------------------------

    def widths(self, cols: int) -> tuple[int, ...]:
        """How a row is cut into chunks."""
        lanes = self.target.lanes
        full, rest = divmod(cols, lanes)
        return (lanes,) * full + ((1 << (rest - 1).bit_length(),) if rest else ())

    def splat(self, ty: str, width: int, scalar: str) -> str:
        """A vector of one number."""
        if width == 1:
            return scalar
        if is_constant(scalar):
            return f"splat ({ty} {scalar})"
        wide = vec(ty, width)
        one = self.val(f"insertelement {wide} poison, {ty} {scalar}, i64 0")
        return self.val(f"shufflevector {wide} {one}, {wide} poison, <{width} x i32> zeroinitializer")

    def lane(self, ty: str, width: int, vector: str, at: int) -> str:
        """One number of a vector."""
        if width == 1:
            return vector
        if vector.startswith("splat ("):
            return vector.removeprefix(f"splat ({ty} ").removesuffix(")")
        return self.val(f"extractelement {vec(ty, width)} {vector}, i64 {at}")

    def number_at(self, v: Val, row: int, col: int) -> str:
        """One number of a tile."""
        for name, w in zip(v.rows[row], v.widths, strict=True):
            if col < w:
                return self.lane(v.ty, w, name, col)
            col -= w
        raise InternalError(f"a tile of {v.cols} columns has no column {col}", where=self.kernel.name)

    def chunk(self, v: Val, row: int, at: int, width: int) -> str:
        """Chunk `at` of a row, repeated along the row if the row has one number only."""
        if v.widths == (1,):
            return self.splat(v.ty, width, v.rows[row][0])
        return v.rows[row][at]


def iota(ty: str, width: int, start: int = 0) -> str:
    """The constant start, start + 1, ..."""
    if width == 1:
        return str(start)
    return "<" + ", ".join(f"{ty} {start + i}" for i in range(width)) + ">"


def lane_mask(width: int, present: int) -> str:
    """A constant mask of the first lanes."""
    if width == 1:
        return "true" if present else "false"
    return "<" + ", ".join(f"i1 {'true' if i < present else 'false'}" for i in range(width)) + ">"
