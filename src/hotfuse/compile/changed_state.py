"""What calls of a model change of the model itself, for later processes: they need no capture that fails first.

    class      name without what they change -> buffers and attributes that they change

A model's name would differ from call to call with what it keeps in attributes. So entries are found by the model's class, and one
is for a model that has the same name without these very attributes.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import nn

from hotfuse.base.settings import Settings
from hotfuse.cache.address import Address, digest, versions
from hotfuse.cache.folder import Folder
from hotfuse.cache.place import folder_of
from hotfuse.frontends.lifted_state import StatePlaces, values_of
from hotfuse.frontends.naming import Unnamed, structure_name

MAX_MODELS = 16
"""Models of one class that are remembered."""


def remember_state(model: nn.Module, state: StatePlaces, settings: Settings) -> None:
    """A graph with this state among its arguments was captured."""
    folder, name = folder_of(settings), _name(model, state)
    if folder is None or not name:
        return
    kept = {name: state, **{n: s for n, s in _remembered(folder, model) if n != name}}
    rows = [{"name": n, "buffers": sorted(s.buffers), "attributes": sorted(s.attributes)} for n, s in kept.items()]
    folder.put(_address(model), {"models": rows[:MAX_MODELS]})


def remembered_state(model: Any, settings: Settings) -> StatePlaces | None:
    """What calls of an earlier process changed of the same model; None where nothing is known of it."""
    folder = folder_of(settings) if isinstance(model, nn.Module) else None
    if folder is None:
        return None
    names = cache(lambda state: _name(model, state))  # a name takes a walk over the model, and models of a class change the same
    found = (s for name, s in _remembered(folder, model) if s.can_be_lifted(model) and names(s) == name)
    return next(found, None)


def _remembered(folder: Folder, model: nn.Module) -> list[tuple[str, StatePlaces]]:
    found = folder.peek(_address(model))
    if found is None:
        return []
    return [(str(m["name"]), StatePlaces(frozenset(map(str, m["buffers"])), frozenset(map(str, m["attributes"]))))
            for m in found[0]["models"]]  # fmt: skip


def _name(model: nn.Module, state: StatePlaces) -> str:
    """Its name without the attributes; empty where it has none."""
    try:
        return structure_name(model, values_of(model, state.attributes))
    except Unnamed:
        return ""


def _address(model: nn.Module) -> Address:
    kind = type(model)
    return Address("state", digest(kind.__module__, kind.__qualname__), dict(versions()))
