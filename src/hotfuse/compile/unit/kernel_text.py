"""Kernels as text and back, in the worker that made them: a request for runs sends back what an answer about units has just shown.

Reading the text of 45 kernels takes a CPU second, twice in a compilation that serves a part of its plan early.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from hotfuse.compile.unit.kernel_cache import MAX_KEPT, keep
from hotfuse.lower.common import codec
from hotfuse.lower.common.lowered import Lowered
from hotfuse.tile.program import Kernel
from hotfuse.tile.text import parse

_shown: OrderedDict[str, Kernel] = OrderedDict()


def to_json(lowered: Lowered) -> dict[str, Any]:
    """A kernel as plain data, remembered by its text."""
    data = codec.to_json(lowered)
    keep(_shown, data["kernel"], lambda: lowered.kernel, MAX_KEPT)
    return data


def from_json(data: dict[str, Any]) -> Lowered:
    """The inverse; what this process has shown or read before is not read again."""
    return codec.from_json(data, keep(_shown, data["kernel"], lambda: parse(data["kernel"]), MAX_KEPT))
