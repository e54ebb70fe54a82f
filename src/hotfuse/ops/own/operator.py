"""How an operator of ours becomes one of torch's."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch


def own_operator(name: str, module: str) -> Callable[[Callable[..., Any]], Any]:
    """`torch.library.custom_op` for a function of a module of ours that writes none of its arguments.

    Torch notes where it was called, and Python looks for that file in a table that it brings up to date with every module there is:
    40 ms in a process that has transformers loaded. So the table is told of our file before it is asked.
    """
    inspect.modulesbyfile.setdefault(str(sys.modules[module].__file__), module)
    return torch.library.custom_op(name, mutates_args=())
