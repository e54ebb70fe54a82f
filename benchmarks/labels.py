"""Labels for benchmarks that compare predictions with measurements: compiled once, measured by processes of their own, in pieces.

    kernels.bin     what workers compiled: graphs, sizes, code; written once
    times-0.jsonl   what the first process measured, a line a batch; times-1.jsonl the second

    again-0.jsonl   what further processes measured, of calls whose two labels lie apart by more than a tenth

Measuring stops when its time is up and goes on behind what there is, so that each piece fits a short quiet phase. No label is
taken by a process that compiles, and no two labels of a candidate by the same process. A label that was disturbed throughout is
seen by the other one: such calls are measured again, at most three times, and of all their labels the two that agree best count.
How many there were is printed.

All ways of a problem take turns in one batch, so that a phase in which the machine is slow slows them alike and leaves their order
as it is. Labels are not divided by such phases as calibration's rows are: a model finds those, and labels judge models.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hotfuse.base.errors import HotfuseError
from hotfuse.compile.answer_bodies import KernelAnswer, checked, received
from hotfuse.compile.learn import measure
from hotfuse.compile.workers import wire
from hotfuse.compile.workers.slot import PoolLimits
from hotfuse.compile.workers.task import Task
from hotfuse.compile.workers.worker_pool import Pool
from hotfuse.hpm.work import Candidate
from hotfuse.ir.graph import Graph
from hotfuse.ir.text import parse, show
from hotfuse.lower.cpu.tiling import Core

PASSES = 24
BATCH_BYTES = 768 << 20
"""Data that is in memory at once, and what else the ways of one problem need: the more, the further apart the turns of one kernel
lie."""
AGREE, AGAIN = 0.1, 3
"""How far apart two labels may lie, and how often calls are measured again whose labels lie further apart."""
Times = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Work:
    """One kernel, or the library's for `core` None, with the calls to measure it at."""

    problem: str
    graph: Graph
    sizes: tuple[dict[str, int], ...]
    core: Core | None
    tag: str = ""
    """What a benchmark wants to find it by."""


class Unfinished(Exception):
    """Time is up; the same command goes on with the rest."""


def compiled(works: Sequence[Work], path: Path) -> None:
    """Have workers compile, unless an earlier run did; what has no kernel is left out."""
    if path.exists():
        return
    part = path.with_suffix(".part")
    pool = Pool(PoolLimits(2, share=1.0))
    asked = [
        pool.submit(Task("a kernel", measure.request(w.graph, w.core), timeout=120.0)) if w.core else None
        for w in works
    ]
    with part.open("wb") as file:
        for w, future in zip(works, asked, strict=True):
            try:
                answer, codes = checked(future.result()) if future is not None else ({}, [])
            except HotfuseError as e:
                wire.send(file, {"own": _text(w), "refused": e.because or e.what})
                continue
            wire.send(file, {**answer, "own": _text(w)}, codes)
    pool.close(1.0)
    part.rename(path)


def _text(w: Work) -> dict[str, Any]:
    core = [w.core.lanes, w.core.registers, w.core.l1, w.core.l2] if w.core else None
    return {"problem": w.problem, "graph": show(w.graph), "calls": w.sizes, "core": core, "tag": w.tag}


def _read(path: Path) -> Iterator[tuple[Work, dict[str, Any], list[bytes]]]:
    with path.open("rb") as file:
        while True:
            try:
                answer, codes = wire.receive(file)
            except EOFError:
                return
            own = answer.pop("own")
            core = Core(*own["core"]) if own["core"] else None
            yield Work(own["problem"], parse(own["graph"]), tuple(own["calls"]), core, own["tag"]), answer, codes


def works_in(path: Path) -> list[Work]:
    """Everything that compiled (and the library's), in the order of its labels."""
    return [w for w, answer, _ in _read(path) if "refused" not in answer]


def refusals(path: Path) -> dict[tuple[str, str], str]:
    """Why there is no kernel: by problem and tag."""
    return {(w.problem, w.tag): str(answer["refused"]) for w, answer, _ in _read(path) if "refused" in answer}


def _known(out: Path) -> dict[int, tuple[float, float]]:
    if not out.exists():
        return {}
    found: dict[int, tuple[float, float]] = {}
    for line in out.read_text().splitlines():
        found.update({int(i): (s, n) for i, s, n in json.loads(line)})
    return found


