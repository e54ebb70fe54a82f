# pyright: reportPrivateUsage=false
# Torch keeps what a front end needs private.
"""How torch has to behave while a model is traced, whatever the front end.

The shapes of a traced graph are torch's own, so two things are arranged while it traces, and put back after.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch._decomp import decompositions

_TORCH = os.path.dirname(torch.__file__)
_LAYERS = os.path.join(_TORCH, "nn")


@contextmanager
def tracing() -> Generator[None]:
    """No convolution library is chosen, and an LSTM's last states have their true shape."""
    with _any_convolution(), _last_states():
        yield


@contextmanager
def grad_mode_asked() -> Generator[list[str]]:
    """Which lines of the model's code asked whether gradients are enabled: what was traced may then hold for one answer only.

    Torch's own layers (`torch/nn`) count as the model's; the rest of torch asks to put the mode back later.
    """
    asked: list[str] = []
    real = torch.is_grad_enabled

    def noted() -> bool:
        frame = sys._getframe(1)
        file = frame.f_code.co_filename
        if not file.startswith(_TORCH) or file.startswith(_LAYERS):
            asked.append(f"{file}:{frame.f_lineno}")
        return real()

    torch.is_grad_enabled = noted
    try:
        yield asked
    finally:
        torch.is_grad_enabled = real


@contextmanager
def _any_convolution() -> Generator[None]:
    """To choose a library torch would ask for the batch and the number of pixels, and every such question splits the sizes that a
    captured graph is for. What runs later chooses by itself. (`torch.backends.mkldnn.flags` would warn about another switch.)
    """
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


@contextmanager
def _last_states() -> Generator[None]:
    """Before 2.13 torch drops the batch instead of the layer from an LSTM's last states, and stacks them to four dims.

    The proof before deployment would refuse what is made from that: never wrong, but never fast.
    """
    told: Callable[..., Any] | None = getattr(decompositions, "one_layer_lstm", None)
    if torch.__version__ >= "2.13" or told is None:
        yield
        return

    def shaped(inp: Any, hidden: Any, *rest: Any, **named: Any) -> tuple[Any, tuple[Any, Any]]:
        out, (h, c) = told(inp, hidden, *rest, **named)
        return out, (h.reshape(hidden[0].shape), c.reshape(hidden[1].shape))

    decompositions.one_layer_lstm = shaped
    try:
        yield
    finally:
        decompositions.one_layer_lstm = told
