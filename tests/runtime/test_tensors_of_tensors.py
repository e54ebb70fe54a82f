"""`torch.tensor` of a list of tensors is captured: the same numbers, types and gradients as in eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hotfuse
from hotfuse.base.settings import Settings


def sums(x: torch.Tensor) -> Any:
    return torch.tensor([x.sum(), 1, x.max()]) * x[0, :3]


def nested(x: torch.Tensor) -> Any:
    return torch.tensor([[x.sum(), 2.5], (x.min(), x.argmax())]), torch.tensor((x.argmax(), x.argmin(), True))


def converted(x: torch.Tensor) -> Any:
    return torch.tensor([x.sum() * 3, -1], dtype=torch.float64), torch.tensor([x.argmax()], dtype=torch.float64, device="cpu")


def truths(x: torch.Tensor) -> Any:
    return torch.tensor([x.sum() > 0, False]).logical_not()


def along_a_path(x: torch.Tensor) -> Any:
    y = x * 2 if x.sum() > 0 else -x
    return torch.tensor([row.max() for row in y]).unsqueeze(1) + y


@pytest.mark.parametrize("fn", [sums, nested, converted, truths, along_a_path])
def test_they_are_captured_and_right(fn: Any) -> None:
    fast = hotfuse.jit(fn, settings=Settings(capture="inline", tiers=0, watch=False))
    with torch.no_grad():
        for i in range(16):
            x = torch.randn(4, 5) + (1.0 if i % 2 else -1.0)
            if i == 15:
                x[0, 0] = float("nan")
            torch.testing.assert_close(fast(x), fn(x), rtol=0, atol=0, equal_nan=True)
    assert fast.stats()["graph_calls"] >= 8, str(fast.explain(full=True))


def test_a_number_that_does_not_fit_is_torchs_to_answer() -> None:
    """In a narrower type than the tensors have, torch raises by the numbers, which a graph would not."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.tensor([x.argmax(), 1], dtype=torch.uint8).sum()

    fast = hotfuse.jit(fn, settings=Settings(capture="inline", tiers=0, watch=False))
    for i in range(8):
        x = torch.zeros(400)
        x[i if i < 7 else 399] = 1
        outcomes: list[Any] = []
        for run in (fn, fast):
            try:
                outcomes.append(run(x))
            except (RuntimeError, TypeError) as e:
                outcomes.append(type(e))
        assert outcomes[0] == outcomes[1], outcomes


def test_no_gradient_goes_through_them() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.tensor([x.sum().detach(), x.detach().max()]) @ x

    fast = hotfuse.jit(fn, settings=Settings(capture="inline", tiers=0, watch=False))
    for _ in range(6):
        x = torch.randn(2, 3, requires_grad=True)
        got, want = fast(x), fn(x)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(*(torch.autograd.grad(y.sum(), x)[0] for y in (got, want)))
