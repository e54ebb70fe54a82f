# pyright: reportPrivateUsage=false
# Torch has no public question for hooks on every module, nor for all that decides which kernels a library takes.
"""What a run of the model's own code rests on and does besides computing: all that a recording of its kernels would leave out.

A recording holds kernels and addresses. It does not draw from a generator in Python, append to a list, count calls or ask which
kernels are allowed. So such things are looked at around a real call, before anything of it is recorded, and what decides which
kernels run is part of what tells kinds of calls apart.
"""

from __future__ import annotations

import functools
import operator
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as every_module

from hotfuse.base.errors import CaptureError
from hotfuse.base.events import Why
from hotfuse.frontends.side_effects import Observed, python_generators
from hotfuse.native.call_context import context_in_python, usual
from hotfuse.runtime.serve.effects import heard, loggers

_C: Any = torch._C
_ASKED = ("_get_cudnn_enabled", "_get_cudnn_benchmark", "_get_cudnn_deterministic", "_get_deterministic_algorithms",
          "_get_flash_sdp_enabled", "_get_mem_efficient_sdp_enabled", "_get_math_sdp_enabled", "_get_cudnn_sdp_enabled",
          "_get_cublas_allow_fp16_reduced_precision_reduction", "_get_cublas_allow_bf16_reduced_precision_reduction")  # fmt: skip


def _questions() -> tuple[Callable[[], Any], ...]:
    """Those that this torch has; the names of some changed."""
    found: list[Callable[[], Any]] = [getattr(_C, name) for name in _ASKED if hasattr(_C, name)]
    if hasattr(_C, "_get_fp32_precision_getter"):
        found += [functools.partial(_C._get_fp32_precision_getter, "cuda", what) for what in ("matmul", "conv")]
    else:
        found += [_C._get_cublas_allow_tf32, _C._get_cudnn_allow_tf32]
    return tuple(found)


_QUESTIONS = _questions()


def allowed_kernels() -> tuple[Any, ...]:
    """What a process may set that decides which library kernels run, and how they round."""
    return tuple([ask() for ask in _QUESTIONS])


def around_call() -> Any:
    """What is around a call and decides what torch's operators mean; None where that is more than a recording keeps apart."""
    if (number := context_in_python()) >= 0:
        return number
    if _C._len_torch_function_stack() or _C._len_torch_dispatch_stack():
        return None
    cast = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cuda", "cpu")]
    return (*cast, usual(gradients=torch.is_grad_enabled()))


@contextmanager
def casting_again() -> Generator[None]:
    """Around what is recorded under autocast: weights are cast in every replay. What autocast keeps of them goes when the caller
    leaves it."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def transformed() -> bool:
    """Whether the call is inside of a function transform (`torch.func`), under which tensors are more than they show."""
    return _C._functorch.peek_interpreter_stack() is not None


def global_hooks() -> bool:
    """Whether hooks run around every module of the process."""
    return bool(every_module._global_forward_hooks or every_module._global_forward_pre_hooks)


def random_states() -> tuple[Any, ...]:
    """The states of generators on the host: equal before and behind a call that draws nothing."""
    return torch.default_generator.get_state().numpy().tobytes(), *python_generators()


def contents_of(modules: Iterable[nn.Module]) -> list[tuple[Any, ...]]:
    """The objects that the lists, dicts and sets hold that are attributes of modules."""
    held = [v for m in modules for v in list(m.__dict__.values()) if isinstance(v, (list, dict, set, deque))]
    return [_inside(v) for v in held]


def same_contents(now: list[tuple[Any, ...]], before: list[tuple[Any, ...]]) -> bool:
    """Whether they are the same objects. Nothing is asked for its `id`: hooks of programs hear of each (`sys.addaudithook`)."""
    return len(now) == len(before) and all(
        len(a) == len(b) and all(map(operator.is_, a, b)) for a, b in zip(now, before, strict=True)
    )


def _inside(held: Any) -> tuple[Any, ...]:
    return (*held, *held.values()) if isinstance(held, dict) else tuple(held)


def refuse_effects(seen: Observed) -> None:
    """Raise CaptureError where code did something besides computing: a replay does none of it."""
    seen.refuse()
    if seen.warned or heard(loggers(seen.logged)):
        raise CaptureError("a call cannot be recorded", because="the model's code warns or logs", why=Why.SIDE_EFFECT)


def single_numbers(tensors: Sequence[torch.Tensor], kind: str) -> list[tuple[torch.Tensor, str]]:
    """Tensors of one element on the host, beside a device, with what they hold: a kernel is launched with the number itself."""
    return [(t, repr(t.item())) for t in tensors if t.device.type == "cpu" != kind and t.numel() == 1]
