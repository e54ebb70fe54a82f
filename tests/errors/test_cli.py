"""Every mistake on the command line ends in one of our messages and exit code 2, never in a traceback."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from typer.testing import CliRunner

from hotfuse.base.errors import CaptureError
from hotfuse.cli import app
from hotfuse.compile.workers import service

runner = CliRunner()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["y"])],
        "small",
        [value("x", TensorProto.FLOAT, ["n", 4])],
        [value("y", TensorProto.FLOAT, ["n", 4])],
    )
    path = tmp_path / "small.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), path)
    return path


def fails(*args: object, kind: str = "InputError") -> str:
    """What the command says on standard error; with --json the same error must be JSON on standard output."""
    texts = [str(a) for a in args]
    done = runner.invoke(app, texts)
    assert done.exit_code == 2, done.output
    assert done.stdout == "" and done.stderr.startswith(f"hotfuse.{kind}: "), done.output
    as_json = runner.invoke(app, [*texts, "--json"])
    assert as_json.exit_code == 2 and as_json.stderr == ""
    error: dict[str, Any] = json.loads(as_json.stdout)
    assert error["error"] == kind and error["what"] in done.stderr
    assert set(error) == {"error", "what", "where", "because", "try"}
    return done.stderr


def test_a_missing_model(tmp_path: Path) -> None:
    assert "try:" in fails("run", tmp_path / "no.onnx", kind="NoSuchFile")


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "no.onnx").write_bytes(b"\xff\xfe not a model")
    fails("run", tmp_path / "no.onnx", kind="InvalidProtobuf")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--input", "x"], "name=value"),
        (["--input", "x=1", "--input", "x=2"], "twice"),
        (["--input", "nobody=1"], "one of x"),
        (["--input", "x=words"], "neither a .npy file nor a number"),
        (["--input", "x=missing.npy"], "cannot read"),
        (["--output", "nobody=f.npy"], "one of y"),
        (["--dim", "n=many"], "is not a size"),
        (["--dim", "m=3"], "one of n"),
        (["--dim", "n=99999999999"], "too large"),
    ],
)
def test_options_that_make_no_sense(model: Path, options: list[str], text: str) -> None:
    assert text in fails("run", model, *options)


@pytest.mark.parametrize(
    ("options", "text"),
    [(["--dim", "n"], "name=value"), (["--dim", "n=many"], "is not a size"), (["--dim", "m=3"], "no input has a dynamic")],
)
def test_show_options_that_make_no_sense(model: Path, options: list[str], text: str) -> None:
    assert text in fails("show", model, *options)


def test_show_of_what_is_no_tensor_or_no_model(tmp_path: Path) -> None:
    fails("show", tmp_path / "no.onnx", kind="ModelError")
    sequence = helper.make_tensor_sequence_value_info("s", TensorProto.FLOAT, None)
    length = helper.make_tensor_value_info("n", TensorProto.INT64, [])
    graph = helper.make_graph([helper.make_node("SequenceLength", ["s"], ["n"])], "seq", [sequence], [length])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), tmp_path / "s.onnx")
    assert "declared as seq(tensor(float))" in fails("show", tmp_path / "s.onnx")


def test_show_of_an_archive_that_could_run_code(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "m.pt2", "w") as archive:
        archive.writestr("m/data.pkl", b"cos\nsystem\n(S'false'\ntR.")
    text = fails("show", tmp_path / "m.pt2", kind="ModelError")
    assert "can run code" in text and "torch.onnx.export" in text


def test_show_of_what_cannot_be_captured_names_the_open_dims(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object) -> None:
        raise CaptureError("small.onnx cannot be traced", because="of this test")

    monkeypatch.setattr(service, "ask", refuse)
    text = fails("show", model, kind="CaptureError")
    assert "because: of this test" in text and "--dim name=size: n" in text


def test_an_array_of_the_wrong_shape(model: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((2, 5), np.float32))
    fails("run", model, "--input", f"x={tmp_path / 'x.npy'}", kind="InvalidArgument")


def test_a_dim_that_contradicts_a_file(model: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((2, 4), np.float32))
    assert "where it is 2" in fails("run", model, "--input", f"x={tmp_path / 'x.npy'}", "--dim", "n=3")


def test_pickled_arrays_are_refused(model: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.array([{"code": "runs here"}], dtype=object), allow_pickle=True)
    assert "allow_pickle=False" in fails("run", model, "--input", f"x={tmp_path / 'x.npy'}")


def test_an_output_that_cannot_be_written(model: Path, tmp_path: Path) -> None:
    assert "cannot write" in fails("run", model, "--output", f"y={tmp_path / 'no' / 'y.npy'}")


def test_a_malformed_environment_variable(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTFUSE_DEBUG", "loud")
    assert "HOTFUSE_DEBUG" in fails("run", model)
