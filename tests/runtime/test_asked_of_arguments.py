"""Models whose code asks of its arguments, of their types, or of torch, what no shape, dtype or stride tells."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hotfuse
from hotfuse import Settings

D = 8
INLINE = Settings(capture="inline", watch=False, tiers=0)
Question = Callable[[Any], Any]


def _scaled(x: Tensor) -> Tensor:
    x.scale = 3.0  # type: ignore[attr-defined]
    return x


def _with_gradient(x: Tensor) -> Tensor:
    x.grad = torch.ones_like(x)
    return x


def _view(x: Tensor) -> Tensor:
    return torch.cat([x, x])[x.shape[0] :]


def _tried(x: Any) -> bool:
    try:
        return x.scale > 0
    except AttributeError:
        return False


ANSWERED: dict[str, tuple[Question, Callable[[Tensor], Tensor]]] = {
    "getattr": (lambda x: getattr(x, "scale", None) is None, _scaled),
    "hasattr": (lambda x: hasattr(x, "scale"), _scaled),
    "tried": (_tried, _scaled),
    "of what may be the argument": (lambda x: hasattr(x.contiguous(), "scale"), _scaled),
    "isinstance": (lambda x: isinstance(x, nn.Parameter), nn.Parameter),
    "type": (lambda x: type(x) is Tensor, nn.Parameter),
    "by type": (lambda x: {Tensor: True}.get(type(x), False), nn.Parameter),
    "requires_grad": (lambda x: x.requires_grad, lambda x: x.requires_grad_()),
    "of what was computed": (lambda x: (x * 2).requires_grad or x.is_leaf, lambda x: x.requires_grad_()),
    "grad": (lambda x: x.grad is None, _with_gradient),
}
"""Calls that would answer otherwise go to the model's own code."""
KEPT: dict[str, tuple[Question, Callable[[Tensor], Tensor]]] = {
    "vars": (lambda x: vars(x).get("scale", 1.0) == 1.0, _scaled),
    "entries": (lambda x: "scale" in x.__dict__, _scaled),
    "version": (lambda x: x._version == 0, lambda x: x.add_(0)),
    "base": (lambda x: x._base is None, _view),
    "offset": (lambda x: x.storage_offset() == 0, _view),
    "storage": (lambda x: x.untyped_storage().size() == 4 * x.numel(), _view),
    "shared": (lambda x: x.is_shared(), lambda x: x.share_memory_()),
}
"""No graph answers these."""


def _model(question: Question) -> Callable[[Tensor], Tensor]:
    return lambda x: x * 2 if question(x) else x * 3


def _serve(model: Callable[..., Tensor], arguments: Callable[[int], tuple[Any, ...]], calls: int = 24) -> Any:
    fast = hotfuse.jit(model, settings=INLINE)
    with torch.no_grad():
        for i in range(calls):
            given = arguments(i)
            torch.testing.assert_close(fast(*given), model(*given))
    return fast


def _now_and_then(other: Callable[[Tensor], Tensor]) -> Callable[[int], tuple[Any, ...]]:
    return lambda i: (other(torch.randn(4, D)) if i > 9 and i % 2 else torch.randn(4, D),)


@pytest.mark.parametrize("name", ANSWERED)
def test_calls_that_answer_otherwise_are_the_own_codes(name: str) -> None:
    question, other = ANSWERED[name]
    fast = _serve(_model(question), _now_and_then(other))
    assert fast.stats()["graph_calls"] >= 12, str(fast.explain(full=True))
    assert fast.stats()["events"]["calls_unlike_captured"] == 7
    assert "unlike what was captured" in str(fast.explain())


@pytest.mark.parametrize("name", KEPT)
def test_what_no_graph_answers_keeps_the_own_code(name: str) -> None:
    question, other = KEPT[name]
    fast = _serve(_model(question), _now_and_then(other))
    assert fast.stats()["graph_calls"] == 0
    assert "asks an argument for" in str(fast.explain())


SAME_OBJECT: dict[str, Callable[[Any, Any], Any]] = {
    "is": lambda a, b: a is b,
    "id": lambda a, b: id(a) == id(b),
    "set": lambda a, b: len({a, b}) == 1,
    "dict": lambda a, b: b in {a: 1},
}


