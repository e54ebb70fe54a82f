"""Sums over what candidates are made of, in native code: a batch has a few hundred nodes and values, too few for array functions.

A candidate's places lie one behind the other: nodes, then inputs, weights and outputs. Nodes add up (or the largest counts), bytes
of values become columns of edges. What is told of nodes besides is what `hpm.recompute_factor` asks for.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.base.once import once
from hotfuse.hpm.compiled import columns as native
from hotfuse.hpm.recompute_factor import POINTWISE
from hotfuse.hpm.work import COLUMN, MAXIMA, NAMES, SUMS, Matrix

KIND, SIZE = len(SUMS) + len(MAXIMA), len(SUMS) + len(MAXIMA) + 1
"""A node's columns behind those of rows: what kind it is for what is computed again, and its elements."""
NODE_WIDTH, VALUE_WIDTH = SIZE + 1, 3
"""Columns of tables of nodes and of values (bytes, whether strides are odd, bytes of an element)."""
BROADCAST = 0.5
"""An input of less than this part of the largest tensor is read again and again."""
Places = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class CandidateColumns:
    """All candidates' nodes in order: where their rows are, their kinds and elements; and for each candidate whether some pointwise
    node has fewer elements than the largest tensor.
    """

    places: Places
    kinds: npt.NDArray[np.float64]
    sizes: npt.NDArray[np.float64]
    smaller: npt.NDArray[np.float64]


def _loop(name: str, first: str, stop: str, body: str) -> str:
    return f"""
  br label %{name}.before
{name}.before:
  br label %{name}.head
{name}.head:
  %{name} = phi i64 [ {first}, %{name}.before ], [ %{name}.next, %{name}.end ]
  %{name}.in = icmp slt i64 %{name}, {stop}
  br i1 %{name}.in, label %{name}.body, label %{name}.out
{name}.body:
{body}
  br label %{name}.end
{name}.end:
  %{name}.next = add i64 %{name}, 1
  br label %{name}.head
{name}.out:"""


def _at(name: str, pointer: str, index: str, kind: str = "double") -> str:
    return f"  %{name}.p = getelementptr {kind}, ptr {pointer}, i64 {index}\n  %{name} = load {kind}, ptr %{name}.p"


def _row(name: str, loop: str, table: str, width: int) -> str:
    """Where the row lies whose place a loop has come to."""
    return f"""{_at(f"{name}.place", "%places", f"%{loop}", "i64")}
  %{name}.o = mul i64 %{name}.place, {width}
  %{name} = getelementptr double, ptr {table}, i64 %{name}.o"""


def _add(name: str, column: str, number: str) -> str:
    return f"""{_at(name, "%row", str(COLUMN[column]))}
  %{name}.sum = fadd double %{name}, {number}
  store double %{name}.sum, ptr %{name}.p"""


def _put(name: str, column: str, number: str) -> str:
    at = COLUMN[column]
    return f"  %{name} = getelementptr double, ptr %row, i64 {at}\n  store double {number}, ptr %{name}"


def _larger(name: str, pointer: str, number: str) -> str:
    return f"""  %{name}.old = load double, ptr {pointer}
  %{name}.more = fcmp ogt double {number}, %{name}.old
  %{name}.new = select i1 %{name}.more, double {number}, double %{name}.old
  store double %{name}.new, ptr {pointer}"""


