"""Whether blocks of rows and split kernels pay: every such candidate of graphs that call for them, built and timed, priced or not.

    python -m benchmarks.fusion_kinds [--rounds N] [--json]

    tiling   two operators whose intermediate outgrows the second-level cache, over blocks of rows that fit into it
    split    a kernel that holds more values at once than there are registers, as two

The engine takes a candidate only where a contest says that it is faster. Here the contest is held about all of them, each in
`--rounds` rounds that are spread out; a candidate pays where its median saving is more than the contest's margin, and the least and
the largest saving of all rounds are shown beside it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.fusion_cases import KINDS, graph_of
from hotfuse.compile.unit.kernel_cache import kernel_cache
from hotfuse.compile.unit.measuring_gate import MIN_GAIN, UnitContests
from hotfuse.compile.unit.units import measuring
from hotfuse.fusion.candidates import FusionCandidate, Generator
from hotfuse.fusion.closed import UseIndex
from hotfuse.fusion.fusion_engine import Side, apart
from hotfuse.fusion.groups import Group, group
from hotfuse.fusion.kinds import CandidateKind
from hotfuse.fusion.order import GroupOrder
from hotfuse.ir.graph import Graph


def candidates(graph: Graph, kind: CandidateKind) -> Iterator[tuple[UseIndex, FusionCandidate]]:
    """Those of a kind: tiling of operators as they stand alone, splits of the whole as one kernel."""
    index = UseIndex(graph, {})
    whole = (Group(tuple(range(len(graph.nodes))), "rows"),)
    order = GroupOrder(index, apart(graph, group(graph)) if kind is CandidateKind.TILING else whole)
    make = Generator(index, order, kernel_cache().core, 1)
    groups = set(order.groups)
    for c in (*make.pairs(groups), *make.singles(groups)):
        if c.kind is kind:
            yield index, c


def sides(index: UseIndex, c: FusionCandidate) -> tuple[list[Side], list[Side]]:
    """What there is and what would be built, as contests take it."""
    where = UseIndex(c.rewritten.graph, index.sizes) if c.rewritten is not None else index
    old = [(index.closed(g.nodes), g.kind == "library") for g in c.old]
    return old, [(where.closed(g.nodes), g.kind == "library") for g in c.new]


def measured(index: UseIndex, c: FusionCandidate, rounds: int) -> list[tuple[float, float]]:
    """Seconds of both sides in every round."""
    gate = measuring({})
    assert isinstance(gate.contest, UnitContests)
    old, new = sides(index, c)
    return [gate.contest._measured(old, new) for _ in range(rounds)]  # pyright: ignore[reportPrivateUsage]


def row(name: str, kind: CandidateKind, index: UseIndex, c: FusionCandidate, rounds: int) -> dict[str, Any]:
    """One candidate: refused with its reason, or with both times."""
    if not c.viable:
        print(f"{kind.value:7} {name:28} not offered: {c.because}", flush=True)
        return {"kind": kind.value, "case": name, "refused": c.because}
    times = measured(index, c, rounds)
    saved = sorted(1 - after / before for before, after in times)
    middle = statistics.median(saved)
    before, after = (statistics.median(t[i] for t in times) * 1e6 for i in (0, 1))
    verdict = "pays" if middle > MIN_GAIN else "does not pay"
    print(f"{kind.value:7} {name:28} {before:9.1f} -> {after:9.1f} us  saves {middle:+.1%} ({saved[0]:+.1%} to {saved[-1]:+.1%})  "
          f"{verdict}", flush=True)  # fmt: skip
    return {
        "kind": kind.value,
        "case": name,
        "us_before": before,
        "us_after": after,
        "saves": middle,
        "pays": middle > MIN_GAIN,
    }


def main() -> int:
    """All cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true", help="end with one JSON document")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for kind, cases in KINDS.items():
        for case, (text, sizes) in cases.items():
            for s in sizes:
                name = f"{case} {'x'.join(map(str, s.values()))}"
                for index, c in candidates(graph_of(text, s), CandidateKind(kind)):
                    rows.append(row(name, CandidateKind(kind), index, c, options.rounds))
    if options.json:
        print(json.dumps({"rows": rows, "pay": sum(bool(r.get("pays")) for r in rows)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
