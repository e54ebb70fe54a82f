"""Outputs that are lists of dictionaries: what they are made of is served by a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

import hotfuse
from hotfuse.base.errors import HotfuseError
from tests.races import new_plans_win

SCORES: dict[str, Any] = {"coefficients": [0.5, 1, -1, 2, 0.2, 0.3], "intercepts": [0.1, 0.2, 0.3], "post_transform": "SOFTMAX"}


def classifier(labels: dict[str, Any], *, scores_too: bool = False) -> bytes:
    """A linear classifier of three classes, as exporters end it."""
    nodes = [
        helper.make_node("LinearClassifier", ["x"], ["label", "scores"], domain="ai.onnx.ml", classlabels_ints=[3, 4, 5], **SCORES),
        helper.make_node("Normalizer", ["scores"], ["sums"], domain="ai.onnx.ml", norm="L1"),
        helper.make_node("ZipMap", ["sums"], ["dictionaries"], domain="ai.onnx.ml", **labels),
    ]
    key = TensorProto.INT64 if "classlabels_int64s" in labels else TensorProto.STRING
    of = helper.make_map_type_proto(key, helper.make_tensor_type_proto(TensorProto.FLOAT, []))
    outputs = [
        helper.make_tensor_value_info("label", TensorProto.INT64, ["N"]),
        helper.make_value_info("dictionaries", helper.make_sequence_type_proto(of)),
        *([helper.make_tensor_value_info("sums", TensorProto.FLOAT, ["N", 3])] if scores_too else []),
    ]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 2])]
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("ai.onnx.ml", 1)]
    made = helper.make_graph(nodes, "g", inputs, outputs)
    return helper.make_model(made, opset_imports=opsets, ir_version=8).SerializeToString()


def plain(value: Any) -> Any:
    """What ONNX Runtime's own type for results does not say."""
    return value


def same(ours: list[dict[Any, float]], theirs: list[dict[Any, float]]) -> None:
    assert [list(row) for row in ours] == [list(row) for row in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        assert all(type(v) is float for v in mine.values())
        assert list(mine.values()) == pytest.approx(list(other.values()), abs=1e-6)


@pytest.mark.parametrize("labels", [{"classlabels_int64s": [7, 8, 9]}, {"classlabels_strings": ["a", "b", "c"]}])
def test_a_classifier_is_served_by_a_plan(labels: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    new_plans_win(monkeypatch)
    data, rng = classifier(labels, scores_too=True), np.random.default_rng(0)
    reference = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    with hotfuse.InferenceSession(data) as session:
        assert [o.type for o in session.get_outputs()] == [o.type for o in reference.get_outputs()]
        for k in range(60):
            feed = {"x": rng.standard_normal((1 + k % 3, 2)).astype(np.float32)}
            ours, theirs = session.run(None, feed), [*map(plain, reference.run(None, feed))]
            np.testing.assert_array_equal(ours[0], theirs[0])
            same(ours[1], theirs[1])
            np.testing.assert_allclose(ours[2], theirs[2], atol=1e-6)
            same(session.run(["dictionaries"], feed)[0], theirs[1])
            if k in (5, 40):
                assert session.wait(60)
        tiers = session.stats()["calls_per_tier"]
        assert tiers["0"] + tiers["1"] > 0, session.explain()


def test_dictionaries_of_a_branch() -> None:
    """A node that is not the file's outermost is one of the interpreter's."""
    model = onnx.load_from_string(classifier({"classlabels_int64s": [7, 8, 9]}))
    zipped = model.graph.node.pop()
    info = model.graph.output[1]
    inner = [
        helper.make_graph([helper.make_node("ZipMap", ["sums"], [name], domain="ai.onnx.ml", classlabels_int64s=labels)], name, [],
                          [helper.make_value_info(name, info.type)])
        for name, labels in (("then", [7, 8, 9]), ("else", [1, 2, 3]))
    ]  # fmt: skip
    model.graph.input.append(helper.make_tensor_value_info("which", TensorProto.BOOL, []))
    node = helper.make_node("If", ["which"], [zipped.output[0]], then_branch=inner[0], else_branch=inner[1])
    model.graph.node.append(node)
    x = np.array([[0.5, -1.0]], np.float32)
    with hotfuse.InferenceSession(model.SerializeToString()) as session:
        for which, labels in ((True, [7, 8, 9]), (False, [1, 2, 3])):
            (row,) = session.run(["dictionaries"], {"x": x, "which": np.array(which)})[0]
            assert list(row) == labels
            assert sum(row.values()) == pytest.approx(1.0)


def test_wrong_labels_are_told() -> None:
    with pytest.raises(HotfuseError, match="ZipMap"):
        hotfuse.InferenceSession(classifier({}))
    few = classifier({"classlabels_int64s": [7, 8]})
    with hotfuse.InferenceSession(few) as session, pytest.raises(HotfuseError, match="2 labels"):
        session.run(None, {"x": np.zeros((1, 2), np.float32)})


def test_the_command_line_shows_its_kernels(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from hotfuse.cli import app

    path = tmp_path / "classifier.onnx"
    path.write_bytes(classifier({"classlabels_int64s": [7, 8, 9]}))
    shown = CliRunner().invoke(app, ["show", str(path), "--stage", "ir"])
    assert not shown.exit_code, shown.output
    assert "ZipMap" not in shown.output
