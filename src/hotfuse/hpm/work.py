"""What a candidate has to do: one row of plain counts, from its graph, its sizes and how it would be tiled.

    candidate   a closed group's graph, the sizes of a call, the core it would be cut for, threads; or the library's kernels
    row         sums and maxima over its nodes, bytes over its edges, the tile: nothing that depends on the machine's speed

Rows are what the profile store keeps (`hpm.row_cache` makes them); everything a model reads is computed from them (`hpm.features`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from hotfuse.analysis.convolution import is_convolution
from hotfuse.analysis.cost import node_cost, value_bytes
from hotfuse.analysis.vector_loops import CODE_OF
from hotfuse.base.errors import HotfuseError
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.control_bodies import IF
from hotfuse.ir.dims import evaluate
from hotfuse.ir.graph import Arg, Graph, Node, Value
from hotfuse.ir.types import TensorType, bits
from hotfuse.ops.costs import DIVIDE, FUNCTION
from hotfuse.ops.schema import argument
from hotfuse.ops.table import Access, lookup, packet

Matrix = npt.NDArray[np.float64]

SUMS = ("mma", "light", "divide", "function", "moved", "nodes", "calls", "columns", "reduced", "picked", "steps", "exp",
        "sigmoid", "tanh", "erf", "root", "special", "pooled", "turned", "skipped", "folds", "joined")  # fmt: skip
"""Per node, added up: operations by what they cost, bytes that operators move one by one, columns of products; elements of pools,
elements that change places with their neighbours, bytes of tables that nobody reads; results that a row is folded to one after
the other, operators that take several tensors."""
MAXIMA = ("product", "convolution", "attention", "recurrent", "reduction", "indexing", "rows", "depth", "window", "groups",
          "stride", "elements", "width", "most_moved", "narrow", "softmax", "norm", "extremum", "across")  # fmt: skip
"""Per node, the largest: which kinds there are, extents of the anchor, the largest tensor and its innermost extent; whether
reductions leave the innermost dim."""
EDGES = ("bytes_in", "bytes_const", "bytes_out", "streams", "small_inputs", "strided", "element_bytes")
TILING = ("lanes", "registers", "l2", "tile_height", "tile_vectors", "tile_sets", "tile_padding", "group_rows", "kept_products",
       "threads", "library")  # fmt: skip
NAMES = (*SUMS, *MAXIMA, *EDGES, *TILING)
"""Columns of a row."""
COLUMN = {n: i for i, n in enumerate(NAMES)}
FAMILIES = ("pointwise", "broadcast", "reduction", "contraction", "convolution", "attention", "recurrent", "library")
_FOLDS = {"softmax": 2, "logsumexp": 2, "layer_norm": 2, "group_norm": 2, "instance_norm": 2, "var": 2, "std": 2}
"""Results that a row is folded to one after the other, by a part of the operator's name: the largest and the sum, the mean and the
variance; others have one. `test_operators_fold_rows_as_often_as_their_kernels` holds it to kernels."""
_TURNING = frozenset({"aten.transpose", "aten.permute", "aten.t", "aten.mT", "aten.swapaxes", "aten.movedim"})
_IN_PLACE = frozenset({Access.POINTWISE, Access.MOVEMENT, Access.REDUCTION})
"""What reads its operands where its results lie."""
_ANCHORS = {Access.CONTRACTION: "product", Access.CONVOLUTION: "convolution", Access.ATTENTION: "attention",
           Access.RECURRENT: "recurrent"}  # fmt: skip


class CoreShape(Protocol):
    """What a kernel is cut for."""

    @property
    def lanes(self) -> int:
        """fp32 numbers in a vector."""
        ...

    @property
    def registers(self) -> int:
        """Vector registers."""
        ...

    @property
    def l2(self) -> int:
        """Bytes of the second-level cache."""
        ...


@dataclass(frozen=True, slots=True)
class TileShape:
    """How the anchor of a kernel is cut."""

    rows: float
    """Of a block, on average: blocks of the same height make up the whole."""
    vectors: int
    sets: int
    """Independent sums of one element."""
    padding: float
    """Columns computed in vain, as a part of all."""
    group_rows: int
    products: float = 1.0
    """The part of a window's products that it takes: neighbouring windows can share some."""


