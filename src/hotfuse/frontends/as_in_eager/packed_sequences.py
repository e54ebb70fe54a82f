# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false
# Torch keeps what a front end needs private.
"""Recurrent layers over packed sequences, written as a graph can hold them.

`pack_padded_sequence` lays the steps of all sequences out one behind the other; how many rows each step has depends on data, so no
graph has a shape for it. While a model is traced, a packed sequence holds stand-ins for what it was made of:

    data         [steps, rows, features], padded, sequences as they were sorted
    batch_sizes  [rows]: the lengths of the sequences

A layer forwards computes padded steps, too: no step before them reads those. A layer backwards gets every sequence turned round
within its length, and what it gives is turned back. The last state of a row is its output at its last step. The cell state of an
LSTM is not known there. A model that reads that, or looks into a packed sequence by itself, keeps its own code. Lengths that torch
refuses fail in the graph, and the model's own code tells.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any

import torch
from torch import _VF, Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from hotfuse.base.errors import CaptureError

_LAYERS = (nn.LSTM, nn.GRU, nn.RNN)


class StandIn:
    """What only this module knows how to read: any other read ends the capture."""

    def __init__(self, what: str, tensor: Tensor | None = None) -> None:
        self.hidden_what, self.hidden_tensor = what, tensor

    def __getattr__(self, name: str) -> Any:
        raise _read(self.hidden_what, name)

    def __getitem__(self, _index: Any) -> Any:
        raise _read(self.hidden_what, "elements")

    def __iter__(self) -> Any:
        raise _read(self.hidden_what, "elements")

    @classmethod
    def __torch_function__(cls, func: Any, _types: Any, _args: Any = (), _kwargs: Any = None) -> Any:
        raise _read("what stands for packed sequences", getattr(func, "__name__", str(func)))


class LengthStandIn(StandIn):
    """For `batch_sizes`: torch asks where it lies and how long it is, and no length means that nobody gave one."""

    @property
    def device(self) -> torch.device:
        """Where the lengths lie."""
        return _tensor(self).device

    def size(self, _dim: int) -> int:
        """No length."""
        return 0


def _read(what: str, part: str) -> CaptureError:
    return CaptureError(f"the model reads {what}", because=f"it asks for {part}", hint="it keeps running as it is")


def _tensor(of: StandIn) -> Tensor:
    assert of.hidden_tensor is not None
    return of.hidden_tensor


def over_padded_sequences(modules: Iterable[nn.Module]) -> None:
    """Have the recurrent layers of a model that is about to be traced take packed sequences; they are nobody else's."""
    for module in modules:
        if isinstance(module, _LAYERS) and type(module).forward in [kind.forward for kind in _LAYERS]:
            module.__dict__["forward"] = functools.partial(_layers, module)


class _Tracing(threading.local):
    """Whether this thread traces."""

    on = False


_here = _Tracing()
_lock = threading.Lock()
_tracing = 0
"""Threads that do."""


@contextmanager
def padded() -> Generator[None]:
    """In this thread, sequences are not packed; other threads are not affected."""
    global _tracing
    with _lock:
        _tracing += 1
        _VF._pack_padded_sequence, _VF._pad_packed_sequence = _packing, _padding
    _here.on = True
    try:
        yield
    finally:
        _here.on = False
        with _lock:
            _tracing -= 1
            if not _tracing:
                del _VF._pack_padded_sequence, _VF._pad_packed_sequence


def _packing(*args: Any) -> Any:
    real: Any = torch._C._VariableFunctions
    return _pack(*args) if _here.on else real._pack_padded_sequence(*args)


def _padding(*args: Any) -> Any:
    real: Any = torch._C._VariableFunctions
    return _pad(*args) if isinstance(args[0], StandIn) else real._pad_packed_sequence(*args)


