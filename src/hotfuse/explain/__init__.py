"""`explain()`: what runs now and why, as one value with three faces: text, dict and HTML."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hotfuse.base.faults import faults
from hotfuse.base.structure import describe
from hotfuse.base.trace import chrome_trace
from hotfuse.cache.place import cache_stats
from hotfuse.compile.learn.strategy_history import history_of
from hotfuse.compile.request_context import context_of
from hotfuse.compile.workers.service import counters
from hotfuse.explain import full_text, html_page
from hotfuse.ir.dims import show as show_dim
from hotfuse.ir.text import show, show_type
from hotfuse.ops.table import lookup, packet
from hotfuse.runtime.engine import Engine
from hotfuse.runtime.observe.labels import input_labels
from hotfuse.runtime.observe.savings import bets_of, inputs_of, inside_of
from hotfuse.runtime.observe.summary import summary
from hotfuse.runtime.plan import Plan
from hotfuse.runtime.samples import Signature
from hotfuse.runtime.serve.dispatch import InlineCache
from hotfuse.runtime.site import Entry, Route, Site
from hotfuse.runtime.tierup.audit import Audit
from hotfuse.stages import kernels_of, measured_us

WORKERS = ("workers_forked", "workers_spawned", "forks_failed", "forks_stalled", "forks_crashed", "not_forked_because")
"""Of the compile service's counts, what says how its processes came to be."""

BACKGROUND = ("worker_cpu_s", "jobs_cpu_s", "share_most", "share_peak", "share_granted", "raised_s", "taken_s",
              "throughput_lost", "pauses")  # fmt: skip
"""What background work of the process used, could count on, and took from calls."""


MORE = "more: explain(full=True), hotfuse explain --full, or to_html(path), for partitions, kernels, guards and every decision"
"""The last line of a summary."""


class Explanation:
    """A snapshot of an engine; it does not change while the engine goes on."""

    def __init__(self, data: dict[str, Any], *, full: bool = False) -> None:
        self._data, self._full = data, full

    def summary(self) -> str:
        """About ten lines: what serves, how fast, what is being tried, what is in the way, what it holds, what was noticed."""
        return "\n".join(summary(self._data))

    def text(self, *, full: bool) -> str:
        """The summary and where the rest is; with `full` the rest too: partitions, kernels, guards and every decision."""
        return "\n".join(full_text.lines(self._data)) if full else f"{self.summary()}\n{MORE}"

    def to_dict(self) -> dict[str, Any]:
        """Plain data: strings, numbers, lists and dicts."""
        return json.loads(json.dumps(self._data))

    def to_html(self, path: str | Path) -> Path:
        """Write one self-contained page."""
        target = Path(path)
        target.write_text(html_page.page(self._data), encoding="utf-8")
        return target

    def to_trace(self, path: str | Path) -> Path:
        """Write calls, compiles and swaps on one time axis, for Chrome's or Perfetto's trace viewer."""
        target = Path(path)
        trace = chrome_trace(self._data["model"], self._data["spans"], self._data["decisions"])
        target.write_text(json.dumps(trace), encoding="utf-8")
        return target

    def __str__(self) -> str:
        return self.text(full=self._full)