NO_TILE = TileShape(1, 1, 1, 0.0, 0)
Tiler = Callable[[CoreShape, int, int, int, int, int, int], TileShape]
"""(core, rows, columns, depth) of a product, and (places of the window, stride, groups) of a convolution, else (0, 1, 1) -> how
it is cut; cheap, or kept."""


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """Something that could be built; `core` None stands for the library's kernels, operator by operator."""

    graph: Graph
    sizes: Mapping[str, int]
    core: CoreShape | None
    threads: int = 1


class UnknownWork(HotfuseError):
    """A candidate's work depends on data."""


def _of(dims: Sequence[Any], env: Mapping[str, int]) -> list[int]:
    return [evaluate(d, env) for d in dims]


def _shape(arg: Arg, env: Mapping[str, int]) -> list[int]:
    return _of(arg.type.shape, env) if isinstance(arg, Value) and isinstance(arg.type, TensorType) else []


def _innermost(value: Value, shape: list[int]) -> int:
    t = value.type
    order = t.layout.order if isinstance(t, TensorType) else None
    return shape[order[-1] if order else -1] if shape else 1


def node_row(node: Node, env: Mapping[str, int]) -> list[float]:
    """The part of a row that one node makes; raises UnknownWork where it depends on data."""
    if node.op == IF:  # its dearest side would be a row of work that nobody did
        raise UnknownWork("which side of a branch is taken depends on data")
    cost, row = node_cost(node, env), lookup(node.op)
    if cost.flops is None or cost.bytes is None:
        raise UnknownWork(f"the cost of {node.op} depends on data")
    found: dict[str, float] = {n: 0.0 for n in (*SUMS, *MAXIMA)}
    picks = row.access is Access.INDEXING
    tensors = [
        (v, _shape(v, env)) for v in (node.outs if picks else (*node.outs, *node.ins)) if isinstance(v.type, TensorType)
    ]
    made = sum(math.prod(_shape(v, env)) for v in node.outs)
    largest, shape = max(tensors, key=lambda t: math.prod(t[1]), default=(None, [1]))
    skipped = _skipped(node, env) if picks else 0
    found["nodes"], found["moved"], found["most_moved"] = 1, cost.bytes - skipped, cost.bytes - skipped
    found["skipped"] = skipped
    found["calls"] = float(bool(cost.bytes or cost.flops))
    found["elements"] = math.prod(shape)
    found["width"] = _innermost(largest, shape) if largest is not None else 1
    found["narrow"] = max((64 / bits(v.type.dtype) for v in node.outs if isinstance(v.type, TensorType)), default=0.0)
    pools = row.access is Access.CONVOLUTION and not is_convolution(node)
    anchor = None if pools else _ANCHORS.get(row.access)
    each = cost.flops / max(made, 1)
    if pools:
        found["reduction"], found["light"], found["pooled"] = 1, cost.flops, cost.flops
        found["window"], found["extremum"] = each, float("max" in node.op)
    elif anchor is not None:
        found[anchor], found["mma"] = 1, cost.flops
        found.update(_anchor(node, anchor, tensors, env))
    elif row.access is Access.REDUCTION:
        found["reduction"], found["light"] = 1, cost.flops
        found["reduced"] = math.prod(_shape(node.ins[0], env)) if node.ins else 0
        name = node.op.split(".")[1]
        if "softmax" in name or "logsumexp" in name:
            found["function"], found["light"], found["softmax"], found["exp"] = cost.flops, 0, 1, found["reduced"]
        found["norm"] = float("norm" in name or "var" in name or "std" in name)
        found["folds"] = next((n for part, n in _FOLDS.items() if part in name), 1)
        found["across"] = float(_leaves_innermost(node, env))
        found["extremum"] = float("max" in name or "min" in name)
    else:
        found["function" if each >= FUNCTION else "divide" if each >= DIVIDE else "light"] = cost.flops
        kind = CODE_OF.get(packet(node.op), "special" if each >= FUNCTION else "")
        if kind:
            found[kind] = made
    if row.access is Access.POINTWISE:
        found["joined"] = float(sum(s[-1] > 1 for v in node.ins if (s := _shape(v, env))) > 1)
    if picks:
        found["indexing"], found["picked"] = 1, made
    if packet(node.op) in _TURNING:
        found["turned"] = made * (_innermost(*_first(node.ins, env)) != _innermost(*_first(node.outs, env)))
    elif row.access in _IN_PLACE:
        found["turned"] = sum(math.prod(_shape(v, env)) for v in node.ins if _lies_otherwise(v, node, env))
    return list(found.values())


