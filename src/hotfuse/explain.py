"""`explain()`: what runs now and why, as one value with three faces: text, dict and HTML."""

from __future__ import annotations

import html
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hotfuse.base.faults import faults
from hotfuse.base.structure import describe
from hotfuse.base.trace import chrome_trace
from hotfuse.cache.folder import COUNTED
from hotfuse.cache.place import cache_stats
from hotfuse.compile.account import RUNS_A_CALL, SEEN
from hotfuse.compile.learn.strategy_history import history_of
from hotfuse.compile.request_context import context_of
from hotfuse.compile.workers.service import counters
from hotfuse.ir.dims import show as show_dim
from hotfuse.ir.text import show, show_type
from hotfuse.ops.table import lookup, packet
from hotfuse.runtime.engine import Engine
from hotfuse.runtime.observe.labels import input_labels
from hotfuse.runtime.observe.savings import bet_text, bets_of, inputs_of, inside_of, inside_text
from hotfuse.runtime.observe.summary import readable, summary
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
        return "\n".join(_lines(self._data)) if full else f"{self.summary()}\n{MORE}"

    def to_dict(self) -> dict[str, Any]:
        """Plain data: strings, numbers, lists and dicts."""
        return json.loads(json.dumps(self._data))

    def to_html(self, path: str | Path) -> Path:
        """Write one self-contained page."""
        target = Path(path)
        target.write_text(_page(self._data), encoding="utf-8")
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
            "limits": engine.limits(),
            "waits": [waits] if (waits := engine.waits()) else [],
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


def _audit(a: dict[str, Any]) -> str:
    """The same in a line."""
    of = "" if a["sizes"] is None else " of the version for sizes " + "x".join(map(str, a["sizes"]))
    high = "" if a["high"] is None else f"{a['high']:g}"
    return (f"audit{of}: {a['ratio']:g} of the time of {a['against']} (between {a['low']:g} and {high or 'anything'}), "
            f"{a['plan_us']:g} against {a['reference_us']:g} us in {a['rounds']} rounds, which cost {a['cost']:.2%} of the time")


def _own(own: dict[str, Any]) -> list[str]:
    """Who answers where tier 0 would, in a line, where anything is known."""
    if own["over_tier_0"] is None:
        return []
    said = f"the model's own code takes {own['over_tier_0']:g} of the time of tier 0"
    return [said + (", and answers" if own["answers"] else "")]


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


def _workers(counts: dict[str, Any]) -> list[str]:
    """How the processes that compile were started: a fork has what this process imported, a fresh interpreter imports it again."""
    said = [f"{n} {k.removeprefix('workers_').replace('_', ' ')}" for k, n in counts.items() if isinstance(n, int) and n]
    why = counts.get("not_forked_because", "")
    return [f"workers: {', '.join(said)}" + (f"; the newest is no fork: {why}" if why else "")] if said else []


def _gradients(g: dict[str, Any]) -> list[str]:
    """How calls that want gradients are served."""
    said = []
    if g.get("served"):
        said.append(f"gradients: {g['served']} calls in a plan whose results carry a graph; "
                    f"{g['backwards']} backward passes ran the model's own code again")
    if g.get("own"):
        said.append(f"gradients: {g['own']} calls in the model's own code, since backward passes follow")
    return said + [f"gradients: the model's own code serves calls that want them: {why}" for why in g.get("kept", ())]


def _own_recordings(found: dict[str, Any]) -> list[str]:
    """Which calls are answered by recordings of the model's own kernels, and why others are not."""
    if not found:
        return []
    off = f"; off: {found['off']}" if found["off"] else ""
    lines = [f"the model's own kernels, recorded: {found['replays']} replays of {found['recorded']} recordings, "
             f"{found['dropped']} let go, {readable(found['device_bytes'])} on the device{off}"]
    for kind in found["kinds"]:
        race, because = kind["race"], f": {kind['because']}" if kind["because"] else ""
        took = f", {race['us_after']:g} against {race['us_before']:g} us" if race else ""
        lines.append(f"  {kind['call']}: {kind['state']}{because}, {kind['calls']} calls{took}")
    return lines


