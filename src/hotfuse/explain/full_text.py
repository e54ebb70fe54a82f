"""`explain(full=True)`: everything that is known of a served model, as lines."""

from __future__ import annotations

from typing import Any

from hotfuse.cache.folder import COUNTED
from hotfuse.compile.account import RUNS_A_CALL, SEEN
from hotfuse.runtime.observe.savings import bet_text, inside_text
from hotfuse.runtime.observe.summary import readable, summary


def lines(data: dict[str, Any]) -> list[str]:
    """Everything, from the summary to every decision."""
    out = summary(data)
    for site in data["sites"]:
        out.append(f"call {site['call']}")
        for cache in site["dispatch"]:
            how = "native code" if cache["native"] else "Python"
            out.append(f"  dispatch: {cache['state']}, in {how}, {sum(h['calls'] for h in cache['hits'])} hits, "
                       f"{sum(cache['misses'].values())} misses")
            out += [f"    missed {n} times: {fact}" for fact, n in cache["misses"].items()]
        for i, plan in enumerate(site["plans"]):
            out += _plan(i, plan, data["objective"])
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
    if crowded := data.get("on_one_thread"):
        out.append(f"{crowded} calls of library kernels had one thread: other programs or workers have cores of their team")
    out += _concurrency(data.get("concurrency", {}))
    out += [f"background work of the process failed {n} times: {what}" for what, n in data.get("background_faults", {}).items()]
    out.append("decisions:")
    for d in data["decisions"]:
        detail = ", ".join(f"{k}={v}" for k, v in d["evidence"].items() if v not in ("", None))
        out.append(f"  {d['at']:8.3f} s  {d['action']}: {d['why']}" + (f" ({detail})" if detail else ""))
    return out


def _plan(number: int, plan: dict[str, Any], objective: str) -> list[str]:
    """One plan: its partitions, memory, units, bets, and what limits it."""
    out: list[str] = []
    out.append(f"  plan {number}: tier {plan['tier']}, {plan['nodes']} nodes in {len(plan['partitions'])} partitions, "
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
        out += [f"    {line}" for line in own_code_lines(plan["own_code"])]
        out += [f"    {audit_line(a)}" for a in plan["audits"]]
        out += [f"    not audited: {plan['not_audited']}"] if plan["not_audited"] else []
    if (trade := plan.get("trade")) is not None:
        out.append(f"    for {objective}: {_trade(trade)}")
    out += [f"    {_finding(f)}" for f in plan.get("findings", ())]
    out += [f"    not higher: {what}: {why}" for what, why in plan.get("refused", {}).items()]
    out += [f"    note: {note}" for note in plan["notes"]]
    return out


def audit_line(a: dict[str, Any]) -> str:
    """How an audit stands, in a line."""
    of = "" if a["sizes"] is None else " of the version for sizes " + "x".join(map(str, a["sizes"]))
    high = "" if a["high"] is None else f"{a['high']:g}"
    return (f"audit{of}: {a['ratio']:g} of the time of {a['against']} (between {a['low']:g} and {high or 'anything'}), "
            f"{a['plan_us']:g} against {a['reference_us']:g} us in {a['rounds']} rounds, which cost {a['cost']:.2%} of the time")


def own_code_lines(own: dict[str, Any]) -> list[str]:
    """Who answers where tier 0 would, in a line, where anything is known."""
    if own["over_tier_0"] is None:
        return []
    said = f"the model's own code takes {own['over_tier_0']:g} of the time of tier 0"
    return [said + (", and answers" if own["answers"] else "")]


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