def _lies_otherwise(value: Value, node: Node, env: Mapping[str, int]) -> bool:
    """Whether another dim of an operand lies innermost than of the first result, and both of them have extents."""
    one, other = value.type, node.outs[0].type if node.outs else None
    if not isinstance(one, TensorType) or not isinstance(other, TensorType) or len(one.shape) != len(other.shape):
        return False
    if one.layout.order == other.layout.order:
        return False
    inner = {(t.layout.order or (len(t.shape) - 1,))[-1] for t in (one, other)}
    return len(inner) > 1 and all(evaluate(other.shape[d], env) > 1 for d in inner)


def _leaves_innermost(node: Node, env: Mapping[str, int]) -> bool:
    """Whether a reduction is along other dims than the one that lies innermost; one along all of them is not."""
    if not node.ins:
        return False
    dims, (value, shape) = argument(node, "dim"), _first(node.ins, env)
    some = (dims,) if isinstance(dims, int) else dims if isinstance(dims, tuple) else ()
    order = value.type.layout.order if isinstance(value.type, TensorType) else None
    inner = order[-1] if order else len(shape) - 1
    return bool(some) and bool(shape) and all(isinstance(d, int) and d % len(shape) != inner for d in some)


def _first(values: Sequence[Value], env: Mapping[str, int]) -> tuple[Value, list[int]]:
    return values[0], _shape(values[0], env)


def _skipped(node: Node, env: Mapping[str, int]) -> int:
    """Bytes of a table that are not read: an element of the result is one element of it."""
    table = next((v for v in node.ins if isinstance(v.type, TensorType)), None)
    out = sum(value_bytes(v, env) or 0 for v in node.outs)
    return max(0, (value_bytes(table, env) or 0) - out) if table is not None else 0


def _anchor(node: Node, anchor: str, tensors: list[tuple[Value, list[int]]], env: Mapping[str, int]) -> dict[str, float]:
    """Extents of what a kernel is built around: rows x columns x depth of its product."""
    out = _shape(node.outs[0], env) or [1]
    first = _shape(node.ins[0], env) or [1]
    if anchor == "convolution":
        weight, stride = _shape(argument(node, "weight"), env), argument(node, "stride", 1)
        groups = argument(node, "groups", 1)
        step = stride[0] if isinstance(stride, tuple) and stride else stride
        return {"rows": math.prod(out) / max(out[1], 1), "columns": out[1], "depth": math.prod(weight[1:]),
                "window": math.prod(weight[2:]), "groups": float(groups) if isinstance(groups, int) else 1.0,
                "stride": float(step) if isinstance(step, int) else 1.0}  # fmt: skip
    if anchor == "attention":
        keys = _shape(node.ins[1], env) or [1, 1]
        return {"rows": math.prod(first[:-1]), "columns": keys[-2], "depth": first[-1], "groups": math.prod(first[:-2]),
                "window": first[-2]}  # fmt: skip
    if anchor == "recurrent":
        steps = first[0] if len(first) == 3 else 1
        weights = max((math.prod(s) for _, s in tensors[1:] if len(s) == 2), default=1)
        return {
            "rows": math.prod(first[:-1]),
            "columns": out[-1],
            "depth": first[-1],
            "steps": steps,
            "window": weights,
        }
    return {"rows": math.prod(out[:-1]), "columns": out[-1], "depth": first[-1]}


def families(table: Matrix) -> npt.NDArray[np.int64]:
    """The family of each row, as an index into FAMILIES."""
    return families_of(dict(zip(NAMES, table.T, strict=True))).astype(np.int64)


def families_of(c: Mapping[str, Any]) -> Any:
    """Like `families`, from columns or their symbols."""
    found = 1.0 * ((c["small_inputs"] > 0) | (c["bytes_const"] > 0))
    for number, name in _TOLD:
        found = np.where(c[name] > 0, float(number), found)
    return found


_TOLD = tuple((FAMILIES.index(family), name) for name, family in (
    ("reduction", "reduction"), ("product", "contraction"), ("convolution", "convolution"), ("attention", "attention"),
    ("recurrent", "recurrent"), ("library", "library"),
))  # fmt: skip
"""Families by the column that tells them, the last one that does wins; broadcasts are 1, everything else is pointwise."""
