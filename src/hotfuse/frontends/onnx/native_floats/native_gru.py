"""GRU layers with constant weights in native code. torch's operator takes some 10 us a step of one row, and knows one of the two
ways to reset; for the other each step would be nine operators. One thread, a busy machine: 10 steps of 64 hidden values 98 us
before, 9 now."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

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
from hotfuse.native.float_layers.gru_code import GRU_FIELDS
from hotfuse.native.float_layers.layer_code import FloatLayers
from hotfuse.native.float_layers.word_table import WordTable
from hotfuse.native.target import CpuTarget


class NativeGru(NativeRecurrent):
    """A GRU layer; weights (directions, gates, inputs) and biases (directions, both halves of all gates) are floats."""

    GATES = 3

    def __init__(
        self, w: Tensor, r: Tensor, bias: Tensor | None, backwards: Sequence[bool], plain: Callable[..., Any], *, before_reset: bool
    ) -> None:
        self._w, self._r, self._bias, self._before_reset = w, r, bias, before_reset
        super().__init__(plain, backwards, int(w.shape[2]), int(r.shape[2]))

    def _made_ready(self, target: CpuTarget) -> tuple[Direction, ...]:
        features, hidden = self._features, self._hidden
        lane = panel_products.padded(hidden, target)
        made: list[Direction] = []
        for d, back in enumerate(self._backwards):
            halves = self._w.new_zeros(2, 3, hidden) if self._bias is None else self._bias[d].view(2, 3, hidden)
            bias = halves.sum(0)
            bias[2] = halves[0, 2]
            table = WordTable(
                GRU_FIELDS, features=features, hidden=hidden, lane=lane, zr_at=12 * lane * features,
                h_at=12 * lane * features + 8 * lane * hidden, bias=gate_rows(bias.reshape(-1), (0, 1, 2), hidden, lane),
                r_bias=gate_rows(halves[1, 2], (0,), hidden, lane), before_reset=int(self._before_reset), back=int(back),
                directions=len(self._backwards),
            )  # fmt: skip

            def make(d: int = d) -> Tensor:
                parts = ((self._w, (0, 1, 2)), (self._r, (0, 1)), (self._r, (2,)))
                return torch.cat([panel_products.in_panels(gate_rows(m[d], order, hidden, lane), target) for m, order in parts])

            made.append(Direction(table, PackedWeight(make, 12 * lane * (features + hidden))))
        return tuple(made)

    def _run(self, native: FloatLayers, directions: Sequence[Direction], steps: int, batch: int) -> Run:
        hidden, gru, many = self._hidden, native.gru, max(1, TOGETHER // batch)
        size = 4 * panel_products.padded(hidden, native.target) * batch * (5 + 3 * min(many, steps))
        state, sizes, behind = (len(directions), batch, hidden), (steps, len(directions), batch, hidden), 4 * batch * hidden
        like_state, like_y = row_major(state), row_major(sizes)

        def run(x: Tensor, h: Tensor | None, _: Tensor | None) -> tuple[Tensor, Tensor] | None:
            x, h = x.contiguous(), x.new_zeros(state) if h is None else h.contiguous()
            y, last, scratch = x.new_empty_strided(*like_y), x.new_empty_strided(*like_state), room(size)
            for d, direction in enumerate(directions):
                if (weights := direction.weights.get()) is None:
                    return None
                less = d * behind
                gru(
                    x.data_ptr(), y.data_ptr() + less, h.data_ptr() + less, last.data_ptr() + less, scratch.data_ptr(),
                    direction.table.address, weights.data_ptr(), steps, batch, many,
                )  # fmt: skip
            return y, last

        return run


def native_gru(w: Tensor, r: Tensor, bias: Tensor | None, attrs: Mapping[str, Any], plain: Callable[..., Any]) -> NativeGru | None:
    """A layer of default activations; None where it is of another kind."""
    backwards = reads_backwards(attrs, int(w.shape[0]))
    odd = any(t is not None and t.dtype is not torch.float32 for t in (w, r, bias))
    if backwards is None or odd or not w.numel() or not r.numel():
        return None
    return NativeGru(w, r, bias, backwards, plain, before_reset=bool(attrs.get("linear_before_reset")))
