"""Elementwise arithmetic: one small function per `map.*` instruction, over a chunk of the type it computes in.

Every function takes the chunk's dtype, width and operands. Half precision arrives widened to fp32 and is rounded by the caller.
Integer division never traps: by zero it gives zero, and the one quotient that does not fit wraps.
"""

from __future__ import annotations

from collections.abc import Callable

from hotfuse.backends.llvm.emission import convert
from hotfuse.backends.llvm.emission.code import FLOATS, HALVES, UNSIGNED, Fn, Val, element, is_constant, suffix, vec
from hotfuse.backends.llvm.emission.state import FunctionState, lanewise
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.types import DType, bits
from hotfuse.tile.program import Instr


@dataclass(frozen=True, slots=True)
class Chunk:
    """The type and width a chunk is computed in, with the shorthands emission reads by."""

    fn: Fn
    dtype: DType
    width: int

    @property
    def ty(self) -> str:
        """LLVM's vector type."""
        return vec(element(self.dtype), self.width)

    @property
    def bit(self) -> str:
        """LLVM's type of a comparison."""
        return vec("i1", self.width)

    @property
    def name(self) -> str:
        """The type in an intrinsic's name."""
        return suffix(element(self.dtype), self.width)

    @property
    def real(self) -> bool:
        """Whether elements are floats."""
        return self.dtype in FLOATS

    def const(self, value: float) -> str:
        """A literal."""
        return convert.literal(self.fn, self.dtype, self.width, value)

    def op(self, name: str, a: str, b: str) -> str:
        """A two-operand instruction."""
        return self.fn.val(f"{name} {self.ty} {a}, {b}")

    def pick(self, cond: str, a: str, b: str) -> str:
        """A select."""
        return self.fn.val(f"select {self.bit} {cond}, {self.ty} {a}, {self.ty} {b}")

    def call(self, intrinsic: str, *args: str) -> str:
        """An intrinsic over this type."""
        return self.fn.call(f"llvm.{intrinsic}.{self.name}", self.ty, *((self.ty, a) for a in args))

    def flags(self, name: str, a: str, b: str) -> str:
        """A two-operand instruction on comparison results."""
        return self.fn.val(f"{name} {self.bit} {a}, {b}")

    def fma(self, a: str, b: str, c: str) -> str:
        """a * b + c with one rounding where the machine can; otherwise in fp64, which holds the product of two fp32."""
        if self.fn.target.fma or self.dtype is DType.F64:
            return self.call("fma", a, b, c)
        wide = Chunk(self.fn, DType.F64, self.width)
        x, y, z = (convert.cast(self.fn, DType.F32, DType.F64, self.width, v) for v in (a, b, c))
        total = wide.op("fadd", wide.op("fmul", x, y), z)
        return convert.cast(self.fn, DType.F64, DType.F32, self.width, total)


Function = Callable[[Chunk, list[str]], str]


def _plain(real: str, whole: str, unsigned: str | None = None) -> Function:
    def f(c: Chunk, a: list[str]) -> str:
        name = real if c.real else unsigned if unsigned and c.dtype in UNSIGNED else whole
        return c.op(name, a[0], a[1])

    return f


def _intrinsic(name: str) -> Function:
    return lambda c, a: c.call(name, *a)


def _special_divisor(c: Chunk, b: str) -> tuple[str, str | None, str]:
    """Where the divisor is zero, where it is -1 (signed only), and a divisor that is safe."""
    zero = c.op("icmp eq", b, c.const(0))
    if c.dtype in UNSIGNED:
        return zero, None, c.pick(zero, c.const(1), b)
    minus = c.op("icmp eq", b, c.const(-1))
    return zero, minus, c.pick(c.flags("or", zero, minus), c.const(1), b)


def truncdiv(c: Chunk, a: list[str]) -> str:
    """Integer division towards zero."""
    zero, minus, safe = _special_divisor(c, a[1])
    q = c.op("udiv" if minus is None else "sdiv", a[0], safe)
    if minus is not None:
        q = c.pick(minus, c.op("sub", c.const(0), a[0]), q)
    return c.pick(zero, c.const(0), q)


def remainder(c: Chunk, a: list[str]) -> str:
    """What is left of truncated division: the dividend's sign."""
    if c.real:
        return c.op("frem", a[0], a[1])
    zero, minus, safe = _special_divisor(c, a[1])
    r = c.op("urem" if minus is None else "srem", a[0], safe)
    return c.pick(zero, c.const(0), r)


