"""Models whose code makes text of numbers, looks things up by them, asks for their type, or has Python choose the larger one."""

from __future__ import annotations

import json
import numbers
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hotfuse
from hotfuse import Settings

D = 8
INLINE = Settings(capture="inline", watch=False, tiers=0)
NAN = float("nan")
Condition = Callable[[Any, Any], Any]


class Chooses(nn.Module):
    """One of two layers, by what a function says of an argument's sizes or data."""

    def __init__(self, condition: Condition) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, D), nn.Linear(D, D)
        self.condition = condition

    def forward(self, x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return self.a(x) if self.condition(x, k) else self.b(x)


class Named(nn.ModuleDict):
    """Experts under names, as Switch has them."""

    def __init__(self) -> None:
        super().__init__({f"expert_{i}": nn.Linear(D, D) for i in range(3)})

    def forward(self, x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return self[f"expert_{k}"](x)


OF_SIZES: dict[str, Condition] = {
    "str": lambda x, _: str(x.shape[0]) == "4",
    "format": lambda x, _: f"{x.shape[0]}" == "4",
    "format with a width": lambda x, _: f"{x.shape[0]:03d}" == "004",
    "all of them": lambda x, _: str(tuple(x.shape)) == "(4, 8)",
    "repr": lambda x, _: repr(x.shape) == "torch.Size([4, 8])",
    "by a library": lambda x, _: json.dumps(tuple(x.shape)) == "[4, 8]",
    "isinstance": lambda x, _: isinstance(x.shape[0], int) and x.shape[0] == 4,
    "type": lambda x, _: type(x.shape[0]) is int and x.shape[0] == 4,
    "by type": lambda x, _: {int: x.shape[0] == 4}.get(type(x.shape[0]), False),
    "type of what is computed": lambda x, _: type(x.shape[0] / 2) is float and type(x.shape[0] == 4) is bool and x.shape[0] == 4,
    "equal to True": lambda x, _: (x.shape[0] - 3) == True,  # noqa: E712
    "among truth values": lambda x, _: (x.shape[0] - 3) in (True,),
    "a comparison is a number": lambda x, _: (x.shape[0] == 4) == 1 and (x.shape[0] == 5) != 1.0 and 2 | (x.shape[0] == 4) == 3,
    "methods of numbers": lambda x, _: hasattr(x.shape[0], "numerator") and x.shape[0] != 5,
    "abstract": lambda x, _: isinstance(x.shape[0], numbers.Integral) and x.shape[0] == 4,
}
OF_DATA: dict[str, Condition] = {
    "format": lambda _, k: f"{k}" == "1",
    "format with a type": lambda _, k: f"{k:d}" == "1",
    "of a float": lambda _, k: f"{k.float():.1f}" == "1.0",
    "str": lambda _, k: str(k.item()) == "1",
    "dict": lambda _, k: {1: True}.get(k.item(), False),
    "set": lambda _, k: k.item() in {1, 5},
    "identity": lambda _, k: k.eq(1).item() is True,
    "tolist": lambda _, k: k.tolist() + 3 == 4,
    "isinstance": lambda _, k: isinstance(k.item(), int) and k.item() == 1,
    "whole tensors": lambda _, k: str(k) == "tensor(1)",
    "whole tensors in text": lambda _, k: f"{k.reshape(1)}" == "tensor([1])",
}


def _same(model: nn.Module, calls: int = 40, x: Callable[[int], torch.Tensor] | None = None) -> Any:
    fast = hotfuse.jit(model.eval(), settings=INLINE)
    with torch.no_grad():
        for i in range(calls):
            rows = 4 if i < 3 or i % 2 else 5 if i < 30 else 6
            x_, k = x(i) if x is not None else torch.randn(rows, D), torch.tensor(0 if i < 12 else i % 3)
            torch.testing.assert_close(fast(x_, k), model(x_, k), equal_nan=True)
    return fast


@pytest.mark.parametrize("name", OF_SIZES)
def test_of_sizes(name: str) -> None:
    assert _same(Chooses(OF_SIZES[name])).stats()["graph_calls"] >= 20


@pytest.mark.parametrize("name", OF_DATA)
def test_of_data(name: str) -> None:
    fast = _same(Chooses(OF_DATA[name]))
    if name.startswith("whole tensors"):
        assert fast.stats()["graph_calls"] == 0 and "makes text of a tensor" in str(fast.explain())
    else:
        assert fast.stats()["graph_calls"] >= 15


def test_layers_are_found_by_names_that_have_a_tensors_number_in_them() -> None:
    fast = _same(Named())
    assert fast.stats()["graph_calls"] >= 20, str(fast.explain(full=True))


def check_that(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)


class Checked(Chooses):
    """As transformers check numbers of image tokens: what would be said is made in every call."""

    def forward(self, x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        check_that(x.shape[1] == D, f"{x.shape} has no rows of {k} for {k.float():.2f} or {x}")
        return self.a(x) * k


def test_messages_assume_nothing() -> None:
    fast = _same(Checked(lambda _x, _k: True))
    assert fast.stats()["graph_calls"] >= 36, str(fast.explain(full=True))
    assert "another path" not in str(fast.explain())


def check_text(text: str) -> bool:
    return text in ("1", "(5, 8)")


@pytest.mark.parametrize("of", ["data", "sizes"])
def test_text_whose_check_gives_an_answer_is_no_message(of: str) -> None:
    asks: dict[str, Condition] = {
        "data": lambda _, k: check_text(f"{k.item()}"),
        "sizes": lambda x, _: check_text(str(tuple(x.shape))),
    }
    assert _same(Chooses(asks[of])).stats()["graph_calls"] >= 15


class Divides(Chooses):
    """By the larger one of two, as Python chooses."""

    def forward(self, x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return self.a(x) / self.condition(x, k)


EXTREMES: dict[str, tuple[Condition, int]] = {
    "number first": (lambda x, _: max(1e-6, x.std()), 35),
    "tensor first": (lambda x, _: max(x.std(), 1e-6), 35),
    "tensors": (lambda x, _: min(x.mean(), x.sum()), 35),
    "listed": (lambda x, _: max([x[0, 0], x[0, 1], x[0, 2]]), 15),
    "another kind": (lambda x, _: max(x.mean(), 2), 25),
    "read": (lambda _, k: 2.0 if max(k, torch.tensor(1)) == k else 1.0, 15),
}


@pytest.mark.parametrize("name", EXTREMES)
def test_the_larger_one_is_chosen_as_python_does_of_nan_too(name: str) -> None:
    condition, least = EXTREMES[name]

    def x(i: int) -> torch.Tensor:
        found = torch.randn(4, D)
        if i % 7 == 5:
            found[0, i % 3] = NAN
        return found

    fast = _same(Divides(condition), x=x)
    assert fast.stats()["graph_calls"] >= least, str(fast.explain(full=True))


def test_what_reads_as_a_number_while_tracing_is_a_symbol_again_behind_it() -> None:
    _same(Chooses(OF_SIZES["str"]), calls=6)
    for symbol in (torch.SymInt, torch.SymFloat, torch.SymBool):
        assert "__getattribute__" not in vars(symbol) and "__format__" not in vars(symbol)
    assert max.__module__ == "builtins" and type(max).__name__ == "builtin_function_or_method"
