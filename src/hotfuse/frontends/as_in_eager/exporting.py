"""Code that asks whether it is exported takes the branch that its calls take.

    if not torch.compiler.is_exporting():
        u = torch.linalg.solve_triangular(a, b, upper=False)      what calls run
    else:
        for i in range(1, 64): a[..., i, :i] = ...                what other tools can take in

A graph here is for the calls of this process, so it is to be made of what those run: the other branch gives the same at best, and
takes several times as long at worst. Torch's own code, which does export, is told so; and so is code that was just told that it is
compiled (`is_compiling() and not is_exporting()`), since for `torch.compile` there are branches that calls do not run either.
Whether it is compiled is answered as before: libraries ask that before they read data to spare themselves work (`frontends.paths`).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode

Question = Callable[[], bool]


@contextmanager
def not_exported() -> Generator[None]:
    """Around tracing, on this thread."""
    exporting, compiling, thread = torch.compiler.is_exporting, torch.compiler.is_compiling, threading.get_ident()
    told_at = [-1]
    """How much was traced when code was last told that it is compiled."""

    def is_compiling() -> bool:
        answer = compiling()
        if threading.get_ident() == thread and not _of_torch(sys._getframe(1).f_globals):  # pyright: ignore[reportPrivateUsage]
            told_at[0] = _traced() if answer else -1
        return answer

    def is_exporting() -> bool:
        others = threading.get_ident() != thread or _of_torch(sys._getframe(1).f_globals)  # pyright: ignore[reportPrivateUsage]
        return exporting() if others or told_at[0] == _traced() else False

    torch.compiler.is_exporting, torch.compiler.is_compiling = is_exporting, is_compiling
    try:
        yield
    finally:
        torch.compiler.is_exporting, torch.compiler.is_compiling = exporting, compiling


def _of_torch(scope: dict[str, object]) -> bool:
    name = scope.get("__name__")
    return isinstance(name, str) and (name == "torch" or name.startswith("torch."))


def _traced() -> int:
    """Operators that the graph under way has; -1 outside of one."""
    mode = get_proxy_mode()
    return -1 if mode is None else len(mode.tracer.graph.nodes)
