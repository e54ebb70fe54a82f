"""A second process begins with what the first one found out: no capture, no compile, the same plan; and what no longer holds is
made anew, with the reason told."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hotfuse.base.settings import Settings
from hotfuse.cache.entry import MAGIC, pack, read_head
from hotfuse.cache.folder import Folder
from hotfuse.cache.place import opened

_MODEL = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))

class Net(nn.Module):
    def __init__(self, width=64, depth=3):
        super().__init__()
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
    def forward(self, x):
        return self.blocks(x).softmax(-1)
"""

_SERVE = """
import json, sys, time
sys.path.insert(0, sys.argv[1])
import torch, hotfuse, users_model
from hotfuse.base.settings import Settings
from hotfuse.compile.workers.worker_pool import Pool
asked, submit = [], Pool.submit
Pool.submit = lambda pool, task: asked.append(task.header["kind"]) or submit(pool, task)
how = json.loads(sys.argv[2])
torch.set_num_threads(how.get("threads", 1))
torch.manual_seed(how.get("weights", 0))
net = users_model.Net().eval()
fast = hotfuse.jit(net, settings=Settings())
worst, rows = 0.0, how.get("rows", [16])
until = time.monotonic() + how.get("seconds", 100)
with torch.no_grad():
    i = 0
    while time.monotonic() < until:
        x = torch.randn(rows[i % len(rows)], 64)
        i += 1
        worst = max(worst, float((fast(x) - net(x)).abs().max()))
        if i > 40 and fast.stats()["calls_per_tier"]["1"] and fast.wait(30) and i > how.get("least", 0):
            break
        if "reason" in how and any(how["reason"] in k for k in fast.stats()["cache"]["reasons"]):
            break
        time.sleep(0.005)
found, said = fast.stats(), fast.explain(full=True)
print(json.dumps({"worst": worst, "asked": asked, "tiers": found["calls_per_tier"], "compile": found["compile"],
                  "cache": found["cache"],
                  "decisions": [[d["action"], d["why"]] for d in said.to_dict()["decisions"]], "text": str(said),
                  "raced": [d["evidence"] for d in said.to_dict()["decisions"] if "race" in d["evidence"]],
                  "notes": [n for s in said.to_dict()["sites"] for p in s["plans"] for n in p["notes"]]}))
fast.close()
"""


