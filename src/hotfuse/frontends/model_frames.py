# pyright: reportPrivateUsage=false
# Frames of callers are what this module is about.
"""Which code causes an effect while a model is traced: the model's, torch's, or ours."""

from __future__ import annotations

import os
import sys
import sysconfig
from types import CodeType, FrameType

import torch

TORCH = os.path.dirname(torch.__file__)
_LAYERS = os.path.join(TORCH, "nn")
OURS = os.path.dirname(os.path.dirname(__file__))
STANDARD = sysconfig.get_paths()["stdlib"]
_WATCHERS = frozenset({"messages.py", "model_frames.py", "plain_numbers.py", "side_effects.py", "process_effects.py"})
_HERE = os.path.dirname(__file__)


def emitter(*, imports: bool = True) -> FrameType | None:
    """The nearest frame of the model's code; None where it is torch's, ours, or has happened already. Without `imports` None also
    for what a module does while it is imported, which is once in a process.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _passes_on(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return None
    file = frame.f_code.co_filename
    if (file.startswith(TORCH) and not file.startswith(_LAYERS)) or file.startswith(OURS):
        return None
    return None if _once(frame) or not (imports or not _importing()) else frame


def called_by_library() -> bool:
    """Whether the function that calls this was itself called by the standard library, for reasons of its own."""
    frame = sys._getframe(2)
    return frame.f_code.co_filename.startswith(STANDARD) and "site-packages" not in frame.f_code.co_filename


def placed(what: str, frame: FrameType) -> str:
    """What was done, and the line that did it."""
    return f"{what} @ {frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def _passes_on(file: str) -> bool:
    """Whether code is the standard library's, which does what somebody asked it to."""
    if file.startswith("<frozen") or (file.startswith(STANDARD) and "site-packages" not in file):
        return True
    return os.path.dirname(file) == _HERE and os.path.basename(file) in _WATCHERS


def _importing() -> bool:
    """Whether a module is imported by a frame of this thread."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.startswith(OURS + os.sep + "compile"):
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _once(frame: FrameType | None) -> bool:
    """Whether a function is running whose result is kept: it has run where the model serves."""
    while frame is not None:
        if _keeps(frame.f_globals.get(name := frame.f_code.co_name), frame.f_code):
            return True
        if frame.f_code.co_argcount and frame.f_code.co_varnames[0] in (held := frame.f_locals):
            owners = type(held[frame.f_code.co_varnames[0]]).__mro__
            if any(_keeps(vars(cls).get(name), frame.f_code) for cls in owners):
                return True
        frame = frame.f_back
    return False


def _keeps(made: object, code: CodeType) -> bool:
    return hasattr(made, "cache_info") and getattr(getattr(made, "__wrapped__", None), "__code__", None) is code