def _background(b: dict[str, Any]) -> list[str]:
    """What background work used, what it can count on, and what that cost calls."""
    if not b:
        return []
    cost = (f"; on saturated cores they took {b['taken_s']:g} s, {b['throughput_lost']:.1%} of what calls would have had meanwhile"
            if b["taken_s"] else "")  # fmt: skip
    return [f"background work: {b['worker_cpu_s']:g} CPU seconds in workers, {b['jobs_cpu_s']:g} in this process; workers can "
            f"count on {b['share_granted']:.1%} of busy cores now, and may cost calls {b['share_most']:.0%} in the long run, "
            f"{b['share_peak']:.0%} at once{cost}; above the lowest priority "
            f"for {b['raised_s']:g} s, stopped {b['pauses']} times"]  # fmt: skip


def _concurrency(c: dict[str, Any]) -> list[str]:
    if not c.get("most"):
        return []
    more = ": more threads than cores" if c["oversubscribed"] else ""
    return [f"calls in flight: {c['calls_in_flight']:g} on average, {c['most']} at most, on {c['threads_each']} threads each and "
            f"{c['cores']} cores{more}"]  # fmt: skip


def _central(found: dict[str, Any]) -> list[str]:
    """What was exchanged with the fleet's database."""
    if not found:
        return []
    rows = ", ".join(f"{found[k]} {k}" for k in ("sent", "received", "waiting"))
    tried = found["exchanges"] + found["failures"]
    return [f"fleet's database {found['place']}: {found['state']}; rows {rows}; {found['failures']} of {tried} exchanges failed"]


def _cache(found: dict[str, Any]) -> list[str]:
    """What earlier processes left: how much of it was of use, what was refused, and why the rest was made anew."""
    if found["state"] != "on":
        return [f"cache: {found['state']}"]
    said = [f"{found[k]} {k.replace('_', ' ')}" for k in COUNTED if found[k]]
    lines = [f"cache: {', '.join(said) or 'not asked so far'}"]
    lines += [f"  bundle {b['path']}: {b['entries']} entries, made on {b.get('host')} at {b.get('at')} for {b.get('target')}"
              for b in found["bundles"]]
    if (shared := found["shared"]) is not None:
        said = ", ".join(f"{shared[k]} {k.replace('_', ' ')}" for k in ("written", "left_out", "failed"))
        lines.append(f"  shared cache {shared['url']}: {shared['state']}; {said}")
    lines += [f"  {n} {k}" for k, n in found["reasons"].items()]
    unnamed = [f"  captures are not kept: {found['unnamed']}"] if found["unnamed"] else []
    return lines + [f"  {t}" for t in found["told"]] + unnamed


def _trade(t: dict[str, Any]) -> str:
    """What a plan costs against the one before it."""
    (us, now_us), (uj, now_uj), (size, now_size) = t["us"], t["microjoules"], t["bytes"]
    return (f"{us:g} -> {now_us:g} us, {uj:g} -> {now_uj:g} uJ ({t['energy_source']}), {readable(size)} -> {readable(now_size)} "
            "beside the weights")


def _finding(f: dict[str, Any]) -> str:
    """What limits a partition, in a line."""
    said = f", predicted {f['predicted_us']:g}" if f["predicted_us"] else ""
    tried = ", ".join(f"{name} ({promise:.0%})" for name, promise in f["strategies"].items())
    return (f"partition {f['partition']} of tier {f['tier']}, {f['us']:g} us{said}, {f['share']:.0%} of the time: bound by "
            f"{f['bottleneck']} ({f['because']}, {f['source']}, rooflines {f['rooflines']}); "
            f"{f['microjoules']:g} uJ {f['energy_source']}, "
            f"{f['counters']['cycles']} cycles {f['counters_source']}{_traffic(f)}" + (f"; may help: {tried}" if tried else ""))


def _traffic(f: dict[str, Any]) -> str:
    return f", {f['gigabytes_per_s']:g} GB/s {f['traffic_source']}" if "gigabytes_per_s" in f else ""


