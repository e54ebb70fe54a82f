"""ai.onnx.ml: support vector machines, as libsvm has them.

Of several classes each two have a machine of their own. The class that most of them name is the label; where probabilities were
fitted, those of all pairs are coupled by libsvm's iteration, which ends before it has converged, so that only the same steps give
the same numbers. (`onnx.reference` multiplies vectors there where libsvm multiplies numbers: off by up to 0.13. Of two classes
whose weights are all positive it names the second whatever comes; libsvm and ONNX Runtime take the machine's word.)
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hotfuse.frontends.onnx.domains.ml import chosen, post_transformed
from hotfuse.frontends.onnx.registry import Ctx, DataDependent, onnx_op

_ML = "ai.onnx.ml"
_ITERATIONS, _PRECISION, _SURE = 100, 0.005, 1e-7
"""libsvm's: of the coupling, and how near to 0 and 1 probabilities of pairs may be."""

_EXACT = "donot_use_mm_for_euclid_dist"
"""Distances by differences: those of many rows torch makes of products otherwise, which far from zero cancel."""
_KERNELS: dict[str, Callable[[Tensor, Tensor, float, float, float], Tensor]] = {
    "LINEAR": lambda x, v, g, c, d: x @ v.t(),
    "POLY": lambda x, v, g, c, d: (g * (x @ v.t()) + c) ** d,
    "RBF": lambda x, v, g, c, d: torch.exp(-g * torch.cdist(x, v, compute_mode=_EXACT).square()),
    "SIGMOID": lambda x, v, g, c, d: torch.tanh(g * (x @ v.t()) + c),
}


@onnx_op("SVMRegressor", domain=_ML)
def svm_regressor(
    ctx: Ctx,
    x: Tensor,
    *,
    coefficients: Sequence[float],
    rho: Sequence[float],
    kernel_params: Sequence[float] = (0.0, 0.0, 0.0),
    kernel_type: str = "LINEAR",
    n_supports: int = 0,
    one_class: int = 0,
    post_transform: str = "NONE",
    support_vectors: Sequence[float] = (),
) -> Tensor:
    """A weighted sum of kernels with the support vectors, or a plain product when there are none."""
    work, weights = x.float(), torch.tensor(coefficients, dtype=torch.float32)
    gamma, coef0, degree = (list(kernel_params) + [0.0] * 3)[:3]
    if n_supports:
        vectors = torch.tensor(support_vectors, dtype=torch.float32).reshape(n_supports, -1)
        near = _KERNELS[kernel_type](work, vectors, gamma, coef0, degree)
    else:
        near = work
    y = (near @ weights).unsqueeze(1) + rho[0]
    return torch.where(y > 0, 1.0, -1.0) if one_class else post_transformed(y, post_transform)


def _pairs(classes: int) -> list[tuple[int, int]]:
    return list(itertools.combinations(range(classes), 2))


def _machines(coefficients: Tensor, counts: Sequence[int]) -> Tensor:
    """A row of weights of all support vectors for each two classes."""
    of = torch.tensor([k for k, count in enumerate(counts) for _ in range(count)])
    by_other = coefficients.reshape(-1, len(of))
    rows = [torch.where(of == i, by_other[j - 1], torch.where(of == j, by_other[i], 0.0)) for i, j in _pairs(len(counts))]
    return torch.stack(rows)


def coupled(pairs: Tensor, classes: int) -> Tensor:
    """Probabilities of classes from those that the first of each two classes is right."""
    r = np.zeros((pairs.shape[0], classes, classes))
    for column, (i, j) in zip(pairs.double().numpy().T, _pairs(classes), strict=True):
        r[:, i, j], r[:, j, i] = column, 1 - column
    q = -r * r.transpose(0, 2, 1)
    diagonal = np.arange(classes)
    q[:, diagonal, diagonal] = (r**2).sum(1)
    p = np.full((len(r), classes), 1 / classes)
    for _ in range(max(_ITERATIONS, classes)):
        qp = np.einsum("nij,nj->ni", q, p)
        pqp = (p * qp).sum(1)
        left = np.flatnonzero(np.abs(qp - pqp[:, None]).max(1) >= _PRECISION / classes)
        if not len(left):
            break
        at, now, qp, pqp = q[left], p[left], qp[left], pqp[left]
        for t in range(classes):
            step = (pqp - qp[:, t]) / at[:, t, t]
            now[:, t] += step
            pqp = (pqp + step * (step * at[:, t, t] + 2 * qp[:, t])) / (1 + step) ** 2
            qp = (qp + step[:, None] * at[:, t]) / (1 + step)[:, None]
            now /= (1 + step)[:, None]
        p[left] = now
    return torch.from_numpy(p).float()


@onnx_op("SVMClassifier", domain=_ML)
def svm_classifier(
    ctx: Ctx,
    x: Tensor,
    *,
    coefficients: Sequence[float],
    rho: Sequence[float],
    classlabels_ints: Sequence[int] | None = None,
    classlabels_strings: Sequence[str] | None = None,
    kernel_params: Sequence[float] = (0.0, 0.0, 0.0),
    kernel_type: str = "LINEAR",
    post_transform: str = "NONE",
    prob_a: Sequence[float] = (),
    prob_b: Sequence[float] = (),
    support_vectors: Sequence[float] = (),
    vectors_per_class: Sequence[int] = (),
) -> tuple[Any, Tensor]:
    """The labels, and a score for each two classes, or a probability for each class; without support vectors a linear model."""
    work, weights = x.float(), torch.tensor(coefficients, dtype=torch.float32)
    classes, total = max(1, len(classlabels_ints or classlabels_strings or ())), sum(vectors_per_class)
    likely = bool(prob_a) and total > 0
    if likely and ctx.traced:
        raise DataDependent("how often probabilities of pairs are adjusted")
    if total:
        gamma, coef0, degree = (list(kernel_params) + [0.0] * 3)[:3]
        vectors = torch.tensor(support_vectors, dtype=torch.float32).reshape(total, -1)
        near = _KERNELS[kernel_type](work, vectors, gamma, coef0, degree)
        scores = near @ _machines(weights, vectors_per_class).t() + torch.tensor(rho, dtype=torch.float32)
        first, second = (torch.tensor(side) for side in zip(*_pairs(classes), strict=True))
        won = torch.where(scores > 0, first, second)
        most = (won.unsqueeze(2) == torch.arange(classes)).sum(1)
        at = (most * classes - torch.arange(classes)).argmax(1)  # the first of several
    else:
        scores = work @ weights.reshape(classes, -1).t() + rho[0]
        at, most = scores.argmax(1), scores.amax(1)
        if len(rho) == 1 and classes == 2 and min(coefficients) >= 0:
            at = torch.where(most >= 0.5, 1, at)
        if len(rho) == 1 and classes != 2:
            return (most > 0).to(torch.int64), scores if scores.shape[1] == 1 else post_transformed(scores, post_transform)
    if likely:
        a, b = torch.tensor(prob_a, dtype=torch.float32), torch.tensor(prob_b, dtype=torch.float32)
        scores = coupled(torch.sigmoid(-(scores * a + b)).clamp(_SURE, 1 - _SURE), classes)
    if scores.shape[1] == 1 and post_transform != "PROBIT":
        scores = torch.cat([-scores, scores], 1)
    return chosen(ctx, at, classlabels_ints, classlabels_strings), post_transformed(scores, post_transform)
