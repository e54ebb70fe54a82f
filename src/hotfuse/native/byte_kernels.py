"""Passes over numbers and bytes that quantized files are made of, each as one loop: what runs before compiled code is there.

    quantize     bytes of floats: divided, rounded half to even, shifted, saturated; what is no number is the lowest byte
    dequantize   floats of bytes
    rounded      floats that were quantized and dequantized, without the bytes between
    dynamic      the range of floats, its scale and zero point, and their bytes by these
    to_floats    32-bit sums of products, less what the zero point of the rows adds, scaled column by column, with a bias and a ReLU
    to_bytes     32-bit sums of products as bytes
    added, multiplied   bytes of what two tensors of bytes stand for
    looked_up    bytes by a table of 256
    layer, conv, depthwise   whole layers (`native.byte_products`); not on every machine

The library has no single pass with ONNX's rounding for any of these. Nothing here depends on a model: the code is compiled once,
kept for later processes, and until it is there callers have the library's passes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from hotfuse.base.faults import is_begun, steady
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.base.once import once
from hotfuse.native import byte_products
from hotfuse.native.byte_products import AS_BYTES, AS_FLOATS, AS_ROUNDED, ROW_ARGUMENTS, ROWS
from hotfuse.native.function import entered, entry_symbols, with_entries
from hotfuse.native.jit import Loaded, load_object
from hotfuse.native.target import CpuTarget, host
from hotfuse.native.toolchain import helper_object

_WIDTH = 16
"""Elements that a loop takes at a time; what is left goes one by one."""
_NAMES = (
    "quantize", "dequantize_u", "dequantize_s", "rounded", "dynamic", "to_floats", "to_bytes", "added", "multiplied", "looked_up",
)  # fmt: skip
_LAYERS = ("layer", "conv", "depthwise")
_WIDEST = "0x47EC363CA0000000"
"""3e38: the widest range whose width is a float."""


class _BlockText:
    """Lines of a block in which every value has `width` elements; names carry the width, so that two blocks share a function."""

    def __init__(self, width: int) -> None:
        self.width, self.lines, self._count = width, list[str](), 0

    def type(self, element: str) -> str:
        return element if self.width == 1 else f"<{self.width} x {element}>"

    def new(self, right: str) -> str:
        self._count += 1
        name = f"%w{self.width}.{self._count}"
        self.lines.append(f"{name} = {right}")
        return name

    def splat(self, element: str, value: str) -> str:
        """A number in every place."""
        if self.width == 1:
            return value
        one = self.new(f"insertelement {self.type(element)} poison, {element} {value}, i64 0")
        places = f"<{self.width} x i32> zeroinitializer"
        return self.new(f"shufflevector {self.type(element)} {one}, {self.type(element)} poison, {places}")

    def load(self, element: str, base: str, index: str) -> str:
        at = self.new(f"getelementptr {element}, ptr {base}, i64 {index}")
        return self.new(f"load {self.type(element)}, ptr {at}, align 1")

    def store(self, element: str, value: str, base: str, index: str) -> None:
        at = self.new(f"getelementptr {element}, ptr {base}, i64 {index}")
        self.lines.append(f"store {self.type(element)} {value}, ptr {at}, align 1")

    def op(self, name: str, element: str, a: str, b: str) -> str:
        return self.new(f"{name} {self.type(element)} {a}, {b}")

    def cast(self, name: str, source: str, value: str, target: str) -> str:
        return self.new(f"{name} {self.type(source)} {value} to {self.type(target)}")

    def where(self, kind: str, a: str, b: str, value: str, other: str) -> str:
        """`value` where the comparison of floats holds."""
        mask = self.new(f"fcmp {kind} {self.type('float')} {a}, {b}")
        floats = self.type("float")
        return self.new(f"select {self.type('i1')} {mask}, {floats} {value}, {floats} {other}")

    def round(self, value: str) -> str:
        name = "f32" if self.width == 1 else f"v{self.width}f32"
        return self.new(f"call {self.type('float')} @llvm.roundeven.{name}({self.type('float')} {value})")

    def limited(self, value: str, low: str, high: str) -> str:
        """Within limits; the lower one where it is no number."""
        low, high = self.splat("float", low), self.splat("float", high)
        up = self.where("olt", value, low, low, value)
        down = self.where("ogt", up, high, high, up)
        return self.where("uno", down, down, low, down)

    def byte(self, value: str, zero: str, low: str, high: str) -> str:
        """Numbers in units of the scale, as bytes."""
        shifted = self.op("fadd", "float", self.round(value), self.splat("float", zero))
        return self.cast("trunc", "i32", self.cast("fptosi", "float", self.limited(shifted, low, high), "i32"), "i8")


Body = Callable[[_BlockText, str], None]
"""Writes what happens at one place, or at as many as there are in a vector."""


def _loop(name: str, arguments: str, body: Body) -> str:
    """`void name(arguments, i64 n)`: whole vectors, then single elements."""
    text = f"define void @hf_{name}({arguments}, i64 %n) {{\nentry:\n  %whole = and i64 %n, {-_WIDTH}\n  br label %head{_WIDTH}\n"
    for width, start, until, after in (
        (_WIDTH, ("0", "entry"), "%whole", "head1"),
        (1, ("%whole", f"head{_WIDTH}"), "%n", "done"),
    ):
        block = _BlockText(width)
        body(block, f"%i{width}")
        lines = "".join(f"  {line}\n" for line in block.lines)
        text += (
            f"head{width}:\n  %i{width} = phi i64 [{start[0]}, %{start[1]}], [%next{width}, %body{width}]\n"
            f"  %more{width} = icmp ult i64 %i{width}, {until}\n  br i1 %more{width}, label %body{width}, label %{after}\n"
            f"body{width}:\n{lines}  %next{width} = add i64 %i{width}, {width}\n  br label %head{width}\n"
        )
    return text + "done:\n  ret void\n}\n"


def _quantize(t: _BlockText, i: str) -> None:
    parts = t.op("fdiv", "float", t.load("float", "%x", i), t.splat("float", "%scale"))
    t.store("i8", t.byte(parts, "%zero", "%low", "%high"), "%y", i)


def _dequantize(extend: str) -> Body:
    def body(t: _BlockText, i: str) -> None:
        wide = t.cast(extend, "i8", t.load("i8", "%x", i), "i32")
        real = t.op("fsub", "float", t.cast("sitofp", "i32", wide, "float"), t.splat("float", "%zero"))
        t.store("float", t.op("fmul", "float", real, t.splat("float", "%scale")), "%y", i)

    return body


def _rounded(t: _BlockText, i: str) -> None:
    parts = t.round(t.op("fdiv", "float", t.load("float", "%x", i), t.splat("float", "%scale")))
    t.store("float", t.op("fmul", "float", t.limited(parts, "%low", "%high"), t.splat("float", "%scale")), "%y", i)


def _float_row(t: _BlockText, i: str) -> None:
    """A ReLU keeps what is no number, as the library's does."""
    shift = t.op("mul", "i32", t.load("i32", "%sums", i), t.splat("i32", "%zero"))
    total = t.cast("sitofp", "i32", t.op("sub", "i32", t.load("i32", "%x", i), shift), "float")
    unit = t.op("fmul", "float", t.splat("float", "%scale"), t.load("float", "%factor", i))
    y = t.op("fadd", "float", t.op("fmul", "float", total, unit), t.load("float", "%bias", i))
    t.store("float", t.where("olt", y, t.splat("float", "%floor"), t.splat("float", "%floor"), y), "%y", i)


