"""Operators of one and two operands by what they take, as `tests.fuzz.served` draws them.

Exact ones round nothing: what they give may be compared, floored or sorted, and is the same everywhere.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def safe(x: Tensor) -> Tensor:
    """Floats as something that any integer type holds."""
    return x.nan_to_num(0.0, 5.0, -5.0).clamp(-9, 9) if x.is_floating_point() else x


FLOAT_UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "tanh": torch.tanh,
    "exp": lambda x: x.clamp(max=8).exp(),
    "erf": torch.erf,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "mish": F.mish,
    "log": lambda x: (x.abs() + 0.5).log(),
    "log1p": lambda x: x.abs().log1p(),
    "expm1": lambda x: x.clamp(max=4).expm1(),
    "rsqrt": lambda x: (x.abs() + 0.5).rsqrt(),
    "sqrt": lambda x: x.abs().sqrt(),
    "reciprocal": lambda x: (x.abs() + 1).reciprocal(),
    "sin": lambda x: x.clamp(-9, 9).sin(),
    "cos": lambda x: x.clamp(-9, 9).cos(),
    "atan": torch.atan,
    "square": torch.square,
    "pow3": lambda x: x.clamp(-9, 9) ** 3,
    "softplus": F.softplus,
    "elu": F.elu,
    "leaky": lambda x: F.leaky_relu(x, 0.2),
    "hardswish": F.hardswish,
    "sinh": lambda x: x.clamp(-4, 4).sinh(),
    "logit": lambda x: torch.logit(x.sigmoid() * 0.9 + 0.05),
    "asinh": torch.asinh,
    "exp2": lambda x: x.clamp(max=8).exp2(),
    "logsigmoid": F.logsigmoid,
    "softsign": F.softsign,
    "nan_to_num": lambda x: torch.nan_to_num(x, 0.5, 7.0, -7.0),
    "threshold": lambda x: F.threshold(x, 0.1, -3.0),
}
EXACT_UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "neg": lambda x: -x if x.dtype != torch.bool else ~x,
    "abs": lambda x: x.abs() if x.dtype != torch.bool else x,
    "clamp": lambda x: x.clamp(-1, 2) if x.dtype != torch.bool else x,
    "clamp_min": lambda x: x.clamp(min=0) if x.dtype != torch.bool else x,
    "sign": lambda x: x.sign(),
    "not": torch.logical_not,
    "isnan": torch.isnan,
    "isinf": torch.isinf,
    "isfinite": torch.isfinite,
    "positive": lambda x: x > 0,
    "is3": lambda x: x == 3,
    "relu": lambda x: torch.relu(x) if x.dtype != torch.bool else x,
}
EXACT_FLOAT: dict[str, Callable[[Tensor], Tensor]] = {
    "floor": torch.floor,
    "ceil": torch.ceil,
    "round": torch.round,
    "trunc": torch.trunc,
    "frac": torch.frac,
    "signbit": torch.signbit,
}
INT_UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "invert": lambda x: ~x,
    "shl": lambda x: x << 2,
    "shr": lambda x: x >> 1,
    "plus": lambda x: x + 3,
    "times": lambda x: x * 5,
    "mod": lambda x: x % 5,
    "floordiv": lambda x: x // 3,
    "negdiv": lambda x: x // -3 if x.dtype != torch.uint8 else x // 3,
    "rsub": lambda x: 7 - x,
    "square": torch.square,
    "fmod": lambda x: torch.fmod(x, 4),
    "float": lambda x: x * 0.5,
    "div": lambda x: x / 4,
    "and": lambda x: x & 6,
    "xor": lambda x: x ^ 3,
    "trunc": lambda x: torch.div(x, 3, rounding_mode="trunc"),
}


def _divisor(b: Tensor) -> Tensor:
    return b % 7 + 1


ANY_BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "mul": torch.mul,
    "where": lambda a, b: torch.where(a > 0, a, b),
    "copysum": lambda a, b: torch.add(b, a),
    "sub": lambda a, b: a - b if torch.bool not in (a.dtype, b.dtype) else a + b,
}
EXACT_BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "max": torch.maximum,
    "min": torch.minimum,
    "lt": torch.lt,
    "ge": torch.ge,
    "eq": torch.eq,
    "ne": torch.ne,
    "and": torch.logical_and,
    "or": torch.logical_or,
    "xor": torch.logical_xor,
    "select": lambda a, b: torch.where(b > a, a, b),
    "fmax": torch.fmax,
    "fmin": torch.fmin,
    "masked": lambda a, b: a.masked_fill(b > 1, 1),
}
FLOAT_BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "div": lambda a, b: a / (b.abs() + 1),
    "atan2": lambda a, b: torch.atan2(a, b.abs() + 0.5),
    "hypot": torch.hypot,
    "copysign": lambda a, b: torch.copysign(a, b),
    "addcmul": lambda a, b: torch.addcmul(a, a, b, value=0.5),
    "alpha": lambda a, b: torch.add(a, b, alpha=0.3),
    "logaddexp": lambda a, b: torch.logaddexp(a, b),
    "lerp": lambda a, b: torch.lerp(a, b, 0.3),
    "fdiv": lambda a, b: a / b,
    "rpow": lambda a, b: (a.abs() + 0.5).clamp(max=4) ** b.clamp(-3, 3),
}
INT_BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "floordiv": lambda a, b: a // _divisor(b),
    "rem": lambda a, b: a % _divisor(b),
    "fmod": lambda a, b: torch.fmod(a, _divisor(b)),
    "band": lambda a, b: a & b,
    "bor": lambda a, b: a | b,
    "bxor": lambda a, b: a ^ b,
    "truediv": lambda a, b: a / _divisor(b),
    "truncdiv": lambda a, b: torch.div(a, _divisor(b), rounding_mode="trunc"),
    "shift": lambda a, b: a << (b % 3).abs(),
}
