"""The analyzer's memory: records in, statistics, alarms and predictions out. No processes here, so tests feed it directly."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import field
from typing import Any

import numpy as np

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.profile.predict import StreamPredictor, class_of
from hotfuse.profile.records import MAX_RANK, Flag, RecordKind, split
from hotfuse.profile.snapshot import (
    ControlSeen,
    GraphSeen,
    NoticedDrift,
    PartitionSeen,
    Prediction,
    Share,
    SignatureSeen,
    Snapshot,
    ValueSeen,
)
from hotfuse.profile.stats import Decayed, Fractions, Outcomes, RecentRange, Sizes
from hotfuse.profile.traffic_drift import Stream

MAX_SIGNATURES = 64
"""Signatures of one graph with statistics of their own; the rarest gives way."""
SHOWN = 8
"""Signatures in a snapshot."""
MAX_DRIFTS = 16
MAX_FORGOTTEN = 1024
"""Numbers of graphs that are gone and kept in mind: records of calls that were in them may still come."""


@dataclass(slots=True)
class _Value:
    flags: int = 0
    n: int = 0
    shape: tuple[int, ...] = ()
    zero: Fractions = field(default_factory=Fractions)
    zero_rows: Fractions = field(default_factory=Fractions)
    zero_cols: Fractions = field(default_factory=Fractions)
    constant_rows: Fractions = field(default_factory=Fractions)
    nonfinite: Fractions = field(default_factory=Fractions)
    valid: Fractions = field(default_factory=Fractions)
    valid_rows: Fractions = field(default_factory=Fractions)
    range: RecentRange = field(default_factory=RecentRange)
    absmax: RecentRange = field(default_factory=RecentRange)

    def add(self, r: Any) -> None:
        rows, cols = int(r["rows"]), int(r["cols"])
        n = rows * cols
        self.n += 1
        self.flags = int(r["flags"])
        self.shape = tuple(int(d) for d in r["shape"][: min(int(r["rank"]), MAX_RANK)])
        if not n:
            return
        self.zero.add(int(r["zeros"]) / n)
        self.nonfinite.add(int(r["nonfinite"]) / n)
        self.valid.add(int(r["valid"]) / n)
        self.zero_rows.add(int(r["zero_rows"]) / rows)
        self.constant_rows.add(int(r["constant_rows"]) / rows)
        self.valid_rows.add(int(r["valid_rows"]) / rows)
        self.zero_cols.add(int(r["zero_cols"]) / cols)
        self.range.add(float(r["min"]), float(r["max"]))
        self.absmax.add(0.0, float(r["absmax"]))

    def seen(self, item: int) -> ValueSeen:
        return ValueSeen(
            item, self.n, self.flags, self.shape, _share(self.zero), _share(self.zero_rows), _share(self.zero_cols),
            _share(self.constant_rows), _share(self.nonfinite), _share(self.valid), _share(self.valid_rows),
            self.range.low, self.range.high, max(0.0, self.absmax.high),
        )


@dataclass(slots=True)
class _TimeStats:
    ns: Sizes = field(default_factory=Sizes)
    bytes: int = -1
    flops: int = -1
    counters: tuple[Decayed, Decayed, Decayed] = field(default_factory=lambda: (Decayed(), Decayed(), Decayed()))

    def add(self, r: Any) -> None:
        self.ns.add(int(r["ns"]))
        self.bytes, self.flops = int(r["bytes"]), int(r["flops"])
        if int(r["flags"]) & Flag.COUNTERS:
            for counter, name in zip(self.counters, ("cycles", "instructions", "misses"), strict=True):
                counter.add(int(r[name]))

    def seen(self, item: int) -> PartitionSeen:
        ns, counted = self.ns, self.counters[0].n
        return PartitionSeen(
            item, ns.of.n, ns.of.mean, math.sqrt(ns.of.var), ns.quantile(0.1), ns.quantile(0.5), ns.quantile(0.9),
            self.bytes, self.flops, tuple(c.mean for c in self.counters) if counted else (),
        )


@dataclass(slots=True)
class _Signature:
    n: int = 0
    partitions: dict[int, _TimeStats] = field(default_factory=dict[int, _TimeStats])
    tiers: dict[int, Sizes] = field(default_factory=dict[int, Sizes])


@dataclass(slots=True)
class _GraphRecord:
    samples: int = 0
    signatures: dict[int, _Signature] = field(default_factory=dict[int, _Signature])
    shares: Outcomes = field(default_factory=lambda: Outcomes(MAX_SIGNATURES))
    values: dict[int, _Value] = field(default_factory=dict[int, _Value])
    controls: dict[int, tuple[bool, Outcomes]] = field(default_factory=dict[int, tuple[bool, Outcomes]])
    partitions: dict[int, _TimeStats] = field(default_factory=dict[int, _TimeStats])
    predictors: dict[tuple[str, int], StreamPredictor] = field(default_factory=dict[tuple[str, int], StreamPredictor])
    streams: dict[tuple[int, str], Stream] = field(default_factory=dict[tuple[int, str], Stream])
    drifts: deque[NoticedDrift] = field(default_factory=lambda: deque[NoticedDrift](maxlen=MAX_DRIFTS))

    def signature(self, number: int) -> _Signature:
        found = self.signatures.get(number)
        if found is None:
            if len(self.signatures) >= MAX_SIGNATURES:
                rarest = min(self.signatures, key=lambda s: self.shares.weights.get(s, 0.0))
                del self.signatures[rarest]
            found = self.signatures[number] = _Signature()
        return found

    def predict(self, kind: str, item: int, outcome: int) -> None:
        self.predictors.setdefault((kind, item), StreamPredictor()).see(outcome)


class AnalyzerMemory:
    """Everything the analyzer remembers."""

    def __init__(self) -> None:
        self.graphs: dict[int, _GraphRecord] = {}
        self.records = self.unknown = self.snapshots = 0
        self._fresh: list[NoticedDrift] = []
        self._forgotten: deque[int] = deque(maxlen=MAX_FORGOTTEN)

    def forget(self, graph: int) -> None:
        """A graph is gone: what was seen of it, and what still comes of it, is of no use."""
        self._forgotten.append(graph)
        self.graphs.pop(graph, None)

    def add(self, raw: np.ndarray[Any, Any]) -> list[NoticedDrift]:
        """Learn from raw records, oldest first; the changes they reveal."""
        self.records += len(raw)
        self._fresh = []
        parts = split(raw)
        self.unknown += len(raw) - sum(map(len, parts.values()))
        for kind, learn in (
            (RecordKind.VALUE, self._value), (RecordKind.CONTROL, self._control),
            (RecordKind.PARTITION, self._partition), (RecordKind.CALL, self._call),
        ):  # fmt: skip
            for r in parts.get(kind, ()):
                if (graph := self._graph(int(r["graph"]))) is not None:
                    learn(graph, int(r["item"]), r)
        return self._fresh

    def _graph(self, number: int) -> _GraphRecord | None:
        found = self.graphs.get(number)
        if found is None and number not in self._forgotten:
            found = self.graphs[number] = _GraphRecord()
        return found

    def _value(self, g: _GraphRecord, item: int, r: Any) -> None:
        flags, n = int(r["flags"]), int(r["rows"]) * int(r["cols"])
        g.values.setdefault(item, _Value()).add(r)
        if flags & Flag.INPUT:
            numel = math.prod(int(d) for d in r["shape"][: min(int(r["rank"]), MAX_RANK)])
            self._test(g, int(r["graph"]), item, "elements", numel)
        if not n:
            return
        zero = int(r["zeros"]) / n
        self._test(g, int(r["graph"]), item, "zero fraction", zero)
        self._test(g, int(r["graph"]), item, "magnitude", float(r["absmax"]))
        g.predict("sparsity", item, class_of(zero))
        if flags & Flag.MASK:
            valid = int(r["valid"]) / n
            self._test(g, int(r["graph"]), item, "valid fraction", valid)
            g.predict("valid", item, class_of(valid))

    def _control(self, g: _GraphRecord, item: int, r: Any) -> None:
        loop, outcome = bool(int(r["flags"]) & Flag.LOOP), int(r["outcome"])
        g.controls.setdefault(item, (loop, Outcomes()))[1].add(outcome)
        self._test(g, int(r["graph"]), item, "outcome", outcome)
        g.predict("trips" if loop else "branch", item, outcome)

    def _partition(self, g: _GraphRecord, item: int, r: Any) -> None:
        g.partitions.setdefault(item, _TimeStats()).add(r)
        g.signature(int(r["signature"])).partitions.setdefault(item, _TimeStats()).add(r)

    def _call(self, g: _GraphRecord, _item: int, r: Any) -> None:
        g.samples += 1
        number = int(r["signature"])
        g.shares.add(number)
        g.predict("shape", 0, number)
        signature = g.signature(number)
        signature.n += 1
        signature.tiers.setdefault(int(r["tier"]), Sizes()).add(int(r["ns"]))

    def _test(self, g: _GraphRecord, graph: int, item: int, metric: str, x: float) -> None:
        stream = g.streams.setdefault((item, metric), Stream())
        if alarm := stream.add(x, lambda: len(g.streams)):
            drift = NoticedDrift(graph, item, metric, alarm.distance, alarm.threshold, g.samples)
            g.drifts.append(drift)
            self._fresh.append(drift)

    def snapshot(self, torn: int = 0) -> Snapshot:
        """What is known now."""
        self.snapshots += 1
        return Snapshot(self.snapshots, self.records, torn, self.unknown, {n: _seen(n, g) for n, g in self.graphs.items()})


def _seen(number: int, g: _GraphRecord) -> GraphSeen:
    signatures: list[SignatureSeen] = []
    for s, share in g.shares.shares():
        if (one := g.signatures.get(s)) is not None and len(signatures) < SHOWN:
            calls = tuple(_TimeStats(ns).seen(tier) for tier, ns in sorted(one.tiers.items()))
            times = tuple(t.seen(i) for i, t in one.partitions.items())
            signatures.append(SignatureSeen(s, one.n, share, times, calls))
    guesses = ((kind, item, p.guess()) for (kind, item), p in g.predictors.items())
    return GraphSeen(
        number, g.samples, tuple(signatures), tuple(v.seen(i) for i, v in g.values.items()),
        tuple(ControlSeen(i, o.n, loop, tuple(o.shares()[:SHOWN])) for i, (loop, o) in g.controls.items()),
        tuple(t.seen(i) for i, t in g.partitions.items()),
        tuple(Prediction(k, i, p.value, p.accuracy, p.n, p.by) for k, i, p in guesses if p is not None),
        tuple(g.drifts), len(g.streams),
    )  # fmt: skip


def _share(f: Fractions) -> Share:
    return Share(f.of.n, f.of.mean, math.sqrt(f.of.var))
