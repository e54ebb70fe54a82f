"""Zeros in what calls bring, rows of them or some within rows: which products of a plan see them.

Sampled calls show zeros somewhere; the calls that were kept then tell exactly which products' rows are zero. Kernels of these get
a second side (`lower.cpu.gemm.skipping`, `lower.cpu.gemm.sparse`), switched by `runtime.zero_rows`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.compile.request_context import EVERY, value_id
from hotfuse.compile.variants.skips import SKIP, SPARSE
from hotfuse.ir.graph import Graph, Node, Value
from hotfuse.ir.types import DType, TensorType
from hotfuse.lower.run.kernel_state import ROWS_TOGETHER
from hotfuse.ops.contract import is_contraction
from hotfuse.ops.schema import argument
from hotfuse.ops.table import packet
from hotfuse.profile.snapshot import GraphSeen
from hotfuse.runtime.plan import Plan
from hotfuse.runtime.tierup.tiers import MIN_SAMPLES
from hotfuse.specialize.table import ZERO_ROWS, row

MIN_ZERO_SHARE = row(ZERO_ROWS).share
"""Part of a value, or of a product's rows, that must be zero for anybody to care."""
_REALS = (DType.F32, DType.F64, DType.F16, DType.BF16)
_LEFT = {"aten.linear": ("input", "weight"), "aten.addmm": ("mat1", "mat2"), "aten.mm": ("self", "mat2")}


def suspected(seen: GraphSeen | None) -> bool:
    """Whether sampled calls show so many zeros that some product's rows may be zero."""
    if seen is None or seen.samples < MIN_SAMPLES:
        return False
    return any(max(v.zero_rows.mean, v.zero.mean) >= MIN_ZERO_SHARE for v in seen.values)


@dataclass(frozen=True, slots=True)
class ZeroRowProducts:
    """Products whose left operand has zeros that can be left out."""

    focus: tuple[str, ...]
    """The values, as workers call what their products are known by."""
    share: float
    """Mean part of their rows that is zero, in the calls that were kept."""
    what: str
    """Rows of zeros; or, where there are too few of these, zeros within rows."""
    calls: tuple[Sequence[torch.Tensor], ...]
    """Those calls, the most ordinary first: that one decides the race."""


def products(
    plan: Plan, weights: Mapping[str, torch.Tensor], calls: Sequence[Sequence[torch.Tensor]], compile: Callable[..., Plan]
) -> ZeroRowProducts | str:
    """What of a plan is worth a side that leaves rows out, or why nothing is."""
    weights = {**plan.weights, **weights}  # what was folded for it has weights of its own
    asked: list[tuple[str, Value]] = []
    refused = _not_finite(plan, weights)
    for a in plan.artifacts:
        node = next((n for n in a.graph.nodes if is_contraction(n)), None) if a.backend == "llvm" else None
        x = _left(a.graph, node, weights) if node is not None else None
        if x is not None and x.name not in refused:
            asked.append((value_id(x.name), x))
    if plan.layers:  # its kernels are behind guards, under names of their own: any of them may be meant
        found = [_left(plan.graph, n, weights) for n in plan.graph.nodes if is_contraction(n)]
        asked = [(EVERY, x) for x in found if x is not None] if all_finite(weights) else []
    if not asked or not calls:
        return "no product has finite constant weights" if calls else "no inputs are kept"
    shown = dict.fromkeys(x for _, x in asked)
    looking = compile(replace(plan.graph, outputs=tuple(shown)), weights)
    by_row: list[dict[str, float]] = []
    by_step: list[dict[str, float]] = []
    with torch.no_grad():
        for call in calls:
            made = list(zip(shown, looking.run(*call), strict=True))
            by_row.append({v.name: _zero_rows(t) for v, t in made})
            by_step.append({v.name: _zero_steps(t) for v, t in made})
    tried: list[str] = []
    for what, shares in ((SKIP, by_row), (SPARSE, by_step)):
        mean = {v.name: sum(s[v.name] for s in shares) / len(shares) for v in shown}
        hit = [(focus, x.name) for focus, x in asked if mean[x.name] >= MIN_ZERO_SHARE]
        if hit:
            return _found(what, hit, mean, shares, calls)
        tried.append(f"{max(mean.values(), default=0.0):.1%}")
    return f"{tried[0]} of a product's rows are zero at most, and {tried[1]} of the steps of {ROWS_TOGETHER} rows"


