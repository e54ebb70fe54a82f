"""Movement: operators that give the same elements another shape, order or place."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hotfuse.base.errors import ModelError
from hotfuse.frontends.onnx.elements import Value, carry, is_known, moves, norm_axis, zero_of
from hotfuse.frontends.onnx.registry import Ctx, Prepared, Varies, onnx_op


def _prepare_reshape(ctx: Ctx, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Prepared | None:
    """Sizes that are constants are read once, where none is copied."""
    shape = inputs[1] if len(inputs) == 2 else None
    if (
        not isinstance(inputs[0], Varies)
        or not isinstance(shape, Tensor)
        or shape.dtype is not torch.int64
        or shape.dim() != 1
    ):
        return None
    sizes: list[int] = shape.tolist()
    if 0 in sizes or any(n < -1 for n in sizes):
        return None

    def call(x: Any, given: Tensor) -> Any:
        plain = isinstance(x, Tensor) and x.dtype is torch.float32 and x.numel()
        return x.reshape(sizes) if plain else reshape(ctx, x, given, **attrs)

    return Prepared(call, 0)


@onnx_op("Reshape", since=5, prepare=_prepare_reshape)
@moves(0)
def reshape(ctx: Ctx, x: Tensor, shape: Tensor, *, allowzero: int = 0) -> Tensor:
    return reshaped(x, ctx.ints(shape), allowzero)


def reshaped(x: Tensor, dims: list[Any], allowzero: int = 0) -> Tensor:
    """A zero copies the input's size (unless allowed to mean itself), -1 takes what is left."""
    copied = [i for i, n in enumerate(dims) if is_known(n, 0) and not allowzero]
    for i in copied:
        if i >= x.dim():
            raise ModelError(f"Reshape copies size {i} of a tensor of rank {x.dim()}")
        dims[i] = x.shape[i]
    rest = [i for i, n in enumerate(dims) if is_known(n, -1)]
    if rest and any(is_known(n, 0) for n in x.shape):
        # torch does not infer a size for an empty tensor; the sizes that are not copied still tell it
        have = math.prod(n for i, n in enumerate(x.shape) if i not in copied)
        want = math.prod(n for i, n in enumerate(dims) if i not in copied and i not in rest)
        dims[rest[0]] = have // want if want else 0
    return torch.reshape(x, dims)


@onnx_op("Flatten")
@moves(0)
def flatten(ctx: Ctx, x: Tensor, *, axis: int = 1) -> Tensor:
    at = axis + x.dim() if axis < 0 else axis
    return torch.reshape(x, [math.prod(x.shape[:at]), math.prod(x.shape[at:])])


@onnx_op("Transpose")
@moves(0)
def transpose(ctx: Ctx, x: Tensor, *, perm: Sequence[int] | None = None) -> Tensor:
    return torch.permute(x, tuple(perm) if perm else tuple(range(x.dim()))[::-1])


@onnx_op("Squeeze")
@moves(0)
def squeeze_1(ctx: Ctx, x: Tensor, *, axes: Sequence[int] | None = None) -> Tensor:
    return _squeeze(x, axes)


@onnx_op("Squeeze", since=13)
@moves(0)
def squeeze(ctx: Ctx, x: Tensor, axes: Tensor | None = None) -> Tensor:
    return _squeeze(x, None if axes is None else ctx.ints(axes))


def _squeeze(x: Tensor, axes: Sequence[int] | None) -> Tensor:
    if axes is None:
        dims = [i for i, n in enumerate(x.shape) if is_known(n, 1)]
    else:
        dims = [norm_axis(a, x.dim()) for a in axes]
        for d in dims:
            size: int | torch.SymInt = x.shape[d]
            if not isinstance(size, torch.SymInt) and size != 1:  # torch leaves such a dim in
                raise ValueError(f"dimension {d} has {size} elements where one can be squeezed")
    return torch.squeeze(x, dims)


@onnx_op("Unsqueeze")
@moves(0)
def unsqueeze_1(ctx: Ctx, x: Tensor, *, axes: Sequence[int]) -> Tensor:
    return _unsqueeze(x, axes)


@onnx_op("Unsqueeze", since=13)
@moves(0)
def unsqueeze(ctx: Ctx, x: Tensor, axes: Tensor) -> Tensor:
    return _unsqueeze(x, ctx.ints(axes))


def _unsqueeze(x: Tensor, axes: Sequence[int]) -> Tensor:
    rank = x.dim() + len(axes)
    for a in sorted(norm_axis(a, rank) for a in axes):
        x = torch.unsqueeze(x, a)
    return x


@onnx_op("Concat")
@moves()
def concat(ctx: Ctx, *xs: Tensor, axis: int = 1) -> Tensor:
    return torch.cat(xs, axis)


@onnx_op("Split", since=2)
@moves(0)
def split_2(ctx: Ctx, x: Tensor, *, axis: int = 0, split: Sequence[int] | None = None) -> tuple[Tensor, ...]:
    return _split(ctx, x, axis, split, None)


@onnx_op("Split", since=13)
@moves(0)
def split(
    ctx: Ctx, x: Tensor, split: Tensor | None = None, *, axis: int = 0, num_outputs: int | None = None
) -> tuple[Tensor, ...]:
    return _split(ctx, x, axis, None if split is None else ctx.ints(split), num_outputs)


