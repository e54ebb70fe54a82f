"""RNN, GRU and LSTM: torch's fused operators when the attributes allow, an explicit loop when not.

Inside, everything is time-major and one direction at a time; a direction that reads backwards is the forward one over
a reversed sequence. torch's operators know only the default activations, no clipping and no peepholes; a sequence
shorter than the others needs its state frozen, which torch cannot do for the LSTM's cell; masking does it elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hotfuse.base.errors import ModelError
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.frontends.onnx.elements import is_known
from hotfuse.frontends.onnx.native_floats.native_gru import native_gru
from hotfuse.frontends.onnx.native_floats.native_lstm import float_weights, native_lstm
from hotfuse.frontends.onnx.packed_lstm import NOT_PACKED, PACKED, PackedLstm, packed
from hotfuse.frontends.onnx.registry import Ctx, DataDependent, Prepare, Prepared, Varies, onnx_op
from hotfuse.ops import one_step

Act = Callable[[Tensor], Tensor]

# name -> (takes alpha, takes beta, default alpha, default beta, meaning)
_ACTIVATIONS: dict[str, tuple[bool, bool, float, float, Callable[[Tensor, float, float], Tensor]]] = {
    "relu": (False, False, 0, 0, lambda x, a, b: torch.relu(x)),
    "tanh": (False, False, 0, 0, lambda x, a, b: torch.tanh(x)),
    "sigmoid": (False, False, 0, 0, lambda x, a, b: torch.sigmoid(x)),
    "affine": (True, True, 1, 0, lambda x, a, b: x * a + b),
    "leakyrelu": (True, False, 0.01, 0, lambda x, a, b: F.leaky_relu(x, a)),
    "thresholdedrelu": (True, False, 1, 0, lambda x, a, b: F.threshold(x, a, 0.0)),
    "scaledtanh": (True, True, 1, 1, lambda x, a, b: a * torch.tanh(b * x)),
    "hardsigmoid": (True, True, 0.2, 0.5, lambda x, a, b: torch.clamp(x * a + b, 0, 1)),
    "elu": (True, False, 1, 0, lambda x, a, b: F.elu(x, a)),
    "softsign": (False, False, 0, 0, lambda x, a, b: F.softsign(x)),
    "softplus": (False, False, 0, 0, lambda x, a, b: F.softplus(x)),
}


def _activations(names: Sequence[str], alphas: Sequence[float] | None, betas: Sequence[float] | None) -> list[Act]:
    """Each activation takes the next alpha and beta if it has such a parameter, or its default."""
    a, b = list(alphas or ()), list(betas or ())

    def bind(name: str) -> Act:
        row = _ACTIVATIONS.get(name.lower())
        if row is None:
            raise ModelError(f"a recurrent layer's activation is {name!r}", because="ONNX defines no such one")
        alpha = a.pop(0) if row[0] and a else row[2]
        beta = b.pop(0) if row[1] and b else row[3]
        return lambda x: row[4](x, alpha, beta)

    return [bind(name) for name in names]


@dataclass(frozen=True, slots=True)
class _Layer:
    """One direction of one layer, as its cell sees it."""

    w: Tensor
    r: Tensor
    bias: Tensor | None
    acts: list[Act]
    plain: bool  # default activations, no clip: what torch's operators compute
    clip: float | None


def _steps(x: Tensor) -> int:
    """How often an explicit loop runs: only a plain number can be unrolled into a graph."""
    n: Any = x.shape[0]
    if not isinstance(n, int):
        raise DataDependent("a recurrent loop over a symbolic number of steps")
    return n


def _reversed(x: Tensor, lens: Tensor | None) -> Tensor:
    """Each sequence backwards, its padding left in place."""
    if lens is None:
        return x.flip(0)
    t = torch.arange(x.shape[0], device=x.device).unsqueeze(1)
    at = torch.where(t < lens, lens - 1 - t, t)
    return torch.gather(x, 0, at.unsqueeze(2).expand(-1, -1, x.shape[2]))


def _valid(x: Tensor, lens: Tensor) -> Tensor:
    """(time, batch, 1): which steps belong to a sequence."""
    return (torch.arange(x.shape[0], device=x.device).unsqueeze(1) < lens).unsqueeze(2)


def _last_valid(y: Tensor, lens: Tensor, h0: Tensor) -> Tensor:
    """The output at each sequence's last step; the initial state of an empty one."""
    at = (lens - 1).clamp(min=0).reshape(1, -1, 1).expand(1, -1, y.shape[2])
    return torch.where((lens > 0).unsqueeze(1), torch.gather(y, 0, at)[0], h0)


