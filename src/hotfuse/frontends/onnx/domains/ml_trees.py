"""ai.onnx.ml tree ensembles: all trees in one table of nodes, walked by all rows at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hotfuse.base.errors import ModelError
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.frontends.onnx.domains.ml import chosen, post_transformed
from hotfuse.frontends.onnx.registry import Ctx, onnx_op

_ML = "ai.onnx.ml"


@dataclass(frozen=True, slots=True)
class _Trees:
    """All nodes of all trees in one table; leaves point at themselves, so walking on is harmless."""

    roots: Tensor
    feature: Tensor
    split: Tensor
    mode: Tensor
    missing: Tensor
    yes: Tensor
    no: Tensor
    depth: int
    members: Tensor | None  # (nodes, longest set), NaN-padded


_MODES = ("BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ", "BRANCH_NEQ", "BRANCH_MEMBER", "LEAF")
_LEAF = _MODES.index("LEAF")


def _depth(roots: Sequence[int], yes: Sequence[int], no: Sequence[int], leaf: Sequence[bool]) -> int:
    depth, level = 0, set(roots)
    while level := {n for i in level if not leaf[i] for n in (yes[i], no[i])}:
        depth += 1
        if depth > len(leaf):
            raise ModelError("a tree ensemble's nodes form a cycle", because="a branch leads back to its ancestor")
    return depth


def _walk(x: Tensor, t: _Trees) -> Tensor:
    """(N, trees): the leaf where each row ends in each tree."""
    at = t.roots.unsqueeze(0).expand(x.shape[0], -1)
    for _ in range(t.depth):
        value = torch.gather(x, 1, t.feature[at])
        split, mode = t.split[at], t.mode[at]
        go = (mode == 0) & (value <= split)
        for m, test in ((1, value < split), (2, value >= split), (3, value > split), (4, value == split)):
            go = go | ((mode == m) & test)
        go = go | ((mode == 5) & (value != split))
        if t.members is not None:
            go = go | ((mode == 6) & (t.members[at] == value.unsqueeze(-1)).any(-1))
        go = go | (torch.isnan(value) & t.missing[at])
        at = torch.where(go, t.yes[at], t.no[at])
    return at


def _aggregate(per_leaf: Tensor, present: Tensor, at: Tensor, how: str) -> Tensor:
    """(N, targets) from each tree's leaf; a target with no leaf at all is zero."""
    picked = per_leaf[at]
    if how in ("SUM", "AVERAGE"):
        total = picked.sum(1)
        return total / at.shape[1] if how == "AVERAGE" else total
    some = present[at]
    fill = torch.inf if how == "MIN" else -torch.inf
    masked = picked.masked_fill(~some, fill)
    best = masked.amin(1) if how == "MIN" else masked.amax(1)
    return torch.where(some.any(1), best, torch.zeros_like(best))


@onnx_op("TreeEnsemble", domain=_ML)
def tree_ensemble(
    ctx: Ctx,
    x: Tensor,
    *,
    leaf_targetids: Sequence[int],
    leaf_weights: Tensor,
    nodes_falseleafs: Sequence[int],
    nodes_falsenodeids: Sequence[int],
    nodes_featureids: Sequence[int],
    nodes_modes: Tensor,
    nodes_splits: Tensor,
    nodes_trueleafs: Sequence[int],
    nodes_truenodeids: Sequence[int],
    tree_roots: Sequence[int],
    aggregate_function: int = 1,
    membership_values: Tensor | None = None,
    n_targets: int = 1,
    nodes_hitrates: Tensor | None = None,
    nodes_missing_value_tracks_true: Sequence[int] | None = None,
    post_transform: int = 0,
) -> Tensor:
    """Inner nodes first, then the leaves, in one table."""
    inner, leaves = len(nodes_featureids), len(leaf_targetids)
    pad = [0] * leaves
    own = list(range(inner, inner + leaves))
    yes = [i + inner * bool(f) for i, f in zip(nodes_truenodeids, nodes_trueleafs, strict=True)] + own
    no = [i + inner * bool(f) for i, f in zip(nodes_falsenodeids, nodes_falseleafs, strict=True)] + own
    modes = [*ctx.ints(nodes_modes), *[_LEAF] * leaves]
    members = None
    if membership_values is not None and 6 in modes:
        members = _member_sets(ctx.ints(membership_values), modes, x.dtype)
    trees = _Trees(
        torch.tensor(tree_roots),
        torch.tensor([*nodes_featureids, *pad]),
        torch.cat([nodes_splits.to(x.dtype), torch.zeros(leaves, dtype=x.dtype)]),
        torch.tensor(modes),
        torch.tensor([bool(m) for m in (nodes_missing_value_tracks_true or [0] * inner)] + [False] * leaves),
        torch.tensor(yes),
        torch.tensor(no),
        _depth(tree_roots, yes, no, [m == _LEAF for m in modes]),
        members,
    )
    per_leaf = torch.zeros(inner + leaves, n_targets, dtype=x.dtype)
    rows, cols = torch.tensor(own), torch.tensor(leaf_targetids)
    per_leaf = per_leaf.index_put((rows, cols), leaf_weights.to(x.dtype))
    present = torch.zeros_like(per_leaf, dtype=torch.bool).index_put((rows, cols), torch.tensor(True))
    how = ("AVERAGE", "SUM", "MIN", "MAX")[aggregate_function]
    scores = _aggregate(per_leaf, present, _walk(x, trees), how)
    return post_transformed(scores, ("NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO", "PROBIT")[post_transform])


