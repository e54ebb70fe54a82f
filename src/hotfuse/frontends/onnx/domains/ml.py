"""ai.onnx.ml: label tables, scalers and linear models, as classical models export them; trees and support vectors lie beside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hotfuse.base.errors import ModelError
from hotfuse.frontends.onnx.registry import Ctx, onnx_op

_ML = "ai.onnx.ml"


@onnx_op("ArrayFeatureExtractor", domain=_ML)
def array_feature_extractor(ctx: Ctx, x: Any, y: Tensor) -> Any:
    if isinstance(x, np.ndarray):
        return x[..., y.reshape(-1).numpy()]
    row = x.unsqueeze(0) if x.dim() == 1 else x
    return row.index_select(-1, y.reshape(-1))


@onnx_op("Binarizer", domain=_ML)
def binarizer(ctx: Ctx, x: Tensor, *, threshold: float = 0.0) -> Tensor:
    return (x > threshold).to(x.dtype)


@onnx_op("Scaler", domain=_ML)
def scaler(ctx: Ctx, x: Tensor, *, offset: Sequence[float] = (0.0,), scale: Sequence[float] = (1.0,)) -> Tensor:
    off, by = torch.tensor(offset, dtype=torch.float32), torch.tensor(scale, dtype=torch.float32)
    return (x - off).float() * by


@onnx_op("Normalizer", domain=_ML)
def normalizer(ctx: Ctx, x: Tensor, *, norm: str = "MAX") -> Tensor:
    """A zero row stays zero; MAX divides by the largest value, not the largest magnitude."""
    work = x.float()
    if norm == "MAX":
        size = work.amax(-1, keepdim=True)
    else:
        size = torch.linalg.vector_norm(work, 1 if norm == "L1" else 2, -1, keepdim=True)
    return work / torch.where(size == 0, torch.ones_like(size), size)


def post_transformed(scores: Tensor, name: str) -> Tensor:
    if name == "NONE":
        return scores
    if name == "LOGISTIC":
        return torch.sigmoid(scores)
    if name == "SOFTMAX":
        return torch.softmax(scores, -1)
    if name == "SOFTMAX_ZERO":
        probs = torch.softmax(scores.masked_fill(scores == 0, -torch.inf), -1)
        return torch.where(scores == 0, torch.zeros_like(scores), probs)
    if name == "PROBIT":
        return np.sqrt(2.0) * torch.erfinv(2 * scores - 1)
    raise ModelError(f"post_transform is {name!r}", because="ONNX defines no such one")


@onnx_op("LinearRegressor", domain=_ML)
def linear_regressor(
    ctx: Ctx,
    x: Tensor,
    *,
    coefficients: Sequence[float],
    intercepts: Sequence[float] | None = None,
    post_transform: str = "NONE",
    targets: int = 1,
) -> Tensor:
    w = torch.tensor(coefficients, dtype=torch.float32).reshape(targets, -1)
    b = None if not intercepts else torch.tensor(intercepts, dtype=torch.float32)
    return post_transformed(torch.nn.functional.linear(x.float(), w, b), post_transform)


def chosen(ctx: Ctx, at: Tensor, ints: Sequence[int] | None, strings: Sequence[str] | None) -> Any:
    """The class labels at positions; text is not a tensor, so it needs the positions' numbers."""
    if ints:
        return torch.tensor(ints, dtype=torch.int64)[at]
    if strings:
        return np.array([strings[i] for i in ctx.ints(at)], dtype=object)
    return at


@onnx_op("LinearClassifier", domain=_ML)
def linear_classifier(
    ctx: Ctx,
    x: Tensor,
    *,
    coefficients: Sequence[float],
    classlabels_ints: Sequence[int] | None = None,
    classlabels_strings: Sequence[str] | None = None,
    intercepts: Sequence[float] | None = None,
    multi_class: int = 0,
    post_transform: str = "NONE",
) -> tuple[Any, Tensor]:
    """One row of coefficients for two classes means a score and its opposite; what intercepts have no rows for is ignored."""
    work = x.float() if x.dim() > 1 else x.float().unsqueeze(0)
    used = len(intercepts) * int(work.shape[1]) if intercepts else len(coefficients)
    w = torch.tensor(coefficients[:used], dtype=torch.float32).reshape(-1, work.shape[1])
    b = None if not intercepts else torch.tensor(intercepts, dtype=torch.float32)
    scores = torch.nn.functional.linear(work, w, b)
    labels = classlabels_ints or classlabels_strings or ()
    if w.shape[0] == 1 and len(labels) == 2:
        scores = torch.cat([-scores, scores], 1)
    if scores.shape[1] == 1:
        raise ModelError("LinearClassifier with one class", because="its label has no definition")
    at = scores.argmax(1)
    return chosen(ctx, at, classlabels_ints, classlabels_strings), post_transformed(scores, post_transform)