def explain_engine(
    engine: Engine, fallbacks: dict[str, int] | None = None, unprepared: Sequence[str] = (), *,
    full: bool = False, own_code: Sequence[str] = (),
) -> Explanation:
    """What an engine runs now and every decision that led there; `unprepared`: what of a file could not be computed ahead; `full`:
    whether its text goes on behind the summary; `own_code`: what is to be known of calls in the model's own code.
    """
    sites: list[dict[str, Any]] = []
    for site in list(engine.sites.values()):
        refused = [g.refused for g in site.groups.values() if g.refused]
        ledger = history_of(context_of(engine.settings).path).ledger
        plans = [{**_explain_entry(engine, site, e), "findings": [f.to_dict(ledger) for f in e.findings]} for e in site.entries]
        for plan in plans:
            _measured(plan)
        sites.append({"call": describe(site.spec), "plans": plans, "refused": refused,
                      "dispatch": [_explain_cache(c) for c in site.caches.values()],
                      "pending": any(g.pending for g in site.groups.values())})
    return Explanation(
        {
            "model": engine.model.name,
            "objective": engine.settings.objective,
            "exact": engine.settings.exact,
            "counts": engine.counts(),
            "held": memory_of([e for s in list(engine.sites.values()) for e in s.entries]),
            "weights": engine.plans.originals.text() + (watch.beyond if (watch := engine.plans.watch) is not None else ""),
            "sites": sites,
            "limits": engine.limits.texts(),
            "unlike": engine.log.counts.get("calls_unlike_captured", 0),
            "waits": [waits] if (waits := engine.limits.waits()) else [],
            "fallbacks": dict(fallbacks or {}),
            "unprepared": list(unprepared),
            "own_code": list(own_code),
            "watching": engine.call_sampler.text(),
            "own_recordings": engine.own_recordings.explain() if engine.own_recordings is not None else {},
            "gradients": engine.gradients.explain([e.links for s in list(engine.sites.values()) for e in s.entries]),
            "idle": engine.recorder.idle(),
            "central": engine.recorder.central(),
            "background_faults": faults.counts(),
            "cache": {**cache_stats(engine.settings), "unnamed": getattr(engine.model, "unnamed", "")},
            "workers": {k: v for k, v in counters().items() if k in WORKERS},
            "background": {k: v for k, v in counters().items() if k in BACKGROUND},
            "spared_a_core": engine.log.counts.get("calls_that_spared_a_core", 0),
            "on_one_thread": engine.teams.on_one_thread,
            "concurrency": engine.concurrency.to_dict(),
            "decisions": [d.to_dict() for d in engine.log.decisions],
            "spans": [s.to_dict() for s in engine.log.spans],
        },
        full=full,
    )


def memory_of(entries: Sequence[Entry]) -> dict[str, int]:
    """Bytes: the weights that captured graphs read, what compiled plans hold beside them, and kept inputs."""
    held: list[object] = [w for e in entries for w in e.weights.values()]  # constants of four bits are no tensors
    tensors = [w for w in held if isinstance(w, torch.Tensor) and w.layout is torch.strided]
    weights = {w.data_ptr(): w.numel() * w.element_size() for w in tensors}
    plans = {id(p): p.memory for e in entries for p in (e.plan, *e.versions.values())}.values()
    return {"weights": sum(weights.values()), "packed": sum(m.constants for m in plans), "arenas": sum(m.arena for m in plans),
            "samples": sum(e.samples.bytes for e in entries)}


def _explain_cache(cache: InlineCache[Route]) -> dict[str, Any]:
    """A site's inline cache: how many kinds of calls it tells apart, how often each came, and what turned calls away."""
    hits = [{"calls": n, "sizes": None if r.signature is None else list(r.signature)} for r, n in cache.hits()]
    return {"state": cache.state.value, "native": cache.table.native, "why_not_native": cache.reason, "hits": hits,
            "misses": cache.misses()}