def _member_sets(values: Sequence[float], modes: Sequence[int], dtype: torch.dtype) -> Tensor:
    """One NaN-ended set per member node, in order, as rows padded with NaN."""
    sets: list[list[float]] = [[]]
    for v in values:
        if v != v:
            sets.append([])
        else:
            sets[-1].append(v)
    longest = max(1, max(len(s) for s in sets))
    out = torch.full((len(modes), longest), torch.nan, dtype=dtype)
    for row, members in zip([i for i, m in enumerate(modes) if m == 6], sets, strict=False):
        out[row, : len(members)] = torch.tensor(members, dtype=dtype)
    return out


def _old_trees(x: Tensor, attrs: dict[str, Any], kind: str, n: int) -> tuple[_Trees, Tensor, Tensor]:
    """The ensemble of versions 1 to 3: nodes named by (tree, node), leaves weighted by a separate table."""
    ids = list(zip(attrs["nodes_treeids"], attrs["nodes_nodeids"], strict=True))
    place = {key: i for i, key in enumerate(ids)}
    modes = [_MODES.index(m) for m in attrs["nodes_modes"]]
    leaf = [m == _LEAF for m in modes]
    trees = attrs["nodes_treeids"]
    yes = [i if leaf[i] else place[(trees[i], v)] for i, v in enumerate(attrs["nodes_truenodeids"])]
    no = [i if leaf[i] else place[(trees[i], v)] for i, v in enumerate(attrs["nodes_falsenodeids"])]
    # a tree's root is the node no other node leads to; the first of the tree, when it is alone
    led = {c for i in range(len(ids)) if not leaf[i] for c in (yes[i], no[i])}
    roots = [i for i in range(len(ids)) if i not in led]
    splits = attrs.get("nodes_values_as_tensor")
    values = splits.to(x.dtype) if splits is not None else torch.tensor(attrs["nodes_values"], dtype=x.dtype)
    missing = attrs.get("nodes_missing_value_tracks_true") or [0] * len(ids)
    table = _Trees(
        torch.tensor(roots),
        torch.tensor(attrs["nodes_featureids"]),
        values,
        torch.tensor(modes),
        torch.tensor([bool(m) for m in missing]),
        torch.tensor(yes),
        torch.tensor(no),
        _depth(roots, yes, no, leaf),
        None,
    )
    weights = attrs.get(f"{kind}_weights_as_tensor")
    w = weights.float() if weights is not None else torch.tensor(attrs[f"{kind}_weights"], dtype=torch.float32)
    rows = torch.tensor([place[k] for k in zip(attrs[f"{kind}_treeids"], attrs[f"{kind}_nodeids"], strict=True)])
    cols = torch.tensor(attrs[f"{kind}_ids"])
    per_leaf = torch.zeros(len(ids), n, dtype=w.dtype).index_put((rows, cols), w, accumulate=True)
    present = torch.zeros(len(ids), n, dtype=torch.bool).index_put((rows, cols), torch.tensor(True))
    return table, per_leaf, present


def _base(attrs: dict[str, Any]) -> Tensor | None:
    given = attrs.get("base_values_as_tensor")
    if given is not None:
        return given.float().reshape(-1)
    return torch.tensor(attrs["base_values"], dtype=torch.float32) if attrs.get("base_values") else None


@onnx_op("TreeEnsembleRegressor", domain=_ML)
def tree_ensemble_regressor(ctx: Ctx, x: Tensor, *, n_targets: int = 1, **attrs: Any) -> Tensor:
    work = x if x.dtype.is_floating_point else x.float()
    trees, per_leaf, present = _old_trees(work, attrs, "target", n_targets)
    scores = _aggregate(per_leaf, present, _walk(work, trees), attrs.get("aggregate_function", "SUM"))
    base = _base(attrs)
    return post_transformed(scores if base is None else scores + base, attrs.get("post_transform", "NONE"))


@onnx_op("TreeEnsembleClassifier", domain=_ML)
def tree_ensemble_classifier(
    ctx: Ctx,
    x: Tensor,
    *,
    classlabels_int64s: Sequence[int] | None = None,
    classlabels_strings: Sequence[str] | None = None,
    post_transform: str = "NONE",
    **attrs: Any,
) -> tuple[Any, Tensor]:
    """Votes for one class only mean two classes: the score and what is left of it."""
    work = x if x.dtype.is_floating_point else x.float()
    labels = classlabels_int64s or classlabels_strings or ()
    binary = len(labels) == 2 and len(set(attrs["class_ids"])) == 1
    table = {**attrs, "class_ids": [0] * len(attrs["class_ids"])} if binary else attrs
    n = 1 if binary else len(labels)
    trees, per_leaf, present = _old_trees(work, table, "class", n)
    scores = _aggregate(per_leaf, present, _walk(work, trees), "SUM")
    base = _base(attrs)
    if base is not None:
        scores = scores + (base[-1:] if binary else base)
    if not binary:
        at = scores.argmax(1)
        return chosen(ctx, at, classlabels_int64s, classlabels_strings), post_transformed(scores, post_transform)
    # votes that can be negative are log odds, decided at zero; others are probabilities, decided at a half
    odds = any(w < 0 for w in _weights(ctx, attrs))
    at = (scores[:, 0] > (0.0 if odds else 0.5)).long()
    pair = torch.cat([-scores if odds else 1 - scores, scores], 1)
    return chosen(ctx, at, classlabels_int64s, classlabels_strings), post_transformed(pair, post_transform)


def _weights(ctx: Ctx, attrs: dict[str, Any]) -> Sequence[float]:
    given = attrs.get("class_weights_as_tensor")
    return attrs["class_weights"] if given is None else ctx.ints(given)
