"""Rows of arithmetic and activation functions; formulas and special cases are torch's."""

from __future__ import annotations

import math

from hotfuse.ir.types import DType
from hotfuse.lower.common.errors import CannotLower
from hotfuse.lower.ops.expand import HALVES, Computes, Expansion, Function, expands
from hotfuse.lower.ops.quotients import parts_of_reciprocal
from hotfuse.tile.program import Tile

_FLOAT = Computes.FLOAT
_SELU_ALPHA, _SELU_SCALE = 1.6732632423543772848170429916717, 1.0507009873554804934193349852946


def _unary(function: str) -> Function:
    return lambda e, x: e.map(function, x)


for _name in ("sqrt", "rsqrt", "exp", "exp2", "expm1", "log", "log2", "log1p", "sin", "cos", "tanh", "erf"):
    expands(_name, computes=_FLOAT)(_unary(_name))
expands("lower.decay")(_unary("decay"))
expands("special_erf", computes=_FLOAT)(_unary("erf"))
expands("special_exp2", computes=_FLOAT)(_unary("exp2"))
expands("special_expm1", computes=_FLOAT)(_unary("expm1"))
expands("special_log1p", computes=_FLOAT)(_unary("log1p"))
expands("reciprocal", computes=_FLOAT)(lambda e, x: e.map("div", 1.0, x))
expands("neg negative")(_unary("neg"))
expands("maximum", "self other")(lambda e, a, b: e.map("max", a, b))
expands("minimum", "self other")(lambda e, a, b: e.map("min", a, b))


@expands("abs absolute")
def _abs(e: Expansion, x: Tile) -> Tile:
    return x if e.dtype is DType.U8 else e.map("abs", x)


@expands("sign sgn")
def _sign(e: Expansion, x: Tile) -> Tile:
    return e.map("sign", x)


@expands("floor ceil trunc fix")
def _whole(e: Expansion, x: Tile) -> Tile:
    name = e.node.op.split(".")[1]
    return e.map("trunc" if name == "fix" else name, x) if e.floating else x


@expands("round special_round")
def _round(e: Expansion, x: Tile) -> Tile:
    if not e.floating:
        return x
    decimals = e.number("decimals", 0)
    if decimals == 0:
        return e.map("round", x)
    ten = 10.0 ** abs(decimals)
    up, down = ("mul", "div") if decimals > 0 else ("div", "mul")
    return e.map(down, e.map("round", e.map(up, x, ten)), ten)


@expands("frac")
def _frac(e: Expansion, x: Tile) -> Tile:
    return e.map("sub", x, e.map("trunc", x))


def _scaled(e: Expansion, x: Tile, name: str) -> Tile:
    """x times `alpha` or `value`, which is 1 more often than not."""
    factor = e.arg(name, 1)
    if factor == 1 and not isinstance(factor, bool):
        return x
    times = e.converted(factor, e.dtype)
    return x if times is None else e.map("mul", x, times)


@expands("add", "self other")
def _add(e: Expansion, a: Tile, b: Tile) -> Tile:
    return e.map("add", a, _scaled(e, b, "alpha"))


@expands("sub subtract", "self other")
def _sub(e: Expansion, a: Tile, b: Tile) -> Tile:
    return e.map("sub", a, _scaled(e, b, "alpha"))


@expands("rsub", "self other")
def _rsub(e: Expansion, a: Tile, b: Tile) -> Tile:
    return e.map("sub", b, _scaled(e, a, "alpha"))


@expands("mul multiply", "self other")
def _mul(e: Expansion, a: Tile, b: Tile) -> Tile:
    return e.map("mul", a, b)


@expands("square")
def _square(e: Expansion, x: Tile) -> Tile:
    return e.map("mul", x, x)


def _floor_divided(e: Expansion, a: Tile, b: Tile) -> Tile:
    """torch's way: exact where a/b would round up to a whole number."""
    if not e.floating:
        return e.map("floordiv", a, e.divisor(b))
    rest = e.map("rem", a, b)
    quotient = e.map("div", e.map("sub", a, rest), b)
    differ = e.map("xor", e.map("lt", b, 0.0), e.map("lt", rest, 0.0))
    lower = e.map("and", e.map("ne", rest, 0.0), differ)
    quotient = e.map("select", lower, e.map("sub", quotient, 1.0), quotient)
    whole = e.map("floor", quotient)
    whole = e.map("select", e.map("gt", e.map("sub", quotient, whole), 0.5), e.map("add", whole, 1.0), whole)
    plain = e.map("div", a, b)
    whole = e.map("select", e.map("eq", quotient, 0.0), e.map("mul", plain, 0.0), whole)
    return e.map("select", e.map("eq", b, 0.0), plain, whole)


