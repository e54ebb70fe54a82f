"""Nodes against ONNX's own schemas: how many inputs and outputs, which attributes, of which kind.

Checked once, when a model is loaded, so that a damaged node is refused by name instead of failing inside an operator.
Operators that the `onnx` package has no schema for (other domains, functions) are not judged.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, cast

import onnx

from hotfuse.base.errors import ModelError
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.frontends.onnx.model_file import OnnxGraph, OnnxNode, PortType
from hotfuse.frontends.onnx.values import is_tensor

onnx.defs.has("Identity")  # the package reads all of its schemas at the first question: every model asks, and no constructor waits


def _all(kind: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda v: isinstance(v, list) and all(kind(x) for x in cast(list[Any], v))


def _is(*types: type) -> Callable[[Any], bool]:
    return lambda v: isinstance(v, types)


_KINDS: dict[str, Callable[[Any], bool]] = {
    "FLOAT": _is(float),
    "INT": _is(int),
    "STRING": _is(str, bytes),
    "TENSOR": is_tensor,
    "GRAPH": _is(OnnxGraph),
    "SPARSE_TENSOR": is_tensor,
    "TYPE_PROTO": _is(PortType),
    "FLOATS": _all(_is(float)),
    "INTS": _all(_is(int)),
    "STRINGS": _all(_is(str, bytes)),
    "TENSORS": _all(is_tensor),
    "GRAPHS": _all(_is(OnnxGraph)),
}


@dataclass(frozen=True, slots=True)
class Signature:
    """What a schema demands."""

    inputs: tuple[int, int]
    outputs: tuple[int, int]
    attrs: Mapping[str, str]
    """Kind per attribute."""
    required: frozenset[str]


@functools.lru_cache(maxsize=4096)
def signature(op: str, opset: int, domain: str) -> Signature | None:
    """The schema in force; None where there is none."""
    try:
        schema = onnx.defs.get_schema(op, opset, domain)
    except onnx.defs.SchemaError:
        return None
    attrs = schema.attributes
    return Signature(
        (schema.min_input, schema.max_input),
        (schema.min_output, schema.max_output),
        {name: str(cast(Any, a.type).name) for name, a in attrs.items()},
        frozenset(name for name, a in attrs.items() if a.required),
    )


def check(node: OnnxNode, opset: int) -> None:
    """Refuse a node that its schema does not allow."""
    attrs = node.attrs
    wanted = signature(node.op, opset, node.domain)
    if wanted is None:
        return
    for what, names, (least, most) in (("input", node.inputs, wanted.inputs), ("output", node.outputs, wanted.outputs)):
        if len(names) > most or (what == "input" and len(names) < least):
            raise _error(node, f"has {len(names)} {what}s", f"version {opset} takes {least} to {most}")
    for name, value in attrs.items():
        kind = wanted.attrs.get(name)
        if kind is None:
            raise _error(node, f"has an unknown attribute {name!r}", f"version {opset} knows {sorted(wanted.attrs)}")
        fits = _KINDS.get(kind)
        if fits is not None and not fits(value):
            raise _error(node, f"has an attribute {name!r} of the wrong kind", f"it must be of kind {kind}")
    missing = sorted(wanted.required - attrs.keys())
    if missing:
        raise _error(node, f"lacks attribute {missing[0]!r}", f"version {opset} requires it")


def _error(node: OnnxNode, what: str, because: str) -> ModelError:
    return ModelError(
        f"operator {node.op} {what}",
        where=f"node {node.title!r}, number {node.index} of its graph",
        because=because,
        hint="export the model again, or check its opset version",
    )