def _byte_row(t: _BlockText, i: str) -> None:
    total = t.cast("sitofp", "i32", t.op("add", "i32", t.load("i32", "%x", i), t.load("i32", "%start", i)), "float")
    t.store(
        "i8", t.byte(t.op("fmul", "float", total, t.load("float", "%factor", i)), "%zero", "%low", "%high"), "%y", i
    )


def _of_two(op: str) -> Body:
    def body(t: _BlockText, i: str) -> None:
        sides: list[str] = []
        for side in ("a", "b"):
            wide = t.cast("zext", "i8", t.load("i8", f"%{side}", i), "i32")
            whole = t.cast("sitofp", "i32", t.op("xor", "i32", wide, t.splat("i32", f"%{side}.flip")), "float")
            real = t.op("fsub", "float", whole, t.splat("float", f"%{side}.zero"))
            sides.append(t.op("fmul", "float", real, t.splat("float", f"%{side}.scale")))
        both = t.op(op, "float", sides[0], sides[1])
        held = t.where("olt", both, t.splat("float", "%floor"), t.splat("float", "%floor"), both)
        parts = t.op("fdiv", "float", held, t.splat("float", "%scale"))
        t.store("i8", t.byte(parts, "%zero", "%low", "%high"), "%y", i)

    return body


