"""Every rewrite rule there is: it fires, and its graph computes the same on random tensors.

`Rule(...)` is looked for in the sources, so a rule without a case fails here. Expansions have their cases in `test_expansions`,
where the kernel that they become is run. Where a table promises the same bits, bits are compared.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import hotfuse
from hotfuse.backends import conv_folding
from hotfuse.backends.library import LibraryBackend, meaning
from hotfuse.backends.pycode import flat_function
from hotfuse.compile.device.constant_masks import without_idle_masks
from hotfuse.compile.freeze import frozen
from hotfuse.compile.literals import with_numbers
from hotfuse.ir import rewrite
from hotfuse.ir.graph import Graph
from hotfuse.ir.text import parse
from hotfuse.ir.types import ScalarType, TensorType
from hotfuse.ir.verify import verify
from hotfuse.lower.common.recognize_gelu import recognized
from hotfuse.lower.primitives.rules import expansions
from hotfuse.ops.torch_dtypes import torch_dtype
from hotfuse.simplify import identities, simplify
from hotfuse.specialize import masks
from tests.contract import test_expansions

ROOT = Path(hotfuse.__file__).parent
Weights = Mapping[str, torch.Tensor]
Run = Callable[..., Any]
TABLES: dict[str, Callable[[], set[str]]] = {
    "ir/rewrite.py": set,  # the class itself
    "simplify/identities.py": lambda: {r.name for r in identities.RULES},
    "specialize/masks.py": lambda: {f"decide-{op.removeprefix('aten.')}" for op in masks.KEEPS},
    "lower/primitives/rules.py": lambda: {f"expand-{op.removeprefix('aten.')}" for op in expansions()},
}
"""Modules whose rules have names that are made, and those names."""


def library(graph: Graph, weights: Weights) -> Run:
    return LibraryBackend().compile(verify(graph), weights).run


def on_the_library(rewritten: Callable[[Graph, Weights], Graph]) -> Callable[[Graph, Weights], Run]:
    return lambda graph, weights: library(rewritten(graph, weights), weights)


def convolved(graph: Graph, weights: Weights) -> Run:
    found = conv_folding.folded(graph, meaning, weights)
    assert found is not None
    made, calls, _ = found
    return flat_function(made, calls, weights)[0]


def unmasked(graph: Graph, _weights: Weights) -> Graph:
    found = masks.all_alike(graph, "m", 1)
    assert found is not None
    return found


SIMPLIFIED = on_the_library(lambda g, _: simplify(g)[0])
FROZEN = lambda g, w: library(*frozen(g, w))  # noqa: E731
NUMBERED = on_the_library(with_numbers)
RECOGNIZED = on_the_library(lambda g, _: recognized(g))
UNMASKED = on_the_library(unmasked)
IDLE = on_the_library(lambda g, _: without_idle_masks(g))


@dataclass(frozen=True)
class Case:
    """A graph before its rule; inputs and weights are drawn by their types."""

    made: Callable[[Graph, Weights], Run]
    head: str
    body: str
    tolerance: float = 0.0
    """0: the same bits."""
    ones: tuple[str, ...] = ()
    """Inputs that are all ones: what the rule's guard asks of them."""
    numbers: Mapping[str, float] = field(default_factory=dict[str, float])
    """Weights that are one number all over."""

    def graph(self) -> Graph:
        return verify(parse(f"graph g({self.head}) {{\n{self.body}\n}}\n"))