@expands("div divide", "self other")
def _div(e: Expansion, a: Tile, b: Tile) -> Tile:
    mode = e.arg("rounding_mode")
    if mode == "floor":
        return _floor_divided(e, a, b)
    if mode == "trunc":
        if not e.floating:
            return e.map("truncdiv", a, e.divisor(b))
        quotient = e.map("div", a, b)
        if e.out in HALVES:  # torch rounds the quotient first
            quotient = e.cast(e.cast(quotient, e.out), e.dtype)
        return e.map("trunc", quotient)
    if not e.floating:
        a, b = e.cast(a, e.out), e.cast(b, e.out)
    if (parts := parts_of_reciprocal(e.node, e.evaluator.graph)) is not None:
        high, low = parts
        return e.map("mul", a, high) if low == 0 else e.map("fma", a, e.fill(high), e.map("mul", a, low))
    return e.map("div", a, b)


expands("true_divide", "self other", _FLOAT)(lambda e, a, b: e.map("div", a, b))
expands("floor_divide", "self other")(_floor_divided)
expands("remainder", "self other")(lambda e, a, b: e.map("mod", a, e.divisor(b)))
expands("fmod", "self other")(lambda e, a, b: e.map("rem", a, e.divisor(b)))


@expands("fmax", "self other")
def _fmax(e: Expansion, a: Tile, b: Tile) -> Tile:
    return _ignoring_nan(e, "max", a, b)


@expands("fmin", "self other")
def _fmin(e: Expansion, a: Tile, b: Tile) -> Tile:
    return _ignoring_nan(e, "min", a, b)


def _ignoring_nan(e: Expansion, function: str, a: Tile, b: Tile) -> Tile:
    both = e.map(function, a, b)
    if not e.floating:
        return both
    return e.map("select", e.map("isnan", a), b, e.map("select", e.map("isnan", b), a, both))


@expands("pow", "self exponent")
def _pow(e: Expansion, a: Tile, b: Tile) -> Tile:
    exponent = e.arg("exponent")
    if isinstance(exponent, int | float) and (e.floating or exponent in (2, 3)):
        match float(exponent):
            case 2.0:
                return e.map("mul", a, a)
            case 3.0:
                return e.map("mul", e.map("mul", a, a), a)
            case 0.5:
                return e.map("sqrt", a)
            case -0.5:
                return e.map("rsqrt", a)
            case -1.0:
                return e.map("div", 1.0, a)
            case 1.0:
                return a
            case _:
                pass
    return e.map("pow", a, b)


@expands("log10", computes=_FLOAT)
def _log10(e: Expansion, x: Tile) -> Tile:
    return e.map("mul", e.map("log2", x), math.log10(2))


@expands("tan", computes=_FLOAT)
def _tan(e: Expansion, x: Tile) -> Tile:
    return e.map("div", e.map("sin", x), e.map("cos", x))


@expands("sinh", computes=_FLOAT)
def _sinh(e: Expansion, x: Tile) -> Tile:
    """expm1 keeps small x exact; large x goes by halves, which do not overflow too early."""
    small = e.map("mul", e.map("sub", e.map("expm1", x), e.map("expm1", e.map("neg", x))), 0.5)
    half = e.map("exp", e.map("mul", e.map("abs", x), 0.5))
    large = e.map("mul", e.map("mul", e.map("mul", half, 0.5), half), e.map("sign", x))
    return e.map("select", e.map("gt", e.map("abs", x), 20.0), large, small)


@expands("cosh", computes=_FLOAT)
def _cosh(e: Expansion, x: Tile) -> Tile:
    half = e.map("exp", e.map("mul", e.map("abs", x), 0.5))
    return e.map("add", e.map("mul", e.map("mul", half, 0.5), half), e.map("div", 0.5, e.map("mul", half, half)))


@expands("addcmul", "self tensor1 tensor2")
def _addcmul(e: Expansion, x: Tile, a: Tile, b: Tile) -> Tile:
    return e.map("add", x, e.map("mul", _scaled(e, a, "value"), b))


@expands("addcdiv", "self tensor1 tensor2")
def _addcdiv(e: Expansion, x: Tile, a: Tile, b: Tile) -> Tile:
    return e.map("add", x, e.map("div", _scaled(e, a, "value"), b))


@expands("lerp", "self end weight")
def _lerp(e: Expansion, a: Tile, b: Tile, w: Tile) -> Tile:
    """From the nearer end, as torch does."""
    span = e.map("sub", b, a)
    near = e.map("add", a, e.map("mul", w, span))
    far = e.map("sub", b, e.map("mul", span, e.map("sub", 1.0, w)))
    return e.map("select", e.map("lt", e.map("abs", w), 0.5), near, far)


