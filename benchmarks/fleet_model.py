"""The performance model on a machine whose rows it never saw, and after its first samples.

    python -m benchmarks.fleet_model STORE [--seeds 5] [--json]

STORE is a profile store with measurements of several machines: `hotfuse calibrate --store STORE` on one, and `hotfuse db import
--store STORE rows.jsonl` of what `hotfuse db export` wrote on another. Every machine is left out in turn. Half of its problems are
judged and never sampled; samples are drawn from the other half, so no other tiling of a judged problem is ever seen. A line is the
median over the seeds of the mean absolute error in per cent, of kernels that take more than 5 us. Aims: 30, 15 and 10% after 0, 20
and 200 samples.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Sequence

import numpy as np

from hotfuse.hpm import fleet, model
from hotfuse.hpm.features import derive
from hotfuse.hpm.fleet import MachineRows
from hotfuse.hpm.model import PerformanceModel, TrainingRows
from hotfuse.hpm.online import Online
from hotfuse.profile.store import Store

SAMPLES = (20, 200)


def _mape(rows: TrainingRows, predicted: model.Vector) -> float:
    return 100 * model.accuracy(rows.seconds, predicted)["mape"]


def _corrected(others: PerformanceModel, part: MachineRows, seen: TrainingRows, judged: TrainingRows) -> float:
    """What serving does first: the model stays, and measurements beside its predictions shift it."""
    correction = Online()
    found = derive(seen.table, part.at)
    off = np.log(seen.seconds / others.seconds(found))
    observed = zip(found.family.tolist(), model.binding(found).tolist(), off.tolist(), strict=True)
    correction.observe_all(observed, seen.group.tolist())
    asked = derive(judged.table, part.at)
    return _mape(judged, others.seconds(asked) * np.exp(correction.shift(asked.family, model.binding(asked))))


def errors(part: MachineRows, others: Sequence[MachineRows], seed: int) -> Iterator[tuple[str, float]]:
    """One machine left out, one division of its problems."""
    rng = np.random.default_rng(seed)
    problems = rng.permutation(np.unique(part.rows.group))
    is_judged = np.isin(part.rows.group, problems[: len(problems) // 2])
    judged, rest = part.rows.pick(is_judged), part.rows.pick(~is_judged)
    asked = derive(judged.table, part.at)
    yield "rooflines", _mape(judged, asked.roofline.seconds)
    known = fleet.fit(others)
    support = fleet.support(others)
    yield "0 samples", _mape(judged, known.seconds(asked))
    for n in SAMPLES:
        if n > len(rest):
            continue
        seen = rest.pick(rng.permutation(len(rest))[:n])
        yield f"{n} samples, corrected", _corrected(known, part, seen, judged)
        yield f"{n} samples, trained with support", _mape(judged, model.best_fit(seen, part.at, support).seconds(asked))
        if n >= model.MIN_SAMPLES:
            yield f"{n} samples, own rows alone", _mape(judged, model.fit(seen, part.at).seconds(asked))
    yield "all of its own rows", _mape(judged, model.fit(rest, part.at).seconds(asked))


def main() -> int:
    """A table for every machine and number of threads."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with Store.open(args.store) as store:
        parts = fleet.machines(store)
    result: dict[str, dict[str, float]] = {}
    for part in parts:
        others = [p for p in parts if p.machine != part.machine]
        if not others:
            print(f"{part.name}: no other machine in the store", file=sys.stderr)
            continue
        found: dict[str, list[float]] = {}
        for seed in range(args.seeds):
            for name, error in errors(part, others, seed):
                found.setdefault(name, []).append(error)
        told = {n: statistics.median(e) for n, e in found.items()}
        title = f"{part.name}, {part.at.threads} threads, {len(part.rows)} rows"
        result[title] = {n: round(e, 1) for n, e in told.items()}
        print(f"\n{title}")
        for n, e in told.items():
            print(f"  {n:36s} {e:6.1f}%")
    if args.json:
        print(json.dumps(result))
    return 0 if result else 1


if __name__ == "__main__":
    sys.exit(main())
