"""ONNX operators that stay whole in a graph: their names, their meaning, and what is known of their results.

    onnx.<operator>.<domain>.<opset>.<number of outputs>      onnx.NonZero.ai_onnx.13.1

In a domain a dot is written `_` and an underscore `__`. Attributes are keyword arguments.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx
import torch
from onnx import shape_inference

from hotfuse.base.errors import HotfuseError, InternalError
from hotfuse.frontends.onnx import fallback
from hotfuse.frontends.onnx.model_file import OnnxNode, domain_of
from hotfuse.frontends.onnx.onnx_program import NodeCtx, node_error
from hotfuse.frontends.onnx.program_builder import Compiler
from hotfuse.frontends.onnx.registry import find
from hotfuse.frontends.onnx.values import BY_CODE
from hotfuse.ops.table import register_namespace

_NAME = re.compile(r"onnx\.([A-Za-z_][A-Za-z0-9_]*)\.([A-Za-z0-9_\-]+)\.(\d+)\.(\d+)")


def leaf_name(op: str, domain: str, opset: int, n_out: int) -> str:
    """The graph's name of an ONNX operator."""
    text = (domain or "ai.onnx").replace("_", "__").replace(".", "_")
    return f"onnx.{op}.{text}.{opset}.{n_out}"


def parse_name(name: str) -> tuple[str, str, int, int]:
    """Operator, domain, opset, number of outputs."""
    m = _NAME.fullmatch(name)
    if m is None:
        raise InternalError(f"no operator {name}", because="not the name of an ONNX operator")
    domain = m[2].replace("__", "\0").replace("_", ".").replace("\0", "_")
    return m[1], domain_of(domain), int(m[3]), int(m[4])


def runs_reference(name: str) -> bool:
    """Whether a leaf has no row, so that every run of it is a counted fallback."""
    op, domain, opset, _ = parse_name(name)
    return find(domain, op, opset) is None


@functools.cache
def resolve(name: str) -> Callable[..., Any]:
    """The callable behind a leaf's name: the operator's row, or ONNX's own definition."""
    op, domain, opset, n_out = parse_name(name)
    row = find(domain, op, opset)
    node = OnnxNode(op, domain, (), tuple(f"out{i}" for i in range(n_out)), name=name)
    ctx = NodeCtx(opset, n_out)

    def call(*args: Any, **attrs: Any) -> Any:
        args = tuple(list(a) if isinstance(a, tuple) else a for a in args)
        try:
            out = row.fn(ctx, *args, **attrs) if row else _defined(node, opset, args, attrs)
        except HotfuseError:
            raise
        except Exception as e:
            raise node_error(node, "graph", e) from e
        if not isinstance(out, tuple):
            return out
        return out[0] if n_out == 1 else (*out, *(None,) * (n_out - len(out)))[:n_out]

    return call


def _defined(node: OnnxNode, opset: int, args: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    names = tuple("" if a is None else f"in{i}" for i, a in enumerate(args))
    bound = OnnxNode(node.op, node.domain, names, node.outputs, name=node.name)
    opsets = {"": onnx.defs.onnx_opset_version(), node.domain: opset}
    return fallback.bind(bound, opsets, attrs, fallback.count, Compiler({}, fallback.count).body)(*args)


register_namespace("onnx", resolve)


def result_types(
    node: OnnxNode, opset: int, args: Sequence[Any], attrs: Mapping[str, Any], fresh: Callable[[], Any]
) -> list[tuple[torch.dtype, list[Any]] | None]:
    """What ONNX's shape inference says of a node's results: element type and sizes, None where it says nothing.

    Sizes it only names are those of the inputs when the name is one of theirs, otherwise `fresh()`.
    """
    nothing: list[tuple[torch.dtype, list[Any]] | None] = [None] * len(node.outputs)
    schema = fallback.schema_of(node.op, opset, node.domain)
    if schema is None:
        return nothing
    ins = tuple("" if a is None else f"in{i}" for i, a in enumerate(args))
    outs = tuple(f"out{i}" if n else "" for i, n in enumerate(node.outputs))
    bound = OnnxNode(node.op, node.domain, ins, outs)
    try:
        proto = fallback.node_proto(bound, attrs, schema, {node.domain: opset})
        types = {f"in{i}": fallback.type_proto(a) for i, a in enumerate(args) if isinstance(a, torch.Tensor)}
        if len(types) != sum(a is not None for a in args):
            return nothing
        found = shape_inference.infer_node_outputs(
            schema, proto, types, opset_imports=[onnx.helper.make_opsetid(node.domain, opset)]
        )
    except (RuntimeError, ValueError, TypeError, onnx.shape_inference.InferenceError):
        return nothing  # no rank is known; the value stays untyped
    sizes: list[Any] = [d for a in args if isinstance(a, torch.Tensor) for d in a.shape]
    names = {str(d): d for d in sizes if not isinstance(d, int)}
    out: list[tuple[torch.dtype, list[Any]] | None] = []
    for i in range(len(node.outputs)):
        t = found.get(f"out{i}")
        elem = BY_CODE.get(t.tensor_type.elem_type) if t is not None else None
        if t is None or elem is None or elem.torch is None or not t.tensor_type.HasField("shape"):
            out.append(None)
            continue
        dims = t.tensor_type.shape.dim
        out.append(
            (
                elem.torch,
                [
                    d.dim_value if d.HasField("dim_value") else names[d.dim_param] if d.dim_param in names else fresh()
                    for d in dims
                ],
            )
        )
    return out
