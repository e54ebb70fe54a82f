"""The arithmetic of recurrent cells, interpreted and as native code, against float64 over the whole range of gates and states."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from hotfuse.backends.llvm.native import compile_kernel, load_kernel
from hotfuse.ir.types import DType
from hotfuse.lower.cpu.recurrent import cell as recurrent_cell
from hotfuse.native.target import CpuTarget, host_levels
from hotfuse.tile import interpreter
from hotfuse.tile.build import KernelBuilder
from hotfuse.tile.program import Kernel

LANES, ROWS = 16, 64
WAYS = [None, *host_levels()]
way = pytest.mark.parametrize("target", WAYS, ids=lambda t: t.name if t else "interpreted")

F64 = npt.NDArray[np.float64]


def kernel(cell: str) -> Kernel:
    """The cell over rows of gates (those of inputs and state for a GRU) and states."""
    gates = {"lstm": 4, "gru": 3}[cell]
    b = KernelBuilder(cell)
    x = b.input("x", DType.F32, (ROWS, gates * LANES))
    y = b.input("y", DType.F32, (ROWS, gates * LANES))
    state = b.input("state", DType.F32, (ROWS, LANES))
    outs = [b.output(n, DType.F32, (ROWS, LANES)) for n in ("first", "second")]
    with b.loop("row", 0, ROWS, 2) as row:
        gx, gh, old = (b.load(v, (row.var, 0), (2, v.shape[1])) for v in (x, y, state))  # type: ignore[arg-type]
        new = (
            recurrent_cell.lstm(b, b.map("add", gx, gh), old)
            if cell == "lstm"
            else (recurrent_cell.gru(b, gx, gh, old),) * 2
        )
        for out, tile in zip(outs, new, strict=True):
            b.store(out, (row.var, 0), tile)
    return b.finish()


def run(cell: str, target: CpuTarget | None, x: F64, y: F64, state: F64) -> list[F64]:
    """What the kernel gives; inputs are numbers of fp32."""
    made = kernel(cell)
    buffers = [torch.tensor(v, dtype=torch.float32) for v in (x, y, state)]
    buffers += [torch.full((ROWS, LANES), 7.0) for _ in range(2)]
    if target is None:
        interpreter.run(made, {n.name: t.numpy() for n, t in zip(made.buffers, buffers, strict=True)}, {})
    else:
        load_kernel(compile_kernel(made, target))(buffers)
    return [t.double().numpy() for t in buffers[3:]]


def sigmoid(x: F64) -> F64:
    with np.errstate(all="ignore"):
        return 1 / (1 + np.exp(-x))


def exact(cell: str, x: F64, y: F64, state: F64) -> list[F64]:
    with np.errstate(all="ignore"):
        if cell == "lstm":
            i, f, o, g = np.split((x.astype(np.float32) + y.astype(np.float32)).astype(np.float64), 4, 1)
            c = sigmoid(f) * state + sigmoid(i) * np.tanh(g)
            return [c, sigmoid(o) * np.tanh(c)]
        (rx, zx, nx), (rh, zh, nh) = np.split(x, 3, 1), np.split(y, 3, 1)
        z = sigmoid(zx + zh)
        new = np.tanh(nx + sigmoid(rx + rh) * nh)
        return [(1 - z) * new + z * state] * 2


def drawn(cell: str, scale: float, seed: int) -> tuple[F64, F64, F64]:
    """Gates and states of about a size, as fp32 has them."""
    rng = np.random.default_rng(seed)
    gates = {"lstm": 4, "gru": 3}[cell] * LANES
    x, y, state = (rng.standard_normal((ROWS, n)) * scale for n in (gates, gates, LANES))
    return tuple(v.astype(np.float32).astype(np.float64) for v in (x, y, state))  # type: ignore[return-value]


@way
@pytest.mark.parametrize("cell", ["lstm", "gru"])
@pytest.mark.parametrize("scale", [0.3, 1.0, 5.0, 40.0])
def test_gates_of_every_size(cell: str, scale: float, target: CpuTarget | None) -> None:
    """Within 2e-6 of the largest term of each sum: what rounding the gates themselves, 6e-8 of their size, makes of the result."""
    x, y, state = drawn(cell, scale, 5)
    for got, want in zip(run(cell, target, x, y, state), exact(cell, x, y, state), strict=True):
        size = 1 + np.abs(state)
        assert np.max(np.abs(got - want) / size) < 2e-6


@way
def test_small_numbers_keep_their_digits(target: CpuTarget | None) -> None:
    """tanh of a small number is relative to it, so that a state that fades fades smoothly."""
    x, y, state = drawn("lstm", 1.0, 6)
    x[:, 3 * LANES :] = 0.0
    y[:, 3 * LANES :] = 0.0
    state *= 1e-12
    state = state.astype(np.float32).astype(np.float64)
    for got, want in zip(run("lstm", target, x, y, state), exact("lstm", x, y, state), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-6, atol=0)


@way
@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_gates_that_are_wide_open_or_shut(cell: str, target: CpuTarget | None) -> None:
    """Gates up to the largest numbers, infinite ones among them, are 0, 1 or -1; nothing overflows on the way."""
    x, _, state = drawn(cell, 1.0, 7)
    rng = np.random.default_rng(8)
    sizes = np.array([50.0, 88.5, 90.0, 104.0, 1e4, 1e20, 3e38, np.inf])
    x = rng.choice(sizes, x.shape) * rng.choice([-1.0, 1.0], x.shape)
    x = x.astype(np.float32).astype(np.float64)
    y = np.zeros_like(x)
    for got, want in zip(run(cell, target, x, y, state), exact(cell, x, y, state), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


@way
def test_a_large_state_lives_on(target: CpuTarget | None) -> None:
    x, y, state = drawn("lstm", 1.0, 9)
    state = (state * 1e37).astype(np.float32).astype(np.float64)
    for got, want in zip(run("lstm", target, x, y, state), exact("lstm", x, y, state), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-6, atol=1e-6)


@way
@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_what_is_no_number_stays_so(cell: str, target: CpuTarget | None) -> None:
    """NaN in any gate or state reaches the new state of its unit, and no other."""
    gates = {"lstm": 4, "gru": 3}[cell]
    x, y, state = drawn(cell, 1.0, 10)
    for gate in range(gates):
        x[gate, gate * LANES + 3] = np.nan
    state[gates, 3] = np.nan
    state[gates + 1, 3] = np.inf
    for got, want in zip(run(cell, target, x, y, state), exact(cell, x, y, state), strict=True):
        np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
        assert np.isnan(got).sum() >= 4
        np.testing.assert_allclose(got, want, rtol=2e-6, atol=2e-6)


def test_the_fraction_is_what_the_tool_fits() -> None:
    path = Path(__file__).parents[2] / "tools" / "fit_tanh.py"
    spec = importlib.util.spec_from_file_location("fit_tanh", path)
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    error, top, under = tool.fitted()
    assert error < 3e-8
    np.testing.assert_allclose(recurrent_cell.TANH_TOP, top, rtol=1e-6)
    np.testing.assert_allclose(recurrent_cell.TANH_UNDER, under, rtol=1e-6)
