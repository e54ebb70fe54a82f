"""The peers of the whole-model benchmark: each loads a model of the zoo and gives a call that answers its inputs.

One that cannot raises whatever it raises: the benchmark's row says so. Inductor has a process of its own (`benchmarks.frozen`).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from benchmarks import quiet, zoo

Call = Callable[[], Any]


class Absent(Exception):
    """Why a contender does not take part."""


def eager(model: zoo.ZooModel, inputs: dict[str, Any], _threads: int) -> Call:
    """The module's own code."""
    if model.module is None:
        raise Absent("an ONNX model has no torch code")
    module = model.module
    return lambda: module(**inputs)


class Positional(torch.nn.Module):
    """A module called by position that gives a flat tuple: what every exporter understands."""

    def __init__(self, module: torch.nn.Module, names: list[str]) -> None:
        super().__init__()
        self.module, self.names = module, names

    def forward(self, *args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(pytree.tree_flatten(self.module(**dict(zip(self.names, args, strict=True))))[0])


def exported(model: zoo.ZooModel, inputs: dict[str, Any], folder: Path) -> Path:
    """A torch model as an ONNX file, by the first exporter that manages."""
    assert model.module is not None
    module, args = Positional(model.module, list(inputs)).eval(), tuple(inputs.values())
    target, reasons = folder / f"{model.name}.onnx", list[str]()
    for dynamo in (True, False):
        try:
            torch.onnx.export(
                module, args, str(target), input_names=list(inputs), dynamo=dynamo, verbose=False, external_data=False)
            return target
        except Exception as e:  # any exporter may fail in any way; the row says how
            reasons.append(first_line(e))
    raise Absent("; ".join(reasons))


def ort(model: zoo.ZooModel, inputs: dict[str, Any], threads: int) -> Call:
    """ONNX Runtime with all its optimizations, which is its default."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    providers = ["CPUExecutionProvider"]
    with tempfile.TemporaryDirectory() as folder:
        path = model.path or exported(model, inputs, Path(folder))
        session = onnxruntime.InferenceSession(str(path), options, providers=providers)
    known = {i.name for i in session.get_inputs()}
    feed = {n: v.numpy() if isinstance(v, torch.Tensor) else v for n, v in inputs.items() if n in known}
    return lambda: session.run(None, feed)


def openvino(model: zoo.ZooModel, inputs: dict[str, Any], threads: int) -> Call:
    """OpenVINO for latency, in f32, at the very shapes of the inputs."""
    ov = quiet.openvino()
    if model.path is not None:
        converted = ov.convert_model(str(model.path))
    else:
        converted = ov.convert_model(model.module, example_input=inputs)
    feed = {n: v.numpy() if isinstance(v, torch.Tensor) else v for n, v in inputs.items()}
    converted.reshape({n: list(v.shape) for n, v in feed.items()})
    settings = {
        "INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": threads,
        "NUM_STREAMS": 1,
    }  # fmt: skip
    request = ov.Core().compile_model(converted, "CPU", settings).create_infer_request()
    return lambda: list(request.infer(feed).values())


PEERS: dict[str, Callable[[zoo.ZooModel, dict[str, Any], int], Call]] = {
    "eager": eager, "ort": ort, "openvino": openvino,
}  # fmt: skip


def first_line(e: BaseException) -> str:
    """An error in one short line."""
    text = str(e).strip().splitlines()
    return f"{type(e).__name__}: {text[0] if text else ''}"[:200]
