"""The tile interpreter as a back end: code is the kernel's own text, loading parses it, a call interprets it on NumPy arrays.

It is thousands of times slower than machine code and exists to be right: with `backend="interp"` a model is served through the
ordinary engine by kernels whose every access is checked, so that a wrong answer can be put down to lowering or to code generation.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from hotfuse.analysis.shapes import Mismatch, bind
from hotfuse.backends.protocol import Artifact, BoundKernel, CompiledKernel, KernelBackend, LoadedKernel, LoadedRun, Run
from hotfuse.base.errors import InternalError
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.dims import evaluate
from hotfuse.ir.graph import Graph, output_values
from hotfuse.ir.types import DType, Layout, TensorType
from hotfuse.lower import lower
from hotfuse.lower.common.lowered import (
    BufferArgument,
    BufferRole,
    Lowered,
    PackArgument,
    StateArgument,
    StrideArgument,
    SymbolArgument,
)
from hotfuse.lower.cpu.host_core import host_core
from hotfuse.lower.cpu.tiling import Core
from hotfuse.lower.run.constants import Constants, laid_out
from hotfuse.lower.run.description import Run as RunSteps
from hotfuse.lower.run.description import RunCode
from hotfuse.native.target import CpuTarget, host
from hotfuse.ops.torch_dtypes import torch_dtype
from hotfuse.tile import interpreter
from hotfuse.tile.memory import NUMPY
from hotfuse.tile.program import Kernel
from hotfuse.tile.text import parse, show

ONE_BY_ONE = "the interpreter enters kernels one by one"
Array = np.ndarray[Any, Any]


@dataclass(slots=True)
class InterpretedKernel:
    """A kernel as its text says it."""

    kernel: Kernel
    address: int = 0
    symbol: str = ""

    def release(self) -> None:
        """There is no code to free."""


class InterpreterBackend(KernelBackend):
    """Runs tile kernels as they are written, on the CPU."""

    name = "interp"
    stages = ("tile",)
    competes = False

    def compile(self, graph: Graph, weights: Mapping[str, Any]) -> Artifact:
        """A graph as one kernel; raises CannotLower where it is none."""
        lowered = self.lower(graph, host_core(self.target()))
        kernel = self.load_kernel(self.compile_kernel(lowered.kernel))
        return Artifact(graph, self.glue(graph, lowered, kernel, Constants(weights)), self.name, show(lowered.kernel))

    def target(self) -> CpuTarget:
        """Kernels are cut for this machine, so that the interpreter checks the kernels that would be compiled."""
        return host()

    def lower(self, graph: Graph, core: Core) -> Lowered:
        """The same kernels as for machine code."""
        return lower(graph, core)

    def compile_kernel(self, kernel: Kernel) -> CompiledKernel:
        """The kernel's text."""
        start = time.perf_counter()
        code = show(kernel).encode()
        return CompiledKernel(kernel, host(), code, {"text": time.perf_counter() - start})

    def load_kernel(self, compiled: CompiledKernel) -> InterpretedKernel:
        """What the text says: nothing but the bytes is believed."""
        return InterpretedKernel(parse(compiled.code.decode()))

    def glue(self, graph: Graph, lowered: Lowered, kernel: LoadedKernel, constants: Constants) -> Run:
        """A function that binds buffers to memory and interprets."""
        return _InterpretedGroup(graph, lowered, kernel.kernel, constants)

    def bound(
        self, graph: Graph, lowered: Lowered, kernel: LoadedKernel, weights: Mapping[str, torch.Tensor], inputs: Sequence[Any],
        threads: int, results: Sequence[Any] = (),
    ) -> BoundKernel:  # fmt: skip
        """The whole function: what it costs beside interpreting is nothing."""
        run = self.glue(graph, lowered, kernel, Constants(weights))
        return BoundKernel(lambda: run(*inputs), run(*inputs), (run, inputs))

    def awake(self, threads: int) -> AbstractContextManager[None]:
        """There are no threads."""
        return nullcontext()

    def serial_because(self) -> str:
        """It always is."""
        return "the interpreter has no threads"

    def runs_unavailable(self) -> str:
        """Always: there is no code to drive."""
        return ONE_BY_ONE

    def compile_run(self, run: RunSteps) -> bytes:
        """Never asked for."""
        raise InternalError("a run cannot be interpreted", because=ONE_BY_ONE)

    def load_run(
        self, code: RunCode, table: Sequence[int], keep: Sequence[Any], fallback: Run, *, assumes: bool = False
    ) -> LoadedRun:
        """Never asked for."""
        raise InternalError("a run cannot be interpreted", because=ONE_BY_ONE)

    def text(self, stage: str, kernel: Kernel) -> str:
        """Tile assembly is all there is."""
        if stage != "tile":
            raise InternalError(f"the back end {self.name} has no stage {stage!r}", hint="tile")
        return show(kernel)


