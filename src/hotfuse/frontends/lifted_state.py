"""A module whose buffers that calls write, and attributes that calls set, are arguments of its calls.

    def forward(self, x):                     forward(n, x):
        self.n += 1                     ->        n1 = n + 1            written back like any argument that a call writes
        return self.layer(x) * self.n             return layer(x) * n1

Counters, running statistics and key/value caches that a module keeps in buffers are state: a graph that had them as weights would
be for one call. As arguments they are read anew by every call, and what the call writes to them is a result
(`base.changed_arguments`).

    def forward(self, x):                     forward(kept, x):
        self.h = self.cell(x, self.h)   ->        kept.v0 = cell(x, kept.v0)      an object that the call changes
        return self.h                             return kept.v0

What a call puts into an attribute (a recurrent state, an average that is computed anew) is kept in an object beside the arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hotfuse.base.lazy_dataclass import dataclass

CHANGES = "the model's code changes "
"""How a refusal begins that tells of changed objects (`frontends.side_effects`): they may be attributes that can be lifted."""
OF_THE_PROCESS = ("the variable ", "a ", "what ")
"""How it goes on where what changes is no attribute."""
Owner = tuple[dict[str, torch.Tensor | None], str]
"""The buffers of a module, and the name of one of them."""
Keeper = tuple[dict[str, Any], str]
"""The attributes or buffers of a module, and the name of one of them."""


@dataclass(frozen=True, slots=True)
class StatePlaces:
    """What calls were seen to change: buffers that they write, and attributes that they set."""

    buffers: frozenset[str] = frozenset()
    attributes: frozenset[str] = frozenset()

    def joined(self, other: StatePlaces) -> StatePlaces:
        """Both; what is set is no longer where it was written."""
        attributes = self.attributes | other.attributes
        return StatePlaces((self.buffers | other.buffers) - attributes, attributes)

    def can_be_lifted(self, model: nn.Module) -> bool:
        """Whether a model has all of them, and holds what can be an argument there."""
        if not (self.buffers or self.attributes):
            return False
        held = attributes_of(model)
        return self.buffers <= writable_state(model).keys() and all(n in held and can_be_kept(held[n]) for n in self.attributes)


class KeptValues:
    """What modules keep in attributes from one call to the next: `v0`, `v1`, … in the order of their names."""


class LiftedState(nn.Module):
    """Calls of `inner` with some of its buffers, and an object with what is in some attributes, in front of the other arguments."""

    def __init__(self, inner: nn.Module, places: tuple[str, ...], attributes: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.inner = inner
        self.places = places
        """Names of the buffers, as `named_buffers` has them."""
        self.attributes = attributes
        """Names of the attributes, each behind that of its module."""

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

    def keepers(self) -> list[Keeper]:
        """Where the attributes are; raises AttributeError or KeyError where there is none of such a name any more."""
        found: list[Keeper] = []
        for place in self.attributes:
            path, _, name = place.rpartition(".")
            module = self.inner.get_submodule(path)
            owner = module.__dict__ if name in module.__dict__ else module._buffers
            if name not in owner:
                raise KeyError(name)
            found.append((owner, name))
        return found

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """A call with those buffers and values, for tracing: the module has its own again behind it."""
        count = len(self.places)
        owners, keepers = self.owners(), self.keepers()
        before = [owner[name] for owner, name in (*owners, *keepers)]
        kept, rest = (args[count], args[count + 1 :]) if keepers else (None, args[count:])
        try:
            for (buffers, name), given in zip(owners, args[:count], strict=True):
                buffers[name] = given
            for i, (owner, name) in enumerate(keepers):
                owner[name] = getattr(kept, f"v{i}")
            result = self.inner(*rest, **kwargs)
            self._keep(kept, keepers)
            return result
        finally:
            for (owner, name), own in zip((*owners, *keepers), before, strict=True):
                owner[name] = own

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own code, which has the buffers and attributes itself."""
        count = len(self.places)
        if not self.attributes:
            return self.inner(*args[count:], **kwargs)
        result = self.inner(*args[count + 1 :], **kwargs)
        self._keep(args[count], self.keepers())
        return result

    def _keep(self, kept: Any, keepers: list[Keeper]) -> None:
        """Have the object hold what a call left in the attributes."""
        for i, (owner, name) in enumerate(keepers):
            if owner[name] is not getattr(kept, f"v{i}"):
                setattr(kept, f"v{i}", owner[name])


def values_of(model: nn.Module, attributes: frozenset[str]) -> Mapping[int, set[str]]:
    """Names of attributes by the ids of the modules that have them: what these hold says nothing of a model's structure."""
    found: dict[int, set[str]] = {}
    modules = dict(model.named_modules())
    for place in attributes:
        path, _, name = place.rpartition(".")
        if path in modules:
            found.setdefault(id(modules[path]), set()).add(name)
    return found


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


def attributes_of(model: nn.Module) -> dict[str, Any]:
    """What its modules hold in attributes and buffers, by the names of the modules and their own."""
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        for owner in (module.__dict__, module._buffers):  # pyright: ignore[reportPrivateUsage]
            found |= {f"{path}.{name}" if path else name: value for name, value in owner.items() if name not in _INTERNAL}
    return found


def can_be_kept(value: Any) -> bool:
    """Whether an attribute's value can be part of an object that calls change: tensors, what stands for none, and counts."""
    if isinstance(value, tuple) and type(value) is tuple:
        return bool(value) and all(isinstance(v, torch.Tensor) and can_be_kept(v) for v in value)
    if isinstance(value, torch.Tensor):
        return type(value) in _PLAIN and value.layout is torch.strided and value.is_cpu and not value.requires_grad
    return value is None or (type(value) is int and value >= 0)


_INTERNAL = frozenset(nn.Module().__dict__)
_PLAIN = (torch.Tensor, nn.Buffer)