_TWO = (
    "ptr %a, ptr %b, ptr %y, i32 %a.flip, float %a.zero, float %a.scale, i32 %b.flip, float %b.zero, float %b.scale, "
    "float %floor, float %scale, float %zero, float %low, float %high"
)


def _looked_up(t: _BlockText, i: str) -> None:
    """One by one: the table stays in the first cache."""
    for k in range(t.width):
        at = i if k == 0 else t.new(f"add i64 {i}, {k}")
        source = t.new(f"getelementptr i8, ptr %x, i64 {at}")
        place = t.new(f"zext i8 {t.new(f'load i8, ptr {source}')} to i64")
        found = t.new(f"load i8, ptr {t.new(f'getelementptr i8, ptr %table, i64 {place}')}")
        t.lines.append(f"store i8 {found}, ptr {t.new(f'getelementptr i8, ptr %y, i64 {at}')}")


def _finished(kind: int) -> Body:
    """Sums of a layer as what it makes."""

    def body(t: _BlockText, i: str) -> None:
        total = t.cast("sitofp", "i32", t.op("add", "i32", t.load("i32", "%x", i), t.load("i32", "%start", i)), "float")
        y = t.op("fadd", "float", t.op("fmul", "float", total, t.load("float", "%unit", i)), t.load("float", "%bias", i))
        y = t.where("olt", y, t.splat("float", "%floor"), t.splat("float", "%floor"), y)
        if kind == AS_FLOATS:
            t.store("float", y, "%y", i)
        elif kind == AS_BYTES:
            t.store("i8", t.byte(y, "%zero", "%low", "%high"), "%y", i)
        else:
            assert kind == AS_ROUNDED
            steps = t.limited(t.round(y), "%low", "%high")
            t.store("float", t.op("fmul", "float", steps, t.splat("float", "%scale")), "%y", i)

    return body


def _starts_and_units(t: _BlockText, i: str) -> None:
    """Starts and units of columns, from a zero point and a scale."""
    less = t.op("mul", "i32", t.load("i32", "%sums", i), t.splat("i32", "%zero"))
    t.store("i32", t.op("sub", "i32", t.splat("i32", "0"), less), "%start", i)
    t.store("float", t.op("fmul", "float", t.splat("float", "%scale"), t.load("float", "%factor", i)), "%unit", i)


def _turned(t: _BlockText, i: str) -> None:
    """Signed bytes as unsigned ones, 128 more."""
    t.store("i8", t.op("xor", "i8", t.load("i8", "%x", i), t.splat("i8", "-128")), "%y", i)


def _products_text(target: CpuTarget) -> str:
    """Whole layers; empty where there is no code for a machine."""
    if not byte_products.supported(target):
        return ""
    rows = [_loop(f"row_{name}", ROW_ARGUMENTS, _finished(kind)) for kind, (name, _) in ROWS.items()]
    told = "ptr %sums, ptr %factor, ptr %start, ptr %unit, i32 %zero, float %scale"
    return "\n".join((
        *rows, _loop("told", told, _starts_and_units), _loop("turned", "ptr %x, ptr %y", _turned), byte_products.text(target),
    ))  # fmt: skip


def _rows(name: str, row: str, arguments: Sequence[str], size: int) -> str:
    """`void name(ptr x, ptr y, i64 m, arguments, i64 n)`: a row's function for each of `m` rows of `n` 32-bit numbers, which make
    elements of `size` bytes."""
    given = ", ".join(arguments)
    return f"""
define void @hf_{name}(ptr %x, ptr %y, i64 %m, {given}, i64 %n) {{
entry:
  br label %head
head:
  %i = phi i64 [0, %entry], [%next, %body]
  %more = icmp ult i64 %i, %m
  br i1 %more, label %body, label %done
body:
  %at = mul i64 %i, %n
  %from = getelementptr i32, ptr %x, i64 %at
  %to = getelementptr [{size} x i8], ptr %y, i64 %at
  call void @hf_{row}(ptr %from, ptr %to, {given}, i64 %n)
  %next = add i64 %i, 1
  br label %head
done:
  ret void
}}
"""


