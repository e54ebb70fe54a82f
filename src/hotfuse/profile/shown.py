"""A snapshot in words, for `explain()`."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from hotfuse.profile.names import Names
from hotfuse.profile.predict import CLASSES
from hotfuse.profile.records import Flag
from hotfuse.profile.snapshot import EMPTY, GraphSeen, PartitionSeen, Prediction, Snapshot, ValueSeen

SHOWN = 6
"""Lines of one kind for one graph."""
NOTABLE = 0.01
"""The least fraction that is worth saying."""


def watched_text(
    snapshot: Snapshot = EMPTY, names: Names | None = None, stats: Mapping[str, float] | None = None,
    graphs: Collection[int] | None = None,
) -> str:
    """What was seen of some graphs (None: of all), with the names of things where they are known."""
    names = names or Names()
    lines: list[str] = []
    if stats is not None:
        lines.append(f"watched: {stats.get('samples', 0):.0f} calls sampled, {stats.get('overhead', 0.0):.2%} of the time; "
                     f"{snapshot.records} records analyzed, {stats.get('records_dropped', 0):.0f} dropped")
    for number, graph in snapshot.graphs.items():
        if graphs is None or number in graphs:
            lines += _graph(graph, names)
    return "\n".join(lines)


def _graph(g: GraphSeen, names: Names) -> list[str]:
    lines = [f"  {names.graph_name(g.graph)}: {g.samples} samples"]

    def add(title: str, items: list[str]) -> None:
        lines.extend(f"    {title} {item}" for item in items[:SHOWN])
        if len(items) > SHOWN:
            lines.append(f"    {title} … {len(items) - SHOWN} more")

    def shapes(signature: int) -> str:
        found = names.shapes(g.graph, signature)
        return ", ".join("×".join(map(str, s)) or "number" for s in found) if found else "other shapes"

    add("call", [f"{shapes(s.signature)}: {s.share:.0%}" + "".join(f", tier {t.item} {_time(t)}" for t in s.calls)
                 for s in g.signatures])
    add("value", [f"{names.item_name(g.graph, v.item)} {list(v.shape)}: {', '.join(_notable(v))}" for v in g.values])
    add("control", [
        f"{names.item_name(g.graph, c.item)}: " + ", ".join(f"{_outcome(o, loop=c.loop)} {share:.0%}" for o, share in c.outcomes)
        for c in g.controls
    ])
    slowest = sorted(g.partitions, key=lambda p: -p.mean)
    add("time", [f"{names.item_name(g.graph, p.item)}: {_time(p)}{_rates(p)}" for p in slowest])
    add("expected", [f"{_expected(p, g.graph, names)}, right {p.accuracy:.0%} of {p.n} ({p.by})"
                     for p in sorted(g.predictions, key=lambda p: -p.accuracy)])
    add("changed", [f"{names.item_name(g.graph, d.item)}, its {d.metric}, at sample {d.sample} "
                    f"(distance {d.distance:.2f}, by chance below {d.threshold:.2f})" for d in reversed(g.drifts)])
    return lines


def _notable(v: ValueSeen) -> list[str]:
    found = [f"{v.min:.4g} to {v.max:.4g}"] if v.min <= v.max else ["nothing finite in it"]
    said = {"zero": v.zero, "zero rows": v.zero_rows, "zero columns": v.zero_cols, "constant rows": v.constant_rows,
            "not finite": v.nonfinite}
    found += [f"{share.mean:.0%} {what}" for what, share in said.items() if share.n and share.mean >= NOTABLE]
    if v.flags & Flag.MASK and v.valid.n:
        found.append(f"{v.valid.mean:.0%} valid, {v.valid_rows.mean:.0%} of rows")
    return found


def _outcome(outcome: int, *, loop: bool) -> str:
    return f"{outcome} trips" if loop else ("else", "then")[outcome] if outcome in (0, 1) else str(outcome)


def _time(t: PartitionSeen) -> str:
    return f"{t.p50 / 1e3:.1f} us"


def _rates(t: PartitionSeen) -> str:
    if t.mean <= 0:
        return ""
    flops = f", {t.flops / t.mean:.1f} GFLOP/s" if t.flops > 0 else ""
    moved = f", {t.bytes / t.mean:.1f} GB/s" if t.bytes > 0 else ""
    return flops + moved


def _expected(p: Prediction, graph: int, names: Names) -> str:
    name = names.item_name(graph, p.item)
    match p.kind:
        case "shape":
            found = names.shapes(graph, p.value)
            return "shapes " + (", ".join("×".join(map(str, s)) for s in found) if found else "other")
        case "sparsity" | "valid":
            what = "zeros" if p.kind == "sparsity" else "valid elements"
            return f"{what} in {name}: {CLASSES[p.value]}"
        case "trips":
            return f"{name}: {_outcome(p.value, loop=True)}"
        case _:
            return f"{name}: {_outcome(p.value, loop=False)}"
