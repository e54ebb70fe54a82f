"""Depthwise convolutions of planes: any rank, window, stride and dilation, as the library computes them; and inside native runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hotfuse.compile.host import host_core
from hotfuse.lower import lower
from hotfuse.native.target import host
from tests.contract.lowering import group_of, interpret, run_native

CONVOLUTIONS = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}
CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "speech": ((1, 12, 50), (12, 1, 31), {"padding": 15}),
    "row": ((2, 5, 17), (5, 1, 3), {"padding": 1}),
    "valid": ((2, 5, 17), (5, 1, 4), {}),
    "strided": ((2, 6, 33), (6, 1, 5), {"padding": 2, "stride": 2}),
    "dilated": ((1, 6, 40), (6, 1, 3), {"padding": 4, "dilation": 4}),
    "several of each": ((2, 4, 21), (12, 1, 3), {"padding": 1}),
    "image": ((2, 3, 9, 11), (3, 1, 3, 3), {"padding": 1}),
    "uneven": ((1, 3, 9, 11), (6, 1, 3, 5), {"padding": (0, 2), "stride": (2, 1)}),
    "many places": ((1, 3, 12, 13), (3, 1, 9, 9), {"padding": 4}),
    "volume": ((1, 2, 5, 4, 6), (2, 1, 3, 3, 2), {"padding": 1}),
    "one pixel": ((1, 4, 1), (4, 1, 3), {"padding": 1}),
    "no image": ((0, 4, 9), (4, 1, 3), {"padding": 1}),
}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_as_the_library_computes_them(case: str, bias: bool) -> None:
    shape, window, how = CASES[case]
    x, weight = torch.randn(shape), torch.randn(window)
    more = torch.randn(window[0]) if bias else None

    def fn(t: torch.Tensor) -> torch.Tensor:
        return torch.relu(CONVOLUTIONS[len(shape)](t, weight, more, groups=shape[1], **how))

    group = group_of(fn, [x], constants=True)
    lowered = lower(group.graph, host_core(host()))
    want = fn(x.double().float())
    runs = [run_native(lowered, group, [x])]
    if x.numel() < 2000 and case != "many places":
        runs.append(interpret(lowered, group, [x]))
    for (got,) in runs:
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_lengths_that_only_a_call_knows() -> None:
    weight = torch.randn(6, 1, 7)

    def fn(t: torch.Tensor) -> torch.Tensor:
        return F.silu(F.conv1d(t, weight, padding=3, groups=6))

    group = group_of(fn, [torch.randn(2, 6, 40)], symbolic=True, constants=True)
    lowered = lower(group.graph, host_core(host()))
    for length in (2, 7, 16, 33, 250):
        x = torch.randn(3, 6, length)
        (got,) = run_native(lowered, group, [x])
        torch.testing.assert_close(got, fn(x), rtol=1e-5, atol=1e-5)


def test_gaps_what_is_not_finite_and_double() -> None:
    weight = torch.randn(4, 1, 3)

    def fn(t: torch.Tensor) -> torch.Tensor:
        return F.conv1d(t, weight.to(t.dtype), padding=1, groups=4)

    for x in (torch.randn(2, 30, 8)[:, ::3, 1:5].transpose(1, 2), torch.randn(2, 4, 10, dtype=torch.float64)):
        x[0, 1, 3], x[1, 2, 5] = torch.inf, torch.nan
        group = group_of(fn, [x], constants=True)
        (got,) = run_native(lower(group.graph, host_core(host())), group, [x])
        torch.testing.assert_close(got, fn(x), rtol=1e-5, atol=1e-5, equal_nan=True)


def test_a_speech_block_is_one_native_run() -> None:
    """Projection, gate, depthwise convolution along time, norm, projection: nothing leaves the run."""
    import hotfuse
    from hotfuse.base.settings import Settings

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.after = torch.nn.Linear(64, 128), torch.nn.Linear(64, 64)
            self.along = torch.nn.Conv1d(64, 64, 15, padding=7, groups=64)
            self.norm = torch.nn.BatchNorm1d(64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = F.glu(self.before(x).transpose(1, 2), 1)
            return x + self.after(F.silu(self.norm(self.along(y))).transpose(1, 2))

    model, x = Block().eval(), torch.randn(1, 200, 64)
    fast = hotfuse.jit(model, settings=Settings(capture="inline", hot_calls=1, tiers=1, watch=False, record=False))
    with torch.no_grad():
        for _ in range(4):
            got = fast(x)
        torch.testing.assert_close(got, model(x), rtol=1e-4, atol=1e-4)
    text = str(fast.explain(full=True))
    assert "interrupts a run" not in text and "plane by plane" not in text, text
