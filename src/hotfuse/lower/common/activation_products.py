"""Products of two values of a graph, whichever operator says them: what is multiplied, what is added."""

from __future__ import annotations

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.graph import Node, Value
from hotfuse.ir.types import DType
from hotfuse.lower.common import operands
from hotfuse.lower.common.errors import CannotLower
from hotfuse.lower.common.lowered import tensor_type
from hotfuse.lower.ops.views import shape_of
from hotfuse.ops.schema import argument
from hotfuse.ops.table import packet

PRODUCTS = {
    "aten.bmm": ("self", "mat2"), "aten.mm": ("self", "mat2"), "aten.matmul": ("self", "other"),
    "aten.baddbmm": ("batch1", "batch2"), "aten.addmm": ("mat1", "mat2"), "aten.linear": ("input", "weight"),
}  # fmt: skip
"""What is multiplied, by the names of torch's schema."""
SUMS = {DType.F32: DType.F32, DType.F64: DType.F64, DType.F16: DType.F32, DType.BF16: DType.F32}
"""The type that sums of products are kept in."""


@dataclass(frozen=True, slots=True)
class Between:
    """out[..., M, N] = scale * (a @ b) + bias_scale * bias; `turned` says that b is given as [..., N, K]."""

    node: Node
    a: Value
    b: Value
    turned: bool
    bias: Value | None
    scale: float
    bias_scale: float

    @property
    def out(self) -> Value:
        """The result."""
        return self.node.outs[0]


def is_product(node: Node) -> bool:
    """Whether a node is a product that this file knows."""
    return packet(node.op) in PRODUCTS


def between(node: Node) -> Between:
    """A node's operands by role; raises CannotLower where it is no such product."""
    kind = packet(node.op)
    a, b = (operands.tensor(node, name) for name in PRODUCTS[kind])
    if len(shape_of(a)) < 2 or len(shape_of(b)) < 2:
        raise CannotLower(f"a product of {len(shape_of(a))} and {len(shape_of(b))} dims", where=str(node.loc))
    dtype = tensor_type(a).dtype
    if dtype not in SUMS or tensor_type(b).dtype is not dtype or tensor_type(node.outs[0]).dtype is not dtype:
        raise CannotLower(f"a product of {dtype.value} and {tensor_type(b).dtype.value}", where=str(node.loc))
    scale = bias_scale = 1.0
    bias: Value | None = None
    if kind in ("aten.baddbmm", "aten.addmm"):
        scale, bias_scale = (operands.factor(node, n) for n in ("alpha", "beta"))
        bias = None if bias_scale == 0 else operands.tensor(node, "self")
    elif kind == "aten.linear" and argument(node, "bias") is not None:
        bias = operands.tensor(node, "bias")
    if bias is not None and tensor_type(bias).dtype is not dtype:
        raise CannotLower(f"the bias is {tensor_type(bias).dtype.value}", where=str(node.loc))
    return Between(node, a, b, kind == "aten.linear", bias, scale, bias_scale)
