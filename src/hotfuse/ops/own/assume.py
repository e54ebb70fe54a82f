"""`assume(x, holds)`: x, where a truth value holds that the graph rests on; otherwise the call is one that the graph is not for.

A graph that was traced along one path through a model's Python computes what decided there with everything else, and ends in one
such node (`frontends.paths.path_checks`). Generated code counts a fault (`require`), torch's operators raise CallFault: either way
nothing of the call has become visible, and the model's own code answers it.

`sized(x, holds)` is the same of sizes that data decide. No kernel takes it in, so it raises before any of them reads x.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hotfuse.base.errors import CallFault
from hotfuse.ops import costs
from hotfuse.ops.own.operator import own_operator
from hotfuse.ops.table import Access, defop

ASSUME = "hotfuse.assume.default"
SIZED = "hotfuse.sized.default"
SIZE_OF = "hotfuse.size_of.default"
ASSERTIONS = ("aten._assert_async.msg", "aten._assert_async.default", "aten._assert_scalar.default")
"""What tracing assumes of single values, and models assert."""


class OtherPath(CallFault):
    """A call takes another path through the model's code than the one that was traced."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.at = time.perf_counter()
        """When that showed: to raise this through a plan takes longer than a small model."""


class MadeUpCalls(threading.local):
    """Whether what runs on this thread are trials on made-up data, of which nothing has to hold."""

    on = False

    def __bool__(self) -> bool:
        return self.on

    @contextmanager
    def tried(self) -> Generator[None]:
        """Around them."""
        before, self.on = self.on, True
        try:
            yield
        finally:
            self.on = before


made_up_calls = MadeUpCalls()


def assumed(x: Tensor, holds: Tensor) -> Tensor:
    """The tensor itself; raises OtherPath."""
    if not holds and not made_up_calls:
        raise OtherPath("the call takes another path through the model's code")
    return x


def asserted(holds: Any, *_message: Any, **_named: Any) -> None:
    """Raises OtherPath; the model's own code says what is wrong, if anything is."""
    if not holds:
        raise OtherPath("the call takes another path through the model's code, or its data are none that it takes")


@own_operator("hotfuse::assume", __name__)
def _assume(x: Tensor, holds: Tensor) -> Tensor:
    return assumed(x, holds).clone()


@_assume.register_fake
def _like(x: Tensor, holds: Tensor) -> Tensor:
    return x.clone()


@own_operator("hotfuse::sized", __name__)
def _sized(x: Tensor, holds: Tensor) -> Tensor:
    return assumed(x, holds).clone()


_sized.register_fake(_like)


@own_operator("hotfuse::size_of", __name__)
def _size_of(x: Tensor, dim: int) -> Tensor:
    return torch.tensor(x.shape[dim])


@_size_of.register_fake
def _one_number(x: Tensor, dim: int) -> Tensor:
    return torch.empty((), dtype=torch.int64)


def size_of(x: Tensor, dim: int) -> Tensor:
    """A size as data. The graph holds its assumed value; this gives the actual one."""
    return torch.ops.hotfuse.size_of(x, dim)


defop("hotfuse.size_of", Access.HOST)
defop("hotfuse.assume", Access.POINTWISE, costs.per_output(0))
defop("hotfuse.sized", Access.OPAQUE)
