"""One emission per tile instruction: what it is in Triton's language, keyed by the names of `tile.isa`.

A row is a function from operand names and types to an expression. Instructions without a row (scatters, scans, faults by
`require`) are left to the library: `missing` lists them, so that what this target lacks is visible. `PREAMBLE` holds the functions
that Triton has not, or has with other results for NaN, or slower: `_normal` is formula 7.1.26 of Abramowitz and Stegun, off by at
most 1e-7; `_normal_of_16_bits`, for results that are rounded to 16 bits, is fitted: x times it is off by at most 2.6e-5.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from hotfuse.base.errors import InternalError
from hotfuse.ir.types import DType
from hotfuse.lower.common.errors import CannotLower
from hotfuse.tile import isa
from hotfuse.tile.program import Kernel, Tile, TileType, instructions

TYPES = {
    DType.F64: "float64", DType.F32: "float32", DType.F16: "float16", DType.BF16: "bfloat16", DType.I64: "int64",
    DType.I32: "int32", DType.I16: "int16", DType.I8: "int8", DType.U64: "uint64", DType.U32: "uint32", DType.U16: "uint16",
    DType.U8: "uint8", DType.BOOL: "int1",
}  # fmt: skip
"""Element types by Triton's names."""
POINTERS = {
    DType.F64: "*fp64", DType.F32: "*fp32", DType.F16: "*fp16", DType.BF16: "*bf16", DType.I64: "*i64", DType.I32: "*i32",
    DType.I16: "*i16", DType.I8: "*i8", DType.U64: "*u64", DType.U32: "*u32", DType.U16: "*u16", DType.U8: "*u8", DType.BOOL: "*i1",
}  # fmt: skip
"""Memory of these types in a kernel's signature."""
FLOATS = frozenset({DType.F64, DType.F32, DType.F16, DType.BF16})
WIDE = frozenset({DType.F64, DType.F32})

PREAMBLE = '''
@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _smaller(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _times(a, b):
    return a * b


@triton.jit
def _plus(a, b):
    return a + b


@triton.jit
def _above(a, b):
    return tl.maximum(a, b)


@triton.jit
def _below(a, b):
    return tl.minimum(a, b)


@triton.jit
def _tanh(x):
    e = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - e) / (1.0 + e)
    s = x * x
    near = x * (1.0 + s * (-0.3333333333 + s * (0.1333333333 + s * (-0.0539682540 + s * 0.0218694885))))
    return tl.where(tl.abs(x) < 0.25, near, tl.where(x < 0, -far, far))


@triton.jit
def _normal(x):
    h = tl.abs(x) * 0.7071067811865476
    t = 1.0 / (1.0 + 0.3275911 * h)
    p = 0.5 * t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    q = p * tl.exp(-h * h)
    return tl.where(x < 0, q, 1.0 - q)


@triton.jit
def _normal_of_16_bits(x):
    s = tl.minimum(x * x, 50.0)
    return 1.0 / (1.0 + tl.exp2(x * (-2.3011207 + s * (-0.10677627 + s * 0.0010143513))))


@triton.jit
def _expm1(x):
    near = x * (1.0 + x * (0.5 + x * (0.1666666667 + x * (0.0416666667 + x * (0.0083333333 + x * 0.0013888889)))))
    return tl.where(tl.abs(x) < 0.2, near, tl.exp(x) - 1.0)


@triton.jit
def _log1p(x):
    u = 1.0 + x
    near = tl.where(u == 1.0, x, tl.log(u) * (x / (u - 1.0)))
    return tl.where(u == float("inf"), u, near)


@triton.jit
def _trunc(x):
    return tl.where(x < 0, tl.ceil(x), tl.floor(x))


@triton.jit
def _rint(x):
    down = tl.floor(x)
    rest = x - down
    odd = down - 2.0 * tl.floor(down * 0.5)
    up = (rest > 0.5) | ((rest == 0.5) & (odd == 1.0))
    return tl.where(up, down + 1.0, down)


@triton.jit
def _floordiv(a, b):
    q = a // b
    return tl.where((a % b != 0) & ((a ^ b) < 0), q - 1, q)


@triton.jit
def _mod(a, b):
    r = a % b
    return tl.where((r != 0) & ((r < 0) != (b < 0)), r + b, r)
'''

