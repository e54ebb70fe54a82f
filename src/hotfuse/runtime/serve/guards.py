"""The check that a call fits a captured graph, generated as one flat predicate over the call's tensors.

It says what `runtime.serve.fact_checks.holds` says of each fact; `native.guard` says it natively. This one serves until that is
compiled, and where native code cannot read tensors. The text is made of integers and names made here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hotfuse.analysis.call_facts import (
    Aligned,
    AllEqual,
    Dense,
    Fact,
    Facts,
    Holds,
    Outer,
    Plain,
    Ranked,
    Sized,
    Typed,
    lies_outside,
    places_in,
)
from hotfuse.base.errors import InternalError
from hotfuse.ir.dims import Dim, dims_in
from hotfuse.ir.graph import Graph
from hotfuse.ir.types import TensorType
from hotfuse.ops.torch_dtypes import torch_dtype
from hotfuse.runtime.serve.fact_checks import holds

Guard = Callable[..., bool]

_INFIX = {"+": "+", "*": "*", "//": "//", "%": "%", "**": "**", "==": "==", "!=": "!=", "<": "<", "<=": "<=",
          "and": "and", "or": "or"}


def _text(d: Dim) -> str:
    """An expression over places as Python; a place `t0.1` is read from a local that the guard has made of it."""
    if isinstance(d, int):
        return str(d) if d >= 0 else f"({d})"
    if d.op == "sym":
        return str(d.args[0]).replace(".", "_")
    parts = [_text(a) for a in dims_in(d)]
    if d.op in _INFIX:
        return "(" + f" {_INFIX[d.op]} ".join(parts) + ")"
    if d.op == "not":
        return f"(not {parts[0]})"
    if d.op == "ceildiv":
        return f"(-(-{parts[0]} // {parts[1]}))"
    if d.op in ("max", "min"):
        return f"{d.op}({', '.join(parts)})" if len(parts) > 1 else parts[0]
    raise InternalError(f"no guard for {d.op}")


_ORDER: tuple[type[Fact], ...] = (Ranked, Sized, Typed, Holds, Dense, Outer, Plain, Aligned, AllEqual)
"""What tells plans apart most often and costs least comes first."""


class _GuardSource:
    def __init__(self) -> None:
        self.bound: dict[str, Any] = {
            "max": max, "min": min, "type": type, "T": torch.Tensor, "P": nn.Parameter, "strided": torch.strided,
            "holds": holds, "outside": lies_outside, "Errors": (ZeroDivisionError, RuntimeError), "__builtins__": {},
        }
        self.lines: list[str] = []
        self.read: set[tuple[int, int]] = set()

    def name(self, prefix: str, value: Any) -> str:
        name = f"{prefix}{len(self.bound)}"
        self.bound[name] = value
        return name

    def size(self, i: int, dim: int) -> str:
        if (i, dim) not in self.read:
            self.read.add((i, dim))
            self.lines.append(f"t{i}_{dim} = t{i}.shape[{dim}]")
        return f"t{i}_{dim}"

    def wrong(self, fact: Fact) -> str:
        """An expression that is true when the fact does not hold."""
        match fact:
            case Plain(i, device):
                t = f"t{i}"  # that it is a tensor at all was asked before everything else
                here = f"not {t}.is_cpu" if device == "cpu" else f"{t}.device != {self.name('device', torch.device(device))}"
                return (
                    f"{t}.layout is not strided or {here} or {t}.is_neg() or {t}.is_conj() or"
                    f" {t}.is_quantized or {t}.is_nested or ({t}.data_ptr() == 0 and {t}.numel() != 0)"
                )
            case Typed(i, dtype):
                return f"t{i}.dtype is not {self.name('dtype', torch_dtype(dtype))}"
            case Ranked(i, rank):
                return f"t{i}.dim() != {rank}"
            case Dense(i, _, None, yes):
                return f"t{i}.is_contiguous() is not {yes}"
            case Dense(i, _, order, yes):
                return f"t{i}.permute({order}).is_contiguous() is not {yes}"
            case Outer(i):
                return f"not outside({self.name('fact', fact)}, t{i}.shape, t{i}.stride())"
            case Aligned(i, count):
                return f"t{i}.data_ptr() % {count}"
            case Sized(i, dim, size):
                return f"{self.size(i, dim)} != {size}"
            case Holds(predicate):
                for i, dim in places_in(predicate):
                    self.size(i, dim)
                return f"not {_text(predicate)}"
            case AllEqual(i):
                return f"not holds({self.name('fact', fact)}, leaves)"


def python_guard(facts: Facts, inputs: int, name: str = "") -> tuple[Guard, str]:
    """A predicate that all facts hold, and its text; what raises where a tensor has no memory or a divisor is 0 is False."""
    writer = _GuardSource()
    for i in sorted({f.input for f in facts if isinstance(f, Plain)}):
        writer.lines.append(f"if type(t{i}) is not T and type(t{i}) is not P: return False")
    for fact in sorted(facts, key=lambda f: _ORDER.index(type(f))):
        writer.lines.append(f"if {writer.wrong(fact)}: return False")
    args = ", ".join(f"t{i}" for i in range(inputs))
    if any(isinstance(f, AllEqual) for f in facts):
        writer.lines.insert(0, f"leaves = ({args},)")
    body = "".join(f"        {line}\n" for line in writer.lines)
    source = f"def guard({args}):\n    try:\n{body}        return True\n    except Errors:\n        return False\n"
    exec(compile(source, f"<hotfuse guard {name}>", "exec"), writer.bound)
    return writer.bound["guard"], source


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
