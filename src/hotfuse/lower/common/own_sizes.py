"""A group in sizes of its own: what its inputs show, whatever those sizes are made of outside.

    f32[1, 16, ((s0 + -1) // 2) + 1]  ->  f32[1, 32, ((s0 + -1) // 2) + 1]       no input shows s0
    f32[1, 16, n0]                    ->  f32[1, 32, n0]                         n0 stands for ((s0 + -1) // 2) + 1

    f32[1, 16, n0]                    ->  f32[1, 32, ((n0 + -1) // 2) + 1]       as is behind one more stride, ((s0 + -1) // 4) + 1

A kernel can only be told sizes that lie in the shapes it is called with. Behind a strided convolution those are quotients of the
model's sizes, and groups that differ in nothing else become the same kernel this way.
"""

from __future__ import annotations

from dataclasses import replace

from hotfuse.ir.dims import Dim, Sym, dims_in, expr, sym, symbols
from hotfuse.ir.graph import Graph, Value, sources
from hotfuse.ir.retype import retyped
from hotfuse.ir.types import TensorType, dims_of, with_dims
from hotfuse.lower.common.algebra import add, divide, mul, sub, terms_of

Unknowns = tuple[Sym, ...]


def with_own_sizes(graph: Graph) -> tuple[Graph, dict[str, Dim]]:
    """The group without guards and in its own symbols, and what each of them is in the symbols outside.

    Equal groups get equal names. Sizes that cannot be read off an input keep theirs.
    """
    taken = symbols_of(graph)
    if not taken:
        return replace(graph, guards=()), {}
    found: dict[Unknowns, Dim] = {}
    meaning: dict[str, Dim] = {}
    shown = [d for v in graph.inputs if isinstance(v.type, TensorType) for d in v.type.shape if not isinstance(d, int)]
    for d in (*(d for d in shown if d.op == "sym"), *(d for d in shown if d.op != "sym")):
        if symbols(_translated(d, found)) - meaning.keys():
            name = next(n for n in (f"n{i}" for i in range(len(meaning), 10**6)) if n not in taken | meaning.keys())
            if (pair := _unknown_in(d, sym(name), found, meaning)) is not None:
                found[pair[0]] = pair[1]
                meaning[name] = d
    return retyped(graph, lambda t: with_dims(t, tuple(_translated(d, found) for d in dims_of(t)))), meaning


def anchored(graph: Graph, piece: Graph) -> Graph:
    """A piece of a graph, given those of the graph's inputs that show sizes which none of its own inputs show.

        %y: f32[s0, s1] = view(%x: f32[(s0 * s1)])      needs to be told s0 or s1; nothing else of such an input is read
    """
    own, meaning = with_own_sizes(piece)
    hidden = symbols_of(own) - meaning.keys()
    extra: list[Value] = []
    present = {v.name for v in piece.inputs}
    for v in graph.inputs if hidden else ():
        if isinstance(v.type, TensorType) and v.name not in present:
            shown = {str(d.args[0]) for d in v.type.shape if not isinstance(d, int) and d.op == "sym"}
            if shown & hidden:
                extra.append(v)
                hidden -= shown
    return replace(piece, inputs=(*piece.inputs, *extra)) if extra else piece


def symbols_of(graph: Graph) -> frozenset[str]:
    """Every symbol that values of the graph are typed with; those inside of nested graphs aside."""
    values = (*sources(graph), *(o for n in graph.nodes for o in n.outs))
    return frozenset[str]().union(*(symbols(d) for v in values for d in dims_of(v.type)))


def _unknown_in(d: Sym, name: Sym, found: dict[Unknowns, Dim], known: dict[str, Dim]) -> tuple[Unknowns, Dim] | None:
    """A product of unknowns that `d` shows once the rest of `d` is known, and what it is when `d` is called `name`."""
    terms = terms_of(d)
    for product, factor in terms:
        rest = add(*(_translated(mul(*unknowns, n), found) for unknowns, n in terms if unknowns != product))
        if factor == 1 and product and not symbols(rest) - known.keys():
            return product, sub(name, rest)
    return None


def _translated(d: Dim, found: dict[Unknowns, Dim]) -> Dim:
    """A size in the group's symbols, as far as they are known; the largest known products count first."""
    total: list[Dim] = []
    for unknowns, factor in terms_of(d):
        left = list(unknowns)
        parts: list[Dim] = [factor]
        for product in sorted(found, key=len, reverse=True):
            while all(left.count(u) >= product.count(u) for u in product):
                for u in product:
                    left.remove(u)
                parts.append(found[product])
        parts += [u if u.op == "sym" else _of_operands(u, found) for u in left]
        total.append(mul(*parts))
    return add(*total)


def _of_operands(u: Sym, found: dict[Unknowns, Dim]) -> Dim:
    """An operation on sizes in the group's symbols; a quotient may also follow from a finer one: x // 4 is (x // 2) // 2."""
    plain = expr(u.op, *(_translated(a, found) for a in dims_in(u)))
    known = frozenset[str]().union(*(symbols(d) for d in found.values()))
    if u.op != "//" or symbols(plain) <= known:
        return plain
    over, by = dims_in(u)
    for product, size in found.items():
        if len(product) != 1 or product[0].op != "//":
            continue
        finer_over, finer_by = dims_in(product[0])
        if isinstance(by, int) and isinstance(finer_by, int) and 0 < finer_by < by and by % finer_by == 0:
            more = divide(sub(over, finer_over), finer_by)  # (x + 2 * more) // 4 is (x // 2 + more) // 2
            if isinstance(more, int):
                return expr("//", add(size, more), by // finer_by)
    return plain
