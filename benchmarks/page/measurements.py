"""What the page is made of: one row a measurement. A row added here is measured, kept and rendered like the others."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from benchmarks.page import readings
from benchmarks.page.readings import Reading
from hotfuse.machine.topology import topology

Profile = Literal["quick", "full"]
OUT = "{out}"
"""In a command: a file that the benchmark writes its document to; without it the document is what it prints last."""
HOME_OF_ITS_OWN = frozenset({"warm", "saturated", "start", "server", "memory", "corpus"})
"""Benchmarks that give their processes empty homes themselves."""
QUICK_MODELS = ("silero-vad", "magika", "ppocr-v4-det", "ppocr-v4-rec", "minilm", "bert-base", "gpt2", "resnet-50")
MODELS = ("silero-vad", "silero-vad-ifless", "silero-vad-sequence", "magika", "ppocr-v4-det", "ppocr-v4-rec", "ppocr-cls",
          "ppocr-v6-det", "ppocr-v6-rec", "minilm", "bert-base", "distilbert", "gpt2", "vit-base", "resnet-50",
          "mixtral-small")  # fmt: skip
LARGE_MODELS = frozenset({"minilm", "bert-base", "distilbert", "gpt2", "vit-base", "resnet-50", "mixtral-small"})
"""Those that are exported and converted first."""
INT8 = "mlp.int8-dynamic,mlp.int8-tensor,cnn.int8-tensor"
ARCHITECTURES = "bert,gpt2,vit,swin,convnext,segformer,unet,lstm,quartznet,mamba"


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the page."""

    name: str
    title: str
    about: str


