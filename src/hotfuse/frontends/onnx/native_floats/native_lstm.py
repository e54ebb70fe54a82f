# pyright: reportPrivateUsage=false
"""LSTM layers with constant weights in native code, once that is there; until then, and where it declines, the library's.

torch's library takes 45 us for one step of 128 hidden values, of which 3 us are arithmetic; files of speech models call one step
at a time. Weights of quantized layers stay bytes, which are widened in registers: one row reads a quarter of the memory. One
thread, a busy machine, us:

    hidden values, steps           128, 1    64, 30    512, 1
    library, packed weights            45       170       142
    native                              4        16        66
    native, weights of bytes            4        15        31
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.frontends.onnx.native_floats.call_scratch import room
from hotfuse.frontends.onnx.packed_weights import PackedWeight, usable
from hotfuse.native.float_layers import panel_products
from hotfuse.native.float_layers.layer_code import LSTM_FIELDS, WordTable, background_layers
from hotfuse.native.target import CpuTarget

GATES = (0, 2, 3, 1)
"""The native code's gates (i, f, g, o) among ONNX's (i, o, f, c)."""
SMALL_WORK = 1 << 22
"""Multiplications that one thread is through with before a team of them is faster."""
TOGETHER = 24
"""Rows of inputs that are multiplied at a time, where steps have fewer: weights are read once for all of them."""


@dataclass(frozen=True, slots=True)
class LstmWeights:
    """Of one direction, as the file has them: (gates, inputs), with a factor for each of its rows where they are signed bytes."""

    w: Callable[[], Tensor]
    r: Callable[[], Tensor]
    w_scale: Tensor | None = None
    r_scale: Tensor | None = None


def float_weights(w: Tensor, r: Tensor) -> list[LstmWeights]:
    """Of a layer in ONNX's order: (directions, gates, inputs)."""

    def of(d: int) -> LstmWeights:
        return LstmWeights(lambda: w[d], lambda: r[d])

    return [of(d) for d in range(int(w.shape[0]))]


def _gates(rows: Tensor, hidden: int, lane: int) -> Tensor:
    """Blocks of rows in the native code's order, each filled up with zeros."""
    whole = rows.new_zeros(4, lane, *rows.shape[1:])
    whole[:, :hidden] = rows.reshape(4, hidden, *rows.shape[1:])[list(GATES)]
    return whole.flatten(0, 1)


@dataclass(frozen=True, slots=True)
class _Direction:
    """What the native code is told of one."""

    table: WordTable
    weights: PackedWeight


