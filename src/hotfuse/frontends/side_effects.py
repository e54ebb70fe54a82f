# pyright: reportPrivateUsage=false
# Functions, cells and warnings keep what is looked at here in private or special attributes.
"""What a model's code does besides computing on tensors: a graph of it would leave that out, silently.

Code is watched while it is traced, on the thread that traces. Whatever it does to the world is noted and, as far as possible, not
done: the world has seen it once already, when the model itself answered the call.

| what the code does | what follows |
| --- | --- |
| writes to standard output or standard error | no graph: the model's own code goes on answering |
| asks the system for files, folders, programs, the clock, random bytes (`process_effects`) | the same |
| draws from a generator of Python's or NumPy's, or seeds one | the same |
| changes an object that it reaches (`watched_state`): counters, lists, class attributes, what callbacks close over | the same |
| asks for a switch of torch's that nothing watches (deterministic algorithms) | the same |
| warns | each call in a plan warns again, at the same place: filters decide what is shown, as ever |
| logs | calls are answered by plans only while the logger lets nothing of that level through |

What runs once in a process (a function behind `functools.lru_cache`, as transformers' `warning_once`) has run, and is left alone.
What torch does to trace is not the model's doing; layers of torch (`torch/nn`) are.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import random
import re
import sys
import threading
import warnings
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import field
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch.backends import ContextProp, PropModule

from hotfuse.base.errors import CaptureError
from hotfuse.base.events import Why
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.frontends.captured import Warned
from hotfuse.frontends.model_frames import OURS, TORCH, emitter, placed
from hotfuse.frontends.process_effects import process_effects
from hotfuse.frontends.watched_state import Reached, changed, watched_state

_EXPORT = os.path.join(TORCH, "export")
_OF_A_CALL = re.compile(r"FakeTensor|\b[su]\d+\b")
"""How a traced tensor and a symbolic size read: a text with one of them is another one in every call."""
SWITCHES = (
    "are_deterministic_algorithms_enabled", "is_deterministic_algorithms_warn_only_enabled", "get_float32_matmul_precision",
    "is_inference_mode_enabled", "get_num_threads", "is_anomaly_enabled", "initial_seed", "get_autocast_dtype",
    "get_autocast_cpu_dtype", "is_autocast_cache_enabled", "is_warn_always_enabled", "get_deterministic_debug_mode",
)  # fmt: skip
"""Questions to torch whose answers a program may change between two calls."""
OF_KERNELS = (
    "flash_sdp_enabled", "mem_efficient_sdp_enabled", "math_sdp_enabled", "cudnn_sdp_enabled",
    "fp16_bf16_reduction_math_sdp_allowed",
)  # fmt: skip
"""The same, in `torch.backends.cuda`; what else is there, and in the modules beside it, are attributes (`_of_back_ends`)."""
_FROM_NATIVE = "(Triggered internally at"


@dataclass(slots=True)
class Observed:
    """What the traced code did."""

    done: list[str] = field(default_factory=list[str])
    """What no graph does, each with the line that did it."""
    logged: dict[tuple[str, int], None] = field(default_factory=dict[tuple[str, int], None])
    """Loggers by name, and levels that were asked of them."""
    warned: list[Warned] = field(default_factory=list[Warned])

    @contextmanager
    def call(self, target: Any, beside: Iterable[Any] = ()) -> Generator[Reached]:
        """Around a call of `target`: what it changes in objects and generators, and in what it reads `beside` them. Behind the call
        tracers put some of it back."""
        before, drawn = watched_state(target, beside), _drawn()
        yield before
        if _drawn() != drawn:
            self.done.append("draws from a random generator of the process")
        self.done += [f"changes {what}" for what in changed(before)]

    def refuse(self) -> None:
        """Raise CaptureError where a graph would leave something out."""
        if self.done:
            what, _, where = self.done[0].partition(" @ ")
            raise CaptureError(
                f"the model's code {what}",
                where=where,
                because="a captured graph would leave it out",
                why=Why.SIDE_EFFECT,
                hint="do that outside of the model, or behind a condition that is off where it serves",
            )


@contextmanager
def observed() -> Generator[Observed]:
    """Watch what code does to the world, on this thread, until the block ends."""
    found = Observed()
    with process_effects(found.done.append), _streams(found), _logs(found), _warnings(found), _switches(found):
        yield found


def python_generators() -> tuple[Any, ...]:
    """The states of Python's and NumPy's generators: equal before and behind code that draws nothing."""
    own: Any = np.random.get_state()
    return random.getstate(), own[1].tobytes(), own[2]


def _drawn() -> tuple[Any, ...]:
    """The same, and torch's seed: while it traces, torch draws nothing itself."""
    return *python_generators(), torch.default_generator.initial_seed()


class _Stream:
    """A standard stream: what the traced code writes is noted, everything else goes on."""

    def __init__(self, stream: Any, name: str, found: Observed) -> None:
        self._stream, self._name, self._found = stream, name, found
        self.thread: int | None = threading.get_ident()

    def write(self, text: Any) -> Any:
        if self.thread == threading.get_ident() and (frame := emitter()) is not None:
            self._found.done.append(placed(f"writes to {self._name}", frame))
            return len(text)
        if self.thread == threading.get_ident() and sys._getframe(1).f_code.co_filename.startswith(_EXPORT):
            return len(text)  # the graph as far as it came, where a model cannot be exported: who asked gets the reason
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def _streams(found: Observed) -> Generator[None]:
    before = {name: getattr(sys, name) for name in ("stdout", "stderr") if getattr(sys, name) is not None}
    ours = {name: _Stream(stream, f"sys.{name}", found) for name, stream in before.items()}
    for name, stream in ours.items():
        setattr(sys, name, stream)
    try:
        yield
    finally:
        for name, stream in ours.items():
            stream.thread = None  # somebody may have taken it for the real one meanwhile
            if getattr(sys, name) is stream:
                setattr(sys, name, before[name])


