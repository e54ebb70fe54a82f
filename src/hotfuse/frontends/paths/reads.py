# pyright: reportPrivateUsage=false
# Frames of callers are what places are found by.
"""What a model's Python reads of its tensors: truth values, numbers, and sizes that data decide.

    if x.mean() > 1: ...             a truth value
    for i in range(int(n)): ...      a number
    for e in hit.nonzero(): ...      a size: how many rows there are

A traced graph has one path through such code. Which one a real call took is recorded while the model's own code answers it, and
tracing follows it (`frontends.paths.follow`, decision 160). Both see the calls that Python makes of torch, in the same order, so a
recording is a list of values, each with the place in the code that read it: some code reads where it is not traced alone.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hotfuse.frontends.model_frames import OURS, TORCH

MAX_READS = 4096
"""Reads of one call that are followed: a loop over more than that is no graph worth having."""

Read = tuple[str, Any, str]
"""What was read: `TRUTH`, `WHOLE`, `REAL`, `ITEM` with the number, `SIZES` with the shapes of all tensors that came; and the place
in the model's code."""
Path = tuple[Read, ...]
"""All that one call read, in order."""
TRUTH, WHOLE, REAL, ITEM, SIZES = "truth", "whole", "real", "item", "sizes"

NUMBERS: dict[Any, str] = {
    Tensor.__bool__: TRUTH, Tensor.is_nonzero: TRUTH, torch.is_nonzero: TRUTH, Tensor.__contains__: TRUTH,
    Tensor.equal: TRUTH, torch.equal: TRUTH, Tensor.allclose: TRUTH, torch.allclose: TRUTH,
    Tensor.__int__: WHOLE, Tensor.__index__: WHOLE, Tensor.__float__: REAL, Tensor.item: ITEM,
}  # fmt: skip
"""Calls whose result is a number that depends on data."""
_SIZED: frozenset[Any] = frozenset({
    Tensor.nonzero, torch.nonzero, Tensor.argwhere, torch.argwhere, Tensor.masked_select, torch.masked_select,
    Tensor.unique, torch.unique, Tensor.unique_consecutive, torch.unique_consecutive, Tensor.bincount, torch.bincount,
    Tensor.repeat_interleave, torch.repeat_interleave, torch.nn.functional.one_hot,
})  # fmt: skip
_PADS: frozenset[Any] = frozenset({torch.nn.functional.pad})
_TRUTHS = (torch.bool, torch.uint8)


def is_sized(function: Any, args: Sequence[Any]) -> bool:
    """Whether a call gives tensors whose sizes depend on data."""
    if function in _SIZED:
        return True
    if function is torch.where or function is Tensor.where:
        return len(args) == 1
    if function is not Tensor.__getitem__:
        return False
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    return any(isinstance(i, Tensor) and i.dtype in _TRUTHS for i in index)


def with_padding_read(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], number: Callable[[Tensor], int]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with tensors that say how much to pad by as numbers (`F.pad(x, (self.left, extra))`): torch reads
    them without a call that is seen. Codecs keep such numbers in buffers, and nothing behind a pad has a size that is known unless
    these are: they are read as `int(...)` does, not as sizes that are left open."""
    if function not in _PADS:
        return args, kwargs

    def read(pad: Any) -> Any:
        return type(pad)(number(n) if isinstance(n, Tensor) else n for n in pad) if type(pad) in (tuple, list) else pad

    if "pad" in kwargs:
        return args, {**kwargs, "pad": read(kwargs["pad"])}
    return (args[0], read(args[1]), *args[2:]), kwargs


def reading_place() -> str:
    """Where the model's code is that reads: the function and the expression, which stay when lines above them change. (Instructions
    do not: which of those of a call is at work depends on what is called.)"""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((TORCH, OURS)):
        frame = frame.f_back
    code = frame.f_code
    line, _, column, end = next(itertools.islice(code.co_positions(), frame.f_lasti // 2, None), (None,) * 4)
    return f"{code.co_qualname}+{(line or code.co_firstlineno) - code.co_firstlineno}:{column}-{end}"


class TooManyReads(Exception):
    """A call reads more than is followed."""


class RecordedReads(TorchFunctionMode):
    """Around the model's own code: what it reads, on this thread."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[Read] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = with_padding_read(func, args, kwargs or {}, self._padding)
        result = func(*args, **kwargs)
        if len(self.reads) > MAX_READS:
            return result
        if (kind := NUMBERS.get(func)) is not None:
            found = [(kind, result)]
        elif func is Tensor.__format__ and type(args[0]) is Tensor and not args[0].dim():
            found = [(ITEM, args[0].item())]  # the text of its number
        elif func is Tensor.tolist:
            found = [(ITEM, v) for v in _flat(result)]  # traced tensors read one number after the other
        elif is_sized(func, args):
            found = [(SIZES, tuple(tuple(t.shape) for t in tensors_in(result)))]
        else:
            return result
        place = reading_place()
        self.reads += [(k, v, place) for k, v in found]
        return result

    def _padding(self, t: Tensor) -> int:
        number = int(t)
        self.reads.append((WHOLE, number, reading_place()))
        return number

    def taken(self) -> tuple[Read, ...]:
        """All of them; raises TooManyReads."""
        if len(self.reads) > MAX_READS:
            raise TooManyReads(f"its code reads more than {MAX_READS} values of its tensors in one call")
        if any(isinstance(v, complex) for _, v, _ in self.reads):
            raise TooManyReads("its code reads complex numbers of its tensors")
        return tuple(self.reads)


def _flat(value: Any) -> list[Any]:
    return [v for part in value for v in _flat(part)] if isinstance(value, list) else [value]


def tensors_in(result: Any) -> list[Tensor]:
    """The tensors of a result, in order."""
    if isinstance(result, Tensor):
        return [result]
    return [t for part in result for t in tensors_in(part)] if isinstance(result, tuple | list) else []


def reads_to_json(reads: Sequence[Read]) -> list[list[Any]]:
    """As JSON has it: numbers that are not finite are texts."""
    return [[k, repr(v) if isinstance(v, float) and not math.isfinite(v) else v, place] for k, v, place in reads]


def reads_from_json(data: Sequence[Sequence[Any]]) -> tuple[Read, ...]:
    """The inverse of `reads_to_json`."""
    return tuple((str(k), float(v) if isinstance(v, str) else _frozen(v), str(place)) for k, v, place in data)


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
