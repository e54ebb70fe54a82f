"""`hotfuse show package.module:name`: a PyTorch model at every stage, and what is said of names and inputs that do not fit."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import hotfuse
from hotfuse.cli import app
from hotfuse.cli.torch_models import is_torch_name, owning_errors

SOURCE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(16, 32)

    def forward(self, x):
        return torch.relu(self.up(x)) + 1

net = Net().eval()
number = 3

def pair():
    return Net().eval(), (torch.zeros(3, 16),)

def one():
    return Net().eval(), torch.zeros(5, 16)

def alone():
    return Net().eval()

def broken():
    raise ValueError("no weights here")

def wants(x):
    return x
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a module of the user's; the import system is as before afterwards."""
    (tmp_path / "users_models.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("HOTFUSE_CAPTURE", "inline")
    monkeypatch.delitem(sys.modules, "users_models", raising=False)
    yield tmp_path
    sys.modules.pop("users_models", None)


def show(*args: str) -> Any:
    done = CliRunner().invoke(app, ["show", *args, "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.output)


@pytest.mark.parametrize(("name", "options", "rows"), [
    ("users_models:pair", (), "3"), ("users_models:one", (), "5"), ("users_models:alone", ("--input", "4x16"), "4"),
    ("users_models:net", ("--input", "7x16"), "7"),
])  # fmt: skip
def test_a_module_or_what_returns_one(folder: Path, name: str, options: tuple[str, ...], rows: str) -> None:
    text = show(name, *options)["graph"]
    assert "aten.linear" in text and f"f32[{rows}, 16]" in text


def test_a_size_left_open(folder: Path) -> None:
    found = show("users_models:net", "--input", "7?x16")
    assert "f32[7, 16]" not in found["graph"] and any("16]" in i for i in found["inputs"])


@pytest.mark.parametrize("stage", ["partitions", "costs", "kernels", "tile", "asm"])
def test_every_stage(folder: Path, stage: str) -> None:
    found = show("users_models:pair", "--stage", stage)
    assert found["stage"] == stage
    if stage in ("tile", "asm"):
        assert any("linear" in k["name"] for k in found["kernels"])


@pytest.mark.parametrize(("args", "message"), [
    (("users_models:nothing",), "users_models has no nothing"),
    (("no_such_module:net",), "no_such_module cannot be imported"),
    (("users_models:broken",), "ValueError: no weights here"),
    (("users_models:wants",), "missing 1 required positional argument"),
    (("users_models:number",), "gives int, no module or function"),
    (("users_models:net",), "gives no example inputs"),
    (("users_models:pair", "--input", "2x16"), "brings its own inputs"),
    (("users_models:net", "--input", "2xx16"), "is no shape"),
    (("users_models:net", "--input", "2x16:float31"), "is no shape"),
    (("users_models:net", "--input", "1?x16"), "leaves a dim of size 0 or 1 open"),
    (("users_models:net", "--input", "2x16", "--dim", "a=3"), "--dim is for ONNX models"),
    (("users_models:net", "--input", "2x17"), "cannot be captured"),
    (("model.onnx", "--input", "2x16"), "--input is for PyTorch models"),
    (("users_models", "--input", "2x16"), "or package.module:name of a PyTorch model"),
    (("users_models.py",), "users_models:NAME, from its folder"),
])  # fmt: skip
def test_what_does_not_fit_is_said(folder: Path, args: tuple[str, ...], message: str) -> None:
    done = CliRunner().invoke(app, ["show", *args])
    assert done.exit_code != 0 and message in " ".join(done.output.split()), done.output


def test_files_are_no_names(folder: Path) -> None:
    assert is_torch_name("users_models:net") and is_torch_name("a.b:c.d")
    assert not is_torch_name("model.onnx") and not is_torch_name("c:\\models") and not is_torch_name("./a:b")
    (folder / "odd:name").write_text("")
    assert not is_torch_name("odd:name")


@pytest.mark.parametrize("command", [("run",), ("explain", "--calls", "1"), ("watch", "--calls", "1", "--seconds", "1")])
def test_what_the_model_raises_is_told_as_its_own(folder: Path, command: tuple[str, ...]) -> None:
    done = CliRunner().invoke(app, [command[0], "users_models:net", "--input", "2x17", *command[1:]])
    said = " ".join(done.output.split())
    assert done.exit_code == 2 and "ModelError: users_models:net fails when it is called" in said and "17 and 16x32" in said, said


def test_a_fault_of_our_own_is_not_told_as_the_models() -> None:
    with pytest.raises(RuntimeError, match="mat2"), owning_errors("users_models:net"):
        exec(compile("raise RuntimeError('mat2')", str(Path(hotfuse.__file__).parent / "api.py"), "exec"))


def test_run_takes_a_pytorch_model(folder: Path) -> None:
    done = CliRunner().invoke(app, ["run", "users_models:pair", "--calls", "3", "--json", "--output", f"output={folder / 'y.npy'}"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    assert found["calls"] == 3 == len(found["times_ms"]) and found["stats"]["calls"] == 3
    assert found["inputs"][0] | {"from": ""} == {"name": "0", "dtype": "float32", "shape": [3, 16], "min": 0.0, "max": 0.0,
                                                 "mean": 0.0, "from": ""}  # fmt: skip
    assert found["outputs"][0]["shape"] == [3, 32] == list(np.load(folder / "y.npy").shape) and found["outputs"][0]["min"] >= 1
    said = CliRunner().invoke(app, ["run", "users_models:net", "--input", "2x16"])
    assert said.exit_code == 0 and "made up here" in said.output and "serves now:" in said.output
    assert "decisions:" not in said.output, "the summary, and not all of it"
    wrong = CliRunner().invoke(app, ["run", "users_models:pair", "--dim", "n=3"])
    assert wrong.exit_code == 2 and "--input 2x16" in wrong.output
