"""Choices of the fusion engine against no fusion, always fusing, and everything measured.

    python -m benchmarks.fusion [--quick] [--roofline] [--work FOLDER] [--budget SECONDS] [--json]

Every piece that any plan needs is built once, as a kernel and by the library. Each has two labels, by processes of their own: one
to choose with (the oracle's, the exhaustive search's and the measurement gate's), the other to be judged by. A piece takes
the lesser of its kernel's and the library's time, as trials would have it; `always fuse` takes kernels wherever there are some.

    families   one decision, fuse or not, at several sizes: time lost against the better of the two
    blocks     whole plans of small graphs: the engine's, no fusion, the greedy grouping, the best of all cuts
    models     whole models of the zoo, none of which calibration knows: the sum of their pieces
    planning   the time to plan BERT-base

A plan is worse than another where it takes longer by more than two standard errors: those of the labels of the pieces in which the
two differ, since what both have was measured once.

`predicted` is the engine's plan as it comes, `engine` what is deployed after its pieces were measured. Predictions come from the
performance model in the folder (benchmarks.hpm leaves one there), else from the one in the profile store, else from rooflines
(`--roofline`: in any case). What is done lies in the folder: `--budget` ends a run after so many seconds, the same command goes on.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks import zoo
from benchmarks.fusion_cases import BLOCKS, FAMILIES, graph_of
from benchmarks.gemm import geomean
from benchmarks.hpm import zoo_graph
from benchmarks.labels import Times, Unfinished, Work, compiled, labelled, works_in
from hotfuse.base.settings import Settings
from hotfuse.compile.learn import measure
from hotfuse.compile.unit.kernel_cache import kernel_cache, piece_of
from hotfuse.fusion.closed import UseIndex
from hotfuse.fusion.forecast import Predictor, RooflinePredictor, Trained
from hotfuse.fusion.fusion_engine import FusionPlanner, apart
from hotfuse.fusion.groups import Group, group
from hotfuse.fusion.layout import channels_last
from hotfuse.fusion.order import GroupOrder
from hotfuse.fusion.recomputed_operands import with_own_operands
from hotfuse.hpm import model as hpm
from hotfuse.hpm.online import Online
from hotfuse.hpm.roofline import machine_roofline
from hotfuse.hpm.row_cache import RowCache
from hotfuse.ir.graph import Graph
from hotfuse.machine import peaks as machine_peaks
from hotfuse.machine.fingerprint import fingerprint
from hotfuse.machine.topology import topology
from hotfuse.profile.store import Store
from hotfuse.profile.store_place import location
from hotfuse.simplify import simplify

MAX_EXHAUSTIVE = 9
"""Nodes of a graph of which all cuts are measured."""
SURE = 2.0
"""Standard errors by which a plan must lose before it is called worse."""
MODELS = ("bert-base", "vit-base", "resnet-50", "gpt2")
Plan = Sequence[tuple[int, ...]]


@dataclass(slots=True)
class Pieces:
    """What plans are made of, and what each piece takes."""

    works: dict[str, list[Work]] = field(default_factory=dict[str, list[Work]])
    times: dict[tuple[str, bool, int], float] = field(default_factory=dict[tuple[str, bool, int], float])
    """By piece, whether it is a kernel, and label."""
    keys: dict[Any, str] = field(default_factory=dict[Any, str])

    def key(self, index: UseIndex, nodes: Sequence[int]) -> str:
        """A piece's name, the same in every run."""
        own = index.key(nodes)
        if own not in self.keys:
            self.keys[own] = hashlib.sha256(repr(own).encode()).hexdigest()[:20]
        return self.keys[own]

    def want(self, index: UseIndex, nodes: Sequence[int]) -> None:
        """Have a piece built, as a kernel and by the library."""
        key = self.key(index, nodes)
        if key not in self.works:
            piece = piece_of(index.graph, nodes, index.sizes)
            sizes = (dict(piece.sizes),)
            self.works[key] = [
                Work(key, piece.normal, sizes, core, "kernel" if core else "library") for core in (kernel_cache().core, None)
            ]

    def learn(self, path: Path, labels: Sequence[Times]) -> None:
        """Labels from files; a piece that did not run has none."""
        for turn, times in enumerate(labels):
            for w, (seconds, _) in zip(works_in(path), times, strict=True):
                if seconds > 0:
                    self.times[w.problem, w.tag == "kernel", turn] = float(seconds)

    def chosen(self, index: UseIndex, nodes: Sequence[int], *, always: bool = False) -> tuple[str, bool]:
        """A piece as its kernel or by the library, whichever label 0 prefers."""
        key = self.key(index, nodes)
        own, library = self.times.get((key, True, 0)), self.times.get((key, False, 0))
        return key, own is not None and (always or library is None or own <= library)

    def time(self, index: UseIndex, nodes: Sequence[int], turn: int, *, always: bool = False) -> float:
        """Seconds of a piece."""
        return self.times.get((*self.chosen(index, nodes, always=always), turn), 0.0)

    def uncertain(self, one: Counter[tuple[str, bool]], two: Counter[tuple[str, bool]]) -> float:
        """The standard error, in seconds, of the difference of two plans: how far labels of the pieces in which they differ lie
        apart; pieces that both have cancel.
        """
        total = 0.0
        for piece in {*one, *two}:
            first, second = (self.times.get((*piece, turn), 0.0) for turn in (0, 1))
            total += (one[piece] - two[piece]) ** 2 * (first - second) ** 2 / 2
        return total**0.5

    def plan(self, index: UseIndex, plan: Plan, turn: int, *, always: bool = False) -> float:
        """Seconds of a plan."""
        return sum(self.time(index, nodes, turn, always=always) for nodes in plan)


