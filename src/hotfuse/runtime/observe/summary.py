"""The first lines of `explain()`: what serves, how fast, what is tried, what is in the way, what it holds, what was noticed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from hotfuse.base.events import Why
from hotfuse.cache.place import SWITCHED_OFF
from hotfuse.profile.store_place import AWAY
from hotfuse.runtime.observe.obstacle_log import headline
from hotfuse.runtime.observe.savings import bet_text

MAX_IN_THE_WAY = MAX_BETS = 3
NOTICED = (Why.WEIGHTS_WRITTEN_UNSEEN, Why.WEIGHTS_CHANGED, Why.MODEL_CHANGED, Why.DRIFT, Why.REGRESSED, Why.SPEED_CHANGED,
           Why.RUN_FAILED, Why.BACKGROUND_FAILED, Why.STORE_UNUSABLE, Why.STORE_DAMAGED)  # fmt: skip
WHAT = {"module": "the model's own code", "0": "tier 0 (the captured graph on library kernels)", "1": "tier 1 (generated kernels)",
        "2": "tier 2 (generated kernels for what recurs)", "library": "tier 2 (library kernels for what recurs)"}  # fmt: skip


def summary(data: dict[str, Any]) -> list[str]:
    """About ten lines for a person, of an explanation's data."""
    c = data["counts"]
    plans = [p for s in data["sites"] for p in s["plans"]]
    lines = [
        f"{data['model']}: {c['calls']} calls, {c['graph_calls']} in a captured graph, {c['module_calls']} in the model's own code",
        f"serves now: {_serving(plans)}{_replayed(data)}; so far {_shares(c)}",
        f"speed: {speed(plans, data['decisions'])}",
        *(f"bet on: {line}" for line in _bets(plans)),
        f"being tried: {_trying(data['sites'])}",
        *(f"in the way: {line}" for line in _in_the_way(data)),
    ]
    if "held" in data:  # graphs of torch.compile hold nothing beside the model
        lines += [f"holds: {_held(data['held'])}", f"weights: {data['weights']}"]
    noticed = [*_noticed(data["decisions"], data.get("background_faults", {})), *_not_kept(data.get("cache", {})),
               *_not_sent(data.get("central", {}))]  # fmt: skip
    return [*lines, f"noticed: {'; '.join(noticed) or 'nothing'}"]


def _serving(plans: list[dict[str, Any]]) -> str:
    """What the captured graph with the most calls runs in."""
    if not plans:
        return WHAT["module"]
    most = max(plans, key=lambda p: p["calls"])
    if not most["calls"]:
        return f"{WHAT['module']} (no call has been in a captured graph so far)"
    versions = len(most.get("versions", ()))
    kind = "library" if most.get("on_library") else str(most["tier"])
    kind = "module" if most.get("own_code", {}).get("answers") else kind
    return WHAT[kind] + (f", and {versions} versions for sizes that recur" if versions else "")


def _replayed(data: dict[str, Any]) -> str:
    """Whether the model's own code is replayed, where there are recordings of it."""
    found = data.get("own_recordings") or {}
    kinds = sum(k["state"] == "replayed" for k in found.get("kinds", ()))
    return f" (of which {kinds} kinds of calls replay a recording of its kernels)" if kinds else ""


def _shares(c: dict[str, int]) -> str:
    counts = {"own code": c["module_calls"], **{f"tier {t}": c.get(f"tier{t}_calls", 0) for t in (0, 1, 2)}}
    total = max(1, sum(counts.values()))
    said = ", ".join(f"{name} {n / total:.0%}" for name, n in counts.items() if n)
    return f"{said} of the calls" if said else "no call"


def speed(plans: list[dict[str, Any]], decisions: list[dict[str, Any]]) -> str:
    """How many times faster than the model's own code, as live calls measure it; before their rounds tell anything, what the race
    measured."""
    begun = [a for p in plans for a in p.get("audits", ()) if a["rounds"] and p["tier"]]
    if audits := [a for a in begun if a["low"] and a["high"]]:
        a = max(audits, key=lambda a: a["rounds"])
        return (f"{1 / a['ratio']:.2f} times as fast as {a['against']} (between {1 / a['high']:.2f} and {1 / a['low']:.2f}, "
                f"{a['rounds']} rounds on live calls: {a['plan_us']:g} against {a['reference_us']:g} us)")
    for d in reversed(decisions):
        before, after = d["evidence"].get("us_before"), d["evidence"].get("us_after")
        if d["action"] == "deploy" and before and after:
            against = d["evidence"].get("against", "what it replaced")
            ratio = f"{before / after:.2f} times as fast as {against}"
            return f"{ratio}, by the race before it served ({after:g} against {before:g} us)"
    if begun:
        return f"not known yet: {max(a['rounds'] for a in begun)} rounds on live calls, too few to tell"
    return "not measured: no plan has replaced the model's own code or tier 0 yet"