def _dynamic_text() -> str:
    """`i64 dynamic(ptr x, ptr y, ptr found, float flip, i64 n)`: bytes less `flip` (128: signed ones), and scale and zero point;
    0 where the range has no scale in floats."""
    floats, wide = f"<{_WIDTH} x float>", f"v{_WIDTH}f32"
    return f"""
define i64 @hf_dynamic(ptr %x, ptr %y, ptr %found, float %flip, i64 %n) {{
entry:
  %whole = and i64 %n, {-_WIDTH}
  br label %wide
wide:
  %i = phi i64 [0, %entry], [%i.next, %wide.body]
  %low = phi {floats} [zeroinitializer, %entry], [%low.next, %wide.body]
  %high = phi {floats} [zeroinitializer, %entry], [%high.next, %wide.body]
  %odd = phi <{_WIDTH} x i1> [zeroinitializer, %entry], [%odd.next, %wide.body]
  %more = icmp ult i64 %i, %whole
  br i1 %more, label %wide.body, label %wide.end
wide.body:
  %at = getelementptr float, ptr %x, i64 %i
  %v = load {floats}, ptr %at, align 4
  %less = fcmp olt {floats} %v, %low
  %low.next = select <{_WIDTH} x i1> %less, {floats} %v, {floats} %low
  %above = fcmp ogt {floats} %v, %high
  %high.next = select <{_WIDTH} x i1> %above, {floats} %v, {floats} %high
  %nan = fcmp uno {floats} %v, %v
  %odd.next = or <{_WIDTH} x i1> %odd, %nan
  %i.next = add i64 %i, {_WIDTH}
  br label %wide
wide.end:
  %least = call float @llvm.vector.reduce.fmin.{wide}({floats} %low)
  %most = call float @llvm.vector.reduce.fmax.{wide}({floats} %high)
  %any = call i1 @llvm.vector.reduce.or.v{_WIDTH}i1(<{_WIDTH} x i1> %odd)
  br label %one
one:
  %j = phi i64 [%whole, %wide.end], [%j.next, %one.body]
  %l = phi float [%least, %wide.end], [%l.next, %one.body]
  %h = phi float [%most, %wide.end], [%h.next, %one.body]
  %o = phi i1 [%any, %wide.end], [%o.next, %one.body]
  %one.more = icmp ult i64 %j, %n
  br i1 %one.more, label %one.body, label %known
one.body:
  %one.at = getelementptr float, ptr %x, i64 %j
  %e = load float, ptr %one.at, align 4
  %e.less = fcmp olt float %e, %l
  %l.next = select i1 %e.less, float %e, float %l
  %e.above = fcmp ogt float %e, %h
  %h.next = select i1 %e.above, float %e, float %h
  %e.nan = fcmp uno float %e, %e
  %o.next = or i1 %o, %e.nan
  %j.next = add i64 %j, 1
  br label %one
known:
  %range = fsub float %h, %l
  %too.wide = fcmp ugt float %range, {_WIDEST}
  %none = fcmp oeq float %h, %l
  %width = select i1 %none, float 1.0, float %range
  %scale = fdiv float %width, 255.0
  %vanishes = fcmp oeq float %scale, 0.0
  %bad = or i1 %o, %too.wide
  %refused = or i1 %bad, %vanishes
  br i1 %refused, label %not, label %good
good:
  %neg = fneg float %l
  %raw = fdiv float %neg, %scale
  %over = fcmp ogt float %raw, 255.0
  %held = select i1 %over, float 255.0, float %raw
  %zero = call float @llvm.roundeven.f32(float %held)
  store float %scale, ptr %found, align 4
  %found1 = getelementptr float, ptr %found, i64 1
  store float %zero, ptr %found1, align 4
  %shift = fsub float %zero, %flip
  %lowest = fneg float %flip
  %highest = fsub float 255.0, %flip
  call void @hf_quantize(ptr %x, ptr %y, float %scale, float %shift, float %lowest, float %highest, i64 %n)
  ret i64 1
not:
  ret i64 0
}}
"""


