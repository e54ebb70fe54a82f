"""Windows of windows: what would be computed at ever more places is stored once, the results are torch's, and lowering ends."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hotfuse.lower.common.effort import Effort, OutOfSteps, limited
from hotfuse.lower.common.errors import CannotLower
from hotfuse.lower.common.recompute import read_often
from hotfuse.lower.cpu.group import lower_group
from hotfuse.lower.primitives.rules import expanded
from tests.contract.lowering import group_of, interpret, run_native

Tensor = torch.Tensor


def pools(x: Tensor, many: int, size: int = 5) -> Tensor:
    """Pools behind each other, put side by side: what detectors do."""
    found = [x]
    for _ in range(many):
        found.append(F.max_pool2d(found[-1], size, 1, size // 2))
    return torch.cat(found, 1)


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("many", [2, 3, 5])
def test_chained_pools_are_torchs(many: int, last: bool, symbolic: bool) -> None:
    x = torch.randn(2, 3, 9, 11)
    x[0, 1, 2, 3], x[1, 0, 8, 10] = torch.nan, -torch.inf
    x = x.to(memory_format=torch.channels_last) if last else x
    group = group_of(lambda t: pools(t, many), [x], symbolic)
    with limited() as effort:
        lowered = lower_group(group.graph)
    assert effort.spent < 3000 * (many + 1)
    want = pools(x, many)
    for (got,) in (interpret(lowered, group, [x]), run_native(lowered, group, [x])):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (1, 2, 1, 7), (0, 2, 5, 5), (3, 17, 4, 4)])
def test_small_and_empty_images(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    group = group_of(lambda t: pools(t, 3), [x])
    (got,) = run_native(lower_group(group.graph), group, [x])
    torch.testing.assert_close(got, pools(x, 3), rtol=0, atol=0)


def test_means_of_means_and_resized_pools() -> None:
    x = torch.randn(1, 4, 12, 12)

    def fn(t: Tensor) -> Tensor:
        t = F.avg_pool2d(t.sigmoid(), 3, 1, 1)
        t = F.interpolate(F.max_pool2d(t, 3, 1, 1), scale_factor=2.0, mode="bilinear")
        return F.avg_pool2d(t * t, 4, 2)

    group = group_of(fn, [x])
    (got,) = run_native(lower_group(group.graph), group, [x])
    torch.testing.assert_close(got, fn(x), rtol=1e-5, atol=1e-6)


def test_what_is_stored_first() -> None:
    x = torch.randn(1, 2, 8, 8)
    one, three = (group_of(lambda t, n=n: pools(t, n), [x]).graph for n in (1, 3))
    assert read_often(expanded(one)) == []
    pooled = [n.outs[0].name for n in three.nodes if "max_pool" in n.op]
    stored = [v.name for v in read_often(expanded(three))]
    assert stored and all(any(name.startswith(p) for p in pooled[:2]) for name in stored), (stored, pooled)


def test_diamonds_of_pointwise_ops_are_read_once() -> None:
    def fn(t: Tensor) -> Tensor:
        for _ in range(20):
            t = t + torch.sigmoid(t) * t
        return t

    assert read_often(expanded(group_of(fn, [torch.randn(5)]).graph)) == []


def test_steps_run_out_with_a_reason() -> None:
    group = group_of(lambda t: pools(t, 2), [torch.randn(1, 2, 8, 8)])
    with limited(50), pytest.raises(CannotLower, match="too many steps"):
        lower_group(group.graph)


def test_a_request_that_is_out_of_steps_refuses_the_next_group_without_a_look() -> None:
    outer = Effort(10)
    with pytest.raises(OutOfSteps, match="the request has taken the 10 steps"):
        for _ in range(3):
            inner = Effort(100, outer)
            for _ in range(5):
                inner.spend()
    assert outer.spent == 10
