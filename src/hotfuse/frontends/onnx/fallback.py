"""An operator without a row: expand ONNX's own definition of it, or run it through `onnx.reference`, and count it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np
import onnx
import torch
from onnx import AttributeProto, GraphProto, NodeProto, TypeProto, helper, numpy_helper

from hotfuse.base.errors import ModelError
from hotfuse.frontends.onnx.load import function_from_proto
from hotfuse.frontends.onnx.model_file import OnnxFunction, OnnxGraph, OnnxNode, PortType
from hotfuse.frontends.onnx.values import BY_CODE, elem_of, from_any, is_tensor, to_numpy

COUNTS: Counter[str] = Counter()
"""Runs through `onnx.reference` in this process, per operator."""


def count(op: str) -> None:
    """Count a run that has no module to count it."""
    COUNTS[op] += 1


CompileBody = Callable[[OnnxFunction, int, Mapping[str, Any], int], Callable[..., Any]]
"""How a definition by other operators becomes a callable: (function, inputs, attributes, outputs)."""


def bind(
    node: OnnxNode,
    opsets: Mapping[str, int],
    attrs: Mapping[str, Any],
    on_fallback: Callable[[str], None],
    compile_body: CompileBody,
) -> Fallback:
    """A callable that runs the node by ONNX's definition; an operator ONNX does not know is the model's error."""
    opset = opsets.get(node.domain, 1)
    schema = schema_of(node.op, opset, node.domain)
    if schema is None:
        raise ModelError(
            f"operator {node.op} of domain {node.domain or 'ai.onnx'!r}, version {opset}, is unknown",
            where=f"node {node.title!r}",
            because="it has no mapping, is not a function of the model and is not in the `onnx` package",
            hint="export the model with standard operators",
        )
    return Fallback(node, opsets, dict(attrs), schema, on_fallback, compile_body)


def schema_of(op: str, opset: int, domain: str) -> Any:
    """ONNX's schema for an operator in force at an opset version; None when there is none."""
    try:
        return onnx.defs.get_schema(op, opset, domain)
    except onnx.defs.SchemaError:
        return None


_MAX_MADE = 64
"""Ways to run one node that are kept: shapes may keep changing."""


class Fallback:
    """Runs one node; the ways to run it are made once per input types."""

    def __init__(
        self,
        node: OnnxNode,
        opsets: Mapping[str, int],
        attrs: dict[str, Any],
        schema: Any,
        on_fallback: Callable[[str], None],
        compile_body: CompileBody,
    ) -> None:
        self.node, self.opsets, self.attrs, self.schema = node, opsets, attrs, schema
        self.opset = opsets.get(node.domain, 1)
        self.count = on_fallback
        self.compile_body = compile_body
        self.title = f"{node.domain}::{node.op}" if node.domain else node.op
        self.proto = node_proto(_renamed(node), attrs, schema, opsets)
        self.made: dict[tuple[Any, ...], Callable[..., Any]] = {}

    def __call__(self, *args: Any) -> Any:
        """Run the node."""
        by_shape = self.schema.has_context_dependent_function  # such a definition is made for one shape
        key = tuple(
            (elem_of(a).code, tuple(a.shape) if by_shape else a.ndim) if is_tensor(a) else type(a) for a in args
        )
        run = self.made.get(key)
        if run is None:
            if len(self.made) >= _MAX_MADE:
                self.made.clear()
            run = self.made[key] = self.expand(args) or self._reference
        return run(*args)

    def expand(self, args: tuple[Any, ...]) -> Callable[..., Any] | None:
        """The operator's definition by other operators, compiled; None when it has none or needs this very node."""
        body = self._body(args)
        if body is None:
            return None
        function = function_from_proto(body, self.node.op, self.opsets)
        defaults = {n: attr_default(a) for n, a in self.schema.attributes.items() if a.default_value.type}
        given = {**defaults, **self.attrs}
        return self.compile_body(function, len(args), given, len(self.node.outputs))

    def _body(self, args: tuple[Any, ...]) -> Any:
        if self.schema.has_function:
            versions = [v for v in self.schema.function_opset_versions if v <= self.opset]
            text = self.schema.get_function_with_opset_version(max(versions)) if versions else b""
            if text:
                return onnx.FunctionProto.FromString(text)
        if self.schema.has_context_dependent_function:
            versions = [v for v in self.schema.context_dependent_function_opset_versions if v <= self.opset]
            types = [type_proto(a).SerializeToString() for a in args]
            if versions and all(a is None or is_tensor(a) for a in args):
                text = self.schema.get_context_dependent_function_with_opset_version(
                    max(versions), self.proto.SerializeToString(), types
                )
                if text:
                    return onnx.FunctionProto.FromString(text)
        return None

    def _reference(self, *args: Any) -> Any:
        self.count(self.title)
        return run_reference(self.proto, self.opsets, args)


