"""A decision over a call's facts as one native function over its tensors: `select(*tensors) -> int`.

The answer is the number of the first plan whose facts hold, or -(1 + number of the fact that struck out the last plan). Hits per
plan and misses per fact are counted by the code itself, with atomic additions into an array that Python reads.

Sizes are read where a fact asks for them, which is after the rank was checked. Arithmetic is exact: a predicate in which a number
leaves 64 bits, or a divisor is zero, does not hold, so the call goes to a plan that asks less.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from functools import reduce
from typing import Any

from hotfuse.analysis.call_facts import (
    Aligned,
    AllEqual,
    Dense,
    Fact,
    Holds,
    Outer,
    Plain,
    Ranked,
    Sized,
    Typed,
    inputs_of,
    places_in,
)
from hotfuse.analysis.decision import Ask, DecisionDag, Hit, Miss
from hotfuse.base.errors import InternalError
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.dims import Dim, Sym, dims_in
from hotfuse.ir.types import DType, bits
from hotfuse.native import tensors
from hotfuse.native.division import floored
from hotfuse.native.function import python_function, python_symbols
from hotfuse.native.jit import load_object
from hotfuse.native.scan import SCANS
from hotfuse.native.toolchain import helper_object
from hotfuse.ops.torch_dtypes import torch_dtype

Select = Callable[..., int]
_FORMAT = {DType.F64: "<d", DType.F32: "<f", DType.F16: "<e", DType.I64: "<q", DType.I32: "<i", DType.I16: "<h", DType.I8: "<b",
           DType.U8: "<B", DType.U16: "<H", DType.U32: "<I", DType.U64: "<Q"}  # fmt: skip
_CHECKED = {"+": "sadd", "*": "smul"}
_COMPARE = {"==": "eq", "!=": "ne", "<": "slt", "<=": "sle"}
_HEAD = tensors.DECLARATIONS + """
declare ptr @PyLong_FromLongLong(i64)
declare i32 @PyErr_BadArgument()
declare {i64, i1} @llvm.sadd.with.overflow.i64(i64, i64)
declare {i64, i1} @llvm.smul.with.overflow.i64(i64, i64)
declare i64 @llvm.smax.i64(i64, i64)
declare i64 @llvm.smin.i64(i64, i64)
@counters = external global i64
"""


@dataclass(frozen=True, slots=True)
class NativeSelect:
    """A compiled decision."""

    select: Select
    """`select(*tensors)`: number of a plan, or -(1 + number of a fact)."""
    counters: Any
    """Hits per plan, then misses per fact; owned by the function too."""
    text: str
    """Its LLVM IR, for a reader."""

    def hits(self, plans: int) -> list[int]:
        """Hits per plan so far."""
        return list(self.counters[:plans])

    def misses(self, plans: int) -> list[int]:
        """Misses per fact so far."""
        return list(self.counters[plans:])


def value_bits(dtype: DType, value: float) -> int:
    """A value as it lies in memory."""
    form = _FORMAT.get(dtype)
    if form is None:
        raise InternalError(f"elements of type {dtype.value} cannot be guarded natively")
    try:
        packed = struct.pack(form, value if form[1] in "dfe" else int(value))
    except (struct.error, OverflowError) as e:
        raise InternalError(f"{value} is no {dtype.value}") from e
    return int.from_bytes(packed, "little")


class _GuardWriter:
    def __init__(self, decision: DecisionDag) -> None:
        self.decision = decision
        self.lines: list[str] = []
        self.count = 0
        self.scans: set[str] = set()
        self.shared: dict[str, str] = {}
        """What the checks that all plans share have read: they lie on the way to every other step."""
        self.read: dict[str, str] = {}

    def new(self, text: str) -> str:
        self.count += 1
        self.lines.append(f"  %v{self.count} = {text}")
        return f"%v{self.count}"

    def text(self) -> str:
        d = self.decision
        for i in range(d.inputs):
            at = self.new(f"getelementptr ptr, ptr %args, i64 {i}")
            self.lines.append(f"  %o{i} = load ptr, ptr {at}")
        self.lines.append("  br label %s0")
        for n, step in enumerate(d.steps):
            self.lines.append(f"s{n}:")
            self.read = self.shared if isinstance(step, Ask) and step.fact < d.common else dict(self.shared)
            match step:
                case Hit(plan):
                    self.answer(plan, plan)
                case Miss(fact):
                    self.answer(d.plans + fact, -1 - fact)
                case Ask(fact, yes, no):
                    held = self.fact(d.facts[fact])
                    self.lines.append(f"  br i1 {held}, label %s{yes}, label %s{no}")
        body = "\n".join(self.lines)
        scans = "".join(SCANS[name] for name in sorted(self.scans))
        return f"""{_HEAD}{scans}
