"""What an op costs in floating-point operations, over symbolic shapes.

A cost is a function of the node. Multiply-adds count as two. Where an element takes a library function, the count
is the rough number of instructions of a vectorized one, so that costs of different ops can be added up:

    CHEAP   add, mul, compare, select        DIVIDE   div, sqrt, remainder
    FUNCTION  exp, log, tanh, erf, sin       SPECIAL  gamma and Bessel functions

Bytes are not here: they follow from the types of a node's values alone.
"""

from __future__ import annotations

from collections.abc import Iterator

from hotfuse.ir.dims import Dim, expr
from hotfuse.ir.graph import Arg, Node, Value
from hotfuse.ir.types import TensorType
from hotfuse.ops.schema import argument
from hotfuse.ops.table import FlopFn

CHEAP, DIVIDE, FUNCTION, SPECIAL = 1, 4, 12, 60

Shape = tuple[Dim, ...]


def times(*factors: Dim) -> Dim:
    """A product; 1 of nothing."""
    return expr("*", 1, *factors)


def plus(*terms: Dim) -> Dim:
    """A sum; 0 of nothing."""
    return expr("+", 0, *terms)


def product(dims: Shape) -> Dim:
    """The number of elements of a shape."""
    return times(*dims)


def shape(arg: Arg) -> Shape:
    """The shape of a tensor argument; a number counts as a 0-d tensor."""
    return arg.type.shape if isinstance(arg, Value) and isinstance(arg.type, TensorType) else ()


def tensors(node: Node) -> Iterator[TensorType]:
    """The types of the tensors a node reads, in order of first use."""
    return (v.type for v in node.ins if isinstance(v.type, TensorType))


def out_shape(node: Node) -> Shape:
    """The shape of the first result."""
    return shape(node.outs[0]) if node.outs else ()


def in_shape(node: Node) -> Shape:
    """The shape of the first tensor read."""
    return next((t.shape for t in tensors(node)), ())


def per_output(k: int) -> FlopFn:
    """`k` operations per element of the first result."""
    return lambda node: times(product(out_shape(node)), k)


def per_input(k: int) -> FlopFn:
    """`k` operations per element of the first tensor read."""
    return lambda node: times(product(in_shape(node)), k)


def per_operand(node: Node) -> Dim:
    """One operation per element of every tensor read."""
    return plus(*(product(t.shape) for t in tensors(node)))


def sorting(node: Node) -> Dim:
    """n·log2 n comparisons along the last dimension; an unknown length counts as 1024."""
    dims = in_shape(node)
    length = dims[-1] if dims and isinstance(dims[-1], int) else 1024
    return times(product(dims), max(1, (length - 1).bit_length()))


def fourier(node: Node) -> Dim:
    """5·n·log2 n for a transform of all elements."""
    dims = max(in_shape(node), out_shape(node), key=len)
    length = dims[-1] if dims and isinstance(dims[-1], int) else 1024
    return times(product(dims), 5 * max(1, (length - 1).bit_length()))


def cubic(k: int) -> FlopFn:
    """`k`·n³ for a factorization of (a batch of) n×n matrices."""

    def flops(node: Node) -> Dim:
        dims = in_shape(node)
        return times(product(dims), dims[-1], k) if len(dims) >= 2 else 0

    return flops


# --- contractions ----------------------------------------------------------------------------------------------------


def matmul_flops(a: Shape, b: Shape, out: Shape) -> Dim:
    """2·(elements of the result)·(length of the contracted dimension)."""
    inner = a[-1] if a else b[0] if b else 1
    return times(product(out), inner, 2)


def matmul(first: str, second: str, *, extra: int = 0) -> FlopFn:
    """A product of two named arguments, and `extra` operations per element for what is added to it."""

    def flops(node: Node) -> Dim:
        out = out_shape(node)
        main = matmul_flops(shape(argument(node, first)), shape(argument(node, second)), out)
        return plus(main, times(product(out), extra))

    return flops


def linear(node: Node) -> Dim:
    """x·Wᵀ and the bias where there is one."""
    out = out_shape(node)
    main = matmul_flops(shape(argument(node, "input")), (), out)
    return plus(main, product(out) if argument(node, "bias") is not None else 0)


def addbmm(node: Node) -> Dim:
    """A sum over the batch of products."""
    b, n, k = shape(argument(node, "batch1"))
    m = shape(argument(node, "batch2"))[-1]
    return plus(times(b, n, m, k, 2), product(out_shape(node)))


