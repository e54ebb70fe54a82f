"""From the sizes a call brings to the values of a graph's symbols.

    bind(graph main(%x: f32[s0, (s0 * 2)]) where (2 <= s0), [(3, 6)])    ->    {"s0": 3}
    bind(..., [(3, 7)])                                                  ->    Mismatch("x", "dimension 1 is 7, ...")
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hotfuse.base.errors import ModelError
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.dims import Dim, Sym, evaluate, show, solve, symbols
from hotfuse.ir.graph import Graph
from hotfuse.ir.types import ScalarType, TensorType

Sizes = Sequence[int] | int | float | bool | None
"""What is known of an argument: a tensor's shape, a number itself, None for anything else."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Why a call does not fit a graph: the input's name (or the guard), and a sentence."""

    subject: str
    because: str

    def __str__(self) -> str:
        return f"{self.subject}: {self.because}"


def bind(graph: Graph, shapes: Sequence[Sizes]) -> dict[str, int] | Mismatch:
    """The value of every symbol that inputs bind, or the first reason why the call does not fit.

    Static dimensions must be equal, each symbol must be the same wherever it stands, derived dimensions must come out,
    and the guards must hold.
    """
    if len(shapes) != len(graph.inputs):
        return Mismatch("call", f"{len(shapes)} arguments for {len(graph.inputs)} inputs")
    env: dict[str, int] = {}
    later: list[tuple[str, str, Dim, int]] = []
    for value, given in zip(graph.inputs, shapes, strict=True):
        match value.type:
            case TensorType(shape=shape):
                if not isinstance(given, Sequence) or len(given) != len(shape):
                    return Mismatch(value.name, f"{_said(given)}, not a tensor of {len(shape)} dimensions")
                pairs = list(zip(shape, given, strict=True))
            case ScalarType(expr=expr) if expr is not None:
                if not isinstance(given, int):
                    return Mismatch(value.name, f"{_said(given)}, not an integer")
                pairs = [(expr, given)]
            case _:
                continue
        for i, (dim, size) in enumerate(pairs):
            place = f"dimension {i}" if isinstance(value.type, TensorType) else "it"
            if isinstance(dim, int):
                if dim != size:
                    return Mismatch(value.name, f"{place} is {size}, the graph has {dim}")
            elif dim.op == "sym":
                name = str(dim.args[0])
                if env.setdefault(name, size) != size:
                    return Mismatch(value.name, f"{place} is {size}, but {name} is {env[name]} elsewhere")
            else:
                later.append((value.name, place, dim, size))
    return _derived(later, env) or _guards(graph, env) or env


def holds(guard: Sym, env: Mapping[str, int]) -> bool:
    """Whether a guard holds; one that divides by zero does not."""
    try:
        return bool(evaluate(guard, env))
    except (ZeroDivisionError, ModelError):
        return False


def _derived(later: list[tuple[str, str, Dim, int]], env: dict[str, int]) -> Mismatch | None:
    """Solve for symbols that stand only inside expressions, then check the expressions."""
    while later:
        stuck: list[tuple[str, str, Dim, int]] = []
        for name, place, dim, size in later:
            try:
                found = solve(dim, size, env)
            except (LookupError, ZeroDivisionError, ModelError):
                stuck.append((name, place, dim, size))
                continue
            if found is None:
                known = ", ".join(f"{s} = {env[s]}" for s in sorted(symbols(dim) & env.keys()))
                because = f"{place} is {size}, the graph has {show(dim)}"
                return Mismatch(name, f"{because} with {known}" if known else because)
            if any(value < 0 for value in found.values()):
                return Mismatch(name, f"{place} is {size}, too small for {show(dim)}")
            env.update(found)
        if len(stuck) == len(later):
            name, place, dim, _ = stuck[0]
            return Mismatch(name, f"{place}, {show(dim)}, cannot be worked out")
        later = stuck
    return None


def _guards(graph: Graph, env: dict[str, int]) -> Mismatch | None:
    for guard in graph.guards:
        if free := symbols(guard) - env.keys():
            return Mismatch("guard", f"{show(guard)} mentions {', '.join(sorted(free))}, which no input binds")
        if not holds(guard, env):
            known = ", ".join(f"{s} = {env[s]}" for s in sorted(symbols(guard)))
            return Mismatch("guard", f"{show(guard)} does not hold with {known}")
    return None


def _said(given: Sizes) -> str:
    return f"shape {tuple(given)}" if isinstance(given, Sequence) else f"a {type(given).__name__}"