SECTIONS = (
    Section("models", "Whole models in steady state", "Over the best of eager, ONNX Runtime and OpenVINO in f32 (with `--profile "
            "full` Inductor with frozen weights, too), each where it can run the model; in turns, the median over rounds, 10th to "
            "90th percentile behind it. Asked: 1.6 as the geomean, no model below 0.97."),
    Section("programs", "Programs with one line changed", "Recipes of `examples/recipes`, gradients enabled, code that branches on "
            "data, `generate`: the same program with and without Hotfuse."),
    Section("start", "The first seconds, and second processes", "Seconds from the constructor on; calls of the first five seconds "
            "with loading."),
    Section("load", "Saturated servers", "As many callers as cores, nothing idle."),
    Section("small", "Never worse", "Modules that hardly anything can be gained on; what a call costs beyond its kernels."),
    Section("inputs", "What data allow to leave out", "Padded batches of BERT-base."),
    Section("int8", "Quantized files", "Over ONNX Runtime after 15 seconds of calls."),
    Section("memory", "Memory", "Resident memory after mixed sizes, workers included, beyond what importing took."),
    Section("time", "Speed over time, and other architectures", "Traffic whose lengths change; architectures of the corpus over "
            "eager."),
    Section("machines", "More cores, and devices", "Where this machine has them."),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Measurement:
    """One command, and how its document is read."""

    name: str
    """Its section, a slash, and what it is."""
    arguments: tuple[str, ...]
    """Of `python -m benchmarks.…`; the first one is the module."""
    read: Reading
    seconds: float
    """What it takes on two quiet cores, about."""
    profiles: tuple[Profile, ...] = ("quick", "full")
    threads: int = 1
    document: Callable[[str], Any] = readings.document
    cores: int = 1
    """Cores that it needs."""
    package: str = ""
    """A package that it needs."""
    device: bool = False

    @property
    def section(self) -> str:
        return self.name.partition("/")[0]

    @property
    def budget_s(self) -> float:
        """It is ended behind that, and its record says so."""
        return max(90.0, 3 * self.seconds)

    @property
    def command(self) -> str:
        return f"python -m benchmarks.{' '.join(self.arguments)}"

    def impossible(self) -> str:
        """Why it cannot be measured here; empty where it can."""
        if (have := len(os.sched_getaffinity(0))) < self.cores:
            return f"needs {self.cores} cores, this machine has {have}"
        if self.package and importlib.util.find_spec(self.package) is None:
            return f"{self.package} is not installed"
        if self.device and not _has_device():
            return "needs a CUDA device"
        return ""


def _has_device() -> bool:
    import torch

    return torch.cuda.is_available()


def _model(name: str, threads: int, *, profile: Profile) -> Measurement:
    more = ("--rounds", "8", "--without", "inductor") if profile == "quick" else ("--rounds", "20")
    return Measurement(
        f"models/{name}, {threads} threads" if threads > 1 else f"models/{name}",
        ("models", "--models", name, "--threads", str(threads), *more, "--again", "--results", "{folder}", "--json", OUT),
        readings.whole_model, (45 if name in LARGE_MODELS else 15) * (1 if profile == "quick" else 3), (profile,), threads,
        cores=threads,
    )  # fmt: skip


def _corpus(
    name: str, title: str, only: str, peers: str, at_least: float, seconds: float, profiles: tuple[Profile, ...]
) -> Measurement:
    return Measurement(
        f"{name}/{title}",
        ("corpus", "run", "--only", only, "--seconds", "15", "--behind", "3", "--settle", "8", "--rounds", "7", "--peers", peers,
         "--json", OUT), partial(readings.corpus_rows, at_least=at_least), seconds, profiles, document=readings.jsonl,
    )  # fmt: skip


FULL: tuple[Profile, ...] = ("full",)
MEASUREMENTS: tuple[Measurement, ...] = (
    *(_model(n, t, profile="quick") for t in (1, 2) for n in QUICK_MODELS),
    *(_model(n, t, profile="full") for t in (1, 2) for n in MODELS),
    Measurement("programs/recipes", ("programs", "recipes", "--only", "denoising", "text_pipeline", "sentence_encoder",
                                     "voice_activity"), readings.recipes, 90, ("quick",)),
    Measurement("programs/all recipes", ("programs", "recipes"), readings.recipes, 400, FULL),
    Measurement("programs/gradients enabled", ("programs", "gradients", "--seconds", "15"), readings.gradients, 45),
    Measurement("programs/torch.compile", ("programs", "compile"), readings.compile_backend, 120, FULL),
    Measurement("programs/blocks compiled one by one", ("programs", "regional"), readings.regional, 60, FULL),
    Measurement("programs/Python that reads data", ("data_paths", "--json"), readings.data_paths, 60),
    Measurement("programs/generate", ("decode", "--sizes", "25", "--dtypes", "float32", "--threads", "1", "--seconds", "15",
                                      "--json"), readings.decode, 40, ("quick",), document=lambda text: [readings.document(text)]),
    Measurement("programs/generate, more sizes", ("decode", "--json"), readings.decode, 900, FULL,
                document=lambda text: readings.jsonl("\n".join(x for x in text.splitlines() if x.startswith("{")))),
    Measurement("start/second processes", ("warm", "--parts", "start", "--models", "ppocr-v4-rec,silero-vad", "--json"),
                readings.warm_start, 160, ("quick",)),
    Measurement("start/second processes, BERT-base too", ("warm", "--parts", "start", "--json"), readings.warm_start, 200, FULL),
    Measurement("start/first five seconds", ("start", "--models", "ppocr-v4-rec,silero-vad", "--json"), readings.first_seconds, 30),
    Measurement("load/sessions", ("saturated", "--models", "ppocr-v4-rec", "--seconds", "45", "--idle-seconds", "25", "--json"),
                readings.saturated, 100, threads=1, cores=2),
    Measurement("load/threaded server", ("server",), readings.server, 45, cores=2),
    Measurement("small/modules", ("never_worse", "--only", "small", "--threads", "1", "--json"), readings.small_modules, 70),
    Measurement("small/modules, 2 threads", ("never_worse", "--only", "small", "--threads", "2", "--json"),
                readings.small_modules, 70, FULL, 2, cores=2),
    Measurement("small/dispatch", ("dispatch", "--rounds", "100", "--json"), readings.dispatch, 15),
    Measurement("small/watching", ("watching", "--models", "mlp,bert-base,magika", "--json"), readings.watching, 200, FULL),
    Measurement("inputs/padding", ("inputs", "padding", "--contenders", "packed", "--shares", "0.33,1", "--json", OUT),
                readings.padding, 110, ("quick",)),
    Measurement("inputs/padding, every share", ("inputs", "padding", "--json", OUT), readings.padding, 600, FULL),
    _corpus("int8", "quantized files", INT8, "ort", 0.95, 60, ("quick", "full")),
    Measurement("memory/a text recognizer", ("memory", "--json"), readings.memory, 80),
    _corpus("time", "architectures", ARCHITECTURES, "eager", 1.0, 400, FULL),
    Measurement("time/BERT-base under traffic that changes", ("adapt", "--again", "--json"), readings.adapt, 500, FULL),
    Measurement("machines/threads", ("threads", "--threads", "4", "8", "16", "--json"), readings.by_threads, 900, FULL, 16,
                cores=16),
    Measurement("machines/CUDA", ("cuda", "--peers", "default,reduce-overhead", "--json"), readings.on_devices, 900, FULL,
                device=True),
)  # fmt: skip


def of_profile(profile: Profile) -> list[Measurement]:
    """The rows of a profile."""
    return [m for m in MEASUREMENTS if profile in m.profiles]


def machine() -> str:
    """What this machine is, in words."""
    found = topology()
    return f"{found.cpu or 'a processor'}, {len(os.sched_getaffinity(0))} cores"