def _explain_entry(engine: Engine, site: Site, entry: Entry) -> dict[str, Any]:
    """A captured graph: the plan that serves it, its specialized versions, and why there is nothing better."""
    shares = entry.samples.shares()
    versions = [
        {"sizes": {n: v for n, v in zip(entry.symbols, s, strict=True)}, "share": round(shares.get(s, 0.0), 3),
         "partitions": len(p.partitioning.parts), "tier": p.tier}
        for s, p in entry.versions.items()
    ]
    measured = measured_us(entry)
    return {
        **explain_plan(entry.plan, entry.calls, entry.notes),
        "facts": entry.guards(),
        "versions": versions,
        "weights": entry.weighed.lines(() if entry.plan.account is None else entry.plan.account.seen.pieces),
        "refused": {str(k): why for k, why in entry.refused.items()},
        "trying": ", meanwhile ".join(str(key) for key in (entry.trying, entry.meanwhile) if key is not None),
        "on_library": any(layer.on_library for layer in entry.layers),
        "bets": bets_of(entry, [hit for cache in list(site.caches.values()) for hit in cache.hits()]),
        "inputs_again": inputs_of(entry),
        "inside": inside_of(entry, engine.call_sampler.known(entry.key)),
        "labels": input_labels(engine.model.call, site.spec, entry.baseline.graph.inputs),
        "own_code": _own_code(entry),
        "audits": [a for v, audit in list(entry.audits.items()) if (a := _explain_audit(entry, v, audit)) is not None],
        "not_audited": entry.not_audited,
        "trade": None if entry.trade is None else entry.trade.to_dict(),
        "measured_us": None if measured is None else round(measured, 1),
        "samples": {"taken": entry.samples.taken, "bytes": entry.samples.bytes,
                    "passed_over": entry.samples.passed_over},
    }


def _own_code(entry: Entry) -> dict[str, Any]:
    """Whether the model's own code answers, and how it compares with the graph on library kernels."""
    ratio = entry.own_ratio
    return {"answers": entry.own and entry.plan is entry.baseline, "over_tier_0": None if ratio is None else round(ratio, 3),
            "racing": entry.contest is not None}


def _explain_audit(entry: Entry, version: Signature | None, audit: Audit) -> dict[str, Any] | None:
    """A deployed plan against what it replaced, as live calls compare the two."""
    found = audit.state()
    if found is None:
        return None
    reference = entry.reference(version)
    against = "the model's own code" if reference is None else f"tier {reference.tier}"
    return {"sizes": None if version is None else list(version), "against": against, **found.to_dict()}


def _measured(plan: dict[str, Any]) -> None:
    """Put what sampled calls showed of partitions next to what was predicted of them."""
    found = {f["partition"]: f for f in plan["findings"] if f["tier"] == plan["tier"]}
    for part in plan["partitions"]:
        seen = found.get(part["index"])
        part["measured_us"] = None if seen is None else seen["us"]
        if seen is not None and part["predicted_us"] is None:
            part["predicted_us"] = seen["predicted_us"]


def explain_plan(plan: Plan, calls: int, notes: tuple[str, ...] = ()) -> dict[str, Any]:
    """A plan as plain data."""
    parts: list[dict[str, Any]] = []
    for part in plan.partitioning.parts:
        nodes = plan.graph.nodes[part.first : part.last]
        ops = Counter(packet(n.op) for n in nodes)
        access = Counter(lookup(n.op).access.value for n in nodes)
        made = plan.artifacts[part.index]
        parts.append(
            {
                "index": part.index,
                "nodes": len(nodes),
                "begins": part.cut.value,
                "device": part.device,
                "backend": made.backend,
                "kernel": made.source if made.backend != "library" else "",
                "predicted_us": made.predicted_us,
                "ops": dict(ops.most_common()),
                "access": dict(access.most_common()),
            }
        )
    return {
        "tier": plan.tier,
        "calls": calls,
        "inputs": [f"%{v.name}: {show_type(v.type)}" for v in plan.graph.inputs],
        "guards": [show_dim(g) for g in plan.graph.guards],
        "nodes": len(plan.graph.nodes),
        "params": len(plan.graph.params),
        "partitions": parts,
        "kernels": [k.to_dict() for k in kernels_of(plan)],
        "notes": [*notes, *plan.notes, *(why for a in plan.artifacts for why in a.failures())],
        "memory": {"arena": plan.memory.arena, "constants": plan.memory.constants, "eager_peak": plan.memory.eager_peak},
        "counters": plan.counters(),
        "account": None if plan.account is None else {**plan.account.to_dict(), "lines": plan.account.lines()},
        "graph": show(plan.graph),
    }
