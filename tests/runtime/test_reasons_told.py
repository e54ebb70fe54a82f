"""Whatever keeps calls in the model's own code stands in `explain()`'s first lines, and on the log where it stays."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hotfuse
from hotfuse import Settings
from hotfuse.base.structure import flatten
from hotfuse.runtime.returning_values import MAX_MET, MAX_UNUSED, SAID, ReturningValues
from hotfuse.runtime.site import Site

INLINE = Settings(capture="inline", hot_calls=2, watch=False)




def _sparse(linear: nn.Linear, x: torch.Tensor, k: int) -> tuple[Any, ...]:
    return (x.relu().to_sparse(),)


def _conjugate(linear: nn.Linear, x: torch.Tensor, k: int) -> tuple[Any, ...]:
    return (torch.complex(x, x).conj(),)


def _changed(linear: nn.Linear, x: torch.Tensor, k: int) -> tuple[Any, ...]:
    linear.weight = nn.Parameter(torch.randn(8, 8))
    return (x,)


CALLS: dict[str, tuple[Callable[..., tuple[Any, ...]], str]] = {
    "sparse": (_sparse, "an argument is a torch.sparse_coo tensor"),
    "a lazy conjugate": (_conjugate, "an argument is a lazy conjugate"),
    "an iterator": (lambda linear, x, k: (x, iter(())), "a call cannot be described"),
    "another model each time": (_changed, "time and again after a few calls"),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_reason_stands_in_the_first_lines_and_on_the_log(name: str) -> None:
    make, said = CALLS[name]
    linear = nn.Linear(8, 8)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = linear

        def forward(self, x: torch.Tensor, more: Any = None) -> Any:
            return x * 2 if x.is_complex() else self.linear(x)

    model = Model().eval()
    with torch.no_grad(), hotfuse.jit(model, settings=INLINE) as fast:
        for k in range(12):
            fast(*make(linear, torch.randn(3, 8), k))
            assert fast.wait(60)
        text = str(fast.explain())
        assert "serves now: the model's own code" in text
        assert said.replace("time and again", "times in a row") in text
        logged = fast._engine.limits.below_tier1()  # pyright: ignore[reportPrivateUsage] - what the log is told after some seconds
        assert any(said in reason for reason in logged)


def test_a_program_that_trains_is_told_so() -> None:
    model = nn.Linear(8, 8)
    with hotfuse.jit(model, settings=INLINE) as fast:
        for _ in range(12):
            fast(torch.randn(3, 8)).sum().backward()
            assert fast.wait(60)
        assert "backward passes follow calls with gradients enabled" in str(fast.explain())


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        return y * 2 if y.sum() > 0 else torch.tanh(y)


def test_captures_in_several_threads_leave_the_process_as_it_was() -> None:
    before = list(warnings.filters)
    models = [Branches().eval() for _ in range(4)]
    served = [hotfuse.jit(m, settings=INLINE) for m in models]

    def calls(k: int) -> None:
        with torch.no_grad():
            for _ in range(6):
                served[k](torch.randn(1 + k, 8))

    threads = [threading.Thread(target=calls, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not torch.compiler.is_compiling()
    assert list(warnings.filters) == before
    for fast, model in zip(served, models, strict=True):
        x = torch.randn(3, 8)
        with torch.no_grad():
            torch.testing.assert_close(fast(x), model(x))
        assert fast.stats()["calls"] > 0
        fast.close()


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, scale: float, *, mode: str = "plain") -> torch.Tensor:
        return self.inner(x) * scale


def test_numbers_that_differ_in_every_call_leave_captures_for_those_that_return() -> None:
    model = Scaled().eval()
    with torch.no_grad(), hotfuse.jit(model, settings=INLINE) as fast:
        for k in range(40):
            x = torch.randn(3, 8)
            torch.testing.assert_close(fast(x, k / 7), model(x, k / 7))
            assert fast.wait(60)
        assert fast.stats()["captures"] == MAX_UNUSED and not fast.stats()["graph_calls"]
        assert SAID in str(fast.explain())
        for _ in range(8):  # of the same form
            x = torch.randn(3, 8)
            torch.testing.assert_close(fast(x, 2.5), model(x, 2.5))
            assert fast.wait(60)
        for _ in range(8):  # and of another one
            x = torch.randn(3, 8)
            torch.testing.assert_close(fast(x, 3.5, mode="other"), model(x, 3.5))
            assert fast.wait(60)
        assert fast.stats()["captures"] == MAX_UNUSED + 2
        assert fast.stats()["graph_calls"] == 6 + 7


def test_values_that_were_met_are_remembered_within_bounds() -> None:
    values = ReturningValues()
    sites = [Site(flatten((k,))[1], 8) for k in range(MAX_UNUSED)]
    for k in range(1000, 1000 + 3 * MAX_MET):
        assert not values.worth_a_graph(flatten((k,))[1], sites)
    assert len(values._met) == MAX_MET  # pyright: ignore[reportPrivateUsage]
    assert values.worth_a_graph(flatten((999 + 3 * MAX_MET,))[1], sites)
    assert not values.worth_a_graph(flatten((1000,))[1], sites)  # forgotten
    assert values.worth_a_graph(flatten((True,))[1], sites) and values.worth_a_graph(flatten((torch.ones(1),))[1], sites)


def test_calls_under_autocast_are_told_of() -> None:
    model, x = nn.Linear(8, 8), torch.randn(3, 8)
    with torch.no_grad(), hotfuse.jit(model, settings=INLINE) as fast:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert fast(x).dtype is torch.bfloat16
        assert "calls under torch.autocast run the model's own code" in str(fast.explain())
        torch.testing.assert_close(fast(x), model(x))


def test_torchscript_is_told_of() -> None:
    model = nn.Sequential(torch.jit.script(nn.Linear(8, 8)), nn.ReLU()).eval()
    with torch.no_grad(), hotfuse.jit(model, settings=INLINE) as fast:
        for _ in range(4):
            x = torch.randn(3, 8)
            torch.testing.assert_close(fast(x), model(x))
            assert fast.wait(60)
        assert "RecursiveScriptModule is TorchScript" in str(fast.explain())
