"""A thousand damaged models: each one is refused with an error of ours or runs, and then runs as ONNX Runtime does.

Never a crash, a hang, a starved machine or a library's own traceback. Cases run in worker processes that say which
case they are in, so that a process that dies or stalls costs one case and names it.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

from hotfuse.session import InferenceSession
from tests.faults import make_models as mk
from tests.faults.mutation_worker import feed_for
from tests.faults.mutations import mutate

pytestmark = pytest.mark.xdist_group("mutations")

Cases = tuple[Path, dict[int, str]]
"""A folder of damaged files, and what was done to each."""
Outcomes = tuple[dict[int, dict[str, Any]], int]
"""Outcome by case, and the highest resident memory of a worker in KiB."""

SEED = 20_000
N_BYTES, N_EXTERNAL = 880, 120
CASE_TIMEOUT_S = 120.0
START_TIMEOUT_S = 120.0
CAPTURE_EVERY = 12
"""Of the cases that run, one in so many is captured: a capture costs some hundred times a run."""
IN_RANGE = 1e15
"""Beyond this, float32 arithmetic overflows somewhere and libraries differ in where."""
PEAK_KIB = 3 << 20
"""Resident memory a worker may reach: torch and every case together need well under one GiB."""


def _lines(process: subprocess.Popen[str]) -> queue.Queue[str | None]:
    found: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            found.put(line)
        found.put(None)

    threading.Thread(target=read, daemon=True).start()
    return found


def run_cases(library: str, folder: Path, count: int) -> Outcomes:
    """Outcomes by case, `crash` and `hang` among them, and the highest resident memory of a worker in KiB."""
    results: dict[int, dict[str, Any]] = {}
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HOTFUSE_CAPTURE": "off"}
    at, peak = 0, 0
    while at < count:
        command = [
            sys.executable,
            "-X",
            "faulthandler",
            "-m",
            "tests.faults.mutation_worker",
            library,
            str(folder),
            str(at),
            str(count),
        ]
        errors = (folder / f"{library}.stderr").open("w+")
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=env)
        lines = _lines(process)
        current, timeout, ended = at, START_TIMEOUT_S, "crash"
        try:
            while (line := lines.get(timeout=timeout)) is not None:
                word, _, rest = line.partition(" ")
                timeout = CASE_TIMEOUT_S
                if word == "begin":
                    current = int(rest)
                elif word == "end":
                    number, _, text = rest.partition(" ")
                    results[int(number)] = json.loads(text)
                    at = int(number) + 1
                elif word == "peak":
                    peak = max(peak, int(rest))
        except queue.Empty:
            ended = "hang"
        finally:
            process.kill()
            process.wait()
        if at < count:
            errors.seek(0)
            results[current] = {"outcome": ended, "text": f"exit status {process.returncode}\n{errors.read()[-2000:]}"}
            at = current + 1
        errors.close()
    return results, peak


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Cases:
    """The damaged files and what was done to each."""
    folder = tmp_path_factory.mktemp("mutations")
    data = mk.small().SerializeToString()
    labels: dict[int, str] = {}
    for k in range(N_BYTES):
        label, damaged = mutate(data, SEED + k)
        labels[k] = f"{label}, seed {SEED + k}"
        (folder / f"{k}.onnx").write_bytes(damaged)
    whole = mk.save_external(folder)
    beside = (folder / "small.bin").read_bytes()
    for k in range(N_BYTES, N_BYTES + N_EXTERNAL):
        label, damaged = mutate(whole.read_bytes() if k % 3 else beside, SEED + k)
        labels[k] = f"{label} of the {'model' if k % 3 else 'data'} with external data, seed {SEED + k}"
        if k % 3:
            (folder / f"{k}.onnx").write_bytes(damaged)
        else:
            other = f"s{k}".ljust(len("small.bin"), "_")
            (folder / other).write_bytes(damaged)
            (folder / f"{k}.onnx").write_bytes(whole.read_bytes().replace(b"small.bin", other.encode()))
    return folder, labels


@pytest.fixture(scope="module")
def ours(cases: Cases) -> Outcomes:
    return run_cases("hotfuse", cases[0], len(cases[1]))


def test_every_case_is_refused_or_runs(cases: Cases, ours: Outcomes) -> None:
    _, labels = cases
    results, peak = ours
    assert len(results) == len(labels) == 1000
    bad = {k: r for k, r in results.items() if r["outcome"] not in ("ran", "refused")}
    report = "\n".join(f"case {k} ({labels[k]}): {r['outcome']}\n{r['text']}" for k, r in list(bad.items())[:5])
    assert not bad, f"{len(bad)} cases\n{report}"
    assert peak < PEAK_KIB, f"a worker reached {peak} KiB"


def test_refusals_say_what_is_wrong(ours: Outcomes) -> None:
    refused = [r for r in ours[0].values() if r["outcome"] == "refused"]
    assert len(refused) > 300, "the damage is too gentle to test anything"
    assert all(r["text"].strip() for r in refused)
    assert {r["kind"] for r in refused} <= {
        "InvalidProtobuf",
        "InvalidGraph",
        "Fail",
        "InvalidArgument",
        "UnsupportedFeed",
    }


def test_what_runs_runs_correctly(cases: Cases, ours: Outcomes) -> None:
    pytest.importorskip("onnxruntime")
    folder, labels = cases
    ran = [k for k, r in ours[0].items() if r["outcome"] == "ran"]
    # ONNX Runtime may die of a damaged model; it only sees those that ran here, and its losses are not ours.
    order = folder / "ran"
    order.mkdir()
    for path in folder.iterdir():
        if path.is_file() and path.suffix not in (".onnx", ".npz", ".stderr"):
            shutil.copy(path, order)
    for i, k in enumerate(ran):
        shutil.copy(folder / f"{k}.onnx", order / f"{i}.onnx")
    theirs, _ = run_cases("onnxruntime", order, len(ran))
    compared, wrong = 0, []
    for i, k in enumerate(ran):
        if theirs[i]["outcome"] != "ran" or theirs[i]["range"] > IN_RANGE:
            continue
        compared += 1
        got, want = np.load(folder / f"{k}.hotfuse.npz"), np.load(order / f"{i}.onnxruntime.npz")
        arrays = [got[n] for n in got.files]
        problem = _differ(arrays, [want[n] for n in want.files])
        if problem and not _reference_agrees(folder / f"{k}.onnx", arrays):
            wrong.append(f"case {k} ({labels[k]}): {problem}")
    assert not wrong, f"{len(wrong)} of {compared}\n" + "\n".join(wrong[:10])
    assert compared > 150, "too few damaged models run to say anything about correctness"


def test_what_runs_also_runs_captured(cases: Cases, ours: Outcomes) -> None:
    """The tracer sees damaged models too: it captures them rightly or says why not, and the session goes on serving."""
    folder, labels = cases
    ran = [k for k, r in ours[0].items() if r["outcome"] == "ran"][::CAPTURE_EVERY]
    chosen = folder / "captured"
    chosen.mkdir()
    for path in folder.iterdir():
        if path.is_file() and path.suffix not in (".onnx", ".npz", ".stderr"):
            shutil.copy(path, chosen)
    for i, k in enumerate(ran):
        shutil.copy(folder / f"{k}.onnx", chosen / f"{i}.onnx")
    results, _ = run_cases("captured", chosen, len(ran))
    bad = [f"case {ran[i]} ({labels[ran[i]]}): {r}" for i, r in results.items() if r["outcome"] != "ran"]
    assert not bad, "\n".join(bad[:5])
    assert sum(r["in_graph"] for r in results.values()) > len(ran) // 2, "hardly any capture succeeded"


def _reference_agrees(path: Path, got: list[Any]) -> bool:
    """Where ONNX Runtime reads an attribute its own way, ONNX's own evaluator may decide."""
    model = onnx.load(path)
    session = InferenceSession(path)
    try:
        want = ReferenceEvaluator(model).run(None, feed_for(session.get_inputs()))
    except Exception:
        return False
    return not _differ(got, [np.asarray(w) for w in want])


def _differ(got: list[Any], want: list[Any]) -> str:
    if len(got) != len(want):
        return f"{len(got)} outputs instead of {len(want)}"
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        if g.dtype != w.dtype or g.shape != w.shape:
            return f"output {i} is {g.dtype}{g.shape} instead of {w.dtype}{w.shape}"
        if g.dtype.kind == "f" and not np.allclose(g, w, rtol=1e-3, atol=1e-4, equal_nan=True):
            return f"output {i} is {g.ravel()[:10]} instead of {w.ravel()[:10]}"
        if g.dtype.kind != "f" and not np.array_equal(g, w):
            return f"output {i} is {g.ravel()[:10]} instead of {w.ravel()[:10]}"
    return ""
