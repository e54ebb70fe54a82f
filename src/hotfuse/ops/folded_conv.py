"""A convolution with constant weights and what follows it, as one call of the library kernel.

torch's `conv2d` on planes copies images and weights into another order in every call, and each operator behind it goes through
the image again. Here scales and shifts behind the convolution are part of its weights, images lie with channels innermost from
one convolution to the next, and an activation changes the result in place. Results differ by float error only. A signal (one axis)
is an image of one row here: the library's depthwise kernels for signals take up to six times as long as those for images.

Weights in oneDNN's own order (`torch.ops.mkldnn._convolution_pointwise`) lose where images are small, and cost 10 to 20 times as
much for sizes that want another order than the one they were packed for. Where they gain depends on the processor, so a file's
interpreter measures it (`frontends.onnx.conv_kernels`, decision 285); plans have weights as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from hotfuse.base.fixed_weights import made_of
from hotfuse.base.lazy_dataclass import dataclass

Activation = Literal["none", "relu", "hardswish"]


@dataclass(frozen=True, slots=True)
class Window:
    """How a convolution goes over an image."""

    stride: tuple[int, int]
    pads: tuple[int, int]
    dilation: tuple[int, int]
    groups: int


@dataclass(frozen=True, slots=True)
class Affine:
    """`scale * y + shift`, in float64: a number, or one for each channel."""

    scale: Tensor
    shift: Tensor

    def then(self, other: Affine) -> Affine:
        """First this, then the other."""
        return Affine(self.scale * other.scale, self.shift * other.scale + other.shift)


def affine(scale: Tensor | float = 1.0, shift: Tensor | float = 0.0) -> Affine:
    """From numbers of any type."""
    return Affine(torch.as_tensor(scale, dtype=torch.float64), torch.as_tensor(shift, dtype=torch.float64))


def is_floats(value: Any, dims: int) -> bool:
    """Whether it is an ordinary float32 tensor of so many dims."""
    return isinstance(value, Tensor) and value.dtype is torch.float32 and value.dim() == dims and value.layout is torch.strided


def by_channel(value: Any, dims: int = 4) -> Tensor | None:
    """A constant that is the same for all pixels of an image (`dims` 4; of a signal 3), in float64: a number, or a vector of
    channels; None for others."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return torch.tensor(float(value), dtype=torch.float64)
    if not isinstance(value, Tensor) or value.dtype is not torch.float32 or value.dim() > dims:
        return None
    if value.numel() == 1:
        return value.reshape(()).double()
    shape = (1,) * (dims - value.dim()) + tuple(value.shape)
    return value.reshape(-1).double() if value.dim() >= dims - 1 and shape[1] == value.numel() else None


def of_arithmetic(op: str, constant: Any, *, first: bool, dims: int = 4) -> Affine | None:
    """`add`, `sub`, `mul` or `div` of an image of so many dims and a constant; `first` where the image comes first."""
    number = by_channel(constant, dims)
    match op:
        case _ if number is None:
            return None
        case "add":
            return affine(shift=number)
        case "mul":
            return affine(number)
        case "sub" if first:
            return affine(shift=-number)
        case "div" if first:
            return affine(1.0 / number)
        case _:
            return None


def of_norm(constants: Sequence[Any], epsilon: float) -> Affine | None:
    """A batch norm that does not train: scale, shift, mean and variance."""
    if len(constants) != 4 or not all(is_floats(c, 1) for c in constants):
        return None
    scale, shift, mean, variance = (c.double() for c in constants)
    scale = scale / torch.sqrt(variance + epsilon)
    return Affine(scale, shift - mean * scale)


PREVIOUS = object()
"""In the arguments of a step: what the step before gave, or the image."""
Step = tuple[Any, tuple[Any, ...], dict[str, Any]]
"""An operator of torch, its arguments, its keywords."""