class Machine:
    """Processes that share a home."""

    def __init__(self, home: Path) -> None:
        self.home = home
        if not (home / "users_model.py").exists():
            (home / "users_model.py").write_text(_MODEL)

    @property
    def code(self) -> Path:
        return self.home / "code"

    def start(self, environ: dict[str, str] | None = None, **how: Any) -> subprocess.Popen[str]:
        env = {**os.environ, "HOTFUSE_CACHE_DIR": str(self.home), "HOTFUSE_CACHE": str(self.code), "OMP_NUM_THREADS": "1",
               **(environ or {})}  # fmt: skip
        return subprocess.Popen([sys.executable, "-c", _SERVE, str(self.home), json.dumps(how)], env=env, text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # fmt: skip

    def serve(self, environ: dict[str, str] | None = None, **how: Any) -> dict[str, Any]:
        return told(self.start(environ, **how))


COMPILING = {"ready", "torch", "onnx", "plan", "unit", "runs", "tier1"}
"""Requests to workers that a process which knows the model has no need of."""


WON = ["deploy", "it won in an earlier process, and was proven again"]


def told(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    return json.loads(out.splitlines()[-1])


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> tuple[Machine, dict[str, Any]]:
    """A home in which one process has served."""
    machine = Machine(tmp_path_factory.mktemp("home"))
    first = machine.serve()
    assert first["worst"] < 1e-4 and first["tiers"]["1"] > 0, first["text"]
    assert set(first["asked"]) >= {"ready", "torch", "plan", "unit", "runs"} and first["cache"]["written"] > 0
    return machine, first


@pytest.fixture
def machine(taught: tuple[Machine, dict[str, Any]], tmp_path: Path) -> Machine:
    """A copy of it."""
    shutil.copytree(taught[0].home, tmp_path / "home", copy_function=shutil.copy2)
    return Machine(tmp_path / "home")


@pytest.mark.budget_s(35)
def test_a_second_process_compiles_and_captures_nothing(machine: Machine) -> None:
    second = machine.serve()
    assert second["worst"] < 1e-4 and second["tiers"]["1"] > 0
    assert not COMPILING & set(second["asked"]), second["asked"]
    assert second["compile"]["units_compiled"] == second["compile"]["units_graphs"] == 0
    assert WON in second["decisions"], second["text"]
    tier0 = ["deploy", "outputs agreed with the model's own"]
    assert second["decisions"].index(WON) < second["decisions"].index(tier0)  # it was ready when the first answer was there
    assert second["cache"]["refused"] == 0
    looked = second["asked"].count("probes") + second["asked"].count("counting")  # where the first process never looked
    assert second["cache"]["written"] <= 2 * looked  # an entry and a note about it each
    assert any("from the cache" in n for n in second["notes"])
    assert "cache: " in second["text"]


@pytest.mark.parametrize("proven", [True, False], ids=["proven", "not even proven"])
def test_a_plan_whose_race_was_not_over_is_raced_at_once(machine: Machine, *, proven: bool) -> None:
    """As a process leaves it that ends before its race does, or before its proof; the one behind that knows more."""
    folder = opened(machine.code, Settings(cache_dir=machine.home))
    assert isinstance(folder, Folder)
    files = {f: read_head(f.read_bytes(), MAGIC)[0] for f in machine.code.glob("??/*.hf")}
    verdicts = [f for f, head in files.items() if "won" in head["body"]]
    assert verdicts
    for file in verdicts:
        file.unlink()
        if proven:
            name = file.name.removesuffix(".hf")
            file.write_bytes(pack(name, {"won": None, "evidence": {"proven_on": 4}}, (), folder.keys))
    second = machine.serve(least=100)
    assert second["worst"] < 1e-4 and second["tiers"]["1"] > 0
    assert not COMPILING & set(second["asked"]), second["asked"]
    assert WON not in second["decisions"] and second["compile"]["units_graphs"] == 0, second["text"]
    raced = [d for d in second["raced"] if d["tier"] == 1]
    assert raced and raced[0].get("against") == ("the model's own code" if proven else raced[0].get("against")), second["text"]


def test_other_weights_take_the_same_code_and_are_right(machine: Machine) -> None:
    second = machine.serve(weights=5)
    assert second["worst"] < 1e-4 and second["tiers"]["1"] > 0 and second["compile"]["units_compiled"] == 0


def test_without_the_cache_everything_is_compiled(machine: Machine) -> None:
    second = machine.serve({"HOTFUSE_CACHE": "off"})
    assert second["worst"] < 1e-4 and second["compile"]["units_compiled"] > 0
    assert "switched off" in second["cache"]["state"]


def damaged(data: bytes, kind: int) -> bytes:
    """Cut, empty, or one bit of it is another."""
    half = len(data) // 2
    return (data[:half], b"", data[:half] + bytes([data[half] ^ 0x40]) + data[half + 1 :])[kind]


@pytest.mark.parametrize("damage", ["every entry in one of four ways", "foreign"])
def test_what_is_damaged_is_refused_told_and_made_anew(machine: Machine, damage: str) -> None:
    """That no damage of an entry is believed, byte by byte: `tests/contract/test_cache.py`."""
    files = sorted(machine.code.glob("??/*.hf"))
    if damage == "foreign":
        (machine.home / "cache.key").unlink()
    else:
        data = [f.read_bytes() for f in files]
        for n, f in enumerate(files):
            f.write_bytes(data[n - 1] if n % 4 == 3 else damaged(data[n], n % 4))  # the fourth is another's
    second = machine.serve()
    assert second["worst"] < 1e-4 and second["tiers"]["1"] > 0 and second["compile"]["units_compiled"] > 0
    assert second["cache"]["refused"] > 0 and "an entry was refused" in second["text"]


def test_another_number_of_threads_is_another_plan_and_the_reason_is_told(machine: Machine) -> None:
    reason = "another number of threads"
    second = machine.serve(threads=2, reason=reason, environ={"OMP_NUM_THREADS": "2"})
    assert second["worst"] < 1e-4
    assert any(reason in k for k in second["cache"]["reasons"]), second["text"]


def test_a_changed_model_is_captured_anew(machine: Machine) -> None:
    (machine.home / "users_model.py").write_text(_MODEL.replace("gelu", "relu"))
    second = machine.serve()
    assert second["worst"] < 1e-4 and second["compile"]["units_compiled"] > 0


def test_processes_that_start_at_once_compile_once_between_them(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    found = [told(p) for p in [machine.start() for _ in range(4)]]
    assert all(f["worst"] < 1e-4 and f["tiers"]["1"] > 0 for f in found)
    assert sum(f["compile"]["units_graphs"] for f in found) == 1
    assert all(f["cache"]["refused"] == 0 for f in found)


def test_processes_with_one_size_each_become_warm(machine: Machine) -> None:
    """The first had 16 rows. The second captures them open, the third begins with its plan, and 16 rows keep theirs."""
    second = machine.serve(rows=[24])
    assert second["worst"] < 1e-4 and second["tiers"]["1"] > 0 and "torch" in second["asked"]
    third = machine.serve(rows=[40])
    assert third["worst"] < 1e-4 and third["tiers"]["1"] > 0, third["text"]
    assert not {"ready", "torch"} & set(third["asked"]), third["asked"]
    assert WON in third["decisions"], third["text"]
    first_again = machine.serve(rows=[16])
    assert not COMPILING & set(first_again["asked"]), first_again["asked"]


def test_calls_of_other_sizes_begin_with_the_plan_there_is(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.serve(rows=[16, 24, 40], least=200)
    second = machine.serve(rows=[33, 17, 50])
    assert second["worst"] < 1e-4 and second["tiers"]["1"] > 0
    assert WON in second["decisions"], second["text"]


def test_a_file_that_was_rewritten_finds_the_plans_of_its_graphs(machine: Machine) -> None:
    """Other names and lines: the model is captured anew, but what is computed is the same, and so is the plan."""
    text = _MODEL.replace("class Block", "# moved\n\n\nclass Layer").replace("Block(width)", "Layer(width)")
    (machine.home / "users_model.py").write_text(text)
    again = machine.serve()
    assert "torch" in again["asked"] and not {"plan", "unit", "tier1"} & set(again["asked"])
    assert again["compile"]["units_compiled"] == 0 and again["worst"] < 1e-5