def _module_text(target: CpuTarget) -> str:
    scaled = "ptr %x, ptr %y, float %scale, float %zero"
    limits = ("float %zero", "float %low", "float %high")
    floats = ("ptr %sums", "i32 %zero", "float %scale", "ptr %factor", "ptr %bias", "float %floor")
    parts = [
        "declare float @llvm.roundeven.f32(float)",
        f"declare <{_WIDTH} x float> @llvm.roundeven.v{_WIDTH}f32(<{_WIDTH} x float>)",
        f"declare float @llvm.vector.reduce.fmin.v{_WIDTH}f32(<{_WIDTH} x float>)",
        f"declare float @llvm.vector.reduce.fmax.v{_WIDTH}f32(<{_WIDTH} x float>)",
        f"declare i1 @llvm.vector.reduce.or.v{_WIDTH}i1(<{_WIDTH} x i1>)",
        _loop("quantize", f"{scaled}, float %low, float %high", _quantize),
        _loop("dequantize_u", scaled, _dequantize("zext")),
        _loop("dequantize_s", scaled, _dequantize("sext")),
        _loop("rounded", "ptr %x, ptr %y, float %scale, float %low, float %high", _rounded),
        _dynamic_text(),
        _loop("float_row", ", ".join(("ptr %x", "ptr %y", *floats)), _float_row),
        _loop("byte_row", ", ".join(("ptr %x", "ptr %y", "ptr %start", "ptr %factor", *limits)), _byte_row),
        _rows("to_floats", "float_row", floats, 4),
        _rows("to_bytes", "byte_row", ("ptr %start", "ptr %factor", *limits), 1),
        _loop("added", _TWO, _of_two("fadd")),
        _loop("multiplied", _TWO, _of_two("fmul")),
        _loop("looked_up", "ptr %x, ptr %y, ptr %table", _looked_up),
        _products_text(target),
    ]
    return "\n".join(parts)


@dataclass(frozen=True, slots=True)
class ByteKernels:
    """The passes as functions of addresses and numbers; they let the interpreter lock go."""

    quantize: Callable[..., Any]
    """x, y, scale, zero, low, high, n"""
    dequantize_u: Callable[..., Any]
    """x, y, scale, zero, n"""
    dequantize_s: Callable[..., Any]
    rounded: Callable[..., Any]
    """x, y, scale, low, high (numbers of steps), n"""
    dynamic: Callable[..., Any]
    """x, y, found (scale and zero point), flip, n -> 0 where the range has no scale"""
    to_floats: Callable[..., Any]
    """x, y, rows, sums of columns, zero, scale, factors, bias, least result, columns"""
    to_bytes: Callable[..., Any]
    """x, y, rows, starts, factors, zero, low, high, columns"""
    added: Callable[..., Any]
    """a, b, y, a's flip, zero and scale, b's, least result, scale, zero, low, high, n"""
    multiplied: Callable[..., Any]
    looked_up: Callable[..., Any]
    """x, y, table, n"""
    layer: Callable[..., Any] | None
    """x, y, rows, scratch, table, scale, zero -> 0 where the range has no scale"""
    conv: Callable[..., Any] | None
    """x, y, pixels, scratch, table, height, width, rows, columns"""
    depthwise: Callable[..., Any] | None
    """the same"""


def _names(target: CpuTarget) -> tuple[str, ...]:
    return (*_NAMES, *_LAYERS) if byte_products.supported(target) else _NAMES


def load_kernels(target: CpuTarget) -> tuple[ByteKernels, Loaded]:
    """The passes made for a machine, and the code, which has to be kept."""
    names = _names(target)
    text = with_entries(_module_text(target), [f"hf_{n}" for n in names])
    code = load_object(helper_object(text, target), [f"py_hf_{n}" for n in names], entry_symbols())
    made = {n: entered(code, f"hf_{n}") for n in names}
    return ByteKernels(**{n: made.get(n) for n in (*_NAMES, *_LAYERS)}), code  # pyright: ignore[reportArgumentType]


@once
def byte_kernels() -> ByteKernels:
    """The passes, for callers that wait until they are compiled, as everything does that is made once in a process."""
    made, code = load_kernels(host())
    _kept.append(code)
    return made


_kept: list[Loaded] = []


class _BackgroundKernels:
    """Has the passes compiled in the background, once in a process."""

    def __init__(self) -> None:
        self.kernels: ByteKernels | None = None
        self._begun = False

    def begin(self) -> None:
        """Have them made, unless somebody has."""
        if not self._begun:
            self._begun = True
            is_begun(steady(self._make, "hotfuse-byte-kernels"))

    def _make(self) -> None:
        """Callers stay with the library's passes where it fails, which is counted. Calls may need what is made once: none waits
        for this."""
        self.kernels, code = load_kernels(host())
        _kept.append(code)

    def after_fork(self) -> None:
        """In a forked child: who was at it is in the parent, and the next that asks begins anew."""
        self._begun = self.kernels is not None


background = _BackgroundKernels()
os.register_at_fork(after_in_child=background.after_fork)