@expands("logaddexp", "self other", _FLOAT)
def _logaddexp(e: Expansion, a: Tile, b: Tile) -> Tile:
    high = e.map("max", a, b)
    sum_ = e.map("add", high, e.map("log1p", e.map("exp", e.map("neg", e.map("abs", e.map("sub", a, b))))))
    return e.map("select", e.map("and", e.map("isinf", a), e.map("eq", a, b)), a, sum_)


@expands("xlogy special_xlogy", "self other", _FLOAT)
def _xlogy(e: Expansion, a: Tile, b: Tile) -> Tile:
    product = e.map("mul", a, e.map("log", b))
    zero = e.map("select", e.map("eq", a, 0.0), e.fill(0.0), product)
    return e.map("select", e.map("isnan", b), b, zero)


@expands("hypot", "self other", _FLOAT)
def _hypot(e: Expansion, a: Tile, b: Tile) -> Tile:
    """Scaled by the larger one, so that squares do not overflow."""
    a, b = e.map("abs", a), e.map("abs", b)
    high, low = e.map("max", a, b), e.map("min", a, b)
    ratio = e.map("div", low, high)
    length = e.map("mul", high, e.map("sqrt", e.map("add", e.map("mul", ratio, ratio), 1.0)))
    length = e.map("select", e.map("eq", high, 0.0), high, length)
    infinite = e.map("or", e.map("isinf", a), e.map("isinf", b))
    return e.map("select", infinite, e.fill(math.inf), length)


# --- activations ------------------------------------------------------------------------------------------------------


@expands("relu")
def _relu(e: Expansion, x: Tile) -> Tile:
    return e.map("max", x, 0)


@expands("relu6")
def _relu6(e: Expansion, x: Tile) -> Tile:
    return e.chain(x, ("max", 0), ("min", 6))


@expands("hardtanh")
def _hardtanh(e: Expansion, x: Tile) -> Tile:
    low, high = (e.fill(e.number(name, at)) for name, at in (("min_val", -1), ("max_val", 1)))
    return e.map("min", e.map("max", x, low), high)


@expands("leaky_relu")
def _leaky_relu(e: Expansion, x: Tile) -> Tile:
    return e.map("select", e.map("gt", x, 0.0), x, e.map("mul", x, e.fill(e.number("negative_slope", 0.01))))


@expands("_prelu_kernel", "self weight")
def _prelu(e: Expansion, x: Tile, weight: Tile) -> Tile:
    return e.map("select", e.map("gt", x, 0.0), x, e.map("mul", x, weight))


def _elu_like(e: Expansion, x: Tile, alpha: float, scale: float, inner: float) -> Tile:
    below = e.map("mul", e.map("expm1", x if inner == 1 else e.map("mul", x, inner)), alpha * scale)
    return e.map("select", e.map("le", x, 0.0), below, x if scale == 1 else e.map("mul", x, scale))


@expands("elu")
def _elu(e: Expansion, x: Tile) -> Tile:
    return _elu_like(e, x, e.number("alpha", 1), e.number("scale", 1), e.number("input_scale", 1))


expands("selu")(lambda e, x: _elu_like(e, x, _SELU_ALPHA, _SELU_SCALE, 1))


@expands("celu")
def _celu(e: Expansion, x: Tile) -> Tile:
    alpha = e.number("alpha", 1.0)
    return _elu_like(e, x, alpha, 1, 1 / alpha)


@expands("gelu")
def _gelu(e: Expansion, x: Tile) -> Tile:
    if e.arg("approximate", "none") == "tanh":
        half, cube = e.map("mul", x, 0.5), e.map("mul", e.map("mul", x, x), x)
        inner = e.map("mul", e.map("add", x, e.map("mul", cube, 0.044715)), math.sqrt(2 / math.pi))
        return e.map("mul", half, e.map("add", e.map("tanh", inner), 1.0))
    return e.map("mul", x, e.map("normal", x))


def _one_plus_exp_neg(e: Expansion, x: Tile) -> Tile:
    return e.map("add", e.map("exp", e.map("neg", x)), 1.0)


@expands("sigmoid special_expit", computes=_FLOAT)
def _sigmoid(e: Expansion, x: Tile) -> Tile:
    return e.map("div", 1.0, _one_plus_exp_neg(e, x))


@expands("silu")
def _silu(e: Expansion, x: Tile) -> Tile:
    return e.map("div", x, _one_plus_exp_neg(e, x))


@expands("log_sigmoid")
def _log_sigmoid(e: Expansion, x: Tile) -> Tile:
    return e.map("sub", e.map("min", x, 0.0), e.map("log1p", e.map("exp", e.map("neg", e.map("abs", x)))))


