"""How arguments lie in memory: results lie, share memory and are written as in eager, whatever a graph was captured with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import hotfuse
from hotfuse import Settings

INLINE = Settings(capture="inline", hot_calls=2, watch=False)
LYING: dict[str, Callable[[], torch.Tensor]] = {
    "row-major": lambda: torch.randn(6, 8),
    "transposed": lambda: torch.randn(8, 6).t(),
    "expanded rows": lambda: torch.randn(1, 8).expand(6, 8),
    "expanded columns": lambda: torch.randn(6, 1).expand(6, 8),
    "every second row": lambda: torch.randn(12, 8)[::2],
    "every second column, transposed": lambda: torch.randn(8, 12).t()[::2],
}


def _written(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows = a.t().contiguous()  # the argument itself, or a copy
    rows.add_(1)
    return rows.sum(0), a + 1


PROGRAMS: dict[str, Callable[[torch.Tensor], Any]] = {
    "contiguous": lambda a: (a + 1, a.t().contiguous()),
    "reshape": lambda a: (torch.sin(a) * 2, a.t().reshape(-1)),
    "a write behind contiguous": _written,
}


def described(results: Sequence[torch.Tensor], given: torch.Tensor) -> list[tuple[Any, ...]]:
    memory = given.untyped_storage().data_ptr()
    return [(t.stride(), t.untyped_storage().data_ptr() == memory) for t in results]


@pytest.mark.parametrize("first", ["transposed", "expanded rows", "every second column, transposed"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_results_lie_as_in_eager(name: str, first: str) -> None:
    program, seed = PROGRAMS[name], 0
    with torch.no_grad(), hotfuse.jit(program, settings=INLINE) as fast:
        for kind in (first, *LYING):
            for _ in range(4):
                seed += 1
                torch.manual_seed(seed)
                mine = LYING[kind]()
                torch.manual_seed(seed)
                theirs = LYING[kind]()
                got, want = fast(mine), program(theirs)
                assert described(got, mine) == described(want, theirs), kind
                torch.testing.assert_close([*got, mine], [*want, theirs])
                assert fast.wait(60)
        assert fast.stats()["graph_calls"] > 12
