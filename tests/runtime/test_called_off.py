"""A model that is closed has nothing made for it any more: neither what waits, nor what a worker is at."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hotfuse.api import TorchModel
from hotfuse.base.errors import CaptureError
from hotfuse.base.events import EventLog
from hotfuse.base.settings import Settings
from hotfuse.pipeline import Units, compile_tier0
from hotfuse.runtime.engine import Engine

INLINE = Settings(capture="inline")


class Blocked:
    """Makes a plan for as long as nobody calls it off."""

    def __init__(self) -> None:
        self.asked, self.begun, self.ended = 0, threading.Event(), threading.Event()

    def __call__(self, *_args: Any, **_kwargs: Any) -> Any:
        self.asked += 1
        self.begun.set()
        assert self.ended.wait(60), "nobody called it off"
        raise CaptureError("the compilation was cancelled")

    def call_off(self) -> None:
        self.ended.set()


def hot(improve: Any) -> tuple[Engine, Callable[[], None]]:
    """An engine, and the jobs that would make its plan better."""
    jobs: list[Callable[[], None]] = []
    settings, model = Settings(hot_calls=8), nn.Linear(4, 4).eval()
    engine = Engine(TorchModel(model, INLINE), lambda g, w: compile_tier0(g, w, settings), jobs.append, settings, EventLog(),
                    improve)  # fmt: skip
    x = torch.randn(3, 4)
    with torch.inference_mode():
        for _ in range(9):
            engine(x)
        learning, jobs[:] = list(jobs), []
        for job in learning:  # what the cache knows of it, then the capture
            job()
        engine(x)
    (entry,) = next(iter(engine.sites.values())).entries
    assert entry.improving and jobs
    return engine, lambda: [job() for job in jobs].clear()


def test_closing_ends_what_is_being_made() -> None:
    improve = Blocked()
    engine, work = hot(improve)
    thread = threading.Thread(target=work)
    thread.start()
    assert improve.begun.wait(60)
    engine.close()
    thread.join(60)
    assert not thread.is_alive() and improve.asked == 1


def test_what_waits_is_not_begun_after_closing() -> None:
    improve = Blocked()
    engine, work = hot(improve)
    engine.close()
    work()
    assert improve.asked == 0


def test_what_begins_after_it_was_called_off_ends_at_once() -> None:
    x = torch.randn(3, 4)
    model = nn.Linear(4, 4).eval()
    seen: list[tuple[Any, Any]] = []

    def noted(graph: Any, weights: Any) -> Any:
        seen.append((graph, weights))
        return compile_tier0(graph, weights, INLINE)

    engine = Engine(TorchModel(model, INLINE), noted, lambda job: job(), INLINE, EventLog())
    with torch.inference_mode():
        engine(x)
        engine(x)
    ((graph, weights),) = seen
    units = Units(INLINE)
    assert units(graph, weights, [x]).tier == 1
    units.call_off()
    with pytest.raises(CaptureError, match="cancelled"):
        units(graph, weights, [x])
    engine.close()
