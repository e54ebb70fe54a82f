"""Choices of the fusion engine against no fusion, always fusing, and everything measured.

    python -m benchmarks.fusion [--quick] [--roofline] [--passes N] [--json]

Every piece that any plan needs is built once and all take turns. Each has two labels, from turns of its own: one to choose with
(the oracle's, the exhaustive search's and the measurement gate's), the other to be judged by. A piece takes the lesser of
its kernel's and the library's time, as trials would have it; `always fuse` takes kernels wherever there are some.

    families   one decision, fuse or not, at several sizes: time lost against the better of the two
    blocks     whole plans of small graphs: the engine's, no fusion, the greedy grouping, the best of all cuts
    planning   the time to plan BERT-base

Predictions come from the performance model in the profile store, or from roofs where there is none (`--roofline`: in any case).
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.gemm import geomean
from hotfuse.base.errors import HotfuseError
from hotfuse.base.settings import from_env
from hotfuse.compile import measure
from hotfuse.compile.units import bench, piece_of
from hotfuse.fusion.closed import Index, Key
from hotfuse.fusion.engine import Engine, apart
from hotfuse.fusion.forecast import Predictor, Roofline, Trained
from hotfuse.fusion.groups import Group, group
from hotfuse.fusion.layout import channels_last
from hotfuse.fusion.order import Order
from hotfuse.fusion.own import with_own_operands
from hotfuse.hpm import model as hpm
from hotfuse.hpm.online import Online
from hotfuse.hpm.roofline import roof
from hotfuse.hpm.work import Book, Candidate
from hotfuse.ir.graph import Graph
from hotfuse.ir.text import parse
from hotfuse.machine import peaks as machine_peaks
from hotfuse.machine.fingerprint import fingerprint
from hotfuse.machine.topology import topology
from hotfuse.profile.store import Store, location
from hotfuse.simplify import simplify

MAX_EXHAUSTIVE = 9
"""Nodes of a graph of which all cuts are measured."""


def _chain(*steps: str, inputs: str = "%x: f32[R, C]", params: Sequence[str] = (), result: str = "f32[R, C]") -> str:
    body = [f"  %v{i}: {result} = {s}" for i, s in enumerate(steps)]
    return "\n".join([f"graph main({inputs}) {{", *params, *body, f"  return %v{len(steps) - 1}", "}"])


FAMILIES: dict[str, tuple[str, list[dict[str, int]]]] = {
    "pointwise": (
        _chain("aten.relu.default(%x)", "aten.mul.Tensor(%v0, %y)", "aten.add.Tensor(%v1, %x)",
               inputs="%x: f32[R, C], %y: f32[R, C]"),
        [{"R": r, "C": 1024} for r in (8, 128, 1024, 4096)],
    ),
    "broadcast": (
        _chain("aten.add.Tensor(%x, %b)", "aten.tanh.default(%v0)", "aten.mul.Tensor(%v1, %s)",
               params=('  param %b: f32[C] = "b"', '  param %s: f32[C] = "s"')),
        [{"R": r, "C": 768} for r in (8, 128, 1024, 4096)],
    ),
    "reduction": (
        _chain("aten.add.Tensor(%x, %y)", "aten.layer_norm.default(%v0, [C], %w, %b, 1e-05)", "aten.relu.default(%v1)",
               inputs="%x: f32[R, C], %y: f32[R, C]", params=('  param %w: f32[C] = "w"', '  param %b: f32[C] = "b"')),
        [{"R": r, "C": 768} for r in (8, 128, 1024)],
    ),
    "contraction": (
        _chain("aten.linear.default(%x, %w, %b)", "aten.gelu.default(%v0)", "aten.add.Tensor(%v1, %x)",
               params=('  param %w: f32[C, C] = "w"', '  param %b: f32[C] = "b"')),
        [{"R": 8, "C": 256}, {"R": 128, "C": 256}, {"R": 128, "C": 768}, {"R": 512, "C": 512}],
    ),
    "conv": (
        _chain("aten.conv2d.default(%x, %w, %b, [1, 1], [1, 1], [1, 1], 1)", "aten.relu.default(%v0)", "aten.add.Tensor(%v1, %x)",
               inputs="%x: f32[1, C, R, R]", result="f32[1, C, R, R]",
               params=('  param %w: f32[C, C, 3, 3] = "w"', '  param %b: f32[C] = "b"')),
        [{"R": 14, "C": 64}, {"R": 28, "C": 64}, {"R": 56, "C": 32}],
    ),
}  # fmt: skip

_WEIGHTS = ('  param %w: f32[C, C] = "w"', '  param %u: f32[C, C] = "u"', '  param %g: f32[C] = "g"', '  param %b: f32[C] = "b"')
BLOCKS: dict[str, tuple[str, list[dict[str, int]]]] = {
    "mlp": (
        _chain("aten.linear.default(%x, %w, %b)", "aten.gelu.default(%v0)", "aten.linear.default(%v1, %u, None)",
               "aten.add.Tensor(%v2, %x)", "aten.layer_norm.default(%v3, [C], %g, %b, 1e-05)", params=_WEIGHTS),
        [{"R": 64, "C": 256}, {"R": 256, "C": 384}],
    ),
    "gate": (
        _chain("aten.linear.default(%x, %w, None)", "aten.linear.default(%x, %u, None)", "aten.silu.default(%v0)",
               "aten.mul.Tensor(%v2, %v1)", "aten.add.Tensor(%v3, %x)", params=_WEIGHTS),
        [{"R": 64, "C": 256}, {"R": 256, "C": 384}],
    ),
    "norms": (
        _chain("aten.add.Tensor(%x, %b)", "aten.softmax.int(%v0, -1)", "aten.mul.Tensor(%v1, %g)",
               "aten.layer_norm.default(%v2, [C], %g, %b, 1e-05)", "aten.tanh.default(%v3)", "aten.add.Tensor(%v4, %v0)",
               params=_WEIGHTS[2:]),
        [{"R": 64, "C": 512}, {"R": 1024, "C": 768}],
    ),
}  # fmt: skip


def graph_of(text: str, sizes: Mapping[str, int]) -> Graph:
    """A graph of numbers, in the form that grouping sees."""
    for name, size in sizes.items():
        for end in (",", "]"):
            text = text.replace(f" {name}{end}", f" {size}{end}").replace(f"[{name}{end}", f"[{size}{end}")
    return with_own_operands(channels_last(parse(text)))


@dataclass(slots=True)
class Labels:
    """Pieces with their times: kernels where there are some, and the library's."""

    passes: int
    bound: dict[tuple[Key, bool, int], measure.Bound] = field(default_factory=dict[tuple[Key, bool, int], measure.Bound])
    refused: dict[Key, str] = field(default_factory=dict[Key, str])

    def want(self, index: Index, nodes: Sequence[int]) -> None:
        """Build a piece, twice each way."""
        key = index.key(nodes)
        if (key, False, 0) in self.bound:
            return
        piece = piece_of(index.graph, nodes, index.sizes).normal
        try:
            made = measure.make(piece, bench().core)
        except HotfuseError as e:
            self.refused[key], made = e.because or e.what, None
        for turn in (0, 1):
            self.bound[key, False, turn] = measure.bind(Candidate(piece, index.sizes, None), "", None)
            if made is not None:
                self.bound[key, True, turn] = measure.bind(Candidate(piece, index.sizes, bench().core), "", made)

    def run(self) -> None:
        """Take turns."""
        measure.timed(list(self.bound.values()), self.passes)

    def time(self, index: Index, nodes: Sequence[int], turn: int, *, gate: int = 0, always: bool = False) -> float:
        """Seconds of a piece: its kernel's or the library's, whichever label `gate` prefers."""
        key = index.key(nodes)
        if (key, True, 0) not in self.bound:
            return self.bound[key, False, turn].figure()[0]
        kernel = always or self.bound[key, True, gate].figure()[0] <= self.bound[key, False, gate].figure()[0]
        return self.bound[key, kernel, turn].figure()[0]

    def plan(self, index: Index, groups: Sequence[Sequence[int]], turn: int, *, always: bool = False) -> float:
        """Seconds of a plan."""
        return sum(self.time(index, g, turn, always=always) for g in groups)


