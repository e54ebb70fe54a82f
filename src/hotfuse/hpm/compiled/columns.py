"""Formulas over columns, traced once and compiled to one loop over rows: a batch of candidates is small, and a hundred calls of
array functions for it take longer than the arithmetic.

    formulas(columns, at)        arrays in, arrays out: what the formulas mean
    the same with symbols        every operation becomes a line of code; equal ones become one

The code is the same for every machine: what a machine does in a second is among its arguments.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt

from hotfuse.base.errors import InternalError
from hotfuse.base.once import once
from hotfuse.native.jit import Loaded, load_object
from hotfuse.native.toolchain import helper_object

_BINARY: dict[Any, str] = {np.add: "fadd", np.subtract: "fsub", np.multiply: "fmul", np.true_divide: "fdiv"}
_COMPARED: dict[Any, str] = {
    np.greater: "ogt",
    np.greater_equal: "oge",
    np.less: "olt",
    np.less_equal: "ole",
    np.equal: "oeq",
}
_CALLED: dict[Any, str] = {np.log: "log", np.exp: "exp", np.ceil: "ceil", np.floor: "floor"}
_CHOSEN: dict[Any, str] = {np.maximum: "ogt", np.minimum: "olt"}
_LOGIC: dict[Any, str] = {np.bitwise_and: "and", np.bitwise_or: "or", np.logical_and: "and", np.logical_or: "or"}


class ColumnTrace:
    """Lines of the loop's body; what was computed before is not computed again."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._known: dict[str, str] = {}
        self.logs: dict[str, str] = {}
        """What each logarithm is taken of."""

    def line(self, text: str) -> str:
        """The name of what a line computes."""
        found = self._known.get(text)
        if found is None:
            found = self._known[text] = f"%v{len(self.lines)}"
            self.lines.append(f"  {found} = {text}")
        return found

    def read(self, pointer: str, at: int) -> Symbol:
        """A number that lies somewhere behind a pointer."""
        return Symbol(
            self, self.line(f"load double, ptr {self.line(f'getelementptr double, ptr {pointer}, i64 {at}')}")
        )

    def number(self, value: Any) -> str:
        """An operand as a number."""
        if isinstance(value, Symbol):
            return self.line(f"uitofp i1 {value.name} to double") if value.truth else value.name
        return f"0x{struct.unpack('<Q', struct.pack('<d', float(value)))[0]:016X}"

    def truth(self, value: Any) -> str:
        """An operand as something that holds or does not."""
        if not isinstance(value, Symbol) or not value.truth:
            raise InternalError(f"{value!r} is neither true nor false")
        return value.name


class Symbol(np.lib.mixins.NDArrayOperatorsMixin):
    """A column's number in one row, under construction."""

    def __init__(self, trace: ColumnTrace, name: str, *, truth: bool = False) -> None:
        self.trace, self.name, self.truth = trace, name, truth

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Symbol:
        t = self.trace
        if method != "__call__" or options:
            raise InternalError(f"formulas do without {ufunc.__name__}.{method} {options}")
        if ufunc in _BINARY:
            a, b = map(t.number, inputs)
            return Symbol(t, t.line(f"{_BINARY[ufunc]} double {a}, {b}"))
        if ufunc in _COMPARED:
            a, b = map(t.number, inputs)
            return Symbol(t, t.line(f"fcmp {_COMPARED[ufunc]} double {a}, {b}"), truth=True)
        if ufunc in _CHOSEN:
            a, b = map(t.number, inputs)
            first = t.line(f"fcmp {_CHOSEN[ufunc]} double {a}, {b}")
            return Symbol(t, t.line(f"select i1 {first}, double {a}, double {b}"))
        if ufunc in _CALLED:
            of = t.number(inputs[0])
            found = t.line(f"call double @llvm.{_CALLED[ufunc]}.f64(double {of})")
            if ufunc is np.log:
                t.logs[found] = of
            return Symbol(t, found)
        if ufunc in _LOGIC:
            a, b = map(t.truth, inputs)
            return Symbol(t, t.line(f"{_LOGIC[ufunc]} i1 {a}, {b}"), truth=True)
        if ufunc is np.invert:
            return Symbol(t, t.line(f"xor i1 {t.truth(inputs[0])}, true"), truth=True)
        raise InternalError(f"formulas do without {ufunc.__name__}")

    def __array_function__(self, func: Any, types: Any, args: Sequence[Any], options: Any) -> Symbol:
        if func is not np.where or options:
            raise InternalError(f"formulas do without {func.__name__}")
        t, (condition, one, other) = self.trace, args
        name = f"select i1 {t.truth(condition)}, double {t.number(one)}, double {t.number(other)}"
        return Symbol(t, t.line(name))


def _code(trace: ColumnTrace, width: int, doubles: Sequence[Any], singles: Sequence[Any], skipped: int) -> str:
    """The loop; the first singles are not its work."""
    stores: list[str] = []
    for at, value in enumerate(singles[skipped:], skipped):
        name = trace.line(f"fptrunc double {trace.number(value)} to float")
        stores += [f"  %sp{at} = getelementptr float, ptr %single, i64 {at}", f"  store float {name}, ptr %sp{at}"]
    for at, value in enumerate(doubles):
        name = trace.number(value)
        stores += [f"  %dp{at} = getelementptr double, ptr %double, i64 {at}", f"  store double {name}, ptr %dp{at}"]
    declared = "\n".join(f"declare double @llvm.{n}.f64(double)" for n in _CALLED.values())
    body = "\n".join([*trace.lines, *stores])
    return f"""{declared}
define void @rows(ptr %table, i64 %n, ptr %given, ptr %doubles, ptr %singles) {{
begin:
  %some = icmp sgt i64 %n, 0
  br i1 %some, label %next, label %end
next:
  %i = phi i64 [ 0, %begin ], [ %i1, %next ]
  %a = mul i64 %i, {width}
  %row = getelementptr double, ptr %table, i64 %a
  %b = mul i64 %i, {len(doubles)}
  %double = getelementptr double, ptr %doubles, i64 %b
  %c = mul i64 %i, {len(singles)}
  %single = getelementptr float, ptr %singles, i64 %c
{body}
  %i1 = add i64 %i, 1
  %more = icmp slt i64 %i1, %n
  br i1 %more, label %next, label %end
end:
  ret void
}}
"""


