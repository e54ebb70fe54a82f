"""What a team of threads loses to whatever else runs: calls on every core, and on all but one, beside others.

    python -m benchmarks.teams [--seconds S]

A plain encoder of six layers (no Hotfuse) serves calls for some seconds in each case: alone, beside processes of the lowest
priority that compute, and beside a thread of its own that runs Python under the courtesy that background jobs have. The table has
medians and 90th percentiles in milliseconds. Decision 42 rests on it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

import torch

from hotfuse.compile.workers.background_priority import background_priority, patient, punctual
from hotfuse.machine.cores import usable_cores

SPIN = "import os; os.nice(19)\nwhile True: sum(range(1000))"


@contextmanager
def _processes(count: int) -> Generator[None]:
    started = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(count)]
    time.sleep(0.5)
    try:
        yield
    finally:
        for p in started:
            p.kill()
            p.wait()


@contextmanager
def _thread(busy_s: float, of_s: float) -> Generator[None]:
    """A job that runs Python for a part of the time."""
    over = threading.Event()

    def job() -> None:
        patient()
        while not over.is_set():
            until, found = time.perf_counter() + busy_s, dict[int, str]()
            while time.perf_counter() < until:
                found[1] = str(2)
            time.sleep(of_s - busy_s)

    punctual()
    with background_priority():
        thread = threading.Thread(target=job)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def _times(call: Callable[[], object], seconds: float) -> tuple[float, float]:
    until, found = time.perf_counter() + seconds, list[float]()
    while time.perf_counter() < until or len(found) < 3:
        begin = time.perf_counter()
        call()
        found.append((time.perf_counter() - begin) * 1e3)
    found.sort()
    return found[len(found) // 2], found[len(found) * 9 // 10]


CASES = {
    "alone": lambda: _processes(0), "1 niced process": lambda: _processes(1),
    f"{max(1, usable_cores() // 2)} niced processes": lambda: _processes(max(1, usable_cores() // 2)),
    "a Python thread": lambda: _thread(0.05, 0.05), "a Python thread, 1 ms of 4": lambda: _thread(0.001, 0.004),
    "a Python thread, 1 ms of 10": lambda: _thread(0.001, 0.010),
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.5, help="of each cell")
    seconds = parser.parse_args(arguments).seconds
    layer = torch.nn.TransformerEncoderLayer(768, 12, 3072, batch_first=True)
    model, x = torch.nn.TransformerEncoder(layer, 6, enable_nested_tensor=False).eval(), torch.randn(1, 128, 768)
    cores = usable_cores()
    print(f"| beside | {cores} threads on {cores} cores | {cores - 1} threads |\n| --- | --- | --- |")
    with torch.inference_mode():
        for name, beside in CASES.items():
            cells: list[str] = []
            for threads in (cores, max(1, cores - 1)):
                torch.set_num_threads(threads)
                _times(lambda: model(x), 0.5)
                with beside():
                    cells.append("{:.1f} ({:.1f})".format(*_times(lambda: model(x), seconds)))
            print(f"| {name} | {' | '.join(cells)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