def _code() -> str:
    own = "getelementptr double, ptr %node, i64"
    sums = _loop("s", "0", str(len(SUMS)), f"""  %s.f = {own} %s
  %s.v = load double, ptr %s.f
{_at("s.t", "%row", "%s")}
  %s.sum = fadd double %s.t, %s.v
  store double %s.sum, ptr %s.t.p""")  # fmt: skip
    maxima = _loop("m", str(len(SUMS)), str(KIND), f"""  %m.f = {own} %m
  %m.v = load double, ptr %m.f
  %m.t = getelementptr double, ptr %row, i64 %m
{_larger("m.l", "%m.t", "%m.v")}""")  # fmt: skip
    told = "\n".join(
        f"""{_at(f"k.{n}", "%node", str(at))}
  %k.{n}.q = getelementptr double, ptr %{n}, i64 %k.w
  store double %k.{n}, ptr %k.{n}.q"""
        for n, at in (("kinds", KIND), ("sizes", SIZE))
    )
    nodes = _loop("k", "%p0", "%p1", f"""{_row("node", "k", "%nodes", NODE_WIDTH)}
  %k.r = sub i64 %k, %p0
  %k.w = add i64 %k.r, %done
  %k.q = getelementptr i64, ptr %where, i64 %k.w
  store i64 %node.place, ptr %k.q
{told}
{sums}
{maxima}""")  # fmt: skip
    smaller = _loop("j", "%done", "%done.next", f"""{_at("j.kind", "%kinds", "%j")}
{_at("j.size", "%sizes", "%j")}
  %j.is = fcmp oeq double %j.kind, {float(POINTWISE)}
  %j.less = fcmp olt double %j.size, %largest
  %j.both = and i1 %j.is, %j.less
  %j.one = uitofp i1 %j.both to double
{_larger("j.l", "%small", "%j.one")}""")  # fmt: skip
    inputs = _loop("a", "%p1", "%p2", f"""{_row("in", "a", "%values", VALUE_WIDTH)}
{_at("in.bytes", "%in", "0")}
{_at("in.odd", "%in", "1")}
{_add("a.b", "bytes_in", "%in.bytes")}
{_add("a.o", "strided", "%in.odd")}
{_add("a.n", "small_inputs", "1.0")}
{_larger("a.l", "%most", "%in.bytes")}""")  # fmt: skip
    weights = _loop("h", "%p2", "%p3", f"""{_row("held", "h", "%values", VALUE_WIDTH)}
{_at("held.bytes", "%held", "0")}
{_add("h.b", "bytes_const", "%held.bytes")}""")  # fmt: skip
    outputs = _loop("o", "%p3", "%p4", f"""{_row("made", "o", "%values", VALUE_WIDTH)}
{_at("made.bytes", "%made", "0")}
{_at("made.each", "%made", "2")}
{_add("o.b", "bytes_out", "%made.bytes")}
{_put("o.e", "element_bytes", "%made.each")}""")  # fmt: skip
    large = _loop("z", "%p1", "%p2", f"""{_row("again", "z", "%values", VALUE_WIDTH)}
{_at("again.bytes", "%again", "0")}
  %z.large = fcmp oge double %again.bytes, %bar
  %z.one = uitofp i1 %z.large to double
  %z.minus = fneg double %z.one
{_add("z.s", "streams", "%z.one")}
{_add("z.n", "small_inputs", "%z.minus")}""")  # fmt: skip
    counts = "\n".join(
        f"  %c{i}.i = add i64 %c.o, {i}\n{_at(f'c{i}', '%counts', f'%c{i}.i', 'i64')}\n"
        f"  %p{i + 1} = add i64 %p{i}, %c{i}" for i in range(4)
    )  # fmt: skip
    body = f"""  %r.o = mul i64 %i, {len(NAMES)}
  %row = getelementptr double, ptr %table, i64 %r.o
  %small = getelementptr double, ptr %smaller, i64 %i
  %c.o = mul i64 %i, 4
  %p0 = load i64, ptr %at
  %done = load i64, ptr %nodes_done
{counts}
  %done.next = add i64 %done, %c0
  store i64 %p4, ptr %at
  store i64 %done.next, ptr %nodes_done
  store double 0.0, ptr %most
{_put("first.s", "streams", "1.0")}
{_put("first.e", "element_bytes", "4.0")}
{nodes}
{_at("largest", "%row", str(COLUMN["elements"]))}
{smaller}
{inputs}
{weights}
{outputs}
{_at("written", "%row", str(COLUMN["bytes_out"]))}
{_larger("w", "%most", "%written")}
  %held.most = load double, ptr %most
  %bar = fmul double %held.most, {BROADCAST}
{large}"""
    return f"""
define void @tally(i64 %n, ptr %counts, ptr %places, ptr %nodes, ptr %values, ptr %table, ptr %where, ptr %kinds, ptr %sizes,
                   ptr %smaller) {{
begin:
  %at = alloca i64
  %nodes_done = alloca i64
  %most = alloca double
  store i64 0, ptr %at
  store i64 0, ptr %nodes_done
{_loop("i", "0", "%n", body)}
  ret void
}}
"""


@once
def _compiled() -> native.NativeFunction:
    return native.function(_code(), "tally", [native.NUMBER, *[native.ARRAY] * 9])


def fill(table: Matrix, places: Places, counts: Places, nodes: Matrix, values: Matrix) -> CandidateColumns:
    """Sums, maxima and edges into a table of zeros; `counts` has four numbers for each row: nodes, inputs, weights, outputs."""
    run = _compiled()
    total = int(counts[::4].sum())
    told = CandidateColumns(np.empty(total, np.int64), np.empty(total), np.empty(total), np.zeros(len(table)))
    run(
        len(table), counts, places, nodes, values, table, told.places, told.kinds, told.sizes, told.smaller
    )  # fmt: skip
    return told
