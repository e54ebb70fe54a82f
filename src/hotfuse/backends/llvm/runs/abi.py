"""How Python enters native code: a small native function that takes integers and calls a kernel without the lock.

`enter(pointer..., arena, size..., threads)` is a built-in function object over a stub that is compiled once per process: it
puts its arguments on the stack, so calls from many threads do not meet, releases the interpreter lock and calls the kernel.
That costs some tens of nanoseconds, an order less than ctypes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from hotfuse.backends.llvm.runs import kernel_faults
from hotfuse.base.errors import InputError, InternalError
from hotfuse.base.once import once
from hotfuse.lower.cpu.scratch import LINE, Scratch
from hotfuse.native.function import python_symbols, word_function
from hotfuse.native.jit import Loaded, load_object
from hotfuse.native.toolchain import helper_object
from hotfuse.tile.compressed import header
from hotfuse.tile.program import OWN, Kernel

_STUB = """
declare ptr @PyLong_AsVoidPtr(ptr)
declare ptr @PyErr_Occurred()
declare i32 @PyErr_BadArgument()
declare ptr @PyEval_SaveThread()
declare void @PyEval_RestoreThread(ptr)
declare void @Py_IncRef(ptr)
@_Py_NoneStruct = external global i8

define ptr @enter(ptr %self, ptr %args, i64 %n) {
entry:
  %job = call ptr @PyLong_AsVoidPtr(ptr %self)
  %code = load ptr, ptr %job
  %pointers.at = getelementptr i64, ptr %job, i64 1
  %pointers = load i64, ptr %pointers.at
  %total.at = getelementptr i64, ptr %job, i64 2
  %total = load i64, ptr %total.at
  %fits = icmp eq i64 %n, %total
  br i1 %fits, label %start, label %wrong
wrong:
  %bad = call i32 @PyErr_BadArgument()
  ret ptr null
start:
  %values = alloca i64, i64 %n, align 16
  br label %next
next:
  %i = phi i64 [0, %start], [%i1, %next]
  %object.at = getelementptr ptr, ptr %args, i64 %i
  %object = load ptr, ptr %object.at
  %value = call ptr @PyLong_AsVoidPtr(ptr %object)
  %slot = getelementptr i64, ptr %values, i64 %i
  store ptr %value, ptr %slot
  %i1 = add i64 %i, 1
  %more = icmp ult i64 %i1, %n
  br i1 %more, label %next, label %ready
ready:
  %error = call ptr @PyErr_Occurred()
  %failed = icmp ne ptr %error, null
  br i1 %failed, label %fail, label %go
fail:
  ret ptr null
go:
  %sizes = getelementptr i64, ptr %values, i64 %pointers
  %thread = call ptr @PyEval_SaveThread()
  call void %code(ptr %values, ptr %sizes)
  call void @PyEval_RestoreThread(ptr %thread)
  call void @Py_IncRef(ptr @_Py_NoneStruct)
  ret ptr @_Py_NoneStruct
}
"""
_API = (
    "PyLong_AsVoidPtr",
    "PyErr_Occurred",
    "PyErr_BadArgument",
    "PyEval_SaveThread",
    "PyEval_RestoreThread",
    "Py_IncRef",
)


@once
def _stub() -> Loaded:
    """The compiled stub; it lives as long as the process."""
    return load_object(helper_object(_STUB), ["enter"], python_symbols(*_API))


def entry(loaded: Loaded, name: str, pointers: int, sizes: int) -> Callable[..., None]:
    """A function of integers that calls native code `void name(ptr, ptr)`; it keeps the code alive."""
    if pointers + sizes < 1:
        raise InternalError("native code without any argument")
    return word_function(_stub(), "enter", (loaded.address(name), pointers, pointers + sizes), loaded)


class NativeKernel:
    """A loaded kernel that runs on torch tensors."""

    def __init__(self, loaded: Loaded, name: str, kernel: Kernel, scratch: Scratch) -> None:
        self.kernel = header(kernel)
        self.symbol = name
        self._loaded = loaded
        self._buffers = [b for b in kernel.buffers if b.kind not in OWN]
        self._scratch = scratch
        self.address = loaded.address(name)
        self.enter = kernel_faults.guarded(kernel, entry(loaded, name, len(self._buffers) + 1, len(kernel.sizes) + 1))
        """Raw call: one address per buffer, the arena's address, one number per size, the number of threads."""

    @property
    def has_scratch(self) -> bool:
        """Whether a call needs an arena."""
        return self._scratch.needs_arena

    def arena(self, sizes: Mapping[str, int], threads: int) -> torch.Tensor | None:
        """Scratch memory for a call, None where none is needed."""
        if not self._scratch.needs_arena:
            return None
        need = self._scratch.arena_bytes(sizes, threads)
        return torch.empty(need + LINE, dtype=torch.uint8)

    def __call__(self, tensors: Sequence[torch.Tensor], sizes: Sequence[int] = (), threads: int | None = None) -> None:
        """Run on tensors in the order of the kernel's buffers without scratch; shapes and strides are the caller's to check."""
        if len(tensors) != len(self._buffers) or len(sizes) != len(self.kernel.sizes):
            raise InputError(
                f"kernel {self.kernel.name} takes {len(self._buffers)} tensors and {len(self.kernel.sizes)} sizes",
                because=f"{len(tensors)} and {len(sizes)} were given",
            )
        count = torch.get_num_threads() if threads is None else threads
        arena = self.arena(dict(zip(self.kernel.sizes, sizes, strict=True)), count)
        base = 0 if arena is None else -(-arena.data_ptr() // LINE) * LINE
        self.enter(*[t.data_ptr() for t in tensors], base, *sizes, count)

    def release(self) -> None:
        """Free the code; no call may be in it, and none may follow."""
        self.enter = _released
        self._loaded.release()


def _released(*_: object) -> None:
    raise InternalError("the kernel's code has been released")
