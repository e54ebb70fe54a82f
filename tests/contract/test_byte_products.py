"""Products of bytes in native code: exact integers on every instruction-set level, whatever the sizes."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from hotfuse.frontends.onnx.int8 import native_layers
from hotfuse.frontends.onnx.int8.native_layers import NativeConv
from hotfuse.machine.probe import usable_features
from hotfuse.native import byte_products as bp
from hotfuse.native.byte_kernels import ByteKernels, background, byte_kernels, load_kernels
from hotfuse.native.jit import Loaded
from hotfuse.native.target import CpuTarget, host, level
from hotfuse.ops.folded_conv import Window

pytestmark = pytest.mark.skipif(not bp.supported(host()), reason="no code for this machine")
LEVELS = {
    "host": (host().name, ()), "avx2": ("avx2", ("avx-vnni",)), "avx512, no VNNI": ("avx512", ("avx512vnni",)),
}  # fmt: skip


@functools.cache
def kernels(name: str) -> tuple[CpuTarget, ByteKernels, Loaded]:
    wanted, without = LEVELS[name]
    usable = set(usable_features())
    if wanted == "avx512" and "avx512f" not in usable:
        pytest.skip("this machine has no AVX-512")
    target = level(wanted, usable - set(without))
    return target, *load_kernels(target)


def filled(values: Tensor, size: int) -> Tensor:
    return torch.cat([values, torch.zeros(size - len(values), dtype=values.dtype)])


@pytest.mark.parametrize("name", LEVELS)
@pytest.mark.parametrize(("rows", "inputs", "columns"), [(1, 1, 1), (7, 37, 100), (13, 129, 65), (60, 300, 16), (3, 4096, 33)])
def test_sums_are_the_integers(name: str, rows: int, inputs: int, columns: int) -> None:
    target, made, _ = kernels(name)
    assert made.layer is not None
    x = torch.randint(0, 256, (rows * inputs + bp.SLACK,), dtype=torch.uint8)
    w = torch.randint(-128, 128, (columns, inputs), dtype=torch.int8)
    x[:inputs], w[0], w[-1] = 255, 127, -128  # where pairs of products leave 16 bits
    size = -(-columns // target.lanes) * target.lanes
    start, factor, bias = torch.randint(-999, 999, (columns,), dtype=torch.int32), torch.rand(columns), torch.randn(columns)
    sums = w.sum(1, dtype=torch.int32)
    whole: dict[str, Any] = {"inputs": inputs, "columns": columns, "padded": size, "weights": bp.packed(w, target), "floor": -4e5}
    told = (("start", start), ("factor", factor), ("bias", bias), ("sums", sums))
    vectors: dict[str, Any] = {n: filled(v, size) for n, v in told}
    exact = x[: rows * inputs].view(rows, inputs).to(torch.int64) @ w.t().to(torch.int64)
    scratch, y = torch.empty(8 * size + x.numel(), dtype=torch.uint8), torch.full((rows, columns), 7.0)

    def run(x: Tensor, source: int, scale: float = 0.0, zero: int = 0) -> Tensor:
        table = bp.LayerTable(source=source, result=bp.AS_FLOATS, **whole, **vectors)
        assert made.layer is not None
        assert made.layer(x.data_ptr(), y.data_ptr(), rows, scratch.data_ptr(), table.address, scale, zero)
        return y

    static = ((exact.to(torch.int32) + start).float() * factor + bias).clamp(min=-4e5)
    assert torch.equal(run(x, bp.UNSIGNED), static)
    assert torch.equal(run(x ^ 128, bp.SIGNED), static)
    by_call = ((exact - 100 * sums.long()).to(torch.int32).float() * (torch.tensor(0.25) * factor) + bias).clamp(min=-4e5)
    assert torch.equal(run(x ^ 128, bp.TOLD, 0.25, 100 - 128), by_call)


@pytest.mark.parametrize("kind", ["whole", "depthwise"])
@pytest.mark.parametrize("signed", [False, True])
def test_convolutions_are_the_sums_of_their_windows(kind: str, signed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "kernels", byte_kernels())
    monkeypatch.setattr(native_layers, "SMALL_WORK", 1 << 40)
    dtype, zero = (torch.int8, -9) if signed else (torch.uint8, 119)
    for channels, kernel, stride, pads, dilation in itertools.product(
        (3, 17, 85), ((3, 3), (1, 5), (2, 1)), ((1, 1), (2, 3)), ((0, 0), (2, 1), (7, 9)), ((1, 1), (2, 2))
    ):
        groups = channels if kind == "depthwise" else 1
        outputs = channels if kind == "depthwise" else 21
        w = torch.randint(-128, 128, (outputs, channels // groups, *kernel), dtype=torch.int8)
        factor, bias = torch.rand(outputs) * 1e-2, torch.randint(-500, 500, (outputs,), dtype=torch.int32)
        conv = NativeConv(w, Window(stride, pads, dilation, groups), zero, dtype, 3, dtype, factor, bias)
        x = torch.randint(-128, 128, (2, channels, 9, 11), dtype=torch.int8).view(dtype)
        made = conv.run(x)
        sums = torch.nn.functional.conv2d(x.double() - zero, w.double(), bias.double(), stride, pads, dilation, groups)
        low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
        want = ((sums.float() * factor[:, None, None]).round() + 3).clamp(low, high).to(dtype)
        assert made is not None and torch.equal(made, want)
        assert conv.run(torch.zeros(1, channels + 1, 9, 11, dtype=dtype)) is None  # the library says what does not fit
        assert conv.run(torch.zeros(0, channels, 9, 11, dtype=dtype)) is None