X = "%x: f32[4, 6]"
MASKED = f"{X}, %m: i64[4, 6], %w: f32[4, 6]"
CASES: dict[str, Case] = {
    "drop-dead": Case(SIMPLIFIED, X, """%a: f32[4, 6] = aten.exp.default(%x)
        %y: f32[4, 6] = aten.sin.default(%x)
        return %y"""),
    "fold-known-size": Case(SIMPLIFIED, X, """%n: int(6) = aten.sym_size.int(%x, 1)
        %y: f32[4, 6] = aten.mul.Tensor(%x, %n)
        return %y"""),
    "share-size": Case(SIMPLIFIED, "%x: f32[s0, 6]", """%n: int(s0) = aten.sym_size.int(%x, 0)
        %e: f32[s0, 6] = aten.exp.default(%x)
        %k: int(s0) = aten.sym_size.int(%e, 0)
        %y: f32[s0, 6] = aten.mul.Tensor(%e, %n)
        %z: f32[s0, 6] = aten.mul.Tensor(%y, %k)
        return %z"""),
    "share-node": Case(SIMPLIFIED, X, """%a: f32[4, 6] = aten.exp.default(%x)
        %b: f32[4, 6] = aten.exp.default(%x)
        %y: f32[4, 6] = aten.add.Tensor(%a, %b)
        return %y"""),
    "drop-proven-check": Case(SIMPLIFIED, X, """aten._assert_tensor_metadata.default(%x, None, None, f32)
        %y: f32[4, 6] = aten.exp.default(%x)
        return %y"""),
    "drop-alias": Case(SIMPLIFIED, X, """%a: f32[4, 6] = aten.detach.default(%x)
        %y: f32[4, 6] = aten.exp.default(%a)
        return %y"""),
    "drop-same-shape-view": Case(SIMPLIFIED, X, """%a: f32[4, 6] = aten.view.default(%x, [4, 6])
        %y: f32[4, 6] = aten.exp.default(%a)
        return %y"""),
    "drop-same-type-cast": Case(SIMPLIFIED, X, """%a: f32[4, 6] = aten.to.dtype(%x, f32)
        %y: f32[4, 6] = aten.exp.default(%a)
        return %y"""),
    "drop-dropout": Case(SIMPLIFIED, X, """%a: f32[4, 6] = aten.dropout.default(%x, 0.5, False)
        %y: f32[4, 6] = aten.exp.default(%a)
        return %y"""),
    "drop-copy": Case(SIMPLIFIED, X, """%a: f32[4, 6] = aten.exp.default(%x)
        %b: f32[4, 6] = aten.clone.default(%a)
        %y: f32[4, 6] = aten.sin.default(%b)
        return %y"""),
    "drop-add-zero": Case(SIMPLIFIED, "%i: i64[4, 6]", """%a: i64[4, 6] = aten.abs.default(%i)
        %b: i64[4, 6] = aten.add.Tensor(%a, 0)
        %y: i64[4, 6] = aten.neg.default(%b)
        return %y"""),
    "drop-mul-one": Case(SIMPLIFIED, "%i: i64[4, 6]", """%a: i64[4, 6] = aten.abs.default(%i)
        %b: i64[4, 6] = aten.mul.Tensor(%a, 1)
        %y: i64[4, 6] = aten.neg.default(%b)
        return %y"""),
    "undo-transpose": Case(SIMPLIFIED, X, """%a: f32[6, 4] = aten.transpose.int(%x, 0, 1)
        %b: f32[4, 6] = aten.permute.default(%a, [1, 0])
        %y: f32[4, 6] = aten.exp.default(%b)
        return %y"""),
    "fold-constant": Case(FROZEN, X, """param %w: f32[6, 3] = "w"
        param %v: f32[6, 2] = "v"
        %c: f32[6, 5] = aten.cat.default([%w, %v], 1)
        %t: f32[6, 5] = aten.tanh.default(%c)
        %y: f32[4, 5] = aten.mm.default(%x, %t)
        return %y"""),
    "write-number": Case(NUMBERED, X, """param %c: f32[] = "c"
        %a: f32[4, 6] = aten.sub.Tensor(%c, %x)
        %y: f32[4, 6] = aten.mul.Tensor(%a, %c)
        return %y""", numbers={"c": 0.37}),
    "recognize-gelu": Case(RECOGNIZED, X, """%d: f32[4, 6] = aten.div.Tensor(%x, 1.4142135381698608)
        %e: f32[4, 6] = aten.erf.default(%d)
        %a: f32[4, 6] = aten.add.Tensor(%e, 1.0)
        %m: f32[4, 6] = aten.mul.Tensor(%x, %a)
        %y: f32[4, 6] = aten.mul.Tensor(%m, 0.5)
        return %y""", 1e-6),
    **{name: Case(convolved, "%x: f32[2, 3, 8, 9]", """param %w: f32[4, 3, 3, 3] = "w"
        param %b: f32[4] = "b"
        param %k: f32[4, 1, 1] = "k"
        %c: f32[2, 4, 6, 7] = aten.conv2d.default(%x, %w, %b)
        %s: f32[2, 4, 6, 7] = aten.mul.Tensor(%c, %k)
        %y: f32[2, 4, 6, 7] = aten.relu.default(%s)
        return %y""", 1e-5) for name in ("fold-convolution", "drop-folded")},
    "drop-idle-mask": Case(IDLE, "%q: f32[2, 2, 6, 8]", """%p: i64[6] = aten.arange.default(6)
        %b: bool[6] = aten.ge.Scalar(%p, 0)
        %c: bool[2, 2, 6, 6] = aten.expand.default(%b, [2, 2, 6, 6])
        %y: f32[2, 2, 6, 8] = aten.scaled_dot_product_attention.default(%q, %q, %q, %c)
        return %y""", 1e-6),
    "decide-masked_fill": Case(UNMASKED, MASKED, """%b: bool[4, 6] = aten.eq.Scalar(%m, 0)
        %f: f32[4, 6] = aten.masked_fill.Scalar(%x, %b, -1.0)
        %y: f32[4, 6] = aten.exp.default(%f)
        return %y""", ones=("m",)),
    "decide-where": Case(UNMASKED, MASKED, """%b: bool[4, 6] = aten.ne.Scalar(%m, 0)
        %f: f32[4, 6] = aten.where.self(%b, %x, %w)
        %g: f32[4, 6] = aten.where.self(%b, %f, %w)
        %y: f32[4, 6] = aten.exp.default(%g)
        return %y""", ones=("m",)),
    "decide-add": Case(UNMASKED, MASKED, """%f: f32[4, 6] = aten._to_copy.default(%m, dtype=f32)
        %r: f32[4, 6] = aten.rsub.Scalar(%f, 1.0)
        %h: f32[4, 6] = aten.mul.Tensor(%r, -10000.0)
        %s: f32[4, 6] = aten.add.Tensor(%h, %x)
        %t: f32[4, 6] = aten.add.Tensor(%s, %h)
        %y: f32[4, 6] = aten.exp.default(%t)
        return %y""", ones=("m",)),
    "decide-mul": Case(UNMASKED, MASKED, """%f: f32[4, 6] = aten._to_copy.default(%m, dtype=f32)
        %s: f32[4, 6] = aten.mul.Tensor(%f, %x)
        %t: f32[4, 6] = aten.mul.Tensor(%s, %f)
        %y: f32[4, 6] = aten.exp.default(%t)
        return %y""", ones=("m",)),
    "drop-open-mask": Case(UNMASKED, "%q: f32[2, 1, 6, 8], %m: bool[2, 6]", """%a: bool[2, 1, 6] = aten.unsqueeze.default(%m, 1)
        %b: bool[2, 1, 1, 6] = aten.unsqueeze.default(%a, 1)
        %c: bool[2, 1, 6, 6] = aten.expand.default(%b, [2, 1, 6, 6])
        %y: f32[2, 1, 6, 8] = aten.scaled_dot_product_attention.default(%q, %q, %q, %c)
        return %y""", 1e-6, ones=("m",)),
}  # fmt: skip
SIZE = 5
"""Of a dim that is a symbol."""


