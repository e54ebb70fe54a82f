"""The performance model: how well it predicts kernels that it never saw, what choosing by it costs, how it follows a change.

    python -m benchmarks.hpm [--quick] [--work FOLDER] [--budget SECONDS] [--seed N] [--json]

    calibrate   from nothing, into a store of the folder, for `--calibration` seconds altogether
    compile     other problems, drawn with another seed, in all their ways; the kernels of whole models that calibration never saw
    label       two processes, one after the other: the first labels find the best candidate, the second score the choice, and
                both together say how far labels repeat; a label that was disturbed throughout is taken again (`benchmarks.labels`)
    score       cheap, from files

Drift is injected into labels: everything, the commonest family, or what the commonest memory level binds takes 1.6 times as long;
`drift_samples` is how many online samples, of all kernels, it takes until all accuracy bars hold again for good. Nothing drifted
means no harm: after none of 200 samples may the mean error exceed that of the model without a correction by more than a tenth, nor
may a bar be missed that it keeps without one.

The cost of a candidate is what one meets who asks for a hundred at a time, with a model that was asked before: nodes are known,
graphs are not. The machine changes its speed every few milliseconds and stays with it for seconds at times, so bursts of batches
are spread over three seconds, and the median of all batches counts.

Everything that is done lies in the folder: `--budget` ends a run after so many seconds, and the same command goes on. Only what
takes longer than 5 us counts. With `--json` the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.export.graph_signature import InputKind

from benchmarks import hpm_selection, zoo
from benchmarks.labels import Times, Unfinished, Work, compiled, labelled, works_in
from hotfuse.compile.host import Host, this_host
from hotfuse.compile.learn import measure
from hotfuse.compile.learn.calibrate import calibrate
from hotfuse.compile.unit.kernel_cache import piece_of
from hotfuse.compile.workers.worker_pool import machine_pool
from hotfuse.frontends.fx import PlaceholderRole, to_graph
from hotfuse.fusion.groups import group, reordered
from hotfuse.fusion.layout import channels_last
from hotfuse.fusion.recomputed_operands import with_own_operands
from hotfuse.hpm import calibrate as rows
from hotfuse.hpm import evaluation, model
from hotfuse.hpm.drawn_problems import draws
from hotfuse.hpm.features import derive
from hotfuse.hpm.model import CostPredictor, TrainingRows
from hotfuse.hpm.online import Online
from hotfuse.hpm.row_cache import RowCache
from hotfuse.hpm.work import FAMILIES, Candidate, families
from hotfuse.ir.graph import Graph
from hotfuse.lower.cpu.tiling import Core
from hotfuse.ops.table import Access, lookup
from hotfuse.profile.store import Store
from hotfuse.simplify import simplify

SEED = 2026
PROBLEMS = 90
"""Drawn for a run: ways of one problem are missed alike, so that few problems make a figure of chance."""
LONG_S = 5e-6
ZOO = ("bert-base", "vit-base", "resnet-50", "gpt2", "distilbert", "mixtral-small")
CURVE = (100, 200, 400, 800, 1600, 3200)
BARS = {"label_cov": 0.03, "mape": 0.12, "regret_top1_mean": 0.05, "regret_top1_p95": 0.15, "regret_top3_mean": 0.01,
        "regret_top3_p95": 0.05, "calibration_s": 180.0, "drift_samples": 50, "us_per_candidate": 10.0}  # fmt: skip
BARS = {"within10": 0.65, "within20": 0.90, "pair_accuracy": 0.90}


# --- problems ----------------------------------------------------------------------------------------------------------------


def drawn(count: int, core: Core, seed: int) -> list[Work]:
    """Problems that calibration did not draw, in all their ways."""
    found: list[Work] = []
    for p in itertools.islice(draws(seed), count):
        narrow = Core(core.lanes // 2, core.registers, core.l1, core.l2)
        anchor = p.family in ("contraction", "convolution")
        ways = measure.core_variants(core) if anchor else (core,) if p.family == "attention" else (core, narrow)
        found += [Work(p.key, p.graph, tuple(dict(s) for s in p.sizes), way) for way in ways]
    return found


def zoo_graph(name: str) -> Graph:
    """A whole model at the sizes it is timed with, in the form that grouping sees."""
    loaded = zoo.load(name, reduced=True)
    assert loaded.module is not None
    given = loaded.inputs(0, loaded.timed)
    with torch.no_grad():
        program = torch.export.export(loaded.module.eval(), (), given, strict=False)
    kinds = {InputKind.USER_INPUT: "input"}
    specs = program.graph_signature.input_specs
    roles = [PlaceholderRole(kinds.get(s.kind, "param"), "" if s.kind in kinds else str(s.target)) for s in specs]
    return with_own_operands(channels_last(simplify(to_graph(program.graph_module, roles).graph)[0]))


def zoo_works(name: str, core: Core) -> list[Work]:
    """The kernels of a whole model, each once."""
    graph = zoo_graph(name)
    groups = group(graph)
    ordered = reordered(graph, groups)
    works: dict[str, Work] = {}
    at = 0
    for g in groups:
        nodes = range(at, at + len(g.nodes))
        at += len(g.nodes)
        if g.kind != "library" and not all(lookup(ordered.nodes[i].op).access is Access.MOVEMENT for i in nodes):
            piece = piece_of(ordered, nodes, {})
            works[piece.key] = Work(piece.key, piece.normal, (dict(piece.sizes),), core, name)
    return list(works.values())


def prepare(path: Path, core: Core, problems: int, models: Sequence[str], seed: int) -> None:
    """Compile everything that is going to be measured, models behind drawn problems."""
    if path.exists():
        return
    works = drawn(problems, core, seed)
    for name in models:
        try:
            works += zoo_works(name, core)
        except zoo.ZooUnavailable as e:
            print(f"{name}: {e}")
    compiled(works, path)


# --- judging -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Measured:
    """Candidates with two labels each."""

    candidates: list[Candidate]
    keys: list[str]
    tags: list[str]
    samples: TrainingRows
    again: model.Vector

    def of(self, tag: str) -> Measured:
        """Those of a model, or (for the empty name) the drawn ones."""
        return self._some([i for i, t in enumerate(self.tags) if t == tag])

    def but(self, tag: str) -> Measured:
        """All others."""
        return self._some([i for i, t in enumerate(self.tags) if t != tag])

    def _some(self, at: list[int]) -> Measured:
        return Measured([self.candidates[i] for i in at], [self.keys[i] for i in at], [self.tags[i] for i in at],
                        self.samples.pick(np.array(at, np.int64)), self.again[at])  # fmt: skip


def measured(path: Path, times: Sequence[Times]) -> Measured:
    """What files say."""
    first, second = times
    calls = [(w, s) for w in works_in(path) for s in w.sizes]
    ran = [i for i in range(len(calls)) if first[i, 0] > 0 and second[i, 0] > 0]
    chosen = [calls[i] for i in ran]
    candidates = [Candidate(w.graph, s, w.core) for w, s in chosen]
    keys = [f"{w.problem} {sorted(s.items())}" for w, s in chosen]
    table = RowCache(measure.tile_of).rows(candidates)
    group = np.unique(keys, return_inverse=True)[1] if keys else np.zeros(0, np.int64)
    return Measured(
        candidates,
        keys,
        [w.tag for w, _ in chosen],
        TrainingRows(table, first[ran, 0], first[ran, 1], group),
        second[ran, 0],
    )


@dataclass(frozen=True, slots=True)
class Score:
    """Predictions held against labels."""

    label_cov: float
    plain: dict[str, float]
    online: dict[str, float]
    roofline: dict[str, float]
    by_family: dict[str, dict[str, float]]
    choices: list[hpm_selection.SelectionTrial]
    roofline_choices: list[hpm_selection.SelectionTrial]
    predicted: model.Vector
    corrected: model.Vector
    correction: Online


def score(found: Measured, host: Host, made: model.PerformanceModel, online: Online | None = None) -> Score:
    """Compare; 20 samples of what is judged correct the model first, and do not count, or another correction is given."""
    samples, again = found.samples, found.again
    features = derive(samples.table, host.at)
    predicted = made.seconds(features)
    if online is None:
        online, rest = hpm_selection.learned(samples, predicted, host.at)
    else:
        rest = np.ones(len(samples), bool)
    corrected = predicted * np.exp(online.shift(features.family, model.binding(features)))
    seconds, long = samples.seconds, samples.seconds > LONG_S
    apart = np.abs(seconds - again) / (seconds + again) * np.sqrt(2)
    kind = families(samples.table)
    by_family = {
        n: model.accuracy(seconds[kind == i], corrected[kind == i]) for i, n in enumerate(FAMILIES) if (kind == i).any()
    }
    keys = [k for k, keep in zip(found.keys, long, strict=True) if keep]
    choices = hpm_selection.grouped(keys, corrected[long], seconds[long], again[long])
    rooflines = hpm_selection.grouped(keys, features.roofline.seconds[long], seconds[long], again[long])
    return Score(float(apart[long].mean()), model.accuracy(seconds, predicted), model.accuracy(seconds[rest], corrected[rest]),
                 evaluation.roofline_alone(samples, host.at), by_family, choices, rooflines, predicted, corrected,
                 online)  # fmt: skip


BURSTS, BATCHES, ROUNDS, APART_S = 12, 3, 5, 0.2


def cost(host: Host, made: model.PerformanceModel, candidates: Sequence[Candidate]) -> float:
    """Microseconds a candidate in a batch of 100: nodes known, graphs new, features and trees included."""
    predictor = CostPredictor(made, host.at, RowCache(measure.tile_of))
    ring = itertools.cycle(candidates)
    batches = [list(itertools.islice(ring, 100)) for _ in range(BATCHES)]
    for batch in batches:
        predictor.predict(batch)
    times: list[float] = []
    for _ in range(BURSTS):
        time.sleep(APART_S)
        for nth, batch in itertools.product(range(ROUNDS), batches):
            start = time.perf_counter()
            predictor.predict(batch)
            if nth:  # the first round wakes the core up and fills its caches
                times.append(time.perf_counter() - start)
    return float(np.median(times)) / 100 * 1e6


def regrets(choices: Sequence[hpm_selection.SelectionTrial], top: int) -> tuple[float, float]:
    """Mean and 95th percentile."""
    found = hpm_selection.regret(choices, top)
    return (float(found.mean()), float(np.quantile(found, 0.95))) if len(found) else (float("nan"), float("nan"))


def _shown(a: dict[str, float]) -> str:
    return f"{a['n']:5.0f}  MAPE {a['mape']:6.1%}  within 10% {a['within10']:4.0%}  20% {a['within20']:4.0%}"


def report(found: Measured, own: TrainingRows, host: Host, made: model.PerformanceModel) -> dict[str, Any]:
    """All figures, printed as they come."""
    held = found.of("")
    s = score(held, host, made)
    top1, top3 = regrets(s.choices, 1), regrets(s.choices, 3)
    drift = hpm_selection.drift_samples(held.samples, s.predicted, host.at)
    curve = hpm_selection.learning_curve(own, host.at, CURVE)
    each = cost(host, made, held.candidates)
    result: dict[str, Any] = {
        "label_cov": s.label_cov, "mape": s.online["mape"], "within10": s.online["within10"], "within20": s.online["within20"],
        "pair_accuracy": hpm_selection.pair_accuracy(s.choices), "regret_top1_mean": top1[0], "regret_top1_p95": top1[1],
        "regret_top3_mean": top3[0], "regret_top3_p95": top3[1], "drift_samples": max(drift.samples.values()),
        "us_per_candidate": each,
    }  # fmt: skip
    print(f"other problems: {len(held.keys)} candidates, {s.online['n']:.0f} over 5 us, {len(s.choices)} choices")
    print(f"  labels repeat within {s.label_cov:.2%} across processes")
    named = {"all, 20 online samples": s.online, "all, no online correction": s.plain, "roofline alone": s.roofline}
    for name, a in {**named, **s.by_family}.items():
        print(
            f"  {name:28s} {a['n']:5.0f}  MAPE {a['mape']:6.1%}  within 10% {a['within10']:4.0%}  20% {a['within20']:4.0%}"
        )
    rooflines = regrets(s.roofline_choices, 1)
    usual = [hpm_selection.SelectionTrial(np.arange(len(c.first), dtype=np.float64), c.first, c.second) for c in s.choices]
    blind = regrets(usual, 1)
    ways = {"by prediction": top1, "best of 3 measured": top3, "by the roofline": rooflines, "always the usual tile": blind}
    parts = hpm_selection.orders(s.choices)
    print("  pairs in order, by their difference: "
          + ", ".join(f"over {n:.0%}: {o.right} of {o.pairs} ({o.turned} that labels turn)" for n, o in parts.items())
          + f"; labels allow {sum(parts.values(), hpm_selection.PairOrder()).ceiling:.1%}")  # fmt: skip
    print(f"  pairs in order {result['pair_accuracy']:.1%}; regret (p95): "
          + ", ".join(f"{n} {m:.2%} ({p:.1%})" for n, (m, p) in ways.items()))  # fmt: skip
    print("  samples until back within the bars: " + ", ".join(f"{n} {v}" for n, v in drift.samples.items())
          + "; by the mean error alone: " + ", ".join(f"{n} {v}" for n, v in drift.error_only.items()))  # fmt: skip
    print(f"  nothing drifted: error with corrections at most {drift.worst:.2f} of that without; "
          f"bars lost by them: {', '.join(drift.lost) or 'none'}")  # fmt: skip
    print("  learning curve (MAPE): " + ", ".join(f"{n}: {v:.1%}" for n, v in curve.items()))
    print(f"  {each:.1f} us per candidate in a batch of 100")
    whole: dict[str, Any] = {}
    every = score(found.but(""), host, made, s.correction).online
    print(f"  {'all of these models':28s} {_shown(every)}")
    for name in dict.fromkeys(t for t in found.tags if t):
        part = found.of(name)
        m = score(part, host, made, s.correction)
        whole[name] = m.online
        took, thought = part.samples.seconds.sum(), m.corrected.sum()
        print(f"  {name:28s} {_shown(m.online)}; all kernels {took * 1e3:.2f} ms, predicted {thought * 1e3:.2f}")
    return {
        **result, "models_mape": every["mape"], "models_within10": every["within10"], "models_within20": every["within20"],
        "models": whole, "drift": dict(drift.samples), "drift_error_only": dict(drift.error_only),
        "drift_nothing_worst": drift.worst, "learning_curve": {str(n): v for n, v in curve.items()},
        "ablation": {"roofline_mape": s.roofline["mape"], "no_online_mape": s.plain["mape"], "online_mape": s.online["mape"],
                     "roofline_regret": rooflines[0], "no_gate_regret": top1[0], "gate_regret": top3[0],
                     "usual_tile_regret": blind[0],
                     "roofline_pair_accuracy": hpm_selection.pair_accuracy(s.roofline_choices)},
        "kernels": len(held.keys), "choices": len(s.choices), "pairs": sum(o.pairs for o in parts.values()),
        "pair_ceiling": sum(parts.values(), hpm_selection.PairOrder()).ceiling,
        "pairs_by_difference": {str(n): o.accuracy for n, o in parts.items()},
    }  # fmt: skip


# --- phases ------------------------------------------------------------------------------------------------------------------


def calibrated(folder: Path, seconds: float, until: float) -> float:
    """Calibrate until so many seconds were spent on it, over all runs; how many they were."""
    note = folder / "calibration.json"
    spent = float(json.loads(note.read_text())) if note.exists() else 0.0
    with Store.open(folder / "profiles.sqlite") as store:
        while seconds - spent > 1.0:
            left = min(seconds - spent, until - time.time())
            if left < 5.0 and left < seconds - spent:
                raise Unfinished
            with machine_pool() as pool:
                done = calibrate(store, left, executor=pool)
            spent += done.seconds
            note.write_text(json.dumps(spent))
            print(
                f"calibration: {done.measured} kernels measured, {done.compiled} compiled in {done.seconds:.0f} s",
                flush=True,
            )
    return spent


def main() -> int:
    """Phase after phase, as far as time goes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="less calibration, fewer problems, one model")
    parser.add_argument(
        "--work", default=None, help="folder that keeps what is done; without one everything is done at once"
    )
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds of this run")
    parser.add_argument("--calibration", type=float, default=None, help="seconds of calibration altogether")
    parser.add_argument("--problems", type=int, default=None)
    parser.add_argument(
        "--seed", type=int, default=SEED, help="of the problems that are judged; calibration draws with 0"
    )
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    until = time.time() + args.budget
    with tempfile.TemporaryDirectory() as empty:
        folder = Path(args.work or empty)
        folder.mkdir(parents=True, exist_ok=True)
        kernels = folder / f"kernels-{args.seed}.bin"
        problems, models = args.problems or (16 if args.quick else PROBLEMS), ZOO[:1] if args.quick else ZOO
        try:
            spent = calibrated(folder, args.calibration or (25.0 if args.quick else 160.0), until)
            with Store.open(folder / "profiles.sqlite") as store:
                host = this_host(store)
                prepare(kernels, host.core, problems, models, args.seed)
                times = labelled(kernels, 2, until)
                made = model.load(store, host.machine)
                if made is None:
                    print("no model came of the calibration", file=sys.stderr)
                    return 1
                result = report(measured(kernels, times), rows.samples(store, host.machine), host, made)
        except Unfinished:
            print("unfinished: the same command goes on", file=sys.stderr)
            return 75
    result["calibration_s"] = round(spent, 1)
    missed = [n for n, bar in BARS.items() if not result[n] <= bar] + [
        n for n, bar in BARS.items() if not result[n] >= bar
    ]
    print("missed: " + (", ".join(missed) or "nothing"))
    if args.json:
        print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
