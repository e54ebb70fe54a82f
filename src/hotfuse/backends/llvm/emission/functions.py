"""Exponentials, logarithms, trigonometry and their kin, as inline vector code.

fp32 on machines with fused multiply-add: range reduction and a polynomial (see `coefficients`), within 2 units in the last
place of the true value over the whole range, special values included, nothing flushed (exceptions: `decay`, within
3e-7 + 4e-9 |x| of it, and `normal`, whose error is absolute, 1.5e-7). Everything else (fp64, and fp32 on
machines without fused multiply-add) calls the C library's double-precision function lane by lane.

Selects are written `x > limit ? limit : x`, which keeps NaN and is one instruction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from hotfuse.backends.llvm.emission import coefficients as k
from hotfuse.backends.llvm.emission import convert
from hotfuse.backends.llvm.emission.arith import Chunk, Function
from hotfuse.backends.llvm.emission.code import suffix, vec
from hotfuse.backends.llvm.emission.float_formulas import MAGIC, MAGIC64, FloatFormulas
from hotfuse.ir.types import DType

_LOG2E, _LN2_HI, _LN2_LO = 1.4426950408889634, 0.693145751953125, 1.42860682030941723212e-6
_LN2_F32 = 0.693147182464599609375
"""ln 2 as fp32 has it."""
_LOG2E_F32 = 1.44269502162933349609375
"""log2(e) as fp32 has it."""
_SQRT_HALF = 0x3F3504F3
_INF, _NAN = math.inf, math.nan


# ---- exponentials --------------------------------------------------------------------------------------------------------


_MIN_POWER = -150.5
"""p 2^n is 0 in fp32 for every whole n below it: p is at most sqrt(2), and half of the least denormal rounds to 0."""


def _scaled(r: FloatFormulas, p: str, n_float: str, n: str, *, narrow: bool = False) -> str:
    """p * 2^n: one instruction, or two exact half steps where the result may overflow or be denormal (not `narrow`).

    Lanes whose result is 0 are not multiplied. Intel's processors have microcode handle a result that underflows, 400 cycles for a
    vector, and what a mask hides is 2^-inf: attention with masks took three times as long there.
    """
    if narrow:
        return _scalef(r, p, n_float, "-1") if _has_scalef(r) else r.mul(p, r.two_to(n))
    counts = r.test("ugt", n_float, _MIN_POWER)  # NaN stays
    if _has_scalef(r):
        return _scalef(r, p, n_float, r.fn.val(f"bitcast <16 x i1> {counts} to i16"))
    n = r.whole.pick(counts, n, r.whole.const(0))
    half = r.int("ashr", n, 1)
    return r.pick(counts, r.mul(r.mul(p, r.two_to(half)), r.two_to(r.int("sub", n, half))), 0.0)


def _has_scalef(r: FloatFormulas) -> bool:
    """Whether p * 2^n is one instruction."""
    return r.fn.target.name == "avx512" and r.width == 16


def _scalef(r: FloatFormulas, p: str, n_float: str, mask: str) -> str:
    """That instruction; 0 in lanes that the mask leaves out."""
    ty = r.c.ty
    return r.fn.call(
        "llvm.x86.avx512.mask.scalef.ps.512", ty, (ty, p), (ty, n_float), (ty, r.const(0.0)), ("i16", mask), ("i32", "4")
    )


def _without_twos(r: FloatFormulas, x: str) -> tuple[str, str, str]:
    """e^x = e^rest * 2^n: the rest, and n as float and integer."""
    n_float, n = r.rounded(r.fma(x, _LOG2E, MAGIC))
    return r.fma(n_float, -_LN2_LO, r.fma(n_float, -_LN2_HI, x)), n_float, n


def _exp_reduced(r: FloatFormulas, x: str) -> tuple[str, str, str]:
    """e^x = (1 + p) * 2^n: p, and n as float and integer."""
    rest, n_float, n = _without_twos(r, x)
    p = r.fma(r.poly(rest, k.EXP), r.mul(rest, rest), rest)
    return p, n_float, n


def exp(c: Chunk, a: list[str]) -> str:
    """e^x."""
    r = FloatFormulas(c)
    x = r.at_least(r.at_most(a[0], 89.0), -105.0)
    rest, n_float, n = _without_twos(r, x)
    return _scaled(r, r.poly(rest, (1.0, 1.0, *k.EXP)), n_float, n)


def decay(c: Chunk, a: list[str]) -> str:
    """e^x for x <= 0, with two multiplications less: the relative error grows with |x| as that of a rounded x does."""
    r = FloatFormulas(c)
    x = r.at_least(a[0], -105.0)
    n_float, n = r.rounded(r.fma(x, _LOG2E, MAGIC))
    rest = r.fma(n_float, -_LN2_F32, x)
    return _scaled(r, r.poly(rest, (1.0, 1.0, *k.EXP_SHORT)), n_float, n)


def exp2(c: Chunk, a: list[str]) -> str:
    """2^x."""
    r = FloatFormulas(c)
    x = r.at_least(r.at_most(a[0], 129.0), -151.0)
    n_float, n = r.rounded(r.add(x, MAGIC))
    rest = r.sub(x, n_float)
    return _scaled(r, r.fma(rest, r.poly(rest, k.EXP2), 1.0), n_float, n)


def expm1(c: Chunk, a: list[str]) -> str:
    """e^x - 1 = 2 (p s + s - 1/2) with s = 2^(n-1), which overflows only with the result; tiny x is its own answer."""
    r = FloatFormulas(c)
    x = r.at_least(r.at_most(a[0], 89.0), -30.0)
    p, _, n = _exp_reduced(r, x)
    s = r.two_to(r.int("sub", n, 1))
    half = r.fma(p, s, r.sub(s, 0.5))
    return r.pick(r.test("olt", r.abs(a[0]), 2.0**-25), a[0], r.add(half, half))


# ---- logarithms ----------------------------------------------------------------------------------------------------------


def _split(r: FloatFormulas, x: str) -> tuple[str, str]:
    """Positive x = 2^e (1 + f) with 1 + f between sqrt(1/2) and sqrt(2); denormals are scaled first."""
    tiny = r.test("olt", x, 2.0**-126)
    bits = r.bits(r.pick(tiny, r.mul(x, 2.0**23), x))
    shifted = r.int("sub", bits, _SQRT_HALF)
    e = r.from_int(r.int("ashr", shifted, 23))
    m = r.float(r.int("add", r.int("and", shifted, 0x7FFFFF), _SQRT_HALF))
    return r.add(e, r.pick(tiny, -23.0, 0.0)), r.sub(m, 1.0)


def _log_special(r: FloatFormulas, x: str, y: str) -> str:
    """Infinity, zero, negative numbers and NaN."""
    y = r.pick(r.test("oeq", x, _INF), _INF, y)
    y = r.pick(r.test("oeq", x, 0.0), -_INF, y)
    return r.pick(r.test("ult", x, 0.0), _NAN, y)


def _log_sum(r: FloatFormulas, e: str, f: str) -> str:
    """e ln2 + log(1 + f)."""
    tail = r.fma(e, _LN2_LO, r.mul(r.mul(f, f), r.poly(f, k.LOG)))
    return r.fma(e, _LN2_HI, r.add(f, tail))


def log(c: Chunk, a: list[str]) -> str:
    """The natural logarithm."""
    r = FloatFormulas(c)
    e, f = _split(r, a[0])
    return _log_special(r, a[0], _log_sum(r, e, f))


def log2(c: Chunk, a: list[str]) -> str:
    """e + f log2(e) + ..., the product f log2(e) carried in two numbers."""
    r = FloatFormulas(c)
    e, f = _split(r, a[0])
    high = r.mul(f, _LOG2E)
    low = r.fma(f, _LOG2E, r.neg(high))
    low = r.fma(f, _LOG2E - _LOG2E_F32, low)
    low = r.fma(r.mul(r.mul(f, f), r.poly(f, k.LOG)), _LOG2E, low)
    total = r.add(e, high)
    lost = r.sub(high, r.sub(total, e))
    return _log_special(r, a[0], r.add(total, r.add(low, lost)))


def log1p(c: Chunk, a: list[str]) -> str:
    """log(1 + x), what rounding 1 + x lost being added to f, where it is exact when it matters."""
    r = FloatFormulas(c)
    x = a[0]
    u = r.add(x, 1.0)
    one = r.sub(u, x)
    lost = r.add(r.sub(1.0, one), r.sub(x, r.sub(u, one)))
    bits = r.bits(u)
    shifted = r.int("sub", bits, _SQRT_HALF)
    n = r.int("ashr", shifted, 23)
    m = r.float(r.int("add", r.int("and", shifted, 0x7FFFFF), _SQRT_HALF))
    # 2^-n is a normal number for every n but the largest, whose lost part is far below the rounding.
    back = r.two_to(r.int("sub", r.whole.const(0), r.whole.call("smin", n, r.whole.const(126))))
    f = r.fma(lost, back, r.sub(m, 1.0))
    y = _log_sum(r, r.from_int(n), f)
    y = r.pick(r.test("oeq", x, _INF), _INF, y)
    y = r.pick(r.test("oeq", x, -1.0), -_INF, y)
    y = r.pick(r.test("ult", x, -1.0), _NAN, y)
    return r.pick(r.test("olt", r.abs(x), 2.0**-25), x, y)


# ---- trigonometry --------------------------------------------------------------------------------------------------------

_MAX_REDUCED = 2.0**40
"""Beyond this, reducing by two doubles of pi/2 is not exact enough and the C library does it."""


def _trigonometric(name: str, quarter: int) -> Function:
    """sin(x + quarter pi/2): reduced in fp64, evaluated in fp32; very large arguments take the slow road together."""

    def f(c: Chunk, a: list[str]) -> str:
        fn, width, x = c.fn, c.width, a[0]
        r, d = FloatFormulas(c), FloatFormulas(Chunk(fn, DType.F64, width))
        wide = convert.cast(fn, DType.F32, DType.F64, width, x)
        n_float, n = d.rounded(d.fma(wide, 2 / math.pi, MAGIC64))
        rest = d.fma(n_float, -6.123233995736766e-17, d.fma(n_float, -1.5707963267948966, wide))
        rest = convert.cast(fn, DType.F64, DType.F32, width, rest)
        quadrant = fn.val(f"trunc {d.whole.ty} {n} to {r.whole.ty}")
        if quarter:
            quadrant = r.int("add", quadrant, quarter)
        z = r.mul(rest, rest)
        sine = r.fma(r.mul(rest, z), r.poly(z, k.SIN), rest)
        cosine = r.fma(r.mul(z, z), r.poly(z, k.COS), r.fma(z, -0.5, 1.0))
        odd = r.int("icmp ne", r.int("and", quadrant, 1), 0)
        flip = r.int("shl", r.int("and", quadrant, 2), 30)
        near = r.float(r.int("xor", r.bits(r.pick(odd, cosine, sine)), flip))
        if not quarter:  # the sign of zero: 0 - 0 is +0 in the reduction
            near = r.pick(r.test("oeq", x, 0.0), x, near)
        far = r.test("uge", r.abs(x), _MAX_REDUCED)
        return _where_any(c, far, near, lambda: library(name)(c, [x]))

    return f


def _where_any(c: Chunk, mask: str, usual: str, rare: Callable[[], str]) -> str:
    """`usual`, but where any lane is masked a branch computes `rare` for all and the masked lanes take it."""
    fn, width = c.fn, c.width
    bit = mask
    if width > 1:
        packed = fn.val(f"bitcast {c.bit} {mask} to i{width}")
        bit = fn.val(f"icmp ne i{width} {packed}, 0")
    slow, join = fn.labels("slow", "join")
    before = fn.block
    fn.do(f"br i1 {bit}, label %{slow}, label %{join}")
    fn.label(slow)
    other = c.pick(mask, rare(), usual)
    after = fn.block
    fn.do(f"br label %{join}")
    fn.label(join)
    return fn.val(f"phi {c.ty} [{usual}, %{before}], [{other}, %{after}]")


# ---- tanh, erf, normal ----------------------------------------------------------------------------------------------------


def tanh(c: Chunk, a: list[str]) -> str:
    """A polynomial near zero, 1 - 2 / (e^2x + 1) elsewhere."""
    r = FloatFormulas(c)
    x, size = a[0], r.abs(a[0])
    z = r.mul(x, x)
    near = r.fma(r.mul(x, z), r.poly(z, k.TANH), x)
    far = r.at_most(size, 10.0)
    p, n_float, n = _exp_reduced(r, r.add(far, far))
    whole = r.add(_scaled(r, r.add(p, 1.0), n_float, n, narrow=True), 1.0)
    return r.signed_as(r.pick(r.test("olt", size, 0.55), near, r.sub(1.0, r.div(2.0, whole))), x)


def erf(c: Chunk, a: list[str]) -> str:
    """A polynomial near zero, 1 - erfc(x) elsewhere, erfc being two to the power of a polynomial."""
    r = FloatFormulas(c)
    x, size = a[0], r.abs(a[0])
    z = r.mul(x, x)
    near = r.fma(x, r.poly(z, k.ERF), x)
    t = r.at_most(size, 4.0)
    power = r.mul(t, r.poly(t, k.ERFC))
    n_float, n = r.rounded(r.add(power, MAGIC))
    rest = r.sub(power, n_float)
    complement = _scaled(r, r.fma(rest, r.poly(rest, k.EXP2_SHORT), 1.0), n_float, n, narrow=True)
    far = r.signed_as(r.sub(1.0, complement), x)
    return r.pick(r.test("olt", size, 0.92), near, far)


def normal(c: Chunk, a: list[str]) -> str:
    """The share below x: for -|x| two to the power of a polynomial, 1 less that for x > 0. Beyond the limit it is 0 in fp32."""
    r = FloatFormulas(c)
    x, t = a[0], r.at_most(r.abs(a[0]), 11.5)
    power = r.fma(t, r.poly(t, k.NORMAL), -1.0)
    n_float, n = r.rounded(r.add(power, MAGIC))
    rest = r.sub(power, n_float)
    below = _scaled(r, r.fma(rest, r.poly(rest, k.EXP2_SHORT), 1.0), n_float, n)
    return r.pick(r.test("ogt", x, 0.0), r.sub(1.0, below), below)


def _normal_slowly(c: Chunk, a: list[str]) -> str:
    """Like `normal`, by the C library's complement of the error function."""
    r = FloatFormulas(c)
    return r.mul(library("erfc")(c, [r.mul(a[0], -math.sqrt(0.5))]), 0.5)


