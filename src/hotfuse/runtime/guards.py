"""The check that a call fits a captured graph, generated as one flat predicate over the call's tensors.

It holds exactly what capture assumed: dtype, rank, device, static dims, equal and derived symbolic dims, and the graph's
guards. Contiguity is part of it because user code may branch on it. The text is made of integers and names made here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hotfuse.base.errors import InternalError
from hotfuse.ir.dims import Dim, Sym, symbols
from hotfuse.ir.graph import Graph
from hotfuse.ir.types import TensorType
from hotfuse.ops.torch_dtypes import torch_dtype

Guard = Callable[..., bool]

_INFIX = {"+": "+", "*": "*", "//": "//", "%": "%", "**": "**", "==": "==", "!=": "!=", "<": "<", "<=": "<=",
          "and": "and", "or": "or"}


def _text(d: Dim, names: dict[str, str]) -> str:
    if isinstance(d, int):
        return str(d)
    if d.op == "sym":
        return names[str(d.args[0])]
    parts = [_text(a, names) for a in d.args if not isinstance(a, str)]
    if d.op in _INFIX:
        return "(" + f" {_INFIX[d.op]} ".join(parts) + ")"
    if d.op == "not":
        return f"(not {parts[0]})"
    if d.op == "ceildiv":
        return f"(-(-{parts[0]} // {parts[1]}))"
    if d.op in ("max", "min"):
        return f"{d.op}({', '.join(parts)})"
    raise InternalError(f"no guard for {d.op}")


def compile_guard(graph: Graph, contiguous: tuple[bool, ...]) -> tuple[Guard, str]:
    """The predicate and its text."""
    bound: dict[str, Any] = {"len": len, "max": max, "min": min, "__builtins__": {}}
    names: dict[str, str] = {}
    lines: list[str] = []
    later: list[tuple[str, Dim]] = []
    for i, (v, dense) in enumerate(zip(graph.inputs, contiguous, strict=True)):
        if not isinstance(v.type, TensorType):
            raise InternalError(f"input %{v.name} is not a tensor")
        bound[f"d{i}"] = torch_dtype(v.type.dtype)
        cpu = v.type.device == "cpu"
        if not cpu:
            bound[f"c{i}"] = torch.device(v.type.device)
        place = f"not t{i}.is_cpu" if cpu else f"t{i}.device != c{i}"
        lines.append(f"if t{i}.dtype is not d{i} or {place}: return False")
        lines.append(f"s{i} = t{i}.shape")
        lines.append(f"if len(s{i}) != {len(v.type.shape)} or t{i}.is_contiguous() is not {dense}: return False")
        if v.type.shape:
            lines.append("".join(f"s{i}_{k}, " for k in range(len(v.type.shape))) + f"= s{i}")
        for k, d in enumerate(v.type.shape):
            here = f"s{i}_{k}"
            if isinstance(d, int):
                lines.append(f"if {here} != {d}: return False")
            elif d.op == "sym" and str(d.args[0]) not in names:
                names[str(d.args[0])] = here
            else:
                later.append((here, d))
    for here, d in later:
        _known(d, names)
        lines.append(f"if {here} != {_text(d, names)}: return False")
    for g in graph.guards:
        _known(g, names)
        lines.append(f"if not {_text(g, names)}: return False")
    args = ", ".join(f"t{i}" for i in range(len(graph.inputs)))
    source = f"def guard({args}):\n" + "".join(f"    {line}\n" for line in lines) + "    return True\n"
    exec(compile(source, f"<hotfuse guard {graph.name}>", "exec"), bound)
    return bound["guard"], source


def _known(d: Dim | Sym, names: dict[str, str]) -> None:
    missing = symbols(d) - set(names)
    if missing:
        raise InternalError(f"a guard mentions {sorted(missing)[0]}, which no input dimension shows")


def compile_signature(graph: Graph) -> tuple[tuple[str, ...], Callable[..., tuple[int, ...]]]:
    """The symbols that inputs show, and a function that reads their values off a call's tensors."""
    places: dict[str, str] = {}
    for i, v in enumerate(graph.inputs):
        if isinstance(v.type, TensorType):
            for k, d in enumerate(v.type.shape):
                if not isinstance(d, int) and d.op == "sym":
                    places.setdefault(str(d.args[0]), f"t{i}.shape[{k}]")
    args = ", ".join(f"t{i}" for i in range(len(graph.inputs)))
    source = f"def signature({args}):\n    return ({''.join(f'{p}, ' for p in places.values())})\n"
    bound: dict[str, Any] = {"__builtins__": {}}
    exec(compile(source, f"<hotfuse signature {graph.name}>", "exec"), bound)
    return tuple(places), bound["signature"]