def _pack(data: Tensor, lengths: Tensor, batch_first: bool) -> tuple[StandIn, StandIn]:
    data = data.transpose(0, 1) if batch_first else data
    right = ((lengths > 0) & (lengths <= data.shape[0])).all() & (lengths[1:] <= lengths[:-1]).all()
    torch._assert_async(right, "lengths of packed sequences")
    return StandIn("a packed sequence", data), LengthStandIn("the sizes of a packed sequence", lengths)


def _pad(data: StandIn, sizes: StandIn, batch_first: bool, value: float, total: int) -> tuple[Tensor, Tensor]:
    x, lengths = _tensor(data), _tensor(sizes)
    real = torch.arange(x.shape[0], device=x.device)[:, None] < lengths
    shown = x.masked_fill(~real.view(*real.shape, *[1] * (x.dim() - 2)), value)
    if not total:  # as long as the longest
        longest: Any = lengths.max().item()
        torch._check(longest >= 1)
        torch._check(longest <= x.shape[0])
        shown = shown.narrow(0, 0, longest)
    elif total != x.shape[0]:
        raise CaptureError("packed sequences are padded to another length than they had", hint="it keeps running as it is")
    return (shown.transpose(0, 1) if batch_first else shown), lengths


def _layers(module: Any, data: Any, hx: Any = None) -> Any:
    """As torch's own `forward`."""
    forward = type(module).forward
    if not isinstance(data, PackedSequence) or not isinstance(data.data, StandIn) or module.training or module.proj_size:
        return forward(module, data, hx)
    given_steps: Any = data.data
    sizes: Any = data.batch_sizes
    order, back = data.sorted_indices, data.unsorted_indices
    x, lengths = _tensor(given_steps), _tensor(sizes)
    is_lstm, sides = isinstance(module, nn.LSTM), 2 if module.bidirectional else 1
    steps, rows = x.shape[0], x.shape[1]
    at = torch.arange(steps, device=x.device)[:, None]
    turned = torch.where(at < lengths, lengths - 1 - at, at)[..., None]
    last = (lengths - 1).view(1, rows, 1).expand(1, rows, module.hidden_size)
    shape = (module.num_layers * sides, rows, module.hidden_size)
    states = _states(module, hx, order) if hx is not None else [x.new_zeros(shape)] * (2 if is_lstm else 1)
    found: list[Tensor] = []
    for layer in range(module.num_layers):
        outs: list[Tensor] = []
        for side in range(sides):
            k = layer * sides + side
            given = x.gather(0, turned.expand(x.shape)) if side else x
            first = [s[k : k + 1] for s in states]
            y: Tensor = _one(module, given, first, [getattr(module, name) for name in module._all_weights[k]])
            y = y.gather(0, turned.expand(y.shape)) if side else y
            outs.append(y)
            found.append(y[:1] if side else y.gather(0, last))
        x = torch.cat(outs, -1) if sides > 1 else outs[0]
    hidden = torch.cat(found, 0)
    hidden = hidden if back is None else hidden.index_select(1, back)
    made = PackedSequence(StandIn("a packed sequence", x), sizes, order, back)  # type: ignore[arg-type]
    return made, (hidden, StandIn("the cell state of an LSTM over packed sequences")) if is_lstm else hidden


def _states(module: Any, hx: Any, order: Tensor | None) -> list[Tensor]:
    given = list(hx) if isinstance(module, nn.LSTM) else [hx]
    return given if order is None else [s.index_select(1, order) for s in given]


def _one(module: Any, x: Tensor, first: list[Tensor], weights: list[Tensor]) -> Tensor:
    """One layer in one direction over padded sequences."""
    rest = (weights, module.bias, 1, 0.0, False, False, False)
    if isinstance(module, nn.LSTM):
        return _VF.lstm(x, first, *rest)[0]
    kind = _VF.gru if isinstance(module, nn.GRU) else _VF.rnn_tanh if module.nonlinearity == "tanh" else _VF.rnn_relu
    return kind(x, first[0], *rest)[0]
