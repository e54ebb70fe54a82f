"""Results that are an argument with more behind it, in memory with room to grow: what a decode step appends copies no past.

    call k:      past [S rows]  ->  result [S + n rows] at the beginning of a new block with room for half as many rows again
    call k + 1:  that very result comes back as the past, so n rows are written behind it and a longer view is handed out

An older result still shows its own rows: only memory behind them is written. The room behind a result is claimed once, by the
first call that appends to it: a table knows the tensors whose room is free, by weak references, and forgets one when its room is
taken. Any other past finds no entry and is copied into a block of its own: a second continuation of the same past (beam search, a
copied cache), a tensor that no plan made, another Python object on the same memory, or one whose memory, sizes or strides were
exchanged.

The table is of a fixed size, one for the process, so that results of one plan are the past of any other. An entry that gives way to
another costs a copy. Everything here needs the interpreter lock.
"""

from __future__ import annotations

from hotfuse.base.once import once
from hotfuse.native import tensors
from hotfuse.native.function import python_symbols
from hotfuse.native.jit import Loaded, load_object
from hotfuse.native.toolchain import helper_object

GROWN = "hf_grown"
DECLARATION = f"declare ptr @{GROWN}(ptr, i64, ptr, ptr, i32, i64, ptr)"
"""(past, rank, sizes, strides, dtype, dim, counts) -> the result, or null with a Python error set; counts are [appended, moved]."""
_PAIRS = 2048
"""Of entries: a tensor has two places to be in, by its address."""
_WORDS = 8
_FREE_ROWS = 64
"""Rows of room at least."""


def _fields(entry: str) -> str:
    """The words of an entry: a weak reference, the object, its memory, its rows, those there is room for, and the block's bytes."""
    names = ("ref", "object", "data", "rows", "capacity", "bytes")
    return "".join(f"  %{entry}.{n} = getelementptr i64, ptr %{entry}, i64 {k}\n" for k, n in enumerate(names))