@pytest.mark.parametrize("name", SAME_OBJECT)
def test_arguments_that_are_one_object(name: str) -> None:
    same = SAME_OBJECT[name]

    def model(a: Tensor, b: Tensor) -> Tensor:
        return a * 2 if same(a, b) else b * 3

    def arguments(i: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(4, D)
        return x, x if i > 9 and i % 2 else torch.randn(4, D)

    assert _serve(model, arguments).stats()["graph_calls"] >= 12


@pytest.mark.parametrize("name", SAME_OBJECT)
@pytest.mark.parametrize("gradients", [False, True])
def test_arguments_that_are_one_object_in_the_first_call(name: str, *, gradients: bool) -> None:
    """That is what the graph is for then; others are the own code's."""
    same = SAME_OBJECT[name]

    def model(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return a * b.detach() + c if same(a, b) and not same(b, c) else a * b - c

    fast = hotfuse.jit(model, settings=INLINE)
    for i in range(24):
        x = torch.randn(4, D, requires_grad=gradients)
        again = x.detach().clone().requires_grad_(gradients)
        c = torch.randn(4, D)
        kind = 0 if i < 12 else i % 3
        given, wanted = ([t, t.clone() if kind == 1 else t, t if kind == 2 else c] for t in (x, again))
        got, want = fast(*given), model(*wanted)
        torch.testing.assert_close(got, want)
        if gradients and i % 8 == 7:
            got.sum().backward()
            want.sum().backward()
            torch.testing.assert_close(x.grad, again.grad)
    assert fast.stats()["graph_calls"] >= 5, str(fast.explain(full=True))
    assert fast.stats()["events"]["calls_unlike_captured"] >= 5


def test_arguments_inside_of_containers() -> None:
    def model(held: dict[str, list[Tensor]]) -> Tensor:
        (x,) = held["xs"]
        return x * getattr(x, "scale", 1.0)

    def arguments(i: int) -> tuple[Any, ...]:
        (x,) = _now_and_then(_scaled)(i)
        return ({"xs": [x]},)

    assert _serve(model, arguments).stats()["graph_calls"] >= 12


class Tagged(nn.Module):
    """Asks its weight for what somebody may write on it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(D, D))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight * getattr(self.weight, "scale", 1.0)


def test_weights_are_asked_for_attributes() -> None:
    model = Tagged()

    def arguments(i: int) -> tuple[Tensor]:
        if i == 12:
            _scaled(model.weight)
        return (torch.randn(4, D),)

    fast = _serve(model, arguments)
    assert "asks a weight for an attribute" in str(fast.explain())


TORCHS = {
    "threads": (lambda: torch.get_num_threads() == 1, None),
    "anomalies": (lambda: torch.is_anomaly_enabled(), lambda: torch.autograd.set_detect_anomaly(True)),
    "inference": (lambda: torch.is_inference_mode_enabled(), torch.inference_mode),
    "seed": (lambda: torch.initial_seed() % 2 == 0, None),
    "dtype of autocast": (lambda: torch.get_autocast_dtype("cpu") is torch.bfloat16, None),
    "cuDNN": (lambda: torch.backends.cudnn.benchmark, lambda: torch.backends.cudnn.flags(benchmark=True)),
    "flash attention": (lambda: torch.backends.cuda.flash_sdp_enabled(), None),
}


@pytest.mark.parametrize("name", TORCHS)
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_switches_of_torch_are_asked(name: str) -> None:
    asks, around = TORCHS[name]

    def model(x: Tensor) -> Tensor:
        return x * 2 if asks() else x * 3

    fast = hotfuse.jit(model, settings=INLINE)
    for i in range(12):
        x = torch.randn(4, D)
        if around is None or i < 6:
            assert torch.equal(fast(x), model(x))
        else:
            with around():
                assert torch.equal(fast(x), model(x))
    assert "asks torch." in str(fast.explain())


def test_a_gradient_that_a_call_gives_is_no_graphs() -> None:
    def model(x: Tensor, y: Tensor) -> Tensor:
        x.grad = y
        return x * 2

    fast = hotfuse.jit(model, settings=INLINE)
    for _ in range(6):
        x, y = torch.randn(4, D), torch.randn(4, D)
        assert torch.equal(fast(x, y), x * 2) and x.grad is y
    assert "gives a tensor a gradient" in str(fast.explain())


class Name(str):
    """Text that carries more than it compares by."""

    factor: float


class Count(int):
    factor: float


@pytest.mark.parametrize("make", [lambda: Name("sum"), lambda: Count(3)], ids=["text", "number"])
def test_constants_with_attributes_are_more_than_what_they_equal(make: Callable[[], Any]) -> None:
    def arguments(i: int) -> tuple[Any, ...]:
        constant = make()
        constant.factor = float(i // 8 + 1)
        return torch.randn(4, D), constant

    fast = _serve(lambda x, named: x * named.factor, arguments)
    assert fast.stats()["graph_calls"] == 0 and "cannot take apart an object" in str(fast.explain())


def test_numbers_of_numpy_compare_by_their_text() -> None:
    def zeros(i: int) -> tuple[Any, ...]:
        return torch.randn(4, D), np.float64(-0.0 if i % 3 else 0.0)

    assert _serve(lambda x, k: x * math.copysign(1.0, k), zeros).stats()["graph_calls"] >= 16
    nan = np.float64("nan")
    assert _serve(lambda x, k: x * (2 if k != k else 3), lambda _: (torch.randn(4, D), nan)).stats()["graph_calls"] >= 20


class AsksWeight(nn.Module):
    """One of two answers, by what a question says of its weight."""

    def __init__(self, question: Question) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(D, D))
        self.question = question

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight * (2 if self.question(self.weight) else 3)


OF_WEIGHTS: dict[str, tuple[Question, Callable[[Tensor], object]]] = {
    "requires_grad": (lambda w: w.requires_grad, lambda w: w.requires_grad_(False)),
    "grad": (lambda w: w.grad is None, _with_gradient),
    "_backward_hooks": (lambda w: w._backward_hooks is None, lambda w: w.register_hook(lambda g: g)),
}


@pytest.mark.parametrize("name", OF_WEIGHTS)
def test_questions_to_weights_keep_the_own_code(name: str) -> None:
    question, change = OF_WEIGHTS[name]
    model = AsksWeight(question)

    def arguments(i: int) -> tuple[Tensor]:
        if i == 10:
            change(model.weight)
        return (torch.randn(4, D),)

    assert f"asks a weight for {name}" in str(_serve(model, arguments).explain())
