"""What the analyzer knows at a moment: immutable, plain, and small enough to send whole.

It travels as JSON, so reading it runs no code. Things are named by the numbers of `profile.names`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.profile.names import Names


@dataclass(frozen=True, slots=True)
class Share:
    """A fraction over the recent samples."""

    n: int
    mean: float
    std: float


@dataclass(frozen=True, slots=True)
class ValueSeen:
    """A value over the recent samples."""

    item: int
    n: int
    flags: int
    shape: tuple[int, ...]
    """Of the last sample."""
    zero: Share
    zero_rows: Share
    zero_cols: Share
    constant_rows: Share
    nonfinite: Share
    valid: Share
    valid_rows: Share
    min: float
    max: float
    absmax: float


@dataclass(frozen=True, slots=True)
class ControlSeen:
    """A control node: how often which branch, or how many trips; the most frequent first, shares adding up to 1."""

    item: int
    n: int
    loop: bool
    outcomes: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class PartitionSeen:
    """A partition's time in nanoseconds, and what it moves and computes by its graph (-1: unknown)."""

    item: int
    n: int
    mean: float
    std: float
    p10: float
    p50: float
    p90: float
    bytes: int
    flops: int
    counters: tuple[float, ...]
    """Mean cycles, instructions and cache misses where the system has them; else empty."""


@dataclass(frozen=True, slots=True)
class SignatureSeen:
    """Calls of one set of input shapes."""

    signature: int
    n: int
    share: float
    partitions: tuple[PartitionSeen, ...]
    calls: tuple[PartitionSeen, ...]
    """Whole calls: one per tier, whose number is `item`."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """What is expected next of a kind of event, and how far such predictions came true of late."""

    kind: str
    item: int
    value: int
    accuracy: float
    n: int
    by: str


@dataclass(frozen=True, slots=True)
class NoticedDrift:
    """A change that was noticed: of what, how far, what could still have been chance."""

    graph: int
    item: int
    metric: str
    distance: float
    threshold: float
    sample: int
    """The graph's samples so far."""


@dataclass(frozen=True, slots=True)
class GraphSeen:
    """One graph over the recent samples."""

    graph: int
    samples: int
    signatures: tuple[SignatureSeen, ...]
    """The most frequent first, as many as fit."""
    values: tuple[ValueSeen, ...]
    controls: tuple[ControlSeen, ...]
    partitions: tuple[PartitionSeen, ...]
    predictions: tuple[Prediction, ...]
    drifts: tuple[NoticedDrift, ...]
    """The latest, oldest first."""
    streams: int
    """How many are tested for drift."""

    def by_name(self, names: Names) -> dict[str, ControlSeen]:
        """What was seen of control nodes, by their names."""
        return {names.item_name(self.graph, c.item): c for c in self.controls}


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything that was seen."""

    number: int
    records: int
    torn: int
    unknown: int
    """Records of no known kind."""
    graphs: Mapping[int, GraphSeen]

    def predictable(self, kind: str, id: tuple[int, int]) -> tuple[int, float, int] | None:
        """(expected value, accuracy of such predictions, how many were scored) for (graph, item).

        Kinds: `branch` and `trips` of a control node, `shape` (item 0: which signature), `sparsity` and `valid` of a value
        (classes of `profile.predict`). None where nothing was seen.
        """
        graph = self.graphs.get(id[0])
        for p in graph.predictions if graph else ():
            if p.kind == kind and p.item == id[1]:
                return p.value, p.accuracy, p.n
        return None


EMPTY = Snapshot(0, 0, 0, 0, {})


def to_json(s: Snapshot) -> bytes:
    """As bytes on one line."""
    return json.dumps(asdict(s), separators=(",", ":")).encode()


def from_json(data: bytes) -> Snapshot:
    """The inverse."""
    d = json.loads(data)
    graphs = {int(k): _graph(g) for k, g in d["graphs"].items()}
    return Snapshot(d["number"], d["records"], d["torn"], d["unknown"], graphs)


def drift_from(d: dict[str, Any]) -> NoticedDrift:
    """A change from its JSON object."""
    return NoticedDrift(**d)


def _graph(d: dict[str, Any]) -> GraphSeen:
    return GraphSeen(
        d["graph"], d["samples"], tuple(map(_signature, d["signatures"])), tuple(map(_value, d["values"])),
        tuple(ControlSeen(c["item"], c["n"], c["loop"], tuple((int(o), w) for o, w in c["outcomes"])) for c in d["controls"]),
        tuple(map(_partition, d["partitions"])), tuple(Prediction(**p) for p in d["predictions"]),
        tuple(map(drift_from, d["drifts"])), d["streams"],
    )


def _signature(d: dict[str, Any]) -> SignatureSeen:
    return SignatureSeen(
        d["signature"], d["n"], d["share"], tuple(map(_partition, d["partitions"])), tuple(map(_partition, d["calls"])),
    )


def _partition(d: dict[str, Any]) -> PartitionSeen:
    fields: dict[str, Any] = {**d, "counters": tuple(d["counters"])}
    return PartitionSeen(**fields)


_SHARES = ("zero", "zero_rows", "zero_cols", "constant_rows", "nonfinite", "valid", "valid_rows")


def _value(d: dict[str, Any]) -> ValueSeen:
    fields: dict[str, Any] = {**d, "shape": tuple(d["shape"]), **{n: Share(**d[n]) for n in _SHARES}}
    return ValueSeen(**fields)
