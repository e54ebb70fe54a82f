"""ONNX file -> `OnnxModel`, or a `ModelError` that says what is wrong with the file and where.

What is checked, so that later stages need not ask again:
 1. the bytes are a model: it parses, has a graph and imports at least one opset;
 2. every tensor's data has exactly the length its dims and element type need; external data stays in the folder;
 3. every graph is in SSA form: a name is defined once, and before its first use, in the graph or one around it;
 4. every node's domain is imported, graph outputs are defined, attributes are of a known kind and not repeated;
 5. functions are defined once and do not call each other in a circle; nesting is bounded;
 6. every node of the graph fits its operator's schema (`schema.py`), where ONNX has one.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError
from onnx import AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, TypeProto, ValueInfoProto

from hotfuse.base.errors import ModelError
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.frontends.onnx import node_checks
from hotfuse.frontends.onnx.model_file import (
    AttrRef,
    DeclaredDim,
    FunctionKey,
    ModelMeta,
    OnnxFunction,
    OnnxGraph,
    OnnxModel,
    OnnxNode,
    Port,
    PortType,
    domain_of,
)
from hotfuse.frontends.onnx.nibbles import widened
from hotfuse.frontends.onnx.node_order import in_order
from hotfuse.frontends.onnx.tensor_proto import ExternalData, sparse_value, tensor_value
from hotfuse.frontends.onnx.values import Value

MAX_DEPTH = 24
"""Graphs in graphs, and functions calling functions: real models stay below ten."""

_ARCHIVE = b"PK\x03\x04"
_IMPLIED = {"com.microsoft": 1}
"""Domains with one version only: tools of ONNX Runtime put their operators into files without importing it."""
_DAMAGED = "the file may be truncated or damaged: copy or export it again"


def load(source: str | os.PathLike[str] | bytes) -> OnnxModel:
    """Read and check a model from a path, or from the bytes of its file."""
    name, data, folder = _read(source)
    if data.startswith(_ARCHIVE):
        raise ModelError(
            f"cannot load {name}: not an ONNX model",
            because="it is an archive, such as torch.save and torch.export.save write; loading one can run code that is in it",
            hint="torch.onnx.export(model, args, 'model.onnx'), or serve the model itself: hotfuse.jit(model) "
            "with HOTFUSE_DEBUG=3 to 6 shows its graphs and kernels",
        )
    try:
        proto = ModelProto.FromString(data)
        return from_proto(proto, ExternalData(folder), name)
    except ModelError:
        raise
    except DecodeError as e:
        raise ModelError(
            f"cannot load {name}: not an ONNX model", because=str(e) or "the bytes do not parse", hint=_DAMAGED
        ) from e
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError, MemoryError) as e:
        raise ModelError(
            f"cannot load {name}: malformed model", because=f"{type(e).__name__}: {e}", hint=_DAMAGED
        ) from e


def _read(source: str | os.PathLike[str] | bytes) -> tuple[str, bytes, Path | None]:
    if isinstance(source, bytes):
        return "model", source, None
    path = Path(source)
    try:
        return path.name, path.read_bytes(), path.parent
    except (OSError, ValueError) as e:
        raise ModelError(f"cannot load {path}", because=str(e), hint="check the path") from e


def from_proto(proto: ModelProto, external: ExternalData, source: str = "model") -> OnnxModel:
    """Check and decode a parsed model."""
    if not proto.HasField("graph"):
        raise ModelError(
            f"cannot load {source}: no graph in it", because="the bytes do not describe an ONNX model", hint=_DAMAGED
        )
    reader = _OnnxReader(external, source)
    opsets = reader.opsets(proto.opset_import, "the model")
    if not opsets:
        raise ModelError(f"cannot load {source}: no opset is imported", hint=_DAMAGED)
    functions: dict[FunctionKey, OnnxFunction] = {}
    for f in proto.functions:
        fn = reader.function(f)
        key = (fn.domain, fn.name, fn.overload)
        if key in functions:
            raise ModelError(f"cannot load {source}: function {fn.name!r} is defined twice")
        functions[key] = fn
    _check_calls(functions, source)
    graph = widened(reader.graph(proto.graph, opsets, frozenset(), 0))
    for node in all_nodes(graph.nodes):
        if (node.domain, node.op, node.overload) not in functions:
            node_checks.check(node, opsets[node.domain])
    meta = ModelMeta(
        _lenient(proto.producer_name),
        _lenient(proto.producer_version),
        _lenient(proto.graph.name),
        _lenient(proto.domain),
        _lenient(proto.doc_string),
        _lenient(proto.graph.doc_string),
        proto.model_version if proto.HasField("model_version") else None,
        {_lenient(p.key): _lenient(p.value) for p in proto.metadata_props},
    )
    return OnnxModel(graph, opsets, functions, meta, proto.ir_version, source)


@dataclass(slots=True)
class _OnnxReader:
    """Decodes the parts of one model; keeps what error messages need."""

    external: ExternalData
    source: str

    def error(self, what: str, where: str, because: str = "", hint: str = "") -> ModelError:
        return ModelError(f"cannot load {self.source}: {what}", where=where, because=because, hint=hint)

    def text(self, where: str, *names: Any) -> None:
        """Refuse names that are not UTF-8, which protobuf hands out as bytes."""
        for name in names:
            if not isinstance(name, str):
                raise self.error("a name is not text", where, f"it is {name!r}", _DAMAGED)

    def opsets(self, imports: Iterable[Any], where: str) -> dict[str, int]:
        found: dict[str, int] = {}
        for entry in imports:
            self.text(where, entry.domain)
            domain = domain_of(entry.domain)
            if found.get(domain, entry.version) != entry.version:
                raise self.error(f"opset of domain {domain or 'ai.onnx'!r} imported twice", where)
            if not 1 <= entry.version <= 10_000:
                raise self.error(
                    f"opset version {entry.version} of domain {domain or 'ai.onnx'!r}", where, hint=_DAMAGED
                )
            found[domain] = int(entry.version)
        return {**_IMPLIED, **found} if found else found

    def function(self, f: FunctionProto, *, partial: bool = False) -> OnnxFunction:
        """A function; a partial one (an operator's body made for one node) may leave outputs out."""
        where = f"function {f.name!r}"
        self.text(where, f.name, f.domain, f.overload, *f.input, *f.output, *f.attribute)
        opsets = self.opsets(f.opset_import, where)
        scope = {n for n in f.input if n}
        if len(scope) != len(f.input):
            raise self.error("a function's input is named twice", where)
        nodes = self._nodes(f.node, opsets, scope, where, 0, in_function=True)
        outputs = tuple("" if partial and out not in scope else out for out in f.output)
        for out in outputs:
            if out and out not in scope:
                raise self.error(f"output {out!r} is never computed", where)
        defaults = {a.name: self._attr(a, opsets, scope, where, 0) for a in f.attribute_proto}
        return OnnxFunction(
            domain_of(f.domain),
            f.name,
            tuple(f.input),
            outputs,
            nodes,
            opsets,
            tuple(f.attribute),
            defaults,
            f.overload,
        )

    def graph(
        self, g: GraphProto, opsets: Mapping[str, int], outer: frozenset[str], depth: int, *, in_function: bool = False
    ) -> OnnxGraph:
        where = f"graph {g.name!r}"
        self.text(where, g.name, *(v.name for v in (*g.input, *g.output, *g.value_info, *g.initializer)))
        if depth > MAX_DEPTH:
            raise self.error("graphs nested too deeply", where, f"more than {MAX_DEPTH} levels")
        inputs = tuple(self._port(p, where) for p in g.input)
        names = {p.name for p in inputs}
        if len(names) != len(inputs):
            raise self.error("a graph's input is named twice", where)
        if "" in names:
            raise self.error("a graph's input has no name", where)
        initializers = self._initializers(g, where)
        scope = names | initializers.keys()
        nodes = self._nodes(g.node, opsets, scope, where, depth, outer=outer, in_function=in_function)
        for out in g.output:
            if out.name not in scope and out.name not in outer:
                raise self.error(f"output {out.name!r} is never computed", where)
        types = {v.name: self._type(v.type, where) for v in g.value_info}
        return OnnxGraph(g.name, inputs, tuple(self._port(p, where) for p in g.output), nodes, initializers, types)

    def _initializers(self, g: GraphProto, where: str) -> dict[str, Value]:
        found: dict[str, Value] = {}
        for t in g.initializer:
            if t.name in found or not t.name:
                raise self.error(f"initializer {t.name!r} is defined twice or has no name", where)
            found[t.name] = tensor_value(t, self.external, f"initializer {t.name!r} of {where}")
        for s in g.sparse_initializer:
            name = s.values.name
            if name in found or not name:
                raise self.error(f"initializer {name!r} is defined twice or has no name", where)
            found[name] = sparse_value(s, self.external, f"sparse initializer {name!r} of {where}")
        return found

    def _nodes(
        self,
        protos: Sequence[NodeProto],
        opsets: Mapping[str, int],
        scope: set[str],
        where: str,
        depth: int,
        *,
        outer: frozenset[str] = frozenset(),
        in_function: bool = False,
    ) -> tuple[OnnxNode, ...]:
        """Decode nodes, sorted where the file's order is none; `scope` grows by what they define."""
        nodes: list[OnnxNode] = []
        for index, n in enumerate(in_order(protos)):
            label = f"node {n.name or index!r} ({n.op_type}) of {where}"
            self.text(label, n.op_type, n.domain, n.name, n.overload, *n.input, *n.output)
            domain = domain_of(n.domain)
            if not n.op_type:
                raise self.error("a node has no operator", label)
            if domain not in opsets:
                raise self.error(
                    f"domain {domain or 'ai.onnx'!r} of operator {n.op_type} is not imported",
                    label,
                    "the file has no opset version for it",
                    "export the model again, with that opset import",
                )
            for i in n.input:
                if i and i not in scope and i not in outer:
                    raise self.error(
                        f"input {i!r} is used before it is computed",
                        label,
                        "no node, input or initializer gives it, or nodes wait for each other in a circle",
                        _DAMAGED,
                    )
            visible = (
                outer | scope
                if any(a.type in (AttributeProto.GRAPH, AttributeProto.GRAPHS) for a in n.attribute)
                else outer
            )
            attrs: dict[str, Any] = {}
            for a in n.attribute:
                self.text(label, a.name, a.ref_attr_name)
                if a.name in attrs or not a.name:
                    raise self.error(f"attribute {a.name!r} is given twice or has no name", label)
                attrs[a.name] = self._attr(a, opsets, visible, label, depth, in_function=in_function)
            for o in n.output:
                if o and o in scope:
                    raise self.error(
                        f"value {o!r} is computed twice", label, "each name may be defined only once", _DAMAGED
                    )
                if o:
                    scope.add(o)
            nodes.append(
                OnnxNode(n.op_type, domain, _strip(n.input), _strip(n.output), attrs, n.name, n.overload, index)
            )
        return tuple(nodes)

    def _attr(
        self,
        a: AttributeProto,
        opsets: Mapping[str, int],
        visible: Iterable[str],
        where: str,
        depth: int,
        *,
        in_function: bool = False,
    ) -> Any:
        if a.ref_attr_name:
            if not in_function:
                raise self.error(f"attribute {a.name!r} refers to a function's attribute outside of a function", where)
            return AttrRef(a.ref_attr_name)
        label = f"attribute {a.name!r} of {where}"
        match a.type:
            case AttributeProto.FLOAT:
                return a.f
            case AttributeProto.INT:
                return a.i
            case AttributeProto.STRING:
                return _text(a.s)
            case AttributeProto.TENSOR:
                return tensor_value(a.t, self.external, label)
            case AttributeProto.SPARSE_TENSOR:
                return sparse_value(a.sparse_tensor, self.external, label)
            case AttributeProto.GRAPH:
                return self.graph(a.g, opsets, frozenset(visible), depth + 1, in_function=in_function)
            case AttributeProto.FLOATS:
                return list(a.floats)
            case AttributeProto.INTS:
                return list(a.ints)
            case AttributeProto.STRINGS:
                return [_text(s) for s in a.strings]
            case AttributeProto.TENSORS:
                return [tensor_value(t, self.external, label) for t in a.tensors]
            case AttributeProto.GRAPHS:
                return [self.graph(g, opsets, frozenset(visible), depth + 1, in_function=in_function) for g in a.graphs]
            case AttributeProto.TYPE_PROTO:
                return self._type(a.tp, label)
            case AttributeProto.TYPE_PROTOS:
                return [self._type(t, label) for t in a.type_protos]
            case _:
                raise self.error(
                    f"attribute {a.name!r} is of an unknown kind", where, f"its type is {a.type}", _DAMAGED
                )

    def _port(self, v: ValueInfoProto, where: str) -> Port:
        return Port(v.name, self._type(v.type, f"{v.name!r} of {where}"))

    def _type(self, t: TypeProto, where: str, depth: int = 0) -> PortType:
        if depth > MAX_DEPTH:
            raise self.error("type nested too deeply", where)
        match t.WhichOneof("value"):
            case "tensor_type":
                return PortType("tensor", t.tensor_type.elem_type, self._shape(t.tensor_type, where))
            case "sparse_tensor_type":
                return PortType("sparse", t.sparse_tensor_type.elem_type, self._shape(t.sparse_tensor_type, where))
            case "sequence_type":
                return PortType("sequence", of=self._type(t.sequence_type.elem_type, where, depth + 1))
            case "optional_type":
                return PortType("optional", of=self._type(t.optional_type.elem_type, where, depth + 1))
            case "map_type":
                return PortType("map", t.map_type.key_type, of=self._type(t.map_type.value_type, where, depth + 1))
            case _:
                return PortType()

    def _shape(self, t: Any, where: str) -> tuple[DeclaredDim, ...] | None:
        if not t.HasField("shape"):
            return None
        dims: list[DeclaredDim] = []
        for d in t.shape.dim:
            match d.WhichOneof("value"):
                case "dim_value" if d.dim_value >= 0:
                    dims.append(int(d.dim_value))
                case "dim_value" if d.dim_value == -1:
                    dims.append(None)
                case "dim_value":
                    raise self.error("a declared size is negative", where, f"it is {d.dim_value}", _DAMAGED)
                case "dim_param":
                    self.text(where, d.dim_param)
                    dims.append(d.dim_param or None)
                case _:
                    dims.append(None)
        return tuple(dims)


def _lenient(text: Any) -> str:
    """Descriptions need not be UTF-8 to be shown; protobuf hands out such text as bytes."""
    return text if isinstance(text, str) else bytes(text).decode("utf-8", errors="replace")


def _strip(names: Iterable[str]) -> tuple[str, ...]:
    """Without trailing absent names."""
    found = list(names)
    while found and not found[-1]:
        found.pop()
    return tuple(found)


def _text(s: bytes) -> str | bytes:
    """Strings are UTF-8, but a few operators keep bytes in them."""
    try:
        return s.decode("utf-8")
    except UnicodeDecodeError:
        return s


def _check_calls(functions: Mapping[FunctionKey, OnnxFunction], source: str) -> None:
    """Functions must not call each other in a circle, nor nest without measure."""
    depth: dict[FunctionKey, int] = {}

    def visit(key: FunctionKey, path: tuple[FunctionKey, ...]) -> int:
        if key in path or len(path) > MAX_DEPTH:
            circle = " -> ".join(k[1] for k in (*path, key))
            raise ModelError(
                f"cannot load {source}: functions call each other in a circle or too deeply", because=circle
            )
        if key not in depth:
            called = {(n.domain, n.op, n.overload) for n in all_nodes(functions[key].nodes)} & functions.keys()
            depth[key] = 1 + max((visit(k, (*path, key)) for k in sorted(called)), default=0)
        return depth[key]

    for key in functions:
        visit(key, ())


def all_nodes(nodes: Iterable[OnnxNode]) -> Iterable[OnnxNode]:
    """Nodes and, after each, those of the graphs in its attributes."""
    for n in nodes:
        yield n
        for a in n.attrs.values():
            for g in a if isinstance(a, list) else [a]:
                if isinstance(g, OnnxGraph):
                    yield from all_nodes(g.nodes)


def function_from_proto(f: FunctionProto, name: str, opsets: Mapping[str, int]) -> OnnxFunction:
    """An operator's body as ONNX defines it; domains it does not import are those of the model."""
    for domain, version in opsets.items():
        if domain not in {domain_of(o.domain) for o in f.opset_import}:
            f.opset_import.add(domain=domain, version=version)
    return _OnnxReader(ExternalData(None), name).function(f, partial=True)
