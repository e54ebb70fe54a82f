"""A gelu that is written out in single operators: recognized in any order of its factors, and only where it is one.

Bound: within 2e-7 |x| + 1e-30 of the float64 result in fp32, 1e-14 |x| in fp64: an error of the normal distribution's share.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from hotfuse.ir.graph import Graph
from hotfuse.ir.types import DType
from hotfuse.lower import lower
from hotfuse.lower.common.recognize_gelu import recognized
from hotfuse.lower.cpu.tiling import core_for
from tests.contract.lowering import group_of, interpret, run_native

CORE = core_for(16, many_registers=True)
ROOT = 1.4142135381698608
"""As fp32 has it, which is what a file holds."""
Spelling = Callable[[torch.Tensor], Any]
SPELLINGS: dict[str, Spelling] = {
    "x (1 + erf) / 2": lambda x: (x * (torch.erf(x / ROOT) + 1.0)) * 0.5,
    "half x first": lambda x: (x * 0.5) * (torch.erf(x / ROOT) + 1.0),
    "half the share": lambda x: x * ((torch.erf(x / math.sqrt(2)) + 1.0) * 0.5),
    "turned round": lambda x: ((torch.erf(x * 0.70710678) + 1.0) * x) * 0.5,
}
OTHERS: dict[str, Spelling] = {
    "another factor": lambda x: (x * (torch.erf(x / ROOT) + 1.0)) * 0.25,
    "another root": lambda x: (x * (torch.erf(x / 1.4142) + 1.0)) * 0.5,
    "another sum": lambda x: (x * (torch.erf(x / ROOT) + 1.5)) * 0.5,
    "another x": lambda x: ((x + 1.0) * (torch.erf(x / ROOT) + 1.0)) * 0.5,
}
POINTS = (0.0, -0.0, 1e-30, -1e-30, 3.0, -3.0, 5.5, -5.5, -7.0, -20.0, 1e30, -1e30, 3e38, -3e38)


def numbers(graph: Graph) -> Graph:
    """The numbers as files' constants become them: of the tensors' type."""
    return replace(
        graph,
        nodes=tuple(replace(n, args=tuple(float(a) if type(a) is int else a for a in n.args)) for n in graph.nodes),
    )


def ops(graph: Graph) -> list[str]:
    return [n.op.split(".")[1] for n in graph.nodes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", SPELLINGS)
def test_recognized_and_right(name: str, dtype: torch.dtype) -> None:
    x = torch.cat([torch.tensor(POINTS, dtype=dtype), torch.randn(333, dtype=dtype) * 3]).reshape(1, -1)
    group = group_of(SPELLINGS[name], [x])
    group = replace(group, graph=numbers(group.graph))
    assert ops(recognized(group.graph)) == ["gelu"]
    lowered = lower(group.graph, CORE)
    want = x.double() * torch.special.ndtr(x.double())
    allowed = (2e-7 if dtype is torch.float32 else 1e-14) * x.double().abs() + 1e-30
    for (got,) in (interpret(lowered, group, [x]), run_native(lowered, group, [x])):
        assert got.dtype is dtype and bool(((got.double() - want).abs() <= allowed).all())


def test_what_is_not_finite_is_as_written_out() -> None:
    x = torch.tensor([math.inf, -math.inf, math.nan] * 7)
    group = group_of(SPELLINGS["x (1 + erf) / 2"], [x])
    group = replace(group, graph=numbers(group.graph))
    lowered = lower(group.graph, CORE)
    want = SPELLINGS["x (1 + erf) / 2"](x)
    for (got,) in (interpret(lowered, group, [x]), run_native(lowered, group, [x])):
        assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got[::3], want[::3])


@pytest.mark.parametrize("name", OTHERS)
def test_others_stay_as_they_are(name: str) -> None:
    graph = numbers(group_of(OTHERS[name], [torch.randn(3, 5)]).graph)
    assert recognized(graph) == graph


def test_what_somebody_else_wants_stays() -> None:
    """The error function is a result of its own."""

    def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        e = torch.erf(x / ROOT)
        return e, (x * (e + 1.0)) * 0.5

    x = torch.randn(4, 40)
    group = group_of(both, [x])
    group = replace(group, graph=numbers(group.graph))
    assert ops(recognized(group.graph)) == ["div", "erf", "gelu"]
    for got, want in zip(run_native(lower(group.graph, CORE), group, [x]), both(x.double()), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-6)


def test_a_part_of_a_longer_product() -> None:
    graph = numbers(group_of(lambda x: ((x * 0.5) * (torch.erf(x / ROOT) + 1.0)) * 0.5, [torch.randn(3, 5)]).graph)
    assert ops(recognized(graph)) == ["gelu", "mul"]


def test_halves_stay_as_they_are() -> None:
    """Every operator of half precision rounds its result: one operator would not."""
    graph = numbers(group_of(SPELLINGS["x (1 + erf) / 2"], [torch.randn(3, 5).half()]).graph)
    assert {v.type.dtype for n in graph.nodes for v in n.outs} == {DType.F16}  # type: ignore[union-attr]
    assert recognized(graph) == graph