@dataclass(slots=True)
class Problem:
    """A graph with the plans that are compared."""

    name: str
    index: Index
    plans: dict[str, list[tuple[int, ...]]]
    cuts: list[list[tuple[int, ...]]] = field(default_factory=list[list[tuple[int, ...]]])


def problem(name: str, graph: Graph, engine: Engine, *, exhaustive: bool) -> Problem:
    """Plans of a graph. The engine's own is the best predicted; runners-up are measured too, as its gate does."""
    index, greedy = Index(graph, {}), group(graph)
    none = apart(graph, greedy)
    whole = [tuple(range(len(graph.nodes)))] if not exhaustive else [g.nodes for g in greedy]
    found = engine.best(graph, greedy, {})
    rewritten = found.graph is not graph
    picked = [g.nodes for g in (greedy if rewritten else found.groups)]
    plans = {"none": [g.nodes for g in none], "always": whole, "engine": picked}
    cuts: list[list[tuple[int, ...]]] = []
    if exhaustive and len(graph.nodes) <= MAX_EXHAUSTIVE:
        cuts = [c for c in _cuts(len(graph.nodes)) if _runs(index, c)]
    return Problem(name, index, plans, cuts)


def _cuts(n: int) -> list[list[tuple[int, ...]]]:
    """Every way to cut a list of nodes into neighbours."""
    made: list[list[tuple[int, ...]]] = []
    for marks in itertools.product((False, True), repeat=n - 1):
        ends = [i + 1 for i, m in enumerate(marks) if m] + [n]
        made.append([tuple(range(a, b)) for a, b in zip([0, *ends], ends, strict=False)])
    return made


