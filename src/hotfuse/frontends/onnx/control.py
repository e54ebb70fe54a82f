"""ONNX's control operators over compiled graphs: thin adapters to the meanings in `ops.control`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hotfuse.base.errors import ModelError
from hotfuse.frontends.onnx.model_file import OnnxGraph, OnnxNode, PortType
from hotfuse.frontends.onnx.onnx_program import Program
from hotfuse.frontends.onnx.values import BY_CODE
from hotfuse.ops.control import ScanAxes, Stacked, run_if, run_loop, run_map, run_scan

KINDS = {"If": "if", "Loop": "loop", "Scan": "scan", "SequenceMap": "map"}
_GRAPHS = {"If": ("then_branch", "else_branch"), "Loop": ("body",), "Scan": ("body",), "SequenceMap": ("body",)}


def graph_order(node: OnnxNode, attrs: Mapping[str, Any]) -> list[OnnxGraph]:
    """The nested graphs of a control node, in the order the meanings take them."""
    graphs: list[OnnxGraph] = []
    for name in _GRAPHS[node.op]:
        graph = attrs.get(name)
        if not isinstance(graph, OnnxGraph):
            raise ModelError(f"node {node.title!r} ({node.op}) has no graph {name!r}")
        graphs.append(graph)
    return graphs


def bind(node: OnnxNode, opset: int, programs: Sequence[Program], attrs: Mapping[str, Any]) -> Callable[..., Any]:
    """The callable of a control node: takes its inputs, then the captures."""
    n_in, n_out = len(node.inputs), len(node.outputs)
    match node.op:
        case "If":
            _want(node, holds=n_in == 1 and all(len(p.out_slots) >= n_out for p in programs))
            then, else_ = programs
            return lambda cond, *captures: run_if(cond, then, else_, captures)
        case "Loop":
            return _loop(node, programs[0])
        case "Scan":
            return _scan8(node, programs[0], attrs) if opset < 9 else _scan(node, programs[0], attrs)
        case _:
            body = programs[0]
            _want(node, holds=n_in >= 1 and len(body.out_slots) == n_out)
            return lambda *args: run_map(args[:n_in], body, n_out, args[n_in:])


def _want(node: OnnxNode, *, holds: bool) -> None:
    if not holds:
        raise ModelError(
            f"node {node.title!r} ({node.op}) does not fit its graph", because="inputs or outputs differ in number"
        )


def stacked_of(body: Program, first: int) -> tuple[Stacked, ...]:
    """What a body's step outputs are declared to be, from output `first` on."""
    assert body.graph is not None
    return tuple(_stacked(p.type) for p in body.graph.outputs[first:])


def _stacked(t: PortType) -> Stacked:
    elem = BY_CODE.get(t.elem)
    shape = None if t.shape is None else tuple(d if isinstance(d, int) else None for d in t.shape)
    return Stacked(elem.torch if elem else None, shape)


def _loop(node: OnnxNode, body: Program) -> Callable[..., Any]:
    n = max(len(node.inputs), 2) - 2
    stacked = stacked_of(body, 1 + n)
    missing = 2 - len(node.inputs)
    n_ports = len(body.in_slots) - len(body.captures)
    _want(node, holds=n_ports == 2 + n and len(node.outputs) <= n + len(stacked))

    def loop(*args: Any) -> tuple[Any, ...]:
        if missing > 0:
            args = (*args[: len(node.inputs)], *(None,) * missing, *args[len(node.inputs) :])
        return run_loop(args[0], args[1], args[2 : 2 + n], body, args[2 + n :], stacked)

    return loop


def scan_axes(attrs: Mapping[str, Any], n_scan: int, n_out: int, *, v8: bool = False) -> ScanAxes:
    """The axes and directions of a Scan, with ONNX's defaults."""
    in_dirs = attrs.get("directions" if v8 else "scan_input_directions") or [0] * n_scan
    out_dirs = attrs.get("scan_output_directions") or [0] * n_out
    in_axes = attrs.get("scan_input_axes") or [0] * n_scan
    out_axes = attrs.get("scan_output_axes") or [0] * n_out
    return ScanAxes(tuple(in_axes), tuple(d == 1 for d in in_dirs), tuple(out_axes), tuple(d == 1 for d in out_dirs))


def _scan(node: OnnxNode, body: Program, attrs: Mapping[str, Any]) -> Callable[..., Any]:
    n_scan = int(attrs.get("num_scan_inputs", 0))
    n_in = len(node.inputs)
    n = n_in - n_scan
    _want(node, holds=n_scan >= 1 and n >= 0 and len(body.in_slots) - len(body.captures) == n_in)
    stacked = stacked_of(body, n)
    axes = scan_axes(attrs, n_scan, len(stacked))
    return lambda *args: run_scan(args[:n], args[n:n_in], body, axes, args[n_in:], stacked)


def _scan8(node: OnnxNode, body: Program, attrs: Mapping[str, Any]) -> Callable[..., Any]:
    """Opset 8: the first input gives a length per batch entry, and every value has a leading batch axis."""
    n_scan = int(attrs.get("num_scan_inputs", 0))
    n_in = len(node.inputs)
    n = n_in - 1 - n_scan
    _want(node, holds=n_scan >= 1 and n >= 0 and len(body.in_slots) - len(body.captures) == n_in - 1)
    stacked = stacked_of(body, n)
    axes = scan_axes(attrs, n_scan, len(stacked), v8=True)

    def scan(lengths: Any, *args: Any) -> tuple[Any, ...]:
        states, scanned, captures = args[:n], args[n : n_in - 1], args[n_in - 1 :]
        batch, longest = scanned[0].shape[0], scanned[0].shape[1]
        ends = [longest] * batch if lengths is None else lengths.tolist()
        rows = [
            run_scan([s[b] for s in states], [x[b, : ends[b]] for x in scanned], body, axes, captures, stacked)
            for b in range(batch)
        ]
        padded = [[*row[:n], *(_pad_rows(x, longest) for x in row[n:])] for row in rows]
        return tuple(torch.stack(column) for column in zip(*padded, strict=True))

    return scan


def _pad_rows(x: torch.Tensor, length: int) -> torch.Tensor:
    return torch.cat([x, x.new_zeros((length - x.shape[0], *x.shape[1:]))]) if x.shape[0] < length else x
