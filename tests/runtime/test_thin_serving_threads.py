# pyright: reportPrivateUsage=false
"""Threads that call one of Dynamo's graphs at once, each with weights or a state that no call has brought before."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import fx, nn

from hotfuse import torch_backend
from hotfuse.base.errors import CaptureError
from hotfuse.base.settings import Settings
from hotfuse.frontends.dynamo import Arguments
from hotfuse.torch_backend import CompiledGraph

OFF = Settings(capture="inline", tiers=0, record=False, watch=False, idle=False)


class Remembers(nn.Module):
    """Its state lies between its weights in the graph's arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.h, self.b = nn.Linear(8, 8), torch.zeros(1, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.tanh(self.a(x) + self.h)) + self.h


class Captured:
    """Dynamo's graph of such a module, and its arguments with another state or input."""

    def __init__(self) -> None:
        torch._dynamo.reset()
        self.graphs: list[CompiledGraph] = []
        self.args: tuple[Any, ...] = ()
        self.model = Remembers().eval()

        def backend(gm: fx.GraphModule, _: object) -> Callable[..., Any]:
            self.graphs.append(CompiledGraph(gm, f"graph{len(self.graphs)}", OFF))

            def noting(*args: Any) -> Any:
                self.args = args
                return gm.forward(*args)

            return noting

        self.x = torch.randn(1, 8)
        with torch.no_grad():
            torch.compile(self.model, backend=backend)(self.x)
        (self.graph,) = self.graphs
        self.serve = self.graph.served()

    def call(self, state: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        given = [state if a is self.model.h else x if a is self.x else a for a in self.args]
        with torch.no_grad():
            (result,) = self.serve(*given)
        return result

    def check(self, state: torch.Tensor, x: torch.Tensor) -> None:
        with torch.no_grad():
            want = self.model.b(torch.tanh(self.model.a(x) + state)) + state
        torch.testing.assert_close(self.call(state, x), want)


@pytest.fixture
def captured() -> Iterator[Captured]:
    yield Captured()
    torch._dynamo.reset()


def test_first_calls_of_two_threads_have_one_engine(captured: Captured) -> None:
    state = captured.model.h
    with ThreadPoolExecutor(4) as pool:
        with captured.graph._lock:
            calls = [pool.submit(captured.check, state, torch.randn(1, 8)) for _ in range(4)]
            time.sleep(0.5)  # all of them wait for the lock; where one does not yet, less is tested
        for call in calls:
            call.result(60)
    assert len(captured.graph.engines) == 1


def test_a_thread_that_comes_while_a_state_becomes_an_input_has_its_own_weights(captured: Captured) -> None:
    """Its weights were those with the state; bound as those without it, the state would be taken for the next layer's weight."""
    graph, lock = captured.graph, captured.graph._lock
    late = threading.get_ident()
    met: list[int] = []

    class Behind:
        """The others' turn with the lock comes before this thread's first one."""

        def __enter__(self) -> None:
            if threading.get_ident() == late and not met:
                met.append(1)
                with ThreadPoolExecutor(1) as other:
                    for _ in range(3):
                        other.submit(captured.check, torch.randn(1, 8), torch.randn(1, 8)).result(60)
            lock.acquire()

        def __exit__(self, *error: object) -> None:
            lock.release()

    graph._lock = Behind()  # pyright: ignore[reportAttributeAccessIssue]
    for _ in range(3):
        captured.check(torch.randn(1, 8), torch.randn(1, 8))
    assert met and len(graph.engines) == 1 and len(graph.arguments.inputs_at) == 2


def test_calls_of_many_threads_with_states_of_their_own(captured: Captured) -> None:
    def calls(seed: int) -> None:
        rng = torch.Generator().manual_seed(seed)
        for _ in range(50):
            captured.check(torch.randn(1, 8, generator=rng), torch.randn(1, 8, generator=rng))

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(calls, range(6)))
    assert len(captured.graph.engines) == 1


def test_a_state_that_cannot_be_an_input_is_tried_once(captured: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    convert = torch_backend.capture_dynamo

    def refusing(gm: fx.GraphModule, arguments: Arguments) -> Any:
        if len(arguments.inputs_at) > 1:
            tried.append(1)
            raise CaptureError("not with such an input")
        return convert(gm, arguments)

    monkeypatch.setattr(torch_backend, "capture_dynamo", refusing)
    for _ in range(8):
        captured.check(torch.randn(1, 8), torch.randn(1, 8))
    assert len(tried) == 1 and len(captured.graph.engines) == torch_backend.MAX_STATES
