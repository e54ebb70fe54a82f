"""A background thread that waits or has ended its job holds no OpenMP threads: everybody's loops would be slower for them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from hotfuse.machine import openmp

PROGRAM = """
import os, sys, threading
import torch
import hotfuse.compile.workers.background_priority as module
module.usable_cores = lambda: int(sys.argv[1])
from hotfuse.compile.workers.background_priority import background_priority
from hotfuse.machine import openmp
torch.set_num_threads(3)

def threads():
    return len(os.listdir("/proc/self/task"))

def compute():
    torch.ones(1 << 22).exp_().sum()

seen = []
openmp.give_up_team()
def job():
    seen.append(threads())
    with background_priority():
        compute()
        seen.append(threads())
        with background_priority.waiting():
            seen.append(threads())
        compute()
        seen.append(threads())
    seen.append(threads())
worker = threading.Thread(target=job)
worker.start()
worker.join()
compute()
first = threads()
with background_priority.waiting():                 # a thread that runs no job keeps what it has
    kept = threads()
print([n - seen[0] for n in seen], kept - first)
"""


@pytest.mark.parametrize(("cores", "seen"), [(16, "[0, 2, 0, 2, 0] 0"), (2, "[0, 2, 2, 2, 2] 0")])
def test_what_waits_gives_its_team_up(cores: int, seen: str) -> None:
    """Where a team leaves a core to background work; on two cores workers run while threads sleep between loops."""
    if openmp.torchs() is None or openmp._pausing() is None or not os.path.isdir("/proc/self/task"):
        pytest.skip("torch's runtime keeps no such count")
    ran = subprocess.run([sys.executable, "-c", PROGRAM, str(cores)], capture_output=True, text=True, check=False, timeout=120)
    assert ran.stdout.strip() == seen, ran.stdout + ran.stderr


def test_results_are_the_same_behind_it() -> None:
    """A team is made anew by the next loop, in native code as in torch's own."""
    x = torch.randn(1 << 20)
    want = x.exp()
    compute: Callable[[], torch.Tensor] = x.exp
    for _ in range(3):
        openmp.give_up_team()
        assert torch.equal(compute(), want)
