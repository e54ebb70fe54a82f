"""How Python enters a native run: with the tensors themselves, in one call that gives the results.

`enter(tensor...) -> (tensor, ...)` is a built-in function over one stub per process. The stub looks at every tensor (its element
type, rank, and whether it lies as the run was made for), reads the run's sizes off them, makes the results, finds an arena, lets
the interpreter lock go and calls the run's body. Anything else than was expected, a branch without native code, and an index
that points outside its tensor are answered by the fallback, a Python function of the same tensors; that is counted.

Arenas are kept for the next call, at most `KEPT` per run: a call takes one by an atomic exchange and puts it back, so threads
never share one, and memory that is warm in the caches is used again. They are freed with the run.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from hotfuse.backends.llvm import faults, tensors
from hotfuse.backends.llvm.driver import BODY, CONTROL_HEAD, HEAD, LAYOUT, outcomes_at
from hotfuse.backends.llvm.jit import Loaded, compile_object, load_object
from hotfuse.backends.llvm.run import CLOCK, COUNTS, Constant, RunCode
from hotfuse.backends.llvm.target import host
from hotfuse.base.errors import InternalError
from hotfuse.ops.torch_dtypes import torch_dtype
from hotfuse.tile.instrument import BLANK, WIDTH

KEPT = 4
_METH_FASTCALL = 0x80
_THREADS = "_ZN2at15get_num_threadsEv"
_HEADER = 64
"""Bytes before an arena: how large it is."""

# Words of a job; `home` is the job whose arenas it uses.
_AT_BODY, _AT_LAYOUT, _AT_TABLE, _AT_INPUTS, _AT_SIZES, _AT_OUTPUTS = range(6)
_AT_INPUT_SPECS, _AT_SIZE_SPECS, _AT_OUTPUT_SPECS, _AT_LAYOUT_WORDS, _AT_FALLBACK, _AT_CONTROL = range(6, 12)
_AT_HOME, _AT_FELL_BACK, _AT_ALLOCATED, _AT_LARGEST, _AT_ARENAS = range(12, 17)
_WORDS = _AT_ARENAS + KEPT


def _text() -> str:
    """The stub; every value it needs of a run stands in the job."""

    def word(name: str, at: int, kind: str = "i64") -> str:
        return f"  %{name}.at = getelementptr i64, ptr %job, i64 {at}\n  %{name} = load {kind}, ptr %{name}.at\n"

    return (
        tensors.DECLARATIONS
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
        + word("body", _AT_BODY, "ptr")
        + word("layout", _AT_LAYOUT, "ptr")
        + word("table", _AT_TABLE, "ptr")
        + word("inputs", _AT_INPUTS)
        + word("sizes", _AT_SIZES)
        + word("outputs", _AT_OUTPUTS)
        + word("input.specs", _AT_INPUT_SPECS, "ptr")
        + word("size.specs", _AT_SIZE_SPECS, "ptr")
        + word("output.specs", _AT_OUTPUT_SPECS, "ptr")
        + word("words", _AT_LAYOUT_WORDS)
        + word("fallback", _AT_FALLBACK, "ptr")
        + word("given", _AT_CONTROL, "ptr")
        + word("home", _AT_HOME, "ptr")
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
  %about.i = mul i64 %o, 2
  %about = getelementptr i64, ptr %output.specs, i64 %about.i
  %o.dtype.at = getelementptr i64, ptr %about, i64 1
  %o.rank = load i64, ptr %about
  %o.dtype = load i64, ptr %o.dtype.at
  %o.dtype32 = trunc i64 %o.dtype to i32
  %w1 = add i64 %w, %o.rank
  %w2 = add i64 %w1, %o.rank
  %o.shape = getelementptr i64, ptr %made, i64 %w
  %o.strides = getelementptr i64, ptr %made, i64 %w1
  %result = call ptr @hf_empty(i64 %o.rank, ptr %o.shape, ptr %o.strides, i32 %o.dtype32)
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
  %slot.i = add i64 %a, {_AT_ARENAS}
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
  %allocated.at = getelementptr i64, ptr %home, i64 {_AT_ALLOCATED}
  %allocated = atomicrmw add ptr %allocated.at, i64 1 monotonic
  %largest.at = getelementptr i64, ptr %home, i64 {_AT_LARGEST}
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
  %keep.i = add i64 %k, {_AT_ARENAS}
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
  %fell.at = getelementptr i64, ptr %job, i64 {_AT_FELL_BACK}
  %fell = atomicrmw add ptr %fell.at, i64 1 monotonic
  %answer = call ptr @PyObject_Vectorcall(ptr %fallback, ptr %args, i64 %n, ptr null)
  ret ptr %answer
}}
"""
    )


