# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false, reportPrivateUsage=false
# torch says nothing of these operators' types.
"""LSTM layers whose weights are constants, in the order that oneDNN multiplies in.

`torch.lstm` goes to oneDNN and has it put the weights into that order in every call, which takes longer than the layer where
sequences are short. torch has operators that do it once; results are the same to the last bit. One thread, a busy machine:

    hidden values, steps    128, 8    512, 1    512, 8    512, 40 (batch 4)
    torch.lstm                 121     5,887     3,065               9,122 us
    packed once                 64       142       641               6,458 us
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from hotfuse.base.faults import faults
from hotfuse.base.lazy_dataclass import dataclass

_LSTM = 2
"""The kind of layer, among those that the operator knows."""


@dataclass(frozen=True, slots=True)
class PackedLstm:
    """One layer in one direction."""

    weights: tuple[Tensor, Tensor]
    biases: tuple[Tensor, Tensor]
    hidden: int
    has_biases: bool

    @property
    def nbytes(self) -> int:
        """Memory it holds."""
        return sum(4 * t.numel() for t in (*self.weights, *self.biases))

    def __deepcopy__(self, memo: object) -> PackedLstm:
        """Nobody writes to it; and the library's tensors cannot be copied so."""
        return self

    def takes(self, x: Tensor) -> bool:
        """Whether a call is one that `torch.lstm` would give to the same library."""
        return (
            x.dtype is torch.float32
            and x.device.type == "cpu"
            and x.numel() > 0
            and torch._C._get_mkldnn_enabled()
            and not torch.is_autocast_enabled("cpu")
        )

    def __call__(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(time, batch, features) and states (batch, hidden) into the same and the last states."""
        y, last, cell, _ = torch.ops.aten.mkldnn_rnn_layer.default(
            x.contiguous(), *self.weights, *self.biases, h.contiguous().unsqueeze(0), c.contiguous().unsqueeze(0),
            reverse=False, batch_sizes=[], mode=_LSTM, hidden_size=self.hidden, num_layers=1, has_biases=self.has_biases,
            bidirectional=False, batch_first=False, train=False,
        )  # fmt: skip
        return y, last[0], cell[0]


PACKED = "LSTM layers have their weights in oneDNN's order"
NOT_PACKED = "torch brings the weights of LSTM layers into oneDNN's order in every call"
"""For readers; the second where this torch or processor cannot do it once, or weights are not float32."""


def packed(params: Sequence[Tensor | None]) -> PackedLstm | None:
    """A layer's weights, and biases where it has them, in torch's order of gates; None where this torch or processor cannot."""
    w, r, *given = params
    if w is None or r is None or any(t is None or t.dtype is not torch.float32 for t in params) or not _available():
        return None
    hidden = int(r.shape[1])
    return _pack(w, r, [t for t in given if t is not None], hidden) if hidden and w.shape[1] else None


def _pack(w: Tensor, r: Tensor, given: Sequence[Tensor], hidden: int) -> PackedLstm:
    into = torch.ops.mkldnn._reorder_mkldnn_rnn_layer_weight
    with torch.no_grad():
        first, second = into(w.contiguous(), r.contiguous(), hidden, reverse=False, has_biases=bool(given), batch_first=False,
                             input_size=[1, 1, int(w.shape[1])])  # fmt: skip
    b_in, b_hidden = given or (w.new_zeros(4 * hidden), w.new_zeros(4 * hidden))
    return PackedLstm((first, second), (b_in, b_hidden), hidden, bool(given))


@functools.cache
def _available() -> bool:
    """Whether torch has the operators, and they give what `torch.lstm` does."""
    if not torch.backends.mkldnn.is_available():
        return False
    w, r = torch.linspace(-1, 1, 96).reshape(16, 6), torch.linspace(1, -1, 64).reshape(16, 4)
    x, h = torch.linspace(-2, 2, 36).reshape(3, 2, 6), torch.linspace(-1, 1, 8).reshape(2, 4)
    try:
        got = _pack(w, r, (), 4)(x, h, h)
        want = torch.lstm(x, [h.unsqueeze(0)] * 2, [w, r], has_biases=False, num_layers=1, dropout=0.0, train=False,
                          bidirectional=False, batch_first=False)  # fmt: skip
        return torch.allclose(got[0], want[0], atol=1e-6) and torch.allclose(got[2], want[2][0], atol=1e-6)
    except (AttributeError, RuntimeError, TypeError, ValueError) as e:
        faults.note("oneDNN's packed LSTM layers", e)
        return False