class NativeLstm:
    """A layer, called with its node's inputs, of which weights and biases are constants and lengths and peepholes are not given."""

    __slots__ = ("_backwards", "_bias", "_directions", "_features", "_hidden", "_lane", "_weights", "plain")

    def __init__(
        self, weights: Sequence[LstmWeights], bias: Tensor | None, backwards: Sequence[bool], plain: Callable[..., Any],
        features: int, hidden: int,
    ) -> None:  # fmt: skip
        """`plain` is the node's function otherwise; biases (directions, both halves of all gates) are floats."""
        self.plain, self._weights, self._bias, self._backwards = plain, weights, bias, backwards
        self._features, self._hidden, self._lane = features, hidden, 0
        self._directions: tuple[_Direction, ...] = ()
        background_layers.begin()

    def _ready(self, target: CpuTarget) -> tuple[_Direction, ...]:
        features, hidden = self._features, self._hidden
        lane = self._lane = panel_products.padded(hidden, target)
        made: list[_Direction] = []
        for d, of in enumerate(self._weights):
            in_bytes = of.w_scale is not None
            both = torch.zeros(4 * hidden) if self._bias is None else self._bias[d].view(2, 4 * hidden).sum(0)
            ones = torch.ones(4 * hidden)
            scales = [_gates(ones if s is None else s.float().expand(4 * hidden), hidden, lane) for s in (of.w_scale, of.r_scale)]
            table = WordTable(
                LSTM_FIELDS, features=features, hidden=hidden, lane=lane, r_at=4 * lane * features * (1 if in_bytes else 4),
                w_scale=scales[0], r_scale=scales[1], bias=_gates(both, hidden, lane), bytes=int(in_bytes),
                back=int(self._backwards[d]), directions=len(self._weights),
            )  # fmt: skip

            def make(of: LstmWeights = of) -> Tensor:
                return torch.cat([panel_products.in_panels(_gates(m(), hidden, lane), target) for m in (of.w, of.r)])

            made.append(_Direction(table, PackedWeight(make, 4 * lane * (features + hidden) * (1 if in_bytes else 4))))
        return tuple(made)

    @property
    def bytes(self) -> int:
        """Memory of packed copies, while there are any."""
        return sum(d.weights.bytes for d in self._directions)

    def __call__(
        self, x: Any, w: Any, r: Any, b: Any = None, lens: Any = None, h: Any = None, c: Any = None, *rest: Any
    ) -> Any:  # fmt: skip
        """What the node computes."""
        run = self._runner(int(x.shape[0]), int(x.shape[1])) if lens is None and self._takes(x, h, c) else None
        made = None if run is None else run(x, h, c)
        return self.plain(x, w, r, b, lens, h, c, *rest) if made is None else made

    def _takes(self, x: Any, h: Any, c: Any) -> bool:
        """Whether it is made for such arguments; of others the library says what does not fit."""
        if x.dim() != 3 or x.shape[2] != self._features or not x.numel() or not usable(x):
            return False
        state = (len(self._weights), x.shape[1], self._hidden)
        return all(s is None or (s.shape == state and s.dtype is torch.float32) for s in (h, c))

    def for_sizes(self, xs: Sequence[Any]) -> Callable[..., Any] | None:
        """What to call with the node's inputs where sizes and types are just these; None where it would decline."""
        x, h, c = xs[0], xs[5] if len(xs) > 5 else None, xs[6] if len(xs) > 6 else None
        if (len(xs) > 4 and xs[4] is not None) or not self._takes(x, h, c):
            return None
        steps, batch, run = int(x.shape[0]), int(x.shape[1]), None

        def call(x: Any, w: Any, r: Any, b: Any = None, lens: Any = None, h: Any = None, c: Any = None, *rest: Any) -> Any:
            nonlocal run
            if run is None:
                run = self._runner(steps, batch)
            made = None if run is None or x.requires_grad or torch.is_autocast_enabled("cpu") else run(x, h, c)
            return self.plain(x, w, r, b, lens, h, c, *rest) if made is None else made

        return call

    def _runner(self, steps: int, batch: int) -> Callable[[Tensor, Tensor | None, Tensor | None], Any] | None:
        """For so many steps of so many rows; None until the code is there, and where a team of threads is faster."""
        native, features, hidden = background_layers.layers, self._features, self._hidden
        if native is None or (4 * steps * batch * hidden * (features + hidden) > SMALL_WORK and torch.get_num_threads() > 1):
            return None
        if not (directions := self._directions):
            directions = self._directions = self._ready(native.target)
        lstm, many = native.lstm, max(1, TOGETHER // batch)
        size = 4 * self._lane * batch * (6 + 4 * min(many, steps))
        state, sizes, behind = (len(directions), batch, hidden), (steps, len(directions), batch, hidden), 4 * batch * hidden

        def run(x: Tensor, h: Tensor | None, c: Tensor | None) -> tuple[Tensor, Tensor, Tensor] | None:
            zeros = torch.zeros(state) if h is None or c is None else x
            x, h, c = x.contiguous(), zeros if h is None else h.contiguous(), zeros if c is None else c.contiguous()
            y, last_h, last_c = torch.empty(sizes), torch.empty(state), torch.empty(state)
            at, from_h, from_c = y.data_ptr(), h.data_ptr(), c.data_ptr()
            to_h, to_c, scratch = last_h.data_ptr(), last_c.data_ptr(), room(size).data_ptr()
            for d, direction in enumerate(directions):
                if (weights := direction.weights.get()) is None:
                    return None
                less = d * behind
                lstm(
                    x.data_ptr(), at + less, from_h + less, from_c + less, to_h + less, to_c + less, scratch,
                    direction.table.address, weights.data_ptr(), steps, batch, many,
                )  # fmt: skip
            return y, last_h, last_c

        return run

    def __deepcopy__(self, memo: object) -> NativeLstm:
        """Nobody writes to it."""
        return self


def native_lstm(
    weights: Sequence[LstmWeights], bias: Tensor | None, attrs: Mapping[str, Any], plain: Callable[..., Any], features: int,
    hidden: int,
) -> NativeLstm | None:  # fmt: skip
    """A layer of default activations; None where it is of another kind."""
    direction = attrs.get("direction", "forward")
    backwards = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}.get(direction)
    if backwards is None or len(backwards) != len(weights) or attrs.get("layout") or not features or not hidden:
        return None
    if bias is not None and bias.dtype is not torch.float32:
        return None
    return NativeLstm(weights, bias, backwards, plain, features, hidden)
