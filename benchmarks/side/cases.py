"""What is measured: every case is built from a seed, alike in every process that takes part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from benchmarks.side.traffic import TRACES, Feed, Trace, tokens

Suite = Literal["kernels", "models", "startup", "traffic", "overhead", "compile"]
SUITES: tuple[Suite, ...] = ("overhead", "startup", "compile", "kernels", "models", "traffic")

EVERYBODY = ("hotfuse", "eager", "inductor", "inductor-autotune", "ort", "openvino", "jax", "iree", "tvm", "tinygrad")
MOST = tuple(n for n in EVERYBODY if n != "inductor-autotune")
"""Tuning takes Inductor half a minute a kernel: two cases show it."""
TORCH = ("hotfuse", "eager", "inductor-freezing", "ort", "openvino")
MAIN_CONTENDERS = ("hotfuse", "eager", "ort")
ONNX = ("hotfuse", "ort", "openvino")


@dataclass(frozen=True, slots=True)
class Model:
    """What a case runs: a torch module, or an ONNX file, or a whole application."""

    module: Any = None
    path: Path | None = None
    application: bool = False


@dataclass(frozen=True, slots=True)
class Case:
    """One thing to measure and who takes part."""

    suite: Suite
    name: str
    build: Callable[[], Model]
    feed: Callable[[], Any]
    contenders: tuple[str, ...] = TORCH
    kind: Literal["torch", "onnx", "application"] = "torch"
    quick: bool = False
    """Part of a quick run too."""
    jax: str = ""
    """Its function in `benchmarks.side.jax_kernels`."""
    trace: str = ""
    dynamic: dict[str, dict[int, str]] = field(default_factory=dict[str, dict[int, str]])
    """Dims that change from call to call, by input: exporters are told."""
    heavy_s: float = 0.0
    """What it takes beyond a small model, all contenders and rounds together: see `benchmarks.side.budget`."""

    def traffic(self) -> Trace:
        return Trace(TRACES[self.trace])


def _rng(*seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def _normal(*shape: int) -> np.ndarray[Any, Any]:
    return _rng(*shape).standard_normal(shape).astype(np.float32)


# --- kernels -------------------------------------------------------------------------------------


def kernel(kind: str, **sizes: int) -> Callable[[], Model]:
    """A module of `benchmarks.side.kernels` with seeded weights."""

    def build() -> Model:
        import torch

        from benchmarks.side import kernels

        torch.manual_seed(0)
        return Model(module=getattr(kernels, kind)(**sizes).eval())

    return build


def _linear(rows: int, quick: bool = False) -> Case:
    return Case("kernels", f"linear 768-3072 + GELU, {rows} rows", kernel("Linear", columns=768, outputs=3072),
                lambda: {"x": _normal(rows, 768)}, EVERYBODY if quick else MOST, quick=quick, jax="linear")  # fmt: skip


def _attention(length: int) -> Case:
    return Case("kernels", f"attention, 12 heads of 64, {length} tokens", kernel("Attention"),
                lambda: {n: _normal(1, length, 768) * s for n, s in zip("qkv", (1.0, 0.9, 0.8), strict=True)}, EVERYBODY,
                jax="attention")  # fmt: skip


def _norm(rows: int) -> Case:
    return Case("kernels", f"residual + layer norm, {rows}x768", kernel("Norm", columns=768),
                lambda: {"x": _normal(rows, 768), "y": _normal(rows, 768)[::-1].copy()}, MOST, jax="norm")


def _conv(channels: int, side: int) -> Case:
    return Case("kernels", f"conv 3x3 {channels} channels {side}x{side} + ReLU", kernel("Conv", channels=channels),
                lambda: {"x": _normal(1, channels, side, side)}, MOST, jax="conv")


def _chain(rows: int) -> Case:
    return Case("kernels", f"softmax of a gated sum, {rows}x1024", kernel("Chain"),
                lambda: {"x": _normal(rows, 1024), "y": _normal(rows, 1024)[::-1].copy()}, MOST, jax="chain")


# --- models --------------------------------------------------------------------------------------


def zoo_case(suite: Suite, name: str, contenders: tuple[str, ...], quick: bool = False, heavy_s: float = 0.0) -> Case:
    """A model of the zoo on the inputs it is timed with."""

    def model() -> Model:
        from benchmarks import zoo

        found = zoo.load(name)
        return Model(found.module, found.path)

    def feed() -> Feed:
        from benchmarks import zoo

        found = zoo.load(name)
        return {n: np.asarray(v) for n, v in found.inputs(seed=0, variant=found.timed).items()}

    return Case(suite, name, model, feed, contenders, "onnx" if contenders is ONNX else "torch", quick, heavy_s=heavy_s)


def small_bert() -> Model:
    """As large as the MiniLM sentence encoder, with random weights: nothing to fetch."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.BertConfig(hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536)
    return Model(module=transformers.BertModel(config).eval())


