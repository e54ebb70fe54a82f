"""A bundle made in one home starts a process in another one: no capture, no compile, the same answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hotfuse.cache.keys import make_pair

_MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))

def net():
    return Net().eval()
"""

_SERVE = """
import json, sys, time
sys.path.insert(0, sys.argv[1])
import torch, hotfuse, built_model
from hotfuse.compile.workers.worker_pool import Pool
asked, submit = [], Pool.submit
Pool.submit = lambda pool, task: asked.append(task.header["kind"]) or submit(pool, task)
torch.set_num_threads(1)
net = built_model.Net().eval()
fast = hotfuse.jit(net, artifacts=sys.argv[2])
worst, until = 0.0, time.monotonic() + 90
with torch.no_grad():
    while time.monotonic() < until and fast.stats()["calls_per_tier"]["1"] < 5:
        x = torch.randn(16, 64)
        worst = max(worst, float((fast(x) - net(x)).abs().max()))
        time.sleep(0.005)
found = fast.stats()
print(json.dumps({"worst": worst, "asked": asked, "tiers": found["calls_per_tier"], "cache": found["cache"],
                  "text": str(fast.explain(full=True))}))
fast.close()
"""


def _env(home: Path, **more: str) -> dict[str, str]:
    return {**os.environ, "HOTFUSE_CACHE_DIR": str(home), "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path), **more}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, its bundle and the key pair that signed it."""
    place = tmp_path_factory.mktemp("built")
    (place / "built_model.py").write_text(_MODEL)
    (place / "shapes.json").write_text('[{"inputs": ["16x64"], "calls": 2}]')
    make_pair(place / "fleet.key")
    done = subprocess.run(
        [sys.executable, "-m", "hotfuse", "build", "built_model:net", "--traffic", "shapes.json", "--key", "fleet.key",
         "-o", "net.bundle", "--threads", "1", "--json"],
        cwd=place, env=_env(place / "home"), capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["entries"] > 4 and report["calls_per_tier"]["1"] > 0, report
    return place


def test_a_new_home_starts_from_the_bundle_and_compiles_nothing(built: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _SERVE, str(built), str(built / "net.bundle")], capture_output=True, text=True, timeout=200,
        env=_env(tmp_path / "another", HOTFUSE_TRUSTED_KEYS=str(built / "fleet.key.pub")), check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["tiers"]["1"] >= 5 and found["worst"] < 1e-4, found["text"]
    assert not {"ready", "torch", "plan", "unit", "runs", "tier1"} & set(found["asked"]), found["asked"]
    assert found["cache"]["from_bundles"] > 0 and not found["cache"]["refused"]
    assert "net.bundle" in found["text"] and "no kernel was compiled" in found["text"]
