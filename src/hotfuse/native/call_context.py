# pyright: reportPrivateUsage=false
# Torch has no public question for its dispatch modes and keys.
"""What is around a call, besides its tensors, in one native question: `around() -> int`.

    -1               the caller changed what torch's operators mean: autocast, a function or dispatch mode, or `torch.jit.trace`
    2 * d + g        nothing of that; d is the number of the default dtype, g is 1 where gradients are enabled

Asked from Python these are five calls and a quarter of a microsecond. The functions are torch's own, by their mangled names; before
any of them is believed, the answers are compared with Python's under every circumstance. Where that fails, Python goes on asking.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Generator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch.jit._trace import _trace_impl
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from hotfuse.base.errors import InternalError
from hotfuse.base.faults import error_text
from hotfuse.base.once import once
from hotfuse.native import tensors
from hotfuse.native.function import python_function, python_symbols
from hotfuse.native.jit import load_object
from hotfuse.native.toolchain import helper_object

_C = torch._C
CHANGED = -1
ContextReader = Callable[[], int]
_FUNCTIONS = {
    "functions": "_ZN2at4impl22PythonTorchFunctionTLS9stack_lenEv",
    "dispatches": "_ZN3c104impl20TorchDispatchModeTLS9stack_lenEv",
    "included": "_ZN3c104impl28tls_is_dispatch_key_includedENS_11DispatchKeyE",
    "excluded": "_ZN3c104impl28tls_is_dispatch_key_excludedENS_11DispatchKeyE",
    "gradients": "_ZN3c108GradMode10is_enabledEv",
    "default_dtype": "_ZN3c1017get_default_dtypeEv",
}


def context_in_python() -> int:
    """The same, asked one by one."""
    if _C._is_any_autocast_enabled() or _C._len_torch_function_stack() or _C._len_torch_dispatch_stack() or _C._is_tracing():
        return CHANGED
    return usual(gradients=torch.is_grad_enabled())


def context_in_words() -> str:
    """What changes the meaning of torch's operators now, in words."""
    if _C._is_any_autocast_enabled():
        return "torch.autocast"
    return "torch.jit.trace" if _C._is_tracing() else "a function or dispatch mode of torch"


def usual(*, gradients: bool) -> int:
    """The number where nothing is changed and the default dtype is what it is now."""
    return 2 * tensors.dtype_code(torch.get_default_dtype()) + gradients


def _named() -> list[Any]:
    """Autocast's keys that have a name in Python."""
    return [key for name, key in _C.DispatchKey.__members__.items() if name.startswith("Autocast")]


def _autocast_keys() -> range:
    """Their numbers stand side by side, named or not. A key that is not excluded is in force."""
    known = list(map(int, _named()))
    return range(min(known), max(known) + 1)


def _text() -> str:
    def step(name: str, question: str, then: str) -> str:
        return f"{name}:\n{question}\n  br i1 %{name}.usual, label %{then}, label %changed\n"

    key: Any = _C._parse_dispatch_key("Tracer")
    keys, tracer = list(_autocast_keys()), int(key)
    names = ["functions", "dispatches", "tracer", *(f"key{k}" for k in keys), "usual"]
    steps = [
        step(name, f"  %{name}.n = call i64 @{name}()\n  %{name}.usual = icmp eq i64 %{name}.n, 0", then)
        for name, then in pairwise(names[:3])
    ] + [
        step("tracer", f"  %tracer.on = call zeroext i1 @included(i16 zeroext {tracer})\n  %tracer.usual = xor i1 %tracer.on, 1",
             names[3])
    ] + [
        step(f"key{k}", f"  %key{k}.usual = call zeroext i1 @excluded(i16 zeroext {k})", then)
        for k, then in zip(keys, names[4:], strict=True)
    ]
    return f"""
declare i64 @functions()
declare i64 @dispatches()
declare zeroext i1 @excluded(i16 zeroext)
declare zeroext i1 @included(i16 zeroext)
declare zeroext i1 @gradients()
declare zeroext i16 @default_dtype()
declare ptr @PyLong_FromLong(i64)

define ptr @around(ptr %self, ptr %args, i64 %n) {{
entry:
  br label %functions
{"".join(steps)}usual:
  %dtype16 = call zeroext i16 @default_dtype()
  %dtype = zext i16 %dtype16 to i64
  %twice = shl i64 %dtype, 1
  %grad1 = call zeroext i1 @gradients()
  %grad = zext i1 %grad1 to i64
  %number = or i64 %twice, %grad
  %answer = call ptr @PyLong_FromLong(i64 %number)
  ret ptr %answer
changed:
  %no = call ptr @PyLong_FromLong(i64 {CHANGED})
  ret ptr %no
}}
"""


class _Functions(TorchFunctionMode):
    """Changes nothing."""


class _Dispatches(TorchDispatchMode):
    """Changes nothing."""


@contextmanager
def _nothing() -> Generator[None]:
    yield


def _proven(around: ContextReader) -> None:
    """Compare with Python under everything that matters; all of it is the asking thread's own, but for the default dtype."""
    modes = (
        _nothing, torch.no_grad, torch.enable_grad, torch.inference_mode, _Functions, _Dispatches,
        lambda: torch.autocast("cpu"), lambda: torch.autocast("cpu", enabled=False),
        lambda: torch.autocast("cpu", dtype=torch.float16), torch._C.DisableTorchFunction,
    )  # fmt: skip
    for mode in modes:
        with mode():
            got, want = around(), context_in_python()
        if got != want:
            raise InternalError("native code sees another state of torch than Python", because=f"{got}, not {want}")
    seen: list[int] = []
    traced: Any = _trace_impl  # what `torch.jit.trace` does behind a warning, which is nobody's to hear
    traced(lambda x: (seen.append(around()), x + 1)[1], torch.ones(1), check_trace=False)
    if set(seen) != {CHANGED}:
        raise InternalError("native code does not see torch.jit.trace")
    for key in _named():
        with _C._SetExcludeDispatchKeyGuard(key, False):  # noqa: FBT003 - torch takes it by place
            if around() != CHANGED:
                raise InternalError("native code does not see autocast", because=str(key))


@once
def native_context_reader() -> ContextReader | str:
    """The native question, or why there is none. For the background: the first time of a process compiles."""
    try:
        torch_itself = ctypes.CDLL(_C.__file__)
        found = {name: ctypes.cast(getattr(torch_itself, n), ctypes.c_void_p).value or 0 for name, n in _FUNCTIONS.items()}
        symbols = found | python_symbols("PyLong_FromLong")
        around: ContextReader = python_function(load_object(helper_object(_text()), ["around"], symbols), "around")
        _proven(around)
        return around
    except Exception as e:  # whatever another torch does otherwise is a reason to stay with Python
        return error_text(e)
