"""torch's description of a value, as ours: symbolic sizes, layouts, types.

torch keeps sizes as sympy expressions inside a SymInt; the graph keeps them as `ir.dims`. What cannot be said in
`ir.dims` (a float, an unknown function) raises CaptureError: a size that is guessed would be a wrong guard.
Nothing here asks torch to decide a symbolic comparison, because that would add a guard to the capture.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import sympy
import torch
from torch.utils._sympy import functions as tsf

from hotfuse.base.errors import CaptureError
from hotfuse.ir.dims import Dim, expr, sym
from hotfuse.ir.types import STRIDED, Layout, ScalarKind, ScalarType, TensorType
from hotfuse.ops.dense_order import layout_by
from hotfuse.ops.torch_dtypes import dtype_of

# --- sizes -----------------------------------------------------------------------------------------------------------

Expr = Any
"""A sympy expression; sympy has no types worth the name."""


def _fold(op: str) -> Callable[..., Dim]:
    return lambda *args: expr(op, *(_dim(a) for a in args))


def _swapped(op: str) -> Callable[..., Dim]:
    return lambda a, b: expr(op, _dim(b), _dim(a))


def _where(c: Expr, a: Expr, b: Expr) -> Dim:
    held = _dim(c)
    return expr("+", expr("*", held, _dim(a)), expr("*", expr("not", held), _dim(b)))


def _power(base: Expr, exponent: Expr) -> Dim:
    if exponent.is_nonnegative is False:
        raise _unsaid(base**exponent, "a negative power is not an integer")
    return expr("**", _dim(base), _dim(exponent))


def _abs(a: Expr) -> Dim:
    d = _dim(a)
    return expr("max", d, expr("*", -1, d))


def _ratio(e: Expr) -> tuple[Dim, Dim]:
    """A true quotient as numerator and denominator, for the functions that round it.

    Floats are exact ratios of integers. Only ratios with a short numerator are taken: then the product with any real
    size fits in a float's 53 bits, and rounding the exact quotient gives what rounding torch's float gives.
    """
    if isinstance(e, (tsf.IntTrueDiv, tsf.FloatTrueDiv)):
        (n, d), (n2, d2) = _ratio(e.args[0]), _ratio(e.args[1])
        return expr("*", n, d2), expr("*", d, n2)
    if isinstance(e, (tsf.ToFloat, tsf.Identity)):
        return _ratio(e.args[0])
    if isinstance(e, sympy.Float):
        top, bottom = float(e).as_integer_ratio()
        if abs(top) >= 2**20 or bottom >= 2**20:
            raise _unsaid(e, "the factor is not a short fraction, so its rounding cannot be reproduced")
        return top, bottom
    if isinstance(e, sympy.Mul):
        parts = [_ratio(a) for a in e.args]
        return expr("*", *(n for n, _ in parts)), expr("*", *(d for _, d in parts))
    if e.is_integer:
        return _dim(e), 1
    top, bottom = cast(tuple[Expr, Expr], e.as_numer_denom())
    if bottom == 1:
        raise _unsaid(e, "it is not a quotient of integers")
    return _dim(top), _dim(bottom)


def _floor(a: Expr) -> Dim:
    n, d = _ratio(a)
    return expr("//", n, d)


def _ceil(a: Expr) -> Dim:
    n, d = _ratio(a)
    return expr("ceildiv", n, d)


def _trunc(a: Expr) -> Dim:
    if not a.replace(tsf.ToFloat, lambda x: x).replace(tsf.IntTrueDiv, lambda n, d: n / d).is_nonnegative:
        raise _unsaid(a, "rounding towards zero is only known for sizes")
    return _floor(a)


def _table() -> dict[str, Callable[..., Dim]]:
    shift = {"LShift": "*", "RShift": "//"}
    rows: dict[str, Callable[..., Dim]] = {
        "Add": _fold("+"),
        "Mul": _fold("*"),
        "Pow": _power,
        "PowByNatural": _power,
        "FloorDiv": _fold("//"),
        "CleanDiv": _fold("//"),
        "CeilDiv": _fold("ceildiv"),
        "Mod": _fold("%"),
        "PythonMod": _fold("%"),
        "ModularIndexing": lambda b, d, m: expr("%", expr("//", _dim(b), _dim(d)), _dim(m)),
        "Max": _fold("max"),
        "Min": _fold("min"),
        "Abs": _abs,
        "Where": _where,
        "Identity": lambda a: _dim(a),
        "floor": _floor,
        "FloorToInt": _floor,
        "ceiling": _ceil,
        "CeilToInt": _ceil,
        "TruncToInt": _trunc,
        "Equality": _fold("=="),
        "Unequality": _fold("!="),
        "StrictLessThan": _fold("<"),
        "LessThan": _fold("<="),
        "StrictGreaterThan": _swapped("<"),
        "GreaterThan": _swapped("<="),
        "And": _fold("and"),
        "Or": _fold("or"),
        "Not": _fold("not"),
    }
    for name, op in shift.items():
        rows[name] = lambda a, b, op=op: expr(op, _dim(a), expr("**", 2, _dim(b)))
    return rows


_FUNCTIONS = _table()


def _unsaid(e: Expr, because: str) -> CaptureError:
    return CaptureError(f"cannot express the size {e}", because=because, hint="mark this dimension static")


def _dim(e: Expr) -> Dim:
    if isinstance(e, (bool, sympy.logic.boolalg.BooleanAtom)):
        return int(bool(e))
    if isinstance(e, (int, sympy.Integer)):
        return int(e)
    if isinstance(e, sympy.Symbol):
        if e.is_integer is False or (e.is_integer is None and not e.is_Boolean and e.is_real):
            raise _unsaid(e, "it is not an integer")
        return sym(e.name)
    name = type(e).__name__
    if (row := _FUNCTIONS.get(name)) is None:
        raise _unsaid(e, f"{name} is not an operation on integers that dims have")
    return row(*e.args)


def _sympy_of(x: Any) -> Expr:
    return x.node.expr if isinstance(x, (torch.SymInt, torch.SymBool, torch.SymFloat)) else x


def dim_of(x: int | torch.SymInt | Expr) -> Dim:
    """A size as a dim: an int, a SymInt or a sympy expression."""
    if type(x) is int:
        return x
    if isinstance(x, (float, torch.SymFloat)):
        raise _unsaid(x, "it is a float")
    return _dim(_sympy_of(x))


def pred_of(x: bool | torch.SymBool | Expr) -> Dim:  # noqa: FBT001  (what is converted)
    """A predicate over sizes; 1 and 0 where it is already decided."""
    e = _sympy_of(x)
    if not isinstance(e, (bool, sympy.logic.boolalg.Boolean)):
        raise _unsaid(e, "it is not a predicate")
    return _dim(e)


def scalar_type(x: float | torch.SymInt | torch.SymFloat | torch.SymBool) -> ScalarType:
    """The type of a number of the host; an integer carries its expression where dims can say it."""
    if isinstance(x, (bool, torch.SymBool)):
        return ScalarType(ScalarKind.BOOL)
    if isinstance(x, (float, torch.SymFloat)):
        return ScalarType(ScalarKind.FLOAT)
    try:
        return ScalarType(ScalarKind.INT, dim_of(x))
    except CaptureError:
        return ScalarType(ScalarKind.INT)


# --- layouts ---------------------------------------------------------------------------------------------------------


def _positive(e: Expr) -> Expr:
    """`Max(1, n)` as `n`: torch writes it into strides for the case of no elements, where strides mean nothing."""
    if not isinstance(e, sympy.Basic):
        return e
    return e.replace(
        lambda f: isinstance(f, (tsf.Max, sympy.Max)) and len(f.args) == 2 and sympy.S.One in f.args,
        lambda f: next(a for a in f.args if a != 1),
    )


def _same(a: Expr, b: Expr) -> bool:
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return bool(a == b or sympy.expand(a - b) == 0)


def layout_of(shape: tuple[Any, ...], stride: tuple[Any, ...]) -> Layout:
    """The layout of strides whose sizes may be symbols: row-major, dense in another order, or strided."""
    return layout_by([_sympy_of(s) for s in shape], [_positive(_sympy_of(s)) for s in stride], _same)


def tensor_type(t: torch.Tensor) -> TensorType:
    """The type of a tensor, real or fake."""
    layout = layout_of(tuple(t.shape), tuple(t.stride())) if t.layout is torch.strided else STRIDED
    return TensorType(dtype_of(t.dtype), tuple(dim_of(s) for s in t.shape), layout, str(t.device))
