"""A tensor of one element that was cut from a wider one: it counts as contiguous, but torch gives no view of its bytes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import hotfuse
from hotfuse.base.raw_bytes import raw_bytes
from hotfuse.base.settings import Settings
from hotfuse.frontends.ship import describe, restore
from hotfuse.runtime.observe.obstacle_log import advice
from hotfuse.runtime.observe.repeats import fingerprint
from hotfuse.runtime.serve.distinct_rows import distinct_rows

SETTINGS = Settings(capture="inline", hot_calls=2, watch_rate=2, idle=False, record=False)
CUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "of a column": lambda t: t[:, 0][:1],
    "of every second": lambda t: t.flatten()[::2][3:4],
    "of a plane": lambda t: t[:1, :1].mT[:, :, None],
    "whole": lambda t: t,
    "rows": lambda t: t[1:2],
    "columns": lambda t: t[:, ::2],
}
TYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int32, torch.uint8]


def cut(name: str, dtype: torch.dtype) -> torch.Tensor:
    return CUTS[name](torch.randint(1, 99, (4, 6)).to(dtype))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("name", CUTS)
def test_bytes_are_those_of_a_copy(name: str, dtype: torch.dtype) -> None:
    t = cut(name, dtype)
    copy = torch.empty(t.shape, dtype=dtype).copy_(t)
    assert torch.equal(raw_bytes(t), copy.flatten().view(torch.uint8))
    assert not t.is_contiguous() or fingerprint(t) == fingerprint(copy)  # of others it looks at a part
    assert torch.equal(restore(describe(t, with_data=True)), t)
    assert not t.is_contiguous() or distinct_rows([t], 9) is not None


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("name", CUTS)
def test_such_arguments_are_served(name: str, dtype: torch.dtype) -> None:
    """The first calls are compared with what their arguments held before: that raised, and the call with it."""
    with torch.no_grad(), hotfuse.jit(lambda t: t * 2 + 1, settings=SETTINGS) as fast:
        for _ in range(8):
            t = cut(name, dtype)
            assert torch.equal(fast(t), t * 2 + 1)


def test_what_says_that_too_many_kinds_of_tensors_came_names_their_orders_too() -> None:
    """Ranks and types were the same in every call."""
    with torch.no_grad(), hotfuse.jit(lambda t: t * 2 + 1, settings=SETTINGS.with_(max_entries=2)) as fast:
        for order in ((0, 1, 2), (1, 0, 2), (2, 1, 0), (0, 2, 1)) * 6:
            t = torch.randn(3, 4, 5).permute(order)
            assert torch.equal(fast(t), t * 2 + 1)
        (said,) = [line for line in str(fast.explain()).splitlines() if line.startswith("in the way:")]
        assert "orders in memory" in said and "contiguous" in advice(said), said