class ArgumentKind(Enum):
    """Arguments of native functions."""

    NUMBER = "number"
    ARRAY = "array"
    """An array's numbers, which lie one after the other."""


NUMBER, ARRAY = ArgumentKind.NUMBER, ArgumentKind.ARRAY


class NativeFunction:
    """Native code that can be called, and lives as long as this."""

    __slots__ = ("_call", "_loaded")

    def __init__(self, call: Callable[..., None], loaded: Loaded) -> None:
        self._call, self._loaded = call, loaded

    def __call__(self, *args: int | npt.NDArray[Any]) -> None:
        """Run it."""
        self._call(*args)


def function(
    text: str, name: str, kinds: Sequence[ArgumentKind], *, holding: bool = False, pointer: str = "ptr"
) -> NativeFunction:
    """A function of a module's text, which takes arguments of these kinds (addresses as `pointer`) and returns nothing.

    It runs without the interpreter lock, or `holding` it: then nobody changes what it reads. Asking an array where its numbers are
    takes longer than a short loop over them, so an entry in front of the function looks that up in the array itself.
    """
    word = data_word()
    entered, entry = (text, name) if word is None else (text + _entry(name, kinds, word, pointer), "entered")
    loaded = load_object(helper_object(entered), [entry])
    prototype = ctypes.PYFUNCTYPE if holding else ctypes.CFUNCTYPE
    given: Any = ctypes.py_object if word is not None else ctypes.c_void_p
    made = prototype(None, *(given if k is ARRAY else ctypes.c_int64 for k in kinds))
    if word is not None:
        return NativeFunction(made(loaded.address(entry)), loaded)
    plain = made(loaded.address(entry))
    return NativeFunction(lambda *args: plain(*(a.ctypes.data if isinstance(a, np.ndarray) else a for a in args)), loaded)


def _entry(name: str, kinds: Sequence[ArgumentKind], word: int, pointer: str) -> str:
    """A function that takes arrays as objects, and calls another one with the addresses of their numbers."""
    lines = [f"define void @entered({', '.join(f'i64 %a{i}' for i in range(len(kinds)))}) {{"]
    args: list[str] = []
    for i, kind in enumerate(kinds):
        if kind is NUMBER:
            args.append(f"i64 %a{i}")
            continue
        lines += [
            f"  %o{i} = add i64 %a{i}, {word * 8}",
            f"  %p{i} = inttoptr i64 %o{i} to ptr",
            f"  %d{i} = load {pointer}, ptr %p{i}",
        ]
        args.append(f"{pointer} %d{i}")
    return "\n".join(["", *lines, f"  call void @{name}({', '.join(args)})", "  ret void", "}", ""])


@once
def data_word() -> int | None:
    """The word of an array that says where its numbers are, found by looking at one; None where it is kept elsewhere."""
    thing = np.arange(7.0)
    words = list((ctypes.c_uint64 * (type(thing).__basicsize__ // 8)).from_address(id(thing)))
    return words.index(thing.ctypes.data) if words.count(thing.ctypes.data) == 1 else None


Matrix = npt.NDArray[np.float64]
Compiled = Callable[[Matrix, Matrix], tuple[Matrix, npt.NDArray[np.float32]]]
"""(rows, what is given) -> a row of doubles and one of singles for each."""


Read = Callable[[int], Symbol]


def _leading_logs(trace: ColumnTrace, singles: Sequence[Any]) -> list[Symbol]:
    """What the first singles are logarithms of: taken by the array function, which does several at once, not one by one."""
    found: list[Symbol] = []
    for value in singles:
        if not isinstance(value, Symbol) or value.name not in trace.logs:
            break
        found.append(Symbol(trace, trace.logs[value.name]))
    return found


def compiled(width: int, formulas: Callable[[Read, Read], tuple[list[Any], list[Any]]]) -> Compiled:
    """A function of rows: `formulas` is told how to read a row's numbers and the given ones, and answers with doubles, singles."""
    trace = ColumnTrace()
    doubles, singles = formulas(lambda at: trace.read("%row", at), lambda at: trace.read("%given", at))
    of_doubles, of_singles = len(doubles), len(singles)
    taken = _leading_logs(trace, singles)
    logs, every = len(taken), [*doubles, *taken]
    run = function(_code(trace, width, every, singles, logs), "rows", [ARRAY, NUMBER, ARRAY, ARRAY, ARRAY])

    def rows(table: Matrix, given: Matrix) -> tuple[Matrix, npt.NDArray[np.float32]]:
        own = np.ascontiguousarray(table, np.float64)
        if own.ndim != 2 or own.shape[1] != width:
            raise InternalError(f"formulas of {width} columns were given {own.shape}")
        n = len(own)
        found, narrow = np.empty((n, len(every))), np.empty((n, of_singles), np.float32)
        run(own, n, given, found, narrow)
        narrow[:, :logs] = np.log(found[:, of_doubles:])
        return found[:, :of_doubles], narrow

    return rows