class _InterpretedGroup:
    """A group as a function of its inputs."""

    def __init__(self, graph: Graph, lowered: Lowered, kernel: Kernel, constants: Constants) -> None:
        self.graph, self.lowered, self.kernel, self.constants = graph, lowered, kernel, constants
        self.keys = {p.value.name: p.key for p in graph.params}
        self.layouts = {v.name: v.type.layout for v in (*graph.inputs, *(p.value for p in graph.params))
                        if isinstance(v.type, TensorType)}  # fmt: skip

    def __call__(self, *args: Any) -> tuple[Any, ...]:
        env = bind(self.graph, [tuple(a.shape) if isinstance(a, torch.Tensor) else a for a in args])
        if isinstance(env, Mismatch):
            raise InternalError("a call does not fit the group it was sent to", because=str(env))
        given = {v.name: self._lying(v.name, a) for v, a in zip(self.graph.inputs, args, strict=True)}
        made = self._results(env)
        buffers: dict[str, Array] = {}
        sizes: dict[str, int] = {}
        for a in self.lowered.arguments:
            match a:
                case BufferArgument(role=BufferRole.PARAM):
                    memory = self.constants.param(self.keys[a.value], self.layouts[a.value])
                    buffers[a.buffer] = _memory(memory, self.kernel.buffer(a.buffer).shape)
                case BufferArgument():
                    memory = made[a.value] if a.role is BufferRole.OUTPUT else given[a.value]
                    buffers[a.buffer] = _memory(memory, self.kernel.buffer(a.buffer).shape)
                case PackArgument():
                    sources = tuple(replace(s, name=self.keys[s.name]) for s in a.spec.sources)
                    buffers[a.buffer] = self.constants.pack(replace(a.spec, sources=sources))
                case StateArgument():
                    state = self.constants.state(id(self.kernel), a.words)
                    buffers[a.buffer] = state.memory
                case SymbolArgument():
                    sizes[a.size] = env[a.symbol]
                case StrideArgument():
                    at = given[a.value] if a.value in given else self.constants.weights[self.keys[a.value]]
                    sizes[a.size] = at.stride(a.dim)
        interpreter.run(self.kernel, buffers, sizes)
        return tuple(made[v.name] for v in output_values(self.graph))

    def _lying(self, name: str, a: Any) -> Any:
        """An input as its type says that it lies; one that is read where it lies must not be a lazily negated view."""
        if not isinstance(a, torch.Tensor):
            return a
        layout = self.layouts.get(name, Layout())
        return a.resolve_neg() if layout.strided else laid_out(a, layout)

    def _results(self, env: Mapping[str, int]) -> dict[str, torch.Tensor]:
        strides, made = dict(self.lowered.strides), dict[str, torch.Tensor]()
        for v in output_values(self.graph):
            if not isinstance(v.type, TensorType):
                raise InternalError(f"output %{v.name} is not a tensor")
            shape = [evaluate(d, env) for d in v.type.shape]
            dtype = torch_dtype(v.type.dtype)
            if v.name not in strides:
                made[v.name] = torch.empty(shape, dtype=dtype)
            else:
                made[v.name] = torch.empty_strided(shape, [evaluate(d, env) for d in strides[v.name]], dtype=dtype)
        return made


def _memory(t: torch.Tensor, shape: Sequence[Any]) -> Array:
    """A dense tensor's memory in one piece for a flat buffer; a strided one as it is."""
    t = t.detach()
    if len(shape) == 1 and t.dim() != 1:
        t = torch.as_strided(t, (t.numel(),), (1,))
    return t.view(torch.int16).numpy().view(NUMPY[DType.BF16]) if t.dtype is torch.bfloat16 else t.numpy()
