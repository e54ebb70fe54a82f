"""Native code and torch's own loops have one team of threads, whatever other OpenMP runtimes a process holds."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hotfuse.machine import openmp

PROGRAM = """
import ctypes, os, sys
import torch
ctypes.CDLL(sys.argv[1])                            # as scikit-learn loads its own
from hotfuse.backends.llvm.threads import fork_join, parallel
parallel.runtime()
torch.set_num_threads(3)
torch.ones(1 << 22).exp_().sum()                    # torch has its threads now
before = len(os.listdir("/proc/self/task"))
ran = []
BODY = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
body = BODY(lambda _, thread, team: ran.append(team))
fork = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 3)(parallel.runtime().symbols[fork_join.FORK])
fork(ctypes.cast(body, ctypes.c_void_p), None, 3, 3, 3)
print(parallel.runtime().kind, ran, len(os.listdir("/proc/self/task")) - before, torch.get_num_threads())
"""


def loaded() -> Path:
    """The file of the runtime that this process has."""
    maps = Path("/proc/self/maps")
    paths = {line.split(maxsplit=5)[-1] for line in maps.read_text().splitlines()} if maps.exists() else set[str]()
    found = next((Path(p) for p in paths if "libgomp" in Path(p).name), None)
    if found is None or openmp.torchs() is None:
        pytest.skip("torch has no such runtime here")
    return found


def test_another_runtime_in_a_folder_of_torchs_name_is_not_taken(tmp_path: Path) -> None:
    """Environments are called after what is in them: .../envs/torch/.../scikit_learn.libs/libgomp.so."""
    folder = tmp_path / "envs" / "torch"
    folder.mkdir(parents=True)
    other = folder / "libgomp-other.so.1"
    shutil.copy(loaded(), other)
    ran = subprocess.run([sys.executable, "-c", PROGRAM, str(other)], capture_output=True, text=True, check=False, timeout=120)
    assert ran.stdout.split() == ["gomp", "[3,", "3,", "3]", "0", "3"], ran.stdout + ran.stderr


def test_looking_for_it_changes_nothing() -> None:
    loaded()
    before = torch.get_num_threads()
    found = openmp.torchs()
    assert found is not None and found is openmp.torchs() and torch.get_num_threads() == before
    assert found.addresses(("omp_get_num_threads",)) and found.addresses(("no_such_function",)) is None
