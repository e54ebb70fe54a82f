"""The products of a group: which nodes they are, and their operands by role."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.graph import Graph, Node, Value
from hotfuse.ir.types import DType
from hotfuse.lower.common import operands
from hotfuse.lower.common.algebra import same
from hotfuse.lower.common.errors import CannotLower
from hotfuse.lower.common.lowered import tensor_type
from hotfuse.lower.common.pack import WeightOrder
from hotfuse.lower.common.quant import MAX_K, Scaling
from hotfuse.lower.ops.views import shape_of
from hotfuse.ops.contract import is_contraction
from hotfuse.ops.schema import argument
from hotfuse.ops.table import packet

BYTES = frozenset({DType.I8, DType.U8})
_REALS = frozenset({DType.F32, DType.F64, DType.F16, DType.BF16})


@dataclass(frozen=True, slots=True)
class Contraction:
    """One product of a group: out = scale * (x @ weight) + bias_scale * bias."""

    node: Node
    x: Value
    weight: Value
    order: WeightOrder
    n: int
    k: int
    bias: Value | None = None
    scale: float = 1.0
    bias_scale: float = 1.0
    scaling: Scaling | None = None
    """For a product of bytes: what makes its sums real numbers."""

    @property
    def out(self) -> Value:
        """The result."""
        return self.node.outs[0]


def products(graph: Graph, scalings: Mapping[str, Scaling]) -> tuple[Contraction, ...]:
    """The products of a group, in its order."""
    params = {p.value.name for p in graph.params}
    return tuple(_contraction(n, params, scalings.get(n.outs[0].name)) for n in graph.nodes if is_contraction(n))


def _contraction(node: Node, params: set[str], scaling: Scaling | None) -> Contraction:
    """A node's operands by role."""
    kind = packet(node.op)
    names = {"aten.linear": ("input", "weight"), "aten.addmm": ("mat1", "mat2"), "aten.mm": ("self", "mat2")}
    left, right = names.get(kind, ("self", "other"))
    x, weight = operands.tensor(node, left), operands.tensor(node, right)
    if weight.name not in params:
        raise CannotLower(f"the right operand %{weight.name} is not constant", where=str(node.loc))
    xs, ws = shape_of(x), shape_of(weight)
    if len(ws) != 2 or not xs:
        raise CannotLower(f"the weight has {len(ws)} dims and the input {len(xs)}", where=str(node.loc))
    order = WeightOrder.NK if kind == "aten.linear" else WeightOrder.KN
    n, k = ws if order is WeightOrder.NK else ws[::-1]
    if not isinstance(n, int) or not isinstance(k, int) or not same(xs[-1], k) or n < 1 or k < 1:
        raise CannotLower(f"a product over {k} of {n} columns", where=str(node.loc))
    _check_dtypes(node, x, weight, scaling, k)
    if kind == "aten.addmm":
        scale, bias_scale = (operands.factor(node, a) for a in ("alpha", "beta"))
        bias = None if bias_scale == 0 else operands.tensor(node, "self")
        return Contraction(node, x, weight, order, n, k, bias, scale, bias_scale, scaling)
    bias = argument(node, "bias") if kind == "aten.linear" else None
    if bias is not None and not isinstance(bias, Value):
        raise CannotLower(f"the bias is {bias}", where=str(node.loc))
    return Contraction(node, x, weight, order, n, k, bias, scaling=scaling)


def _check_dtypes(node: Node, x: Value, weight: Value, scaling: Scaling | None, k: int) -> None:
    """Operands of one real type, whose result has it too; or bytes."""
    left, right, out = (tensor_type(v).dtype for v in (x, weight, node.outs[0]))
    if scaling is not None:
        if left not in BYTES or right not in BYTES or out not in (DType.F32, DType.F64) or k > MAX_K:
            raise CannotLower(f"a product of {left.value} and {right.value} over {k}", where=str(node.loc))
        return
    if left not in _REALS or right is not left or out is not left:
        raise CannotLower(f"a product of {left.value} and {right.value}", where=str(node.loc))


def origins(graph: Graph, found: Sequence[Contraction]) -> dict[str, set[int]]:
    """Per value, the products that it is made from."""
    of: dict[str, set[int]] = {c.out.name: {i} for i, c in enumerate(found)}
    for node in graph.nodes:
        if not is_contraction(node):
            union = set[int]().union(*(of.get(v.name, set()) for v in node.ins))
            of.update({v.name: union for v in node.outs})
    return of


def constants(found: Sequence[Contraction]) -> set[str]:
    """Weights and what scales them: they have no rows."""
    scales = [f for c in found if c.scaling is not None for f in (c.scaling.zero_x, c.scaling.scale_x, c.scaling.scale_w)]
    return {c.weight.name for c in found} | {f.name for f in scales if isinstance(f, Value)}