_TEXT = f"""{tensors.DECLARATIONS}
declare ptr @PyWeakref_NewRef(ptr, ptr)
declare ptr @PyWeakref_GetObject(ptr)
declare void @Py_DecRef(ptr)
declare void @PyErr_Clear()
declare ptr @PyErr_NoMemory()
@capacities = internal global [{2 * _PAIRS * _WORDS} x i64] zeroinitializer, align 64

define internal ptr @pair(ptr %object) {{
  %address = ptrtoint ptr %object to i64
  %low = lshr i64 %address, 4
  %high = lshr i64 %address, 15
  %mixed = xor i64 %low, %high
  %number = and i64 %mixed, {_PAIRS - 1}
  %word = mul i64 %number, {2 * _WORDS}
  %entry = getelementptr i64, ptr @capacities, i64 %word
  ret ptr %entry
}}

define internal i1 @alive(ptr %place, ptr %object) {{            ; whether an entry is about this very object
entry:
{_fields("place")}  %ref = load ptr, ptr %place.ref
  %known = load ptr, ptr %place.object
  %is = icmp eq ptr %known, %object
  %any = icmp ne ptr %ref, null
  %both = and i1 %is, %any
  br i1 %both, label %ask, label %no
ask:
  %held = call ptr @PyWeakref_GetObject(ptr %ref)
  %same = icmp eq ptr %held, %object
  ret i1 %same
no:
  ret i1 false
}}

define internal i1 @taken(ptr %place) {{                         ; whether an entry is about anything that there still is
entry:
{_fields("place")}  %ref = load ptr, ptr %place.ref
  %any = icmp ne ptr %ref, null
  br i1 %any, label %ask, label %no
ask:
  %known = load ptr, ptr %place.object
  %held = call ptr @PyWeakref_GetObject(ptr %ref)
  %same = icmp eq ptr %held, %known
  ret i1 %same
no:
  ret i1 false
}}

define internal void @forget(ptr %place) {{
entry:
{_fields("place")}  %ref = load ptr, ptr %place.ref
  store ptr null, ptr %place.ref
  store ptr null, ptr %place.object
  %any = icmp ne ptr %ref, null
  br i1 %any, label %drop, label %done
drop:
  call void @Py_DecRef(ptr %ref)
  br label %done
done:
  ret void
}}

define internal void @note(ptr %made, i64 %many, i64 %room) {{    ; the room behind a result is free
entry:
  %first = call ptr @pair(ptr %made)
  %second = getelementptr i64, ptr %first, i64 {_WORDS}
  %full = call i1 @taken(ptr %first)
  %chosen = select i1 %full, ptr %second, ptr %first
{_fields("chosen")}  call void @forget(ptr %chosen)
  %ref = call ptr @PyWeakref_NewRef(ptr %made, ptr null)
  %none = icmp eq ptr %ref, null
  br i1 %none, label %failed, label %write
failed:                                                       ; nobody appends to it
  call void @PyErr_Clear()
  ret void
write:
  %at = call ptr @hf_data(ptr %made)
  %bytes = call i64 @hf_room(ptr %made)
  store i64 %bytes, ptr %chosen.bytes
  store ptr %ref, ptr %chosen.ref
  store ptr %made, ptr %chosen.object
  store ptr %at, ptr %chosen.data
  store i64 %many, ptr %chosen.rows
  store i64 %room, ptr %chosen.capacity
  ret void
}}

define ptr @{GROWN}(ptr %past, i64 %rank, ptr %sizes, ptr %strides, i32 %dtype, i64 %dim, ptr %counts) {{
entry:
  %want.at = getelementptr i64, ptr %sizes, i64 %dim
  %want = load i64, ptr %want.at
  %first = call ptr @pair(ptr %past)
  %second = getelementptr i64, ptr %first, i64 {_WORDS}
  %is.first = call i1 @alive(ptr %first, ptr %past)
  %is.second = call i1 @alive(ptr %second, ptr %past)
  %e = select i1 %is.first, ptr %first, ptr %second
  %found = or i1 %is.first, %is.second
  br i1 %found, label %look, label %move
look:
{_fields("e")}  %data = call ptr @hf_data(ptr %past)
  %data.was = load ptr, ptr %e.data
  %rows.was = load i64, ptr %e.rows
  %capacity = load i64, ptr %e.capacity
  %has = call ptr @hf_sizes(ptr %past)
  %steps = call ptr @hf_strides(ptr %past)
  %rows.at = getelementptr i64, ptr %has, i64 %dim
  %rows = load i64, ptr %rows.at
  %data.same = icmp eq ptr %data, %data.was
  %rows.same = icmp eq i64 %rows, %rows.was
  %fits = icmp sle i64 %want, %capacity
  %longer = icmp sge i64 %want, %rows
  %now = call i32 @hf_of_now(ptr %past)
  %of.now = icmp ne i32 %now, 0
  %room = call i64 @hf_room(ptr %past)
  %held = load i64, ptr %e.bytes
  %whole = icmp eq i64 %room, %held
  %ok0 = and i1 %data.same, %rows.same
  %ok1 = and i1 %ok0, %fits
  %ok2 = and i1 %ok1, %longer
  %ok3 = and i1 %ok2, %of.now
  %ok4 = and i1 %ok3, %whole
  br label %dims
dims:                                                         ; it lies as the result will, but for the rows
  %d = phi i64 [0, %look], [%d1, %dims.next]
  %fine = phi i1 [%ok4, %look], [%fine1, %dims.next]
  %end = icmp eq i64 %d, %rank
  br i1 %end, label %decide, label %dims.next
dims.next:
  %size.at = getelementptr i64, ptr %sizes, i64 %d
  %size = load i64, ptr %size.at
  %size.has.at = getelementptr i64, ptr %has, i64 %d
  %size.has = load i64, ptr %size.has.at
  %step.at = getelementptr i64, ptr %strides, i64 %d
  %step = load i64, ptr %step.at
  %step.has.at = getelementptr i64, ptr %steps, i64 %d
  %step.has = load i64, ptr %step.has.at
  %grows = icmp eq i64 %d, %dim
  %size.same = icmp eq i64 %size, %size.has
  %size.ok = or i1 %grows, %size.same
  %step.ok = icmp eq i64 %step, %step.has
  %dim.ok = and i1 %size.ok, %step.ok
  %fine1 = and i1 %fine, %dim.ok
  %d1 = add i64 %d, 1
  br label %dims
decide:
  br i1 %fine, label %append, label %move

append:
  %longer.view = call ptr @hf_view(ptr %past, i64 %rank, ptr %sizes, ptr %strides)
  %no.view = icmp eq ptr %longer.view, null
  br i1 %no.view, label %fail, label %appended
appended:
  call void @forget(ptr %e)
  call void @note(ptr %longer.view, i64 %want, i64 %capacity)
  %appended.was = load i64, ptr %counts
  %appended.now = add i64 %appended.was, 1
  store i64 %appended.now, ptr %counts
  ret ptr %longer.view

move:                                                         ; into a block of its own
  %half = sdiv i64 %want, 2
  %few = icmp slt i64 %half, {_FREE_ROWS}
  %more = select i1 %few, i64 {_FREE_ROWS}, i64 %half
  %all = add i64 %want, %more
  %block.sizes = alloca i64, i64 %rank
  br label %sizes.copy
sizes.copy:
  %c = phi i64 [0, %move], [%c1, %sizes.next]
  %c.end = icmp eq i64 %c, %rank
  br i1 %c.end, label %make, label %sizes.next
sizes.next:
  %from.at = getelementptr i64, ptr %sizes, i64 %c
  %from = load i64, ptr %from.at
  %is.dim = icmp eq i64 %c, %dim
  %to = select i1 %is.dim, i64 %all, i64 %from
  %to.at = getelementptr i64, ptr %block.sizes, i64 %c
  store i64 %to, ptr %to.at
  %c1 = add i64 %c, 1
  br label %sizes.copy
make:
  %block = call ptr @hf_empty(i64 %rank, ptr %block.sizes, ptr %strides, i32 %dtype)
  %no.block = icmp eq ptr %block, null
  br i1 %no.block, label %fail, label %view
view:
  %result = call ptr @hf_view(ptr %block, i64 %rank, ptr %sizes, ptr %strides)
  %had = call ptr @hf_sizes(ptr %past)
  %had.at = getelementptr i64, ptr %had, i64 %dim
  %had.rows = load i64, ptr %had.at
  %begin.at = getelementptr i64, ptr %block.sizes, i64 %dim
  store i64 %had.rows, ptr %begin.at
  %begin = call ptr @hf_view(ptr %block, i64 %rank, ptr %block.sizes, ptr %strides)
  call void @Py_DecRef(ptr %block)
  %no.result = icmp eq ptr %result, null
  br i1 %no.result, label %fail.begin, label %copy
copy:
  %no.begin = icmp eq ptr %begin, null
  br i1 %no.begin, label %fail.result, label %copy.past
copy.past:
  %copy.failed = call i32 @hf_copy(ptr %begin, ptr %past)
  call void @Py_DecRef(ptr %begin)
  %copied = icmp eq i32 %copy.failed, 0
  br i1 %copied, label %moved, label %fail.copy
fail.begin:
  %any.begin = icmp ne ptr %begin, null
  br i1 %any.begin, label %drop.begin, label %fail
drop.begin:
  call void @Py_DecRef(ptr %begin)
  ret ptr null
fail.copy:
  %error = call ptr @PyErr_NoMemory()
  br label %fail.result
fail.result:
  call void @Py_DecRef(ptr %result)
  ret ptr null
moved:
  call void @note(ptr %result, i64 %want, i64 %all)
  %moved.at = getelementptr i64, ptr %counts, i64 1
  %moved.was = load i64, ptr %moved.at
  %moved.now = add i64 %moved.was, 1
  store i64 %moved.now, ptr %moved.at
  ret ptr %result
fail:
  ret ptr null
}}
"""
_API = ("PyWeakref_NewRef", "PyWeakref_GetObject", "Py_DecRef", "PyErr_Clear", "PyErr_NoMemory")


@once
def capacity_table() -> Loaded:
    """The compiled table; it lives as long as the process."""
    return load_object(helper_object(_TEXT), [GROWN], {**python_symbols(*_API), **tensors.symbols()})