def run_reference(proto: NodeProto, opsets: Mapping[str, int], args: tuple[Any, ...]) -> Any:
    """Run one node by `onnx.reference`."""
    from onnx.reference import ReferenceEvaluator

    names = [n for n in proto.input if n]
    given = {n: to_numpy(a) for n, a in zip(proto.input, args, strict=False) if n}
    inputs = [helper.make_value_info(n, type_proto(a)) for n, a in zip(proto.input, args, strict=False) if n]
    outputs = [helper.make_value_info(n, TypeProto()) for n in proto.output if n]
    assert len(names) == len(inputs)
    imports = [helper.make_opsetid(d, v) for d, v in {"": onnx.defs.onnx_opset_version(), **opsets}.items()]
    model = helper.make_model(helper.make_graph([proto], "fallback", inputs, outputs), opset_imports=imports)
    with np.errstate(all="ignore"):
        results = cast(list[Any], ReferenceEvaluator(model).run(None, given))
    found = iter(from_any(r) for r in results)
    return tuple(next(found) if n else None for n in proto.output)


def _renamed(node: OnnxNode) -> OnnxNode:
    """The node with names of our own, as a model of one node needs them."""
    ins = tuple(f"in{i}" if n else "" for i, n in enumerate(node.inputs))
    outs = tuple(f"out{i}" if n else "" for i, n in enumerate(node.outputs))
    return OnnxNode(node.op, node.domain, ins, outs, node.attrs, node.title, node.overload, node.index)


def node_proto(node: OnnxNode, attrs: Mapping[str, Any], schema: Any, opsets: Mapping[str, int]) -> NodeProto:
    """A node as ONNX writes it."""
    proto = NodeProto(op_type=node.op, domain=node.domain, name=node.title, overload=node.overload)
    proto.input.extend(node.inputs)
    proto.output.extend(node.outputs)
    for name, value in attrs.items():
        declared = schema.attributes.get(name) if schema is not None else None
        proto.attribute.append(attr_proto(name, value, int(declared.type) if declared else None, opsets))
    return proto


def graph_proto(graph: OnnxGraph, opsets: Mapping[str, int]) -> GraphProto:
    """A graph as ONNX writes it."""
    nodes = [node_proto(n, n.attrs, schema_of(n.op, opsets.get(n.domain, 1), n.domain), opsets) for n in graph.nodes]
    ports = [
        [helper.make_value_info(p.name, port_type_proto(p.type)) for p in side]
        for side in (graph.inputs, graph.outputs)
    ]
    tensors = [numpy_helper.from_array(to_numpy(v), name) for name, v in graph.initializers.items()]
    return helper.make_graph(nodes, graph.name, ports[0], ports[1], tensors)


def attr_proto(name: str, value: Any, kind: int | None, opsets: Mapping[str, int]) -> AttributeProto:
    """One attribute; `kind` decides what an empty list is of."""
    if isinstance(value, OnnxGraph):
        return helper.make_attribute(name, graph_proto(value, opsets))
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return helper.make_attribute(name, numpy_helper.from_array(to_numpy(value)))
    if isinstance(value, PortType):
        return helper.make_attribute(name, port_type_proto(value))
    return helper.make_attribute(name, value, attr_type=kind)


def attr_default(a: Any) -> Any:
    """The default a schema declares for an attribute, decoded."""
    value = helper.get_attribute_value(a.default_value)
    if isinstance(value, bytes):
        return value.decode("utf-8")
    return (
        value
        if isinstance(value, (int, float, str))
        else [v.decode("utf-8") if isinstance(v, bytes) else v for v in value]
    )


def type_proto(v: Any) -> TypeProto:
    """The type of a value, as far as it can be told."""
    if is_tensor(v):
        return helper.make_tensor_type_proto(elem_of(v).code, [d if isinstance(d, int) else str(d) for d in v.shape])
    if isinstance(v, list):
        return helper.make_sequence_type_proto(type_proto(v[0]) if v else helper.make_tensor_type_proto(1, None))
    return TypeProto()


def port_type_proto(t: PortType) -> TypeProto:
    """A declared type as ONNX writes it."""
    match t.kind:
        case "tensor" if t.elem in BY_CODE:
            return helper.make_tensor_type_proto(t.elem, None if t.shape is None else list(t.shape))
        case "sequence" if t.of is not None:
            return helper.make_sequence_type_proto(port_type_proto(t.of))
        case "optional" if t.of is not None:
            return helper.make_optional_type_proto(port_type_proto(t.of))
        case _:
            return TypeProto()