# ---- power ---------------------------------------------------------------------------------------------------------------

_ATANH = tuple(2 / (math.log(2) * (2 * i + 1)) for i in range(7))
"""log2((1+s)/(1-s)) = s P(s^2): the series itself, |s| <= 0.1716, relative error below 2^-33."""
_EXP2_64 = tuple(math.log(2) ** i / math.factorial(i) for i in range(10))


def power(c: Chunk, a: list[str]) -> str:
    """x^y = 2^(y log2|x|) in fp64, which holds enough digits and every exponent; then the rules for signs and limits."""
    fn, width = c.fn, c.width
    r, d = FloatFormulas(c), FloatFormulas(Chunk(fn, DType.F64, width))
    x, y = a
    size = r.abs(x)
    base, exponent = (convert.cast(fn, DType.F32, DType.F64, width, v) for v in (size, y))
    shifted = d.int("sub", d.bits(base), 0x3FE6A09E667F3BCD)
    e = d.from_int(d.int("ashr", shifted, 52))
    m = d.float(d.int("add", d.int("and", shifted, (1 << 52) - 1), 0x3FE6A09E667F3BCD))
    s = d.div(d.sub(m, 1.0), d.add(m, 1.0))
    log = d.fma(s, d.poly(d.mul(s, s), _ATANH), e)
    log = d.pick(d.test("oeq", base, 0.0), -_INF, log)
    log = d.pick(d.test("ueq", base, _INF), base, log)  # NaN as well
    t = d.at_least(d.at_most(d.mul(exponent, log), 200.0), -200.0)
    n_float, n = d.rounded(d.add(t, MAGIC64))
    value = d.mul(d.poly(d.sub(t, n_float), _EXP2_64), d.two_to(n))
    result = convert.cast(fn, DType.F64, DType.F32, width, value)
    half = r.mul(y, 0.5)
    integer = c.op("fcmp oeq", c.call("rint", y), y)
    odd = c.flags("and", integer, c.op("fcmp une", c.call("rint", half), half))
    negative = r.int("icmp slt", r.bits(x), 0)
    result = r.pick(c.flags("and", odd, negative), r.neg(result), result)
    outside = c.flags("and", r.test("olt", x, 0.0), r.test("ogt", x, -_INF))
    outside = c.flags("and", outside, c.flags("xor", integer, r.c.fn.splat("i1", width, "true")))
    result = r.pick(outside, _NAN, result)
    result = r.pick(r.test("uno", y, y), y, result)
    unit = c.flags("and", r.test("oeq", x, -1.0), r.test("oeq", r.abs(y), _INF))
    ones = c.flags("or", c.flags("or", r.test("oeq", x, 1.0), r.test("oeq", y, 0.0)), unit)
    return r.pick(ones, 1.0, result)