@dataclass(slots=True)
class Problem:
    """A graph with the plans that are compared."""

    name: str
    index: UseIndex
    none: Plan
    always: Plan
    engine: Plan
    engine_index: UseIndex
    """Of the graph that the engine made of it."""
    cuts: list[Plan] = field(default_factory=list[Plan])

    def plans(self) -> list[tuple[UseIndex, Plan]]:
        """All of them, each with its graph."""
        own = [(self.index, p) for p in (self.none, self.always, *self.cuts)]
        return [*own, (self.engine_index, self.engine)]


def problem(name: str, graph: Graph, engine: FusionPlanner, *, whole: bool, cuts: bool = False) -> Problem:
    """Plans of a graph: always fusing is one kernel for the `whole` graph, or the greedy groups."""
    index, greedy = UseIndex(graph, {}), group(graph)
    found = engine.best(graph, greedy, {})
    always = [tuple(range(len(graph.nodes)))] if whole else [g.nodes for g in greedy]
    none = [g.nodes for g in apart(graph, greedy)]
    every = (
        [c for c in _cuts(len(graph.nodes)) if _runs(index, c)] if cuts and len(graph.nodes) <= MAX_EXHAUSTIVE else []
    )
    return Problem(name, index, none, always, [g.nodes for g in found.groups], UseIndex(found.graph, {}), every)


def _cuts(n: int) -> list[Plan]:
    """Every way to cut a list of nodes into neighbours."""
    made: list[Plan] = []
    for marks in itertools.product((False, True), repeat=n - 1):
        ends = [i + 1 for i, m in enumerate(marks) if m] + [n]
        made.append([tuple(range(a, b)) for a, b in zip([0, *ends], ends, strict=False)])
    return made


def _runs(index: UseIndex, cut: Plan) -> bool:
    try:
        GroupOrder(index, [Group(c, "rows") for c in cut])
    except ValueError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class Times4:
    """Seconds of a problem's plans, on labels that nothing was chosen by."""

    none: float
    always: float
    predicted: float
    engine: float
    none_error: float
    """Standard errors of engine less none, and of engine less always."""
    always_error: float


def judged(p: Problem, pieces: Pieces) -> Times4:
    """The engine deploys what its trials found fastest: its plan, or one of the two it must not lose to."""
    three = [(p.engine_index, p.engine), (p.index, p.none), (p.index, p.always)]
    index, plan = min(three, key=lambda t: pieces.plan(*t, 0))
    made = Counter(pieces.chosen(index, nodes) for nodes in plan)
    none = Counter(pieces.chosen(p.index, nodes) for nodes in p.none)
    always = Counter(pieces.chosen(p.index, nodes, always=True) for nodes in p.always)
    return Times4(pieces.plan(p.index, p.none, 1), pieces.plan(p.index, p.always, 1, always=True),
                  pieces.plan(p.engine_index, p.engine, 1), pieces.plan(index, plan, 1), pieces.uncertain(made, none),
                  pieces.uncertain(made, always))  # fmt: skip