_API = ("PyLong_AsVoidPtr", "PyEval_SaveThread", "PyEval_RestoreThread", "PyObject_Vectorcall", "PyTuple_New", "PyTuple_SetItem",
        "Py_DecRef", "PyErr_NoMemory")  # fmt: skip


class _MethodDef(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char_p), ("code", ctypes.c_void_p), ("flags", ctypes.c_int), ("doc", ctypes.c_char_p))


def _pointer(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


@functools.cache
def _stub() -> tuple[Loaded, _MethodDef, Any]:
    """The compiled stub, and what makes function objects of it; all live as long as the process."""
    api = ctypes.pythonapi
    symbols = {name: _pointer(getattr(api, name)) for name in _API}
    symbols["hf_threads"] = _pointer(getattr(ctypes.CDLL(torch._C.__file__), _THREADS))  # pyright: ignore[reportPrivateUsage]
    loaded = load_object(compile_object(_text(), host()).code, ["enter"], {**symbols, **tensors.symbols(), **faults.SYMBOLS})
    method = _MethodDef(b"run", loaded.address("enter"), _METH_FASTCALL, None)
    make = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p)(
        ("PyCFunction_NewEx", api)
    )
    return loaded, method, make


@functools.cache
def unavailable() -> str:
    """Why runs cannot be entered in this process; empty if they can."""
    if why := tensors.unavailable():
        return why
    try:
        _stub()
    except (InternalError, AttributeError) as e:
        return str(e).splitlines()[0]
    return ""


class _Kept:
    """The words of a job; dropping them frees its arenas. Only when no call can be in the run any more."""

    def __init__(self, words: Sequence[int], keep: Sequence[Any]) -> None:
        self.words = (ctypes.c_int64 * len(words))(*words)
        self.words[_AT_HOME] = self.words[_AT_HOME] or ctypes.addressof(self.words)
        self.keep = keep

    def __del__(self) -> None:
        free = ctypes.CDLL(None).free
        for i in range(_AT_ARENAS, _AT_ARENAS + KEPT):
            if self.words[i]:
                free(ctypes.c_void_p(self.words[i]))


class _Job(int):
    """The address of a job's words; as the function's `self`, it keeps everything alive as long as the function."""

    kept: _Kept


@dataclass(frozen=True, slots=True)
class Inside:
    """What a watched call told."""

    ns: tuple[int, ...]
    """Nanoseconds of every partition; none where it was not asked for or the fallback answered."""
    outcomes: tuple[int, ...]
    """By branch: 0 where it was not reached (or not asked for), 1 where it went to its second side, 2 where to its first."""
    counted: Mapping[str, tuple[int, ...]]
    """By value that a counting kernel stored: its counters (`tile.instrument`)."""


