"""A pass is a value: a name, a type in, a type out, what it does, and how its result is verified.

    Pass("freeze", WeightedGraph, WeightedGraph, _freeze, verify=well_formed)

`pipeline.PASSES` is the only list of them, from capture to link. `run` holds each to its types. Results are verified in
production where a fault could come from outside (`always`), and behind every pass where somebody asks for that (`verifying`:
tests and `hotfuse show` do): the verifier takes a part of a second for a large graph, which calls would wait for.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any, Generic, TypeVar

from hotfuse.base.errors import HotfuseError, InternalError
from hotfuse.base.lazy_dataclass import dataclass

A = TypeVar("A")
B = TypeVar("B")
J = TypeVar("J")


class Where(Enum):
    """Which process a pass runs in."""

    SERVER = "the serving process"
    WORKER = "a worker"


@dataclass(frozen=True, slots=True)
class Pass(Generic[A, B, J]):
    """A named step from one value to the next; `J` is what it knows besides."""

    name: str
    takes: type[A]
    gives: type[B]
    run: Callable[[A, J], B]
    verify: Callable[[B, J], object] | None = None
    """Raises where a result is not well-formed, by what the pass knows; None for what is verified where it is built."""
    where: Where = Where.SERVER
    always: bool = False
    """Whether its results are verified in production too."""
    within: Callable[[], Sequence[Pass[Any, Any, Any]]] = tuple
    """The passes that workers run for this one, group by group or run by run."""


_everywhere = False


@contextmanager
def verifying(*, on: bool = True) -> Generator[None]:
    """While it is on, the result of every pass of this process is verified."""
    global _everywhere
    before, _everywhere = _everywhere, on
    try:
        yield
    finally:
        _everywhere = before


def run(step: Pass[A, B, J], value: A, job: J) -> B:
    """One pass; a value of another type, or a result that is not well-formed, is a fault that names the pass."""
    if not isinstance(value, step.takes):
        raise InternalError(f"pass {step.name} takes {step.takes.__name__}", because=f"it was given {type(value).__name__}")
    made = step.run(value, job)
    if not isinstance(made, step.gives):  # pyright: ignore[reportUnnecessaryIsInstance]  what it says is what is checked
        raise InternalError(f"pass {step.name} gives {step.gives.__name__}", because=f"it gave {type(made).__name__}")
    if step.verify is not None and (step.always or _everywhere):
        try:
            step.verify(made, job)
        except HotfuseError as e:
            what = f"the result of pass {step.name} is not well-formed"
            raise InternalError(what, where=e.where, because=e.because or e.what) from e
    return made


def run_all(steps: Sequence[Pass[Any, Any, J]], value: Any, job: J) -> Any:
    """Passes one after the other."""
    for step in steps:
        value = run(step, value, job)
    return value


def flattened(steps: Sequence[Pass[Any, Any, Any]], depth: int = 0) -> Iterator[tuple[int, Pass[Any, Any, Any]]]:
    """Every pass, those within others behind them, with how deep it lies."""
    for step in steps:
        yield depth, step
        yield from flattened(step.within(), depth + 1)