# --- predicting ----------------------------------------------------------------------------------------------------------------


def predictor(only_rooflines: bool, folder: Path) -> tuple[Predictor, str]:
    """The model of this machine, or its rooflines."""
    own = folder / "profiles.sqlite"
    with Store.open(own if own.exists() else location(Settings())) as store:
        machine = store.machine(fingerprint())
        found = None if only_rooflines else hpm.load(store, machine)
        known = store.peaks(machine)
    if found is None:
        return RooflinePredictor(kernel_cache().peaks), "roofline"
    peaks = machine_peaks.from_dict(known) if known is not None else None
    at = machine_roofline(peaks, topology(), kernel_cache().core.lanes)
    return Trained(hpm.CostPredictor(found, at, RowCache(measure.tile_of), Online())), f"model {found.version}"


def lowers(piece: Graph, sizes: Mapping[str, int]) -> str:
    """Why a piece has no kernel, as compilation asks it."""
    return kernel_cache().lowers(piece_of(piece, range(len(piece.nodes)), sizes))


def planning(predict: Predictor, quick: bool) -> dict[str, float]:
    """Seconds to plan BERT-base, with sizes that calls may change."""
    from hotfuse.analysis.shapes import Mismatch, bind
    from hotfuse.base.structure import flatten
    from hotfuse.frontends.captured import CallSpec, TensorSpec
    from hotfuse.frontends.ship import ship
    from hotfuse.frontends.torch_module import capture_shipment

    model = zoo.load("bert-base", reduced=quick)
    tensors, spec = flatten(((), model.inputs()))
    specs = tuple(TensorSpec(tuple(t.shape), tuple(t.stride()), t.dtype, "cpu", frozenset({0, 1})) for t in tensors)
    captured = capture_shipment(ship(model.module, spec).blob, CallSpec(specs))
    graph = with_own_operands(channels_last(simplify(captured.graph)[0]))
    sizes = bind(graph, [t.shape for t in tensors])
    if isinstance(sizes, Mismatch):
        raise SystemExit(f"bert-base does not fit its own inputs: {sizes}")
    groups = group(graph)
    found = FusionPlanner(predict, kernel_cache().core, lowers=lambda g: lowers(g, sizes)).best(graph, groups, sizes)
    return {"planning_s": found.seconds, "nodes": len(graph.nodes), "groups": len(found.groups), "predictions": found.predictions,
            "predicted_gain": 1 - found.after.seconds / found.before.seconds}  # fmt: skip


# --- everything ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cases:
    """What is compared."""

    decisions: list[tuple[str, Problem]]
    blocks: list[Problem]
    models: list[Problem]


def cases(engine: FusionPlanner, quick: bool) -> Cases:
    """Graphs with their plans."""
    decisions = [
        (family, problem(f"{family} {n} {'x'.join(map(str, s.values()))}", graph_of(text, s), engine, whole=True))
        for family, graphs in FAMILIES.items()
        for n, (text, sizes) in enumerate(graphs)
        for s in sizes[:: 2 if quick else 1]
    ]
    blocks = [
        problem(f"{name} {'x'.join(map(str, s.values()))}", graph_of(text, s), engine, whole=False, cuts=True)
        for name, (text, sizes) in BLOCKS.items()
        for s in sizes[: 1 if quick else None]
    ]
    models: list[Problem] = []
    for name in MODELS[: 1 if quick else None]:
        try:
            models.append(problem(name, zoo_graph(name), engine, whole=False))
        except zoo.ZooUnavailable as e:
            print(f"# {name}: {e}")
    return Cases(decisions, blocks, models)


