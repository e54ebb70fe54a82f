"""Memory that static caches keep (`runtime.serve.device_caches`): who counts references to some memory leaves theirs out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

uses_of_memory: Callable[[int], int] = torch._C._storage_Use_Count  # pyright: ignore
_kept: dict[int, int] = {}


def kept_by_static_caches(memory: int) -> int:
    """References to some memory that are a static cache's; the storage as Python sees it is one object, that the caller has too."""
    return max(0, _kept.get(memory, 0) - 1)


class KeptMemory:
    """The memory of some tensors for as long as this lives."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._memory = [t.untyped_storage() for t in tensors]
        self._ours = {_address(m): uses_of_memory(_address(m)) for m in self._memory}
        _kept.update(self._ours)

    def unread(self) -> bool:
        """Whether nobody else refers to it."""
        return all(uses_of_memory(at) <= n for at, n in self._ours.items())

    def __del__(self) -> None:
        for at in getattr(self, "_ours", ()):
            _kept.pop(at, None)


def _address(memory: torch.UntypedStorage) -> int:
    return memory._cdata  # pyright: ignore[reportPrivateUsage]
