"""Hotfuse: a tiered, profile-guided JIT for neural-network inference.

    fast = hotfuse.jit(model)                        # a PyTorch module or function
    sess = hotfuse.InferenceSession("model.onnx")    # ONNX Runtime's call signatures
    torch.compile(model, backend="hotfuse")
"""

from __future__ import annotations

import gc
from importlib import import_module
from typing import TYPE_CHECKING, Any

from hotfuse.base.collector import take_for_old
from hotfuse.base.interpreters import refuse_sub_interpreters

if TYPE_CHECKING:
    from hotfuse.api import Jit, jit
    from hotfuse.base.errors import CaptureError, HotfuseError, InputError, InternalError, ModelError
    from hotfuse.base.settings import Settings
    from hotfuse.explain import Explanation
    from hotfuse.ops.packed import packed_attention
    from hotfuse.ops.varlen import varlen_on_cpu
    from hotfuse.session import (
        ExecutionMode,
        ExecutionOrder,
        GraphOptimizationLevel,
        InferenceSession,
        IOBinding,
        ModelMetadata,
        NodeArg,
        OrtValue,
        RunOptions,
        SessionOptions,
        get_all_providers,
        get_available_providers,
        get_device,
        set_default_logger_severity,
    )
    from hotfuse.stages import PlanKernel, ServedPlan
    from hotfuse.torch_backend import compiled_plans, explain_compiled

__version__ = "0.1.0"
import_module("hotfuse.machine.cores")  # records the affinity before more threads are bound

refuse_sub_interpreters()

_HOMES = {
    "jit": "api",
    "Jit": "api",
    "packed_attention": "ops.packed",
    "varlen_on_cpu": "ops.varlen",
    "Settings": "base.settings",
    "Explanation": "explain",
    "compiled_plans": "torch_backend",
    "explain_compiled": "torch_backend",
    "InferenceSession": "session",
    "SessionOptions": "session",
    "RunOptions": "session",
    "ServedPlan": "stages",
    "PlanKernel": "stages",
    "HotfuseError": "base.errors",
    "ModelError": "base.errors",
    "InputError": "base.errors",
    "CaptureError": "base.errors",
    "InternalError": "base.errors",
    # What applications also import from onnxruntime.
    "ExecutionMode": "session",
    "ExecutionOrder": "session",
    "GraphOptimizationLevel": "session",
    "IOBinding": "session",
    "ModelMetadata": "session",
    "NodeArg": "session",
    "OrtValue": "session",
    "get_all_providers": "session",
    "get_available_providers": "session",
    "get_device": "session",
    "set_default_logger_severity": "session",
}

__all__ = [  # noqa: RUF022
    "jit", "Jit", "packed_attention", "varlen_on_cpu", "InferenceSession", "SessionOptions", "RunOptions",
    "Settings", "Explanation", "ServedPlan", "PlanKernel", "explain_compiled", "compiled_plans",
    "HotfuseError", "ModelError", "InputError", "CaptureError", "InternalError",
    "ExecutionMode", "ExecutionOrder", "GraphOptimizationLevel", "IOBinding", "ModelMetadata", "NodeArg",
    "OrtValue", "get_all_providers", "get_available_providers", "get_device", "set_default_logger_severity",
    "__version__",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import each public name when it is first used: a PyTorch user never pays for ONNX.

    What is imported stays. So the garbage collector rests meanwhile, and takes all of it for old afterwards: else it would look
    through everything that torch has, for a tenth of a second, now or when the first model is made.
    """
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'hotfuse' has no attribute {name!r}")
    collects = gc.isenabled()
    gc.disable()
    try:
        value = globals()[name] = getattr(import_module(f"hotfuse.{home}"), name)
    finally:
        if collects:
            gc.enable()
            take_for_old()
    return value
