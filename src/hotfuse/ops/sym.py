"""Arithmetic on numbers of the host: what a traced program does with sizes between two tensor ops.

torch.export keeps it in the graph as calls of Python's own functions (`operator.mul`, `math.floor`,
`torch.sym_max`). The graph names them `sym.mul`, `sym.floor`, `sym.max`; this table leads both ways.
"""

from __future__ import annotations

import builtins
import math
import operator
from collections.abc import Callable
from typing import Any

import torch

from hotfuse.base.errors import InternalError
from hotfuse.ops.table import Access, defop, register_namespace

Fn = Callable[..., Any]

_OPERATORS = (
    "abs", "add", "and_", "eq", "floordiv", "ge", "gt", "invert", "le", "lshift", "lt", "mod", "mul", "ne", "neg",
    "not_", "or_", "pos", "pow", "rshift", "sub", "truediv", "xor",
)  # fmt: skip
_MATH = ("ceil", "floor", "trunc")
_TORCH = (
    "sym_float", "sym_int", "sym_ite", "sym_max", "sym_min", "sym_not", "sym_sum", "_sym_sqrt", "_sym_cos",
    "_sym_cosh", "_sym_sin", "_sym_sinh", "_sym_tan", "_sym_tanh", "_sym_asin", "_sym_acos", "_sym_atan", "_sym_log2",
)  # fmt: skip


def _functions() -> dict[str, Fn]:
    named: dict[str, Fn] = {}
    for module, names in ((operator, _OPERATORS), (math, _MATH), (torch, _TORCH)):
        for name in names:
            short = name.removeprefix("_sym_").removeprefix("sym_").rstrip("_")
            named.setdefault(f"sym.{short}", getattr(module, name))
    named["sym.round"] = builtins.round
    named["sym.bool"] = builtins.bool
    return named


_CALLABLES = _functions()
_NAMES: dict[Any, str] = {fn: name for name, fn in _CALLABLES.items()} | {
    # Other spellings of a function that has a name already.
    torch.sym_not: "sym.not",
    builtins.abs: "sym.abs",
    builtins.pow: "sym.pow",
    builtins.max: "sym.max",
    builtins.min: "sym.min",
    builtins.int: "sym.int",
    builtins.float: "sym.float",
    math.sqrt: "sym.sqrt",
    torch.sym_sqrt: "sym.sqrt",
}


def sym_name(fn: Any) -> str | None:
    """The graph's name of a host function; None where it is no arithmetic we know."""
    try:
        return _NAMES.get(fn)
    except TypeError:
        return None


def sym_callable(op: str) -> Fn:
    """The host function behind a name such as `sym.floordiv`."""
    try:
        return _CALLABLES[op]
    except KeyError:
        raise InternalError(f"no host function {op}") from None


register_namespace("sym", sym_callable)
for _name in _CALLABLES:
    defop(_name, Access.HOST)
