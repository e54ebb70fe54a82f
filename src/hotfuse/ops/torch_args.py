"""Constant arguments of torch operators, from torch to the graph and back."""

from __future__ import annotations

import math
from typing import Any

import torch

from hotfuse.base.errors import CaptureError, InternalError
from hotfuse.ir.graph import Arg, Token, Value
from hotfuse.ir.types import DType
from hotfuse.ops.torch_dtypes import dtype_of, torch_dtype

_TOKENS = {"device": torch.device, "memory_format": lambda n: getattr(torch, n), "layout": lambda n: getattr(torch, n)}
_FORMATS = {"contiguous_format", "preserve_format", "channels_last", "channels_last_3d"}
_LAYOUTS = {"strided", "sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc", "jagged", "_mkldnn"}


def from_torch(arg: Any) -> Arg:
    """A constant argument of a torch op as a graph argument."""
    if arg is None or isinstance(arg, bool | int | str | complex | Value):
        return arg
    if isinstance(arg, float):
        return math.nan if math.isnan(arg) else arg
    if isinstance(arg, tuple | list):
        return tuple(from_torch(a) for a in arg)
    if isinstance(arg, torch.dtype):
        return dtype_of(arg)
    if isinstance(arg, torch.device):
        return Token("device", str(arg))
    if isinstance(arg, torch.memory_format):
        return Token("memory_format", str(arg).removeprefix("torch."))
    if isinstance(arg, torch.layout):
        return Token("layout", str(arg).removeprefix("torch."))
    raise CaptureError(f"an operator takes a constant of type {type(arg).__name__}", because="it has no text form")


def to_torch(arg: Arg) -> Any:
    """A graph argument without values as what the torch op takes."""
    if isinstance(arg, DType):
        return torch_dtype(arg)
    if isinstance(arg, Token):
        if arg.kind not in _TOKENS or (arg.kind == "memory_format" and arg.name not in _FORMATS) or (
            arg.kind == "layout" and arg.name not in _LAYOUTS
        ):
            raise InternalError(f"unknown token {arg.kind}:{arg.name}")
        return _TOKENS[arg.kind](arg.name)
    if isinstance(arg, tuple):
        return [to_torch(a) for a in arg]
    if isinstance(arg, Value):
        raise InternalError(f"value %{arg.name} where a constant was expected")
    return arg
