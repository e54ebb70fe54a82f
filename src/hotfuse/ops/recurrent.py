"""Recurrent layers, kept whole: each step needs the one before it."""

from __future__ import annotations

from hotfuse.ops import costs
from hotfuse.ops.table import Access, defops

defops("lstm gru rnn_tanh rnn_relu", Access.RECURRENT, costs.recurrent)
defops("lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell", Access.RECURRENT, costs.cell)
defops("_thnn_fused_lstm_cell _thnn_fused_gru_cell", Access.RECURRENT, costs.per_input(costs.FUNCTION))
