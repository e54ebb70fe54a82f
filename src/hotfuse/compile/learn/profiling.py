"""What partitions took while they served, made sense of in a worker: what limits each, what was predicted, rows for the model.

The request of kind `profile`. Its measurements correct the model as trials do (`compile.learn.learned`), and train the next
one; times that vary much do only the former.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from hotfuse.analysis.resources import work_of
from hotfuse.base.errors import HotfuseError
from hotfuse.compile import request_context
from hotfuse.compile.answer_bodies import Answered, PartitionDiagnosis, ProfileAnswer
from hotfuse.compile.host import Host, this_host
from hotfuse.compile.learn.learned import MIN_US, Notes, notes
from hotfuse.compile.request_bodies import PartitionTimes, ProfileRequest
from hotfuse.hpm import calibrate as rows
from hotfuse.hpm.bottleneck import Profile, diagnose
from hotfuse.hpm.model import CostPredictor
from hotfuse.hpm.work import Candidate
from hotfuse.ir.graph import Graph, Kind
from hotfuse.ir.text import parse

MIN_SAMPLES = 4
"""Samples of a partition before its time is believed."""


def handle(request: ProfileRequest) -> Answered:
    """Diagnoses of partitions, in their order."""
    kept = notes()
    if kept is None:
        return ProfileAnswer((), 0), []
    threads = request_context.threads()
    host = kept.host if kept.host.at.threads == threads else this_host(kept.store, threads, measure_peaks=False)
    found = tuple(_of(part, kept, host) for part in request.parts)
    return ProfileAnswer(found, 0 if kept.ahead is None else kept.ahead.predictor.model.version), []


def _of(part: PartitionTimes, kept: Notes, host: Host) -> PartitionDiagnosis:
    graph, sizes, us = parse(part.graph), part.sizes, part.us
    work = work_of(graph, sizes)
    flops, moved = work.flops, work.moved if part.library else work.traffic
    if any(n.kind is Kind.CONTROL for n in graph.nodes):  # the graph does not say which way calls go
        flops, moved = (None if part.flops < 0 else part.flops), (None if part.bytes < 0 else part.bytes)
    known = flops is not None and moved is not None
    balance = part.balance
    profile = Profile(
        us * 1e-6 if known else 0.0, float(flops or 0), float(moved or 0), float(work.working_set or moved or 1),
        busy_s=(us * 1e-6, us * 1e-6 * (2 * balance - 1)) if balance < 1 else (), calls=len(graph.nodes) if part.library else 1,
    )  # fmt: skip
    seen = diagnose(profile, host.at)
    return PartitionDiagnosis(
        seen.bottleneck.value, seen.because, round(seen.overhead, 3), {k: round(v, 3) for k, v in seen.utilization.items()},
        seen.source, host.at.measured, host.at.hz, _predicted(part, graph, sizes, kept, host),
    )  # fmt: skip


def _predicted(
    part: PartitionTimes, graph: Graph, sizes: Mapping[str, int], kept: Notes, host: Host
) -> float | None:
    """What the corrected model says, before this time corrects it."""
    core, us = None if part.library else host.core, part.us
    try:
        table = kept.row_cache.rows([Candidate(graph, sizes, core, host.at.threads)])
    except (HotfuseError, KeyError, IndexError):  # sizes that only data shows
        return None
    ahead = kept.ahead
    said = None
    if ahead is not None:
        predictor = ahead.predictor
        if host is not kept.host:
            predictor = CostPredictor(predictor.model, host.at, kept.row_cache, predictor.correction)
        said = round(float(predictor.of_rows(table).seconds[0]) * 1e6, 2)
    if kept.place.record and us > MIN_US and part.n >= MIN_SAMPLES:
        key = hashlib.sha256(part.graph.encode()).hexdigest()[:16]
        name = rows.kernel_name(key, sizes, core, host.at.threads)
        kept.wrote(rows.measurements([name], table, [us * 1e-6], [part.noise], host.at.threads, "serve"))
    return said
