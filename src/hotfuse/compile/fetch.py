"""Tier 1 in the serving process: have a graph's units compiled, check what came, and link its object code."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from hotfuse.base.errors import HotfuseError, InternalError
from hotfuse.base.settings import Settings
from hotfuse.compile.account import COUNTED, Account, add_up
from hotfuse.compile.answer_bodies import MadeKernel, RunsAnswer, received
from hotfuse.compile.compilation import Compilation
from hotfuse.compile.learn.strategy_history import history_of
from hotfuse.compile.parts import (
    KernelCode,
    NativeParts,
    RunParts,
    body_from_json,
    body_to_json,
    kernel_from,
    runs_from,
)
from hotfuse.compile.request_bodies import RunsRequest
from hotfuse.compile.request_context import context_of, settings_of
from hotfuse.compile.requests import Here
from hotfuse.compile.value import ANY_DEMAND, CompileProgress, Demand
from hotfuse.compile.workers.checked_json import decoded
from hotfuse.compile.workers.service import ask, sized
from hotfuse.lower.common.codec import to_json

Progress = Callable[[Callable[[], NativeParts], CompileProgress], None]
"""Told after each kernel but the last: what there is so far, on demand, and how far that is."""


def begin(text: str, sizes: Mapping[str, int], settings: Settings, demand: Demand = ANY_DEMAND) -> Compilation:
    """A graph to be compiled at the sizes of a real call, by the pool, or here when captures are inline."""
    executor = Here() if settings.capture == "inline" else sized(settings).pool
    place = context_of(settings)
    history = history_of(place.path)
    return Compilation(
        executor, text, dict(sizes), demand, timeout=settings.unit_timeout_s,
        asked=settings_of(settings),
        trust=history.trust, ledger=history.ledger, place=place, history=history,
    )  # fmt: skip


def finished(compilation: Compilation, on_progress: Progress | None = None) -> NativeParts:
    """Work a compilation off; raises InternalError where no part of the graph has a kernel. What was learned of promises is kept
    until it is asked for, to be written down when workers have nothing better to do.
    """
    known: dict[int, KernelCode] = {}
    reading = threading.Lock()  # an unfinished plan is made while the rest is compiled

    def parts() -> NativeParts:
        with reading:
            header, codes = compilation.message()
            for i in range(len(known), len(codes)):
                known[i] = kernel_from(decoded(MadeKernel, header["kernels"][i], "a kernel"), codes[i])
            made_of = tuple(known.values())
        if not made_of and not header["branches"]:
            raise InternalError("no part of the graph has a kernel", because="; ".join(header["notes"])[:500])
        made = (header, codes)
        return NativeParts(body_from_json(header), made_of, tuple(header["notes"]), compilation.demand, made)

    try:
        compilation.run(None if on_progress is None else lambda _message, progress: on_progress(parts, progress))
        return parts()
    except HotfuseError:
        compilation.remember()
        raise
    finally:
        add_up(compilation.graph.counts)


def account(compilation: Compilation) -> Account:
    """What became of its units so far."""
    counts = {k: compilation.graph.counts[k] for k in COUNTED}
    graph = compilation.graph
    return Account(graph.history(), tuple(compilation.describe()), counts, graph.predicted_us, compilation.seen,
                   compilation.grouping)


def fetch_runs(parts: NativeParts, sizes: Mapping[str, int], settings: Settings, *, unfinished: bool = False) -> RunParts:
    """Have the worker make runs of kernels. What has no kernel in an unfinished plan is left alone: most of it is being compiled,
    and trying all of it again for the sake of runs took as long as compiling it.
    """
    kernels = tuple({**(k.said or to_json(k.lowered)), "variants": k.variants and k.variants.to_json()} for k in parts.kernels)
    request, demand = RunsRequest(body_to_json(parts.body), dict(sizes), kernels, 0.0 if unfinished else None), parts.demand
    answer = ask(request, [], settings, demand.gain, tuple(demand.strategies), demand.focus)
    return runs_from(parts, *received(answer, RunsAnswer))