def _bets(plans: list[dict[str, Any]]) -> list[str]:
    """What is bet on the calls of any plan, how often it held and what it saved; the first few."""
    found = [bet_text(b) for p in plans for b in p.get("bets", ())]
    more = [f"and {len(found) - MAX_BETS} more"] if len(found) > MAX_BETS else []
    return found[:MAX_BETS] + more


def _trying(sites: list[dict[str, Any]]) -> str:
    captures = sum(s["pending"] for s in sites)
    found = [p["trying"] for s in sites for p in s["plans"] if p.get("trying")]
    found += [f"{captures} captures" if captures > 1 else "a capture"] * bool(captures)
    return ", ".join(found) or "nothing"


def _in_the_way(data: dict[str, Any]) -> Iterable[str]:
    """What keeps calls in the model's own code, or a plan from being better; the first few."""
    sites, limits = data["sites"], data.get("limits", ())
    found = [*data.get("waits", ()), *data.get("breaks", ())]
    found += [f"the model's own code stays for some calls: {headline(reason)}" for s in sites for reason in s["refused"]]
    found += [f"the model's own code stays for some calls: {limit}" for limit in limits]
    if unlike := data.get("unlike"):
        found.append(f"calls that are unlike what was captured, in what code asks of them or logs, are the own code's: {unlike}")
    for plan in (p for s in sites for p in s["plans"]):
        found += [f"{what}: {headline(why)}" for what, why in plan.get("refused", {}).items()]
        if plan.get("findings"):
            f = plan["findings"][0]
            found.append(f"{f['share']:.0%} of the time is in a partition bound by {f['bottleneck']} ({f['because']})")
    unique = list(dict.fromkeys(found))
    more = [f"and {len(unique) - MAX_IN_THE_WAY} more"] if len(unique) > MAX_IN_THE_WAY else []
    return unique[:MAX_IN_THE_WAY] + more or ["nothing is known"]


def _held(held: dict[str, int]) -> str:
    names = {"weights": "of weights", "packed": "of packed copies", "arenas": "for intermediates", "samples": "of kept inputs"}
    return ", ".join(f"{readable(held[k])} {name}" for k, name in names.items())


def _noticed(decisions: list[dict[str, Any]], faults: dict[str, int]) -> list[str]:
    wanted = {w.value for w in NOTICED}
    counts = Counter(d["why"] for d in decisions if d["why"] in wanted)
    said = [f"{why} ({n} times)" if n > 1 else why for why, n in counts.items()]
    return [*said, *(f"{what} ({n} times)" for what, n in faults.items())]


def _not_kept(cache: dict[str, Any]) -> list[str]:
    """What of earlier processes was not believed, and why nothing is kept for later ones although the settings ask for it."""
    state = cache.get("state", "on")
    found = [] if state in ("on", SWITCHED_OFF) else [state]
    found += [cache["trouble"]] if cache.get("trouble") else []
    refused = {why: n for why, n in cache.get("reasons", {}).items() if why.startswith("refused: ")}
    found += [f"kept code was {why} ({n} times)" if n > 1 else f"kept code was {why}" for why, n in refused.items()]
    return [f"{what} (explain(full=True): cache)" for what in found]


def _not_sent(central: dict[str, Any]) -> list[str]:
    """That the fleet's database is away now, whichever model's log was told of it."""
    state = str(central.get("state", ""))
    return [f"{Why.DATABASE_AWAY.value} ({state.removeprefix(AWAY)})"] if state.startswith(AWAY) else []


def readable(n: int) -> str:
    """A number of bytes as people read it."""
    for unit in ("B", "KiB", "MiB"):
        if n < 1024:
            return f"{n:.3g} {unit}"
        n //= 1024
    return f"{n:.3g} GiB"
