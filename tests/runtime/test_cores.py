"""The cores background work may use: the affinity at import, whatever an OpenMP runtime binds afterwards; and quotas."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from hotfuse.base.environment import BINDING, for_child
from hotfuse.machine import cores

needs_affinity = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system has no affinity")
needs_two = pytest.mark.skipif(len(cores.allowed()) < 2, reason="one core only")


def groups(root: Path, cgroup: str, **files: str) -> tuple[Path, Path]:
    """A made-up /sys and /proc; `files` by their path with `__` for slashes."""
    proc = root / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "self/cgroup").write_text(cgroup)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name.replace("__", "/").replace("-", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root / "sys", proc


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 1.5),
        ("0::/\n", {"cpu.max": "max 100000\n"}, None),
        ("0::/a/b\n", {"a/cpu.max": "200000 100000", "a/b/cpu.max": "max 100000"}, 2.0),  # the outer one limits the inner one
        ("4:cpu,cpuacct:/job\n", {"cpu/job/cpu.cfs_quota_us": "50000", "cpu/job/cpu.cfs_period_us": "100000"}, 0.5),
        ("4:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ("nonsense", {}, None),
        ("", {}, None),
    ],
)
def test_the_tightest_quota_around_the_process_counts(
    tmp_path: Path, cgroup: str, files: dict[str, str], expected: float | None
) -> None:
    assert cores.quota(*groups(tmp_path, cgroup, **files)) == expected


def test_a_quota_bounds_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "allowed", lambda: frozenset(range(16)))
    monkeypatch.setattr(cores, "_quota_now", lambda: None)
    assert cores.usable_cores() == 16
    for quota, expected in ((0.5, 1), (1.5, 2), (4.0, 4), (64.0, 16)):
        monkeypatch.setattr(cores, "_quota_now", lambda q=quota: q)
        assert cores.usable_cores() == expected


def test_a_quota_that_changes_is_seen_some_seconds_later(monkeypatch: pytest.MonkeyPatch) -> None:
    now, told = [0.0], [4.0]
    monkeypatch.setattr(cores, "allowed", lambda: frozenset(range(16)))
    monkeypatch.setattr(cores, "quota", lambda: told[0])
    monkeypatch.setattr(cores.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(cores, "_ask_quota_at", 0.0)
    monkeypatch.setattr(cores, "_quota", None)
    assert cores.usable_cores() == 4
    told[0] = 1.5
    assert cores.usable_cores() == 4, "files are not read in every call"
    now[0] = cores.QUOTA_AGAIN_S
    assert cores.usable_cores() == 2


@needs_affinity
@needs_two
def test_a_bound_thread_does_not_change_what_is_usable() -> None:
    seen: list[object] = []

    def bound() -> None:
        os.sched_setaffinity(0, {min(cores.allowed())})
        seen.append(cores.usable_cores())
        seen.append(cores.unbind())
        seen.append(frozenset(os.sched_getaffinity(0)))

    before = cores.usable_cores()
    thread = threading.Thread(target=bound)
    thread.start()
    thread.join()
    assert seen == [before, True, cores.allowed()]


def elsewhere(ask: Callable[[], object]) -> object:
    """What a thread that is not the main one is told."""
    told: list[object] = []
    thread = threading.Thread(target=lambda: told.append(ask()))
    thread.start()
    thread.join()
    return told[0]


def test_a_main_thread_that_is_bound_for_a_call_does_not_change_what_is_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenVINO binds whoever calls it to a core meanwhile; threads beside see that."""
    now, mask = [0.0], [frozenset({0, 1})]
    monkeypatch.setattr(cores.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(cores, "allowed_now", lambda: mask[0])
    monkeypatch.setattr(cores, "_bound", False)
    monkeypatch.setattr(cores, "threads_are_bound", lambda: False)
    monkeypatch.setattr(cores, "_allowed", mask[0])
    monkeypatch.setattr(cores, "_changed", None)
    monkeypatch.setattr(cores, "_ask_at", 0.0)
    for _ in range(4):  # seen by chance, whenever somebody looks
        mask[0] = frozenset({1})
        now[0] += cores.AGAIN_S
        assert elsewhere(cores.allowed) == {0, 1}
        mask[0] = frozenset({0, 1})
        now[0] += 0.1
        assert cores.allowed() == {0, 1}, "the main thread itself says so, however soon"
    mask[0] = frozenset({1})
    for _ in range(int(cores.SETTLED_S / cores.AGAIN_S)):
        now[0] += cores.AGAIN_S
        assert elsewhere(cores.allowed) == {0, 1}
    now[0] += cores.AGAIN_S
    assert elsewhere(cores.allowed) == {1}, "it stays so"
    mask[0] = frozenset({0})
    now[0] += cores.AGAIN_S
    assert cores.allowed() == {0}, "asked by the main thread: its calls have no other cores"


@needs_affinity
@needs_two
def test_a_forked_worker_of_a_server_has_the_cores_that_it_is_given() -> None:
    code = (
        "import os\nfrom hotfuse.machine import cores\none = {max(cores.allowed())}\nif (child := os.fork()) == 0:\n"
        "    os.sched_setaffinity(0, one)\n    os._exit(cores.allowed() != one or cores.usable_cores() != 1)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), cores.allowed() != one)"
    )
    done = subprocess.run([sys.executable, "-c", code], env=for_child(), capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["0", "True"], done.stderr[-2000:]


def test_children_are_not_told_to_bind_their_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in BINDING:
        monkeypatch.setenv(name, "true")
    assert not set(BINDING) & set(for_child())


SERVER = """
import json, os, sys, threading
if sys.argv[2] == "before torch":
    import hotfuse
import torch
import hotfuse
from hotfuse.compile import requests
from hotfuse.compile.workers.service import service
first = torch.randn(512, 512)
first @ first  # a parallel region: the runtime binds this thread, if not when it was loaded
bound = sorted(os.sched_getaffinity(0))
masks = {}
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 8)).eval()
with torch.inference_mode(), hotfuse.jit(model, settings=hotfuse.Settings(workers=sys.argv[1], idle=False)) as fast:
    x = torch.randn(16, 64)
    expected = model(x)
    def look():
        masks["job"] = sorted(os.sched_getaffinity(0))
        for w in service().pool.workers:
            masks["worker"] = sorted(os.sched_getaffinity(w.pid))
    for _ in range(20):
        assert torch.allclose(fast(x), expected, atol=1e-5)
        assert fast.wait(240)
    done = threading.Event()
    service().submit(lambda: (look(), done.set()))
    assert done.wait(60)
    tiers = fast.stats()["calls_per_tier"]
from hotfuse.machine.cores import allowed, usable_cores
print(json.dumps({"bound": bound, "allowed": sorted(allowed()), "usable": usable_cores(), **masks, "tiers": tiers}))
"""


@needs_affinity
@needs_two
@pytest.mark.parametrize(("kind", "imported"), [("fork", "behind torch"), ("fork", "before torch"), ("spawn", "behind torch")])
def test_workers_and_jobs_have_the_cores_of_the_process_where_threads_are_bound(
    kind: str, imported: str, tmp_path: Path
) -> None:
    env = {**for_child(HOME=str(tmp_path)), "OMP_PROC_BIND": "true", "OMP_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", SERVER, kind, imported], env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    every = sorted(cores.allowed())
    assert len(seen["bound"]) == 1, "the runtime binds the calling thread, or this test shows nothing"
    assert seen["allowed"] == every and seen["usable"] == cores.usable_cores()
    assert seen["job"] == every and seen["worker"] == every
    assert seen["tiers"]["0"] + seen["tiers"]["1"] + seen["tiers"]["2"] > 0, seen


NARROWED = """
import json, os, sys, threading, time
import torch
import hotfuse
from hotfuse.compile.workers.service import service
from hotfuse.machine.cores import allowed, usable_cores
torch.set_num_threads(1)
whole = sorted(allowed())
one = {whole[-1]}
masks = {}
model = torch.nn.Sequential(*[torch.nn.Linear(64, 64 + i) if not i else torch.nn.GELU() for i in range(6)]).eval()
settings = hotfuse.Settings(idle=False, record=False, hot_calls=8)
def until(done, sizes=1):
    end, calls = time.monotonic() + 120, 0
    while not done():
        assert time.monotonic() < end, "nothing of it came"
        fast(x if sizes == 1 else torch.randn(16 + calls % sizes, 64))
        calls += 1
def worker_masks():
    return [sorted(os.sched_getaffinity(w.pid)) for w in service().pool.workers]
with torch.inference_mode(), hotfuse.jit(model, settings=settings) as fast:
    x = torch.randn(16, 64)
    until(lambda: service().pool.workers)  # one that runs goes where the process goes
    if sys.argv[1] == "whole process":
        for task in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(task), one)
    else:
        os.sched_setaffinity(0, one)
    until(lambda: fast.stats()["calls_per_tier"]["1"] > 50)
    until(lambda: allowed() == one)
    # within a second where they have work, and with the next work elsewhere: calls of other sizes bring some
    until(lambda: all(mask == sorted(one) for mask in worker_masks()), sizes=5)
    def look():
        masks["job"] = sorted(os.sched_getaffinity(0))
        masks["workers"] = worker_masks()
    done = threading.Event()
    service().submit(lambda: (look(), done.set()))
    assert done.wait(60)
    decided = lambda: [d.evidence for d in fast._engine.log.decisions if "cores" in d.evidence.get("changed", "")]
    before = usable_cores()
    os.sched_setaffinity(0, set(whole))
    until(lambda: any(e["cores"] > 1 for e in decided()))
print(json.dumps({"whole": whole, "one": sorted(one), "usable": before, **masks, "now": usable_cores()}))
"""


@needs_affinity
@needs_two
@pytest.mark.parametrize("what", ["main thread", "whole process"])
def test_what_runs_beside_calls_keeps_within_cores_that_change_while_a_process_serves(what: str, tmp_path: Path) -> None:
    env = for_child(HOME=str(tmp_path), OMP_NUM_THREADS="1")
    done = subprocess.run([sys.executable, "-c", NARROWED, what], env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["usable"] == 1
    assert seen["job"] == seen["one"]
    assert all(mask == seen["one"] for mask in seen["workers"]), seen
    assert seen["now"] == cores.usable_cores()
