"""Sums of products over a shared dimension: matrix products and what contains one, and dense linear algebra."""

from __future__ import annotations

from hotfuse.ir.graph import Node
from hotfuse.ops import costs
from hotfuse.ops.costs import matmul
from hotfuse.ops.table import Access, defops, packet

_C = Access.CONTRACTION
_OF_TWO_MATRICES = frozenset({"aten.linear", "aten.mm", "aten.addmm", "aten.matmul"})


def is_contraction(node: Node) -> bool:
    """Whether a node is a product whose right side can be a weight of two dimensions."""
    return packet(node.op) in _OF_TWO_MATRICES



defops("linear", _C, costs.linear)
defops("matmul linalg_matmul inner", _C, matmul("self", "other"))
defops("mm bmm _int_mm _weight_int8pack_mm _scaled_mm _grouped_mm", _C, matmul("self", "mat2"))
defops("mv", _C, matmul("self", "vec"))
defops("dot vdot", _C, matmul("self", "tensor"))
defops("linalg_vecdot", _C, costs.per_input(2))
defops("addmm _addmm_activation", _C, matmul("mat1", "mat2", extra=2))
defops("addmv", _C, matmul("mat", "vec", extra=2))
defops("baddbmm", _C, matmul("batch1", "batch2", extra=2))
defops("addbmm", _C, costs.addbmm)
defops("outer ger kron", _C, costs.per_output(1))
defops("addr", _C, costs.per_output(3))
defops("einsum", _C, costs.einsum)
defops("tensordot", _C, costs.tensordot)
defops("chain_matmul", _C, costs.chain("matrices"))
defops("linalg_multi_dot", _C, costs.chain("tensors"))
defops("bilinear", _C, costs.bilinear)
defops("cross linalg_cross", _C, costs.per_output(5))
defops("_weight_int4pack_mm", _C, matmul("self", "mat2"))
# Factorizations and solvers run whole in LAPACK: nothing can be fused into them.
defops(
    """linalg_inv linalg_inv_ex inverse linalg_solve linalg_solve_ex linalg_solve_triangular triangular_solve
    linalg_det det linalg_slogdet slogdet logdet linalg_lu linalg_lu_factor linalg_lu_factor_ex linalg_lu_solve
    linalg_cholesky linalg_cholesky_ex cholesky cholesky_inverse cholesky_solve linalg_ldl_factor linalg_ldl_factor_ex
    linalg_ldl_solve lu_solve lu_unpack linalg_tensorinv linalg_tensorsolve _lu_with_info
    linalg_matrix_power matrix_power linalg_matrix_exp matrix_exp linalg_householder_product""",
    Access.OPAQUE,
    costs.cubic(1),
)
defops(
    """linalg_qr qr geqrf ormqr orgqr linalg_svd svd linalg_svdvals linalg_eig linalg_eigh linalg_eigvals
    linalg_eigvalsh linalg_lstsq linalg_pinv pinverse linalg_matrix_rank linalg_cond nuclear_norm""",
    Access.OPAQUE,
    costs.cubic(10),
)