class NativeRun:
    """A run that can be called: `enter(tensor...)` gives its results."""

    def __init__(
        self, code: RunCode, loaded: Loaded, table: Sequence[int], keep: Sequence[Any], fallback: Callable[..., Any]
    ) -> None:
        self.code = code
        inputs: list[int] = []
        held: list[Any] = [loaded, fallback, *keep]
        for spec in code.inputs:
            order = 0
            if spec.order is not None:
                array = (ctypes.c_int64 * max(1, len(spec.order)))(*spec.order)
                held.append(array)
                order = ctypes.addressof(array)
            inputs += [spec.rank, tensors.dtype_code(torch_dtype(spec.dtype)), order]
        sizes = [n for s in code.sizes for n in (s.input, int(s.stride), s.dim)]
        outputs = [n for o in code.outputs for n in (len(o.shape), tensors.dtype_code(torch_dtype(o.dtype)))]
        arrays = [(ctypes.c_int64 * max(1, len(a)))(*a) for a in (inputs, sizes, outputs, table)]
        held += arrays
        at = [ctypes.addressof(a) for a in arrays]
        words = [0] * _WORDS
        words[: _AT_CONTROL] = [
            loaded.address(BODY), loaded.address(LAYOUT), at[3], len(code.inputs), len(code.sizes), len(code.outputs),
            at[0], at[1], at[2], 1 + sum(2 * len(o.shape) for o in code.outputs), id(fallback),
        ]  # fmt: skip
        self._kept = _Kept(words, held)
        self._watching: list[tuple[_Kept, Any, Callable[..., tuple[Any, ...]]]] = []
        """Jobs for watched calls that none is in."""
        self._words = arrays[3]
        self._counting: tuple[Any, frozenset[int], Sequence[Any]] | None = None
        """The table with counting kernels, and which of its words they are."""
        self.enter = _function(self._kept)
        """One call: tensors in the run's order in, a tuple of results out."""
        self.body, self.table = words[_AT_BODY], words[_AT_TABLE]
        """Where the driver's code and the run's table are."""

    def timed(self, *args: torch.Tensor) -> tuple[tuple[Any, ...], tuple[int, ...]]:
        """A call with the nanoseconds of every partition; those of a call that fell back are all 0."""
        outs, inside = self.watched(CLOCK, *args)
        return outs, inside.ns or (0,) * (self.code.last - self.code.first)

    def watched(self, want: int, *args: torch.Tensor) -> tuple[tuple[Any, ...], Inside]:
        """A call that tells what it is asked for: the driver's bits."""
        begin = outcomes_at(self.code.last - self.code.first)
        end = begin + len(self.code.branches)
        try:
            job, control, enter = self._watching.pop()
        except IndexError:  # so many at the same time
            control = (ctypes.c_int64 * (end + WIDTH * sum(len(names) for _, names in self.code.made)))()
            words = list(self._kept.words[:_AT_FELL_BACK]) + [0] * (_WORDS - _AT_FELL_BACK)  # arenas are this run's: warm pages
            words[_AT_CONTROL] = ctypes.addressof(control)
            job = _Kept(words, (self._kept, control))
            enter = _function(job)
        ctypes.memset(control, 0, ctypes.sizeof(control))
        counting = self._counting if want & COUNTS else None
        if counting is not None:
            control[end:] = BLANK * ((len(control) - end) // WIDTH)
        job.words[_AT_TABLE] = self.table if counting is None else ctypes.addressof(counting[0])
        control[1] = want
        before = job.words[_AT_FELL_BACK]
        outs = enter(*args)
        if fell_back := job.words[_AT_FELL_BACK] - before:
            self._kept.words[_AT_FELL_BACK] += fell_back
        ns = tuple(max(0, b - a) for a, b in pairwise(control[CONTROL_HEAD:begin])) if want & CLOCK and not fell_back else ()
        counted: dict[str, tuple[int, ...]] = {}
        if counting is not None and not fell_back:
            at = end
            for word, names in self.code.made:
                for name in names:
                    if name and word in counting[1]:
                        counted[name] = tuple(control[at : at + WIDTH])
                    at += WIDTH
        told = Inside(ns, tuple(control[begin:end]), counted)
        self._watching.append((job, control, enter))
        return outs, told

    def count_with(self, kernels: Mapping[int, int], keep: Sequence[Any]) -> None:
        """Where a call is asked for counts, enter these kernels instead: by number, where their code is."""
        table = (ctypes.c_int64 * max(1, len(self.code.words))).from_buffer_copy(self._words)
        replaced: set[int] = set()
        for i, word in enumerate(self.code.words):
            if word.kind is Constant.KERNEL and word.kernel in kernels:
                table[i] = kernels[word.kernel]
                replaced.add(i)
        self._counting = (table, frozenset(replaced), keep)

    @property
    def fell_back(self) -> int:
        """Calls that the fallback answered."""
        return int(self._kept.words[_AT_FELL_BACK])

    @property
    def allocated(self) -> int:
        """Arenas allocated so far: calls at the same time, and calls that needed more than those before."""
        return int(self._kept.words[_AT_ALLOCATED])

    @property
    def arena_bytes(self) -> int:
        """Memory that is kept between calls now, at most."""
        kept = sum(self._kept.words[i] != 0 for i in range(_AT_ARENAS, _AT_ARENAS + KEPT))
        return kept * int(self._kept.words[_AT_LARGEST])


def _function(kept: _Kept) -> Callable[..., tuple[Any, ...]]:
    job = _Job(ctypes.addressof(kept.words))
    job.kept = kept
    _, method, make = _stub()
    return make(ctypes.addressof(method), job, None)