def report(found: Cases, pieces: Pieces) -> dict[str, Any]:
    """Regrets and ratios, printed as they come."""
    lost: dict[str, dict[str, list[float]]] = {}
    for family, p in found.decisions:
        t = judged(p, pieces)
        two = min((p.none, p.always), key=lambda plan: pieces.plan(p.index, plan, 0))
        best = pieces.plan(p.index, two, 1)
        times = {"engine": t.engine, "predicted": t.predicted, "always": t.always, "none": t.none}
        for name, took in times.items():
            lost.setdefault(name, {}).setdefault(family, []).append(max(0.0, took / best - 1))
        print(
            f"{p.name:24} best {best * 1e6:8.1f} us  " + "  ".join(f"{n} {v / best:.3f}" for n, v in times.items()),
            flush=True,
        )
    near: dict[str, list[float]] = {"vs_exhaustive": [], "predicted_vs_exhaustive": []}
    ratios: dict[str, list[float]] = {"vs_no_fusion": [], "vs_always_fuse": [], "predicted_vs_no_fusion": [],
                                      "predicted_vs_always_fuse": []}  # fmt: skip
    worse: list[str] = []
    for p in (*found.blocks, *found.models):
        t = judged(p, pieces)
        for name, value in (
            ("vs_no_fusion", t.none / t.engine),
            ("vs_always_fuse", t.always / t.engine),
            ("predicted_vs_no_fusion", t.none / t.predicted),
            ("predicted_vs_always_fuse", t.always / t.predicted),
        ):
            ratios[name].append(value)
        for name, slower, error in (
            ("no fusion", t.engine - t.none, t.none_error),
            ("always fusing", t.engine - t.always, t.always_error),
        ):
            if slower > SURE * error:
                worse.append(f"{p.name} than {name} by {slower / t.engine:.2%} (error {error / t.engine:.2%})")
        shown = "  ".join(f"{n} {v[-1]:.3f}" for n, v in ratios.items())
        shown += f"  errors {t.none_error / t.engine:.2%}, {t.always_error / t.engine:.2%}"
        if p.cuts:
            ideal = pieces.plan(p.index, min(p.cuts, key=lambda c: pieces.plan(p.index, c, 0)), 1)
            near["vs_exhaustive"].append(t.engine / ideal)
            near["predicted_vs_exhaustive"].append(t.predicted / ideal)
            shown += (
                f"  vs_exhaustive {t.engine / ideal:.3f} (predicted {t.predicted / ideal:.3f}) of {len(p.cuts)} cuts"
            )
        print(f"{p.name:24} engine {t.engine * 1e6:8.1f} us  {shown}", flush=True)
    print(f"worse beyond {SURE:g} standard errors: " + ("; ".join(worse) or "nothing"))
    mean = {n: {f: round(sum(v) / len(v), 5) for f, v in by.items()} for n, by in lost.items()}
    return {
        "regret_by_family": mean["engine"], "regret_predicted_by_family": mean["predicted"],
        "regret_always_by_family": mean["always"], "regret_none_by_family": mean["none"],
        **{n: geomean(v) for n, v in (*ratios.items(), *near.items())}, "worst_vs_no_fusion": min(ratios["vs_no_fusion"]),
        "worst_vs_always_fuse": min(ratios["vs_always_fuse"]), "worst_vs_exhaustive": max(near["vs_exhaustive"]),
        "worst_predicted_vs_exhaustive": max(near["predicted_vs_exhaustive"]), "worse": worse, "pieces": len(pieces.works),
    }  # fmt: skip


def main() -> int:
    """Plan, build, measure, compare, as far as time goes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer sizes, one model, a BERT of fewer layers")
    parser.add_argument("--roofline", action="store_true", help="predict from rooflines, whatever there is")
    parser.add_argument(
        "--work", default=None, help="folder that keeps what is done; without one everything is done at once"
    )
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds of this run")
    parser.add_argument("--json", action="store_true", help="end with one JSON document")
    options = parser.parse_args()
    until = time.time() + options.budget
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as empty:
        folder = Path(options.work or empty)
        folder.mkdir(parents=True, exist_ok=True)
        predict, source = predictor(options.roofline, folder)
        found, pieces = cases(FusionPlanner(predict, kernel_cache().core, lowers=lambda g: lowers(g, {})), options.quick), Pieces()
        for p in (*(p for _, p in found.decisions), *found.blocks, *found.models):
            for index, plan in p.plans():
                for nodes in plan:
                    pieces.want(index, nodes)
        names = hashlib.sha256(" ".join(sorted(pieces.works)).encode()).hexdigest()[:12]
        path = folder / f"pieces-{names}.bin"
        try:
            compiled([w for works in pieces.works.values() for w in works], path)
            print(f"# {len(pieces.works)} pieces; predictions: {source}", flush=True)
            pieces.learn(path, labelled(path, 2, until))
        except Unfinished:
            print("unfinished: the same command goes on", file=sys.stderr)
            return 75
    result = {"predictor": source, **report(found, pieces), **planning(predict, options.quick)}
    if options.json:
        print(json.dumps({k: round(v, 5) if isinstance(v, float) else v for k, v in result.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
