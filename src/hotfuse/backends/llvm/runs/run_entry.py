"""The code that every native run is entered through: one stub per process, over the words of a job.

It looks at every tensor (its element type, rank, and whether it lies as the run was made for), reads the run's sizes off them,
makes the results, finds an arena, lets the interpreter lock go and calls the run's body. `enter` says what that is for.
"""

from __future__ import annotations

import ctypes
import functools

import torch

from hotfuse.backends.llvm.runs import growth, kernel_faults
from hotfuse.backends.llvm.runs.symbols import CONTROL_HEAD, HEAD
from hotfuse.base.errors import InternalError
from hotfuse.base.once import once
from hotfuse.native import tensors
from hotfuse.native.function import python_symbols
from hotfuse.native.jit import Loaded, load_object
from hotfuse.native.toolchain import helper_object

ENTER, LET_GO = "enter", "let_go"
KEPT = 4
"""Arenas that a run keeps for its next calls."""
_THREADS = "_ZN2at15get_num_threadsEv"
_HEADER = 64
"""Bytes before an arena: how large it is."""

# Words of a job; `home` is the job whose arenas it uses.
AT_BODY, AT_LAYOUT, AT_TABLE, AT_INPUTS, AT_SIZES, AT_OUTPUTS = range(6)
AT_INPUT_SPECS, AT_SIZE_SPECS, AT_OUTPUT_SPECS, AT_LAYOUT_WORDS, AT_FALLBACK, AT_CONTROL = range(6, 12)
AT_HOME, AT_FELL_BACK, AT_ALLOCATED, AT_LARGEST, AT_APPENDED, AT_MOVED, AT_ARENAS = range(12, 19)
OUTPUT_WORDS = 4
"""Of a result: its rank, its dtype, the input that it is with more behind it, or -1, and the dim that grows."""
WORDS = AT_ARENAS + KEPT