def einsum(node: Node) -> Dim:
    """Operands from left to right; a step costs 2 per combination of the indices it has seen and still needs."""
    equation, operands = argument(node, "equation"), argument(node, "tensors")
    if not isinstance(equation, str) or not isinstance(operands, tuple):
        return per_output(2)(node)
    left, _, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    sizes: dict[str, Dim] = {}
    dotted: list[Shape] = []
    for term, operand in zip(terms, operands, strict=False):
        dims = shape(operand)
        head, dots, tail = term.partition("...")
        for letter, size in zip(head, dims, strict=False):
            sizes[letter] = size if sizes.get(letter, 1) == 1 else sizes[letter]
        for letter, size in zip(reversed(tail), reversed(dims), strict=False):
            sizes[letter] = size if sizes.get(letter, 1) == 1 else sizes[letter]
        if dots:
            dotted.append(dims[len(head) : len(dims) - len(tail)])
    batch = product(max(dotted, key=len, default=()))
    if not right and "->" not in equation:
        right = "".join(sorted(c for c in sizes if left.count(c) == 1))
    live = set(terms[0]) - {"."}
    total: Dim = 0
    for i in range(1, len(terms)):
        live |= set(terms[i]) - {"."}
        total = plus(total, times(batch, *(sizes[c] for c in sorted(live)), 2))
        later = set("".join(terms[i + 1 :])) | set(right)
        live &= later
    return total if len(terms) > 1 else per_input(1)(node)


def tensordot(node: Node) -> Dim:
    """All indices of both operands, the contracted ones once."""
    a, dims = shape(argument(node, "self")), argument(node, "dims_self", ())
    contracted = [a[d] for d in dims if isinstance(d, int)] if isinstance(dims, tuple) else []
    return times(product(out_shape(node)), *contracted, 2)


def chain(name: str) -> FlopFn:
    """Products of a list of matrices, taken from left to right."""

    def flops(node: Node) -> Dim:
        mats = argument(node, name, ())
        shapes = [shape(m) for m in mats] if isinstance(mats, tuple) else []
        rows = shapes[0][0] if shapes and len(shapes[0]) == 2 else 1
        return plus(*(times(rows, *s, 2) for s in shapes[1:]))

    return flops


def bilinear(node: Node) -> Dim:
    """y_o = x1ᵀ·W_o·x2."""
    rows = product(shape(argument(node, "input1"))[:-1])
    return times(rows, product(shape(argument(node, "weight"))), 2)


def distances(node: Node) -> Dim:
    """Pairwise distances: three operations per coordinate of each pair."""
    return times(product(out_shape(node)), in_shape(node)[-1] if in_shape(node) else 1, 3)


# --- windows ---------------------------------------------------------------------------------------------------------


def convolution(node: Node) -> Dim:
    """2·(elements of the result)·(inputs of one output channel); transposed ones scatter each input instead."""
    x, w = shape(argument(node, "input")), shape(argument(node, "weight"))
    transposed = "transpose" in node.op or argument(node, "transposed", default=False) is True
    main = times(product(x if transposed else out_shape(node)), *w[1:], 2)
    return plus(main, product(out_shape(node)) if argument(node, "bias") is not None else 0)


def conv_tbc(node: Node) -> Dim:
    """A convolution over time with channels last."""
    kernel, c_in, _ = shape(argument(node, "weight"))
    return times(product(out_shape(node)), c_in, kernel, 2)


def window(node: Node) -> Dim:
    """One operation per element of each window; the kernel size may be one number for all dimensions."""
    kernel, out = argument(node, "kernel_size", 1), out_shape(node)
    sizes = kernel if isinstance(kernel, tuple) else (kernel,)
    rank = next((n for n in (1, 2, 3) if f"pool{n}d" in node.op), 1)
    if len(sizes) == 1:
        sizes = sizes * rank
    return times(product(out), *(s for s in sizes if isinstance(s, int)))


# --- attention, recurrence -------------------------------------------------------------------------------------------

SOFTMAX = 2 * FUNCTION // 3
"""Operations per score: subtract the maximum, exponentiate, sum, divide."""


def attention(node: Node) -> Dim:
    """Scores and their product with the values, 2·S·T·(D + Dv) a head, and the softmax between."""
    q, k, v = (shape(argument(node, n)) for n in ("query", "key", "value"))
    if not (len(q) >= 2 and len(k) >= 2 and len(v) >= 2):
        return 0
    scores = times(*q[:-1], k[-2])
    return plus(times(scores, q[-1], 2), times(scores, v[-1], 2), times(scores, SOFTMAX))


def recurrent(node: Node) -> Dim:
    """Every weight matrix once per step and sequence, and the gates' functions."""
    x, params = in_shape(node), argument(node, "params", ())
    steps = product(x[:-1])
    weights = [shape(p) for p in params] if isinstance(params, tuple) else []
    matrices = [w for w in weights if len(w) == 2]
    gates = [w[0] for w in matrices[::2]]
    per_step = (*(times(*w, 2) for w in matrices), *(times(g, FUNCTION) for g in gates))
    return times(steps, plus(*per_step))


def cell(node: Node) -> Dim:
    """One step of a recurrent layer."""
    x, wi, wh = in_shape(node), shape(argument(node, "w_ih")), shape(argument(node, "w_hh"))
    if not wi or not wh:
        return per_input(FUNCTION)(node)
    per_row = plus(times(*wi, 2), times(*wh, 2), times(wi[0], FUNCTION))
    return times(product(x[:-1]), per_row)