PREFETCH = '''
@triton.jit
def _prefetch(p):
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [p.to(tl.uint64, bitcast=True)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _prefetch_near(p):
    tl.inline_asm_elementwise(
        "prefetch.global.L1 [$1]; mov.u32 $0, 0;", "=r,l", [p.to(tl.uint64, bitcast=True)], dtype=tl.int32, is_pure=False, pack=1
    )
'''
"""Has lines of memory fetched into a cache of an NVIDIA device, the second-level one or a multiprocessor's own; no value is read,
so nothing has to be ready."""

Row = Callable[[Sequence[str], Sequence[DType]], str]


def _plain(text: str) -> Row:
    return lambda a, _t: text.format(*a)


def _by_type(floats: str, others: str) -> Row:
    return lambda a, t: (floats if t[0] in FLOATS else others).format(*a)


def _only(text: str, types: frozenset[DType]) -> Row:
    def row(a: Sequence[str], t: Sequence[DType]) -> str:
        if t[0] not in types:
            raise CannotLower(f"Triton lacks this function of {t[0].value}")
        return text.format(*a)

    return row


def _precise(single: str, other: str) -> Row:
    return lambda a, t: (single if t[0] is DType.F32 else other).format(*a)


_NORMAL = _only("0.5 * (1.0 + tl.erf({0} * 0.7071067811865476))", WIDE)

MAPS: dict[str, Row] = {
    "add": _plain("{0} + {1}"), "sub": _plain("{0} - {1}"), "mul": _plain("{0} * {1}"),
    "div": _precise("tl.div_rn({0}, {1})", "{0} / {1}"), "truncdiv": _plain("{0} // {1}"),
    "floordiv": _plain("_floordiv({0}, {1})"),
    "rem": _plain("{0} % {1}"), "mod": _plain("_mod({0}, {1})"), "fma": _only("tl.fma({0}, {1}, {2})", WIDE),
    "max": _by_type("_larger({0}, {1})", "tl.maximum({0}, {1})"), "min": _by_type("_smaller({0}, {1})", "tl.minimum({0}, {1})"),
    "neg": _plain("-{0}"), "abs": _plain("tl.abs({0})"),
    "sign": _by_type("tl.where({0} > 0, 1.0, tl.where({0} < 0, -1.0, 0.0)).to({0}.dtype)",
                     "tl.where({0} > 0, 1, tl.where({0} < 0, -1, 0)).to({0}.dtype)"),
    "sqrt": _precise("tl.sqrt_rn({0})", "tl.sqrt({0})"), "rsqrt": _only("tl.rsqrt({0})", WIDE),
    "recip": _precise("tl.div_rn(1.0, {0})", "1.0 / {0}"),
    "exp": _only("tl.exp({0})", WIDE), "decay": _only("tl.exp({0})", WIDE), "exp2": _only("tl.exp2({0})", WIDE),
    "expm1": _only("_expm1({0})", WIDE), "log": _only("tl.log({0})", WIDE), "log2": _only("tl.log2({0})", WIDE),
    "log1p": _only("_log1p({0})", WIDE), "sin": _only("tl.sin({0})", WIDE), "cos": _only("tl.cos({0})", WIDE),
    "tanh": _only("_tanh({0})", WIDE), "erf": _only("tl.erf({0})", WIDE),
    "normal": lambda a, t: f"_normal({a[0]})" if t[0] is DType.F32 else _NORMAL(a, t),
    "floor": _only("tl.floor({0})", WIDE), "ceil": _only("tl.ceil({0})", WIDE), "round": _only("_rint({0})", WIDE),
    "trunc": _only("_trunc({0})", WIDE),
    "eq": _plain("{0} == {1}"), "ne": _plain("{0} != {1}"), "lt": _plain("{0} < {1}"), "le": _plain("{0} <= {1}"),
    "gt": _plain("{0} > {1}"), "ge": _plain("{0} >= {1}"), "isnan": _plain("{0} != {0}"),
    "isinf": _plain('tl.abs({0}) == float("inf")'),
    "and": _plain("{0} & {1}"), "or": _plain("{0} | {1}"), "xor": _plain("{0} ^ {1}"), "not": _plain("~{0}"),
    "select": _plain("tl.where({0}, {1}, {2})"),
}  # fmt: skip
"""`map.<name>`; casts are in `cast`."""

