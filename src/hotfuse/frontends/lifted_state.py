"""A module whose buffers that calls write are arguments of its calls.

    def forward(self, x):                     forward(n, x):
        self.n += 1                     ->        n1 = n + 1            written back like any argument that a call writes
        return self.layer(x) * self.n             return layer(x) * n1

Counters, running statistics and key/value caches that a module keeps in buffers are state: a graph that had them as weights would
be for one call. As arguments they are read anew by every call, and what the call writes to them is a result (`base.state`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

Owner = tuple[dict[str, torch.Tensor | None], str]
"""The buffers of a module, and the name of one of them."""


class LiftedState(nn.Module):
    """Calls of `inner` with some of its buffers in front of the other arguments."""

    def __init__(self, inner: nn.Module, places: tuple[str, ...]) -> None:
        super().__init__()
        self.inner = inner
        self.places = places
        """Names of the buffers, as `named_buffers` has them."""

    def owners(self) -> list[Owner]:
        """Where they are; raises AttributeError or KeyError where there is none of such a name any more."""
        found: list[Owner] = []
        for place in self.places:
            path, _, name = place.rpartition(".")
            buffers = self.inner.get_submodule(path)._buffers
            if not isinstance(buffers[name], torch.Tensor):
                raise KeyError(name)
            found.append((buffers, name))
        return found

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """A call with those buffers, for tracing: the module has its own again behind it."""
        count = len(self.places)
        owners = self.owners()
        before = [buffers[name] for buffers, name in owners]
        try:
            for (buffers, name), given in zip(owners, args[:count], strict=True):
                buffers[name] = given
            return self.inner(*args[count:], **kwargs)
        finally:
            for (buffers, name), own in zip(owners, before, strict=True):
                buffers[name] = own

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own code, which has the buffers itself."""
        return self.inner(*args[len(self.places) :], **kwargs)


def writable_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Buffers of the host by their names that can be arguments: tensors like others, whose memory is nobody else's."""
    tensors = [*model.parameters(), *model.buffers()]
    memory = [t.untyped_storage().data_ptr() for t in tensors if t.layout is torch.strided and type(t) in _PLAIN]
    return {
        name: t
        for name, t in model.named_buffers()
        if type(t) in _PLAIN and t.layout is torch.strided and t.is_cpu and not t.is_inference() and not t.requires_grad
        and memory.count(t.untyped_storage().data_ptr()) == 1
    }  # fmt: skip


_PLAIN = (torch.Tensor, nn.Buffer)