def _clipped(x: Tensor, layer: _Layer) -> Tensor:
    return x if layer.clip is None else x.clamp(-layer.clip, layer.clip)


def _reorder(t: Tensor | None, order: Sequence[int], n: int) -> Tensor | None:
    """Blocks of rows in torch's gate order instead of ONNX's."""
    if t is None:
        return None
    parts = t.chunk(n, 0)
    return torch.cat([parts[i] for i in order])


def _params(layer: _Layer, order: Sequence[int]) -> list[Tensor | None]:
    """The weights and biases as torch's operators take them."""
    gates = len(order)
    params = [_reorder(layer.w, order, gates), _reorder(layer.r, order, gates)]
    if layer.bias is not None:
        params += [_reorder(half, order, gates) for half in layer.bias.chunk(2, 0)]
    return params


def _fused(fn: Callable[..., Any], x: Tensor, hx: Any, params: Sequence[Tensor | None]) -> Any:
    return fn(x, hx, params, len(params) == 4, 1, 0.0, False, False, False)


_ORDER = {"RNN": (0,), "GRU": (1, 0, 2), "LSTM": (0, 2, 3, 1)}
"""Torch's order of the gates. ONNX has z, r, h for a GRU and i, o, f, c for an LSTM; torch r, z, n and i, f, g, o."""


_DEFAULTS = {"RNN": ("Tanh",), "GRU": ("Sigmoid", "Tanh"), "LSTM": ("Sigmoid", "Tanh", "Tanh")}


@dataclass(frozen=True, slots=True)
class _Ready:
    """The context of an operator whose weights are constants: they are here as torch's operators take them.

    Not an argument of the operator: those come from the file.
    """

    ctx: Ctx
    params: Sequence[list[Tensor | None]]
    """Per direction."""
    packed: Sequence[PackedLstm | None] = ()
    """The same of an LSTM in the library's own order; those of its directions that have it have no other."""

    @property
    def opset(self) -> int:
        return self.ctx.opset

    @property
    def n_outputs(self) -> int:
        return self.ctx.n_outputs

    @property
    def traced(self) -> bool:
        return self.ctx.traced

    def ints(self, t: Tensor) -> list[Any]:
        return self.ctx.ints(t)

    def tensor(self, numbers: Any, dtype: torch.dtype = torch.int64) -> Tensor:
        return self.ctx.tensor(numbers, dtype)

    def known(self, t: Tensor) -> bool:
        return self.ctx.known(t)


def _params_in(ctx: Ctx, d: int, layer: _Layer, kind: str) -> Sequence[Tensor | None]:
    return ctx.params[d] if isinstance(ctx, _Ready) and ctx.params[d] else _params(layer, _ORDER[kind])


