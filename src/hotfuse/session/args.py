"""What a session says about its model: `NodeArg`s and metadata, as ONNX Runtime words them.

Output shapes are completed by shape inference where the file leaves them open, which happens when they are first
asked for, since most applications never do.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from google.protobuf.message import DecodeError
from onnx import GraphProto, ModelProto, ValueInfoProto, shape_inference

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.frontends.onnx.model_file import DeclaredDim, OnnxModel, Port, PortType

_GENERATED = "unk__"
"""How shape inference names the sizes it makes up."""
_NO_VERSION = 2**63 - 1
"""What ONNX Runtime shows for a file that gives no version."""
_MAX_KEPT_BYTES = 4096
"""Constants up to this many bytes are kept for shape inference: shapes, axes and the like."""


@dataclass(frozen=True, slots=True)
class NodeArg:
    """An input or output: a name, a type string and a list of sizes (a number, a name or None)."""

    name: str
    type: str
    shape: list[int | str | None]


@dataclass(frozen=True, slots=True)
class ModelMetadata:
    """What the file says about itself."""

    producer_name: str
    graph_name: str
    domain: str
    description: str
    graph_description: str
    version: int
    custom_metadata_map: dict[str, str]


def metadata(model: OnnxModel) -> ModelMetadata:
    """A model's metadata in ONNX Runtime's words."""
    m = model.meta
    version = _NO_VERSION if m.version is None else m.version
    return ModelMetadata(m.producer_name, m.graph_name, m.domain, m.description, m.graph_description, version,
                         dict(m.custom))


def tensor_shape(declared: PortType) -> tuple[DeclaredDim, ...]:
    """The sizes ONNX Runtime shows: a tensor's, or those of the tensor in an optional; sequences show none."""
    inner = declared.of if declared.kind == "optional" and declared.of is not None else declared
    return inner.shape or () if inner.kind in ("tensor", "sparse") else ()


def fix_dims(port: Port, sizes: Mapping[str, int]) -> Port:
    """The port with symbolic sizes replaced by numbers."""
    return Port(port.name, _fix(port.type, sizes)) if sizes else port


def _fix(declared: PortType, sizes: Mapping[str, int]) -> PortType:
    shape = declared.shape
    if shape is not None:
        shape = tuple(sizes.get(d, d) if isinstance(d, str) else d for d in shape)
    return PortType(declared.kind, declared.elem, shape, _fix(declared.of, sizes) if declared.of else None)


def node_args(ports: Iterable[Port]) -> list[NodeArg]:
    """ONNX Runtime's description of inputs or outputs."""
    return [NodeArg(p.name, str(p.type), list(tensor_shape(p.type))) for p in ports]


def is_open(port: Port) -> bool:
    """Whether shape inference could say more than the file does."""
    inner = port.type.of if port.type.kind == "optional" and port.type.of is not None else port.type
    return inner.kind == "tensor" and (inner.shape is None or any(not isinstance(d, int) for d in inner.shape))


def complete(
    ports: tuple[Port, ...], source: str | os.PathLike[str] | bytes, sizes: Mapping[str, int]
) -> tuple[Port, ...]:
    """Output ports with their open sizes filled in by ONNX's shape inference, where it knows them."""
    if not any(is_open(p) for p in ports):
        return ports
    try:
        proto = ModelProto.FromString(source if isinstance(source, bytes) else Path(source).read_bytes())
        _shrink(proto.graph)
        for value in (*proto.graph.input, *proto.graph.output):
            _override(value, sizes)
        inferred = shape_inference.infer_shapes(proto, data_prop=True)
    except (OSError, DecodeError, shape_inference.InferenceError, ValueError, RuntimeError):
        # The declared shapes stand: they are true as far as they go, and describing a model must not fail.
        return ports
    found = {v.name: v for v in inferred.graph.output}
    return tuple(_merge(p, found.get(p.name)) for p in ports)


def _shrink(graph: GraphProto) -> None:
    """Drop large constants' data: inference needs only small ones, and would copy all of them."""
    for t in graph.initializer:
        if t.ByteSize() > _MAX_KEPT_BYTES:
            for field in ("raw_data", "float_data", "int32_data", "int64_data", "double_data", "uint64_data"):
                t.ClearField(field)


def _override(value: ValueInfoProto, sizes: Mapping[str, int]) -> None:
    for dim in value.type.tensor_type.shape.dim if value.type.HasField("tensor_type") else ():
        if dim.dim_param in sizes:
            dim.dim_value = sizes[dim.dim_param]


def _merge(port: Port, inferred: ValueInfoProto | None) -> Port:
    if inferred is None or port.type.kind != "tensor" or not inferred.type.tensor_type.HasField("shape"):
        return port
    dims: list[DeclaredDim] = []
    for d in inferred.type.tensor_type.shape.dim:
        if d.HasField("dim_value"):
            dims.append(int(d.dim_value) if d.dim_value >= 0 else None)
        else:
            dims.append(d.dim_param if d.dim_param and not d.dim_param.startswith(_GENERATED) else None)
    declared = port.type.shape
    if declared is not None and len(declared) == len(dims):
        dims = [new if isinstance(new, int) else old or new for old, new in zip(declared, dims, strict=True)]
    elif declared is not None:
        return port
    return Port(port.name, PortType(port.type.kind, port.type.elem, tuple(dims)))