def modulo(c: Chunk, a: list[str]) -> str:
    """The remainder with the divisor's sign."""
    r = remainder(c, a)
    if not c.real and c.dtype in UNSIGNED:
        return r
    less, unequal, add = ("fcmp olt", "fcmp une", "fadd") if c.real else ("icmp slt", "icmp ne", "add")
    zero = c.const(0)
    differ = c.flags("xor", c.op(less, r, zero), c.op(less, a[1], zero))
    wrong = c.flags("and", differ, c.op(unequal, r, zero))
    return c.pick(wrong, c.op(add, r, a[1]), r)


def floordiv(c: Chunk, a: list[str]) -> str:
    """Integer division rounding down."""
    q = truncdiv(c, a)
    if c.dtype in UNSIGNED:
        return q
    r = c.op("sub", a[0], c.op("mul", q, a[1]))
    differ = c.flags("xor", c.op("icmp slt", r, c.const(0)), c.op("icmp slt", a[1], c.const(0)))
    inexact = c.flags("and", c.op("icmp ne", r, c.const(0)), c.op("icmp ne", a[1], c.const(0)))
    down = c.flags("and", differ, inexact)
    return c.op("add", q, c.fn.val(f"sext {c.bit} {down} to {c.ty}"))


def _is_number(operand: str) -> bool:
    """Whether an operand is a literal other than NaN."""
    return is_constant(operand) and "0x7FF8" not in operand


def _extreme(*, greater: bool) -> Function:
    def f(c: Chunk, a: list[str]) -> str:
        x, y = a
        if not c.real:
            return c.call(("u" if c.dtype in UNSIGNED else "s") + ("max" if greater else "min"), x, y)
        # The machine's own maximum gives its second operand when either is NaN, so a literal goes first.
        if _is_number(y):
            x, y = y, x
        best = c.pick(c.op("fcmp ogt" if greater else "fcmp olt", x, y), x, y)
        return best if _is_number(x) else c.pick(c.op("fcmp uno", x, x), x, best)

    return f


def negate(c: Chunk, a: list[str]) -> str:
    """Minus x."""
    return c.fn.val(f"fneg {c.ty} {a[0]}") if c.real else c.op("sub", c.const(0), a[0])


def magnitude(c: Chunk, a: list[str]) -> str:
    """|x|; the least integer stays itself."""
    if c.real:
        return c.call("fabs", a[0])
    if c.dtype in UNSIGNED:
        return a[0]
    return c.fn.call(f"llvm.abs.{c.name}", c.ty, (c.ty, a[0]), ("i1", "false"))


def sign(c: Chunk, a: list[str]) -> str:
    """-1, 0 or 1; NaN gives 0."""
    greater, less = (
        ("fcmp ogt", "fcmp olt") if c.real else ("icmp ugt" if c.dtype in UNSIGNED else "icmp sgt", "icmp slt")
    )
    up = c.pick(c.op(greater, a[0], c.const(0)), c.const(1), c.const(0))
    if not c.real and c.dtype in UNSIGNED:
        return up
    return c.pick(c.op(less, a[0], c.const(0)), c.const(-1), up)


def integer_power(c: Chunk, a: list[str]) -> str:
    """Repeated squaring over all bits of the exponent; with a negative one only 1 and -1 have powers other than zero."""
    fn = c.fn
    loop, done = fn.labels("pow", "powered")
    before = fn.block
    fn.do(f"br label %{loop}")
    fn.label(loop)
    names = [fn.fresh("p") for _ in range(8)]
    i, result, base, left, i1, result1, base1, left1 = names
    one = c.const(1)
    fn.out.append(f"  {i} = phi i32 [0, %{before}], [{i1}, %{loop}]")
    for phi, first, then in ((result, one, result1), (base, a[0], base1), (left, a[1], left1)):
        fn.out.append(f"  {phi} = phi {c.ty} [{first}, %{before}], [{then}, %{loop}]")
    odd = c.op("icmp ne", c.op("and", left, one), c.const(0))
    product = c.op("mul", result, base)
    fn.out.append(f"  {result1} = select {c.bit} {odd}, {c.ty} {product}, {c.ty} {result}")
    fn.out.append(f"  {base1} = mul {c.ty} {base}, {base}")
    fn.out.append(f"  {left1} = lshr {c.ty} {left}, {one}")
    fn.out.append(f"  {i1} = add i32 {i}, 1")
    more = fn.val(f"icmp ult i32 {i1}, {bits(c.dtype)}")
    fn.do(f"br i1 {more}, label %{loop}, label %{done}")
    fn.label(done)
    if c.dtype in UNSIGNED:
        return result1
    odd = c.op("icmp ne", c.op("and", a[1], one), c.const(0))
    minus = c.pick(odd, c.const(-1), one)
    units = c.pick(c.op("icmp eq", a[0], c.const(-1)), minus, c.const(0))
    units = c.pick(c.op("icmp eq", a[0], one), one, units)
    return c.pick(c.op("icmp slt", a[1], c.const(0)), units, result1)