def _prepare(kind: str) -> Prepare:
    """Weights that are constants are put into torch's order once, where torch's operator is what runs."""

    def prepare(ctx: Ctx, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Prepared | None:
        w, r, b = inputs[1], inputs[2], inputs[3] if len(inputs) > 3 else None
        if any(isinstance(t, Varies) for t in (w, r, b)) or any(t is not None for t in inputs[7:]):
            return None
        if attrs.get("input_forget"):
            return None
        given = [attrs.get(name) for name in ("activations", "activation_alpha", "activation_beta", "clip")]
        layers = [_layer(d, w, r, b, _DEFAULTS[kind], *given) for d in range(int(w.shape[0]))]
        if not all(layer.plain for layer in layers):
            return None
        if kind == "GRU" and not attrs.get("linear_before_reset"):  # torch's operator is none for it
            native = native_gru(w, r, b, attrs, partial(gru, ctx, **attrs))
            return None if native is None else Prepared(native, 0)
        params = [_params(layer, _ORDER[kind]) for layer in layers]
        in_order = [packed(ps) if kind == "LSTM" else None for ps in params]
        params = [ps if made is None else [] for ps, made in zip(params, in_order, strict=True)]
        fn = {"RNN": rnn, "GRU": gru, "LSTM": lstm}[kind]
        held = [*(t for ps in params for t in ps), *in_order]
        note = "" if kind != "LSTM" else NOT_PACKED if None in in_order else PACKED
        call: Callable[..., Any] = partial(fn, _Ready(ctx, params, in_order), **attrs)
        if kind == "LSTM" and (native := native_lstm(float_weights(w, r), b, attrs, call, int(w.shape[2]), int(r.shape[2]))):
            call = native
        if kind == "GRU":
            call = native_gru(w, r, b, attrs, call) or call
        return Prepared(call, sum(t.nbytes for t in held if t is not None), note)

    return prepare


def _loop(
    x: Tensor, states: tuple[Tensor, ...], lens: Tensor | None, step: Callable[..., tuple[Tensor, ...]]
) -> tuple[Tensor, ...]:
    """Run `step(x_t, *states)`; the first state is the output. A finished sequence keeps its states and outputs 0."""
    out: list[Tensor] = []
    valid = None if lens is None else _valid(x, lens)
    for t in range(_steps(x)):
        new = step(x[t], *states)
        if valid is None:
            out.append(new[0])
        else:
            new = tuple(torch.where(valid[t], a, b) for a, b in zip(new, states, strict=True))
            out.append(torch.where(valid[t], new[0], torch.zeros_like(new[0])))
        states = new
    y = torch.stack(out) if out else x.new_zeros([0, *states[0].shape])
    return (y, *states)


def _directions(
    x: Tensor,
    lens: Tensor | None,
    initial: Sequence[Tensor | None],
    direction: str,
    layout: int,
    hidden: Any,
    cell: Callable[..., tuple[Tensor, ...]],
) -> tuple[Tensor, ...]:
    """Lay the input out, run the cell once per direction, put the results together."""
    if direction not in ("forward", "reverse", "bidirectional"):
        raise ModelError(f"a recurrent layer's direction is {direction!r}", because="ONNX defines no such one")
    if layout:
        x = x.transpose(0, 1)
        initial = [None if h is None else h.transpose(0, 1) for h in initial]
    if lens is not None:
        lens = lens.to(torch.int64)
    got: list[tuple[Tensor, ...]] = []
    for d in range(2 if direction == "bidirectional" else 1):
        back = direction == "reverse" or d == 1
        start = [x.new_zeros([x.shape[1], hidden]) if h is None else h[d] for h in initial]
        if is_known(x.shape[0], 0):  # no step: the first states are the last ones; torch's operators refuse it
            got.append((x.new_zeros([0, *start[0].shape]), *start))
            continue
        y, *states = cell(d, _reversed(x, lens) if back else x, lens, *start)
        got.append((_reversed(y, lens) if back else y, *states))
    y = torch.stack([g[0] for g in got], 1)
    finals = [torch.stack([g[i] for g in got], 0) for i in range(1, len(got[0]))]
    if layout:
        return (y.permute(2, 0, 1, 3), *(f.transpose(0, 1) for f in finals))
    return (y, *finals)


def _layer(
    d: int,
    w: Tensor,
    r: Tensor,
    b: Tensor | None,
    default: Sequence[str],
    names: Sequence[str] | None,
    alphas: Sequence[float] | None,
    betas: Sequence[float] | None,
    clip: float | None,
) -> _Layer:
    given = list(names) if names else list(default) * int(w.shape[0])
    used = given[len(default) * d : len(default) * (d + 1)]
    acts = _activations(given, alphas, betas)[len(default) * d : len(default) * (d + 1)]
    plain = [n.lower() for n in used] == [n.lower() for n in default] and clip is None
    return _Layer(w[d], r[d], None if b is None else b[d], acts, plain, clip)


def _masked(y: Tensor, h: Tensor, lens: Tensor | None, h0: Tensor) -> tuple[Tensor, Tensor]:
    """A full-length result cut to the sequences' own lengths."""
    if lens is None:
        return y, h
    return torch.where(_valid(y, lens), y, torch.zeros_like(y)), _last_valid(y, lens, h0)


@onnx_op("RNN", prepare=_prepare("RNN"))
def rnn(
    ctx: Ctx,
    x: Tensor,
    w: Tensor,
    r: Tensor,
    b: Tensor | None = None,
    sequence_lens: Tensor | None = None,
    initial_h: Tensor | None = None,
    *,
    activation_alpha: Sequence[float] | None = None,
    activation_beta: Sequence[float] | None = None,
    activations: Sequence[str] | None = None,
    clip: float | None = None,
    direction: str = "forward",
    hidden_size: int | None = None,
    layout: int = 0,
    **_: Any,
) -> tuple[Tensor, ...]:
    def cell(d: int, xs: Tensor, lens: Tensor | None, h0: Tensor) -> tuple[Tensor, ...]:
        layer = _layer(d, w, r, b, _DEFAULTS["RNN"], activations, activation_alpha, activation_beta, clip)
        if layer.plain:
            y, h = _fused(torch.rnn_tanh, xs, h0.unsqueeze(0), _params_in(ctx, d, layer, "RNN"))
            return _masked(y, h[0], lens, h0)
        bias = None if layer.bias is None else torch.add(*layer.bias.chunk(2))

        def step(x_t: Tensor, h: Tensor) -> tuple[Tensor]:
            return (layer.acts[0](_clipped(x_t + F.linear(h, layer.r), layer)),)

        return _loop(F.linear(xs, layer.w, bias), (h0,), lens, step)

    return _directions(x, sequence_lens, [initial_h], direction, layout, r.shape[-1], cell)


@onnx_op("GRU", prepare=_prepare("GRU"))
def gru(
    ctx: Ctx,
    x: Tensor,
    w: Tensor,
    r: Tensor,
    b: Tensor | None = None,
    sequence_lens: Tensor | None = None,
    initial_h: Tensor | None = None,
    *,
    activation_alpha: Sequence[float] | None = None,
    activation_beta: Sequence[float] | None = None,
    activations: Sequence[str] | None = None,
    clip: float | None = None,
    direction: str = "forward",
    hidden_size: int | None = None,
    layout: int = 0,
    linear_before_reset: int = 0,
    **_: Any,
) -> tuple[Tensor, ...]:
    """torch's GRU resets after the product, which is ONNX's `linear_before_reset`."""

    def cell(d: int, xs: Tensor, lens: Tensor | None, h0: Tensor) -> tuple[Tensor, ...]:
        layer = _layer(d, w, r, b, _DEFAULTS["GRU"], activations, activation_alpha, activation_beta, clip)
        if layer.plain and linear_before_reset:
            y, h = _fused(torch.gru, xs, h0.unsqueeze(0), _params_in(ctx, d, layer, "GRU"))
            return _masked(y, h[0], lens, h0)
        f, g = layer.acts
        wb, rb = (None, None) if layer.bias is None else layer.bias.chunk(2)
        n = layer.r.shape[1]
        r_zr, r_h = layer.r[: 2 * n], layer.r[2 * n :]
        b_zr, b_h = (None, None) if rb is None else (rb[: 2 * n], rb[2 * n :])

        def step(x_t: Tensor, h: Tensor) -> tuple[Tensor]:
            z, reset = f(_clipped(x_t[:, : 2 * n] + F.linear(h, r_zr, b_zr), layer)).chunk(2, 1)
            if linear_before_reset:
                inner = reset * F.linear(h, r_h, b_h)
            else:
                inner = F.linear(reset * h, r_h, b_h)
            new = g(_clipped(x_t[:, 2 * n :] + inner, layer))
            return ((1 - z) * new + z * h,)

        return _loop(F.linear(xs, layer.w, wb), (h0,), lens, step)

    return _directions(x, sequence_lens, [initial_h], direction, layout, r.shape[-1], cell)


def _plain_lstm(ctx: Ctx, d: int, layer: _Layer, xs: Tensor, h0: Tensor, c0: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What torch's operator computes; a trace must show it whole."""
    if isinstance(ctx, _Ready) and (made := ctx.packed[d]) is not None and made.takes(xs):
        return made(xs, h0, c0)
    run = one_step.lstm if isinstance(ctx, _Ready) else torch.lstm
    y, h, c = _fused(run, xs, [h0.unsqueeze(0), c0.unsqueeze(0)], _params_in(ctx, d, layer, "LSTM"))
    return y, h[0], c[0]


prepare_lstm = _prepare("LSTM")


@onnx_op("LSTM", prepare=prepare_lstm)
def lstm(
    ctx: Ctx,
    x: Tensor,
    w: Tensor,
    r: Tensor,
    b: Tensor | None = None,
    sequence_lens: Tensor | None = None,
    initial_h: Tensor | None = None,
    initial_c: Tensor | None = None,
    p: Tensor | None = None,
    *,
    activation_alpha: Sequence[float] | None = None,
    activation_beta: Sequence[float] | None = None,
    activations: Sequence[str] | None = None,
    clip: float | None = None,
    direction: str = "forward",
    hidden_size: int | None = None,
    input_forget: int = 0,
    layout: int = 0,
    **_: Any,
) -> tuple[Tensor, ...]:
    """Peepholes are in the order i, o, f."""
    if isinstance(ctx, _Ready) and direction == "forward" and sequence_lens is None and not layout:
        made = ctx.packed[0]
        if made is not None and made.takes(x):  # as nearly always: nothing is looked at that was known before
            start = [x.new_zeros([x.shape[1], made.hidden]) if s is None else s[0] for s in (initial_h, initial_c)]
            y, h, c = made(x, *start)
            return y.unsqueeze(1), h.unsqueeze(0), c.unsqueeze(0)

    def cell(d: int, xs: Tensor, lens: Tensor | None, h0: Tensor, c0: Tensor) -> tuple[Tensor, ...]:
        layer = _layer(d, w, r, b, _DEFAULTS["LSTM"], activations, activation_alpha, activation_beta, clip)
        frozen_cell = lens is not None and ctx.n_outputs > 2
        if layer.plain and p is None and not input_forget and not frozen_cell:
            y, h, c = _plain_lstm(ctx, d, layer, xs, h0, c0)
            y, last = _masked(y, h, lens, h0)
            return y, last, c
        f, g, squash = layer.acts
        bias = None if layer.bias is None else torch.add(*layer.bias.chunk(2))
        peep = None if p is None else p[d].chunk(3)

        def step(x_t: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
            i, o, forget, new = (x_t + F.linear(h, layer.r)).chunk(4, 1)
            if peep is not None:
                i, forget = i + peep[0] * c, forget + peep[2] * c
            i = f(_clipped(i, layer))
            forget = 1 - i if input_forget else f(_clipped(forget, layer))
            c = forget * c + i * g(_clipped(new, layer))
            if peep is not None:
                o = o + peep[1] * c
            return f(_clipped(o, layer)) * squash(c), c

        return _loop(F.linear(xs, layer.w, bias), (h0, c0), lens, step)

    return _directions(x, sequence_lens, [initial_h, initial_c], direction, layout, r.shape[-1], cell)