def _text() -> str:
    """The stub; every value it needs of a run stands in the job."""

    def word(name: str, at: int, kind: str = "i64") -> str:
        return f"  %{name}.at = getelementptr i64, ptr %job, i64 {at}\n  %{name} = load {kind}, ptr %{name}.at\n"

    return (
        tensors.DECLARATIONS
        + growth.DECLARATION
        + """
declare ptr @PyLong_AsVoidPtr(ptr)
declare ptr @PyEval_SaveThread()
declare void @PyEval_RestoreThread(ptr)
declare ptr @PyObject_Vectorcall(ptr, ptr, i64, ptr)
declare ptr @PyTuple_New(i64)
declare i32 @PyTuple_SetItem(ptr, i64, ptr)
declare void @Py_DecRef(ptr)
declare ptr @PyErr_NoMemory()
declare i32 @hf_threads()
declare ptr @aligned_alloc(i64, i64)
declare void @free(ptr)
@hotfuse_faults = external global i64

define ptr @enter(ptr %self, ptr %args, i64 %n) {
entry:
  %job = call ptr @PyLong_AsVoidPtr(ptr %self)
"""
        + word("body", AT_BODY, "ptr")
        + word("layout", AT_LAYOUT, "ptr")
        + word("table", AT_TABLE, "ptr")
        + word("inputs", AT_INPUTS)
        + word("sizes", AT_SIZES)
        + word("outputs", AT_OUTPUTS)
        + word("input.specs", AT_INPUT_SPECS, "ptr")
        + word("size.specs", AT_SIZE_SPECS, "ptr")
        + word("output.specs", AT_OUTPUT_SPECS, "ptr")
        + word("words", AT_LAYOUT_WORDS)
        + word("fallback", AT_FALLBACK, "ptr")
        + word("given", AT_CONTROL, "ptr")
        + word("home", AT_HOME, "ptr")
        + f"""
  %own = alloca i64, i64 {CONTROL_HEAD}
  %own1 = getelementptr i64, ptr %own, i64 1
  store i64 0, ptr %own
  store i64 0, ptr %own1
  %untimed = icmp eq ptr %given, null
  %control = select i1 %untimed, ptr %own, ptr %given
  store i64 0, ptr %control
  %numbers.n = add i64 %sizes, 1
  %numbers = alloca i64, i64 %numbers.n
  %made = alloca i64, i64 %words
  %both = add i64 %inputs, %outputs
  %buffers.n = add i64 %both, {HEAD}
  %buffers = alloca ptr, i64 %buffers.n
  %right = icmp eq i64 %n, %inputs
  br i1 %right, label %input, label %back

input:                                                        ; every tensor: as expected, or the fallback
  %i = phi i64 [0, %entry], [%i1, %input.fine]
  %i.end = icmp eq i64 %i, %inputs
  br i1 %i.end, label %size, label %input.look
input.look:
  %object.at = getelementptr ptr, ptr %args, i64 %i
  %object = load ptr, ptr %object.at
  %spec.i = mul i64 %i, 3
  %spec = getelementptr i64, ptr %input.specs, i64 %spec.i
  %rank = load i64, ptr %spec
  %ignored = icmp slt i64 %rank, 0
  br i1 %ignored, label %input.fine, label %input.plain
input.plain:
  %plain = call i32 @hf_plain(ptr %object)
  %is.plain = icmp ne i32 %plain, 0
  br i1 %is.plain, label %input.type, label %back
input.type:
  %dtype.at = getelementptr i64, ptr %spec, i64 1
  %order.at = getelementptr i64, ptr %spec, i64 2
  %dtype = load i64, ptr %dtype.at
  %order = load ptr, ptr %order.at
  %rank.has = call i64 @hf_rank(ptr %object)
  %dtype.has32 = call i32 @hf_dtype(ptr %object)
  %dtype.has = sext i32 %dtype.has32 to i64
  %rank.ok = icmp eq i64 %rank, %rank.has
  %dtype.ok = icmp eq i64 %dtype, %dtype.has
  %type.ok = and i1 %rank.ok, %dtype.ok
  br i1 %type.ok, label %input.lies, label %back
input.lies:
  %data = call ptr @hf_data(ptr %object)
  %to.i = add i64 %i, {HEAD}
  %to = getelementptr ptr, ptr %buffers, i64 %to.i
  store ptr %data, ptr %to
  %any = icmp eq ptr %order, null
  br i1 %any, label %input.fine, label %input.dense
input.dense:
  %shape = call ptr @hf_sizes(ptr %object)
  %strides = call ptr @hf_strides(ptr %object)
  br label %dim
dim:                                                          ; from the innermost dim on
  %left = phi i64 [%rank, %input.dense], [%d, %dim.look]
  %dense = phi i64 [1, %input.dense], [%dense1, %dim.look]
  %bad = phi i1 [false, %input.dense], [%bad1, %dim.look]
  %dim.end = icmp eq i64 %left, 0
  br i1 %dim.end, label %dim.done, label %dim.look
dim.look:
  %d = sub i64 %left, 1
  %which.at = getelementptr i64, ptr %order, i64 %d
  %which = load i64, ptr %which.at
  %extent.at = getelementptr i64, ptr %shape, i64 %which
  %extent = load i64, ptr %extent.at
  %stride.at = getelementptr i64, ptr %strides, i64 %which
  %stride = load i64, ptr %stride.at
  %wrong = icmp ne i64 %stride, %dense
  %matters = icmp ne i64 %extent, 1
  %worse = and i1 %wrong, %matters
  %bad1 = or i1 %bad, %worse
  %dense1 = mul i64 %dense, %extent
  br label %dim
dim.done:                                                     ; without elements it lies in any way
  %some = icmp ne i64 %dense, 0
  %reject = and i1 %some, %bad
  br i1 %reject, label %back, label %input.fine
input.fine:
  %i1 = add i64 %i, 1
  br label %input

size:                                                         ; sizes and strides that are symbols of the run
  %s = phi i64 [0, %input], [%s1, %size.read]
  %s.end = icmp eq i64 %s, %sizes
  br i1 %s.end, label %ready, label %size.read
size.read:
  %read.i = mul i64 %s, 3
  %read = getelementptr i64, ptr %size.specs, i64 %read.i
  %kind.at = getelementptr i64, ptr %read, i64 1
  %axis.at = getelementptr i64, ptr %read, i64 2
  %source = load i64, ptr %read
  %kind = load i64, ptr %kind.at
  %axis = load i64, ptr %axis.at
  %from.at = getelementptr ptr, ptr %args, i64 %source
  %from = load ptr, ptr %from.at
  %from.sizes = call ptr @hf_sizes(ptr %from)
  %from.strides = call ptr @hf_strides(ptr %from)
  %is.stride = icmp ne i64 %kind, 0
  %list = select i1 %is.stride, ptr %from.strides, ptr %from.sizes
  %number.at = getelementptr i64, ptr %list, i64 %axis
  %number = load i64, ptr %number.at
  %number.to = getelementptr i64, ptr %numbers, i64 %s
  store i64 %number, ptr %number.to
  %s1 = add i64 %s, 1
  br label %size

ready:
  %threads32 = call i32 @hf_threads()
  %threads = sext i32 %threads32 to i64
  %threads.to = getelementptr i64, ptr %numbers, i64 %sizes
  store i64 %threads, ptr %threads.to
  call void %layout(ptr %made, ptr %numbers)
  %tuple = call ptr @PyTuple_New(i64 %outputs)
  %no.tuple = icmp eq ptr %tuple, null
  br i1 %no.tuple, label %fail, label %output

output:                                                       ; a new tensor for every result
  %o = phi i64 [0, %ready], [%o1, %output.fine]
  %w = phi i64 [1, %ready], [%w2, %output.fine]
  %o.end = icmp eq i64 %o, %outputs
  br i1 %o.end, label %memory, label %output.make
output.make:
  %about.i = mul i64 %o, {OUTPUT_WORDS}
  %about = getelementptr i64, ptr %output.specs, i64 %about.i
  %o.dtype.at = getelementptr i64, ptr %about, i64 1
  %o.rank = load i64, ptr %about
  %o.dtype = load i64, ptr %o.dtype.at
  %o.dtype32 = trunc i64 %o.dtype to i32
  %w1 = add i64 %w, %o.rank
  %w2 = add i64 %w1, %o.rank
  %o.shape = getelementptr i64, ptr %made, i64 %w
  %o.strides = getelementptr i64, ptr %made, i64 %w1
  %o.past.at = getelementptr i64, ptr %about, i64 2
  %o.past = load i64, ptr %o.past.at
  %is.grown = icmp sge i64 %o.past, 0
  br i1 %is.grown, label %output.grown, label %output.new
output.grown:
  %o.dim.at = getelementptr i64, ptr %about, i64 3
  %o.dim = load i64, ptr %o.dim.at
  %past.at = getelementptr ptr, ptr %args, i64 %o.past
  %past = load ptr, ptr %past.at
  %counts = getelementptr i64, ptr %home, i64 {AT_APPENDED}
  %result.grown = call ptr @hf_grown(ptr %past, i64 %o.rank, ptr %o.shape, ptr %o.strides, i32 %o.dtype32, i64 %o.dim, ptr %counts)
  br label %output.made
output.new:
  %result.new = call ptr @hf_empty(i64 %o.rank, ptr %o.shape, ptr %o.strides, i32 %o.dtype32)
  br label %output.made
output.made:
  %result = phi ptr [%result.grown, %output.grown], [%result.new, %output.new]
  %no.result = icmp eq ptr %result, null
  br i1 %no.result, label %drop, label %output.fine
output.fine:
  %set = call i32 @PyTuple_SetItem(ptr %tuple, i64 %o, ptr %result)
  %result.data = call ptr @hf_data(ptr %result)
  %result.i = add i64 %inputs, %o
  %result.slot = add i64 %result.i, {HEAD}
  %result.to = getelementptr ptr, ptr %buffers, i64 %result.slot
  store ptr %result.data, ptr %result.to
  %o1 = add i64 %o, 1
  br label %output

memory:
  %need = load i64, ptr %made
  %needs = icmp sgt i64 %need, 0
  br i1 %needs, label %slot, label %go
slot:                                                         ; a kept arena that is large enough
  %a = phi i64 [0, %memory], [%a1, %slot.next]
  %a.end = icmp eq i64 %a, {KEPT}
  br i1 %a.end, label %new, label %slot.take
slot.take:
  %slot.i = add i64 %a, {AT_ARENAS}
  %slot.at = getelementptr i64, ptr %home, i64 %slot.i
  %block = atomicrmw xchg ptr %slot.at, ptr null acq_rel
  %a1 = add i64 %a, 1
  %empty = icmp eq ptr %block, null
  br i1 %empty, label %slot.next, label %slot.fits
slot.fits:
  %capacity = load i64, ptr %block
  %fits = icmp sge i64 %capacity, %need
  br i1 %fits, label %go, label %slot.small
slot.small:
  call void @free(ptr %block)
  br label %slot.next
slot.next:
  br label %slot
new:
  %more = add i64 %need, {_HEADER + 63}
  %bytes = and i64 %more, -64
  %fresh = call ptr @aligned_alloc(i64 64, i64 %bytes)
  %none = icmp eq ptr %fresh, null
  br i1 %none, label %out.of.memory, label %new.fine
new.fine:
  store i64 %need, ptr %fresh
  %allocated.at = getelementptr i64, ptr %home, i64 {AT_ALLOCATED}
  %allocated = atomicrmw add ptr %allocated.at, i64 1 monotonic
  %largest.at = getelementptr i64, ptr %home, i64 {AT_LARGEST}
  %largest = atomicrmw max ptr %largest.at, i64 %bytes monotonic
  br label %go
out.of.memory:
  %raised = call ptr @PyErr_NoMemory()
  br label %drop

go:
  %arena = phi ptr [null, %memory], [%block, %slot.fits], [%fresh, %new.fine]
  %arena.begin = getelementptr i8, ptr %arena, i64 {_HEADER}
  %b1 = getelementptr ptr, ptr %buffers, i64 1
  %b2 = getelementptr ptr, ptr %buffers, i64 2
  store ptr %table, ptr %buffers
  store ptr %arena.begin, ptr %b1
  store ptr %control, ptr %b2
  %faults.before = load atomic i64, ptr @hotfuse_faults monotonic, align 8
  %thread = call ptr @PyEval_SaveThread()
  call void %body(ptr %buffers, ptr %numbers)
  call void @PyEval_RestoreThread(ptr %thread)
  %faults.after = load atomic i64, ptr @hotfuse_faults monotonic, align 8
  %no.arena = icmp eq ptr %arena, null
  br i1 %no.arena, label %done, label %keep
keep:                                                         ; into the first free place; the one pushed out moves on
  %k = phi i64 [0, %go], [%k1, %keep.next]
  %hand = phi ptr [%arena, %go], [%pushed, %keep.next]
  %k.end = icmp eq i64 %k, {KEPT}
  br i1 %k.end, label %keep.full, label %keep.put
keep.put:
  %keep.i = add i64 %k, {AT_ARENAS}
  %keep.at = getelementptr i64, ptr %home, i64 %keep.i
  %pushed = atomicrmw xchg ptr %keep.at, ptr %hand acq_rel
  %k1 = add i64 %k, 1
  %placed = icmp eq ptr %pushed, null
  br i1 %placed, label %done, label %keep.next
keep.next:
  br label %keep
keep.full:
  call void @free(ptr %hand)
  br label %done

done:
  %status = load i64, ptr %control
  %bailed = icmp ne i64 %status, 0
  %faulted = icmp ne i64 %faults.before, %faults.after
  %again = or i1 %bailed, %faulted
  br i1 %again, label %undo, label %fine
fine:
  ret ptr %tuple
undo:
  call void @Py_DecRef(ptr %tuple)
  br label %back
drop:
  call void @Py_DecRef(ptr %tuple)
  br label %fail
fail:
  ret ptr null
back:
  %fell.at = getelementptr i64, ptr %job, i64 {AT_FELL_BACK}
  %fell = atomicrmw add ptr %fell.at, i64 1 monotonic
  %answer = call ptr @PyObject_Vectorcall(ptr %fallback, ptr %args, i64 %n, ptr null)
  ret ptr %answer
}}
"""
        + f"""
define void @let_go(ptr %home) {{                             ; free the kept arenas; one that a call has in hand is not among them
entry:
  br label %slot
slot:
  %a = phi i64 [0, %entry], [%a1, %next]
  %end = icmp eq i64 %a, {KEPT}
  br i1 %end, label %done, label %take
take:
  %i = add i64 %a, {AT_ARENAS}
  %at = getelementptr i64, ptr %home, i64 %i
  %block = atomicrmw xchg ptr %at, ptr null acq_rel
  %empty = icmp eq ptr %block, null
  br i1 %empty, label %next, label %give
give:
  call void @free(ptr %block)
  br label %next
next:
  %a1 = add i64 %a, 1
  br label %slot
done:
  ret void
}}
"""
    )


_API = ("PyLong_AsVoidPtr", "PyEval_SaveThread", "PyEval_RestoreThread", "PyObject_Vectorcall", "PyTuple_New", "PyTuple_SetItem",
        "Py_DecRef", "PyErr_NoMemory")  # fmt: skip


@once
def stub() -> Loaded:
    """The compiled stub; it lives as long as the process."""
    library = ctypes.CDLL(torch._C.__file__)  # pyright: ignore[reportPrivateUsage]
    threads = ctypes.cast(getattr(library, _THREADS), ctypes.c_void_p).value or 0
    symbols = {**python_symbols(*_API), "hf_threads": threads, **tensors.symbols(), **kernel_faults.SYMBOLS,
               growth.GROWN: growth.capacity_table().address(growth.GROWN)}  # fmt: skip
    return load_object(helper_object(_text()), [ENTER, LET_GO], symbols)


@functools.cache
def unavailable() -> str:
    """Why runs cannot be entered in this process; empty if they can."""
    if why := tensors.unavailable():
        return why
    try:
        stub()
    except (InternalError, AttributeError) as e:
        return str(e).splitlines()[0]
    return ""