def written() -> tuple[set[str], set[str]]:
    """(names of rules that the sources write out, modules that make rules whose names do not stand there)."""
    names: set[str] = set()
    made: set[str] = set()
    for path in ROOT.rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "Rule":
                name = call.args[0] if call.args else None
                if isinstance(name, ast.Constant) and isinstance(name.value, str):
                    names.add(name.value)
                else:
                    made.add(str(path.relative_to(ROOT)))
    return names, made


def test_every_rule_has_a_case() -> None:
    names, made = written()
    assert made <= TABLES.keys(), "modules that make names of rules say them in TABLES"
    expected = names.union(*(of() for of in TABLES.values()))
    assert len(expected) > 90
    assert expected == CASES.keys() | {f"expand-{name}" for name in test_expansions.CASES}


@pytest.fixture
def fired(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The rules that fire, wherever the rewriter is called."""
    seen: list[str] = []
    plain = rewrite.apply

    def noted(graph: Graph, rules: Any) -> Any:
        found, steps = plain(graph, rules)
        seen.extend(s.rule for s in steps)
        return found, steps

    for name, module in list(sys.modules.items()):
        if name.startswith("hotfuse") and getattr(module, "apply", None) is plain:
            monkeypatch.setattr(module, "apply", noted)
    yield seen


def drawn(of: TensorType | ScalarType, case: Case, name: str) -> Any:
    if isinstance(of, ScalarType):
        return SIZE
    shape, dtype = [d if isinstance(d, int) else SIZE for d in of.shape], torch_dtype(of.dtype)
    if name in case.ones:
        return torch.ones(shape, dtype=dtype)
    if dtype.is_floating_point:
        return torch.randn(shape, dtype=dtype)
    return torch.randint(0, 2 if dtype is torch.bool else 9, shape).to(dtype)


@pytest.mark.budget_s(10)
@pytest.mark.parametrize("name", CASES)
def test_a_rule_fires_and_computes_the_same(name: str, fired: list[str]) -> None:
    case = CASES[name]
    graph = case.graph()
    for _ in range(3):
        weights = {p.key: drawn(p.value.type, case, p.key) for p in graph.params}  # type: ignore[arg-type]
        weights |= {k: torch.full_like(weights[k], number) for k, number in case.numbers.items()}
        inputs = [drawn(v.type, case, v.name) for v in graph.inputs]  # type: ignore[arg-type]
        with torch.no_grad():
            want = library(graph, weights)(*inputs)
            fired.clear()
            run = case.made(graph, weights)
            assert name in fired
            got = run(*inputs)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=case.tolerance, atol=case.tolerance, equal_nan=True)
