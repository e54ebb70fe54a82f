"""A lowered group as something a plan calls: allocate outputs, read sizes off the inputs, enter native code.

The glue is generated per group like all flat functions: which input shows which symbol, which outputs have which shape, is
decided once. Inputs that lie differently from what the kernel was made for are copied into place, which is rare.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from hotfuse.backends.llvm.runs.abi import NativeKernel
from hotfuse.backends.protocol import Artifact, Run
from hotfuse.base.errors import InternalError
from hotfuse.ir.dims import Dim, dims_in, evaluate, symbols
from hotfuse.ir.graph import Graph, Value, output_values
from hotfuse.ir.types import Layout, TensorType
from hotfuse.lower.common.lowered import (
    BufferArgument,
    BufferRole,
    Lowered,
    PackArgument,
    StateArgument,
    StrideArgument,
    SymbolArgument,
)
from hotfuse.lower.cpu.scratch import LINE
from hotfuse.lower.run.constants import Constants, laid_out
from hotfuse.ops.torch_dtypes import torch_dtype


def artifact(graph: Graph, lowered: Lowered, kernel: NativeKernel, weights: Mapping[str, torch.Tensor], source: str) -> Artifact:
    """The group as an artifact; `lowered` speaks of the graph's values by name, weights come by param key."""
    return Artifact(graph, glue(graph, lowered, kernel, Constants(weights)), "llvm", source)


def glue(graph: Graph, lowered: Lowered, kernel: NativeKernel, constants: Constants) -> Run:
    """The group as a function of its inputs."""
    return _Glue(graph, lowered, kernel, constants).build()


