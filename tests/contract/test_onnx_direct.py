"""Nodes that the tracer adds by rules of its own are those that torch would have traced, and leave no bounds on sizes behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hotfuse.frontends.assumptions import assumptions
from hotfuse.frontends.captured import TensorSpec
from hotfuse.frontends.fx import type_of
from hotfuse.frontends.onnx.model_file import PortType
from hotfuse.frontends.onnx.tracing import direct
from hotfuse.frontends.onnx.tracing.control import trace_step
from hotfuse.frontends.onnx.tracing.level import Session, TracedLevel
from hotfuse.frontends.onnx.tracing.traced_model import fake_inputs, fresh_mode

Function = Callable[..., Any]
IMAGE, ROWS, WEIGHTS = (2, 6, 9, 13), (2, 7, 12), (12, 5)


def traced(function: Function, shapes: list[tuple[int, ...]], dynamic: tuple[int, ...]) -> tuple[list[Any], list[Any]]:
    """A function's nodes with the types of their results, and the guards."""
    mode = fresh_mode()
    assert mode.shape_env is not None
    specs = [TensorSpec(s, torch.empty(s).stride(), torch.float32, "cpu", frozenset(d for d in dynamic if d < len(s)) if i == 0 else
                        frozenset()) for i, s in enumerate(shapes)]  # fmt: skip
    fakes = fake_inputs(mode, mode.shape_env, specs, [PortType("tensor")] * len(specs))
    at = TracedLevel(Session(mode, trace_step))
    with torch.no_grad():
        gm = at.trace(lambda: [function(*(at.input(f"x{i}", f) for i, f in enumerate(fakes)))])
    seen = [
        (n.name, str(n.target), str(n.args), str(dict(n.kwargs)), str(type_of(n.meta["val"])))
        for n in gm.graph.nodes if n.op == "call_function" and not str(n.target).startswith("aten.sym_")
    ]  # fmt: skip
    known = frozenset(str(s) for s in mode.shape_env.var_to_range)
    return seen, list(assumptions(mode.shape_env, known))


CASES: dict[str, tuple[Function, list[tuple[int, ...]]]] = {
    "relu": (torch.relu, [IMAGE]), "sigmoid": (torch.sigmoid, [ROWS]), "hardswish": (F.hardswish, [IMAGE]),
    "silu": (F.silu, [ROWS]),
    "number": (lambda x: x * 0.2 + 1, [IMAGE]), "quotient": (lambda x: torch.div(x, 3), [IMAGE]),
    "pow": (lambda x: torch.pow(x, 2), [ROWS]), "clamp": (lambda x: torch.clamp(x, 0.0, 6.0), [IMAGE]),
    "upper": (lambda x: torch.clamp(x, None, 6.0), [IMAGE]), "lower": (lambda x: torch.clamp(x, 0), [IMAGE]),
    "channels": (torch.add, [IMAGE, (6, 1, 1)]), "one": (torch.mul, [IMAGE, (1,)]), "scalar": (torch.sub, [IMAGE, ()]),
    "first is narrow": (lambda x, y: torch.mul(y, x), [IMAGE, (6, 1, 1)]), "maximum": (torch.maximum, [ROWS, (12,)]),
    "conv": (lambda x, w, b: F.conv2d(x, w, b), [IMAGE, (8, 6, 1, 1), (8,)]),
    "conv strides": (lambda x, w: F.conv2d(x, w, None, [2, 1], [1, 1]), [IMAGE, (8, 6, 3, 3)]),
    "depthwise": (lambda x, w, b: F.conv2d(x, w, b, [1, 2], [2, 2], [1, 1], 6), [IMAGE, (6, 1, 5, 5), (6,)]),
    "dilated": (lambda x, w: F.conv2d(x, w, None, 1, 0, [2, 2]), [IMAGE, (8, 6, 3, 3)]),
    "conv1d": (lambda x, w: F.conv1d(x, w, None, [1], [1]), [(2, 6, 11), (8, 6, 3)]),
    "transposed": (lambda x, w, b: F.conv_transpose2d(x, w, b, [2, 2]), [IMAGE, (6, 8, 2, 2), (8,)]),
    "batch norm": (lambda x, a, b, c, d: torch.batch_norm(x, a, b, c, d, False, 0.0, 1e-5, False), [IMAGE, *[(6,)] * 4]),
    "matmul": (torch.matmul, [ROWS, WEIGHTS]), "batched": (torch.matmul, [(2, 3, 7, 4), (2, 3, 4, 5)]),
    "of rows in another order": (lambda x, w: torch.matmul(torch.permute(x, (0, 2, 1)), w), [(2, 12, 7), WEIGHTS]),
    "linear": (F.linear, [ROWS, (5, 12), (5,)]), "softmax": (lambda x: torch.softmax(x, -1), [ROWS]),
    "mean": (lambda x: torch.mean(x, [2, 3], True), [IMAGE]), "mean of rows": (lambda x: torch.mean(x, [-1]), [ROWS]),
    "sum": (lambda x: torch.sum(x, [2], True, dtype=x.dtype), [ROWS]), "amax": (lambda x: torch.amax(x, [1]), [ROWS]),
    "permute": (lambda x: torch.permute(x, (0, 2, 3, 1)), [IMAGE]), "squeeze": (lambda x: torch.squeeze(x, [1]), [(2, 1, 7)]),
    "reshape": (lambda x: torch.reshape(x, [x.shape[0], x.shape[1], 3, 4]), [ROWS]),
    "reshape to the rest": (lambda x: torch.reshape(x, [-1, 4, 3]), [(7, 12)]),
    "reshape as a method": (lambda x: x.reshape(-1, 4, 3), [(7, 12)]), "of a list": (lambda x: x.reshape([-1, 4, 3]), [(7, 12)]),
    "of turned rows": (lambda x: torch.reshape(torch.permute(x, (0, 2, 1)), [2, -1]), [ROWS]),
    "of turned rows, cut": (lambda x: torch.permute(x, (0, 2, 1)).reshape(2, 3, 4, 7), [ROWS]),
    "of turned rows, longer": (lambda x: torch.reshape(torch.permute(x, (0, 2, 1)), [2, 1, 12, 7]), [ROWS]),
    "bytes": (lambda x: x.to(torch.int32).to(torch.uint8), [IMAGE]), "there and back": (lambda x: x.to(torch.int8).float(), [ROWS]),
    "integers reshaped": (lambda x: x.to(torch.int64).reshape(-1, 4, 3), [(7, 12)]),
    "a number": (lambda x: x.to(torch.uint8), [()]),
}  # fmt: skip


