"""Which kernels won on a device, for the next process: the tiling of each group that the whole plan was fastest with.

Code is kept anyway, by workers. With the choice at hand the next process tries one kernel of a group instead of all, against the
library's as ever, and exchanges none. A choice rests on measurements, so it is believed for a day only.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import field

from hotfuse.backends import registry
from hotfuse.base.clock import is_recent
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.base.settings import Settings
from hotfuse.cache.address import Address, digest, versions
from hotfuse.cache.place import folder_of
from hotfuse.compile.kept import BELIEVED_S

STAYS = "library"
"""Instead of a tiling: the library's kernels were faster."""


@dataclass(slots=True)
class RememberedKernels:
    """What is kept of one graph on one kind of device."""

    address: Address
    settings: Settings
    tilings: dict[str, str] = field(default_factory=dict[str, str])
    """By group, as it was found."""

    def tiling(self, group: str) -> str:
        """What an earlier process chose; empty where none did."""
        return self.tilings.get(digest(group), "")

    def keep(self, chosen: Mapping[str, str]) -> None:
        """For the next process."""
        folder = folder_of(self.settings)
        tilings = {digest(group): tiling for group, tiling in chosen.items()}
        if folder is not None and tilings != self.tilings:
            folder.put(self.address, {"tilings": tilings, "at": int(time.time())})


def remembered_kernels(graph: str, machine: str, settings: Settings, *, tf32: bool) -> RememberedKernels:
    """What is known of a graph, as text, on a device of this name."""
    basis = {**versions(), "toolchain": registry.device_kernels().toolchain(), "machine": machine, "options": repr(tf32)}
    found = RememberedKernels(Address("device tuning", digest(graph), basis), settings)
    folder = folder_of(settings)
    kept = None if folder is None else folder.get(found.address)
    if kept is not None and is_recent(float(kept[0]["at"]), BELIEVED_S):
        found.tilings = {str(k): str(v) for k, v in kept[0]["tilings"].items()}
    return found
