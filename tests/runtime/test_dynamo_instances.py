"""One of Dynamo's graphs, called with the weights of many instances: which of them are served, and which make room."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from hotfuse import torch_backend
from hotfuse.base.errors import CaptureError
from hotfuse.torch_backend import explain_compiled

INLINE = {"capture": "inline", "watch": False, "tiers": 0}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Block(nn.Module):
    def __init__(self, shared: nn.Parameter | None = None) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(8)) if shared is None else shared
        self.fc = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.fc(x * self.scale))


class Stateful(nn.Module):
    """Keeps a tensor anew in an attribute: for Dynamo it is the same one in every call."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.h = torch.zeros(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.h = torch.tanh(self.fc(x) + self.h).sum(0)
        return self.h * 2


def blocks(count: int, *, shared: nn.Parameter | None = None) -> list[Block]:
    found = [Block(shared).eval() for _ in range(count)]
    for block in found:
        block.compile(backend="hotfuse", options=INLINE)
    return found


def check(each: list[Block]) -> None:
    x = torch.randn(3, 8)
    with torch.no_grad():
        for block in each:
            torch.testing.assert_close(block(x), block.forward(x), rtol=1e-5, atol=1e-5)


def graph() -> torch_backend.CompiledGraph:
    found = [g for g in torch_backend._graphs if g.engines]
    assert len(found) == 1
    return found[0]


@pytest.mark.parametrize("tied", [False, True])
def test_blocks_that_are_compiled_one_by_one_all_have_plans(tied: bool) -> None:
    each = blocks(7, shared=nn.Parameter(torch.randn(8)) if tied else None)
    for _ in range(4):
        check(each)
    served = graph()
    assert len(served.engines) == 7 and all(e.counts()["graph_calls"] > 0 for e in served.engines)
    assert not served.limit() and served.own_calls == 0
    with torch.no_grad():
        each[3].fc.weight.mul_(2)  # of one of them
    check(each)


def test_instances_beyond_the_limit_run_as_dynamo_gave_them_and_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_backend, "MAX_INSTANCES", 2)
    monkeypatch.setattr(torch_backend, "LOOK_AGAIN", 4)
    each = blocks(5)
    for _ in range(4):
        check(each)
    served = graph()
    assert len(served.engines) == 2 and served.own_calls == 12
    assert any("further instances" in limit for limit in explain_compiled().to_dict()["limits"])


def test_instances_that_nobody_calls_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_backend, "MAX_INSTANCES", 2)
    monkeypatch.setattr(torch_backend, "LOOK_AGAIN", 1)
    monkeypatch.setattr(torch_backend, "UNUSED_S", 0.0)
    each = blocks(3)
    check(each[:2])
    first = graph().engines
    for _ in range(3):
        check(each[1:])  # the first one is called no more
    served = graph()
    assert first[0] not in served.engines and served.engines[0] is first[1] and len(served.engines) == 2
    assert not first[0].sites or not any(site.entries for site in first[0].sites.values())  # its plans are gone
    check(each)


def test_states_of_several_instances_are_inputs() -> None:
    each = [Stateful().eval() for _ in range(3)]
    twins = [Stateful().eval() for _ in range(3)]
    for module, twin in zip(each, twins, strict=True):
        twin.load_state_dict(module.state_dict())
        module.compile(backend="hotfuse", options=INLINE)
    with torch.no_grad():
        for _ in range(5):
            for module, twin in zip(each, twins, strict=True):
                x = torch.randn(3, 8)
                torch.testing.assert_close(module(x), twin.forward(x), rtol=1e-5, atol=1e-5)
    assert all(len(g.engines) <= 3 for g in torch_backend._graphs)
    assert any(len(g.arguments.inputs_at) == 2 for g in torch_backend._graphs)


def test_states_that_cannot_be_inputs_take_no_place_of_instances(monkeypatch: pytest.MonkeyPatch) -> None:
    convert = torch_backend.capture_dynamo

    def refusing(gm: torch.fx.GraphModule, arguments: torch_backend.Arguments) -> torch_backend.Converted:
        if len(arguments.inputs_at) > 1:
            raise CaptureError("not with such an input")
        return convert(gm, arguments)

    monkeypatch.setattr(torch_backend, "capture_dynamo", refusing)
    module = Stateful().eval()
    module.compile(backend="hotfuse", options=INLINE)
    with torch.no_grad():
        for _ in range(12):
            module(torch.randn(3, 8))
    assert [len(g.engines) for g in torch_backend._graphs] == [torch_backend.MAX_STATES]


def test_threads_that_call_instances_at_once_bind_each_of_them_once() -> None:
    each = blocks(8)
    check(each[:2])  # threads that meet no graph each compile one
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: check(each), range(8)))
    assert len(graph().engines) == 8


def test_a_call_asks_one_weight_however_many_instances_there_are() -> None:
    each = blocks(6)
    for _ in range(2):
        check(each)
    served, asked = graph(), itertools.count()
    for engine in served.engines:
        answer = engine.serve
        engine.serve = lambda args, kwargs, answer=answer: (next(asked), answer(args, kwargs))[1]  # type: ignore[method-assign]
    served._enter = served._entrances(lambda *args: pytest.fail("no set of weights was found"))
    check(each)
    assert next(asked) == 6