def _lines(data: dict[str, Any]) -> list[str]:
    out = summary(data)
    for site in data["sites"]:
        out.append(f"call {site['call']}")
        for cache in site["dispatch"]:
            how = "native code" if cache["native"] else "Python"
            out.append(f"  dispatch: {cache['state']}, in {how}, {sum(h['calls'] for h in cache['hits'])} hits, "
                       f"{sum(cache['misses'].values())} misses")
            out += [f"    missed {n} times: {fact}" for fact, n in cache["misses"].items()]
        for i, plan in enumerate(site["plans"]):
            out.append(f"  plan {i}: tier {plan['tier']}, {plan['nodes']} nodes in {len(plan['partitions'])} partitions, "
                       f"{plan['calls']} calls" + (f", {us:g} us a call" if (us := plan.get("measured_us")) else ""))
            out.append("    inputs: " + ", ".join(plan["inputs"]))
            if called := [f"{name} is {label}" for name, label in plan.get("labels", {}).items()]:
                out.append(f"    in the model's code {', '.join(called)}")
            if plan["guards"]:
                out.append("    guards: " + ", ".join(plan["guards"]))
            alike: dict[str, list[int]] = {}
            for part in plan["partitions"]:
                top = ", ".join(f"{op} x{n}" for op, n in list(part["ops"].items())[:6])
                what = part["kernel"] or f"{part['nodes']} nodes, begins at {part['begins']}"
                alike.setdefault(f"({part['backend']}, {what}): {top}", []).append(part["index"])
            for text, indexes in alike.items():
                times = f" and {len(indexes) - 1} more like it" if len(indexes) > 1 else ""
                out.append(f"    partition {indexes[0]}{times} {text}")
            memory, counters, account = plan["memory"], plan["counters"], plan["account"]
            if memory["arena"] or memory["constants"]:
                peak = memory["eager_peak"]
                out.append(f"    memory: {readable(memory['arena'])} for intermediates"
                           + (f" (op by op they take {readable(peak)})" if peak is not None else "")
                           + f", {readable(memory['constants'])} of packed weights")
            if counters:
                out.append("    native: " + ", ".join(f"{n} {k.replace('_', ' ')}" for k, n in counters.items()))
            if account:
                out.append("    units: " + ", ".join(f"{n} {k.replace('_', ' ')}" for k, n in account["counts"].items() if n))
                out += [f"    {line}" for line in account["lines"] if line.startswith("partitioning:")][-8:]
                out += [f"    {line}" for line in account["lines"] if line.startswith(SEEN)]
                out += [f"    {line}" for line in plan.get("weights", ())]
                often = [line for line in account["lines"] if line.startswith(f"unit: {RUNS_A_CALL}")]
                out += [f"    {line.removeprefix('unit: ')}" for line in often][:8]
                fused = [line for line in account["lines"] if line.startswith(("unit: take ", "unit: leave "))]
                out += [f"    fusion: {line.removeprefix('unit: ')}" for line in fused if "measured" in line][:8]
            for version in plan.get("versions", ()):
                sizes = ", ".join(f"{n}={v}" for n, v in version["sizes"].items())
                out.append(f"    version for {sizes}: tier {version['tier']}, {version['partitions']} partitions, "
                           f"{version['share']:.0%} of the sampled calls")
            out += [f"    bet: {bet_text(b)}" for b in plan.get("bets", ())]
            out += [f"    decided inside kernels: {inside_text(i)}" for i in plan.get("inside", ())]
            again = [f"{i['input']} in {i['came_again']:.0%}" for i in plan.get("inputs_again", ()) if i["came_again"] > 0]
            if again:
                out.append(f"    inputs that came again: {', '.join(again)} of {plan['inputs_again'][0]['pairs']} pairs of calls")
            if "own_code" in plan:
                out += [f"    {line}" for line in _own(plan["own_code"])]
                out += [f"    {_audit(a)}" for a in plan["audits"]]
                out += [f"    not audited: {plan['not_audited']}"] if plan["not_audited"] else []
            if (trade := plan.get("trade")) is not None:
                out.append(f"    for {data['objective']}: {_trade(trade)}")
            out += [f"    {_finding(f)}" for f in plan.get("findings", ())]
            out += [f"    not higher: {what}: {why}" for what, why in plan.get("refused", {}).items()]
            out += [f"    note: {note}" for note in plan["notes"]]
        if site["pending"]:
            out.append("  a capture is under way")
        for reason in site["refused"]:
            out += ["  stays in the model's own code:"] + ["    " + line for line in reason.splitlines()]
    out += _own_recordings(data.get("own_recordings", {})) + _gradients(data.get("gradients", {}))
    for name, n in data["fallbacks"].items():
        out.append(f"fallback {name}: {n}")
    out += [f"constants not prepared: {why}" for why in data.get("unprepared", ())]
    out += [f"the model's own code: {line}" for line in data.get("own_code", ())]
    out += data["watching"].splitlines()
    out.append("idle time: " + ", ".join(f"{v}" if k == "state" else f"{k} {v}" for k, v in data["idle"].items()
                                         if v not in (None, "", 0)))
    out += _central(data.get("central", {}))
    out += (_cache(data["cache"]) if "cache" in data else []) + _workers(data["workers"])
    out += _background(data.get("background", {}))
    if spared := data.get("spared_a_core"):
        out.append(f"{spared} calls left one core of their team's to background work")
    out += _concurrency(data.get("concurrency", {}))
    out += [f"background work of the process failed {n} times: {what}" for what, n in data.get("background_faults", {}).items()]
    out.append("decisions:")
    for d in data["decisions"]:
        detail = ", ".join(f"{k}={v}" for k, v in d["evidence"].items() if v not in ("", None))
        out.append(f"  {d['at']:8.3f} s  {d['action']}: {d['why']}" + (f" ({detail})" if detail else ""))
    return out


