"""ONNX files that the corpus makes: exports of torch models, and quantized versions of any ONNX file. Kept in the user's cache."""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from benchmarks.peers import exported
from benchmarks.zoo import ZooModel
from benchmarks.zoo.wheels import zoo_folder

Mode = Literal["dynamic", "tensor", "channel", "qoperator"]
MODES: dict[Mode, str] = {
    "dynamic": "int8 weights, activations quantized in every call",
    "tensor": "static QDQ, one scale a tensor",
    "channel": "static QDQ, one scale an output channel",
    "qoperator": "static, QLinear operators",
}
CALIBRATED_ON = 4
"""Inputs that a static quantization sees."""


def kept(name: str, make: Callable[[Path], None], *versions: str) -> Path:
    """A file of the cache, made where it is not there: by one rename, so that processes may make it side by side."""
    found = "-".join(f"{v}{importlib.metadata.version(v)}" for v in versions) + _sources()
    folder = zoo_folder() / "made" / hashlib.sha256(found.encode()).hexdigest()[:12]
    path = folder / f"{name}.onnx"
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(f".{os.getpid()}.onnx")
        try:
            make(fresh)
            os.replace(fresh, path)
        finally:
            fresh.unlink(missing_ok=True)
    return path


def _sources() -> str:
    """What decides how a torch model looks: its table, the networks written here, and how files are made."""
    here = Path(__file__).parent
    names = ("builders.py", "torch_models.py", "further_models.py", "networks.py", "more_networks.py", "inputs.py", "made_files.py")
    return hashlib.sha256(b"".join((here / n).read_bytes() for n in names)).hexdigest()


def export(model: ZooModel, into: Path) -> None:
    """By the first exporter that manages."""
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        os.replace(exported(model, model.inputs(), into.parent), into)


def quantize(path: Path, mode: Mode, feeds: Sequence[dict[str, Any]], into: Path) -> None:
    """By ONNX Runtime's own quantizer, of the file as its basic optimizations leave it: weights have to be initializers."""
    import onnxruntime as ort
    from onnxruntime import quantization as q

    logging.getLogger().setLevel(logging.ERROR)  # the quantizer tells every bias that it leaves alone
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    with tempfile.TemporaryDirectory(prefix="hotfuse-corpus-") as folder:  # the quantizer leaves files beside the one it reads
        plain = Path(folder) / "plain.onnx"
        options.optimized_model_filepath = str(plain)
        ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        _forget_shapes(plain)
        _quantize(q, plain, mode, feeds, into)


def _forget_shapes(path: Path) -> None:
    """The quantizer turns weights round and then finds that the shapes written down in the file do not fit them."""
    import onnx

    model = onnx.load(path)
    del model.graph.value_info[:]
    onnx.save(model, path)


def _quantize(q: Any, path: Path, mode: Mode, feeds: Sequence[dict[str, Any]], into: Path) -> None:
    # Weights of seven bits: with eight, ONNX Runtime's sums of two products saturate where there is no VNNI, and no one is right.
    if mode == "dynamic":
        q.quantize_dynamic(path, into, weight_type=q.QuantType.QInt8, reduce_range=True)
        return

    class Reader(q.CalibrationDataReader):
        """Hands out the feeds, then None."""

        def __init__(self) -> None:
            self.left: Iterator[dict[str, np.ndarray[Any, Any]]] = iter(feeds)

        def get_next(self) -> Any:
            return next(self.left, None)

    form = q.QuantFormat.QOperator if mode == "qoperator" else q.QuantFormat.QDQ
    q.quantize_static(path, into, Reader(), quant_format=form, per_channel=mode == "channel",
                      activation_type=q.QuantType.QUInt8, weight_type=q.QuantType.QInt8, reduce_range=True)  # fmt: skip