@contextmanager
def _replaced(places: list[tuple[Any, str]], made: Callable[[Any], Any]) -> Generator[None]:
    """Have attributes be something else; whatever others put there meanwhile stays."""
    before = [getattr(owner, name) for owner, name in places]
    ours = [made(b) for b in before]
    for (owner, name), new in zip(places, ours, strict=True):
        setattr(owner, name, new)
    try:
        yield
    finally:
        for (owner, name), new, old in zip(places, ours, before, strict=True):
            if getattr(owner, name) is new:
                setattr(owner, name, old)


@contextmanager
def _switches(found: Observed) -> Generator[None]:
    thread = threading.get_ident()

    def made(real: Any) -> Any:
        @functools.wraps(real)
        def asked(*args: Any, **kwargs: Any) -> Any:
            frame = emitter() if threading.get_ident() == thread else None
            if frame is not None and not frame.f_code.co_filename.startswith(TORCH):
                found.done.append(placed(f"asks torch.{real.__name__}", frame))
            return real(*args, **kwargs)

        return asked

    functions = [*((torch, name) for name in SWITCHES), *((torch.backends.cuda, name) for name in OF_KERNELS)]
    with _replaced([(m, name) for m, name in functions if hasattr(m, name)], made), _of_back_ends(found, thread):
        yield


_NO_ATTRIBUTES = ("torch.backends.cudnn.rnn",)
"""Modules of theirs that are no attributes of `torch.backends`."""


class _AskedSwitch:
    """In place of an attribute of a module of `torch.backends`, which has its value from native code."""

    def __init__(self, real: Any, name: str, found: Observed, thread: int) -> None:
        self._real, self._name, self._found, self._thread = real, name, found, thread

    def __get__(self, owner: Any, cls: Any) -> Any:
        frame = emitter() if threading.get_ident() == self._thread else None
        if frame is not None and not frame.f_code.co_filename.startswith(TORCH):
            self._found.done.append(placed(f"asks {self._name}", frame))
        return self._real.__get__(owner, cls)

    def __set__(self, owner: Any, value: Any) -> None:
        self._real.__set__(owner, value)


def _back_ends() -> list[PropModule]:
    """Modules that have such attributes; to look for them among all of `sys.modules` takes longer than what is traced, at times."""
    found = (torch.backends, *vars(torch.backends).values(), *map(sys.modules.get, _NO_ATTRIBUTES))
    return [m for m in found if isinstance(m, PropModule)]


@contextmanager
def _of_back_ends(found: Observed, thread: int) -> Generator[None]:
    with contextlib.ExitStack() as instead:
        for owner in {type(m): m.__name__ for m in _back_ends()}.items():
            for name, real in [(n, v) for n, v in vars(owner[0]).items() if isinstance(v, ContextProp)]:
                asked = _AskedSwitch(real, f"{owner[1]}.{name}", found, thread)
                setattr(owner[0], name, asked)
                instead.callback(setattr, owner[0], name, real)
        yield


@contextmanager
def _logs(found: Observed) -> Generator[None]:
    thread = threading.get_ident()

    def made(real: Any) -> Any:
        @functools.wraps(real)
        def asked(self: logging.Logger, level: int) -> bool:
            if threading.get_ident() != thread:
                return real(self, level)
            if emitter() is not None:
                found.logged[self.name, level] = None
            return False  # nobody is to hear of what torch logs while it traces

        return asked

    with _replaced([(logging.Logger, "isEnabledFor")], made):
        yield


@contextmanager
def _warnings(found: Observed) -> Generator[None]:
    thread = threading.get_ident()

    real = warnings.showwarning

    def shown(message: Warning | str, category: type[Warning], filename: str, lineno: int, *rest: Any) -> None:
        if threading.get_ident() != thread:
            real(message, category, filename, lineno, *rest)
        elif _FROM_NATIVE not in str(message) and (frame := emitter()) is not None:
            _warned(found, str(message), category, (filename, lineno), frame)

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = shown
        yield


def _warned(found: Observed, text: str, category: type[Warning], at: tuple[str, int], frame: FrameType) -> None:
    """Note a warning with the place that it names; there are other levels above the model where it is traced."""
    if _OF_A_CALL.search(text):
        found.done.append(placed("warns of what a call brings", frame))
        return
    traced = at[0].startswith((TORCH, OURS))
    place = frame if traced else _frame_at(frame, *at)
    filename, lineno = (frame.f_code.co_filename, frame.f_lineno) if traced else at
    kind, module = f"{category.__module__}:{category.__qualname__}", str(place.f_globals.get("__name__", ""))
    if (warned := Warned(text, kind, filename, lineno, module)) not in found.warned:
        found.warned.append(warned)


def _frame_at(frame: FrameType, filename: str, lineno: int) -> FrameType:
    """The frame that a warning names, or the one that warns."""
    at: FrameType | None = frame
    while at is not None and (at.f_code.co_filename != filename or at.f_lineno != lineno):
        at = at.f_back
    return at or frame
