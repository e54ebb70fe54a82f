"""A file is known by what is in it: where it lies and what it is called make no other model of it."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from hotfuse.base.settings import Settings
from hotfuse.frontends.onnx.interp import OnnxModule
from hotfuse.frontends.onnx.load import load
from hotfuse.session.serving import ServedModel


def _file(scale: float) -> bytes:
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [2, 3]) for n in "xy")
    by = helper.make_tensor("by", TensorProto.FLOAT, [], [scale])
    graph = helper.make_graph([helper.make_node("Mul", ["x", "by"], ["y"])], "g", [x], [y], [by])
    return onnx.ModelProto.SerializeToString(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]))


def _named(source: Path | bytes, settings: Settings) -> str:
    known = ServedModel(OnnxModule(load(source)), settings).known_at()
    assert known is not None
    return known.model


@pytest.mark.parametrize("folder", ["same", "other"])
def test_a_file_with_another_name_is_the_same_model(tmp_path: Path, folder: str) -> None:
    settings = Settings(cache_dir=tmp_path / "cache")
    first, second = tmp_path / "same" / "model.onnx", tmp_path / folder / "release-2.onnx"
    for path in (first, second):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(_file(2.0))
    assert _named(first, settings) == _named(second, settings) == _named(first.read_bytes(), settings)
    second.write_bytes(_file(2.0).replace(b"Mul", b"Div"))
    assert _named(first, settings) != _named(second, settings)