def _shift(*, left: bool) -> Function:
    def f(c: Chunk, a: list[str]) -> str:
        size = bits(c.dtype)
        inside = c.op("icmp ult", a[1], c.const(size))
        amount = c.pick(inside, a[1], c.const(0))
        if left:
            return c.pick(inside, c.op("shl", a[0], amount), c.const(0))
        if c.dtype in UNSIGNED:
            return c.pick(inside, c.op("lshr", a[0], amount), c.const(0))
        return c.op("ashr", a[0], c.pick(inside, a[1], c.const(size - 1)))

    return f


def invert(c: Chunk, a: list[str]) -> str:
    """All bits turned over."""
    return c.op("xor", a[0], c.const(1 if c.dtype is DType.BOOL else -1))


def fused(c: Chunk, a: list[str]) -> str:
    """a * b + c."""
    return c.fma(a[0], a[1], a[2])


def reciprocal(c: Chunk, a: list[str]) -> str:
    """1 / x."""
    return c.op("fdiv", c.const(1), a[0])


def reciprocal_root(c: Chunk, a: list[str]) -> str:
    """1 / sqrt(x); both steps round correctly, which is within one unit in the last place."""
    return c.op("fdiv", c.const(1), c.call("sqrt", a[0]))


ARITHMETIC: dict[str, Function] = {
    "add": _plain("fadd", "add"),
    "sub": _plain("fsub", "sub"),
    "mul": _plain("fmul", "mul"),
    "div": _plain("fdiv", "sdiv"),
    "truncdiv": truncdiv,
    "floordiv": floordiv,
    "rem": remainder,
    "mod": modulo,
    "fma": fused,
    "max": _extreme(greater=True),
    "min": _extreme(greater=False),
    "neg": negate,
    "abs": magnitude,
    "sign": sign,
    "sqrt": _intrinsic("sqrt"),
    "rsqrt": reciprocal_root,
    "recip": reciprocal,
    "floor": _intrinsic("floor"),
    "ceil": _intrinsic("ceil"),
    "round": _intrinsic("rint"),
    "trunc": _intrinsic("trunc"),
    "and": _plain("and", "and"),
    "or": _plain("or", "or"),
    "xor": _plain("xor", "xor"),
    "not": invert,
    "shl": _shift(left=True),
    "shr": _shift(left=False),
}

_COMPARE = {
    "eq": ("fcmp oeq", "icmp eq", "icmp eq"),
    "ne": ("fcmp une", "icmp ne", "icmp ne"),
    "lt": ("fcmp olt", "icmp slt", "icmp ult"),
    "le": ("fcmp ole", "icmp sle", "icmp ule"),
    "gt": ("fcmp ogt", "icmp sgt", "icmp ugt"),
    "ge": ("fcmp oge", "icmp sge", "icmp uge"),
}


def _compare(name: str) -> Function:
    real, signed, unsigned = _COMPARE[name]
    return _plain(real, signed, unsigned)


TESTS: dict[str, Function] = {
    **{name: _compare(name) for name in _COMPARE},
    "isnan": lambda c, a: c.op("fcmp uno", a[0], a[0]),
    "isinf": lambda c, a: c.op("fcmp oeq", c.call("fabs", a[0]), c.const(float("inf"))),
}
"""Functions whose result is a comparison's bit."""


def emit_map(function: Function, *, is_test: bool = False) -> Callable[[FunctionState, Instr], Val]:
    """The emission of an elementwise instruction."""

    def emit(s: FunctionState, instr: Instr) -> Val:
        fn, args, out = s.fn, s.tiles(instr), instr.outs[0].type
        dtype = args[0].type.dtype

        def one(width: int, x: list[str]) -> str:
            wide = [convert.widen(fn, dtype, width, v) for v in x]
            result = function(Chunk(fn, convert.compute_type(dtype), width), wide)
            return result if is_test or dtype not in HALVES else convert.narrow(fn, dtype, width, result)

        return lanewise(fn, out, args, one)

    return emit


def emit_select(s: FunctionState, instr: Instr) -> Val:
    """`map.select`: a bool tile chooses, element by element."""
    args, out = s.tiles(instr), instr.outs[0].type

    def one(width: int, x: list[str]) -> str:
        return Chunk(s.fn, out.dtype, width).pick(x[0], x[1], x[2])

    return lanewise(s.fn, out, args, one)