define ptr @select(ptr %self, ptr %args, i64 %n) {{
entry:
  %fits = icmp eq i64 %n, {d.inputs}
  br i1 %fits, label %start, label %wrong
wrong:
  %bad = call i32 @PyErr_BadArgument()
  ret ptr null
start:
{body}
}}
"""

    def answer(self, counter: int, result: int) -> None:
        at = self.new(f"getelementptr i64, ptr @counters, i64 {counter}")
        self.new(f"atomicrmw add ptr {at}, i64 1 monotonic")
        made = self.new(f"call ptr @PyLong_FromLongLong(i64 {result})")
        self.lines.append(f"  ret ptr {made}")

    def fact(self, fact: Fact) -> str:
        match fact:
            case Plain(i, device):
                if device != "cpu":
                    raise InternalError(f"an input on {device} cannot be guarded natively")
                return self.truth(self.new(f"call i32 @hf_plain(ptr %o{i})"))
            case Typed(i, dtype):
                code = self.once(f"call i32 @hf_dtype(ptr %o{i})")
                return self.new(f"icmp eq i32 {code}, {tensors.dtype_code(torch_dtype(dtype))}")
            case Ranked(i, rank):
                return self.new(f"icmp eq i64 {self.once(f'call i64 @hf_rank(ptr %o{i})')}, {rank}")
            case Sized(i, dim, size):
                return self.new(f"icmp eq i64 {self.item('sizes', i, dim)}, {size}")
            case Aligned(i, count):
                address = self.new(f"ptrtoint ptr {self.new(f'call ptr @hf_data(ptr %o{i})')} to i64")
                return self.new(f"icmp eq i64 {self.new(f'and i64 {address}, {count - 1}')}, 0")
            case Dense():
                return self.dense(fact)
            case Outer():
                return self.outside(fact)
            case Holds(predicate):
                return self.holds(predicate)
            case AllEqual():
                return self.all_equal(fact)

    def once(self, text: str) -> str:
        """The result of a call that gives the same whenever it is made."""
        if text not in self.read:
            self.read[text] = self.new(text)
        return self.read[text]

    def truth(self, number: str) -> str:
        return self.new(f"icmp ne i32 {number}, 0")

    def item(self, what: str, i: int, dim: int) -> str:
        base = self.once(f"call ptr @hf_{what}(ptr %o{i})")
        return self.load(base, dim)

    def load(self, base: str, dim: int) -> str:
        return self.once(f"load i64, ptr {self.once(f'getelementptr i64, ptr {base}, i64 {dim}')}")

    def dense(self, fact: Dense) -> str:
        """As torch judges it: sizes of 1 may have any stride, and a tensor without elements is dense."""
        if fact.rank == 0:
            return "true" if fact.yes else "false"
        order = fact.order if fact.order is not None else tuple(range(fact.rank))
        sizes = self.once(f"call ptr @hf_sizes(ptr %o{fact.input})")
        strides = self.once(f"call ptr @hf_strides(ptr %o{fact.input})")
        run, good = "1", "true"
        for d in reversed(order):
            size, stride = self.load(sizes, d), self.load(strides, d)
            one = self.new(f"icmp eq i64 {size}, 1")
            fits = self.new(f"icmp eq i64 {stride}, {run}")
            good = self.new(f"and i1 {good}, {self.new(f'or i1 {one}, {fits}')}")
            run = self.new(f"mul i64 {run}, {size}")
        empty = self.new(f"icmp eq i64 {run}, 0")
        good = self.new(f"or i1 {good}, {empty}")
        return good if fact.yes else self.new(f"xor i1 {good}, true")

    def outside(self, fact: Outer) -> str:
        sizes = self.once(f"call ptr @hf_sizes(ptr %o{fact.input})")
        strides = self.once(f"call ptr @hf_strides(ptr %o{fact.input})")
        outer, inner = self.load(strides, fact.dim), self.load(strides, fact.inner)
        if fact.dim < fact.inner:
            lies = self.new(f"or i1 {self.new(f'icmp sge i64 {outer}, {inner}')}, {self.new(f'icmp eq i64 {outer}, 0')}")
        else:
            lies = self.new(f"and i1 {self.new(f'icmp sgt i64 {outer}, {inner}')}, {self.new(f'icmp sgt i64 {inner}, 0')}")
        for dim in (fact.dim, fact.inner):
            lies = self.new(f"or i1 {lies}, {self.new(f'icmp eq i64 {self.load(sizes, dim)}, 1')}")
        return lies

    def all_equal(self, fact: AllEqual) -> str:
        data = self.new(f"call ptr @hf_data(ptr %o{fact.input})")
        count = self.new(f"call i64 @hf_numel(ptr %o{fact.input})")
        if fact.dtype is DType.BOOL:
            name, wanted = ("hf_all_true", "") if fact.value else ("hf_all_8", ", i8 0")
        else:
            width = bits(fact.dtype)
            name, wanted = f"hf_all_{width}", f", i{width} {value_bits(fact.dtype, fact.value)}"
        self.scans.add(name)
        return self.truth(self.new(f"call i32 @{name}(ptr {data}, i64 {count}{wanted})"))

    def holds(self, predicate: Sym) -> str:
        bases = {i: self.once(f"call ptr @hf_sizes(ptr %o{i})") for i in inputs_of(Holds(predicate))}
        places = {f"t{i}.{d}": self.load(bases[i], d) for i, d in places_in(predicate)}
        faults: list[str] = []
        held = self.new(f"icmp ne i64 {self.number(predicate, places, faults)}, 0")
        for fault in faults:
            held = self.new(f"and i1 {held}, {self.new(f'xor i1 {fault}, true')}")
        return held

    def number(self, d: Dim, places: dict[str, str], faults: list[str]) -> str:
        if isinstance(d, int):
            if not -(2**63) <= d < 2**63:
                raise InternalError(f"{d} cannot be guarded natively")
            return str(d)
        if d.op == "sym":
            return places[str(d.args[0])]
        if d.op == "**":
            return self.power(d, places, faults)
        parts = [self.number(a, places, faults) for a in dims_in(d)]
        match d.op:
            case "+" | "*":
                return reduce(lambda a, b: self.checked(d.op, a, b, faults), parts)
            case "max" | "min":
                return reduce(lambda a, b: self.new(f"call i64 @llvm.s{d.op}.i64(i64 {a}, i64 {b})"), parts)
            case "//" | "%":
                return self.divided(d.op, parts[0], parts[1], faults)
            case "ceildiv":
                negative = self.checked("*", parts[0], "-1", faults)
                return self.checked("*", self.divided("//", negative, parts[1], faults), "-1", faults)
            case "and" | "or":
                flags = [self.new(f"icmp ne i64 {p}, 0") for p in parts]
                return self.widened(reduce(lambda a, b: self.new(f"{d.op} i1 {a}, {b}"), flags))
            case "not":
                return self.widened(self.new(f"icmp eq i64 {parts[0]}, 0"))
            case "==" | "!=" | "<" | "<=":
                return self.widened(self.new(f"icmp {_COMPARE[d.op]} i64 {parts[0]}, {parts[1]}"))
            case _:
                raise InternalError(f"no native guard for {d.op}")

    def widened(self, flag: str) -> str:
        return self.new(f"zext i1 {flag} to i64")

    def checked(self, op: str, a: str, b: str, faults: list[str]) -> str:
        pair = self.new(f"call {{i64, i1}} @llvm.{_CHECKED[op]}.with.overflow.i64(i64 {a}, i64 {b})")
        faults.append(self.new(f"extractvalue {{i64, i1}} {pair}, 1"))
        return self.new(f"extractvalue {{i64, i1}} {pair}, 0")

    def divided(self, op: str, a: str, b: str, faults: list[str]) -> str:
        """Rounded to minus infinity, as in Python; the remainder has the divisor's sign."""
        zero = self.new(f"icmp eq i64 {b}, 0")
        faults.append(zero)
        safe = self.new(f"select i1 {zero}, i64 1, i64 {b}")
        return floored(self.new, op, a, safe)

    def power(self, d: Sym, places: dict[str, str], faults: list[str]) -> str:
        base, exponent = dims_in(d)
        if not isinstance(exponent, int) or not 0 <= exponent <= 64:
            raise InternalError("no native guard for a power whose exponent is not a small number")
        number, result = self.number(base, places, faults), "1"
        for _ in range(exponent):
            result = self.checked("*", result, number, faults)
        return result


def select_text(decision: DecisionDag) -> str:
    """The LLVM IR of a decision."""
    return _GuardWriter(decision).text()


def native_select(decision: DecisionDag) -> NativeSelect:
    """A decision compiled for this process; raises InternalError where native code cannot decide it.

    Some milliseconds, nearly all of them in LLVM without the interpreter lock: for the background.
    """
    text = select_text(decision)
    counters = (ctypes.c_int64 * (decision.plans + len(decision.facts)))()
    symbols = {**tensors.symbols(), **python_symbols("PyLong_FromLongLong", "PyErr_BadArgument"),
               "counters": ctypes.addressof(counters)}  # fmt: skip
    loaded = load_object(helper_object(text), ["select"], symbols)
    return NativeSelect(python_function(loaded, "select", counters), counters, text)
