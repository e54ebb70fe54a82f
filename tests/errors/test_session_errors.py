"""What a user sees when a session cannot be made or used: our own errors, with ONNX Runtime's names and a way on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from onnx import ModelProto, TensorProto

import hotfuse.session as hf
from hotfuse.base.errors import HotfuseError, InputError, ModelError
from hotfuse.base.events import Action, Why
from tests.faults import make_models as mk
from tests.faults.make_models import F, node, raw, value

X = np.ones(3, np.float32)


@pytest.fixture(autouse=True)
def no_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors come from the model's own code; captures beside would only cost time."""
    monkeypatch.setenv("HOTFUSE_CAPTURE", "off")


def good(**changes: Any) -> ModelProto:
    return mk.model([node("Add", ["x", "x"], ["o"])], [value("x", F, ["N"])], [value("o", F, ["N"])], **changes)


def broken(nodes: Any, output: str = "o", initializers: Any = ()) -> bytes:
    return mk.model(nodes, [value("x", F, ["N"])], [value(output, F, ["N"])], initializers).SerializeToString()


def short_raw() -> TensorProto:
    t = raw("w", np.ones(3, np.float32))
    t.raw_data = b"1234567"
    return t


MODELS: dict[str, tuple[Callable[[], bytes], str, str]] = {
    "empty": (lambda: b"", "InvalidGraph", "no graph"),
    "garbage": (lambda: b"garbage" * 10, "InvalidProtobuf", "not an ONNX model"),
    "truncated": (lambda: good().SerializeToString()[:-5], "InvalidProtobuf", "not an ONNX model"),
    "unknown operator": (lambda: broken([node("Nope", ["x"], ["o"])]), "InvalidGraph", "operator Nope"),
    "unknown domain": (lambda: broken([node("Nope", ["x"], ["o"], domain="foo")]), "InvalidGraph", "'foo'"),
    "undefined input": (lambda: broken([node("Add", ["x", "q"], ["o"])]), "InvalidGraph", "'q'"),
    "undefined output": (lambda: broken([node("Add", ["x", "x"], ["o"])], "p"), "InvalidGraph", "'p'"),
    "defined twice": (lambda: broken([node("Relu", ["x"], ["o"])] * 2), "InvalidGraph", "'o'"),
    "cycle": (lambda: broken([node("Add", ["x", "p"], ["o"]), node("Relu", ["o"], ["p"])]), "InvalidGraph", "'p'"),
    "too few inputs": (lambda: broken([node("Add", ["x"], ["o"])]), "InvalidGraph", "has 1 inputs"),
    "too many inputs": (lambda: broken([node("Relu", ["x", "x"], ["o"])]), "InvalidGraph", "has 2 inputs"),
    "too many outputs": (lambda: broken([node("Relu", ["x"], ["o", "p"])]), "InvalidGraph", "has 2 outputs"),
    "unknown attribute": (lambda: broken([node("Relu", ["x"], ["o"], slope=1.0)]), "InvalidGraph", "'slope'"),
    "attribute of another kind": (lambda: broken([node("Elu", ["x"], ["o"], alpha="a")]), "InvalidGraph", "'alpha'"),
    "missing attribute": (lambda: broken([node("Cast", ["x"], ["o"])]), "InvalidGraph", "lacks attribute 'to'"),
    "name that is no text": (lambda: good().SerializeToString().replace(b"Add", b"A\xffd"), "InvalidGraph", "not text"),
    "short data": (
        lambda: broken([node("Add", ["x", "w"], ["o"])], "o", [short_raw()]),
        "InvalidGraph",
        "wrong length",
    ),
}


@pytest.mark.parametrize("case", MODELS)
def test_models_that_cannot_be_loaded(case: str) -> None:
    build, name, part = MODELS[case]
    with pytest.raises(ModelError) as caught:
        hf.InferenceSession(build())
    assert type(caught.value).__name__ == name
    assert part in str(caught.value)
    assert isinstance(caught.value.__cause__, ModelError)


def test_paths_that_cannot_be_loaded(tmp_path: Path) -> None:
    with pytest.raises(hf.NoSuchFile, match=r"nope\.onnx"):
        hf.InferenceSession(tmp_path / "nope.onnx")
    with pytest.raises(hf.InvalidProtobuf):
        hf.InferenceSession(str(tmp_path))
    bad = tmp_path / "bad.onnx"
    bad.write_bytes(b"\xff" * 100)
    with pytest.raises(hf.InvalidProtobuf, match=r"bad\.onnx"):
        hf.InferenceSession(bad)


