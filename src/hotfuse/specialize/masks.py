"""A mask that lets everything through is no mask.

    %b = eq(%keep, 0)      where %keep is all ones: %b is all false
    %m = masked_fill(%s, %b, -inf)      ->      %s
    %a = sdpa(%q, %k, %v, %keep4d)      ->      sdpa(%q, %k, %v)

What is known of an input, that all its elements are one number, is carried through the graph (`uniform_values`): an op of numbers
alone gives a number. Where such a value decides what another becomes, a rule of `ir.rewrite` makes the decision once. Added zeros
and multiplied ones are equal in real arithmetic. The guard is that the input is that number, all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from hotfuse.analysis.liveness import without_unread
from hotfuse.analysis.uniform import evaluated, number_of
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.graph import Arg, Graph, Kind, Node, Value
from hotfuse.ir.rewrite import READS, Context, Replacement, Rule, apply
from hotfuse.ir.verify import verify
from hotfuse.ops.table import packet

_SDPA = "aten.scaled_dot_product_attention"
_MASK, _PLACE = "attn_mask", 3
Numbers = Mapping[str, torch.Tensor]
"""Values of which all elements are one number, by name."""


@dataclass(frozen=True, slots=True)
class UniformValues:
    """What is one number all over in a graph, given that an input is."""

    numbers: Numbers
    computed: frozenset[str]
    """Those that ops of numbers give: nothing is decided there, and their nodes go when nobody reads them."""


def all_alike(graph: Graph, name: str, number: float) -> Graph | None:
    """The graph for calls in which every element of an input is a number; None where that saves nothing."""
    found, steps = apply(graph, rules(graph, uniform_values(graph, name, number)))
    return verify(without_unread(replace(found, name=f"{graph.name}.unmasked"))) if steps else None


def uniform_values(graph: Graph, name: str, number: float) -> UniformValues:
    """What else is one number all over where every element of an input is a number."""
    given = next(v for v in graph.inputs if v.name == name)
    known = {name: number_of(given, number)}
    computed: set[str] = set()
    for node in graph.nodes:
        if (made := evaluated(node, known)) is not None:
            known[node.outs[0].name] = made
            computed.add(node.outs[0].name)
        elif (kept := _kept(node, known)) is not None and kept.name in known:
            known[node.outs[0].name] = known[kept.name]
    return UniformValues(known, frozenset(computed))


def rules(graph: Graph, uniform: UniformValues) -> tuple[Rule, ...]:
    """A rule for each op that such numbers decide, at the top of a graph: inside branches the same name may be another value."""

    def of(rewrite: Callable[[Node, Numbers], Replacement | None]) -> Callable[[Node, Context], Replacement | None]:
        def guarded(node: Node, context: Context) -> Replacement | None:
            top = context.graph.inputs is graph.inputs
            done = any(v.name in uniform.computed for v in node.outs)
            return rewrite(node, uniform.numbers) if top and not done else None

        return guarded

    kept = tuple(
        Rule(f"decide-{op.removeprefix('aten.')}", of(_decided), "nothing is read for it", READS, frozenset({op})) for op in KEEPS
    )
    return (*kept, Rule("drop-open-mask", of(_attended), "one value less is read", READS, frozenset({_SDPA})))


def _decided(node: Node, numbers: Numbers) -> Replacement | None:
    kept = _kept(node, numbers)
    return None if kept is None else Replacement(values={node.outs[0].name: kept})


def _kept(node: Node, numbers: Numbers) -> Value | None:
    """The value that a node gives unchanged, if it does."""
    if node.kind is not Kind.OPERATOR or len(node.outs) != 1 or len(node.args) < 2 or (of := KEEPS.get(packet(node.op))) is None:
        return None

    def number(at: int) -> float | None:
        a = node.args[at] if at < len(node.args) else None
        return float(numbers[a.name]) if isinstance(a, Value) and a.name in numbers else None

    kept = of(node, number)
    return kept if isinstance(kept, Value) and kept.type == node.outs[0].type else None


_Number = Callable[[int], float | None]
"""What all of an argument is, by its place."""


def _unfilled(node: Node, number: _Number) -> Arg:
    return node.args[0] if number(1) == 0 else None


def _chosen(node: Node, number: _Number) -> Arg:
    if len(node.args) != 3 or number(0) is None:
        return None
    return node.args[1] if number(0) else node.args[2]


def _neutral(neutral: float) -> Callable[[Node, _Number], Arg]:
    """The other operand of two, where one is a number that changes nothing."""

    def kept(node: Node, number: _Number) -> Arg:
        if len(node.args) != 2 or node.attrs:
            return None
        return node.args[0] if number(1) == neutral else node.args[1] if number(0) == neutral else None

    return kept


KEEPS: Mapping[str, Callable[[Node, _Number], Arg]] = {
    "aten.masked_fill": _unfilled,
    "aten.where": _chosen,
    "aten.add": _neutral(0.0),
    "aten.mul": _neutral(1.0),
}
"""By op: the argument that it gives unchanged, for what is known of the others."""


def _attended(node: Node, numbers: Numbers) -> Replacement | None:
    """Attention without a mask that hides nothing."""
    mask = node.args[_PLACE] if len(node.args) > _PLACE else node.attr(_MASK)
    if not isinstance(mask, Value) or mask.name not in numbers:
        return None
    number = numbers[mask.name]
    if not (bool(number) if number.dtype is torch.bool else float(number) == 0):
        return None
    args = tuple(None if i == _PLACE else a for i, a in enumerate(node.args))
    return Replacement((replace(node, args=args, attrs=tuple((k, a) for k, a in node.attrs if k != _MASK)),))