_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; color: #1b1f24 }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2rem }
table { border-collapse: collapse; width: 100% } td, th { text-align: left; padding: .3rem .6rem; border-bottom: 1px solid #d8dee4;
vertical-align: top } pre { background: #f6f8fa; padding: 1rem; overflow: auto; font-size: 12px } .num { text-align: right }
"""


def _table(head: list[str], rows: list[list[Any]]) -> str:
    cells = "".join(f"<th>{html.escape(h)}</th>" for h in head)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(str(x))}</td>" for x in row) + "</tr>" for row in rows)
    return f"<table><tr>{cells}</tr>{body}</table>"


def _page(data: dict[str, Any]) -> str:
    parts = [f"<h1>{html.escape(data['model'])}</h1>", f"<pre>{html.escape(chr(10).join(summary(data)))}</pre>",
             _table(["counter", "value"], [[k, v] for k, v in data["counts"].items()])]
    for site in data["sites"]:
        parts.append(f"<h2>call {html.escape(site['call'])}</h2>")
        for plan in site["plans"]:
            rows = [[p["index"], p["backend"], p["nodes"], p["begins"], ", ".join(f"{k} x{n}" for k, n in p["ops"].items())]
                    for p in plan["partitions"]]
            parts.append(f"<p>tier {plan['tier']}, {plan['nodes']} nodes, {plan['calls']} calls; inputs "
                         f"{html.escape(', '.join(plan['inputs']))}; guards {html.escape(', '.join(plan['guards']) or 'none')}</p>")
            said = [*_own(plan["own_code"]), *map(_audit, plan["audits"])] if "own_code" in plan else []
            parts += [f"<p>{html.escape(line)}</p>" for line in said]
            parts.append(_table(["partition", "back end", "nodes", "begins at", "ops"], rows))
            parts.append(f"<details><summary>graph</summary><pre>{html.escape(plan['graph'])}</pre></details>")
        for reason in site["refused"]:
            parts.append(f"<p>stays in the model's own code:</p><pre>{html.escape(reason)}</pre>")
    if data["fallbacks"]:
        parts.append("<h2>fallbacks</h2>" + _table(["operator", "calls"], [[k, v] for k, v in data["fallbacks"].items()]))
    parts += [f"<p>constants not prepared: {html.escape(why)}</p>" for why in data.get("unprepared", ())]
    parts += [f"<p>the model's own code: {html.escape(line)}</p>" for line in data.get("own_code", ())]
    rows = [[f"{d['at']:.3f}", d["action"], d["why"], ", ".join(f"{k}={v}" for k, v in d["evidence"].items())]
            for d in data["decisions"]]
    parts.append("<h2>decisions</h2>" + _table(["seconds", "action", "why", "evidence"], rows))
    title = html.escape(f"hotfuse: {data['model']}")
    return (f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{title}</title><style>{_STYLE}</style></head>"
            f"<body>{''.join(parts)}</body></html>")
