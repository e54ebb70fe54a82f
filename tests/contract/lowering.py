"""Functions of tensors as groups, lowered and run three ways: torch, the tile interpreter, native code."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from hotfuse.backends.llvm.native import compile_kernel, load_kernel
from hotfuse.backends.llvm.runs.kernel_call import artifact
from hotfuse.frontends.fx import PlaceholderRole, to_graph
from hotfuse.ir.dims import evaluate
from hotfuse.ir.graph import Graph, output_values
from hotfuse.ir.types import TensorType
from hotfuse.lower.common.lowered import BufferArgument, Lowered, StrideArgument, SymbolArgument
from hotfuse.lower.common.lowered import BufferRole as BufferRole
from hotfuse.ops.torch_dtypes import torch_dtype
from hotfuse.tile.interpreter import run
from hotfuse.tile.memory import NUMPY


@dataclass(frozen=True)
class Group:
    """A function of tensors as a graph, with the constants it holds."""

    graph: Graph
    weights: dict[str, torch.Tensor]


def group_of(
    fn: Callable[..., Any], tensors: Sequence[torch.Tensor], symbolic: bool = False, constants: bool = False
) -> Group:
    """Trace a function; sizes other than 0 and 1 become symbols on request, and tensors it knows become params."""

    def flat(*args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        result = fn(*args)
        return tuple(result) if isinstance(result, tuple | list) else (result,)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = make_fx(flat, tracing_mode="symbolic" if symbolic else "fake", pre_dispatch=True,
                         _allow_non_fake_inputs=constants)(*tensors)
    made = to_graph(traced, [PlaceholderRole("input")] * len(tensors))
    return Group(made.graph, made.constants)


def bindings(graph: Graph, tensors: Sequence[torch.Tensor]) -> dict[str, int]:
    """The symbols' values that a call shows."""
    env: dict[str, int] = {}
    for v, t in zip(graph.inputs, tensors, strict=True):
        assert isinstance(v.type, TensorType)
        for d, n in zip(v.type.shape, t.shape, strict=True):
            if not isinstance(d, int) and d.op == "sym":
                env[str(d.args[0])] = n
    return env


def as_numpy(t: torch.Tensor) -> np.ndarray[Any, Any]:
    """The tensor's own memory, strides and all."""
    if t.dtype is torch.bfloat16:
        return t.detach().view(torch.int16).numpy().view(NUMPY[_BF16])
    return t.detach().numpy()


_BF16 = next(d for d in NUMPY if d.value == "bf16")


def as_torch(a: np.ndarray[Any, Any]) -> torch.Tensor:
    """The inverse of `as_numpy`."""
    return torch.from_numpy(a.view(np.int16)).view(torch.bfloat16) if a.dtype == NUMPY[_BF16] else torch.from_numpy(a)


def sizes_of(lowered: Lowered, graph: Graph, tensors: Sequence[torch.Tensor]) -> dict[str, int]:
    """The kernel's sizes in a call."""
    env, by_name = bindings(graph, tensors), {v.name: t for v, t in zip(graph.inputs, tensors, strict=True)}
    sizes: dict[str, int] = {}
    for a in lowered.arguments:
        match a:
            case SymbolArgument():
                sizes[a.size] = env[a.symbol]
            case StrideArgument():
                sizes[a.size] = by_name[a.value].stride(a.dim)
            case _:
                pass
    return sizes


def outputs_of(lowered: Lowered, graph: Graph, env: Mapping[str, int]) -> dict[str, torch.Tensor]:
    """Memory for the outputs, as the kernel writes them."""
    made: dict[str, torch.Tensor] = {}
    strides = dict(lowered.strides)
    for v in output_values(graph):
        assert isinstance(v.type, TensorType)
        shape = [evaluate(d, env) for d in v.type.shape]
        stride = [evaluate(d, env) for d in strides[v.name]]
        made[v.name] = torch.empty_strided(shape, stride, dtype=torch_dtype(v.type.dtype))
    return made


def interpret(lowered: Lowered, group: Group, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What the kernel means."""
    graph = group.graph
    sizes = sizes_of(lowered, graph, tensors)
    made = outputs_of(lowered, graph, bindings(graph, tensors))
    by_name = {v.name: t for v, t in zip(graph.inputs, tensors, strict=True)}
    by_name |= {p.value.name: group.weights[p.key].detach().contiguous() for p in graph.params}
    buffers: dict[str, np.ndarray[Any, Any]] = {}
    for a in lowered.arguments:
        if isinstance(a, BufferArgument):
            tensor = made[a.value] if a.role is BufferRole.OUTPUT else by_name[a.value]
            buffers[a.buffer] = _memory(tensor, lowered.kernel.buffer(a.buffer).shape)
    run(lowered.kernel, buffers, sizes)
    return [made[v.name] for v in output_values(graph)]


def run_native(lowered: Lowered, group: Group, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What the machine makes of it."""
    native = load_kernel(compile_kernel(lowered.kernel))
    made = artifact(group.graph, lowered, native, group.weights, "")
    return list(made.run(*tensors))


def _memory(t: torch.Tensor, shape: Sequence[Any]) -> np.ndarray[Any, Any]:
    """A dense tensor's memory in one piece for a flat buffer; a strided one as it is."""
    if len(shape) == 1 and t.dim() != 1:
        return as_numpy(torch.as_strided(t, (t.numel(),), (1,)))
    return as_numpy(t)