def _split(ctx: Ctx, x: Tensor, axis: int, sizes: Sequence[Any] | None, parts: int | None) -> tuple[Tensor, ...]:
    """Equal parts where no sizes are given; from version 18 on the last ones may be smaller."""
    parts = parts or ctx.n_outputs
    n: Any = x.shape[axis]
    if sizes is None and ctx.opset < 18:
        sizes = [n // parts] * parts
    elif sizes is None:
        each = -(-n // parts)
        # min and max keep the later parts from going negative when there are more parts than rows
        ends = [torch.sym_min(each * (i + 1), n) for i in range(parts)] if parts > 1 else [n]
        sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    return torch.split_with_sizes(x, list(sizes), axis)


@onnx_op("Slice")
@moves(0)
def slice_1(
    ctx: Ctx, x: Tensor, *, starts: Sequence[int], ends: Sequence[int], axes: Sequence[int] | None = None
) -> Tensor:
    return _slice(x, starts, ends, axes, None)


@onnx_op("Slice", since=10)
@moves(0)
def slice_(
    ctx: Ctx, x: Tensor, starts: Tensor, ends: Tensor, axes: Tensor | None = None, steps: Tensor | None = None
) -> Tensor:
    return _slice(
        x,
        ctx.ints(starts),
        ctx.ints(ends),
        None if axes is None else ctx.ints(axes),
        None if steps is None else ctx.ints(steps),
    )


_LAST = torch.iinfo(torch.int64).max


def _slice(
    x: Tensor, starts: Sequence[Any], ends: Sequence[Any], axes: Sequence[int] | None, steps: Sequence[int] | None
) -> Tensor:
    for i, (start, end) in enumerate(zip(starts, ends, strict=True)):
        axis = norm_axis(axes[i] if axes is not None else i, x.dim())
        step = steps[i] if steps is not None else 1
        if step < 0:
            # counted from the far end a descending slice is an ascending one
            x = torch.flip(x, [axis])
            n: Any = x.shape[axis]
            start, end = _from_end(start, n), _from_end(end, n)
        if not (step == 1 and is_known(start, 0) and is_known(end, _LAST)):
            x = torch.ops.aten.slice.Tensor(x, axis, start, end, abs(step))
    return x


def _from_end(position: Any, n: Any) -> Any:
    """A position as seen from the far end: 0 stays inside, anything past the near end means all."""
    if position < 0:
        return min(-1 - position, _LAST) if isinstance(position, int) else -1 - position
    return torch.sym_max(n - 1 - position, 0)


@onnx_op("Tile", since=6)
@moves(0)
def tile(ctx: Ctx, x: Tensor, repeats: Tensor) -> Tensor:
    return x.repeat(ctx.ints(repeats))


@onnx_op("Expand")
@moves(0)
def expand(ctx: Ctx, x: Tensor, shape: Tensor) -> Tensor:
    """Broadcasting in both directions: a one on either side gives way."""
    want = ctx.ints(shape)
    rank = max(len(want), x.dim())
    have = [1] * (rank - x.dim()) + list(x.shape)
    want = [1] * (rank - len(want)) + want
    return x.expand([_broadcast(a, b) for a, b in zip(have, want, strict=True)])


def _broadcast(a: Any, b: Any) -> Any:
    if is_known(b, 1):
        return a
    if isinstance(a, int) and isinstance(b, int) and a not in (1, b):
        raise ModelError(f"Expand cannot broadcast size {a} with {b}")
    return b


@onnx_op("DepthToSpace")
@moves(0)
def depth_to_space(ctx: Ctx, x: Tensor, *, blocksize: int, mode: str = "DCR") -> Tensor:
    n, c, h, w = x.shape
    b = blocksize
    if mode == "DCR":
        y = x.reshape(n, b, b, c // (b * b), h, w).permute(0, 3, 4, 1, 5, 2)
    else:
        y = x.reshape(n, c // (b * b), b, b, h, w).permute(0, 1, 4, 2, 5, 3)
    return y.reshape(n, c // (b * b), h * b, w * b)


@onnx_op("SpaceToDepth")
@moves(0)
def space_to_depth(ctx: Ctx, x: Tensor, *, blocksize: int, mode: str = "DCR") -> Tensor:
    n, c, h, w = x.shape
    b = blocksize
    y = x.reshape(n, c, h // b, b, w // b, b)
    y = y.permute(0, 3, 5, 1, 2, 4) if mode == "DCR" else y.permute(0, 1, 3, 5, 2, 4)
    return y.reshape(n, c * b * b, h // b, w // b)


@onnx_op("ReverseSequence")
@moves(0)
def reverse_sequence(ctx: Ctx, x: Tensor, lengths: Tensor, *, batch_axis: int = 1, time_axis: int = 0) -> Tensor:
    """Each batch row reads its first `length` steps backwards and the rest as they stand."""
    batch, time = norm_axis(batch_axis, x.dim()), norm_axis(time_axis, x.dim())
    steps = torch.arange(x.shape[time], device=x.device)
    steps = steps.reshape([-1 if i == time else 1 for i in range(x.dim())])
    ends = lengths.to(torch.int64).reshape([-1 if i == batch else 1 for i in range(x.dim())])
    index = torch.where(steps < ends, ends - 1 - steps, steps)
    return torch.gather(x, time, index.expand(x.shape))


@onnx_op("Trilu")
def trilu(ctx: Ctx, x: Value, k: Tensor | None = None, *, upper: int = 1) -> Value:
    diagonal = 0 if k is None else ctx.ints(k)[0]
    if isinstance(x, np.ndarray):
        below = np.tri(x.shape[-2], x.shape[-1], diagonal - 1 if upper else diagonal, dtype=bool)
        return np.where(~below if upper else below, x, zero_of(x))
    y = torch.triu(carry(x), diagonal) if upper else torch.tril(carry(x), diagonal)
    return y.view(x.dtype)
