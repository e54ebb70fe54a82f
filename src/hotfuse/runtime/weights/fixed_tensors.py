"""Tensors that a model's code reads from elsewhere: a table in a dict, in a class, among results that a function keeps.

They are none of its weights, so a graph has what they held when it was captured as constants.

    TABLES[8].mul_(2)          Positions.table.zero_()          table(8).add_(1)
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from hotfuse.native.model_guard import UNVERSIONED

MAX_TENSORS = 256
"""More are not looked at in every call."""


class FixedTensors:
    """A snapshot of such tensors."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._tensors = [t for t in tensors if t.layout is torch.strided and type(t) in (torch.Tensor, torch.nn.Parameter)]
        self._tensors = self._tensors[:MAX_TENSORS]
        self.matter: bool | None = None
        """Whether a graph holds such data at all; None until one was captured."""
        self._seen = self._now()

    def _now(self) -> list[tuple[int, int]]:
        return [(t.data_ptr(), UNVERSIONED if t.is_inference() else t._version) for t in self._tensors]

    def same(self) -> bool:
        """Whether they hold what they held; where nothing rests on that, they hold from here on what they hold."""
        if (now := self._now()) == self._seen:
            return True
        if self.matter is False:
            self._seen = now
        return self.matter is False

    def noted(self) -> list[tuple[torch.Tensor, int, int]]:
        """For the native sweep."""
        return [(t, *seen) for t, seen in zip(self._tensors, self._seen, strict=True)]
