"""The performance model on a machine whose rows it never saw, and after its first samples.

    python -m benchmarks.fleet_model STORE [--rows FILE]... [--calibrate 60s --threads 1,16] [--out FILE] [--seeds 5] [--json]

STORE is a profile store with measurements of several machines: `hotfuse calibrate --store STORE` on one, and `--rows` (or `hotfuse
db import`) of what `hotfuse db export` wrote on others. Every machine is left out in turn. With `--calibrate` this machine is
measured first, so long for each number of threads, and is the only one left out; `--out` then writes its rows, for other machines.
Files that end in `.gz` are compressed.

Half of the problems of the machine left out are judged and never sampled; samples are drawn from the other half, so no other tiling
of a judged problem is ever seen. A line is the median over the seeds of the mean absolute error in per cent, of kernels that take
more than 5 us. Aims: 30, 15 and 10% after 0, 20 and 200 samples. Behind 0 samples stand the families that it is made of.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import numpy as np

from hotfuse.cli.calibrate import seconds
from hotfuse.compile.learn.calibrate import calibrate
from hotfuse.compile.workers.worker_pool import machine_pool
from hotfuse.hpm import fleet, model
from hotfuse.hpm.features import derive
from hotfuse.hpm.fleet import MachineRows
from hotfuse.hpm.model import PerformanceModel, TrainingRows
from hotfuse.hpm.nearby import Nearby
from hotfuse.hpm.online import Online
from hotfuse.hpm.work import FAMILIES
from hotfuse.machine.fingerprint import fingerprint
from hotfuse.profile.exchange import own_uid
from hotfuse.profile.importing import import_rows
from hotfuse.profile.store import Store

SAMPLES = (20, 200)
MIN_JUDGED = 5
"""Kernels of a family, without which its error is not told."""


def _open(path: Path, mode: str) -> IO[str]:
    return gzip.open(path, f"{mode}t") if path.suffix == ".gz" else path.open(mode)  # type: ignore[return-value]


def measure(store: Store, budget_s: float, threads: Sequence[int], out: Path | None) -> int:
    """This machine, with each number of threads; its number in the store. Its rows go to a file before others come in."""
    for n in threads:
        with machine_pool() as pool:
            report = calibrate(store, budget_s, executor=pool, threads=n)
        told = f"{report.measured} kernels measured with {n} threads in {report.seconds:.0f} s"
        print(told, f"({sum(report.refused.values())} left out)", flush=True)
    if out is not None:
        store.database.write(own_uid)
        with _open(out, "w") as file:
            file.writelines(json.dumps({"table": t, "row": r}) + "\n" for t, r in store.export() if not t.startswith("hpm_"))
        print(f"its rows are in {out}, {out.stat().st_size / 1e6:.1f} MB", flush=True)
    return store.machine(fingerprint())


def _mape(rows: TrainingRows, predicted: model.Vector) -> float:
    return 100 * model.accuracy(rows.seconds, predicted)["mape"]


def _corrected(others: PerformanceModel, part: MachineRows, seen: TrainingRows, judged: TrainingRows) -> float:
    """What serving does first: the model stays, and measurements beside its predictions move them."""
    correction = Nearby(Online())
    found = derive(seen.table, part.at)
    correction.observe(found, np.log(seen.seconds / others.seconds(found)), seen.group.tolist())
    asked = derive(judged.table, part.at)
    return _mape(judged, others.seconds(asked) * np.exp(correction.of(asked, model.binding(asked))))


def errors(part: MachineRows, known: PerformanceModel, support: model.Support | None, seed: int) -> Iterator[tuple[str, float]]:
    """One machine left out, one division of its problems; `known` and `support`: what the others say."""
    rng = np.random.default_rng(seed)
    problems = rng.permutation(np.unique(part.rows.group))
    is_judged = np.isin(part.rows.group, problems[: len(problems) // 2])
    judged, rest = part.rows.pick(is_judged), part.rows.pick(~is_judged)
    asked = derive(judged.table, part.at)
    yield "rooflines", _mape(judged, asked.roofline.seconds)
    first = known.seconds(asked)
    yield "0 samples", _mape(judged, first)
    for number, family in enumerate(FAMILIES):
        found = model.accuracy(judged.seconds[asked.family == number], first[asked.family == number])
        if found["n"] >= MIN_JUDGED:
            yield f"0 samples, {family}", 100 * found["mape"]
    for n in SAMPLES:
        if n > len(rest):
            continue
        seen = rest.pick(rng.permutation(len(rest))[:n])
        yield f"{n} samples, corrected", _corrected(known, part, seen, judged)
        yield f"{n} samples, trained with support", _mape(judged, model.best_fit(seen, part.at, support).seconds(asked))
        if n >= model.MIN_SAMPLES:
            yield f"{n} samples, own rows alone", _mape(judged, model.fit(seen, part.at).seconds(asked))
    yield "all of its own rows", _mape(judged, model.fit(rest, part.at).seconds(asked))


def left_out(parts: Sequence[MachineRows], only: int | None, seeds: int) -> dict[str, dict[str, float]]:
    """The table of every machine and number of threads, or of one machine's."""
    result: dict[str, dict[str, float]] = {}
    for part in parts:
        others = [p for p in parts if p.machine != part.machine]
        if only not in (None, part.machine):
            continue
        if not others:
            print(f"{part.name}: no other machine in the store", file=sys.stderr)
            continue
        found: dict[str, list[float]] = {}
        known, support = fleet.fit(others), fleet.support(others)
        for seed in range(seeds):
            for name, error in errors(part, known, support, seed):
                found.setdefault(name, []).append(error)
        told = {n: statistics.median(e) for n, e in found.items()}
        title = f"{part.name}, {part.at.threads} threads, {len(part.rows)} rows"
        result[title] = {n: round(e, 1) for n, e in told.items()}
        print(f"\n{title}")
        for n, e in told.items():
            print(f"  {n:36s} {e:6.1f}%", flush=True)
    return result


def main() -> int:
    """A table for every machine and number of threads, or for this one's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store")
    parser.add_argument("--rows", type=Path, action="append", default=[], help="what `hotfuse db export` wrote on another machine")
    parser.add_argument("--calibrate", type=seconds, metavar="TIME", help="measure this machine first: 60s, 3m")
    parser.add_argument("--threads", default="1", help="with so many threads, one after the other")
    parser.add_argument("--out", type=Path, help="write this machine's rows there")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with Store.open(args.store) as store:
        threads = [int(n) for n in args.threads.split(",")]
        only = measure(store, args.calibrate, threads, args.out) if args.calibrate else None
        for path in args.rows:
            with _open(path, "r") as lines:
                import_rows(store, lines)
        parts = fleet.machines(store)
    result = left_out(parts, only, args.seeds)
    if args.json:
        print(json.dumps(result))
    return 0 if result else 1


if __name__ == "__main__":
    sys.exit(main())