def _bert(suite: Suite, contenders: tuple[str, ...], quick: bool = True) -> Case:
    return Case(suite, "small BERT, 1x64", small_bert, lambda: tokens(_rng(0), 1, 64), contenders, quick=quick, heavy_s=4.0)


def _application() -> Case:
    def page() -> Any:
        from examples.ocr_client import draw_page

        return draw_page(0)[0]

    return Case("models", "rapidocr, a page", lambda: Model(application=True), page, ("hotfuse", "ort"), "application",
                heavy_s=100.0)


def _traffic(name: str, more: tuple[str, ...] = (), quick: bool = False) -> Case:
    both, who = {0: "batch", 1: "length"}, (*MAIN_CONTENDERS, *more)
    return Case("traffic", name, small_bert, lambda: Trace(TRACES[name]).next(0.0).feed, who, quick=quick, trace=name,
                dynamic={"input_ids": both, "attention_mask": both})


def _speech() -> Case:
    model = zoo_case("traffic", "silero-vad", ONNX)
    return Case("traffic", "branches", model.build, lambda: Trace(TRACES["branches"]).next(0.0).feed, ONNX, "onnx",
                trace="branches")


def _mlp(rows: int = 1) -> Case:
    return Case("overhead", "two layers of width 64", kernel("Mlp", width=64), lambda: {"x": _normal(rows, 64)},
                ("hotfuse", "hotfuse-tier0", "eager", "inductor", "ort"), quick=True)


CASES: tuple[Case, ...] = (
    _linear(16, True), _attention(128), _norm(128), _conv(64, 56), _chain(64), _linear(1),
    _bert("models", TORCH), zoo_case("models", "ppocr-v4-rec", ONNX, True, heavy_s=13.0),
    zoo_case("models", "bert-base", TORCH, heavy_s=45.0), zoo_case("models", "resnet-50", TORCH, heavy_s=28.0),
    zoo_case("models", "silero-vad", ONNX), zoo_case("models", "magika", ONNX),
    zoo_case("models", "ppocr-v4-det", ONNX, heavy_s=13.0), _application(),
    _mlp(), _bert("overhead", ("hotfuse", "hotfuse-tier0", "eager"), False),
    _bert("startup", ("hotfuse", "eager", "inductor", "ort", "openvino")),
    zoo_case("startup", "ppocr-v4-rec", ONNX),
    _bert("compile", ("hotfuse", "inductor-freezing", "ort", "openvino")),
    zoo_case("compile", "ppocr-v4-rec", ONNX, heavy_s=13.0),
    _traffic("lengths", ("openvino",), quick=True), _traffic("padded"), _speech(),
    _traffic("shift", ("inductor-dynamic",)), _traffic("batches"), _traffic("bursts"),
)  # fmt: skip


def find(suite: str, name: str) -> Case:
    """A case by its names; in a process of its own, that is all it is told."""
    return next(c for c in CASES if (c.suite, c.name) == (suite, name))
