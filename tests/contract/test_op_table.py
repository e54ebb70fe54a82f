"""The op table says what torch's ops really do: rows exist, alias, read and cost as they claim."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from hotfuse.base.errors import InternalError
from hotfuse.ir.dims import Sym, evaluate, sym, symbols
from hotfuse.ir.graph import Kind, Node, Value
from hotfuse.ir.types import DType, TensorType
from hotfuse.ops import costs
from hotfuse.ops.schema import draws_random
from hotfuse.ops.sym import sym_callable, sym_name
from hotfuse.ops.table import (
    Access,
    defop,
    is_mutating,
    is_random,
    is_view,
    lookup,
    packet,
    resolve,
    rows,
)
from tests.contract.recorded import Call, node_of, recorded

aten = torch.ops.aten
pytestmark = pytest.mark.xdist_group("recorded calls")  # one process records them, which takes half a minute


def test_every_row_is_a_real_operator() -> None:
    assert len(rows()) >= 800
    for name, row in rows().items():
        assert callable(resolve(name)), name
        assert row.name == name == packet(name)


def test_what_has_no_row_is_opaque_and_what_has_two_is_refused() -> None:
    assert lookup("aten.no_such_op.default").access is Access.OPAQUE
    assert lookup("aten.linear.default").access is Access.CONTRACTION
    with pytest.raises(InternalError, match="two rows"):
        defop("aten.linear", Access.OPAQUE)
    with pytest.raises(InternalError, match=r"no operator aten\.no_such_op"):
        resolve("aten.no_such_op.default")
    with pytest.raises(InternalError, match="no host function"):
        resolve("sym.no_such_op")


def test_most_rows_are_exercised() -> None:
    """The checks below say little if the samples do not reach the rows."""
    reached = set(recorded())
    assert len(reached & set(rows())) >= 530
    assert reached - set(rows()) <= {
        "aten.detach_", "aten.zero_", "aten.chalf", "aten.embedding_renorm_", "aten._batch_norm_with_update",
        "aten.cauchy_", "aten.exponential_", "aten.geometric_", "aten.log_normal_", "aten.normal_", "aten.uniform_",
        # custom ops of torch.nn: without a row they run as opaque calls, as any library's would
        "torch_nn._linear_cross_entropy_batch_chunked", "torch_nn._linear_cross_entropy_batch_chunked_no_reduction",
    }  # fmt: skip


# --- schema ----------------------------------------------------------------------------------------------------------


def test_facts_from_the_schema() -> None:
    assert is_random("aten.rand.default") and is_random("aten.dropout.default") and not is_random("aten.add.Tensor")
    assert is_mutating("aten.add_.Tensor") and not is_mutating("aten.add.Tensor")
    assert is_view("aten.reshape.default") and is_view("aten.split.Tensor") and not is_view("aten.cat.default")
    assert not is_view("aten.add_.Tensor")  # it gives back what it wrote
    assert not (is_random("sym.mul") or is_mutating("sym.mul") or is_view("sym.mul"))


@pytest.mark.parametrize(
    ("op", "args", "kwargs", "draws"),
    [
        ("aten.rand.default", ((2,),), {}, True),
        ("aten.bernoulli.p", ("x", 0.0), {}, True),
        ("aten.dropout.default", ("x", 0.1, False), {}, False),
        ("aten.dropout.default", ("x", 0.1), {"train": True}, True),
        ("aten.dropout.default", ("x", 0.0, True), {}, False),
        ("aten.scaled_dot_product_attention.default", ("q", "k", "v"), {}, False),
        ("aten.scaled_dot_product_attention.default", ("q", "k", "v", None, 0.2), {}, True),
        ("aten.lstm.input", ("x", (), (), True, 1, 0.5, False, False, False), {}, False),
        ("aten.lstm.input", ("x", (), (), True, 1, 0.5, True, False, False), {}, True),
        ("aten.add.Tensor", ("x", "y"), {}, False),
    ],
)
def test_whether_a_call_draws_random_numbers(op: str, args: Any, kwargs: Any, draws: bool) -> None:
    assert draws_random(op, args, kwargs) is draws


def test_view_rows_follow_the_schema() -> None:
    """A row may be more careful than the schema (composites that sometimes give their input back), never less."""
    for name, row in rows().items():
        if name.startswith("aten."):
            overloads = [f"{name}.{o}" for o in resolve(name).overloads()]  # type: ignore[attr-defined]
            assert row.view or not any(is_view(o) for o in overloads), name


# --- what the ops do -------------------------------------------------------------------------------------------------


def _aliases(call: Call) -> bool:
    inputs = {t.untyped_storage()._cdata for t in call.tensors if t.numel()}
    return any(t.untyped_storage()._cdata in inputs for t in call.run() if t.numel())


def test_only_view_rows_alias_their_inputs() -> None:
    wrong: list[str] = []
    never: set[str] = set()
    for name, calls in recorded().items():
        if name not in rows():
            continue
        pure = [c for c in calls if not c.op._schema.is_mutable]
        shared = [c for c in pure if _aliases(c)]
        if shared and not rows()[name].view:
            wrong.append(str(shared[0]))
        if pure and rows()[name].view and not shared:
            never.add(name)
    assert not wrong
    # Views that no sample of the database lets alias: copies on these inputs, or on these dtypes.
    assert never <= {
        "aten.mH", "aten.matrix_H", "aten.feature_alpha_dropout", "aten.lift", "aten.resolve_conj", "aten.resolve_neg",
        "aten.view_as_complex", "aten.imag", "aten.view_as_real", "aten.to", "aten.pad", "aten.contiguous",
    }, never  # fmt: skip


# The weight of prelu is per channel (dimension 1), so it is broadcast from the left; outputs of empty are whatever
# the memory held.
_FIRST_INPUT_ONLY = {"aten.prelu", "aten._prelu_kernel", "aten.fake_quantize_per_channel_affine"}
_UNDEFINED = ("aten.empty", "aten.new_empty")


def _other_value(t: torch.Tensor, at: int) -> torch.Tensor:
    """A copy of `t` with one element replaced by a different one that occurs in it, so that it stays in the domain."""
    flat = t.detach().clone().reshape(-1)
    other = (flat != flat[at]).nonzero()
    flat[at] = flat[other[0, 0]] if len(other) else (~flat[at] if t.dtype is torch.bool else flat[at] + 1)
    return flat.reshape(t.shape)


def _leaks(call: Call, which: int, at: int) -> bool:
    """Whether changing one element of one input changes an output at a position that does not read it."""
    leaves = call.tensors
    before = [t.clone() for t in call.run()]
    changed = [*leaves[:which], _other_value(leaves[which], at), *leaves[which + 1 :]]
    after = call.run(leaves=changed)
    position = torch.arange(leaves[which].numel()).reshape(leaves[which].shape)
    for b, a in zip(before, after, strict=True):
        differs = ~((a == b) | ((a != a) & (b != b)))
        try:
            elsewhere = position.broadcast_to(b.shape) != at
        except RuntimeError:  # an input that only lends its dtype, as for new_zeros
            elsewhere = torch.ones_like(differs)
        if bool((differs & elsewhere).any()):
            return True
    return False


def test_pointwise_rows_read_only_their_own_position() -> None:
    wrong: list[str] = []
    checked = 0
    for name, calls in recorded().items():
        if lookup(name).access is not Access.POINTWISE or name.startswith(_UNDEFINED):
            continue
        for call in calls[:4]:
            if call.op._schema.is_mutable or draws_random(str(call.op), call.args, call.kwargs):
                continue
            for which, t in enumerate(call.tensors):
                if t.numel() < 2 or (which and name in _FIRST_INPUT_ONLY):
                    continue
                checked += 1
                if any(_leaks(call, which, at) for at in (0, t.numel() // 2, t.numel() - 1)):
                    wrong.append(f"{call}, input {which}")
    assert not wrong
    assert checked >= 500


# --- costs -----------------------------------------------------------------------------------------------------------


def test_every_cost_is_a_number_on_real_calls(pytestconfig: pytest.Config) -> None:
    """With --quick of some ops: what else needs all recorded calls does not run there."""
    found = recorded(8) if pytestconfig.getoption("--quick") else recorded()
    assert len(found) > 60
    for name, calls in found.items():
        for call in calls[:4]:
            if call.op._schema.is_mutable:
                continue
            flops = lookup(name).flops(node_of(call, call.run()))
            assert isinstance(flops, int) and flops >= 0, f"{call}: {flops}"


def _counted(fn: Any, *args: Any) -> int:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        fn(*args)
    return counter.get_total_flops()


def _ours(op: Any, *args: Any) -> int:
    call = Call(op, args, {})
    flops = lookup(str(op)).flops(node_of(call, call.run()))
    assert isinstance(flops, int)
    return flops


_r = torch.randn
CONTRACTIONS: list[tuple[str, Any, tuple[Any, ...], int]] = [
    # name, op, args, operations per output element beyond the products
    ("linear", aten.linear.default, (_r(4, 7, 16), _r(24, 16), _r(24)), 1),
    ("linear without bias", aten.linear.default, (_r(5, 16), _r(24, 16)), 0),
    ("mm", aten.mm.default, (_r(5, 6), _r(6, 7)), 0),
    ("bmm", aten.bmm.default, (_r(3, 5, 6), _r(3, 6, 7)), 0),
    ("matmul broadcast", aten.matmul.default, (_r(2, 1, 5, 6), _r(3, 6, 7)), 0),
    ("matmul vector", aten.matmul.default, (_r(3, 5, 6), _r(6)), 0),
    ("addmm", aten.addmm.default, (_r(7), _r(5, 6), _r(6, 7)), 2),
    ("baddbmm", aten.baddbmm.default, (_r(3, 5, 7), _r(3, 5, 6), _r(3, 6, 7)), 2),
    ("einsum", aten.einsum.default, ("bhid,bhjd->bhij", [_r(2, 3, 5, 8), _r(2, 3, 6, 8)]), 0),
    ("einsum ellipsis", aten.einsum.default, ("...ij,jk->...ik", [_r(2, 3, 5), _r(5, 4)]), 0),
    ("einsum implicit", aten.einsum.default, ("ij,jk", [_r(3, 5), _r(5, 4)]), 0),
    ("tensordot", aten.tensordot.default, (_r(3, 4, 5), _r(4, 5, 6), [1, 2], [0, 1]), 0),
    ("conv1d", aten.conv1d.default, (_r(2, 4, 20), _r(8, 4, 3)), 0),
    ("conv2d", aten.conv2d.default, (_r(2, 4, 9, 9), _r(8, 4, 3, 3), None, [2, 2], [1, 1]), 0),
    ("conv2d grouped", aten.conv2d.default, (_r(2, 4, 9, 9), _r(8, 2, 3, 3), _r(8), [1, 1], [1, 1], [1, 1], 2), 1),
    ("conv2d padding", aten.conv2d.padding, (_r(2, 4, 9, 9), _r(8, 4, 3, 3), None, [1, 1], "same"), 0),
    ("conv3d", aten.conv3d.default, (_r(1, 2, 5, 5, 5), _r(4, 2, 3, 3, 3)), 0),
    ("conv_transpose2d", aten.conv_transpose2d.input, (_r(2, 4, 9, 9), _r(4, 8, 3, 3)), 0),
    ("convolution", aten.convolution.default, (_r(2, 4, 9), _r(8, 4, 3), None, [1], [0], [1], False, [0], 1), 0),
]


@pytest.mark.parametrize(("name", "op", "args", "extra"), CONTRACTIONS, ids=[c[0] for c in CONTRACTIONS])
def test_contractions_cost_what_torch_counts(name: str, op: Any, args: tuple[Any, ...], extra: int) -> None:
    counted = _counted(op, *args)
    if name == "matmul vector":  # torch's counter has no entry for mv
        counted = 2 * 3 * 5 * 6
    assert counted > 0
    assert _ours(op, *args) == counted + extra * op(*args).numel()


def test_attention_costs_its_products_and_its_softmax() -> None:
    q, k, v = _r(2, 3, 5, 8), _r(2, 3, 7, 8), _r(2, 3, 7, 4)
    products = _counted(lambda: torch.softmax(q @ k.transpose(-1, -2), -1) @ v)
    assert _ours(aten.scaled_dot_product_attention.default, q, k, v) == products + costs.SOFTMAX * 2 * 3 * 5 * 7


@pytest.mark.parametrize("bidirectional", [False, True])
def test_recurrent_layers_cost_their_matrices(bidirectional: bool) -> None:
    layer = torch.nn.LSTM(6, 5, num_layers=2, bidirectional=bidirectional)
    x, directions = _r(9, 3, 6), 1 + bidirectional
    state = torch.zeros(2 * directions, 3, 5)
    args = (x, [state, state], list(layer.parameters()), True, 2, 0.0, False, bidirectional, False)
    gates = 9 * 3 * 2 * directions * 4 * 5 * costs.FUNCTION
    with torch.backends.mkldnn.flags(enabled=False):  # the fused kernel hides its products from the counter
        assert _ours(aten.lstm.input, *args) == _counted(layer, x) + gates


def test_costs_follow_symbolic_shapes() -> None:
    b, s = sym("b"), sym("s")
    x = Value("x", TensorType(DType.F32, (b, s, 16)))
    w = Value("w", TensorType(DType.F32, (24, 16)))
    y = Value("y", TensorType(DType.F32, (b, s, 24)))
    node = Node(Kind.OPERATOR, "aten.linear.default", (x, w), (y,))
    flops = lookup(node.op).flops(node)
    assert isinstance(flops, Sym) and symbols(flops) == {"b", "s"}
    assert evaluate(flops, {"b": 4, "s": 7}) == _counted(F.linear, _r(4, 7, 16), _r(24, 16))
    assert evaluate(flops, {"b": 0, "s": 7}) == 0


# --- host arithmetic -------------------------------------------------------------------------------------------------


def test_host_functions_lead_both_ways() -> None:
    names = [n for n in rows() if n.startswith("sym.")]
    assert len(names) >= 40
    for name in names:
        assert sym_name(sym_callable(name)) == name
        assert resolve(name) is sym_callable(name)
    assert sym_name(torch.add) is None and sym_name([]) is None


def test_every_function_of_torchs_symbolic_numbers_has_a_name() -> None:
    from torch.fx.experimental.sym_node import METHOD_TO_OPERATOR

    for method, fn in METHOD_TO_OPERATOR.items():
        if not inspect.isfunction(fn) or fn.__name__ != "<lambda>":
            assert sym_name(fn) is not None, method
