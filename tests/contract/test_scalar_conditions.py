"""Conditions on single integers asked in Python answer what torch's operators answer, and nothing else is asked that way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from hotfuse.backends.library import LibraryBackend
from hotfuse.ir.graph import Graph
from hotfuse.ir.text import parse
from hotfuse.ir.verify import verify
from hotfuse.runtime.serve.scalar_conditions import MAX_NODES, scalar_condition
from hotfuse.runtime.serve.speculate import Ask, BranchSide, OutcomeHits, betting

LIMITS = [-(1 << 63), -(1 << 31), -1, 0, 1, 7, 16000, (1 << 53) + 1, (1 << 63) - 1]
"""One is no float64."""


def compared(op: str, left: str = "i64[]", right: str = "i64[]") -> Graph:
    return verify(parse(f"""graph until(%x: {left}) {{
  param %k: {right} = "k"
  %c: bool[] = aten.{op}(%x, %k)
  return %c
}}
"""))


def ask_of(graph: Graph, weights: Mapping[str, torch.Tensor], names: tuple[str, ...] = ("other", "x")) -> Ask | None:
    return scalar_condition(graph, 0, names, weights)


def library(graph: Graph, weights: Mapping[str, torch.Tensor], *inputs: Any) -> bool:
    return bool(LibraryBackend().compile(graph, weights).run(*inputs)[0])


@pytest.mark.parametrize("op", ["eq", "ne", "lt", "le", "gt", "ge"])
def test_comparisons_answer_what_torch_answers(op: str) -> None:
    graph = compared(f"{op}.Tensor")
    for k in LIMITS:
        weights = {"k": torch.tensor(k)}
        ask = ask_of(graph, weights)
        assert ask is not None
        for x in map(torch.tensor, LIMITS):
            assert ask(None, x) is library(graph, weights, x), (op, x, k)


@pytest.mark.parametrize("op", ["logical_and.default", "logical_or.default", "bitwise_and.Tensor", "bitwise_or.Tensor"])
@pytest.mark.parametrize("x", [True, False])
@pytest.mark.parametrize("k", [True, False])
def test_logic_answers_what_torch_answers(op: str, x: bool, k: bool) -> None:
    graph, weights = compared(op, "bool[]", "bool[]"), {"k": torch.tensor(k)}
    ask = ask_of(graph, weights)
    assert ask is not None and ask(None, torch.tensor(x)) is library(graph, weights, torch.tensor(x))


def test_steps_literals_and_other_integers() -> None:
    graph = verify(parse("""graph until(%x: i32[1], %f: bool[]) {
  %a: bool[1] = aten.ge.Scalar(%x, -3)
  %b: bool[1] = aten.logical_not.default(%a)
  %c: bool[1] = aten.logical_or.default(%b, %f)
  return %a, %c
}
"""))
    ask = scalar_condition(graph, 1, ("f", "x"), {})
    assert ask is not None
    for x in (-4, -3, 0):
        for f in (True, False):
            assert ask(torch.tensor(f), torch.tensor([x], dtype=torch.int32)) is (x < -3 or f)


def test_a_weight_is_read_on_every_call() -> None:
    rate = torch.tensor(8)
    ask = ask_of(compared("eq.Tensor"), {"k": rate})
    assert ask is not None and not ask(None, torch.tensor(9))
    rate.fill_(9)
    assert ask(None, torch.tensor(9))


@pytest.mark.parametrize(
    "body",
    [
        "  %c: bool[] = aten.gt.Scalar(%r, 0)\n",  # a float: rounding is torch's business
        "  %s: i64[] = aten.add.Tensor(%x, %x)\n  %c: bool[] = aten.gt.Scalar(%s, 0)\n",  # may overflow
        "  %c: bool[] = aten.gt.Scalar(%x, 0.5)\n",
        "  %c: bool[] = aten.gt.Scalar(%b, 300)\n",  # no number of that type
        "  %c: bool[] = aten.any.default(%many)\n",
        "  %c: bool[] = aten.bitwise_and.Tensor(%x, %x)\n  %d: bool[] = aten.logical_not.default(%x)\n",
    ],
)
def test_anything_else_is_left_to_operators(body: str) -> None:
    reads = [v for v in ("%x: i64[]", "%r: f32[]", "%b: i8[]", "%many: bool[3]") if v.split(":")[0] in body]
    graph = parse(f"graph until({', '.join(reads)}) {{\n{body}  return %c\n}}\n")
    assert scalar_condition(graph, 0, ("x", "r", "b", "many"), {}) is None


def test_long_logic_is_left_to_operators() -> None:
    lines = [f"  %n{i + 1}: bool[] = aten.logical_not.default(%n{i})\n" for i in range(MAX_NODES + 1)]
    short = parse(f"graph until(%n0: bool[]) {{\n{''.join(lines[:-1])}  return %n{MAX_NODES}\n}}\n")
    long = parse(f"graph until(%n0: bool[]) {{\n{''.join(lines)}  return %n{MAX_NODES + 1}\n}}\n")
    assert scalar_condition(short, 0, ("n0",), {}) is not None and scalar_condition(long, 0, ("n0",), {}) is None


@pytest.mark.parametrize("wants", [True, False])
def test_the_prefix_runs_only_where_somebody_wants_it(wants: bool) -> None:
    ran: list[Any] = []

    def prefix(x: Any) -> tuple[Any, ...]:
        ran.append(x)
        return (x > 0,)

    def side(name: str) -> Any:
        return lambda *inputs: (name, inputs)

    outcomes, told = OutcomeHits(), list[bool]()
    hot, cold = {True: BranchSide(side("hot"), wants)}, BranchSide(side("cold"), True)
    run = betting(prefix, (1,), 0, hot, cold, outcomes, lambda _, x: x > 0, told.append)
    assert run("a", 5) == ("hot", ("a", 5, True) if wants else ("a", 5)) and ran == ([5] if wants else [])
    assert run("a", -5) == ("cold", ("a", -5, False)), "what has no code takes what the prefix computed"
    assert (outcomes.hits, outcomes.misses, told) == (1, 1, [True, False])