@pytest.mark.parametrize("location", ["missing.bin", "../outside.bin", "/etc/hostname", "", "a/../../b", "link.bin"])
def test_external_data_stays_in_the_folder(tmp_path: Path, location: str) -> None:
    (tmp_path / "outside.bin").write_bytes(b"\0" * 12)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "link.bin").symlink_to(tmp_path / "outside.bin")
    t = raw("w", X)
    t.ClearField("raw_data")
    t.data_location = TensorProto.EXTERNAL
    entry = t.external_data.add()
    entry.key, entry.value = "location", location
    path = folder / "m.onnx"
    path.write_bytes(broken([node("Add", ["x", "w"], ["o"])], "o", [t]))
    with pytest.raises(ModelError, match="'w'"):
        hf.InferenceSession(path)
    with pytest.raises(ModelError, match="given as bytes"):
        hf.InferenceSession(path.read_bytes())


@pytest.mark.parametrize("source", [5, None, bytearray(b"x"), memoryview(b"x"), ["x"]])
def test_sources_of_the_wrong_type(source: Any) -> None:
    with pytest.raises(TypeError, match="Unable to load from type") as caught:
        hf.InferenceSession(source)
    assert isinstance(caught.value, InputError)


@pytest.mark.parametrize("feed", [None, [X], 5, "x"])
def test_feeds_that_are_no_dict(feed: Any) -> None:
    with pytest.raises(TypeError, match="input_feed must be a dict") as caught:
        hf.InferenceSession(good().SerializeToString()).run(None, feed)
    assert isinstance(caught.value, HotfuseError)


def test_failure_inside_the_model_names_the_node() -> None:
    made = mk.model(
        [node("Reshape", ["x", "to"], ["o"], name="turn")],
        [value("x", F, ["N"])],
        [value("o", F, None)],
        [raw("to", np.int64([4, 7]))],
    )
    session = hf.InferenceSession(made.SerializeToString())
    with pytest.raises(hf.Fail) as caught:
        session.run(None, {"x": X})
    assert isinstance(caught.value, ModelError) and isinstance(caught.value, InputError)
    assert "Reshape" in str(caught.value) and "'turn'" in str(caught.value)
    assert caught.value.__cause__ is not None
    assert session.stats()["errors"] == 1
    assert session.run(None, {"x": np.ones(28, np.float32)})[0].shape == (4, 7), "an error must not break the session"


@pytest.mark.skipif(torch.cuda.is_available(), reason="here is a CUDA device")
def test_options_without_effect_are_recorded() -> None:
    options = hf.SessionOptions()
    options.graph_optimization_level = hf.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.execution_mode = hf.ExecutionMode.ORT_PARALLEL
    options.inter_op_num_threads = 3
    options.enable_mem_pattern = False
    options.add_session_config_entry("session.x", "1")
    options.intra_op_num_threads = 2
    with pytest.warns(
        UserWarning, match="Specified provider 'CUDAExecutionProvider' is not in available provider names"
    ):
        session = hf.InferenceSession(
            good().SerializeToString(),
            options,
            providers=[("CUDAExecutionProvider", {"device_id": 1}), "CPUExecutionProvider"],
        )
    decisions = session.explain().to_dict()["decisions"]
    ignored = {d["subject"] for d in decisions if (d["action"], d["why"]) == (Action.NOTICE, Why.NO_EFFECT)}
    assert ignored == {
        "session option graph_optimization_level", "session option execution_mode",
        "session option inter_op_num_threads", "session option enable_mem_pattern",
        "session option config session.x", "provider CUDAExecutionProvider",
        "provider CUDAExecutionProvider.device_id",
    }  # fmt: skip
    assert session.stats()["events"]["notice.no_effect"] == len(ignored)
    assert "execution_mode" in str(session.explain(full=True))
    assert session.get_providers() == ["CPUExecutionProvider"]
    assert session.get_session_options() is options


def test_default_options_record_nothing() -> None:
    session = hf.InferenceSession(good().SerializeToString(), providers=["CPUExecutionProvider"])
    assert "notice.no_effect" not in session.stats()["events"]