@expands("mish")
def _mish(e: Expansion, x: Tile) -> Tile:
    return e.map("mul", x, e.map("tanh", e.map("log1p", e.map("exp", x))))


@expands("softplus")
def _softplus(e: Expansion, x: Tile) -> Tile:
    beta, threshold = e.number("beta", 1), e.number("threshold", 20)
    inner = x if beta == 1 else e.map("mul", x, beta)
    soft = e.map("log1p", e.map("exp", inner))
    soft = soft if beta == 1 else e.map("div", soft, beta)
    return e.map("select", e.map("gt", inner, threshold), x, soft)


def _hard_gate(e: Expansion, x: Tile) -> Tile:
    return e.chain(x, ("add", 3.0), ("max", 0.0), ("min", 6.0))


@expands("hardsigmoid")
def _hardsigmoid(e: Expansion, x: Tile) -> Tile:
    return e.map("mul", _hard_gate(e, x), 1 / 6)


@expands("hardswish")
def _hardswish(e: Expansion, x: Tile) -> Tile:
    return e.map("mul", e.map("mul", x, _hard_gate(e, x)), 1 / 6)


@expands("hardshrink")
def _hardshrink(e: Expansion, x: Tile) -> Tile:
    lambd = e.number("lambd", 0.5)
    inside = e.map("and", e.map("ge", x, -lambd), e.map("le", x, lambd))
    return e.map("select", inside, e.fill(0.0), x)


@expands("softshrink")
def _softshrink(e: Expansion, x: Tile) -> Tile:
    lambd = e.number("lambd", 0.5)
    low = e.map("select", e.map("lt", x, -lambd), e.map("add", x, lambd), e.map("mul", x, 0.0))
    return e.map("select", e.map("gt", x, lambd), e.map("sub", x, lambd), low)


@expands("threshold")
def _threshold(e: Expansion, x: Tile) -> Tile:
    return e.map("select", e.map("le", x, e.fill(e.number("threshold", 0))), e.fill(e.number("value", 0)), x)


@expands("logit special_logit", computes=_FLOAT)
def _logit(e: Expansion, x: Tile) -> Tile:
    eps = e.arg("eps")
    if eps is not None:
        low = e.number("eps", 0.0)
        x = e.map("min", e.map("max", x, low), 1.0 - low)
    return e.map("log", e.map("div", x, e.map("sub", 1.0, x)))


# --- limits -----------------------------------------------------------------------------------------------------------


@expands("clamp clip", "self min max")
def _clamp(e: Expansion, x: Tile, low: Tile | None, high: Tile | None) -> Tile:
    x = x if low is None else e.map("max", x, low)
    return x if high is None else e.map("min", x, high)


expands("clamp_min", "self min")(lambda e, x, low: e.map("max", x, low))
expands("clamp_max", "self max")(lambda e, x, high: e.map("min", x, high))


@expands("nan_to_num")
def _nan_to_num(e: Expansion, x: Tile) -> Tile:
    if not e.floating:
        return x
    largest = {DType.F64: 1.7976931348623157e308, DType.F32: 3.4028234663852886e38, DType.F16: 65504.0,
               DType.BF16: 3.3895313892515355e38}[e.out]  # fmt: skip
    nan, high, low = e.number("nan", 0.0), e.number("posinf", largest), e.number("neginf", -largest)
    clean = e.map("select", e.map("isnan", x), e.fill(nan), x)
    clean = e.map("select", e.map("eq", x, math.inf), e.fill(high), clean)
    return e.map("select", e.map("eq", x, -math.inf), e.fill(low), clean)


@expands("copysign", "self other", _FLOAT)
def _copysign(e: Expansion, a: Tile, b: Tile) -> Tile:
    bits, sign = {DType.F32: (DType.I32, 1 << 31), DType.F64: (DType.I64, 1 << 63)}[e.dtype]
    low = e.b.fill(sign - 1, bits)
    top = e.b.fill(-sign, bits)
    a, b = e.b.bitcast(a, bits), e.b.bitcast(b, bits)
    return e.b.bitcast(e.map("or", e.map("and", a, low), e.map("and", b, top)), e.dtype)


@expands("deg2rad", computes=_FLOAT)
def _deg2rad(e: Expansion, x: Tile) -> Tile:
    return e.map("mul", x, math.pi / 180)


@expands("rad2deg", computes=_FLOAT)
def _rad2deg(e: Expansion, x: Tile) -> Tile:
    return e.map("mul", x, 180 / math.pi)


@expands("dropout feature_dropout alpha_dropout native_dropout", "input", Computes.OWN)
def _dropout(e: Expansion, x: Tile) -> Tile:
    if e.arg("train", default=True) is not False and e.arg("p", 0.5) != 0:
        raise CannotLower("dropout draws random numbers while training")
    return x
