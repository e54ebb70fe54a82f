"""Sampling images: at a grid of places, along an affine map, inside regions of interest; suppressing boxes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hotfuse.base.errors import ModelError
from hotfuse.frontends.onnx.registry import Ctx, onnx_op

_GRID_MODES = {
    "linear": "bilinear",
    "bilinear": "bilinear",
    "nearest": "nearest",
    "cubic": "bicubic",
    "bicubic": "bicubic",
}


def _reflect(at: Tensor, low: float, high: float) -> Tensor:
    """Mirror places at both ends until they are inside."""
    span = high - low
    if span <= 0:
        return torch.zeros_like(at)
    at = (at - low).abs() % (2 * span)
    return torch.where(at > span, 2 * span - at, at) + low


def _pixel(x: Tensor, places: Sequence[Tensor], padding: str, *, align: bool) -> Tensor:
    """x (N, C, *sizes) at whole-numbered places, each (N, P), outside as the padding mode says."""
    sizes = x.shape[2:]
    inside = torch.ones_like(places[0], dtype=torch.bool)
    at = torch.zeros_like(places[0])
    for place, size in zip(places, sizes, strict=True):
        if padding == "reflection":
            place = _reflect(place, 0.0 if align else -0.5, size - 1.0 if align else size - 0.5)
        inside = inside & (place >= 0) & (place <= size - 1)
        at = at * size + place.clamp(0, size - 1).round()
    taken = torch.gather(x.flatten(2), 2, at.long().unsqueeze(1).expand(-1, x.shape[1], -1))
    return taken * inside.unsqueeze(1) if padding == "zeros" else taken


def _cubic_weights(t: Tensor, a: float = -0.75) -> list[Tensor]:
    def near(d: Tensor) -> Tensor:
        return ((a + 2) * d - (a + 3)) * d * d + 1

    def far(d: Tensor) -> Tensor:
        return ((a * d - 5 * a) * d + 8 * a) * d - 4 * a

    return [far(t + 1), near(t), near(1 - t), far(2 - t)]


def _cubic_nd(x: Tensor, grid: Tensor, padding: str, *, align: bool) -> Tensor:
    """Cubic sampling of any rank, one axis after another (torch has it for images only)."""
    n = x.dim() - 2
    flat = grid.reshape(grid.shape[0], -1, n)
    places: list[Tensor] = []
    for i in range(n):
        v, size = flat[..., n - 1 - i], x.shape[2 + i]
        places.append((v + 1) / 2 * (size - 1) if align else ((v + 1) * size - 1) / 2)
    base = [torch.floor(p) for p in places]
    weights = [_cubic_weights(p - b) for p, b in zip(places, base, strict=True)]
    total: Any = 0.0
    for taps in itertools.product(range(4), repeat=n):
        w: Any = 1.0
        for i, tap in enumerate(taps):
            w = w * weights[i][tap]
        near = [b + (t - 1) for b, t in zip(base, taps, strict=True)]
        total = total + _pixel(x, near, padding, align=align) * w.unsqueeze(1)
    return total.reshape([x.shape[0], x.shape[1], *grid.shape[1:-1]])


@onnx_op("GridSample")
def grid_sample(
    ctx: Ctx, x: Tensor, grid: Tensor, *, align_corners: int = 0, mode: str = "bilinear", padding_mode: str = "zeros"
) -> Tensor:
    if mode not in _GRID_MODES:
        raise ModelError(f"GridSample: mode is {mode!r}", because="ONNX defines no such one")
    name = _GRID_MODES[mode]
    grid = grid.to(x.dtype)
    if name == "bicubic" and x.dim() != 4:
        return _cubic_nd(x, grid, padding_mode, align=bool(align_corners))
    return F.grid_sample(x, grid, name, padding_mode, bool(align_corners))


@onnx_op("AffineGrid")
def affine_grid(ctx: Ctx, theta: Tensor, size: Tensor, *, align_corners: int = 0) -> Tensor:
    return F.affine_grid(theta, ctx.ints(size), bool(align_corners))


def _corners(at: Tensor, size: Any) -> tuple[Tensor, Tensor]:
    """Lower and upper neighbour of places in an axis, and the weights of both; none for what lies a pixel or more outside."""
    inside = ((at >= -1.0) & (at <= size)).to(at.dtype)
    at = at.clamp(min=0)
    low = torch.floor(at).clamp(max=size - 1)
    high = (low + 1).clamp(max=size - 1)
    part = torch.where(low >= size - 1, torch.zeros_like(at), at - low) * inside
    return torch.stack([low, high], -1).long(), torch.stack([inside - part, part], -1)


def _pixel_rows(x: Tensor) -> tuple[Tensor, Any, Any]:
    """The pixels of all images (N, C, H, W) as rows of their channels; height and width."""
    return x.permute(0, 2, 3, 1).flatten(0, 2), x.shape[2], x.shape[3]


def _roi_one(
    pixels: tuple[Tensor, Any, Any], images: Tensor, ys: Tensor, xs: Tensor, mode: str, bins: tuple[int, int]
) -> Tensor:
    """Samples of the images (R) at rows ys (R, PH * gh) and columns xs (R, PW * gw), pooled to (R, C, PH, PW).

    Whole rows of channels are taken: an image for each region would be copied, and an index for each element looked at.
    """
    rows, h, w = pixels
    (y_at, y_weights), (x_at, x_weights) = _corners(ys, h), _corners(xs, w)
    lines = (images.reshape([-1, 1, 1]) * h + y_at) * w
    at = lines.unsqueeze(3).unsqueeze(4) + x_at.unsqueeze(1).unsqueeze(1)
    weight = y_weights.unsqueeze(3).unsqueeze(4) * x_weights.unsqueeze(1).unsqueeze(1)
    ph, pw = bins
    gh, gw = ys.shape[1] // ph, xs.shape[1] // pw
    split = [-1, ph, gh, 2, pw, gw, 2]
    at, weight = (t.reshape(split).permute(0, 1, 4, 2, 3, 5, 6).reshape(-1) for t in (at, weight))
    taken = (rows.index_select(0, at) * weight.unsqueeze(1)).reshape([-1, 4 * gh * gw, rows.shape[1]])
    value = taken.sum(1) / (gh * gw) if mode == "avg" else taken.amax(1)
    return value.reshape([-1, ph, pw, rows.shape[1]]).permute(0, 3, 1, 2)


def _samples(start: Tensor, size: Tensor, bins: int, per_bin: int) -> Tensor:
    """Evenly spaced sample places: (R, bins * per_bin)."""
    steps = torch.arange(bins * per_bin, dtype=start.dtype, device=start.device)
    return start.unsqueeze(1) + (steps + 0.5) * (size / (bins * per_bin)).unsqueeze(1)


@onnx_op("RoiAlign")
def roi_align(
    ctx: Ctx,
    x: Tensor,
    rois: Tensor,
    batch_indices: Tensor,
    *,
    coordinate_transformation_mode: str | None = None,
    mode: str = "avg",
    output_height: int = 1,
    output_width: int = 1,
    sampling_ratio: int = 0,
    spatial_scale: float = 1.0,
) -> Tensor:
    """Without a sampling ratio each region decides how finely it is sampled: its size must be known."""
    if coordinate_transformation_mode is None:
        coordinate_transformation_mode = "half_pixel" if ctx.opset >= 16 else "output_half_pixel"
    half = coordinate_transformation_mode == "half_pixel"
    x1, y1, x2, y2 = (rois * spatial_scale - (0.5 if half else 0.0)).unbind(1)
    width, height = x2 - x1, y2 - y1
    if not half:
        width, height = width.clamp(min=1.0), height.clamp(min=1.0)
    pixels, images = _pixel_rows(x), batch_indices.long()
    bins = (output_height, output_width)
    if sampling_ratio > 0:
        ys = _samples(y1, height, output_height, sampling_ratio)
        xs = _samples(x1, width, output_width, sampling_ratio)
        return _roi_one(pixels, images, ys, xs, mode, bins)
    per_h = ctx.ints(torch.ceil(height / output_height).long())
    per_w = ctx.ints(torch.ceil(width / output_width).long())
    out: list[Tensor] = []
    for r, (gh, gw) in enumerate(zip(per_h, per_w, strict=True)):
        if gh <= 0 or gw <= 0:
            out.append(x.new_zeros([1, x.shape[1], *bins]))
            continue
        ys = _samples(y1[r : r + 1], height[r : r + 1], output_height, gh)
        xs = _samples(x1[r : r + 1], width[r : r + 1], output_width, gw)
        out.append(_roi_one(pixels, images[r : r + 1], ys, xs, mode, bins))
    return torch.cat(out) if out else x.new_zeros([0, x.shape[1], *bins])


@onnx_op("MaxRoiPool")
def max_roi_pool(
    ctx: Ctx, x: Tensor, rois: Tensor, *, pooled_shape: Sequence[int], spatial_scale: float = 1.0
) -> Tensor:
    """Rows first, then columns: each bin is a maximum over a mask of what it covers; an empty bin is zero."""
    box = torch.floor(rois[:, 1:] * spatial_scale + 0.5)
    data = x.index_select(0, rois[:, 0].long())
    covered: Tensor | None = None
    for axis, (low, high) in ((2, (1, 3)), (3, (0, 2))):
        start, bins, size = box[:, low], pooled_shape[axis - 2], x.shape[axis]
        length = (box[:, high] - start + 1).clamp(min=1)
        cells = torch.arange(size, dtype=x.dtype, device=x.device)
        parts: list[Tensor] = []
        masks: list[Tensor] = []
        for b in range(bins):
            first = (torch.floor(b * length / bins) + start).clamp(0, size).unsqueeze(1)
            last = (torch.ceil((b + 1) * length / bins) + start).clamp(0, size).unsqueeze(1)
            mask = (cells >= first) & (cells < last)
            shape = [-1, 1, size, 1] if axis == 2 else [-1, 1, 1, size]
            parts.append(data.masked_fill(~mask.reshape(shape), -math.inf).amax(axis, keepdim=True))
            masks.append(mask.any(1))
        data = torch.cat(parts, axis)
        some = torch.stack(masks, 1)
        covered = some.unsqueeze(2) if covered is None else covered & some.unsqueeze(1)
    assert covered is not None
    return torch.where(covered.unsqueeze(1), data, torch.zeros_like(data))


def _iou(boxes: Tensor, one: Tensor, *, center: bool) -> Tensor:
    """Overlap over union of every box (n, 4) with one."""

    def edges(b: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        if center:
            x, y, w, h = b.unbind(-1)
            return y - h / 2, y + h / 2, x - w / 2, x + w / 2
        y1, x1, y2, x2 = b.unbind(-1)
        return torch.minimum(y1, y2), torch.maximum(y1, y2), torch.minimum(x1, x2), torch.maximum(x1, x2)

    a, b = edges(boxes), edges(one)
    high = (torch.minimum(a[1], b[1]) - torch.maximum(a[0], b[0])).clamp(min=0)
    wide = (torch.minimum(a[3], b[3]) - torch.maximum(a[2], b[2])).clamp(min=0)
    shared = high * wide
    union = (a[1] - a[0]) * (a[3] - a[2]) + (b[1] - b[0]) * (b[3] - b[2]) - shared
    return torch.where(union > 0, shared / union, torch.zeros_like(shared))


@onnx_op("NonMaxSuppression")
def non_max_suppression(
    ctx: Ctx,
    boxes: Tensor,
    scores: Tensor,
    max_output_boxes_per_class: Tensor | None = None,
    iou_threshold: Tensor | None = None,
    score_threshold: Tensor | None = None,
    *,
    center_point_box: int = 0,
) -> Tensor:
    """How many boxes stay is known only from the data, so this op stays whole in a graph."""
    most = int(ctx.ints(max_output_boxes_per_class)[0]) if max_output_boxes_per_class is not None else 0
    limit = float(ctx.ints(iou_threshold)[0]) if iou_threshold is not None else 0.0
    floor = float(ctx.ints(score_threshold)[0]) if score_threshold is not None else None
    chosen: list[list[int]] = []
    for batch, cls in itertools.product(range(scores.shape[0]), range(scores.shape[1])):
        if most <= 0:
            break
        score = scores[batch, cls]
        order = torch.argsort(score, descending=True, stable=True)
        if floor is not None:
            order = order[score[order] > floor]
        kept = 0
        left: list[int] = ctx.ints(order)
        while left and kept < most:
            best = left[0]
            chosen.append([batch, cls, best])
            kept += 1
            rest = torch.tensor(left[1:], dtype=torch.int64)
            overlap = _iou(boxes[batch][rest], boxes[batch, best], center=bool(center_point_box))
            left = ctx.ints(rest[overlap <= limit])
    return torch.tensor(chosen, dtype=torch.int64).reshape(-1, 3)