def test_thread_count_is_honoured_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    options = hf.SessionOptions()
    options.intra_op_num_threads = 3
    session = hf.InferenceSession(good().SerializeToString(), options)
    before = torch.get_num_threads()
    seen: list[int] = []
    own = session._engine.own_code
    monkeypatch.setattr(session._engine._capturer, "_own_code", lambda *a: (seen.append(torch.get_num_threads()), own(*a))[1])
    session.run(None, {"x": X})
    assert seen == [3] and torch.get_num_threads() == before


def test_log_level_prints_decisions(capsys: pytest.CaptureFixture[str]) -> None:
    for level, printed in ((0, True), (1, True), (2, False), (4, False)):
        options = hf.SessionOptions()
        options.log_severity_level = level
        options.enable_mem_reuse = False
        hf.InferenceSession(good().SerializeToString(), options)
        assert ("enable_mem_reuse" in capsys.readouterr().err) is printed


@pytest.mark.parametrize("options", [hf.SessionOptions, hf.RunOptions])
def test_options_are_typed(options: Any) -> None:
    made = options()
    with pytest.raises(AttributeError, match="no_such_option"):
        made.no_such_option = 1
    with pytest.raises(TypeError, match="log_severity_level"):
        made.log_severity_level = "loud"


def test_bad_option_values() -> None:
    options = hf.SessionOptions()
    with pytest.raises(TypeError):
        options.graph_optimization_level = 17  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="does not have configuration with key: nope"):
        options.get_session_config_entry("nope")
    options.log_severity_level = 9
    with pytest.raises(RuntimeError, match="Invalid session log severity level"):
        hf.InferenceSession(good().SerializeToString(), options)
    with pytest.raises(TypeError, match="sess_options"):
        hf.InferenceSession(good().SerializeToString(), 5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="providers"):
        hf.InferenceSession(good().SerializeToString(), providers=[5])  # type: ignore[list-item]
    for call in (lambda: options.add_initializer("w", X), lambda: options.register_custom_ops_library("x.so"),
                 lambda: options.add_external_initializers([], [])):  # fmt: skip
        with pytest.raises(hf.NotImplemented):
            call()


def test_profiling_is_refused_clearly() -> None:
    assert hf.InferenceSession(good().SerializeToString()).end_profiling() == ""
    options = hf.SessionOptions()
    options.enable_profiling = True
    with pytest.raises(hf.NotImplemented, match="profile"):
        hf.InferenceSession(good().SerializeToString(), options).end_profiling()


@pytest.mark.skipif(torch.cuda.is_available(), reason="here is a CUDA device")
def test_other_devices_are_refused() -> None:
    with pytest.raises(hf.NotImplemented, match="cuda"):
        hf.OrtValue.ortvalue_from_numpy(X, "cuda")
    with pytest.raises(RuntimeError, match="Unable to create OrtValue"):
        hf.OrtValue.ortvalue_from_numpy([1.0])  # type: ignore[arg-type]


def test_bound_memory_that_does_not_fit() -> None:
    session = hf.InferenceSession(good().SerializeToString())
    binding = session.io_binding()
    binding.bind_cpu_input("x", X)
    binding.bind_ortvalue_output("o", hf.OrtValue.ortvalue_from_shape_and_type([2], np.float32))
    with pytest.raises(RuntimeError, match="does not fit the memory bound to it"):
        session.run_with_iobinding(binding)


def test_closed_session() -> None:
    with hf.InferenceSession(good().SerializeToString()) as session:
        assert session.wait(60)
        session.run(None, {"x": X})
    session.close()
    with pytest.raises(InputError, match="closed"):
        session.run(None, {"x": X})


def test_errors_carry_their_parts() -> None:
    with pytest.raises(hf.InvalidArgument) as caught:
        hf.InferenceSession(good().SerializeToString()).run(None, {"x": X, "q": X})
    assert caught.value.to_dict() == {
        "error": "InvalidArgument", "what": "Invalid input name: q", "where": "", "because": "", "try": "one of x",
    }  # fmt: skip


@pytest.mark.parametrize("collect", [set[str], iter, dict.fromkeys, np.array])
def test_output_names_in_any_collection(collect: Callable[[list[str]], Any]) -> None:
    assert len(hf.InferenceSession(good().SerializeToString()).run(collect(["o"]), {"x": X})) == 1


def test_complex_numbers_are_no_feed() -> None:
    with pytest.raises(hf.UnsupportedFeed, match="complex"):
        hf.InferenceSession(good().SerializeToString()).run(None, {"x": X.astype(np.complex64)})


def test_profiling_never_began() -> None:
    assert hf.InferenceSession(good().SerializeToString()).get_profiling_start_time_ns() == 0
