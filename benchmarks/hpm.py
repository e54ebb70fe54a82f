"""The performance model: how well it predicts kernels that it never saw, what choosing by it costs, how it follows a change.

    python -m benchmarks.hpm [--quick] [--store FILE] [--budget SECONDS] [--json]

A calibration from nothing fills a store (a given one is gone on with). Then other problems, drawn with another seed, are compiled
in all their ways and measured in two processes of their own, one after the other: the first labels find the best candidate, the
second score the choice, and both together say how far labels repeat. Kernels of whole models of the zoo, none of which calibration
knows, are judged apart. Only what takes longer than 5 us counts. With `--json` the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
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

from benchmarks import zoo
from hotfuse.base.errors import HotfuseError
from hotfuse.compile import measure, wire
from hotfuse.compile.calibrate import calibrate
from hotfuse.compile.host import Host, this_host
from hotfuse.compile.pool import Limits, Pool, Task
from hotfuse.compile.units import piece_of
from hotfuse.frontends.fx import Role, to_graph
from hotfuse.fusion.groups import group, reordered
from hotfuse.fusion.layout import channels_last
from hotfuse.fusion.own import with_own_operands
from hotfuse.hpm import calibrate as rows
from hotfuse.hpm import judge, model
from hotfuse.hpm.features import derive
from hotfuse.hpm.model import Predictor, Samples
from hotfuse.hpm.shapes import draws
from hotfuse.hpm.work import FAMILIES, Book, Candidate, families
from hotfuse.ir.graph import Graph
from hotfuse.ir.text import parse, show
from hotfuse.lower.tiling import Core
from hotfuse.ops.table import Access, lookup
from hotfuse.profile.store import Store
from hotfuse.simplify import simplify

SEED = 77
LONG_S = 5e-6
ZOO = ("bert-base", "vit-base", "resnet-50")
BARS = {"label_cov": 0.03, "mape": 0.12, "regret_top1_mean": 0.05, "regret_top1_p95": 0.15, "regret_top3_mean": 0.01,
        "regret_top3_p95": 0.05, "calibration_s": 180.0, "drift_samples": 50, "us_per_candidate": 10.0}  # fmt: skip
LEAST = {"within10": 0.65, "within20": 0.90, "pair_accuracy": 0.90}


@dataclass(frozen=True)
class Work:
    """One kernel with the calls to measure it at."""

    problem: str
    graph: Graph
    sizes: tuple[dict[str, int], ...]
    core: Core


# --- labels, in processes of their own ---------------------------------------------------------------------------------------


def compiled(works: Sequence[Work], path: Path) -> list[Work]:
    """Have workers compile; kernels and what they are lie in a file behind. What has no kernel is left out."""
    pool = Pool(Limits(2, share=1.0))
    asked = [pool.submit(Task("a kernel", measure.request(w.graph, w.core), timeout=120.0)) for w in works]
    made: list[Work] = []
    with path.open("wb") as file:
        for w, future in zip(works, asked, strict=True):
            try:
                answer, codes = wire.checked(future.result())
            except HotfuseError:
                continue
            core = [w.core.lanes, w.core.registers, w.core.l1, w.core.l2]
            own = {"problem": w.problem, "graph": show(w.graph), "calls": w.sizes, "core": core}
            wire.send(file, {**answer, "own": own}, codes)
            made.append(w)
    pool.close(1.0)
    return made


def label(path: Path) -> None:
    """The other process: measure everything in a file, in batches that fit memory, and print what it took."""
    torch.set_num_threads(1)
    waiting: list[tuple[int, measure.Bound]] = []
    found: dict[int, tuple[float, float]] = {}
    held = count = 0

    def flush() -> None:
        measure.timed([b for _, b in waiting], passes=14)
        found.update({i: b.figure() for i, b in waiting})
        waiting.clear()

    with path.open("rb") as file:
        while True:
            try:
                answer, codes = wire.receive(file)
            except EOFError:
                break
            own = answer.pop("own")
            graph, core, kernel = parse(own["graph"]), Core(*own["core"]), measure.received(answer, codes)
            for sizes in own["calls"]:
                count += 1
                try:
                    bound = measure.bind(Candidate(graph, sizes, core), own["problem"], kernel)
                    bound.call()  # made-up indices may point anywhere
                except HotfuseError as e:
                    print(f"left out: {e}", file=sys.stderr)
                    found[count - 1] = (0.0, 0.0)
                    continue
                waiting.append((count - 1, bound))
                held += sum(t.nbytes for t in bound.keep[3] if isinstance(t, torch.Tensor)) * 3
                if held > 256 << 20 or len(waiting) >= 160:
                    flush()
                    held = 0
    flush()
    print(json.dumps([found[i] for i in range(count)]))


def labels(path: Path) -> np.ndarray[Any, Any]:
    """Seconds of everything in a file, by a fresh process."""
    command = [sys.executable, "-m", "benchmarks.hpm", "--label", str(path)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return np.array(json.loads(done.stdout.splitlines()[-1]))


# --- problems ----------------------------------------------------------------------------------------------------------------


def drawn(count: int, core: Core) -> list[Work]:
    """Problems that calibration did not draw, in all their ways."""
    found: list[Work] = []
    for p in itertools.islice(draws(SEED), count):
        narrow = Core(core.lanes // 2, core.registers, core.l1, core.l2)
        heart = p.family in ("contraction", "convolution")
        ways = measure.ways(core) if heart else (core,) if p.family == "attention" else (core, narrow)
        found += [Work(p.key, p.graph, tuple(dict(s) for s in p.sizes), way) for way in ways]
    return found


def zoo_works(name: str, core: Core) -> list[Work]:
    """The kernels of a whole model, each once."""
    loaded = zoo.load(name, reduced=True)
    assert loaded.module is not None
    given = loaded.inputs(0, loaded.timed)
    with torch.no_grad():
        program = torch.export.export(loaded.module.eval(), (), given, strict=False)
    kinds = {InputKind.USER_INPUT: "input"}
    specs = program.graph_signature.input_specs
    roles = [Role(kinds.get(s.kind, "param"), "" if s.kind in kinds else str(s.target)) for s in specs]
    graph = with_own_operands(channels_last(simplify(to_graph(program.graph_module, roles).graph)[0]))
    groups = group(graph)
    ordered = reordered(graph, groups)
    works: dict[str, Work] = {}
    at = 0
    for g in groups:
        nodes = range(at, at + len(g.nodes))
        at += len(g.nodes)
        if g.kind != "library" and not all(lookup(ordered.nodes[i].op).access is Access.MOVEMENT for i in nodes):
            piece = piece_of(ordered, nodes, {})
            works[piece.key] = Work(piece.key, piece.normal, (dict(piece.sizes),), core)
    return list(works.values())


# --- judging -----------------------------------------------------------------------------------------------------------------


def score(works: Sequence[Work], file: Path, host: Host, made: model.Model, twice: bool) -> dict[str, Any]:
    """Measure (twice), predict, compare."""
    kept = compiled(works, file)
    first = labels(file)
    second = labels(file) if twice else first
    ran = np.flatnonzero(first[:, 0] > 0)
    first, second = first[ran], second[ran]
    calls = [(w, s) for w in kept for s in w.sizes]
    candidates = [Candidate(w.graph, s, w.core) for w, s in (calls[i] for i in ran)]
    keys = [f"{w.problem} {sorted(s.items())}" for w, s in (calls[i] for i in ran)]
    table = Book(measure.tile_of).rows(candidates)
    predicted = made.seconds(derive(table, host.at))
    seconds, again = first[:, 0], second[:, 0]
    group = np.unique(keys, return_inverse=True)[1]
    samples = Samples(table, seconds, first[:, 1], group)
    corrected, rest = judge.corrected(samples, predicted, host.at)
    long = seconds > LONG_S
    apart = np.abs(seconds - again) / (seconds + again) * np.sqrt(2)
    kind = families(table)
    by_family = {n: model.accuracy(seconds[kind == i], corrected[kind == i]) for i, n in enumerate(FAMILIES) if (kind == i).any()}
    choices = judge.grouped([k for k, keep in zip(keys, long, strict=True) if keep], corrected[long], seconds[long], again[long])
    return {
        "kernels": len(seconds), "long": int(long.sum()), "label_cov": float(apart[long].mean()),
        "plain": model.accuracy(seconds, predicted), "online": model.accuracy(seconds[rest], corrected[rest]),
        "by_family": by_family,
        "roofline": judge.roofline_alone(samples, host.at), "choices": choices, "samples": samples, "predicted": predicted,
        "candidates": candidates,
    }  # fmt: skip


def cost(host: Host, made: model.Model, candidates: Sequence[Candidate]) -> float:
    """Microseconds a candidate in a batch of 100: nodes known, graphs new, features and trees included."""
    book = Book(measure.tile_of)
    predictor = Predictor(made, host.at, book)
    batch = list(itertools.islice(itertools.cycle(candidates), 100))
    predictor.predict(batch)
    times: list[float] = []
    for _ in range(30):
        start = time.perf_counter()
        predictor.predict(batch)
        times.append(time.perf_counter() - start)
    return float(np.median(times)) / 100 * 1e6


def regrets(choices: Sequence[judge.Choice], top: int) -> tuple[float, float]:
    found = judge.regret(choices, top)
    return (float(found.mean()), float(np.quantile(found, 0.95))) if len(found) else (float("nan"), float("nan"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="less calibration, fewer problems, one model")
    parser.add_argument("--budget", type=float, default=None, help="seconds of calibration")
    parser.add_argument("--store", default=None, help="go on with this store instead of a new one")
    parser.add_argument("--problems", type=int, default=None)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--label", default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.label:
        label(Path(args.label))
        return 0
    budget = args.budget if args.budget is not None else (25.0 if args.quick else 150.0)
    with tempfile.TemporaryDirectory() as folder:
        store = Store.open(args.store or Path(folder) / "profiles.sqlite")
        calibration_s = 0.0
        if budget > 0:
            report = calibrate(store, budget)
            calibration_s = report.seconds
            print(f"calibration: {report.measured} kernels measured in {report.seconds:.0f} s, {report.compiled} compiled")
        host = this_host(store)
        made = model.load(store, host.machine)
        if made is None:
            print("no model came of the calibration", file=sys.stderr)
            return 1
        problems, models = args.problems or (16 if args.quick else 60), ZOO[:1] if args.quick else ZOO
        result = report_on(store, host, made, Path(folder), problems, models)
        result["calibration_s"] = round(calibration_s, 1)
        store.close()
    missed = [n for n, bar in BARS.items() if not result[n] <= bar] + [n for n, bar in LEAST.items() if not result[n] >= bar]
    print("missed: " + (", ".join(missed) or "nothing"))
    if args.json:
        print(json.dumps(result))
    return 0


def report_on(store: Store, host: Host, made: model.Model, folder: Path, problems: int, models: Sequence[str]) -> dict[str, Any]:
    file = folder / "kernels"
    own = rows.samples(store, host.machine)
    found = score(drawn(problems, host.core), file, host, made, twice=True)
    online, choices = found["online"], found["choices"]
    top1, top3 = regrets(choices, 1), regrets(choices, 3)
    drift = judge.drift_samples(found["samples"], found["predicted"], host.at)
    curve = judge.learning_curve(own, host.at, (100, 200, 400, 800, 1600, 3200))
    result: dict[str, Any] = {
        "label_cov": found["label_cov"], "mape": online["mape"], "within10": online["within10"], "within20": online["within20"],
        "pair_accuracy": judge.pair_accuracy(choices), "regret_top1_mean": top1[0], "regret_top1_p95": top1[1],
        "regret_top3_mean": top3[0], "regret_top3_p95": top3[1], "drift_samples": max(drift.values()),
        "us_per_candidate": cost(host, made, found["candidates"]),
    }  # fmt: skip
    print(f"other problems: {found['kernels']} candidates, {found['long']} over 5 us, {len(choices)} choices")
    print(f"  labels repeat within {found['label_cov']:.2%} across processes")
    named = {"all, 20 online samples": online, "all, no online correction": found["plain"], "roofline alone": found["roofline"]}
    for name, s in {**named, **found["by_family"]}.items():
        print(f"  {name:28s} {s['n']:5.0f}  MAPE {s['mape']:6.1%}  within 10% {s['within10']:4.0%}  20% {s['within20']:4.0%}")
    of_3 = f"{top3[0]:.2%} (p95 {top3[1]:.1%})"
    print(f"  pairs in order {result['pair_accuracy']:.1%}; regret {top1[0]:.2%} (p95 {top1[1]:.1%}), best of 3 measured {of_3}")
    blind = judge.regret([judge.Choice(np.arange(len(c.first)) * 1.0, c.first, c.second) for c in choices])
    print(f"  without a model, the usual tile: regret {blind.mean():.2%} (p95 {np.quantile(blind, 0.95):.1%})")
    print("  samples until back within the bars: " + ", ".join(f"{n} {v}" for n, v in drift.items()))
    print("  learning curve (MAPE): " + ", ".join(f"{n}: {v:.1%}" for n, v in curve.items()))
    print(f"  {result['us_per_candidate']:.1f} us per candidate in a batch of 100")
    whole: dict[str, Any] = {}
    for name in models:
        try:
            works = zoo_works(name, host.core)
        except zoo.ZooUnavailable as e:
            print(f"  {name}: {e}")
            continue
        s = score(works, file, host, made, twice=False)
        whole[name] = s["online"]
        took, thought = s["samples"].seconds.sum(), s["predicted"].sum()
        print(f"  {name:28s} {s['long']:5d}  MAPE {s['online']['mape']:6.1%}  within 10% {s['online']['within10']:4.0%}  20% "
              f"{s['online']['within20']:4.0%}; all kernels {took * 1e3:.2f} ms, predicted {thought * 1e3:.2f}")  # fmt: skip
    result["drift"] = dict(drift)
    result["models"] = whole
    result["learning_curve"] = {str(n): v for n, v in curve.items()}
    return result


if __name__ == "__main__":
    sys.exit(main())
