"""What is around a call decides whether a plan may serve it; native code must see all that Python sees."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import hotfuse
from hotfuse import Settings
from hotfuse.native.call_context import CHANGED, _proven, context_in_python, native_context_reader, usual
from tests.runtime.live import Sleepy


class Functions(TorchFunctionMode):
    """Sees calls and changes nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Dispatches(TorchDispatchMode):
    """Sees operators and changes nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextmanager
def autocast_without_asking(device: str) -> Iterator[None]:
    """Autocast of a device for this thread. `torch.autocast` would start the device, and this process is forked later."""
    before = torch.is_autocast_enabled(device)
    torch.set_autocast_enabled(device, True)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device, before)


CHANGES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "autocast": lambda: torch.autocast("cpu"),
    "autocast of another device": lambda: autocast_without_asking("cuda"),
    "function mode": Functions,
    "dispatch mode": Dispatches,
}


def _native() -> Callable[[], int]:
    found = native_context_reader()
    assert not isinstance(found, str), found
    return found


@pytest.mark.parametrize("change", CHANGES)
def test_native_code_sees_what_changes_the_meaning_of_operators(change: str) -> None:
    around = _native()
    with CHANGES[change]():
        assert around() == context_in_python() == CHANGED
    assert around() == context_in_python() != CHANGED


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("gradients", [True, False])
def test_gradients_and_the_default_dtype_are_told_apart(dtype: torch.dtype, gradients: bool) -> None:
    around, before = _native(), torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.set_grad_enabled(gradients):
            assert around() == context_in_python() == usual(gradients=gradients)
        assert usual(gradients=True) != usual(gradients=False)
    finally:
        torch.set_default_dtype(before)


def test_a_mode_of_another_thread_is_not_this_one_s() -> None:
    around, inside, done = _native(), threading.Event(), threading.Event()

    def other() -> None:
        with torch.autocast("cpu"):
            inside.set()
            done.wait(30)

    thread = threading.Thread(target=other)
    thread.start()
    assert inside.wait(30)
    here = around()
    done.set()
    thread.join()
    assert here == context_in_python() != CHANGED


@pytest.mark.parametrize("change", CHANGES)
def test_a_hot_model_is_not_served_by_plans_where_operators_mean_something_else(change: str) -> None:
    model, x = Sleepy(0.003).eval(), torch.randn(3, 4)  # whose own code is slower than tier 0 on any machine
    with torch.no_grad(), hotfuse.jit(model, settings=Settings(hot_calls=2, tiers=0, record=False)) as fast:
        for _ in range(30):
            fast(x)
            assert fast.wait(120)
        assert fast.stats()["model_watch"]["around"] == "native", fast.stats()["model_watch"]
        before = fast.stats()["graph_calls"]
        with CHANGES[change]():
            assert fast(x).dtype is model(x).dtype
        assert fast.stats()["graph_calls"] == before
        torch.set_default_dtype(torch.float64)
        try:
            fast(x)
        finally:
            torch.set_default_dtype(torch.float32)
        assert fast.stats()["graph_calls"] == before
        for _ in range(8):  # some of which may be for the audit
            fast(x)
        assert fast.stats()["graph_calls"] > before


def test_comparing_warns_nobody() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _proven(_native())