def _runs(index: Index, cut: Sequence[tuple[int, ...]]) -> bool:
    try:
        Order(index, [Group(c, "rows") for c in cut])
    except ValueError:
        return False
    return True


def gated(p: Problem, labels: Labels) -> list[tuple[int, ...]]:
    """What the engine deploys: of its plan and the two it must not lose to, the one whose trials were fastest."""
    return min(p.plans.values(), key=lambda plan: labels.plan(p.index, plan, 0))


def predictor(only_roofs: bool) -> tuple[Predictor, str]:
    """The model of this machine, or its roofs."""
    store = Store.open(location(from_env()))
    machine = store.machine(fingerprint())
    found = None if only_roofs else hpm.load(store, machine)
    if found is None:
        return Roofline(bench().peaks), "roofline"
    known = store.peaks(machine)
    peaks = machine_peaks.from_dict(known) if known is not None else None
    at = roof(peaks, topology(), bench().core.lanes)
    return Trained(hpm.Predictor(found, at, Book(measure.tile_of), Online())), f"model {found.version}"


def lowers(piece: Graph, sizes: Mapping[str, int]) -> str:
    """Why a piece has no kernel, as compilation asks it."""
    return bench().lowers(piece_of(piece, range(len(piece.nodes)), sizes))


def planning(predict: Predictor, quick: bool) -> dict[str, float]:
    """Seconds to plan BERT-base."""
    from benchmarks import zoo
    from hotfuse.base.structure import flatten
    from hotfuse.frontends.captured import CallSpec, TensorSpec
    from hotfuse.frontends.ship import ship
    from hotfuse.frontends.torch_module import capture_shipment

    model = zoo.load("bert-base", reduced=quick)
    tensors, spec = flatten(((), model.inputs()))
    specs = tuple(TensorSpec(tuple(t.shape), tuple(t.stride()), t.dtype, "cpu", frozenset({0, 1})) for t in tensors)
    captured = capture_shipment(ship(model.module, spec).blob, CallSpec(specs))
    graph = with_own_operands(channels_last(simplify(captured.graph)[0]))
    from hotfuse.analysis.shapes import Mismatch, bind

    sizes = bind(graph, [t.shape for t in tensors])
    if isinstance(sizes, Mismatch):
        raise SystemExit(f"bert-base does not fit its own inputs: {sizes}")
    groups = group(graph)
    found = Engine(predict, bench().core, lowers=lambda g: lowers(g, sizes)).best(graph, groups, sizes)
    return {"planning_s": found.seconds, "nodes": len(graph.nodes), "groups": len(found.groups), "predictions": found.predictions,
            "predicted_gain": 1 - found.after.seconds / found.before.seconds}  # fmt: skip


