"""How a torch model of the corpus is built: seeded, from `transformers`, `timm`, `diffusers`, or a network written here."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.corpus import more_networks, networks
from benchmarks.corpus.inputs import MakeFeed
from benchmarks.zoo.wheels import ZooUnavailable

Build = Callable[[], torch.nn.Module]


@dataclass(frozen=True, slots=True)
class TorchModel:
    """One row of the table."""

    name: str
    family: str
    build: Build
    feed: MakeFeed
    exported: bool = True
    """Whether its ONNX export is an entry too."""


def seeded(make: Build) -> Build:
    """The same weights in every process."""

    def build() -> torch.nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return make().eval()

    return build


def _name_torchvision_operators() -> None:
    """Torchvision's operator library does not load beside a CPU build of torch, and its import needs these names only. Where it
    does load, it names them itself, and a second definition would end the process."""
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None or hasattr(torch.ops.torchvision, "nms"):
        return
    for library in Path(spec.origin).parent.glob("_C*.so"):
        with contextlib.suppress(OSError):
            torch.ops.load_library(library)
            return
    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def transformers_model(model: str, config: str, part: str = "", **options: Any) -> Build:
    """`model(config(**options))`, or a part of it by attribute names."""

    def make() -> torch.nn.Module:
        _name_torchvision_operators()
        try:
            import transformers
        except ImportError as e:
            raise ZooUnavailable("transformers is not installed", because=str(e), hint="pip install hotfuse[bench]") from e
        found: Any = getattr(transformers, model)(getattr(transformers, config)(**options))
        for name in filter(None, part.split(".")):
            found = getattr(found, name)
        return found

    return seeded(make)


def timm_model(name: str, **options: Any) -> Build:
    """`timm.create_model` with ten classes."""

    def make() -> torch.nn.Module:
        _name_torchvision_operators()
        try:
            import timm
        except (ImportError, RuntimeError) as e:
            hint = "pip install --no-deps -r benchmarks/corpus/requirements.txt"
            raise ZooUnavailable("timm is not installed", because=str(e), hint=hint) from e
        model: Any = timm.create_model(name, pretrained=False, num_classes=10, **options)
        for parameter in model.get_classifier().parameters():
            if not parameter.any():  # some begin at zero: then every answer is zero, and right whatever was computed
                torch.nn.init.normal_(parameter, std=0.02)
        return model

    return seeded(make)


def diffusers_model(model: str, **options: Any) -> Build:
    """A network of a diffusion pipeline, by its class."""

    def make() -> torch.nn.Module:
        _name_torchvision_operators()
        try:
            import diffusers
        except ImportError as e:
            raise ZooUnavailable("diffusers is not installed", because=str(e), hint="pip install diffusers") from e
        return getattr(diffusers, model)(**options)

    return seeded(make)


def own_network(kind: str, **options: Any) -> Build:
    """A class of `networks` or `more_networks`."""
    return seeded(lambda: getattr(networks if hasattr(networks, kind) else more_networks, kind)(**options))
