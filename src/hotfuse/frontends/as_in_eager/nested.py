"""What torch's encoder does with nested tensors, written as a graph can hold it.

`nn.TransformerEncoder` (post-norm, `batch_first`, no gradients) looks at its padding mask. Where padding lies behind all
sequences it packs them into a nested tensor, runs its layers on that, and spreads the result with zeros where padding was. While a
model is traced, torch leaves that out. Padded rows of the graph would be other numbers than the model's own, and its proof would
refuse every capture. So the encoders of a model that is traced do the same in whole tensors:

    %front = all(%real[:, 1:] <= %real[:, :-1])                    whether padding lies behind all sequences
    %zero = zeros(1)[~any(%real)]                                  nested tensors of nothing raise; so does an index out of range
    %y = masked_fill(layers(%x), %front & ~%real, %zero)           zeros there, and what layers make of other masks

Padded rows that are zeros show nothing, so plans for live rows (`specialize.packing`) follow from it. What is out of range is a
fault: the model's own code answers, and raises in torch's words.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


def without_nested_tensors(modules: Iterable[nn.Module]) -> None:
    """Have the encoders of a model that is about to be traced do what they do in eager; they are nobody else's."""
    for module in modules:
        if isinstance(module, nn.TransformerEncoder) and type(module).forward is nn.TransformerEncoder.forward:
            module.__dict__["forward"] = functools.partial(_encoded, module)


def _encoded(
    encoder: nn.TransformerEncoder, src: torch.Tensor, mask: torch.Tensor | None = None,
    src_key_padding_mask: torch.Tensor | None = None, is_causal: bool | None = None,
) -> torch.Tensor:  # fmt: skip
    """As torch's own `forward`; `encoder` is left as it is."""
    forward = nn.TransformerEncoder.forward
    if src_key_padding_mask is None or mask is not None or not _nests(encoder, src):
        return forward(encoder, src, mask, src_key_padding_mask, is_causal)
    hidden = src_key_padding_mask
    real = hidden.logical_not()
    front = (real[:, 1:] <= real[:, :-1]).all()
    dropped = front & real.logical_not()
    nothing = real.any().logical_not()
    if hidden.dtype != torch.bool:
        nothing = nothing & (hidden == hidden[:1, :1]).all()  # numbers that a trial draws are not alike, and hide everything
        # any number but 0 hides a key wholly, in torch's fused layers too
        hidden = hidden.masked_fill(real.logical_not(), -math.inf)
    if src.device.type != "cpu":  # an index out of range would end the device's context there
        nothing = torch.zeros_like(nothing)
    layers = copy.copy(encoder)
    layers.__dict__["_modules"] = {**encoder._modules, "norm": None}  # pyright: ignore[reportPrivateUsage]
    zero = torch.zeros(1, dtype=src.dtype, device=src.device)[nothing.long().reshape(1)]
    output = forward(layers, src, None, hidden, is_causal).masked_fill(dropped.unsqueeze(-1), zero.reshape(()))
    norm: Any = encoder.norm
    return output if norm is None else norm(output)


def _nests(encoder: nn.TransformerEncoder, src: torch.Tensor) -> bool:
    """Whether eager packs such a call, if its mask allows it. Masks that it does not check stay as they are."""
    first: Any = encoder.layers[0]
    if not torch.backends.mha.get_fastpath_enabled() or not getattr(encoder, "use_nested_tensor", False) or src.dim() != 3:
        return False
    if not getattr(encoder, "mask_check", True) or first.training or torch.is_autocast_enabled():
        return False
    of = (first.self_attn, first.self_attn.out_proj, first.norm1, first.norm2, first.linear1, first.linear2)
    used = (src, *(p for m in of for p in m.parameters(recurse=False)))
    return not (torch.is_grad_enabled() and any(t.requires_grad for t in used))
