"""Rows of 32-bit numbers as panels of columns: how weights of linear layers are packed, at the speed of memory.

    rows[n][k]  ->  panels[ceil(n / width)][k][width], where the caller says; what a last panel has besides stays as it is

A panel's rows are read a cache line each at a time, ahead of use, and turned in squares of registers. Copying element by element
reads every line `width` times from places that fall into a few sets of the first-level cache: a second for BERT-base, beside calls.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

from hotfuse.base.once import once
from hotfuse.native.jit import Loaded, load_object
from hotfuse.native.toolchain import helper_object

_SIDE = 16
"""Rows and columns of a square: one cache line of each row."""
_FETCH_BYTES = 256
"""Bytes that rows are fetched ahead."""
_VECTOR = f"<{_SIDE} x i32>"
_MASK = f"<{_SIDE} x i32>"


def _masks(step: int) -> tuple[str, str]:
    """Which words of two rows, `step` apart, the first and the second of them have when blocks of so many are exchanged."""
    first = [j if not j & step else _SIDE + j - step for j in range(_SIDE)]
    second = [j + step if not j & step else _SIDE + j for j in range(_SIDE)]
    return tuple(f"{_MASK} <{', '.join(f'i32 {i}' for i in m)}>" for m in (first, second))  # pyright: ignore[reportReturnType]


def _square_text() -> str:
    """A square of words, transposed: four rounds that exchange ever smaller blocks between pairs of rows."""
    text = "define internal void @hf_square(ptr %from, i64 %row, ptr %to, i64 %step) alwaysinline {\n"
    rows = list[str]()
    for i in range(_SIDE):
        text += (
            f"  %o{i} = mul i64 %row, {i}\n  %p{i} = getelementptr i8, ptr %from, i64 %o{i}\n"
            f"  %f{i} = getelementptr i8, ptr %p{i}, i64 {_FETCH_BYTES}\n"
            f"  call void @llvm.prefetch.p0(ptr %f{i}, i32 0, i32 3, i32 1)\n"
            f"  %r{i} = load {_VECTOR}, ptr %p{i}, align 4\n"
        )
        rows.append(f"%r{i}")
    for step in (8, 4, 2, 1):
        first, second = _masks(step)
        after = list(rows)
        for i in (i for i in range(_SIDE) if not i & step):
            pair = f"{_VECTOR} {rows[i]}, {_VECTOR} {rows[i + step]}"
            after[i], after[i + step] = f"%s{step}.{i}", f"%s{step}.{i + step}"
            text += f"  {after[i]} = shufflevector {pair}, {first}\n  {after[i + step]} = shufflevector {pair}, {second}\n"
        rows = after
    for i, row in enumerate(rows):
        text += f"  %d{i} = mul i64 %step, {i}\n  %q{i} = getelementptr i8, ptr %to, i64 %d{i}\n"
        text += f"  store {_VECTOR} {row}, ptr %q{i}, align 4\n"
    return text + "  ret void\n}\n"


def _panels_text() -> str:
    """Panel by panel, a square's columns at a time; what is no whole square goes word by word."""
    return f"""
declare void @llvm.prefetch.p0(ptr, i32, i32, i32)
{_square_text()}
define void @hf_panels(ptr %src, i64 %n, i64 %k, i64 %row, ptr %dst, i64 %width, i64 %step, i64 %panel) {{
entry:
  %whole.k = and i64 %k, {-_SIDE}
  br label %panels
panels:
  %first = phi i64 [0, %entry], [%first1, %panel.end]
  %to.panel = phi ptr [%dst, %entry], [%to.panel1, %panel.end]
  %more = icmp ult i64 %first, %n
  br i1 %more, label %panel.begin, label %done
panel.begin:
  %left = sub i64 %n, %first
  %short = icmp ult i64 %left, %width
  %cols = select i1 %short, i64 %left, i64 %width
  %whole.c = and i64 %cols, {-_SIDE}
  %from.off = mul i64 %first, %row
  %from = getelementptr i8, ptr %src, i64 %from.off
  br label %k.loop
k.loop:
  %kk = phi i64 [0, %panel.begin], [%kk1, %k.end]
  %k.more = icmp ult i64 %kk, %k
  br i1 %k.more, label %k.body, label %panel.end
k.body:
  %k.whole = icmp ult i64 %kk, %whole.k
  %k.by = select i1 %k.whole, i64 {_SIDE}, i64 1
  %squares = select i1 %k.whole, i64 %whole.c, i64 0
  %k.bytes = shl i64 %kk, 2
  %from.k = getelementptr i8, ptr %from, i64 %k.bytes
  %to.off = mul i64 %kk, %step
  %to.k = getelementptr i8, ptr %to.panel, i64 %to.off
  br label %c.loop
c.loop:
  %c = phi i64 [0, %k.body], [%c.sq, %square], [%c.one, %word.end]
  %c.more = icmp ult i64 %c, %cols
  br i1 %c.more, label %c.body, label %k.end
c.body:
  %c.off = mul i64 %c, %row
  %from.c = getelementptr i8, ptr %from.k, i64 %c.off
  %c.bytes = shl i64 %c, 2
  %to.c = getelementptr i8, ptr %to.k, i64 %c.bytes
  %is.square = icmp ult i64 %c, %squares
  br i1 %is.square, label %square, label %words
square:
  call void @hf_square(ptr %from.c, i64 %row, ptr %to.c, i64 %step)
  %c.sq = add i64 %c, {_SIDE}
  br label %c.loop
words:
  %w = phi i64 [0, %c.body], [%w1, %words]
  %w.bytes = shl i64 %w, 2
  %w.from = getelementptr i8, ptr %from.c, i64 %w.bytes
  %word = load i32, ptr %w.from, align 4
  %w.off = mul i64 %w, %step
  %w.to = getelementptr i8, ptr %to.c, i64 %w.off
  store i32 %word, ptr %w.to, align 4
  %w1 = add i64 %w, 1
  %w.more = icmp ult i64 %w1, %k.by
  br i1 %w.more, label %words, label %word.end
word.end:
  %c.one = add i64 %c, 1
  br label %c.loop
k.end:
  %kk1 = add i64 %kk, %k.by
  br label %k.loop
panel.end:
  %first1 = add i64 %first, %width
  %to.panel1 = getelementptr i8, ptr %to.panel, i64 %panel
  br label %panels
done:
  ret void
}}
"""


@once
def _loaded() -> Loaded:
    return load_object(helper_object(_panels_text()), ["hf_panels"], {})


@functools.cache
def _native() -> Callable[..., Any]:
    """As a function that lets the interpreter lock go."""
    return ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 8)(_loaded().address("hf_panels"))


def fill_panels(source: tuple[int, int, int, int], target: tuple[int, int, int, int]) -> None:
    """`source`: address, rows, words of a row, bytes from row to row. `target`: address, words of a panel's row that are filled,
    bytes from one such row to the next, bytes from panel to panel."""
    _native()(*source, *target)
