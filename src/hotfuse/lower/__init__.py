"""Lowering: a group of graph nodes becomes one tile kernel, or a reason why not.

A process that serves reads descriptions of kernels (`lower.common.lowered`, `lower.run`) and lowers none itself, so what lowering
takes is imported when it is asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hotfuse.lower.common.errors import CannotLower
    from hotfuse.lower.common.lowered import Lowered
    from hotfuse.lower.cpu.tiling import Core
    from hotfuse.lower.lowering import lower

_HOMES = {"CannotLower": "common.errors", "Core": "cpu.tiling", "Lowered": "common.lowered", "lower": "lowering"}

__all__ = ["CannotLower", "Core", "Lowered", "lower"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'hotfuse.lower' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"hotfuse.lower.{_HOMES[name]}"), name)
    return value
