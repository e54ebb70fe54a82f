"""Random programs of real ops: simplified, they give the same bits in the same layout, sharing the same memory."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from hotfuse.ir.build import GraphBuilder
from hotfuse.ir.graph import Arg, Graph, Kind, Node, Token, Value
from hotfuse.ir.text import show
from hotfuse.ir.types import DType
from hotfuse.ir.verify import verify
from hotfuse.ops.table import resolve
from hotfuse.ops.torch_args import to_torch
from hotfuse.ops.torch_types import tensor_type
from hotfuse.simplify import simplify
from tests.fuzz.graphs import graphs

V = "value"
PLAIN = ["detach", "alias", "clone", "lift_fresh_copy", "contiguous", "relu", "neg", "abs", "t"]
CHOICES: list[tuple[str, tuple[Any, ...]]] = [
    *((f"aten.{op}.default", (V,)) for op in PLAIN),
    *((f"aten.{op}.Tensor", (V, other)) for op in ("add", "mul", "sub") for other in (0, 1, 0.0, 1.0, True, V)),
    *(("aten.to.dtype", (V, dtype)) for dtype in (DType.F32, DType.I64, DType.F64)),
    ("aten.to.dtype", (V, DType.F32, False, True)),
    *(("aten.clone.default", (V, Token("memory_format", name))) for name in ("contiguous_format", "preserve_format")),
    ("aten._to_copy.default", (V,)),
    ("aten.type_as.default", (V, V)),
    ("aten.dropout.default", (V, 0.5, False)),
    ("aten.expand.default", (V, (4, 4))),
    ("aten.expand.default", (V, (-1, -1))),
    ("aten.view.default", (V, (4, 4))),
    ("aten.view.default", (V, (2, 8))),
    ("aten.reshape.default", (V, (4, 4))),
    ("aten.reshape.default", (V, (16,))),
    ("aten.slice.Tensor", (V, 0, 0, 4)),
    ("aten.slice.Tensor", (V, 0, 1, 3)),
    ("aten.select.int", (V, 0, 0)),
    ("aten.squeeze.default", (V,)),
    ("aten.flatten.using_ints", (V,)),
    ("aten.einsum.default", ("ij->ji", (V,))),
    ("aten.einsum.default", ("ij->ij", (V,))),
    *(("aten.transpose.int", (V, a, b)) for a, b in ((0, 1), (-1, 0), (1, 1))),
    *(("aten.permute.default", (V, order)) for order in ((1, 0), (0, 1), (-1, 0))),
    ("aten.sum.dim_IntList", (V, (0,))),
]


def tensors(strided: bool) -> list[torch.Tensor]:
    """x, y (column-major), an integer, a row expanded, a scalar; `strided` lays the same shapes out differently."""
    base = torch.tensor([float("nan"), -0.0, 0.0, float("inf"), *range(-6, 6)]).reshape(4, 4)
    x, y, i = base, base.t().contiguous().t() * 2, torch.arange(16).reshape(4, 4)
    if strided:
        x, y, i = x.t().contiguous().t(), y.contiguous(), torch.stack([i, i], 2)[..., 0]
    return [x.clone() if not strided else x, y, i, base[:1].clone().expand(4, 4), torch.tensor(-0.0)]


def run(graph: Graph, inputs: list[torch.Tensor], param: torch.Tensor) -> list[Any]:
    env: dict[str, Any] = {v.name: t for v, t in zip(graph.inputs, inputs, strict=True)}
    env.update((p.value.name, param) for p in graph.params)

    for node in graph.nodes:
        env[node.outs[0].name] = call(node, [_filled(a, env) for a in node.args])
    return [_filled(a, env) for a in graph.outputs]


def call(node: Node, args: list[Any]) -> Any:
    if node.op == "aten.clone.default" and len(args) == 2:
        return resolve(node.op)(args[0], memory_format=args[1])
    return resolve(node.op)(*args)


def program(rng: random.Random) -> Graph:
    """Seeded rather than drawn: long chains matter more here than small counterexamples."""
    b = GraphBuilder()
    param = torch.arange(16.0).reshape(4, 4)
    values: list[tuple[Value, Any]] = [(b.input(f"x{i}", tensor_type(t)), t) for i, t in enumerate(tensors(False))]
    values.append((b.param("w", tensor_type(param), "w"), param))

    def fill(arg: Any) -> tuple[Arg, Any]:
        if arg is V:  # most often what was just made, so that chains form
            last = len(values) - 1
            return values[rng.choice([last] * 2 * len(values) + [*range(last)])]
        if isinstance(arg, tuple) and V in arg:
            pairs = [fill(a) for a in arg]
            return tuple(a for a, _ in pairs), [t for _, t in pairs]
        return arg, to_torch(arg)

    for _ in range(rng.randint(1, 10)):
        if b.nodes and rng.random() < 0.2:  # the same once more
            node = rng.choice(b.nodes)
            known = {v.name: t for v, t in values}
            tensors_read = [_filled(a, known) for a in node.args]
        else:
            op, template = rng.choice(CHOICES)
            pairs = [fill(a) for a in template]
            node = Node(Kind.OPERATOR, op, tuple(a for a, _ in pairs), ())
            tensors_read = [t for _, t in pairs]
        with contextlib.suppress(RuntimeError, IndexError):  # shapes that do not fit: no such node
            out = call(node, tensors_read)
            values.append((b.add(node.op, node.args, tensor_type(out)), out))
    read = {v.name for n in b.nodes for v in n.ins}
    unread = [v for v, _ in values[6:] if v.name not in read]
    some = rng.sample([v for v, _ in values], rng.choice([0, 0, 0, 1, 2]))
    return b.finish(*unread, *some)


def _filled(arg: Arg, known: dict[str, Any]) -> Any:
    if isinstance(arg, Value):
        return known[arg.name]
    return [_filled(a, known) for a in arg] if isinstance(arg, tuple) else to_torch(arg)


def sharing(inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> list[Any]:
    """Which outputs are which inputs or other outputs, and which share memory with them."""
    everything = [*inputs, *outputs]
    found: list[Any] = []
    for out in outputs:
        found.append([out is other for other in everything])
        found.append([out.untyped_storage().data_ptr() == other.untyped_storage().data_ptr() for other in everything])
    return found


def bits_of(t: torch.Tensor) -> list[Any]:
    raw = t.contiguous().flatten()
    return raw.view({4: torch.int32, 8: torch.int64}[raw.element_size()]).tolist()


@pytest.mark.parametrize("seeds", [range(k, k + 400) for k in range(0, 2000, 400)], ids=str)
def test_nothing_observable_changes(seeds: range) -> None:
    for seed in seeds:
        graph = program(random.Random(seed))
        try:
            check(graph)
        except Exception as e:
            raise AssertionError(f"seed {seed}:\n{show(graph)}\nbecame\n{show(simplify(graph)[0])}") from e


def check(graph: Graph) -> None:
    after, trace = simplify(graph)
    verify(after)
    assert len(after.nodes) == len(graph.nodes) - len(trace)
    param = torch.arange(16.0).reshape(4, 4)
    for strided in (False, True):
        inputs = tensors(strided)
        try:
            expected = run(graph, inputs, param)
        except RuntimeError:  # a view that these strides do not allow; the graph was captured with others
            assert strided
            continue
        found = run(after, inputs, param)
        for e, f in zip(expected, found, strict=True):
            assert (f.dtype, f.shape, f.stride()) == (e.dtype, e.shape, e.stride())
            assert bits_of(f) == bits_of(e)
        assert sharing([*inputs, param], found) == sharing([*inputs, param], expected)


@settings(deadline=None, max_examples=150)
@given(graphs())
def test_any_graph_stays_well_formed(graph: Graph) -> None:
    """Also where ops are called with arguments that make no sense: rules look, and leave them alone."""
    after, trace = simplify(graph)
    verify(after)
    assert (after is graph) == (not trace)
    assert after.inputs == graph.inputs
    assert after.params == graph.params
