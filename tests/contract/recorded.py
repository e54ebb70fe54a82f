"""Calls of ATen ops as captured programs make them: every OpInfo sample is traced, and each node's call recorded."""

from __future__ import annotations

import warnings
import zlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves, tree_map_only

from hotfuse.ir.graph import Arg, Kind, Node, Value
from hotfuse.ops.torch_types import tensor_type
from tests.contract.opinfo import cases, op_names
from tests.seeds import seed

PER_PACKET = 12


@dataclass(frozen=True)
class Call:
    """One call of an op with real arguments."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def run(self, **replaced: Any) -> list[torch.Tensor]:
        """The tensors it gives; `leaves` replaces the tensors it takes."""
        args, kwargs = self.args, self.kwargs
        if replaced:
            fresh = iter(replaced["leaves"])
            args, kwargs = tree_map_only(torch.Tensor, lambda _: next(fresh), (args, kwargs))
        seed(0)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return [t for t in tree_leaves(self.op(*args, **kwargs)) if isinstance(t, torch.Tensor)]

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [t for t in tree_leaves((self.args, self.kwargs)) if isinstance(t, torch.Tensor)]

    def __str__(self) -> str:
        return f"{self.op} on " + ", ".join(f"{t.dtype}{list(t.shape)}" for t in self.tensors)


class _Recorder(fx.Interpreter):
    def __init__(self, gm: fx.GraphModule, calls: dict[str, list[Call]]) -> None:
        super().__init__(gm)
        self.calls = calls

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if isinstance(target, torch._ops.OpOverload):
            known = self.calls[".".join(str(target).split(".")[:2])]
            if len(known) < PER_PACKET:
                keep = tree_map_only(torch.Tensor, lambda t: t, (tuple(args), dict(kwargs)))
                known.append(Call(target, *keep))
        return super().call_function(target, args, kwargs)


@cache
def recorded(part: int = 1) -> dict[str, list[Call]]:
    """Calls by packet, of one op in so many, drawn from their names; samples that torch cannot trace are left out (test_opinfo
    counts them). All of them take half a minute.
    """
    calls: dict[str, list[Call]] = defaultdict(list)
    for name in op_names():
        if zlib.crc32(name.encode()) % part:
            continue
        for case in cases(name, 2):
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    gm = make_fx(case.fn, pre_dispatch=True, tracing_mode="fake")(*case.tensors)
                except Exception as e:
                    if not _needs_data(e):
                        raise
                    continue
                _Recorder(gm, calls).run(*case.tensors)
    return dict(calls)


def _needs_data(e: Exception) -> bool:
    names = {"DataDependentOutputException", "DynamicOutputShapeException", "GuardOnDataDependentSymNode",
             "PendingUnbackedSymbolNotFound"}  # fmt: skip
    return type(e).__name__ in names


def node_of(call: Call, outs: list[torch.Tensor]) -> Node:
    """The call as a node of a graph, for the cost functions."""
    count = iter(range(1000))

    def arg(x: Any) -> Arg:
        if isinstance(x, torch.Tensor):
            return Value(f"v{next(count)}", tensor_type(x))
        if isinstance(x, tuple | list):
            return tuple(arg(a) for a in x)
        return x if isinstance(x, int | float | str | bool | None) else None

    values: Iterator[Value] = (Value(f"out{i}", tensor_type(t)) for i, t in enumerate(outs))
    attrs = tuple((k, arg(v)) for k, v in call.kwargs.items())
    return Node(Kind.OPERATOR, str(call.op), tuple(arg(a) for a in call.args), tuple(values), attrs)
