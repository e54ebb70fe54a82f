"""Products that leave out rows of zeros, three ways: float64, interpreter, native code; and loops over a number in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from hotfuse.backends.llvm.native import compile_kernel, load_kernel
from hotfuse.backends.llvm.runs.kernel_call import glue
from hotfuse.base.errors import InternalError
from hotfuse.compile.host import host_core
from hotfuse.compile.variants.skips import Skips
from hotfuse.ir.dims import expr
from hotfuse.ir.types import DType
from hotfuse.lower.common.codec import from_json, to_json
from hotfuse.lower.common.errors import CannotLower
from hotfuse.lower.common.lowered import BufferArgument as Given
from hotfuse.lower.common.lowered import BufferRole, Lowered, PackArgument, StateArgument
from hotfuse.lower.common.pack import pack
from hotfuse.lower.cpu.gemm.product_group import lower_contraction
from hotfuse.lower.cpu.tiling import Core
from hotfuse.lower.run.constants import Constants
from hotfuse.lower.run.kernel_state import DENSE, LIMIT, NEVER, SKIPPED, KernelState
from hotfuse.native.target import host
from hotfuse.tile import interpreter
from hotfuse.tile.build import KernelBuilder
from hotfuse.tile.instrument import instrumented
from hotfuse.tile.program import Kernel, Loop, LoopKind
from hotfuse.tile.serial import one_thread
from hotfuse.tile.text import parse, show
from hotfuse.tile.verify import verify
from tests.contract.lowering import Group, as_numpy, bindings, group_of, outputs_of, sizes_of

SMALL = Core(4, 16)
Fn = Callable[..., Any]


def lowered(group: Group, core: Core | None = None) -> Lowered:
    made = lower_contraction(group.graph, core or host_core(host(), "fp32"), skipping=True)
    assert from_json(to_json(made)) == made
    return made


def interpreted(made: Lowered, group: Group, tensors: Sequence[torch.Tensor], limit: int) -> tuple[list[torch.Tensor], Any]:
    outs = outputs_of(made, group.graph, bindings(group.graph, tensors))
    by_name = {v.name: t for v, t in zip(group.graph.inputs, tensors, strict=True)}
    by_name |= {p.value.name: group.weights[p.key].detach() for p in group.graph.params}
    state = np.array([limit, 0, 0], np.int64)
    buffers: dict[str, Any] = {}
    for a in made.arguments:
        match a:
            case Given():
                t = outs[a.value] if a.role is BufferRole.OUTPUT else by_name[a.value]
                flat = len(made.kernel.buffer(a.buffer).shape) == 1
                buffers[a.buffer] = as_numpy(t.as_strided((t.numel(),), (1,)) if flat else t)
            case PackArgument():
                buffers[a.buffer] = pack(a.spec, {s.name: as_numpy(by_name[s.name]) for s in a.spec.sources})
            case StateArgument():
                buffers[a.buffer] = state
            case _:
                pass
    interpreter.run(made.kernel, buffers, sizes_of(made, group.graph, tensors))
    return list(outs.values()), state


class Native:
    """A kernel with its state."""

    def __init__(self, made: Lowered, group: Group, kernel: Kernel | None = None) -> None:
        self.code = load_kernel(compile_kernel(kernel or made.kernel))
        self.constants = Constants(group.weights)
        self.run = glue(group.graph, made, self.code, self.constants)

    @property
    def state(self) -> KernelState:
        return next(iter(self.constants.states.values()))

    def at(self, limit: int, *tensors: torch.Tensor) -> list[torch.Tensor]:
        self.state.limit = limit
        return list(self.run(*tensors))


def rows(m: int, k: int, zero: Sequence[int] | slice, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(seed)).to(dtype)
    x[zero] = 0
    return x


def wide(fn: Fn, *tensors: torch.Tensor) -> torch.Tensor:
    """The function in float64; it must not hold weights of its own."""
    return fn(*[t.double() for t in tensors])


def weights(n: int, k: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, k, generator=g), torch.randn(n, generator=g)


EPILOGUES: dict[str, Fn] = {
    "alone": lambda y, _x: y,
    "gelu": lambda y, _x: F.gelu(y),
    "relu and a number": lambda y, _x: torch.relu(y) * 0.5,
}


@pytest.mark.parametrize(
    ("kind", "m", "k", "n", "symbolic"),
    [("alone", 1, 1, 1, False), ("relu and a number", 3, 5, 7, False), ("gelu", 23, 67, 50, False), ("gelu", 23, 67, 50, True)],
)
def test_all_three_agree_whatever_rows_are_zero(kind: str, m: int, k: int, n: int, symbolic: bool) -> None:
    w, bias = weights(n, k)
    finish = EPILOGUES[kind]

    def fn(x: torch.Tensor) -> torch.Tensor:
        return finish(F.linear(x, w.to(x.dtype), bias.to(x.dtype)), x)

    def traced(x: torch.Tensor) -> torch.Tensor:
        return finish(F.linear(x, w, bias), x)

    sample = rows(m, k, [])
    group = group_of(traced, [sample], symbolic=symbolic, constants=True)
    made = lowered(group)
    small = lowered(group, SMALL)
    native = Native(made, group)
    some = list(range(0, m, 2))
    for zero in ([], some, list(range(m)), [m - 1]):
        x = rows(m, k, zero)
        want = wide(fn, x)
        bound = 2e-6 * k**0.5 * (1 + float(want.abs().max()))
        share = 1000 * len(zero) // m
        for limit in (0, share, min(share + 1, NEVER), 1000, NEVER):
            skips = limit * m <= 1000 * len(zero)
            before = (native.state.skipped, native.state.dense)
            (got,) = native.at(limit, x)
            assert (got.double() - want).abs().max() <= bound
            assert (native.state.skipped, native.state.dense) == (before[0] + skips, before[1] + (not skips))
        for limit in (0, NEVER):
            (meant,), state = interpreted(small, group, [x], limit)
            assert (meant.double() - want).abs().max() <= bound
            assert (state[SKIPPED], state[DENSE], state[LIMIT]) == ((1, 0, 0) if limit == 0 else (0, 1, NEVER))


def test_no_rows_at_all() -> None:
    w, bias = weights(20, 8)
    group = group_of(lambda x: F.linear(x, w, bias), [rows(4, 8, [])], symbolic=True, constants=True)
    native = Native(lowered(group), group)
    for limit in (0, 500, NEVER):
        (got,) = native.at(limit, torch.empty(0, 8))
        assert got.shape == (0, 20)


def test_what_is_not_finite_is_not_zero() -> None:
    w, bias = weights(33, 70)
    group = group_of(lambda x: F.linear(x, w, bias), [rows(10, 70, [])], constants=True)
    made = lowered(group)
    native = Native(made, group)
    x = rows(10, 70, slice(0, 10))
    x[2, 69], x[4, 0], x[5, 3] = float("nan"), float("inf"), -float("inf")
    x[7, 68] = 1e-45  # the least number that is not zero
    want = F.linear(x.double(), w.double(), bias.double())
    for limit in (0, NEVER):
        (got,) = native.at(limit, x)
        (meant,), _ = interpreted(lowered(group, SMALL), group, [x], limit)
        for y in (got, meant):
            assert torch.equal(torch.isnan(y), torch.isnan(want)) and torch.equal(torch.isinf(y), torch.isinf(want))
            finite = torch.isfinite(want)
            assert (y.double() - want)[finite].abs().max() < 1e-5


def test_rows_of_minus_zero_give_the_same_bits_on_both_sides() -> None:
    w, _ = weights(19, 24)
    group = group_of(lambda x: F.linear(x, w), [rows(9, 24, [])], constants=True)
    native = Native(lowered(group), group)
    x = rows(9, 24, slice(0, 9))
    x[3], x[5, ::2] = -0.0, -0.0
    (skipped,), (dense,) = native.at(0, x), native.at(NEVER, x)
    assert torch.equal(skipped.view(torch.int32), dense.view(torch.int32))
    assert not skipped.view(torch.int32).any()  # +0 all over, as sums that begin with +0 are


def test_a_residual_stays_with_its_row() -> None:
    w, bias = weights(48, 32)
    fn = lambda x, r: F.gelu(F.linear(x, w, bias)) + r  # noqa: E731
    x, r = rows(31, 32, slice(4, 20)), rows(31, 48, [], seed=5)
    group = group_of(fn, [x, r], constants=True)
    native = Native(lowered(group), group)
    want = (F.gelu(F.linear(x.double(), w.double(), bias.double())) + r).float()
    for limit in (0, NEVER):
        torch.testing.assert_close(native.at(limit, x, r)[0], want, rtol=1e-5, atol=1e-5)
    (meant,), _ = interpreted(lowered(group, SMALL), group, [x, r], 0)
    torch.testing.assert_close(meant, want, rtol=1e-5, atol=1e-5)


def test_rows_are_zero_behind_what_is_computed_in_front() -> None:
    w, bias = weights(21, 40)
    x = rows(18, 40, [])
    x[3:9] = -x[3:9].abs()  # relu makes these zero
    group = group_of(lambda x: F.linear(torch.relu(x), w, bias), [x], constants=True)
    native = Native(lowered(group), group)
    want = F.linear(torch.relu(x).double(), w.double(), bias.double())
    for limit, skipped in ((333, 1), (334, 1), (NEVER, 1)):  # six of eighteen: 333 thousandths are reached, 334 are not
        (got,) = native.at(limit, x)
        assert (got.double() - want).abs().max() < 1e-5 and native.state.skipped == skipped


def test_several_products_of_one_input() -> None:
    (w1, b1), (w2, b2) = weights(30, 16), weights(50, 16, seed=2)
    x = rows(14, 16, [0, 1, 2, 7, 13])
    group = group_of(lambda x: (F.linear(x, w1, b1), F.silu(F.linear(x, w2, b2))), [x], constants=True)
    native = Native(lowered(group), group)
    want = F.linear(x.double(), w1.double(), b1.double()), F.silu(F.linear(x.double(), w2.double(), b2.double()))
    for limit in (0, NEVER):
        for got, expected in zip(native.at(limit, x), want, strict=True):
            assert (got.double() - expected).abs().max() < 1e-5
    for meant, expected in zip(interpreted(lowered(group, SMALL), group, [x], 0)[0], want, strict=True):
        assert (meant.double() - expected).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_real_types(dtype: torch.dtype) -> None:
    w, bias = (t.to(dtype) for t in weights(26, 40))
    x = rows(12, 40, slice(2, 8), dtype=dtype)
    group = group_of(lambda x: F.linear(x, w, bias), [x], constants=True)
    native = Native(lowered(group), group)
    want = F.linear(x.double(), w.double(), bias.double())
    bound = {torch.float16: 2e-2, torch.bfloat16: 0.15, torch.float64: 1e-12}[dtype]
    for limit in (0, NEVER):
        assert (native.at(limit, x)[0].double() - want).abs().max() < bound


def test_batches_and_inputs_that_lie_otherwise() -> None:
    w, bias = weights(37, 24)
    whole = rows(30, 48, slice(5, 17))
    x = whole[:, ::2].contiguous().reshape(5, 6, 24)
    group = group_of(lambda x: torch.tanh(F.linear(x, w, bias)), [x], constants=True)
    native = Native(lowered(group), group)
    strided = torch.as_strided(whole, (5, 6, 24), (6 * 48, 48, 2))
    for given in (x, strided, x.transpose(0, 1).contiguous().transpose(0, 1)):
        want = torch.tanh(F.linear(given.double(), w.double(), bias.double()))
        for limit in (0, 400, NEVER):
            assert (native.at(limit, given)[0].double() - want).abs().max() < 1e-5
    apart = whole[:, ::2]  # read where it lies: rows and elements some way from each other
    lies = group_of(lambda x: F.linear(x, w, bias), [apart], constants=True)
    want = F.linear(apart.double(), w.double(), bias.double())
    strides = Native(lowered(lies), lies)
    for limit in (0, 400, NEVER):
        assert (strides.at(limit, apart)[0].double() - want).abs().max() < 1e-5
    assert strides.state.skipped == 2


def test_on_one_thread_and_while_counting_what_is_stored() -> None:
    w, bias = weights(64, 128)
    x = rows(200, 128, slice(50, 150))
    group = group_of(lambda x: torch.relu(F.linear(x, w, bias)), [x], constants=True)
    made = lowered(group)
    want = torch.relu(F.linear(x.double(), w.double(), bias.double()))
    alone = one_thread(made.kernel)
    assert alone is not None
    serial = Native(made, group, alone)
    for limit in (0, NEVER):
        assert (serial.at(limit, x)[0].double() - want).abs().max() < 1e-4
    counting = instrumented(made.kernel)  # stores of both sides are counted; one of them runs
    assert [b.name for b in counting.buffers if b.kind == "state"] == ["state"]
    assert parse(show(counting)) == counting


def test_rounded_products_do_not_look() -> None:
    w, bias = weights(16, 16)
    group = group_of(lambda x: F.linear(x, w, bias), [rows(4, 16, [])], constants=True)
    with pytest.raises(CannotLower, match="rows of zeros"):
        lower_contraction(group.graph, Core(16, 32, precision="bf16"), skipping=True)


def test_a_dial_takes_thousandths() -> None:
    state = KernelState((NEVER, 0, 0))
    assert not state.on
    state.limit = 250
    assert state.on and state.limit == 250 and state.first == NEVER
    with pytest.raises(InternalError, match="thousandths"):
        state.limit = -1


# --- the loop over a number in memory


def _picking() -> Kernel:
    b = KernelBuilder("picking")
    n = b.size("n")
    where = b.input("where", DType.I64, (1,))
    x, y = b.input("x", DType.F32, (n,)), b.output("y", DType.F32, (n,))
    with b.given("many", where, (0,), 0, expr("+", n, 1)) as many, b.parallel("i", many) as i:
        b.store(y, (i.var,), b.map("mul", b.load(x, (i.var,)), 2.0))
    return b.finish()


def test_data_says_how_far_a_loop_runs() -> None:
    kernel = _picking()
    assert parse(show(kernel)) == kernel and "for many in 0..(n + 1) at where[0]" in show(kernel)
    native = load_kernel(compile_kernel(kernel))
    x = np.arange(1, 6, dtype=np.float32)
    for many in (0, 1, 5):
        where, got, meant = np.array([many], np.int64), np.zeros(5, np.float32), np.zeros(5, np.float32)
        interpreter.run(kernel, {"where": where, "x": x, "y": meant}, {"n": 5})
        native.enter(where.ctypes.data, x.ctypes.data, got.ctypes.data, 0, 5, 2)
        assert np.array_equal(got, meant) and got.tolist() == [*(2 * x[:many]), *[0.0] * (5 - many)]


def test_a_number_that_breaks_its_promise_is_found() -> None:
    arrays = {"where": np.array([6], np.int64), "x": np.ones(5, np.float32), "y": np.ones(5, np.float32)}
    with pytest.raises(InternalError, match="many is 6"):
        interpreter.run(_picking(), arrays, {"n": 5})


@pytest.mark.parametrize("change", [{"kind": LoopKind.PARALLEL}, {"step": 2}])
def test_such_a_loop_has_one_round(change: dict[str, Any]) -> None:
    kernel = _picking()
    (loop,) = kernel.body
    assert isinstance(loop, Loop)
    with pytest.raises(InternalError, match="invariant 16"):
        verify(replace(kernel, body=(replace(loop, **change),)))


def test_what_a_side_saves_is_what_it_may_lose_on_data_without_zeros() -> None:
    """Units are tried on data that have none: a product for calls with zeros would stay with the library by a hair."""
    points = ((0, 100.0, 120.0), (500, 100.0, 60.0), (950, 100.0, 20.0))
    assert Skips(100, 100, points).saved_us == 40.0
    assert Skips(900, 900, ((500, 100.0, 130.0), (950, 100.0, 90.0))).saved_us == 0.0
    assert Skips(900, 900, ()).saved_us == 0.0
