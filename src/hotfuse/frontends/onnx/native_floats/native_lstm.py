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
from hotfuse.frontends.onnx.native_floats.native_recurrent import (
    TOGETHER,
    Direction,
    NativeRecurrent,
    Run,
    gate_rows,
    reads_backwards,
    row_major,
)
from hotfuse.frontends.onnx.packed_weights import PackedWeight
from hotfuse.native.float_layers import panel_products
from hotfuse.native.float_layers.layer_code import LSTM_FIELDS, FloatLayers
from hotfuse.native.float_layers.word_table import WordTable
from hotfuse.native.target import CpuTarget

ORDER = (0, 2, 3, 1)
"""The native code's gates (i, f, g, o) among ONNX's (i, o, f, c)."""
@dataclass(frozen=True, slots=True)
class LstmWeights:
    """One direction's weights, as the file has them: (gates, inputs), with a factor for each row where they are signed bytes."""

    w: Callable[[], Tensor]
    r: Callable[[], Tensor]
    w_scale: Tensor | None = None
    r_scale: Tensor | None = None


def float_weights(w: Tensor, r: Tensor) -> list[LstmWeights]:
    """The weights of a layer's directions, from ONNX's order: (directions, gates, inputs)."""

    def of(d: int) -> LstmWeights:
        return LstmWeights(lambda: w[d], lambda: r[d])

    return [of(d) for d in range(int(w.shape[0]))]


class NativeLstm(NativeRecurrent):
    """An LSTM layer; biases (directions, both halves of all gates) are floats."""

    GATES = 4

    def __init__(
        self, weights: Sequence[LstmWeights], bias: Tensor | None, backwards: Sequence[bool], plain: Callable[..., Any],
        features: int, hidden: int,
    ) -> None:  # fmt: skip
        self._weights, self._bias = weights, bias
        super().__init__(plain, backwards, features, hidden)

    def _made_ready(self, target: CpuTarget) -> tuple[Direction, ...]:
        features, hidden = self._features, self._hidden
        lane = panel_products.padded(hidden, target)
        made: list[Direction] = []
        for d, of in enumerate(self._weights):
            in_bytes, ones = of.w_scale is not None, torch.ones(4 * hidden, dtype=torch.float32, device="cpu")
            both = torch.zeros_like(ones) if self._bias is None else self._bias[d].view(2, 4 * hidden).sum(0)
            wide = [ones if s is None else s.float().expand(4 * hidden) for s in (of.w_scale, of.r_scale)]
            vectors = [gate_rows(v, ORDER, hidden, lane) for v in (*wide, both)]
            size = 1 if in_bytes else 4
            table = WordTable(
                LSTM_FIELDS, features=features, hidden=hidden, lane=lane, r_at=4 * lane * features * size, w_scale=vectors[0],
                r_scale=vectors[1], bias=vectors[2], bytes=int(in_bytes), back=int(self._backwards[d]),
                directions=len(self._weights),
            )  # fmt: skip

            def make(of: LstmWeights = of) -> Tensor:
                return torch.cat([panel_products.in_panels(gate_rows(m(), ORDER, hidden, lane), target) for m in (of.w, of.r)])

            made.append(Direction(table, PackedWeight(make, 4 * lane * (features + hidden) * size)))
        return tuple(made)

    def _run(self, native: FloatLayers, directions: Sequence[Direction], steps: int, batch: int) -> Run:
        hidden, lstm, many = self._hidden, native.lstm, max(1, TOGETHER // batch)
        size = 4 * panel_products.padded(hidden, native.target) * batch * (6 + 4 * min(many, steps))
        state, sizes, behind = (len(directions), batch, hidden), (steps, len(directions), batch, hidden), 4 * batch * hidden
        like_state, like_y = row_major(state), row_major(sizes)

        def run(x: Tensor, h: Tensor | None, c: Tensor | None) -> tuple[Tensor, Tensor, Tensor] | None:
            zeros = x.new_zeros(state) if h is None or c is None else x
            x, h, c = x.contiguous(), zeros if h is None else h.contiguous(), zeros if c is None else c.contiguous()
            y = x.new_empty_strided(*like_y)
            last_h, last_c = x.new_empty_strided(*like_state), x.new_empty_strided(*like_state)
            at, from_h, from_c = y.data_ptr(), h.data_ptr(), c.data_ptr()
            to_h, to_c, scratch = last_h.data_ptr(), last_c.data_ptr(), room(size)
            for d, direction in enumerate(directions):
                if (weights := direction.weights.get()) is None:
                    return None
                less = d * behind
                lstm(
                    x.data_ptr(), at + less, from_h + less, from_c + less, to_h + less, to_c + less, scratch.data_ptr(),
                    direction.table.address, weights.data_ptr(), steps, batch, many,
                )  # fmt: skip
            return y, last_h, last_c

        return run


def native_lstm(
    weights: Sequence[LstmWeights], bias: Tensor | None, attrs: Mapping[str, Any], plain: Callable[..., Any], features: int,
    hidden: int,
) -> NativeLstm | None:  # fmt: skip
    """A layer of default activations; None where it is of another kind."""
    backwards = reads_backwards(attrs, len(weights))
    if backwards is None or not features or not hidden or (bias is not None and bias.dtype is not torch.float32):
        return None
    if any(s is None and m().dtype is not torch.float32 for of in weights for s, m in ((of.w_scale, of.w), (of.r_scale, of.r))):
        return None
    return NativeLstm(weights, bias, backwards, plain, features, hidden)
