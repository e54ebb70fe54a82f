"""What a call must bring for a plan to be right: facts about its tensors, as plain data that can be compared.

    input(0): an ordinary tensor on cpu         Plain(0, "cpu")
    input(0): f32                               Typed(0, DType.F32)
    input(0): rank 2                            Ranked(0, 2)
    input(0): row-major                         Dense(0, 2, None, True)
    input(0): size 1 is 768                     Sized(0, 1, 768)
    (t0.0 == t1.0)                              Holds(predicate)
    input(2): every element is 1                AllEqual(2, DType.I64, 1)

Symbols are named after the place that shows them (`t0.1` is size 1 of input 0), so that facts of different graphs are equal when
they say the same. That is what lets the plans of one site share their checks.
"""

from __future__ import annotations

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


Fact = Plain | Typed | Ranked | Dense | Aligned | Sized | Holds | AllEqual
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
        kinds += [] if i in anywhere else [Dense(i, rank, None, dense)]
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