# ---- label encoder -------------------------------------------------------------------------------------------------


def _array(v: Any) -> np.ndarray[Any, Any]:
    return v.numpy() if isinstance(v, Tensor) else np.asarray(v)


def _table(kind: str, attrs: dict[str, Any]) -> np.ndarray[Any, Any] | None:
    """The keys or values given in one of the typed attributes."""
    for suffix, dtype in (("int64s", np.int64), ("floats", np.float32), ("strings", object)):
        if attrs.get(f"{kind}_{suffix}"):
            return np.array(attrs[f"{kind}_{suffix}"], dtype=dtype)
    given = attrs.get(f"{kind}_tensor")
    return None if given is None else _array(given).reshape(-1)


@onnx_op("LabelEncoder", domain=_ML, since=2)
def label_encoder(ctx: Ctx, x: Any, **attrs: Any) -> Any:
    """A table from keys to values; what is not in it becomes the default of the values' type. NaN equals NaN."""
    keys, values = _table("keys", attrs), _table("values", attrs)
    if keys is None or values is None:
        raise ModelError("LabelEncoder has no table", because="keys_* and values_* are not both given")
    default = attrs.get("default_tensor")
    if default is not None:
        default = _array(default).reshape(-1)[0]
    elif values.dtype.kind == "i":
        default = attrs.get("default_int64", -1)
    elif values.dtype.kind == "f":
        default = attrs.get("default_float", -0.0)
    else:
        default = attrs.get("default_string", "_Unused")
    if isinstance(x, Tensor) and values.dtype.kind in "if":
        return _lookup(x, torch.from_numpy(keys), torch.from_numpy(values), float(default))
    data = _array(x)
    table = dict(zip(keys.tolist(), values.tolist(), strict=True))
    nan = next((v for k, v in table.items() if k != k), default)
    found = [nan if k != k else table.get(k, default) for k in data.reshape(-1).tolist()]
    out = np.array(found, dtype=values.dtype).reshape(data.shape)
    return out if out.dtype.kind in "OUS" else torch.from_numpy(out)


def _lookup(x: Tensor, keys: Tensor, values: Tensor, default: float) -> Tensor:
    """The first key that equals each element, without leaving tensors."""
    flat = x.unsqueeze(-1)
    hit = flat == keys.to(x.dtype)
    if x.dtype.is_floating_point:
        hit = hit | (torch.isnan(flat) & torch.isnan(keys.to(x.dtype)))
    found = values[hit.to(torch.uint8).argmax(-1)]
    return torch.where(hit.any(-1), found, torch.full_like(found, default))


# ---- features ------------------------------------------------------------------------------------------------------


@onnx_op("Imputer", domain=_ML)
def imputer(
    ctx: Ctx,
    x: Tensor,
    *,
    imputed_value_floats: Sequence[float] | None = None,
    imputed_value_int64s: Sequence[int] | None = None,
    replaced_value_float: float = 0.0,
    replaced_value_int64: int = 0,
) -> Tensor:
    """One number for all features, or one per feature, where the replaced value stands; NaN stands for NaN."""
    if x.dtype.is_floating_point:
        nan = replaced_value_float != replaced_value_float
        gap = torch.isnan(x) if nan else x == replaced_value_float
        return torch.where(gap, torch.tensor(imputed_value_floats or [0.0], dtype=x.dtype), x)
    return torch.where(x == replaced_value_int64, torch.tensor(imputed_value_int64s or [0], dtype=x.dtype), x)


@onnx_op("FeatureVectorizer", domain=_ML)
def feature_vectorizer(ctx: Ctx, *xs: Tensor, inputdimensions: Sequence[int]) -> Tensor:
    """Inputs side by side as float, each cut or zero-padded to its declared width."""
    parts: list[Tensor] = []
    for x, wide in zip(xs, inputdimensions, strict=True):
        row = x.unsqueeze(1) if x.dim() == 1 else x
        parts.append(torch.nn.functional.pad(row.float(), [0, wide - row.shape[1]]))
    return torch.cat(parts, 1)


@onnx_op("OneHotEncoder", domain=_ML)
def one_hot_encoder(
    ctx: Ctx,
    x: Any,
    *,
    cats_int64s: Sequence[int] | None = None,
    cats_strings: Sequence[str] | None = None,
    zeros: int = 1,
) -> Tensor:
    """Which category each element is; one that is none of them is all zeros, or an error."""
    if isinstance(x, Tensor):
        hit = x.long().unsqueeze(-1) == torch.tensor(cats_int64s or [], dtype=torch.int64)
    else:
        hit = torch.from_numpy(_array(x)[..., None] == np.array(cats_strings or [], dtype=object))
    if not zeros and not all(ctx.ints(hit.any(-1))):
        raise ModelError("OneHotEncoder met a value that is none of its categories", because="zeros is 0")
    return hit.float()
