"""What a front end may put into an fx graph besides torch operators: whole operators and control.

Both are `call_function` targets. The result of a node with one output *is* that output; several outputs are a tuple
whose parts are read with `operator.getitem`. An absent optional argument is None, a sequence is a list.

`node.meta["val"]` describes the result as torch's tracers do: a fake tensor, a host number, a tuple of them, or `UNKNOWN`
for a value whose type shows only at run time. Constants are placeholders, never attributes of the GraphModule.
"""

from __future__ import annotations

from typing import Any, Final

from torch import fx

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ops import control, table


class UnknownLeaf:
    """The type of `UNKNOWN`."""

    def __repr__(self) -> str:
        return "UNKNOWN"


UNKNOWN: Final = UnknownLeaf()
"""In `meta["val"]`: a value of any type (a string tensor, a sequence, a tensor of unknown rank)."""


def _identifier(text: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in text)


@dataclass(frozen=True)
class Leaf:
    """An operator that stays whole, called `op(*inputs, **attributes)`; `table.resolve(op)` is its meaning.

    Attributes are numbers, strings, lists of them, or nodes.
    """

    op: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "__name__", "leaf_" + _identifier(self.op))  # fx writes targets by their name

    def __call__(self, *args: Any, **attrs: Any) -> Any:
        """Run the operator."""
        return table.resolve(self.op)(*args, **attrs)


@dataclass(frozen=True, eq=False)
class ControlLeaf:
    """A control operator over closed nested graphs that take positional values and return a tuple.

    kind  graphs      args                                  keyword args          nested graph
    if    then, else  cond, captures                        -                     (*captures) -> (*outs)
    loop  body        trip, cond, carried, captures         dtypes, shapes        (i, cond, *carried, *captures)
                                                                                  -> (cond, *carried, *steps)
    scan  body        states, scanned, captures             dtypes, shapes,       (*states, *slices, *captures)
                                                            in_axes, in_reverse,  -> (*states, *steps)
                                                            out_axes, out_reverse
    map   body        sequences, captures                   n_out                 (*elements, *captures) -> (*outs)

    `captures`, `carried`, `states`, `scanned` and `sequences` are tuples; `trip` and `cond` of a loop may be None.
    `ops.control.run` is the meaning: its docstring says what the keyword arguments hold and what comes out.
    The result is always a tuple.
    """

    kind: control.Kind
    graphs: tuple[fx.GraphModule, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "__name__", f"control_{self.kind}")

    def __call__(self, *args: Any, **attrs: Any) -> tuple[Any, ...]:
        """Run the nested graphs as the kind says."""
        return control.run(self.kind, self.graphs, args, attrs)
