"""Dynamo's graph becomes the hypergraph: traced once more, on fake tensors, into undecomposed ATen ops.

Dynamo hands over Python-level calls (`torch.nn.functional.linear`, methods, operators) with its own guards around them, so no
guards are added here. What it passes with every call is told apart: parameters and buffers are weights, tensors are inputs, and
sizes, which it passes beside the tensors that have them, are read off those.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch._guards import tracing
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import preserve_node_meta

from hotfuse.base.errors import CaptureError
from hotfuse.base.faults import error_text
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.frontends.fx import Converted, PlaceholderRole, to_graph
from hotfuse.ir.hash import structural_hash

_STATIC = "_dynamo_static_input_type"
"""What Dynamo notes of a tensor that is the same object in every call."""


Serve = Callable[[tuple[Any, ...], dict[str, Any]], Any]


@dataclass(frozen=True, slots=True)
class Size:
    """An argument that is the size of an input: which input, and which of its dims."""

    input: int
    dim: int


@dataclass(frozen=True, slots=True)
class Arguments:
    """What the arguments of Dynamo's graph are, by their places."""

    places: tuple[str | int | Size, ...]
    """For each argument: a weight's key, the number of an input, or a size."""

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of the weights, in order."""
        return tuple(p for p in self.places if isinstance(p, str))

    @property
    def weights_at(self) -> tuple[int, ...]:
        """Where they stand."""
        return tuple(i for i, p in enumerate(self.places) if isinstance(p, str))

    @property
    def inputs_at(self) -> tuple[int, ...]:
        """Where the inputs stand."""
        return tuple(i for i, p in enumerate(self.places) if isinstance(p, int))

    def opened(self, keys: Collection[str]) -> Arguments:
        """With these weights as inputs: calls were seen to bring others each time."""
        inputs = [i for i, p in enumerate(self.places) if isinstance(p, int) or p in keys]
        numbers = {i: n for n, i in enumerate(inputs)}
        at = self.inputs_at
        return Arguments(tuple(numbers[i] if i in numbers else Size(numbers[at[p.input]], p.dim) if isinstance(p, Size) else p
                               for i, p in enumerate(self.places)))  # fmt: skip

    def bound(self, own: Callable[..., Any], weights: Sequence[torch.Tensor]) -> Callable[..., Any]:
        """Dynamo's own graph as a function of the inputs, in one expression: what it adds is part of what the graph's own code is
        measured to take, and small graphs take a microsecond."""
        left = iter(range(len(weights)))
        passed = [f"w{next(left)}" if isinstance(p, str) else f"i{p}" if isinstance(p, int) else f"i{p.input}.shape[{p.dim}]"
                  for p in self.places]  # fmt: skip
        inputs = [f"i{n}" for n in range(len(self.inputs_at))]
        return _made(["own", *_names(weights)], f"lambda {', '.join(inputs)}: own({', '.join(passed)})")(own, *weights)

    def entrance(self, weights: Sequence[torch.Tensor], serve: Serve, others: Callable[..., Any]) -> Callable[..., Any]:
        """A function of Dynamo's arguments: calls that bring these weights are served with their inputs, others go to `others`."""
        given = ", ".join(f"p{i}" for i in range(len(self.places)))
        inputs = "".join(f"p{i}, " for i in self.inputs_at)
        same = " and ".join(f"p{i} is w{n}" for n, i in enumerate(self.weights_at)) or "True"
        source = f"lambda {given}: serve(({inputs}), {{}}) if {same} else others({given})"
        return _made(["serve", "others", *_names(weights)], source)(serve, others, *weights)


    def entrances(
        self, bound: Sequence[tuple[Sequence[torch.Tensor], Serve]], others: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Like `entrance`, for several distinct sets of weights. One weight that the first two sets tell apart is
        looked up, so what a call costs does not depend on how many sets there are; sets that share it ask one after another."""
        (first, serve), *more = bound
        if not more:
            return self.entrance(first, serve, others)
        nth = next(n for n, (a, b) in enumerate(zip(first, more[0][0], strict=True)) if a is not b)
        table: dict[int, Callable[..., Any]] = {}  # the functions hold the weights, so no id is ever another one's
        for weights, serves in bound:
            table[id(weights[nth])] = self.entrance(weights, serves, table.get(id(weights[nth]), others))
        given = ", ".join(f"p{i}" for i in range(len(self.places)))
        source = f"lambda {given}: found(id(p{self.weights_at[nth]}), others)({given})"
        return _made(["found", "others"], source)(table.get, others)


def _names(weights: Sequence[torch.Tensor]) -> list[str]:
    return [f"w{n}" for n in range(len(weights))]


def _made(names: Sequence[str], source: str) -> Callable[..., Callable[..., Any]]:
    """A function that makes the function of some source text with these names bound; the text has numbers and our names alone."""
    return eval(f"lambda {', '.join(names)}: {source}", {})


def arguments_of(gm: fx.GraphModule) -> Arguments:
    """What Dynamo passes; raises CaptureError for a number that no input shows."""
    nodes = [n for n in gm.graph.nodes if n.op == "placeholder"]
    fakes = [n.meta.get("example_value") for n in nodes]
    static = [isinstance(f, torch.nn.Parameter) or _STATIC in (n.meta.get("tensor_dict") or {})
              for n, f in zip(nodes, fakes, strict=True)]  # fmt: skip
    numbers: dict[int, int] = {}
    sizes: dict[Any, Size] = {}
    for i, fake in enumerate(fakes):
        if isinstance(fake, torch.Tensor) and not static[i]:
            numbers[i] = len(numbers)
            for dim, size in enumerate(fake.shape):
                if isinstance(size, torch.SymInt):
                    sizes.setdefault(size.node.expr, Size(numbers[i], dim))
    places: list[str | int | Size] = []
    for i, (node, fake) in enumerate(zip(nodes, fakes, strict=True)):
        if isinstance(fake, torch.Tensor):
            places.append(node.name if static[i] else numbers[i])
        elif isinstance(fake, torch.SymInt) and fake.node.expr in sizes:
            places.append(sizes[fake.node.expr])
        else:
            raise CaptureError(f"Dynamo passes {node.name}, which is no tensor", because="no input's size shows it")
    return Arguments(tuple(places))


def capture_dynamo(gm: fx.GraphModule, arguments: Arguments) -> Converted:
    """Convert Dynamo's graph; raises CaptureError with the user's line.

    It is named by what it computes. What is kept of it is found by its text, name included, and numbers depend on which graph a
    process met first.
    """
    fakes = [n.meta.get("example_value") for n in gm.graph.nodes if n.op == "placeholder"]
    mode = next((f.fake_mode for f in fakes if isinstance(f, torch.Tensor)), None)  # type: ignore[attr-defined]
    if mode is None:
        raise CaptureError("Dynamo's graph has no fake inputs")

    def interpret(*args: Any) -> Any:
        return fx.Interpreter(gm).run(*args)

    try:
        with warnings.catch_warnings(), tracing(None), mode, preserve_node_meta():
            warnings.simplefilter("ignore")
            traced = make_fx(interpret, pre_dispatch=True, _allow_non_fake_inputs=True)(*fakes)
    except CaptureError:
        raise
    except Exception as e:
        raise CaptureError("the graph cannot be traced", because=error_text(e)) from e
    done = to_graph(traced, _roles(traced, arguments), name="dynamo")
    return replace(done, graph=replace(done.graph, name=f"dynamo_{structural_hash(done.graph)[:12]}"))


def _roles(traced: fx.GraphModule, arguments: Arguments) -> list[PlaceholderRole]:
    """The roles of the traced graph's placeholders; sizes are read from the inputs that have them."""
    nodes = [n for n in traced.graph.nodes if n.op == "placeholder"]
    inputs = [n for n, p in zip(nodes, arguments.places, strict=True) if isinstance(p, int)]
    roles: list[PlaceholderRole] = []
    for node, place in zip(nodes, arguments.places, strict=True):
        if isinstance(place, Size):
            with traced.graph.inserting_after(nodes[-1]):
                read: fx.Node = traced.graph.call_function(torch.ops.aten.sym_size.int, (inputs[place.input], place.dim))
            read.meta = {"val": node.meta.get("val")}
            node.replace_all_uses_with(read)
            roles.append(PlaceholderRole("unused"))
        else:
            roles.append(PlaceholderRole("param", place) if isinstance(place, str) else PlaceholderRole("input"))
    return roles
