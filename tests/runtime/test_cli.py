"""The command line does what it says, on a terminal, in a pipe and as JSON."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from rich.console import Console
from typer.testing import CliRunner

from hotfuse.base.errors import CaptureError
from hotfuse.cli import app, doctor, output
from hotfuse.cli import show as show_module
from hotfuse.cli.model_inputs import make_feeds
from hotfuse.cli.output import pairs, print_json, rows
from hotfuse.compile.device.selftest import doubling
from hotfuse.ir.dims import Sym
from hotfuse.ir.text import parse
from hotfuse.tile.interpreter import run as interpret_tiles

runner = CliRunner()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """y = x + w and z = relu(y) over a dynamic batch."""
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "w"], ["y"]), helper.make_node("Relu", ["y"], ["z"])],
        "small",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4]),
            helper.make_tensor_value_info("w", TensorProto.FLOAT, ["batch", 4]),
        ],
        [
            helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 4]),
            helper.make_tensor_value_info("z", TensorProto.FLOAT, ["batch", 4]),
        ],
    )
    path = tmp_path / "small.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), path)
    return path


def invoke(*args: object) -> Any:
    return runner.invoke(app, [str(a) for a in args])


def ok_json(*args: object) -> dict[str, Any]:
    done = invoke(*args, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_version() -> None:
    done = invoke("--version")
    assert done.exit_code == 0 and done.stdout.strip() == f"hotfuse {version('hotfuse')}"


def test_help_names_every_command() -> None:
    done = invoke("--help")
    assert done.exit_code == 0
    for command in ("run", "show", "doctor"):
        assert command in done.stdout


def test_run_with_files_gives_the_models_numbers(model: Path, tmp_path: Path) -> None:
    x, w = np.arange(8, dtype=np.float32).reshape(2, 4), np.full((2, 4), -3, np.float32)
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "w.npy", w)
    files = ["--input", f"x={tmp_path / 'x.npy'}", "--input", f"w={tmp_path / 'w.npy'}"]
    report = ok_json("run", model, *files, "--output", f"z={tmp_path / 'z.npy'}", "--calls", 3)
    np.testing.assert_array_equal(np.load(tmp_path / "z.npy"), np.maximum(x + w, 0))
    y, z = report["outputs"]
    assert (y["name"], y["dtype"], y["shape"], y["min"], y["max"]) == ("y", "float32", [2, 4], -3.0, 4.0)
    assert z["mean"] == pytest.approx(np.maximum(x + w, 0).mean())
    assert report["calls"] == 3 and len(report["times_ms"]) == 3 and report["stats"]["calls"] == 3
    assert report["dims"] == {"batch": 2} and report["dims_chosen"] == []


def test_run_makes_up_inputs_that_agree_and_says_so(model: Path) -> None:
    done = invoke("run", model)
    assert done.exit_code == 0, done.output
    assert "dynamic dims chosen: batch=1" in done.stdout and "1x4" in done.stdout and "random" in done.stdout
    assert "median" in done.stdout and "what ran" in done.stdout
    assert "\x1b" not in done.stdout, "a pipe gets plain text"
    report = ok_json("run", model, "--dim", "batch=5", "--input", "w=2.5")
    assert [i["shape"] for i in report["inputs"]] == [[5, 4], [5, 4]]
    assert report["inputs"][1]["min"] == report["inputs"][1]["max"] == 2.5
    assert report["dims_chosen"] == []


@pytest.mark.parametrize("command", ["run", "explain"])
def test_a_call_that_fails_names_what_was_made_up(command: str, tmp_path: Path) -> None:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [100, 4])
    shape = helper.make_tensor("shape", TensorProto.INT64, [2], [100, 4])
    graph = helper.make_graph([helper.make_node("Reshape", ["x", "shape"], ["y"])], "g", [x], [y], [shape])
    path = tmp_path / "narrow.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)
    failed = invoke(command, path, "--calls", 1)
    assert failed.exit_code == 2 and "--dim name=size" in failed.output and "--input name=number" in failed.output
    given = invoke(command, path, "--calls", 1, "--dim", "n=3", "--input", "x=1")
    assert given.exit_code == 2 and "made up" not in given.output
    assert invoke(command, path, "--calls", 1, "--dim", "n=100").exit_code == 0


def test_run_takes_dims_from_given_files(model: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((7, 4), np.float32))
    report = ok_json("run", model, "--input", f"x={tmp_path / 'x.npy'}")
    assert report["outputs"][0]["shape"] == [7, 4] and report["inputs"][1]["from"] == "random"


def test_run_is_repeatable_by_seed(model: Path) -> None:
    one, same, other = (ok_json("run", model, "--seed", s)["outputs"] for s in (1, 1, 2))
    assert one == same != other


def test_show_prints_a_graph_that_parses(model: Path) -> None:
    done = invoke("show", model)
    assert done.exit_code == 0, done.output
    graph = parse(done.stdout)
    assert [n.op for n in graph.nodes] == ["aten.add.Tensor", "aten.relu.default"]
    symbol = graph.inputs[0].type.shape[0]
    assert isinstance(symbol, Sym) and graph.inputs[1].type.shape[0] == symbol, "dims of one name are one dim"
    report = ok_json("show", model, "--stage", "ir")
    assert parse(report["graph"]) == graph and (report["nodes"], report["params"]) == (2, 0)


def test_show_fixes_dims_that_are_given(model: Path) -> None:
    graph = parse(invoke("show", model, "--dim", "batch=3").stdout)
    assert [v.type.shape for v in graph.inputs] == [(3, 4), (3, 4)] and graph.guards == ()


def test_show_names_open_dims_whatever_stage_fails(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_a: object, **_how: object) -> None:
        raise CaptureError("the graph breaks an invariant")

    monkeypatch.setattr(show_module, "show_kernels", fails)
    failed = invoke("show", model, "--stage", "tile")
    assert failed.exit_code == 2 and "--dim name=size" in failed.output


def test_show_partitions(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = ok_json("show", model, "--stage", "partitions", "--dim", "batch=3")
    (part,) = report["partitions"]
    assert (part["nodes"], part["begins"], part["inputs"], part["outputs"]) == (2, "start of the graph", 2, 2)
    assert part["flops"] == 24 and part["ops"] == {"aten.add": 1, "aten.relu": 1}
    assert part["bytes"] == 12 * 4 * 5, "three tensors of the addition, two of the relu"
    done = invoke("show", model, "--stage", "partitions")
    assert done.exit_code == 0 and "2 nodes in 1 partitions" in done.stdout and "aten.relu x1" in done.stdout


class Port:
    """An input as a session declares it."""

    def __init__(self, name: str, kind: str, shape: list[int | str | None]) -> None:
        self.name, self.type, self.shape = name, kind, shape


def test_integers_of_text_models_are_made_up_by_their_names() -> None:
    named = ("input_ids", "attention_mask", "token_type_ids", "segment_ids")
    ports = [Port(name, "tensor(int64)", ["b", "s"]) for name in named] + [Port("mask", "tensor(int32)", [])]
    found = make_feeds(ports, {}, {"b": "50", "s": "16"}, seed=0).arrays
    ids, mask, *segments, single = [found[p.name] for p in ports]
    assert ids.max() > 2 and all(s.max() == 1 and s.min() == 0 for s in segments) and single.shape == ()
    assert mask.shape == (50, 16) and mask[:, 0].all() and 0 < mask.mean() < 1, "ones, and then padding"
    assert (np.diff(mask, axis=1) <= 0).all()
    empty = make_feeds([Port("mask", "tensor(int64)", [2, 0])], {}, {}, seed=0).arrays["mask"]
    assert empty.shape == (2, 0)


def test_made_up_inputs_have_the_declared_types() -> None:
    kinds = {"float": "float32", "double": "float64", "float16": "float16", "int64": "int64", "uint8": "uint8"}
    kinds |= {"bool": "bool", "bfloat16": "bfloat16", "string": "object", "complex64": "complex64"}
    ports = [Port(k, f"tensor({k})", ["n", None]) for k in kinds]
    feeds = make_feeds(ports, {}, {"n": "3", "float.1": "5"}, seed=0)
    assert {k: str(a.dtype) for k, a in feeds.arrays.items()} == kinds
    assert feeds.arrays["float"].shape == (3, 5) and feeds.arrays["double"].shape == (3, 64)
    assert (feeds.arrays["int64"] >= 0).all() and feeds.arrays["int64"].max() < 8
    assert "double.1" in feeds.chosen and "n" not in feeds.chosen


def test_two_unknown_dims_of_one_spelling_are_two_dims() -> None:
    feeds = make_feeds([Port("x", "tensor(float)", ["?", 3, "?", "?"])], {}, {"x.2": "48"}, seed=0)
    assert feeds.arrays["x"].shape == (1, 3, 48, 64)


def test_a_name_may_hold_an_equals_sign() -> None:
    assert pairs(["a=b=c.npy", "x=1"], "--input") == {"a=b": "c.npy", "x": "1"}


def test_json_stays_json_for_numbers_it_lacks(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": float("nan"), "b": [float("inf"), 1.5], "c": Path("p"), "d": (1, None, True)})
    assert json.loads(capsys.readouterr().out) == {"a": "nan", "b": ["inf", 1.5], "c": "p", "d": [1, None, True]}


def test_a_table_is_drawn_on_a_terminal_and_aligned_in_a_pipe(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows(("name", "status"), [("a", "ok"), ("long name", "FAIL")])
    assert capsys.readouterr().out == "name       status\na          ok\nlong name  FAIL\n"
    screen = io.StringIO()
    monkeypatch.setattr(output, "console", lambda: Console(file=screen, force_terminal=True, width=80))
    rows(("name", "status"), [("a", "ok"), ("[red]long", "FAIL")])
    assert "\x1b[" in screen.getvalue() and "[red]long" in screen.getvalue(), "names are text, never markup"


def test_doctor_reports_and_judges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTFUSE_CACHE_DIR", str(tmp_path / "cache"))
    report = ok_json("doctor")
    checks = {c["name"]: c for c in report["checks"]}
    assert report["ok"] and checks["cache folder"]["status"] == "ok" and checks["capture in a worker"]["status"] == "ok"
    assert report["versions"]["torch"].startswith("2.") and report["versions"]["hotfuse"] == version("hotfuse")
    assert report["devices"][0]["device"] == "cpu" and report["machine"]["logical_cpus"] >= 1
    assert len(report["fingerprint"]["key"]) == 16
    assert all({"name", "advertised", "executes", "usable", "detail"} == set(f) for f in report["features"])


def test_doctor_names_variables_that_nothing_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.startswith("HOTFUSE_")]:
        monkeypatch.delenv(name)
    assert doctor.check_environment() == doctor.Check("environment", "ok", "no HOTFUSE_ variable is set")
    monkeypatch.setenv("HOTFUSE_PROFILES", "postgresql://me:secret@db/x")
    found = doctor.check_environment()
    assert found.status == "ok" and "HOTFUSE_PROFILES" in found.detail and "secret" not in found.detail
    monkeypatch.setenv("HOTFUSE_PRECISON", "bf16")
    found = doctor.check_environment()
    assert found.status == "warn" and "nothing reads HOTFUSE_PRECISON" in found.detail


def test_doctor_asks_for_gpus_in_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("this process must stay one that can be forked")

    for name in ("is_available", "device_count", "get_device_properties"):
        monkeypatch.setattr(torch.cuda, name, refuse)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    before = torch.cuda.is_initialized()
    seen = doctor.devices()
    assert seen[0]["device"] == "cpu" and torch.cuda.is_initialized() is before
    assert all(str(d["device"]).startswith("cuda:") for d in seen[1:]), seen
    one = {"device": "cuda:0", "name": "some", "memory_bytes": 1, "capability": "9.0"}
    assert doctor.gpus(f"print('noise'); print({json.dumps([one])!r})") == [one]


def test_doctor_says_whether_kernels_work_on_a_gpu() -> None:
    seen: list[dict[str, object]] = [{"device": "cpu", "name": "some"}, {"device": "cuda:0", "kernels": ""},
                                     {"device": "cuda:1", "kernels": "no Triton"}]  # fmt: skip
    works, lacks = doctor.check_devices(seen)
    assert works.status == "ok" and "cuda:0" in works.name
    assert lacks.status == "warn" and "no Triton" in lacks.detail
    kernel, x, y = doubling(), np.random.randn(4096).astype(np.float32), np.zeros(4096, np.float32)
    interpret_tiles(kernel, {"x": x, "y": y}, {})
    assert np.array_equal(y, 2 * x)


@pytest.mark.parametrize("code", ["raise ValueError('no driver')", "print('no driver')", "", "import os; os.abort()"])
def test_doctor_says_that_gpus_could_not_be_asked(code: str) -> None:
    (found,) = doctor.gpus(code)
    assert found["device"] == "cuda" and str(found["name"]).startswith("could not be asked: ")
    assert "raise" not in code or "no driver" in str(found["name"])


def test_doctor_finds_what_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    monkeypatch.setenv("HOTFUSE_CACHE_DIR", str(blocked))
    # The two slow checks are not the subject here.
    monkeypatch.setattr(doctor, "check_worker", lambda: doctor.Check("capture in a worker", "ok", ""))
    dies = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"
    monkeypatch.setattr(doctor, "check_bf16", lambda: doctor._in_process("dies", dies, fatal=False, hint="a way out"))
    done = invoke("doctor")
    assert done.exit_code == 1
    assert "FAIL" in done.stdout and "HOTFUSE_CACHE_DIR" in done.stdout
    assert "killed by signal 4; a way out" in done.stdout


def test_the_installed_command_runs_in_a_process(model: Path) -> None:
    command = [sys.executable, "-c", "from hotfuse.cli import main; main()"]
    done = subprocess.run([*command, "run", str(model), "--json"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["outputs"][0]["shape"] == [1, 4]
    failed = subprocess.run([*command, "run", "missing.onnx"], capture_output=True, text=True, timeout=120)
    assert failed.returncode == 2 and failed.stdout == "" and "Traceback" not in failed.stderr