@pytest.mark.parametrize("dynamic", [(), (2,), (0,), (0, 3)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_rules_give_what_torch_gives(name: str, dynamic: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    function, shapes = CASES[name]
    added: list[Any] = []
    add = direct.DirectOperators._added  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(direct.DirectOperators, "_added", lambda self, made: added.append(made) or add(self, made))  # pyright: ignore
    ours, fewer = traced(function, shapes, dynamic)
    assert dynamic or len(added) == len(ours)  # where a symbol has to be some number, torch is asked
    monkeypatch.setattr(direct, "_ROWS", {})
    theirs, more = traced(function, shapes, dynamic)
    assert ours == theirs
    assert len(fewer) <= max(len(more), len(dynamic))


@pytest.mark.parametrize("function", [lambda x: x.float(), lambda x: x.to(torch.float32), lambda x: x.to(x.dtype)])
def test_conversions_that_change_nothing_are_no_nodes(function: Function) -> None:
    """Half of the nodes of a quantized file were such ones."""
    assert traced(lambda x: function(x) + 1, [ROWS], (1,))[0] == traced(lambda x: x + 1, [ROWS], (1,))[0]
    assert len(traced(lambda x: x.reshape(()) + 1, [()], ())[0]) == 1
    assert len(traced(lambda x: x.reshape(()) + 1, [(1,)], ())[0]) == 2


def test_convolutions_bound_no_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch answers which library it would take, by the number of elements: a bound in both directions."""
    function, shapes = CASES["conv strides"][0], [(1, 3, 48, 320), (16, 3, 3, 3)]
    _, guards = traced(function, shapes, (3,))
    assert [g.op for g in guards] == ["<="] * len(guards)
    monkeypatch.setattr(direct, "_ROWS", {})
    assert len(traced(function, shapes, (3,))[1]) > len(guards)


@pytest.mark.parametrize("name", ["a conv of too few channels", "sizes that differ", "integers", "a size that may be one"])
def test_what_is_not_usual_is_asked_of_torch(name: str) -> None:
    """No rule may say what torch would refuse, or types that it would give otherwise."""

    def tried(function: Function, *args: Tensor) -> Any:
        row = direct._ROWS[function]  # pyright: ignore[reportPrivateUsage]
        return direct.DirectOperators(TracedLevel(Session(mode, trace_step)))._asked(row, function, args, {})  # pyright: ignore[reportPrivateUsage]

    mode = fresh_mode()
    with mode:
        match name:
            case "a conv of too few channels":
                assert tried(F.conv2d, torch.empty(1, 3, 8, 8), torch.empty(4, 5, 3, 3)) is None
            case "sizes that differ":
                assert tried(torch.add, torch.empty(3, 4), torch.empty(3, 5)) is None
            case "integers":
                assert tried(torch.add, torch.empty(3, dtype=torch.int64), torch.empty(3, dtype=torch.int64)) is None
            case _:
                assert tried(F.conv2d, torch.empty(1, 3, 2, 2), torch.empty(4, 3, 3, 3)) is None
