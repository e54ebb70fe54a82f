"""What a call must bring for a plan to be right: facts about its tensors, as plain data that can be compared.

    input(0): an ordinary tensor on cpu         Plain(0, "cpu")
    input(0): f32                               Typed(0, DType.F32)
    input(0): rank 2                            Ranked(0, 2)
    input(0): row-major                         Dense(0, 2, None, True)
    input(0): dim 1 lies outside of dim 0       Outer(0, 1, 0)
    input(0): size 1 is 768                     Sized(0, 1, 768)
    (t0.0 == t1.0)                              Holds(predicate)
    input(2): every element is 1                AllEqual(2, DType.I64, 1)

Symbols are named after the place that shows them (`t0.1` is size 1 of input 0), so that facts of different graphs are equal when
they say the same. That is what lets the plans of one site share their checks.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence

from hotfuse.analysis.growth import read_in_any_strides
from hotfuse.base.errors import InternalError, ModelError
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.dims import Dim, Sym, dims_in, evaluate, expr, show, sym, symbols
from hotfuse.ir.graph import Graph
from hotfuse.ir.types import DType, TensorType


@dataclass(frozen=True, slots=True)
class Plain:
    """Exactly a Tensor or Parameter, strided, on a device, with memory that holds its numbers as they are."""

    input: int
    device: str = "cpu"


@dataclass(frozen=True, slots=True)
class Typed:
    """The dtype."""

    input: int
    dtype: DType


@dataclass(frozen=True, slots=True)
class Ranked:
    """The number of dimensions."""

    input: int
    rank: int


@dataclass(frozen=True, slots=True)
class Dense:
    """Whether it lies densely in a dimension order, outermost first; None is row-major."""

    input: int
    rank: int
    order: tuple[int, ...] | None
    yes: bool = True


@dataclass(frozen=True, slots=True)
class Outer:
    """One dim lies outside of another, as torch orders the dims of results of strided tensors: where that is the order of their
    numbers, strides of 0 say nothing against it; where it is not, they do."""

    input: int
    dim: int
    inner: int


@dataclass(frozen=True, slots=True)
class Aligned:
    """The first element's address is a multiple of a power of two."""

    input: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Sized:
    """One size is a number."""

    input: int
    dim: int
    size: int


@dataclass(frozen=True, slots=True)
class Holds:
    """A predicate over sizes; a division by zero makes it false, and so does, natively, a number beyond 64 bits."""

    predicate: Sym


@dataclass(frozen=True, slots=True)
class AllEqual:
    """Every element is a value, bit by bit; of a bool, every element is true or every element is false.

    The plan must also ask for the dtype and that the tensor is row-major.
    """

    input: int
    dtype: DType
    value: int | float | bool


Fact = Plain | Typed | Ranked | Dense | Outer | Aligned | Sized | Holds | AllEqual
Facts = tuple[Fact, ...]


def place(input_: int, dim: int) -> str:
    """The symbol of a size."""
    return f"t{input_}.{dim}"


def places_in(d: Dim) -> tuple[tuple[int, int], ...]:
    """The sizes an expression mentions: input and dimension."""
    found: list[tuple[int, int]] = []
    for name in sorted(symbols(d)):
        head, _, tail = name.partition(".")
        found.append((int(head[1:]), int(tail)))
    return tuple(found)


def inputs_of(fact: Fact) -> tuple[int, ...]:
    """The inputs a fact speaks of."""
    if isinstance(fact, Holds):
        return tuple(dict.fromkeys(i for i, _ in places_in(fact.predicate)))
    return (fact.input,)


def fact_text(fact: Fact, names: Sequence[str] = ()) -> str:
    """A fact in words; inputs by their names where given."""

    def name(i: int) -> str:
        return names[i] if i < len(names) else f"input {i}"

    match fact:
        case Plain(i, device):
            return f"{name(i)} is an ordinary tensor on {device}"
        case Typed(i, dtype):
            return f"{name(i)} is {dtype.value}"
        case Ranked(i, rank):
            return f"{name(i)} has rank {rank}"
        case Dense(i, _, order, yes):
            said = "row-major" if order is None else f"dense in the order {order}"
            return f"{name(i)} is {'' if yes else 'not '}{said}"
        case Outer(i, dim, inner):
            return f"dim {dim} of {name(i)} lies outside of dim {inner}"
        case Aligned(i, n):
            return f"{name(i)} lies at a multiple of {n} bytes"
        case Sized(i, d, size):
            return f"size {d} of {name(i)} is {size}"
        case Holds(predicate):
            return f"{show(predicate)} holds"
        case AllEqual(i, _, value):
            return f"every element of {name(i)} is {value}"


def question(fact: Fact) -> tuple[object, ...] | None:
    """What a fact answers, where there is one right answer: two different answers to one question exclude each other."""
    match fact:
        case Plain(i) | Typed(i) | Ranked(i):
            return (type(fact), i)
        case Sized(i, dim):
            return (Sized, i, dim)
        case Dense(i, rank, order):
            return (Dense, i, rank, order)
        case _:
            return None


def _replaced(d: Dim, names: dict[str, str]) -> Dim:
    if isinstance(d, int):
        return d
    if d.op == "sym":
        name = str(d.args[0])
        if name not in names:
            raise InternalError(f"a guard mentions {name}, which no input dimension shows")
        return sym(names[name])
    return expr(d.op, *(_replaced(a, names) for a in dims_in(d)))


