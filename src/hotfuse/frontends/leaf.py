"""What a front end may put into an fx graph besides torch operators: whole operators and control.

Both are `call_function` targets. A node with one output *is* that output; a node with several is a tuple
whose parts are read with `operator.getitem`. An absent optional argument is None.

Constants that are not tensors (strings, 4-bit numbers) are plain attributes of the GraphModule and are read with `get_attr`,
like tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx

from hotfuse.ops import table
from hotfuse.ops.control import ScanAxes, Stacked, run_if, run_loop, run_map, run_scan

ControlKind = Literal["if", "loop", "scan", "map"]


@dataclass(frozen=True)
class Leaf:
    """An operator that stays whole, called `op(*inputs, **attributes)`; `table.resolve(op)` is its meaning.

    Attributes are numbers, strings, lists of them, or `get_attr` nodes. Its result's type, when known, is in
    `node.meta["val"]`; a node without `val` has a type that shows only at run time.
    """

    op: str
    n_out: int = 1

    __module__ = "hotfuse.frontends.leaf"

    @property
    def __name__(self) -> str:  # fx writes targets by their name
        return "leaf_" + "".join(c if c.isalnum() else "_" for c in self.op)

    def __call__(self, *args: Any, **attrs: Any) -> Any:
        return table.resolve(self.op)(*args, **attrs)


@dataclass(frozen=True, eq=False)
class ControlLeaf:
    """A control operator over closed nested graphs; each takes positional tensors and returns a tuple.

    The call's arguments are flat, in this order, and so are the nested graphs' inputs:

    kind    graphs        args                                   nested graph
    if      then, else    cond, *captures                        (*captures) -> (*outs)
    loop    body          trip, cond, *carried, *captures        (i, cond, *carried, *captures) -> (cond, *carried, *steps)
    scan    body          *states, *scanned, *captures           (*states, *slices, *captures) -> (*states, *steps)
    map     body          *sequences, *captures                  (*elements, *captures) -> (*outs)

    `n_carried` counts carried values (loop), states (scan) or sequences (map); `stacked` describes the step outputs, `axes`
    the axes of a scan. `trip` and `cond` of a loop may be None. The result is a tuple of `n_out` values, or the value
    itself when there is one: outs (if), carried then stacked (loop), states then stacked (scan), lists (map).
    """

    kind: ControlKind
    graphs: tuple[fx.GraphModule, ...]
    n_out: int
    n_carried: int = 0
    stacked: tuple[Stacked, ...] = ()
    axes: ScanAxes | None = None

    __module__ = "hotfuse.frontends.leaf"

    @property
    def __name__(self) -> str:
        return f"control_{self.kind}_{id(self):x}"

    def __call__(self, *args: Any) -> Any:
        n = self.n_carried
        match self.kind:
            case "if":
                out = run_if(args[0], self.graphs[0], self.graphs[1], args[1:])
            case "loop":
                out = run_loop(args[0], args[1], args[2 : 2 + n], self.graphs[0], args[2 + n :], self.stacked)
            case "scan":
                assert self.axes is not None
                k = n + len(self.axes.in_axes)
                out = run_scan(args[:n], args[n:k], self.graphs[0], self.axes, args[k:], self.stacked)
            case "map":
                out = run_map(args[:n], self.graphs[0], self.n_out, args[n:])
        return out[0] if self.n_out == 1 else out


def is_typed(node: fx.Node) -> bool:
    """Whether a node's result type is known (a tensor, or a host number)."""
    return isinstance(node.meta.get("val"), (torch.Tensor, int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool))
