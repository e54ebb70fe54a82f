"""What is bet on an entry's calls, how often it held, what it saved, and what kernels leave out without a bet: for `explain()` and
`hotfuse watch`."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from hotfuse.ir.dims import symbols
from hotfuse.ir.types import dims_of
from hotfuse.ops.own.experts import PRODUCT
from hotfuse.ops.table import packet
from hotfuse.profile.names import Names
from hotfuse.profile.records import Flag
from hotfuse.profile.snapshot import GraphSeen
from hotfuse.runtime.plan import BetCount
from hotfuse.runtime.samples import Signature
from hotfuse.runtime.site import Entry, Route
from hotfuse.specialize.table import SIZES, ZERO_ROWS, row, sizes_key


def bets_of(entry: Entry, hits: Sequence[tuple[Route, int]] = ()) -> list[dict[str, Any]]:
    """Every specialization of the plan that serves, the outermost first, then versions for sizes.

    Where the plan itself does not measure what a bet saves, it is what the race before showed, for every call in which it held.
    `hits`: which routes calls of the site took, as its inline caches count them; a version missed what the entry's plan got.
    """
    plans = (entry.plan, *entry.versions.values())
    found: list[dict[str, Any]] = []
    for layer in entry.layers:
        counts = [count() for p in plans for key, count in p.bets if key == layer.key]
        if layer.key.row == ZERO_ROWS:
            told = layer.values
            counts = [BetCount(*p.sides.of_calls(), values=told) for p in plans if p.sides is not None]
        held, missed = sum(c.held for c in counts), sum(c.missed for c in counts)
        won = next((entry.won[k] for k in layer.keys if k in entry.won), None)
        known = [c.saved_s for c in counts if c.saved_s is not None]
        saved = sum(known) if known else held * max(0.0, won.us_before - won.us_after) * 1e-6 if won is not None else None
        found.append({
            "row": layer.key.row, "of": layer.key.about, "values": sorted({v for c in counts for v in c.values}),
            "guard": row(layer.key.row).guard, "held": held, "missed": missed,
            "ms_saved": None if saved is None else round(saved * 1e3, 3), "measured": bool(known),
            "since_s": None if won is None else round(time.time() - won.at, 1),
        })  # fmt: skip
    taken = Counter[Signature | None]()
    for route, calls in hits:
        if route.entry is entry and (route.version is None or entry.versions.get(route.signature or ()) is route.version):
            taken[route.signature] += calls
    for signature in entry.versions:
        won, held = entry.won.get(sizes_key(signature)), taken[signature]
        sizes = ", ".join(f"{n}={size}" for n, size in zip(entry.symbols, signature, strict=True))
        found.append({
            "row": SIZES, "of": sizes, "values": _sized(entry, signature), "guard": row(SIZES).guard,
            "held": held, "missed": sum(taken.values()) - held,
            "ms_saved": None if won is None else round(held * max(0.0, won.us_before - won.us_after) * 1e-3, 3), "measured": False,
            "since_s": None if won is None else round(time.time() - won.at, 1),
        })  # fmt: skip
    return found


def _sized(entry: Entry, signature: Signature) -> list[str]:
    """Inputs whose sizes a version bets on."""
    bet = {n for n, _ in zip(entry.symbols, signature, strict=True)}
    return [v.name for v in entry.baseline.graph.inputs if any(symbols(d) & bet for d in dims_of(v.type))]


def inputs_of(entry: Entry) -> list[dict[str, Any]]:
    """What calls that follow each other have in common, input by input."""
    seen = entry.repeats
    return [{"input": v.name, "came_again": round(seen.share((i,)), 3), "pairs": seen.pairs}
            for i, v in enumerate(entry.baseline.graph.inputs)] if seen.pairs else []  # fmt: skip


def inside_of(entry: Entry, known: tuple[int, GraphSeen, Names] | None) -> list[dict[str, Any]]:
    """What kernels of the plan that serves leave out by the data of each call, with no bet to hold or to miss.

    How much that is, sampled calls tell: kernels count nothing, so it costs nothing.
    """
    from hotfuse.lower.cpu.attention.seen_keys import leaves_keys_out  # explaining is all that needs it here

    plan, found = entry.plan, list[dict[str, Any]]()
    if looking := sum(leaves_keys_out(kernel.text) for kernel in plan.kernels.stored.values()):
        found.append({"what": "hidden keys", "kernels": looking, "open": _open(known),
                      "says": "attention computes no keys that its mask hides from a panel of queries"})  # fmt: skip
    if products := sum(packet(n.op) == PRODUCT for n in plan.graph.nodes):
        found.append({"what": "experts", "kernels": products, "open": {},
                      "says": "rows are multiplied by the experts that they chose, and nothing by others"})  # fmt: skip
    return found


def _open(known: tuple[int, GraphSeen, Names] | None) -> dict[str, float]:
    """The part of each mask that sampled calls showed to hide nothing."""
    if known is None:
        return {}
    number, seen, names = known
    return {names.item_name(number, v.item): round(v.valid.mean, 3) for v in seen.values if v.flags & Flag.MASK and v.valid.n}


def inside_text(inside: dict[str, Any]) -> str:
    """One of them for a reader."""
    shown = ", ".join(f"{share:.0%} of {name}" for name, share in inside["open"].items())
    return f"{inside['what']} ({inside['kernels']}): {inside['says']}" + (f"; sampled calls leave {shown} open" if shown else "")


def input_lines(plan: dict[str, Any]) -> list[str]:
    """Every input of an explained plan for a reader: what the model's code calls it, how often it came again, what is bet on it."""
    again = {i["input"]: i for i in plan["inputs_again"]}
    lines: list[str] = []
    for text in plan["inputs"]:
        name, kind = text.removeprefix("%").split(": ", 1)
        label = f" ({plan['labels'][name]})" if name in plan["labels"] else ""
        bets = [b["row"] for b in plan["bets"] if name in b["values"]]
        said = [f"came again in {i['came_again']:.0%} of {i['pairs']} pairs of calls" for i in (again.get(name),) if i is not None]
        said += [f"bet on it: {', '.join(bets)}"] if bets else []
        lines.append(f"input {name}{label}, {kind}" + (f": {'; '.join(said)}" if said else ""))
    return lines


def bet_text(bet: dict[str, Any]) -> str:
    """One of them for a reader."""
    about = bet["of"] or ", ".join(bet["values"])
    said = f"{bet['row']}" + (f" ({about})" if about else "")
    if bet["held"] is not None:
        calls = bet["held"] + bet["missed"]
        said += f": held in {bet['held']} of {calls} calls" if calls else ": no calls yet"
    if bet["ms_saved"] is not None:
        said += f", saved {bet['ms_saved']:.1f} ms" + ("" if bet["measured"] else " by what its race showed")
    return said + (f", for {bet['since_s']:.0f} s" if bet["since_s"] is not None else "")
