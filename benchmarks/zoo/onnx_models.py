"""The zoo's ONNX models: real ones that people ship, with inputs over several shapes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.zoo.wheels import ModelFile, Wheel

Arrays = dict[str, np.ndarray[Any, Any]]

_SILERO = Wheel("silero-vad", "6.2.3", "7b7f5436cfcb02fae583a05b512ea96467fd449fe54cb49a5e4f06c51a1e43b8")
_MAGIKA = Wheel(
    "magika",
    "1.0.3",
    "3e9b49134e8116ee40b431664dcbed9e199413efddcce1a173c734b4e0521529",
    platform="manylinux_2_28_x86_64",
)
OCR_V4 = Wheel("rapidocr-onnxruntime", "1.4.4", "971d7d5f223a7a808662229df1ef69893809d8457d834e6373d3854bc1782cbf")
_OCR_V6 = Wheel("rapidocr", "3.10.0", "2fc34e26cd0f48514804a94f8832283039c7334076bff60768b1fed9ad068050")


@dataclass(frozen=True, slots=True)
class OnnxEntry:
    """One model: where its file is, and its inputs per variant."""

    file: ModelFile
    inputs: Callable[[np.random.Generator, int], Arrays]
    variants: int = 3
    timed: int = 0
    """The variant to measure speed with; it may lie beyond those that tests run over."""


def _speech(rng: np.random.Generator, batch: int, rate: int) -> Arrays:
    """A frame of noise at speech level, with the context the model wants in front, and an empty state."""
    samples = {16000: 576, 8000: 288}[rate]
    return {
        "input": (rng.standard_normal((batch, samples)) * 0.1).astype(np.float32),
        "state": (rng.standard_normal((2, batch, 128)) * 0.1).astype(np.float32),
        "sr": np.array(rate, dtype=np.int64),
    }


def _silero(rng: np.random.Generator, variant: int) -> Arrays:
    return _speech(rng, *((1, 16000), (3, 16000), (1, 8000))[variant])


def _silero_sequence(rng: np.random.Generator, variant: int) -> Arrays:
    frames = (1, 4, 31)[variant]
    return {
        "input": (rng.standard_normal((frames, 576)) * 0.1).astype(np.float32),
        "h": np.zeros((1, 1, 128), np.float32),
        "c": np.zeros((1, 1, 128), np.float32),
    }


def _magika(rng: np.random.Generator, variant: int) -> Arrays:
    batch = (1, 2, 5)[variant]
    return {"bytes": rng.integers(0, 257, (batch, 2048)).astype(np.int32)}


def _images(*shapes: tuple[int, int, int]) -> Callable[[np.random.Generator, int], Arrays]:
    """Something like a line of print on paper, in [-1, 1], of the given batch, height and width.

    Noise would do for equality, but a detector answers it with numbers around 1e-6, which compare badly.
    """

    def make(rng: np.random.Generator, variant: int) -> Arrays:
        batch, height, width = shapes[variant]
        pages = np.ones((batch, 3, height, width)) + rng.normal(0, 0.02, (batch, 3, height, width))
        top, bottom, stroke = height // 4, height - height // 4, max(2, height // 16)
        for page in pages:
            for left in range(width // 10, width - width // 10, 2 * stroke):
                if rng.random() < 0.8:
                    page[:, top:bottom, left : left + stroke] = -1
                if rng.random() < 0.6:
                    bar = int(rng.integers(top, bottom - stroke))
                    page[:, bar : bar + stroke, left : left + 2 * stroke] = -1
        return {"x": np.clip(pages, -1, 1).astype(np.float32)}

    return make


_DET = _images((1, 64, 96), (1, 160, 128), (2, 96, 96), (1, 320, 320))
_REC = _images((1, 48, 80), (2, 48, 160), (1, 48, 320))
_CLS = _images((1, 48, 192), (2, 48, 96), (6, 48, 192))

ONNX_MODELS: dict[str, OnnxEntry] = {
    "silero-vad": OnnxEntry(
        ModelFile(
            _SILERO,
            "silero_vad/data/silero_vad.onnx",
            "1a153a22f4509e292a94e67d6f9b85e8deb25b4988682b7e174c65279d8788e3",
        ),
        _silero,
    ),
    "silero-vad-ifless": OnnxEntry(
        ModelFile(
            _SILERO,
            "silero_vad/data/silero_vad_op18_ifless.onnx",
            "7671cd04b004e9076da0d4a7b1a5aec36adf161c39230c1cb94a4fd5db6bbd28",
        ),
        _silero,
    ),
    "silero-vad-sequence": OnnxEntry(
        ModelFile(
            _SILERO,
            "silero_vad/data/silero_vad_16k_sequence.onnx",
            "9ccdacc4719d8aa7e45a77536bfabec45a03ba1f2fad5e241ab4060b24238a85",
        ),
        _silero_sequence,
        timed=2,
    ),
    "magika": OnnxEntry(
        ModelFile(
            _MAGIKA,
            "magika/models/standard_v3_3/model.onnx",
            "fe2d2eb49c5f88a9e0a6c048e15d6ffdf86235519c2afc535044de433169ec8c",
        ),
        _magika,
    ),
    "ppocr-v4-det": OnnxEntry(
        ModelFile(
            OCR_V4,
            "rapidocr_onnxruntime/models/ch_PP-OCRv4_det_infer.onnx",
            "d2a7720d45a54257208b1e13e36a8479894cb74155a5efe29462512d42f49da9",
        ),
        _DET,
        timed=3,
    ),
    "ppocr-v4-rec": OnnxEntry(
        ModelFile(
            OCR_V4,
            "rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx",
            "48fc40f24f6d2a207a2b1091d3437eb3cc3eb6b676dc3ef9c37384005483683b",
        ),
        _REC,
        timed=2,
    ),
    "ppocr-cls": OnnxEntry(
        ModelFile(
            OCR_V4,
            "rapidocr_onnxruntime/models/ch_ppocr_mobile_v2.0_cls_infer.onnx",
            "e47acedf663230f8863ff1ab0e64dd2d82b838fceb5957146dab185a89d6215c",
        ),
        _CLS,
    ),
    "ppocr-v6-det": OnnxEntry(
        ModelFile(
            _OCR_V6,
            "rapidocr/models/PP-OCRv6_det_small.onnx",
            "090f04abcd9d9a7498bc4ebf677e4cb9bdce1fe4197ddb7e529f1ef44e1ff94f",
        ),
        _DET,
        timed=3,
    ),
    "ppocr-v6-rec": OnnxEntry(
        ModelFile(
            _OCR_V6,
            "rapidocr/models/PP-OCRv6_rec_small.onnx",
            "6f327246b50388f3c176ae304bd95767ea6dc0c9ae92153ef8cbe210b3c14884",
        ),
        _REC,
        timed=2,
    ),
}
"""Both OCR wheels carry the same text-direction classifier, `ppocr-cls`."""