def label(path: Path, out: Path, until: float, passes: int, only: Set[int] | None = None) -> bool:
    """Measure what has no label yet, or `only` some of it, in batches that fit memory; whether nothing is left."""
    torch.set_num_threads(1)
    known, waiting, held = _known(out), list[tuple[int, measure.BoundCall]](), 0
    failed: list[int] = []
    shelf = measure.Shelf()
    count = 0

    def flush() -> None:
        measure.timed([b for _, b in waiting], passes)
        rows = [(i, *b.figure()) for i, b in waiting] + [(i, 0.0, 0.0) for i in failed]
        with out.open("a") as file:
            file.write(json.dumps(rows) + "\n")
        waiting.clear()
        failed.clear()

    last = ""
    for work, answer, codes in _read(path):
        if "refused" in answer:
            continue
        if held > BATCH_BYTES and work.problem != last:
            flush()
            held, shelf = 0, measure.Shelf()
            if time.time() > until:
                return False
        kernel, last = None, work.problem
        for sizes in work.sizes:
            count += 1
            if count - 1 in known or (only is not None and count - 1 not in only):
                continue
            try:
                kernel = kernel or (measure.candidate_from(*received((answer, codes), KernelAnswer)) if work.core else None)
                bound = measure.bind(Candidate(work.graph, sizes, work.core), work.problem, kernel, shelf)
                bound.call()  # made-up indices may point anywhere
            except (HotfuseError, IndexError, RuntimeError) as e:
                print(f"left out: {e}", file=sys.stderr)
                failed.append(count - 1)
                continue
            waiting.append((count - 1, bound))
            held += bound.bytes
    if waiting or failed:
        flush()
    return True


def labelled(path: Path, turns: int, until: float, passes: int = PASSES) -> list[Times]:
    """Labels by so many processes, one after the other: seconds and noise of each call; raises Unfinished."""
    found: list[Times] = []
    for turn in range(turns):
        known = _by_another(path, f"times-{turn}", until, passes)
        found.append(np.array([known[i] for i in range(len(known))]).reshape(-1, 2))
    for nth in range(AGAIN if turns > 1 else 0):
        doubtful = apart(found)
        if not doubtful:
            break
        print(
            f"labels: {len(doubtful)} calls measured again, whose labels lie apart by more than {AGREE:.0%}", flush=True
        )
        agreed(found, _by_another(path, f"again-{nth}", until, passes, doubtful))
    return found


def apart(found: Sequence[Times]) -> list[int]:
    """Calls that ran and whose labels do not agree."""
    seconds = np.array([times[:, 0] for times in found])
    low, high = seconds.min(0), seconds.max(0)
    return np.flatnonzero((low > 0) & (high > (1 + AGREE) * low)).tolist()


def agreed(found: Sequence[Times], again: Mapping[int, tuple[float, float]]) -> None:
    """Put new labels in the place of those that stand alone: what remains of a call lies as close together as its labels allow."""
    for i, new in again.items():
        if new[0] <= 0:
            continue
        every = [(float(t[i, 0]), float(t[i, 1])) for t in found]
        spread = [_spread([*every[:k], new, *every[k + 1 :]]) for k in range(len(every))]
        worst = min(range(len(every)), key=spread.__getitem__)
        if spread[worst] < _spread(every):
            found[worst][i] = new


def _spread(labels: Sequence[tuple[float, float]]) -> float:
    seconds = [s for s, _ in labels]
    return max(seconds) / min(seconds)


def _by_another(
    path: Path, name: str, until: float, passes: int, only: Sequence[int] = ()
) -> dict[int, tuple[float, float]]:
    """What a process of its own measured, now or earlier; raises Unfinished."""
    out = path.with_name(f"{path.stem}-{name}.jsonl")
    done = out.with_suffix(".done")
    while not done.exists():
        if time.time() > until:
            raise Unfinished
        some = ",".join(map(str, only))
        command = [sys.executable, "-m", "benchmarks.labels", str(path), str(out), str(until), str(passes), some]
        if subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip() == "done":
            done.touch()
    return _known(out)


def main() -> int:
    """The other process."""
    path, out, until, passes, some = sys.argv[1:]
    only = {int(i) for i in some.split(",")} if some else None
    print("done" if label(Path(path), Path(out), float(until), int(passes), only) else "more")
    return 0


if __name__ == "__main__":
    sys.exit(main())