def _found(
    what: str, hit: Sequence[tuple[str, str]], mean: Mapping[str, float], shares: Sequence[Mapping[str, float]],
    calls: Sequence[Sequence[torch.Tensor]],
) -> ZeroRowProducts:  # fmt: skip
    """The products that have such zeros, and the calls by how ordinary they are."""
    names = {name for _, name in hit}
    total = sum(mean[n] for n in names) / len(names)
    far = [abs(sum(s[n] for n in names) / len(names) - total) for s in shares]
    order = sorted(range(len(calls)), key=far.__getitem__)
    return ZeroRowProducts(tuple(dict.fromkeys(f for f, _ in hit)), total, what, tuple(calls[i] for i in order))


def _not_finite(plan: Plan, weights: Mapping[str, torch.Tensor]) -> frozenset[str]:
    """What is multiplied by anything but finite constants somewhere: whatever groups there will be, its products may be in one."""
    graphs, found = [*(a.graph for a in plan.artifacts), plan.graph], set[str]()
    for graph in graphs:  # those of branches are found on the way
        graphs += [g for n in graph.nodes for g in n.graphs]
        if graph is plan.graph:
            continue
        for n in filter(is_contraction, graph.nodes):
            x = argument(n, _LEFT.get(packet(n.op), ("self", "other"))[0])
            if isinstance(x, Value) and _left(graph, n, weights) is None:
                found.add(x.name)
    return frozenset(found)


def _left(graph: Graph, node: Node, weights: Mapping[str, torch.Tensor]) -> Value | None:
    """A product's left operand, where its weight is a finite constant of real numbers: zero times what is not finite is no zero."""
    left, right = (argument(node, a) for a in _LEFT.get(packet(node.op), ("self", "other")))
    keys = {p.value.name: p.key for p in graph.params}
    if not isinstance(left, Value) or not isinstance(right, Value) or not isinstance(left.type, TensorType):
        return None
    if left.type.dtype not in _REALS or left.name in keys:
        return None
    sharing = [n for n in graph.nodes if is_contraction(n)]
    constants = [argument(n, _LEFT.get(packet(n.op), ("self", "other"))[1]) for n in sharing]
    for w in constants:
        found = weights.get(keys.get(w.name, "")) if isinstance(w, Value) else None
        if found is None or not all_finite({"": found}):
            return None
    return left


@torch.no_grad()
def all_finite(weights: Mapping[str, torch.Tensor]) -> bool:
    """Whether zero times any weight is zero."""
    return all(_finite(w) for w in weights.values() if w.is_floating_point())


def _finite(w: torch.Tensor) -> bool:
    """A sum reads a weight once and makes nothing as large; one that is not finite may have overflowed, and proves nothing."""
    return bool(torch.isfinite(w.sum())) or bool(torch.isfinite(w).all())


def _zero_steps(t: torch.Tensor) -> float:
    """The part of the steps along a tensor's last dim at which rows that lie side by side are all zero, a few at a time."""
    if t.dim() == 0 or t.numel() == 0:
        return 0.0
    zero = (t == 0).reshape(-1, t.shape[-1])
    whole = len(zero) // ROWS_TOGETHER * ROWS_TOGETHER
    shares = zero[:whole].reshape(-1, ROWS_TOGETHER, t.shape[-1]).all(1).double().mean(1)
    if whole < len(zero):
        shares = torch.cat((shares, zero[whole:].all(0).double().mean()[None]))
    return float(shares.mean())


def _zero_rows(t: torch.Tensor) -> float:
    """The part of a tensor's rows that is zero; nothing of one that has none."""
    if t.dim() == 0 or t.numel() == 0:
        return 0.0
    return float((t == 0).all(-1).double().mean())
