# pyright: reportPrivateUsage=false
# Torch shows the keys of a tensor, and where its C++ part lies, only through private names.
"""Where torch keeps what native code reads of a tensor: found on live tensors whose answers torch itself gives, never assumed."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import nn

from hotfuse.base.errors import InternalError
from hotfuse.base.lazy_dataclass import dataclass

_C = torch._C
_OBJECT_WORDS = torch.Tensor.__basicsize__ // 8
_IMPL_WORDS = 24
"""How much of the C++ part is searched; it has never been smaller."""


@dataclass(frozen=True, slots=True)
class Places:
    """Where things lie, in bytes."""

    type_at: int
    """The type, in the Python object."""
    impl_at: int
    """The word that points at the C++ part, in the Python object; its address is what torch's C interface takes."""
    keys_at: int
    """The set of dispatch keys, in the C++ part."""


@dataclass(frozen=True, slots=True)
class DispatchKeys:
    """Which dispatch keys a plain tensor of a device may have, and which it must have."""

    may: int
    must: int


def _words(address: int, count: int) -> list[int]:
    return list((ctypes.c_uint64 * count).from_address(address))


def keys_of(t: torch.Tensor) -> int:
    """The dispatch keys of a tensor, as the word that holds them."""
    return int(_C._dispatch_keys(t).raw_repr())


def plain_keys(device: str = "cpu") -> DispatchKeys:
    """The keys of ordinary tensors on a device: with all that autograd adds, and of inference mode, which has none of it."""
    with torch.inference_mode(False):
        usual = keys_of(torch.empty(0, device=device))
    with torch.inference_mode():
        least = keys_of(torch.empty(0, device=device))
    return DispatchKeys(usual | least, usual & least)


def specimens() -> list[torch.Tensor]:
    """Tensors that differ in everything that is searched for or asked."""
    with torch.inference_mode(False), torch.no_grad():
        base = torch.arange(24, dtype=torch.float32).reshape(2, 3, 4)
        numbers = torch.ones(3, dtype=torch.complex64)
        plain = [
            base, base.permute(2, 0, 1), base[:, 1:, ::2], base[0, 0, 0], torch.empty(0, 3), torch.ones(5, dtype=torch.int64),
            torch.ones(1, 1, dtype=torch.bool), base.expand(5, 2, 3, 4), torch.ones((1,) * 7, dtype=torch.float16),
            nn.Parameter(base.clone()), nn.Parameter(torch.ones(2), requires_grad=False), torch.ones(2, 0, 3).mT,
            torch.ones(3, 3).contiguous(memory_format=torch.preserve_format).t(), numbers,
        ]
        odd = [numbers.conj(), numbers.conj().imag, torch._efficientzerotensor((3,)), torch.empty(3, device="meta"),
               torch.eye(3).to_sparse()]
    with torch.inference_mode():
        plain.append(torch.ones(2, 2))
    return plain + odd


def _only(candidates: Sequence[set[int]], what: str) -> int:
    common = set[int].intersection(*candidates)
    if not common:
        raise InternalError(f"no word of a tensor holds {what}")
    return 8 * min(common)


def find_places(tensors: Sequence[torch.Tensor]) -> Places:
    """Where torch put what native code needs, by comparing memory with torch's own answers."""
    objects = [_words(id(t), _OBJECT_WORDS) for t in tensors]
    impls = [_words(t._cdata, _IMPL_WORDS) for t in tensors]

    def holding(memories: list[list[int]], wanted: list[int]) -> list[set[int]]:
        return [{i for i, w in enumerate(m) if w == x} for m, x in zip(memories, wanted, strict=True)]

    return Places(
        _only(holding(objects, [id(type(t)) for t in tensors]), "its type"),
        _only(holding(objects, [t._cdata for t in tensors]), "the address of its C++ part"),
        _only(holding(impls, [keys_of(t) for t in tensors]), "its dispatch keys"),
    )
