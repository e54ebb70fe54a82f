"""A group of a graph on a device: its kernels, what came of their trial, and what of its results is compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import field
from typing import Any, NamedTuple

import torch

from hotfuse.analysis.attention import BOUNDED
from hotfuse.backends import registry
from hotfuse.backends.device_code import BuiltDeviceKernel
from hotfuse.backends.device_protocol import LaunchedKernel
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.compile.device.launch import GeneratedKernel
from hotfuse.compile.device.trial import DeviceTrial
from hotfuse.compile.device.tuning import LIBRARY
from hotfuse.compile.workers import wire
from hotfuse.ir.graph import Graph, Value, output_values
from hotfuse.lower.ops.views import shape_of
from hotfuse.ops.own.folded_norm import MEAN, SPREAD
from hotfuse.ops.schema import argument
from hotfuse.ops.table import packet


class DeviceCandidate(NamedTuple):
    """One of a group's kernels."""

    kernel: GeneratedKernel
    tiling: str
    work: Mapping[str, float]
    """`hpm.device.work`"""


@dataclass(slots=True)
class TriedGroup:
    """A group in its normal form, wherever it occurs."""

    graph: Graph
    strides: dict[str, tuple[int, ...]]
    ops: str
    futures: list[Future[wire.Message]] = field(default_factory=list[Future[wire.Message]])
    candidates: list[DeviceCandidate] = field(default_factory=list["DeviceCandidate"])
    because: str = ""
    trial: DeviceTrial | None = None
    chosen: int = LIBRARY
    """Which of the candidates serves."""
    tried: bool = False
    chosen_before: bool = False
    """Whether an earlier process has chosen."""
    uses: int = 0

    @property
    def kernel(self) -> GeneratedKernel | None:
        """What serves instead of the library."""
        return None if self.chosen == LIBRARY else self.candidates[self.chosen].kernel

    def timing(self, at: int) -> str:
        """What a candidate took alone."""
        assert self.trial is not None
        return f"{self.trial.us[at]:.1f} us ({self.candidates[at].tiling}), the library {self.trial.library_us:.1f} us"


@dataclass(slots=True)
class DevicePart:
    """A range of nodes, and its unit where it may have a kernel."""

    nodes: range
    key: str = ""


class LoadedLater:
    """Device code that is loaded when it is first launched: in its trial, on a background thread."""

    def __init__(self, built: BuiltDeviceKernel, device: torch.device) -> None:
        self._built, self._device = built, device
        self._function: LaunchedKernel | None = None

    def launch(self, pointers: list[int], stream: int) -> None:
        """Load if that is still to be done, and launch."""
        if self._function is None:
            self._function = registry.device_kernels().load(self._built, self._device)
        self._function.launch(pointers, stream)


def rounded_moments(piece: Graph) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Moments of rows in so few digits as the rows themselves have: those are rounded differently by every kernel."""
    of_rows = {v.name for n in piece.nodes if packet(n.op) in (MEAN, SPREAD) for v in n.outs}
    places = [i for i, v in enumerate(dict.fromkeys(output_values(piece))) if v.name in of_rows]
    if not places:
        return lambda outs: outs
    return lambda outs: [o.bfloat16() if i in places else o for i, o in enumerate(outs)]


def written_rows(piece: Graph, env: Mapping[str, Any]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Keeps only those rows of a packed attention's results that belong to a sequence; the contents of the others are undefined."""
    packed = next((n for n in piece.nodes if packet(n.op) == BOUNDED), None)
    offsets = None if packed is None else argument(packed, "offsets")
    if packed is None or not isinstance(offsets, Value) or offsets.name not in env:
        return lambda outs: outs
    live, rows = int(env[offsets.name][-1]), shape_of(packed.outs[0])[0]

    def cut(outs: Sequence[Any]) -> Sequence[Any]:
        return [o.narrow(list(o.shape).index(rows), 0, live) if rows in o.shape else o for o in outs]

    return cut