class _Glue:
    def __init__(self, graph: Graph, lowered: Lowered, kernel: NativeKernel, constants: Constants) -> None:
        self.graph, self.lowered, self.kernel, self.constants = graph, lowered, kernel, constants
        self.keys = {p.value.name: p.key for p in graph.params}
        self.bound: dict[str, Any] = {
            "enter": kernel.enter, "empty": torch.empty, "strided": torch.empty_strided,
            "threads": torch.get_num_threads, "laid_out": laid_out, "rows": Layout(),
            "evaluate": evaluate, "LINE": LINE, "arena": kernel.arena,
        }
        self.keep: list[Any] = [kernel]
        """What the function needs alive but only knows by address: code, and memory of weights."""

    def build(self) -> Run:
        lines: list[str] = []
        inputs = {v.name: f"i{k}" for k, v in enumerate(self.graph.inputs)}
        for v in self.graph.inputs:
            lines += self._contiguous(v, inputs[v.name])
        sizes = self._symbols(inputs, lines)
        outs = {v.name: f"o{k}" for k, v in enumerate(dict.fromkeys(output_values(self.graph)))}
        strides = dict(self.lowered.strides)
        for v in dict.fromkeys(output_values(self.graph)):
            lines.append(self._allocated(v, outs[v.name], strides.get(v.name), sizes))
        pointers: list[str] = []
        numbers: list[str] = []
        for a in self.lowered.arguments:
            match a:
                case BufferArgument(role=BufferRole.INPUT):
                    pointers.append(f"{inputs[a.value]}.data_ptr()")
                case BufferArgument(role=BufferRole.OUTPUT):
                    pointers.append(f"{outs[a.value]}.data_ptr()")
                case BufferArgument():
                    pointers.append(self._address(self._laid_out(a.value)))
                case PackArgument():
                    pointers.append(self._address(self._packed(a)))
                case StateArgument():
                    state = self.constants.state(self.kernel.address, a.words)
                    self.keep.append(state)
                    pointers.append(str(state.address))
                case SymbolArgument():
                    numbers.append(sizes[a.symbol])
                case StrideArgument():
                    numbers.append(f"{inputs[a.value]}.stride({a.dim})" if a.value in inputs
                                   else str(self.constants.weights[self.keys[a.value]].stride(a.dim)))
        base = "0"
        if self.kernel.has_scratch:
            named = ", ".join(f"{s!r}: {n}" for s, n in zip(self.kernel.kernel.sizes, numbers, strict=True))
            lines += ["t = threads()", f"scratch = arena({{{named}}}, t)", "base = -(-scratch.data_ptr() // LINE) * LINE"]
            base = "base"
        count = "t" if self.kernel.has_scratch else "threads()"
        lines.append(f"enter({', '.join([*pointers, base, *numbers, count])})")
        lines.append("return (" + "".join(f"{outs[v.name]}, " for v in output_values(self.graph)) + ")")
        head = ", ".join(inputs.values())
        unpack = "".join(f"    {n} = bound[{n!r}]\n" for n in self.bound)
        body = "\n".join("        " + line for line in lines)
        space: dict[str, Any] = {}
        text = f"def make(bound, keep):\n{unpack}    def run({head}):\n{body}\n    run.keep = keep\n    return run\n"
        exec(compile(text, f"<hotfuse {self.kernel.kernel.name}>", "exec"), space)
        return space["make"](self.bound, self.keep)

    def _contiguous(self, v: Value, name: str) -> list[str]:
        """Make sure an input lies as its type says."""
        t = v.type
        if not isinstance(t, TensorType) or not self._reads(v.name):
            return []
        if t.layout.strided:  # read where it lies, whatever its strides; a lazily negated view holds other numbers
            return [f"if {name}.is_neg(): {name} = {name}.resolve_neg()"]
        if t.layout.order is None:
            return [f"if not {name}.is_contiguous(): {name} = laid_out({name}, rows)"]
        order = self._name("order", t.layout)
        return [f"{name} = laid_out({name}, {order})"]

    def _reads(self, name: str) -> bool:
        return any(isinstance(a, BufferArgument) and a.value == name and a.role is BufferRole.INPUT
                   for a in self.lowered.arguments)

    def _symbols(self, inputs: Mapping[str, str], lines: list[str]) -> dict[str, str]:
        """Where each symbol is read off the inputs."""
        found: dict[str, str] = {}
        for v in self.graph.inputs:
            if not isinstance(v.type, TensorType):
                continue
            for d, dim in enumerate(v.type.shape):
                if not isinstance(dim, int) and dim.op == "sym" and str(dim.args[0]) not in found:
                    found[str(dim.args[0])] = f"s{len(found)}"
                    lines.append(f"{found[str(dim.args[0])]} = {inputs[v.name]}.shape[{d}]")
        needed = {a.symbol for a in self.lowered.arguments if isinstance(a, SymbolArgument)}
        for v in output_values(self.graph):
            if isinstance(v.type, TensorType):
                needed.update(*(symbols(d) for d in v.type.shape))
        if missing := needed - set(found):
            raise InternalError(f"no input of the group shows the size {sorted(missing)[0]}")
        return found

    def _allocated(self, v: Value, name: str, strides: tuple[Dim, ...] | None, sizes: Mapping[str, str]) -> str:
        if not isinstance(v.type, TensorType):
            raise InternalError(f"output %{v.name} is not a tensor")
        shape = f"[{', '.join(self._number(d, sizes) for d in v.type.shape)}]"
        dtype = self._name("dtype", torch_dtype(v.type.dtype))
        if strides is None or v.type.layout == Layout():
            return f"{name} = empty({shape}, dtype={dtype})"
        return f"{name} = strided({shape}, [{', '.join(self._number(d, sizes) for d in strides)}], dtype={dtype})"

    def _number(self, d: Dim, sizes: Mapping[str, str]) -> str:
        """A size as Python."""
        if isinstance(d, int):
            return str(d) if d >= 0 else f"({d})"
        if d.op == "sym":
            return sizes[str(d.args[0])]
        parts = [self._number(a, sizes) for a in dims_in(d)]
        match d.op:
            case "+" | "*" | "//" | "%":
                return f"({f' {d.op} '.join(parts)})"
            case "max" | "min":
                return f"{d.op}({', '.join(parts)})" if len(parts) > 1 else parts[0]
            case "ceildiv":
                return f"(-(-{parts[0]} // {parts[1]}))"
            case _:
                env = ", ".join(f"{s!r}: {sizes[s]}" for s in sorted(symbols(d)))
                return f"evaluate({self._name('dim', d)}, {{{env}}})"

    def _name(self, prefix: str, value: Any) -> str:
        name = f"{prefix}{len(self.bound)}"
        self.bound[name] = value
        return name

    def _laid_out(self, value: str) -> torch.Tensor:
        param = next(p.value for p in self.graph.params if p.value.name == value)
        assert isinstance(param.type, TensorType)
        return self.constants.param(self.keys[value], param.type.layout)

    def _packed(self, a: PackArgument) -> np.ndarray[Any, Any]:
        sources = tuple(replace(s, name=self.keys[s.name]) for s in a.spec.sources)
        return self.constants.pack(replace(a.spec, sources=sources))

    def _address(self, memory: Any) -> str:
        self.keep.append(memory)
        return str(memory.data_ptr() if isinstance(memory, torch.Tensor) else memory.ctypes.data)
