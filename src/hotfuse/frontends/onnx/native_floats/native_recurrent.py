# pyright: reportPrivateUsage=false
"""Recurrent layers with constant weights in native code, once that is there; until then, and where it declines, the library's."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.frontends.onnx.packed_weights import PackedWeight, usable
from hotfuse.native.float_layers.layer_code import FloatLayers, background_layers
from hotfuse.native.float_layers.word_table import WordTable
from hotfuse.native.target import CpuTarget

SMALL_WORK = 1 << 22
"""Multiplications that one thread is through with before a team of them is faster."""
TOGETHER = 24
"""Rows of inputs that are multiplied at a time, where steps have fewer: weights are read once for all of them."""


@dataclass(frozen=True, slots=True)
class Direction:
    """What the native code is told of one."""

    table: WordTable
    weights: PackedWeight


Run = Callable[[Tensor, Tensor | None, Tensor | None], tuple[Tensor, ...] | None]
"""Inputs and first states to what the node gives; None where weights cannot be packed now."""


class NativeRecurrent(ABC):
    """A layer, called with its node's inputs, of which weights and biases are constants and lengths and peepholes are not given."""

    GATES: ClassVar[int]

    def __init__(self, plain: Callable[..., Any], backwards: Sequence[bool], features: int, hidden: int) -> None:
        """`plain` is the node's function otherwise; a direction for each that reads backwards or does not."""
        self.plain, self._backwards, self._features, self._hidden = plain, backwards, features, hidden
        self._ready: tuple[Direction, ...] = ()
        background_layers.begin()

    @property
    def bytes(self) -> int:
        """Memory of packed copies, while there are any."""
        return sum(d.weights.bytes for d in self._ready)

    def __call__(self, x: Any, *others: Any) -> Any:
        """What the node computes."""
        run = self._runner(int(x.shape[0]), int(x.shape[1])) if self._takes(x, others) else None
        made = None if run is None else run(x, *_states(others))
        return self.plain(x, *others) if made is None else made

    def _takes(self, x: Any, others: Sequence[Any]) -> bool:
        """Whether it is made for such arguments; of others the library says what does not fit."""
        if len(others) > _LENGTHS and others[_LENGTHS] is not None:
            return False
        if x.dim() != 3 or x.shape[2] != self._features or not x.numel() or not usable(x):
            return False
        state = (len(self._backwards), x.shape[1], self._hidden)
        return all(s is None or (s.shape == state and s.dtype is torch.float32) for s in _states(others))

    def for_sizes(self, xs: Sequence[Any]) -> Callable[..., Any] | None:
        """What to call with the node's inputs where sizes and types are just these; None where it would decline. Those may be there
        in another shape: elements are read in their order."""
        x, others = xs[0], xs[1:]
        if not self._takes(x, others):
            return None
        steps, batch, run = int(x.shape[0]), int(x.shape[1]), None
        shapes = [None if t is None else tuple(t.shape) for t in xs]

        def call(x: Any, *others: Any) -> Any:
            nonlocal run
            if run is None:
                run = self._runner(steps, batch)
            made = None if run is None or x.requires_grad or torch.is_autocast_enabled("cpu") else run(x, *_states(others))
            if made is not None:
                return made
            given = zip((x, *others), shapes, strict=True)
            return self.plain(*[t if shape is None else t.reshape(shape) for t, shape in given])

        return call

    def _runner(self, steps: int, batch: int) -> Run | None:
        """For so many steps of so many rows; None until the code is there, and where a team of threads is faster."""
        native, features, hidden = background_layers.layers, self._features, self._hidden
        work = self.GATES * steps * batch * hidden * (features + hidden)
        if native is None:
            background_layers.begin()  # a child that was forked while its parent was at it
            return None
        if work > SMALL_WORK and torch.get_num_threads() > 1:
            return None
        if not (directions := self._ready):
            directions = self._ready = self._made_ready(native.target)
        return self._run(native, directions, steps, batch)

    @abstractmethod
    def _made_ready(self, target: CpuTarget) -> tuple[Direction, ...]:
        """Prepared weights of each direction."""

    @abstractmethod
    def _run(self, native: FloatLayers, directions: Sequence[Direction], steps: int, batch: int) -> Run:
        """With sizes that are known."""

    def __deepcopy__(self, memo: object) -> Self:
        """Nobody writes to it."""
        return self


_LENGTHS = 3
"""Among a node's inputs behind the first: the lengths of sequences; behind them are the first states."""


def _states(others: Sequence[Any]) -> tuple[Any, Any]:
    h, c = (*others[_LENGTHS + 1 : _LENGTHS + 3], None, None)[:2]
    return h, c


def row_major(sizes: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes and strides for `new_empty_strided`, which takes a third less time than `new_empty`."""
    return sizes, tuple(math.prod(sizes[i + 1 :]) for i in range(len(sizes)))


def gate_rows(rows: Tensor, order: Sequence[int], hidden: int, lane: int) -> Tensor:
    """Blocks of rows in another order, each filled up with zeros."""
    whole = rows.new_zeros(len(order), lane, *rows.shape[1:])
    whole[:, :hidden] = rows.reshape(-1, hidden, *rows.shape[1:])[list(order)]
    return whole.flatten(0, 1)


def reads_backwards(attrs: Mapping[str, Any], directions: int) -> tuple[bool, ...] | None:
    """Which directions of a node read backwards; None where native code does not support its kind."""
    found = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}.get(attrs.get("direction", "forward"))
    return None if found is None or len(found) != directions or attrs.get("layout") else found
