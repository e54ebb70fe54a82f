"""An LSTM over one step as products and pointwise ops: what a stream of frames asks for, one frame a call.

torch's operator goes to a library that puts the weights into an order of its own in every call; over one step that takes longer
than the products do (84 us against 46 at 128 hidden values, one thread, a busy machine; no gain at 32). Two steps or more stay
with torch's operator, as does whatever is not the plain case: several layers, both directions, projections, types but float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def lstm(
    x: Tensor, hx: Sequence[Tensor], params: Sequence[Tensor], has_biases: bool, num_layers: int, dropout: float, train: bool,
    bidirectional: bool, batch_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """As `torch.lstm`."""
    if not _plain(x, hx, params, has_biases, num_layers, train, bidirectional, batch_first):
        return torch.lstm(x, list(hx), list(params), has_biases, num_layers, dropout, train, bidirectional, batch_first)
    before, cell = hx[0][0], hx[1][0]
    inputs = x[:, 0] if batch_first else x[0]
    if has_biases:
        w, r, b_in, b_hidden = params
        gates = torch.addmm(F.linear(inputs, w, b_in), before, r.t()) + b_hidden
    else:
        w, r = params
        gates = torch.addmm(F.linear(inputs, w), before, r.t())
    i, f, g, o = gates.chunk(4, 1)
    cell = torch.addcmul(torch.sigmoid(f) * cell, torch.sigmoid(i), torch.tanh(g))
    hidden = torch.sigmoid(o) * torch.tanh(cell)
    state = hidden.unsqueeze(0)
    return (state.transpose(0, 1) if batch_first else state).clone(), state, cell.unsqueeze(0)  # nothing may share memory


def _plain(
    x: Tensor, hx: Sequence[Tensor], params: Sequence[Tensor], has_biases: bool, num_layers: int, train: bool,
    bidirectional: bool, batch_first: bool,
) -> bool:  # fmt: skip
    return (
        x.dim() == 3
        and x.shape[1 if batch_first else 0] == 1
        and num_layers == 1
        and len(params) == (4 if has_biases else 2)
        and not (train or bidirectional)
        and x.dtype is torch.float32
        and x.device.type == "cpu"
        and hx[0].shape == hx[1].shape  # what is wrong with states of other shapes torch's operator says
        and hx[0].shape[:2] == (1, x.shape[0 if batch_first else 1])
        and not torch.is_autocast_enabled("cpu")
    )