REDUCES: dict[str, Row] = {
    "sum": _plain("tl.reduce({0}, {1}, _plus, keep_dims=True)"),
    "prod": _plain("tl.reduce({0}, {1}, _times, keep_dims=True)"),
    "max": _by_type("tl.reduce({0}, {1}, _larger, keep_dims=True)", "tl.reduce({0}, {1}, _above, keep_dims=True)"),
    "min": _by_type("tl.reduce({0}, {1}, _smaller, keep_dims=True)", "tl.reduce({0}, {1}, _below, keep_dims=True)"),
    "any": _plain("(tl.reduce({0}.to(tl.int32), {1}, _above, keep_dims=True) != 0)"),
    "all": _plain("(tl.reduce({0}.to(tl.int32), {1}, _below, keep_dims=True) != 0)"),
}
"""`reduce.<name>`: operand and axis."""

OTHERS = frozenset({"load", "store", "fill", "iota", "index", "bcast", "reshape", "transpose", "map.cast", "map.bitcast", "mma"})
"""What `backends.triton.emit` writes itself, since it needs places or extents."""
SILENT = frozenset({"prefetch", "barrier_spill", "forget"})
"""Hints for CPUs, which mean nothing here."""


def emitted(op: str) -> bool:
    """Whether an instruction has an emission."""
    family, _, name = op.partition(".")
    table = MAPS if family == "map" else REDUCES if family == "reduce" else {}
    return name in table or op in OTHERS or op in SILENT


def missing() -> tuple[str, ...]:
    """The instructions that are left to other back ends."""
    return tuple(op for op in isa.rows() if not emitted(op))


def check(kernel: Kernel) -> None:
    """Raises CannotLower where a kernel uses an instruction or a type that has no emission."""
    for instr in instructions(kernel.body):
        if not emitted(instr.op):
            raise CannotLower(f"there is no {instr.op} in Triton", where=str(instr.loc))
    for b in kernel.buffers:
        if b.dtype not in POINTERS:
            raise CannotLower(f"Triton has no memory of {b.dtype.value}")


def computed(op: str, args: Sequence[str], types: Sequence[DType]) -> str:
    """The expression of a map or a reduction."""
    family, _, name = op.partition(".")
    table = MAPS if family == "map" else REDUCES
    if name not in table:
        raise InternalError(f"there is no {op} in Triton")
    return table[name](args, types)


def cast(name: str, tile: TileType, to: DType) -> str:
    """The same numbers in another element type."""
    return f"({name} != 0)" if to is DType.BOOL and tile.dtype is not DType.BOOL else f"{name}.to(tl.{TYPES[to]})"


def number(value: float) -> str:
    """A literal."""
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    return repr(value)


def filled(value: float, tile: TileType) -> str:
    """A tile of one number; `()` is a single one."""
    literal = number(float(value) if tile.dtype in FLOATS else int(value))
    return f"tl.full({shape_text(tile.shape)}, {literal}, tl.{TYPES[tile.dtype]})"


def shape_text(shape: Sequence[int]) -> str:
    """Extents as a tuple."""
    return "(" + "".join(f"{n}, " for n in shape) + ")"


def ranked(tile: Tile, name: str, rank: int) -> str:
    """A tile with leading axes of extent 1 in front, up to a rank."""
    short = rank - len(tile.type.shape)
    if short <= 0 or not tile.type.shape:
        return name
    return f"{name}[{', '.join(['None'] * short + [':'] * len(tile.type.shape))}]"
