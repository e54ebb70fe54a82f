"""An ONNX model becomes a graph: traced on fake weights, in a worker like any other model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from hotfuse.base.errors import CaptureError
from hotfuse.frontends.assumptions import assumptions, input_symbols
from hotfuse.frontends.captured import CallSpec, Captured
from hotfuse.frontends.fx import PlaceholderRole, to_graph
from hotfuse.frontends.onnx.interp import OnnxModule
from hotfuse.frontends.onnx.tracing.traced_model import Traced, fresh_mode, trace
from hotfuse.frontends.ship import TensorInfo, describe, unship
from hotfuse.ir.graph import Arg, Value


def capture_shipment(blob: bytes, call: CallSpec) -> Captured:
    """Capture what `ship(OnnxModel)` packed."""
    mode = fresh_mode()
    model, _, _ = unship(blob, mode)
    module = OnnxModule(model)
    return to_captured(trace(module, call.inputs, mode), set(module.weights))


def to_captured(traced: Traced, weights: set[str]) -> Captured:
    """A traced model as a captured graph; params are named as in `OnnxModule.weights`, folded constants carry data."""
    roles = [PlaceholderRole("input")] * traced.n_inputs + [PlaceholderRole("param", k) for k in traced.keys]
    done = to_graph(traced.gm, roles)
    graph = replace(done.graph, outputs=tuple(_flat(done.graph.outputs)))
    graph = replace(graph, guards=assumptions(traced.shape_env, input_symbols(graph)))
    folded: dict[str, TensorInfo] = {}
    for p in graph.params:
        if p.key in weights:
            continue
        value: Any = traced.constants.get(p.key, done.constants.get(p.key))
        if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor):
            raise CaptureError(f"the graph holds a constant {p.key!r} whose data is not known here")
        folded[p.key] = describe(value.detach(), with_data=True)
    notes = tuple(f"{op} stays whole: {why}" for op, why in traced.leaves.items())
    return Captured(graph, {}, folded, notes=notes)


def _flat(outputs: Sequence[Arg]) -> list[Arg]:
    """Sequences of known length give their elements, as results are taken apart too."""
    out: list[Arg] = []
    for o in outputs:
        out.extend(_flat(o) if isinstance(o, tuple) else [o] if isinstance(o, Value) or o is not None else [])
    return out
