"""A run's kernels alone, over and over in one native loop: what a call cannot be faster than."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from hotfuse.backends.llvm.runs.enter import NativeRun
from hotfuse.backends.llvm.runs.symbols import CONTROL_HEAD
from hotfuse.base.once import once
from hotfuse.ir.dims import evaluate
from hotfuse.lower.cpu.scratch import LINE
from hotfuse.lower.run.description import THREADS
from hotfuse.native.jit import Loaded, load_object
from hotfuse.native.toolchain import helper_object
from hotfuse.ops.torch_dtypes import torch_dtype

_TEXT = """
declare i32 @clock_gettime(i32, ptr)

define i64 @again(ptr %body, ptr %buffers, ptr %sizes, i64 %times) {
entry:
  %clock = alloca [2 x i64]
  %begin = call i64 @now(ptr %clock)
  br label %loop
loop:
  %i = phi i64 [0, %entry], [%i1, %loop]
  call void %body(ptr %buffers, ptr %sizes)
  %i1 = add i64 %i, 1
  %more = icmp ult i64 %i1, %times
  br i1 %more, label %loop, label %done
done:
  %end = call i64 @now(ptr %clock)
  %spent = sub i64 %end, %begin
  ret i64 %spent
}

define internal i64 @now(ptr %clock) {
  %ignored = call i32 @clock_gettime(i32 1, ptr %clock)
  %seconds = load i64, ptr %clock
  %rest.at = getelementptr i64, ptr %clock, i64 1
  %rest = load i64, ptr %rest.at
  %ns = mul i64 %seconds, 1000000000
  %all = add i64 %ns, %rest
  ret i64 %all
}
"""


@once
def _loop() -> Loaded:
    return load_object(helper_object(_TEXT), ["again"])


class Repeated:
    """A run bound to its inputs, with results and an arena of its own."""

    def __init__(self, run: NativeRun, inputs: Sequence[torch.Tensor]) -> None:
        code = run.code
        env = {s.symbol: (inputs[s.input].stride() if s.stride else inputs[s.input].shape)[s.dim] for s in code.sizes}
        env[THREADS] = torch.get_num_threads()
        laid = [([evaluate(d, env) for d in o.shape], [evaluate(d, env) for d in o.strides]) for o in code.outputs]
        outputs = [torch.empty_strided(*how, dtype=torch_dtype(o.dtype)) for o, how in zip(code.outputs, laid, strict=True)]
        arena = torch.empty(evaluate(code.arena, env) + evaluate(code.scratch, env) + LINE, dtype=torch.uint8)
        control = (ctypes.c_int64 * CONTROL_HEAD)()
        base = -(-arena.data_ptr() // LINE) * LINE
        pointers = [run.table, base, ctypes.addressof(control)]
        pointers += [t.data_ptr() for t in (*inputs, *outputs)]
        self._buffers = (ctypes.c_int64 * len(pointers))(*pointers)
        numbers = [env[s.symbol] for s in code.sizes] + [env[THREADS]]
        self._sizes = (ctypes.c_int64 * len(numbers))(*numbers)
        self._keep: list[Any] = [run, inputs, outputs, arena, control]
        self._body = run.body
        self._again = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_void_p] * 3, ctypes.c_int64)(_loop().address("again"))

    def ns(self, times: int) -> float:
        """Nanoseconds of one pass, as the mean over so many."""
        spent = self._again(self._body, ctypes.addressof(self._buffers), ctypes.addressof(self._sizes), times)
        return spent / times
