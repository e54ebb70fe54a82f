"""What lives as long as a process: taken away behind every test, so that none sees what another one left.

Which tests share a process, and in which order they run, is different in every run of the whole suite. Kernels that a test lowered
with other limits, races that one lost, workers forked while a function was replaced: all of it would be there for the next one,
whichever that is. What a test makes with its own hands it closes itself. `pytest --shuffle N` shows what is missing here.
"""

from __future__ import annotations

import gc
import sys
import time
from pathlib import Path
from typing import Any

import torch

import hotfuse
from hotfuse.base.living import Living

PACKAGE = Path(hotfuse.__file__).parent
JOBS_S = 60.0
"""Longest wait for what a test began in the background."""
STOP_S = 10.0
THREADS, TURNS_S, THRESHOLDS = torch.get_num_threads(), sys.getswitchinterval(), gc.get_threshold()
"""As they are before the first test: a test may begin while what a fixture started still has them changed."""


def loaded(name: str) -> Any:
    """A module, if some test has had use for it; a name that no module has is a mistake of this file."""
    assert (PACKAGE / name.replace(".", "/")).with_suffix(".py").exists(), f"there is no module hotfuse.{name}"
    return sys.modules.get(f"hotfuse.{name}")


def as_at_first() -> None:
    """A test that changes how torch computes, or when the interpreter collects and changes threads, does so for itself alone."""
    if torch.get_num_threads() != THREADS:
        torch.set_num_threads(THREADS)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    sys.setswitchinterval(TURNS_S)
    gc.set_threshold(*THRESHOLDS)
    gc.enable()


def freeze() -> None:
    """What is alive between modules stays alive: collections look no more at it.

    Everything that torch, its table of operators and the tests themselves consist of is more than a million objects. Looking at all
    of them took half of a test's time, and every fork copied the memory that was looked at. Behind a module and not behind a test:
    garbage goes first, and what a module's tests share goes with it.
    """
    gc.collect()
    gc.freeze()


def finish() -> None:
    """Wait for background jobs, which would compile, count, take memory and hold the interpreter in the next test."""
    until = time.monotonic() + JOBS_S
    own = None if (service := loaded("compile.workers.service")) is None else service._service
    while own is not None and own._queues and time.monotonic() < until:
        time.sleep(0.005)


def forget() -> None:
    """Everything that a process remembers, and that could change what comes next in it."""
    if (service := loaded("compile.workers.service")) is not None and service._service is not None:
        own, service._service = service._service, None
        own.stop(STOP_S)  # its workers were forked from what the test had replaced, and may be distrusted because of it
    if (record := loaded("runtime.observe.record")) is not None:
        record.end()
    if (faults := loaded("base.faults")) is not None:
        faults.faults.clear()
    if (packed := loaded("frontends.onnx.packed_weights")) is not None:
        packed.trials.forget()
    if (learned := loaded("compile.learn.learned")) is not None:
        learned.forget()
    for name, kept in (("compile.unit.kernel_cache", "_caches"), ("compile.learn.strategy_history", "_histories"),
                       ("compile.learn.idle", "_begun"), ("compile.run.runs", "_outcomes")):
        if (module := loaded(name)) is not None:
            getattr(module, kept).clear()
    if (place := loaded("cache.place")) is not None:
        place.forget()
    for name in ("compile.variants.variant_search", "compile.variants.skipping"):
        if (module := loaded(name)) is not None:
            module.shifts.seen = {}
    if (dynamo := loaded("torch_backend")) is not None and len(dynamo._graphs):
        torch._dynamo.reset()
        dynamo._graphs = Living()  # those of the test are gone when a collection finds them, which may be after the next one
    call_sampler = loaded("runtime.observe.call_sampler")
    shared = None if call_sampler is None else call_sampler._shared
    if call_sampler is not None and shared is not None and (shared.failed or shared.analyzer.given_up):
        call_sampler._shared = None
        shared.analyzer.stop()
