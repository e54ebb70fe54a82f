"""A mechanism, the switch that takes it away, and a probe that can tell."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from hotfuse import Settings


@dataclass(slots=True)
class World:
    """What a switch may turn: settings, and attributes that come back afterwards."""

    patch: pytest.MonkeyPatch
    changes: dict[str, object] = field(default_factory=dict[str, object])
    turned: object = None
    """The switch that was turned, so that rows which share one may share a run."""

    def settings(self, **own: object) -> Settings:
        """A probe's settings, with the switch turned where it is one of them."""
        return Settings(capture="inline", hot_calls=2).with_(**{**own, **self.changes})


Probe = Callable[[World], float]
Switch = Callable[[World], None]


@dataclass(frozen=True, slots=True)
class Row:
    """With the mechanism the probe counts something; without it, nothing."""

    item: str
    """The part of the runtime: one of `PARTS`."""
    mechanism: str
    probe: Probe
    off: Switch

    def __str__(self) -> str:
        return f"{self.item}: {self.mechanism}"


PARTS = ("instrumentation", "analyzer", "partitions", "policy", "guards", "compiling", "proof", "hot swap", "explaining")


def setting(**changes: object) -> Switch:
    """A switch that is a setting."""

    def off(world: World) -> None:
        world.changes.update(changes)

    return off


def replaced(where: object, name: str, by: object) -> Switch:
    """A switch that puts something that does nothing, or a constant that never bites, where the mechanism was."""

    def off(world: World) -> None:
        world.patch.setattr(where, name, by)

    return off