def main() -> int:
    """Run everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer sizes, a BERT of fewer layers")
    parser.add_argument("--roofline", action="store_true", help="predict from roofs, whatever the store holds")
    parser.add_argument("--passes", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="end with one JSON document")
    options = parser.parse_args()
    torch.set_num_threads(1)
    predict, source = predictor(options.roofline)
    engine = Engine(predict, bench().core, lowers=lambda g: lowers(g, {}))
    labels = Labels(options.passes or (9 if options.quick else 21))
    decisions: list[tuple[str, Problem]] = []
    for family, (text, sizes) in FAMILIES.items():
        for s in sizes[:: 2 if options.quick else 1]:
            shape = "x".join(map(str, s.values()))
            decisions.append((family, problem(f"{family} {shape}", graph_of(text, s), engine, exhaustive=False)))
    blocks = [
        problem(f"{name} {'x'.join(map(str, s.values()))}", graph_of(text, s), engine, exhaustive=True)
        for name, (text, sizes) in BLOCKS.items()
        for s in sizes[: 1 if options.quick else None]
    ]
    started = time.perf_counter()
    for p in (*(p for _, p in decisions), *blocks):
        for plan in (*p.plans.values(), *p.cuts):
            for nodes in plan:
                labels.want(p.index, nodes)
    print(f"# {len(labels.bound)} pieces built in {time.perf_counter() - started:.1f} s; predictions: {source}", flush=True)
    labels.run()
    result = {"predictor": source, **report(decisions, blocks, labels), **planning(predict, options.quick)}
    if options.json:
        print(json.dumps({k: round(v, 5) if isinstance(v, float) else v for k, v in result.items()}))
    return 0


def report(decisions: Sequence[tuple[str, Problem]], blocks: Sequence[Problem], labels: Labels) -> dict[str, Any]:
    """Regrets and ratios, printed as they come."""
    lost: dict[str, dict[str, list[float]]] = {}
    for family, p in decisions:
        two = (p.plans["none"], p.plans["always"])
        best = min(labels.plan(p.index, min(two, key=lambda plan: labels.plan(p.index, plan, 0)), 1),
                   *(labels.plan(p.index, plan, 1) for plan in two))  # fmt: skip
        times = {"engine": labels.plan(p.index, gated(p, labels), 1), "predicted": labels.plan(p.index, p.plans["engine"], 1),
                 "always": labels.plan(p.index, p.plans["always"], 1, always=True), "none": labels.plan(p.index, two[0], 1)}
        for name, t in times.items():
            lost.setdefault(name, {}).setdefault(family, []).append(max(0.0, t / best - 1))
        print(f"{p.name:24} best {best * 1e6:8.1f} us  " + "  ".join(f"{n} {t / best:.3f}" for n, t in times.items()), flush=True)
    ratios: dict[str, list[float]] = {"vs_no_fusion": [], "vs_always_fuse": [], "vs_exhaustive": [], "predicted_vs_exhaustive": []}
    for p in blocks:
        engine = labels.plan(p.index, gated(p, labels), 1)
        rest = {n: labels.plan(p.index, plan, 1, always=n == "always") for n, plan in p.plans.items()}
        ideal = labels.plan(p.index, min(p.cuts, key=lambda c: labels.plan(p.index, c, 0)), 1)
        for name, value in (("vs_no_fusion", rest["none"] / engine), ("vs_always_fuse", rest["always"] / engine),
                            ("vs_exhaustive", engine / ideal), ("predicted_vs_exhaustive", rest["engine"] / ideal)):  # fmt: skip
            ratios[name].append(value)
        shown = "  ".join(f"{n} {v[-1]:.3f}" for n, v in ratios.items())
        print(f"{p.name:24} engine {engine * 1e6:8.1f} us  {shown}  of {len(p.cuts)} cuts", flush=True)
    mean = {n: {f: round(sum(v) / len(v), 4) for f, v in by.items()} for n, by in lost.items()}
    return {
        "regret_by_family": mean["engine"], "regret_predicted_by_family": mean["predicted"],
        "regret_always_by_family": mean["always"], "regret_none_by_family": mean["none"],
        **{n: geomean(v) for n, v in ratios.items()}, "worst_vs_exhaustive": max(ratios["vs_exhaustive"]),
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