class FoldedConv:
    """`after(activation(before(conv(x))))` in one call; what it is not made for goes to `plain`."""

    __slots__ = ("_calls", "_made", "activation", "bytes", "dims", "plain", "steps", "window")

    def __init__(
        self, weight: Tensor, bias: Tensor | None, window: Window, before: Affine, activation: Activation, after: Affine,
        plain: Callable[[Tensor], Tensor],
    ) -> None:  # fmt: skip
        self.dims = weight.dim()
        """Of the images that it takes, which are float32."""
        given = (weight,) if bias is None else (weight, bias)
        numbers = tuple(t.expand(weight.shape[0]).numpy().tobytes() for t in (before.scale, before.shift))
        image = weight.unsqueeze(2) if self.dims == 3 else weight
        self._made = made_of(given, ("folded convolution", numbers), lambda: _folded(image, bias, before))
        new, shift = self._made.value
        self.window = window
        """Of images: a signal is one of one row."""
        self.activation: Activation = activation
        conv = (new, shift, window.stride, window.pads, window.dilation, window.groups)
        into, out_of = _as_image(window.groups) if self.dims == 3 else ((), ())
        self.steps: tuple[Step, ...] = (
            *into, (torch.ops.aten.conv2d.default, (PREVIOUS, *conv), {}), *_ACTIVATIONS[activation],
            *_ending(after, weight.shape[0]), *out_of,
        )  # fmt: skip
        """For images that it takes: all behind the convolution writes in place, since the result is nobody else's."""
        self._calls = [_call(step) for step in self.steps]
        self.plain = plain
        theirs = [t.untyped_storage().data_ptr() for t in given]
        kept = [t for t in (new, shift) if t is not None and t.untyped_storage().data_ptr() not in theirs]
        self.bytes = sum(t.untyped_storage().nbytes() for t in kept)

    @property
    def weight(self) -> Tensor:
        """With what was folded into it, as of an image."""
        return self._made.value[0]

    @property
    def shift(self) -> Tensor | None:
        """The bias with what was folded into it."""
        return self._made.value[1]

    @property
    def _place(self) -> int:
        return next(k for k, step in enumerate(self.steps) if step[0] is torch.ops.aten.conv2d.default)

    def behind(self, *, activated: bool) -> list[Callable[[Tensor], Tensor]]:
        """What follows the convolution of an image, which may change it in place; without the activation where that is done."""
        return self._calls[self._place + 1 + (len(_ACTIVATIONS[self.activation]) if activated else 0) :]

    def with_kernel(self, kernel: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """The same call with another function of the image in place of the library's convolution."""
        at = self._place
        calls = [*self._calls[:at], kernel, *self._calls[at + 1 :]]

        def run(x: Tensor) -> Tensor:
            if x.requires_grad or torch.is_autocast_enabled("cpu"):
                return self.plain(x)
            for call in calls:
                x = call(x)
            return x

        return run

    def __call__(self, x: Tensor) -> Tensor:
        """The result; where images lie with channels innermost, so does it."""
        if x.dim() != self.dims or x.dtype is not torch.float32 or x.requires_grad or torch.is_autocast_enabled("cpu"):
            return self.plain(x)
        for call in self._calls:
            x = call(x)
        return x


_ACTIVATIONS: dict[Activation, tuple[Step, ...]] = {
    "none": (),
    "relu": ((torch.ops.aten.relu_.default, (PREVIOUS,), {}),),
    "hardswish": ((torch.ops.aten.hardswish_.default, (PREVIOUS,), {}),),
}


def _as_image(groups: int) -> tuple[tuple[Step, ...], tuple[Step, ...]]:
    """What makes an image of a signal, and a signal of an image; in rows grouped convolutions take up to six times as long."""
    aten = torch.ops.aten
    rows: Step = (aten.contiguous.default, (PREVIOUS,), {"memory_format": torch.channels_last})
    into: Step = (aten.unsqueeze.default, (PREVIOUS, 2), {})
    return (into, rows) if groups > 1 else (into,), ((aten.squeeze.dim, (PREVIOUS, 2), {}),)


def _call(step: Step) -> Callable[[Tensor], Tensor]:
    """A step as a function of what was before."""
    fn, args, keywords = step
    op = fn._op  # without its Python wrapper
    if args[0] is PREVIOUS and PREVIOUS not in keywords.values():
        rest = args[1:]
        return lambda y: op(y, *rest, **keywords)
    return lambda y: op(*[y if a is PREVIOUS else a for a in args], **{k: y if a is PREVIOUS else a for k, a in keywords.items()})


def _folded(weight: Tensor, bias: Tensor | None, before: Affine) -> tuple[Tensor, Tensor | None]:
    """Weights, channels innermost, and shift of `before(conv(x))`; numbers that change are rounded once."""
    if bool((before.scale == 1.0).all()) and not bool(before.shift.any()):
        return weight.contiguous(memory_format=torch.channels_last), bias
    channels = weight.shape[0]
    scale = before.scale.expand(channels)
    start = torch.zeros(channels, dtype=torch.float64) if bias is None else bias.double()
    scaled = (weight.double() * scale.reshape(-1, 1, 1, 1)).float()
    return scaled.contiguous(memory_format=torch.channels_last), (start * scale + before.shift).float()


def _ending(after: Affine, channels: int) -> tuple[Step, ...]:
    """In place. A scale is one number here (`conv_chain`)."""
    scale, aten = float(after.scale), torch.ops.aten
    if not bool(after.shift.any()):
        return () if scale == 1.0 else ((aten.mul_.Scalar, (PREVIOUS, scale), {}),)
    shift = after.shift.float()
    shift = shift.reshape(1) if shift.numel() == 1 else shift.expand(channels).reshape(1, -1, 1, 1)
    return ((aten.add.out, (shift, PREVIOUS), {"alpha": scale, "out": PREVIOUS}),)