# ---- the C library ---------------------------------------------------------------------------------------------------------


def library(name: str) -> Function:
    """The C library's double-precision function, lane by lane, in a helper of the module."""

    def f(c: Chunk, a: list[str]) -> str:
        fn, ty = c.fn, "double" if c.dtype is DType.F64 else "float"
        helper = f"library.{name}.{suffix(ty, c.width)}"
        module = fn.module
        module.declared.setdefault(name, f"declare double @{name}({', '.join('double' for _ in a)})")
        if helper not in module.defined:
            module.defined[helper] = list(_helper(helper, name, ty, c.width, len(a)))
        module.declared.setdefault(helper, "")
        return fn.val(f"call {c.ty} @{helper}({', '.join(f'{c.ty} {x}' for x in a)})")

    return f


def _helper(helper: str, name: str, ty: str, width: int, arity: int) -> Sequence[str]:
    wide = vec(ty, width)
    lines = [f"define internal {wide} @{helper}({', '.join(f'{wide} %x{i}' for i in range(arity))}) #0 {{"]
    result = "poison"
    for lane in range(width):
        args: list[str] = []
        for i in range(arity):
            x = f"%x{i}"
            if width > 1:
                lines.append(f"  %e{i}.{lane} = extractelement {wide} %x{i}, i64 {lane}")
                x = f"%e{i}.{lane}"
            if ty == "float":
                lines.append(f"  %d{i}.{lane} = fpext float {x} to double")
                x = f"%d{i}.{lane}"
            args.append(f"double {x}")
        lines.append(f"  %r{lane} = call double @{name}({', '.join(args)})")
        value = f"%r{lane}"
        if ty == "float":
            lines.append(f"  %f{lane} = fptrunc double %r{lane} to float")
            value = f"%f{lane}"
        if width > 1:
            lines.append(f"  %v{lane} = insertelement {wide} {result}, {ty} {value}, i64 {lane}")
            value = f"%v{lane}"
        result = value
    return [*lines, f"  ret {wide} {result}", "}"]


def _either(slowly: str | Function, vector: Function) -> Function:
    """The vector code where it applies, the C library elsewhere."""
    slow = library(slowly) if isinstance(slowly, str) else slowly
    return lambda c, a: vector(c, a) if c.dtype is DType.F32 and c.fn.target.fma else slow(c, a)


FUNCTIONS: dict[str, Function] = {
    "exp": _either("exp", exp),
    "decay": _either("exp", decay),
    "exp2": _either("exp2", exp2),
    "expm1": _either("expm1", expm1),
    "log": _either("log", log),
    "log2": _either("log2", log2),
    "log1p": _either("log1p", log1p),
    "sin": _either("sin", _trigonometric("sin", 0)),
    "cos": _either("cos", _trigonometric("cos", 1)),
    "tanh": _either("tanh", tanh),
    "erf": _either("erf", erf),
    "normal": _either(_normal_slowly, normal),
    "pow": _either("pow", power),
}
