"""What tracing assumed about symbolic dims, read out of torch's ShapeEnv as guards of the graph."""

from __future__ import annotations

from typing import Any

import sympy
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_unbacked_symbols

from hotfuse.base.errors import CaptureError
from hotfuse.ir.dims import Dim, Sym, expr, symbols
from hotfuse.ir.graph import Graph
from hotfuse.ir.types import TensorType
from hotfuse.ops.torch_types import dim_of, pred_of


def input_symbols(graph: Graph) -> frozenset[str]:
    """The symbols that the shapes of the inputs show."""
    shown = [v.type.shape for v in graph.inputs if isinstance(v.type, TensorType)]
    return frozenset[str]().union(*(symbols(d) for shape in shown for d in shape))


def assumptions(env: ShapeEnv, known: frozenset[str]) -> tuple[Sym, ...]:
    """Ranges and recorded decisions over the inputs' symbols.

    What depends on data has symbols of its own and is asserted inside the graph; anything else that inputs do not show cannot
    be checked, so it ends the capture.
    """
    found: list[Dim] = []
    for symbol, bounds in env.var_to_range.items():
        if free_unbacked_symbols(symbol) or str(symbol) not in known:
            continue
        d = dim_of(symbol)
        if isinstance(bounds.lower, sympy.Integer):
            found.append(expr("<=", int(bounds.lower), d))
        if isinstance(bounds.upper, sympy.Integer):
            found.append(expr("<=", d, int(bounds.upper)))
    for guard in env.guards:
        condition: Any = env.replace(guard.expr)
        if free_unbacked_symbols(condition):
            continue
        d = pred_of(condition)
        if unknown := symbols(d) - known:
            raise CaptureError(f"tracing assumed {condition}", because=f"no input shows {sorted(unknown)[0]}")
        found.append(d)
    return tuple(dict.fromkeys(g for g in found if isinstance(g, Sym)))