def _lies(i: int, t: TensorType, *, row_major: bool) -> list[Fact]:
    """How an input that is not row-major lies: `contiguous()` was left out of a graph, or views were followed by writes, because it
    is dense in this order, or because it is dense in none."""
    rank, layout = len(t.shape), t.layout
    if row_major or rank < 2:
        return []
    if layout.order is not None:
        return [Dense(i, rank, layout.order, yes=True)]
    return [Dense(i, rank, order, yes=False) for order in _orders(rank)] if layout.strided else []


@functools.cache
def _orders(rank: int) -> tuple[tuple[int, ...], ...]:
    """Orders other than row-major that programs have dense tensors in: two dims exchanged, or channels innermost."""
    if rank <= 3:
        return tuple(itertools.permutations(range(rank)))[1:]
    dims = tuple(range(rank))
    swapped = [tuple(b if d == a else a if d == b else d for d in dims) for a, b in itertools.combinations(dims, 2)]
    return tuple(dict.fromkeys((*swapped, (0, *dims[2:], 1))))


def outer_facts(graph: Graph, lying: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Fact]:
    """How the dims of inputs that are dense in no order lie in a call of these sizes and strides: results lie in the same order."""
    anywhere = {g.input for g in read_in_any_strides(graph)}
    strided = [i for i, v in enumerate(graph.inputs) if isinstance(v.type, TensorType) and v.type.layout.strided]
    return [f for i in strided if i not in anywhere for f in _outer(i, *lying[i])]


def _outer(i: int, sizes: Sequence[int], strides: Sequence[int]) -> list[Outer]:
    found = [Outer(i, a, b) for a, b in itertools.pairwise(stride_order(strides))]
    return found if all(lies_outside(f, sizes, strides) for f in found) else []


def stride_order(strides: Sequence[int]) -> tuple[int, ...]:
    """Dims from outermost to innermost; where some are expanded, by their numbers."""
    dims = range(len(strides))
    return tuple(dims) if 0 in strides else tuple(sorted(dims, key=lambda d: (-strides[d], d)))


def lies_outside(fact: Outer, sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether a dim lies outside of another."""
    a, b = fact.dim, fact.inner
    if sizes[a] == 1 or sizes[b] == 1:
        return True
    if a < b:
        return strides[a] >= strides[b] or strides[a] == 0
    return strides[a] > strides[b] > 0


def facts_of(graph: Graph, contiguous: Sequence[bool], more: Iterable[Fact] = ()) -> Facts:
    """Exactly what capture assumed of a call, in an order in which each may be checked after those before it.

    `contiguous` says of each input whether the captured call's was row-major, because user code may branch on it; `more`
    are facts that a specialized plan bets on besides. A cache that grows may lie in any way: one that a plan gave lies otherwise
    than the model's own code would have put it.
    """
    anywhere = {g.input for g in read_in_any_strides(graph)}
    names: dict[str, str] = {}
    kinds: list[Fact] = []
    sizes: list[Fact] = []
    derived: list[tuple[str, Dim]] = []
    for i, (v, dense) in enumerate(zip(graph.inputs, contiguous, strict=True)):
        if not isinstance(v.type, TensorType):
            raise InternalError(f"input %{v.name} is not a tensor")
        rank = len(v.type.shape)
        kinds += [Plain(i, v.type.device), Typed(i, v.type.dtype), Ranked(i, rank)]
        kinds += [] if i in anywhere else [Dense(i, rank, None, dense), *_lies(i, v.type, row_major=dense)]
        for k, d in enumerate(v.type.shape):
            if isinstance(d, int):
                sizes.append(Sized(i, k, d))
            elif d.op == "sym" and str(d.args[0]) not in names:
                names[str(d.args[0])] = place(i, k)
            else:
                derived.append((place(i, k), d))
    tests: list[Dim] = [expr("==", sym(here), _replaced(d, names)) for here, d in derived]
    tests += [_replaced(g, names) for g in graph.guards]
    holds = [Holds(t if isinstance(t, Sym) else Sym("!=", (t, 0))) for t in tests if t != 1]
    return tuple(dict.fromkeys((*kinds, *sizes, *holds, *more)))


def size_holds(fact: Sized | Holds, size: Callable[[int, int], int]) -> bool:
    """Whether a fact about sizes holds; `size` tells that of an input's dim."""
    if isinstance(fact, Sized):
        return size(fact.input, fact.dim) == fact.size
    try:
        return bool(evaluate(fact.predicate, {place(i, d): size(i, d) for i, d in places_in(fact.predicate)}))
    except (ZeroDivisionError, ModelError):
        return False


def takes_sizes(graph: Graph, shapes: Sequence[Sequence[int]]) -> bool:
    """Whether calls of these sizes, and of the ranks that the graph has, are among those that it was captured for."""
    facts = facts_of(graph, [True] * len(graph.inputs))
    return all(size_holds(f, lambda i, d: shapes[i][d]) for f in facts if isinstance(f, Sized | Holds))


def sized(graph: Graph, sizes: dict[str, int]) -> Facts:
    """The facts that symbols of the graph have these values, at the inputs that show them."""
    found: dict[str, Fact] = {}
    for i, v in enumerate(graph.inputs):
        if isinstance(v.type, TensorType):
            for k, d in enumerate(v.type.shape):
                if isinstance(d, Sym) and d.op == "sym" and d.args[0] in sizes:
                    found.setdefault(str(d.args[0]), Sized(i, k, sizes[str(d.args[0])]))
    if missing := sorted(set(sizes) - set(found)):
        raise InternalError(f"no input of {graph.name} shows {missing[0]}")
    return tuple(found.values())
