"""Traffic for `benchmarks.adapt`, and how each contender answers it: everything that runs in a contender's own process."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import zoo
from benchmarks.peers import Positional

CONTENDERS = ("eager", "hotfuse", "ort", "inductor", "inductor-dynamic")
LONGEST, SHORTEST = 128, 4
MIDDLE = (24.0, 80.0)
"""Around which lengths are drawn, before and after the shift."""
Feed = dict[str, torch.Tensor]
Answer = Callable[[Feed], Any]


def lengths(phase: int) -> Iterator[int]:
    """Seeded lengths: short texts at first, then long ones."""
    rng = np.random.default_rng((7, phase))
    while True:
        yield int(np.clip(rng.lognormal(math.log(MIDDLE[phase]), 0.5), SHORTEST, LONGEST))


def tokens(length: int) -> Feed:
    """A text of so many tokens."""
    ids = torch.randint(0, 30522, (1, length))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def bert() -> torch.nn.Module:
    """BERT-base with random weights."""
    module = zoo.load("bert-base").module
    assert module is not None
    return module


def contender(name: str, model: torch.nn.Module, threads: int) -> Callable[[], Answer]:
    """How one contender gets ready to answer, which is part of its first call. Importing its library is not, nor is exporting for
    ONNX Runtime: an application does that before it serves.
    """
    if name == "eager":
        return lambda: lambda feed: model(**feed)
    if name == "hotfuse":
        from hotfuse import jit

        def ours() -> Answer:
            fast = jit(model)
            return lambda feed: fast(**feed)

        return ours
    if name.startswith("inductor"):

        def compiled() -> Answer:
            fast = torch.compile(model, dynamic=True if name.endswith("dynamic") else None)
            return lambda feed: fast(**feed)

        return compiled
    import onnxruntime

    folder = tempfile.TemporaryDirectory()
    path = exported(model, Path(folder.name))

    def loaded() -> Answer:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads, options.log_severity_level = threads, 1, 3
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        folder.cleanup()
        return lambda feed: session.run(None, {n: t.numpy() for n, t in feed.items()})

    return loaded


def exported(model: torch.nn.Module, folder: Path) -> Path:
    """The model as an ONNX file for any length."""
    example, path = tokens(32), folder / "bert.onnx"
    any_length = {n: {1: "length"} for n in example}
    torch.onnx.export(Positional(model, list(example)).eval(), tuple(example.values()), str(path), input_names=list(example),
                      dynamic_axes=any_length, dynamo=False, verbose=False)  # fmt: skip
    return path


def serve(name: str, seconds: float, shift: float, threads: int) -> dict[str, Any]:
    """In this process: calls until the time is up, as [begin, length, seconds] each."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model = bert()
    with torch.inference_mode():
        torch.nn.functional.linear(
            torch.randn(128, 768), torch.randn(768, 768)
        )  # thread pools start, whoever asks for it
        ready = contender(name, model, threads)
        phases = lengths(0), lengths(1)
        calls: list[list[float]] = []
        answer: Answer | None = None
        start = time.perf_counter()
        while (now := time.perf_counter() - start) < seconds:
            length = next(phases[now >= shift])
            feed = tokens(length)
            begin = time.perf_counter()
            if answer is None:
                answer = ready()
            answer(feed)
            end = time.perf_counter()
            calls.append([round(begin - start, 6), length, round(end - begin, 6)])
    return {"calls": calls}


def while_compiling(threads: int, idle: int = 150, most_s: float = 40.0) -> dict[str, Any]:
    """Calls of one length on library kernels, in seconds each: with idle workers, while they compile for another model, idle again.

    The other model is called now and then, untimed, until nothing is pending for it any more: capture, compilation, proof and
    races all happen beside the timed calls.
    """
    import hotfuse
    from hotfuse.base.settings import Settings

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model, feed = bert(), tokens(16)

    def timed(times: list[float]) -> None:
        begin = time.perf_counter()
        served(**feed)
        times.append(time.perf_counter() - begin)

    before, during, after = list[float](), list[float](), list[float]()
    with torch.inference_mode():
        served = hotfuse.jit(model, settings=Settings(tiers=0, record=False))
        for _ in range(8):
            served(**feed)
            served.wait()
        for _ in range(idle):
            timed(before)
        other, begin = hotfuse.jit(model, settings=Settings(record=False)), time.perf_counter()
        pending = True
        while pending and time.perf_counter() - begin < most_s:
            other(**feed)
            for _ in range(4):
                timed(during)
            raced = any(
                k in other.stats()["events"] for k in ("deploy.faster", "refuse.not_faster", "refuse.not_compiled")
            )
            pending = not (raced and other.wait(0))
        tiers, took = other.stats()["calls_per_tier"], time.perf_counter() - begin
        other.wait()
        other.close()
        for _ in range(idle):
            timed(after)
    return {"before": before, "compiling": during, "after": after, "seconds": took, "tiers": tiers}
