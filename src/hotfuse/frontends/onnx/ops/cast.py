"""Conversion between element types, and reinterpretation of their bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from hotfuse.base.errors import ModelError
from hotfuse.frontends.onnx.elements import FLOAT8, Array, Value
from hotfuse.frontends.onnx.registry import Ctx, onnx_op
from hotfuse.frontends.onnx.values import BY_CODE, Elem, elem_of, from_numpy, to_numpy

_STRING = 8


@onnx_op("Cast")
def cast(ctx: Ctx, x: Value, *, to: int, saturate: int = 1, round_mode: str = "up") -> Value:
    return convert(x, _elem(to), saturate=bool(saturate), round_mode=round_mode)


@onnx_op("CastLike")
def cast_like(ctx: Ctx, x: Value, like: Value, *, saturate: int = 1, round_mode: str = "up") -> Value:
    return convert(x, elem_of(like), saturate=bool(saturate), round_mode=round_mode)


def _elem(code: int) -> Elem:
    found = BY_CODE.get(code)
    if found is None:
        raise ModelError(f"a conversion names element type {code}", because="ONNX has no such type")
    return found


def convert(x: Value, to: Elem, *, saturate: bool = True, round_mode: str = "up") -> Value:
    """A value in another element type, by ONNX's rules for Cast."""
    if to.torch is None:
        return _to_strings(x) if to.code == _STRING else _quiet(to_numpy(x), to.np)
    if isinstance(x, Tensor):
        return _to_torch(x, to.torch, saturate=saturate, round_mode=round_mode)
    if elem_of(x).code == _STRING:
        return _from_strings(x, to, saturate=saturate, round_mode=round_mode)
    wide: Any = np.float32 if "float" in elem_of(x).name else np.int8
    return _to_torch(torch.from_numpy(x.astype(wide)), to.torch, saturate=saturate, round_mode=round_mode)


def _quiet(array: Array, dtype: np.dtype[Any]) -> Array:
    """NumPy's conversion; ONNX leaves what does not fit undefined, so there is nothing to warn about."""
    with np.errstate(invalid="ignore", over="ignore"):
        return array.astype(dtype)


def _to_torch(x: Tensor, dtype: torch.dtype, *, saturate: bool, round_mode: str) -> Tensor:
    if x.dtype == dtype:
        return x
    if dtype not in FLOAT8:
        return x.float().to(dtype) if x.dtype in FLOAT8 else x.to(dtype)
    x = x.float()
    if dtype == torch.float8_e8m0fnu:
        return _to_e8m0(x, saturate=saturate, round_mode=round_mode)
    if saturate:
        limit = torch.finfo(dtype).max
        x = torch.clamp(x, -limit, limit)
    elif dtype == torch.float8_e4m3fn:
        # of torch's conversions this one alone saturates (in some versions); up to 464 rounds to the largest, 448
        x = torch.where(torch.abs(x) > 464, torch.nan, x)
    return x.to(dtype)


def _to_e8m0(x: Tensor, *, saturate: bool, round_mode: str) -> Tensor:
    """Only the exponent bits survive, rounded by what the mantissa held; 0xFF is NaN, and infinities become it."""
    bits = x.view(torch.int32)
    exponent = (bits >> 23) & 0xFF
    if round_mode == "up":
        more = (bits & 0x7FFFFF) > 0
    elif round_mode == "nearest":
        half, rest = (bits & 0x400000) > 0, (bits & 0x3FFFFF) > 0
        more = half & (rest | (exponent > 0))
    elif round_mode == "down":
        more = torch.zeros_like(bits, dtype=torch.bool)
    else:
        raise ModelError(f"a conversion has round_mode {round_mode!r}", because="ONNX knows up, down and nearest")
    more = more & (exponent < (0xFE if saturate else 0xFF))
    return (exponent + more.to(torch.int32)).to(torch.uint8).view(torch.float8_e8m0fnu)


def _to_strings(x: Value) -> Array:
    """Numbers as their shortest text; the special ones as ONNX spells them."""
    array: Array = to_numpy(x)
    if array.dtype.kind == "O":
        return array
    named = {"nan": "NaN", "inf": "INF", "-inf": "-INF"}
    texts = [named.get(text, text) for text in (str(v) for v in array.reshape(-1))]
    return np.array(texts, dtype=object).reshape(array.shape)


def _from_strings(x: Array, to: Elem, *, saturate: bool, round_mode: str) -> Tensor:
    try:
        if to.name == "bool":
            numbers = np.array([_truth(s) for s in x.reshape(-1)], dtype=np.bool_)
        elif "int" in to.name:
            numbers = np.array([_integer(s) for s in x.reshape(-1)], dtype=to.np)
        else:
            numbers = np.array([float(s) for s in x.reshape(-1)], dtype=np.float64)
    except (ValueError, OverflowError) as e:
        raise ModelError("a string cannot be read as a number", because=str(e)) from e
    tensor = from_numpy(numbers.reshape(x.shape))
    if not isinstance(tensor, Tensor) or to.torch is None:
        raise ModelError(f"strings cannot be converted to {to.name}")
    return _to_torch(tensor, to.torch, saturate=saturate, round_mode=round_mode)


def _truth(text: str) -> bool:
    named = {"true": True, "false": False}.get(text.strip().lower())
    return float(text) != 0 if named is None else named


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        return int(float(text))


@onnx_op("BitCast")
def bit_cast(ctx: Ctx, x: Value, *, to: int) -> Value:
    target = _elem(to)
    source = elem_of(x)
    if source.bits != target.bits:
        raise ModelError(f"BitCast from {source.name} to {target.name}", because="their sizes differ")
    if isinstance(x, Tensor) and target.torch is not None:
        return x.view(target.torch)
    return to_numpy(x).view(target.np)
