"""TensorProto -> value, with every declared size checked against the bytes present before anything is allocated."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from onnx import SparseTensorProto, TensorProto, numpy_helper

from hotfuse.base.errors import ModelError
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.frontends.onnx.values import BY_CODE, Elem, Value, from_numpy

_STRING = 8
_EXTERNAL = 1
_MAX_DENSE = 1 << 31
"""Most elements a sparse initializer may grow to: its dense size is not backed by bytes in the file."""


@dataclass(frozen=True, slots=True)
class ExternalData:
    """Where external tensors may lie: the model's own folder, or nowhere for a model given as bytes."""

    folder: Path | None

    def read(self, proto: TensorProto, nbytes: int, where: str) -> bytes:
        """The bytes of an external tensor; the path must stay inside the folder."""
        entries = {e.key: e.value for e in proto.external_data}
        location = entries.get("location", "")
        if self.folder is None:
            raise ModelError(
                "tensor data lies in another file, but the model was given as bytes",
                where=where,
                because=f"its data is in {location!r}",
                hint="pass the model's path instead",
            )
        path = self._confined(location, where)
        offset, length = _number(entries, "offset", 0, where), _number(entries, "length", nbytes, where)
        if length != nbytes:
            raise ModelError(
                "external data of the wrong length",
                where=where,
                because=f"the tensor needs {nbytes} bytes and its entry says {length}",
            )
        try:
            size = path.stat().st_size
            if offset + nbytes > size:
                raise ModelError(
                    "external data file too short",
                    where=where,
                    because=f"{location!r} has {size} bytes, {offset + nbytes} are needed",
                    hint="the file may be truncated: copy it again",
                )
            with path.open("rb") as f:
                f.seek(offset)
                return f.read(nbytes)
        except OSError as e:
            raise ModelError(
                f"cannot read external data {location!r}",
                where=where,
                because=str(e),
                hint="keep the data file next to the model",
            ) from e

    def _confined(self, location: str, where: str) -> Path:
        assert self.folder is not None
        bad = (
            not location
            or "\0" in location
            or os.path.isabs(location)
            or ".." in Path(location.replace("\\", "/")).parts
        )
        root = Path(os.path.realpath(self.folder))
        path = root if bad else Path(os.path.realpath(root / location))
        if bad or not path.is_relative_to(root) or path == root:
            raise ModelError(
                "external data outside the model's folder",
                where=where,
                because=f"its path is {location!r}",
                hint="put the data file next to the model and name it by a relative path without links",
            )
        if not path.is_file():
            raise ModelError(
                f"external data {location!r} is missing",
                where=where,
                because="no such file",
                hint="keep the data file next to the model",
            )
        return path


def _number(entries: dict[str, str], key: str, default: int, where: str) -> int:
    text = entries.get(key, "")
    if not text:
        return default
    if not text.isdecimal() or len(text) > 18:
        raise ModelError(f"external data with a malformed {key}", where=where, because=f"{key} is {text!r}")
    return int(text)


def tensor_value(proto: TensorProto, external: ExternalData, where: str) -> Value:
    """Decode a tensor: torch's where it has the element type, NumPy otherwise."""
    elem = BY_CODE.get(proto.data_type)
    if elem is None:
        raise ModelError(
            f"tensor with unknown element type {proto.data_type}",
            where=where,
            hint="a newer `onnx` package may know it",
        )
    dims = [int(d) for d in proto.dims]
    if any(d < 0 for d in dims):
        raise ModelError("tensor with a negative size", where=where, because=f"its dims are {dims}")
    if len(dims) > 64:
        raise ModelError("tensor of absurd rank", where=where, because=f"it has {len(dims)} dims")
    count = math.prod(dims)
    if proto.HasField("segment"):
        raise ModelError("tensor stored in segments", where=where, because="segments were never specified")
    if proto.data_location == _EXTERNAL:
        if elem.code == _STRING:
            raise ModelError("external string tensor", where=where, because="strings cannot be stored as raw bytes")
        raw = external.read(proto, _nbytes(elem, count), where)
        return _from_raw(raw, elem, dims)
    if proto.HasField("raw_data"):
        raw = proto.raw_data
        if elem.code == _STRING:
            raise ModelError("string tensor with raw data", where=where)
        if len(raw) != (need := _nbytes(elem, count)):
            raise ModelError(
                "tensor data of the wrong length",
                where=where,
                because=f"{dims} of {elem.name} needs {need} bytes and {len(raw)} are present",
                hint="the file may be truncated or damaged: copy or export it again",
            )
        return _from_raw(raw, elem, dims)
    return _from_field(proto, elem, dims, count, where)


def _nbytes(elem: Elem, count: int) -> int:
    return -(-count * elem.bits // 8)


def _from_raw(raw: bytes, elem: Elem, dims: list[int]) -> Value:
    if elem.torch is None:
        proto = TensorProto(dims=dims, data_type=elem.code, raw_data=raw)
        return np.array(numpy_helper.to_array(proto))
    if not raw:
        return torch.empty(dims, dtype=elem.torch)
    return torch.frombuffer(bytearray(raw), dtype=elem.torch).reshape(dims)


def _from_field(proto: TensorProto, elem: Elem, dims: list[int], count: int, where: str) -> Value:
    have = len(getattr(proto, elem.field))
    if elem.code in (14, 15):
        need = 2 * count
    elif elem.bits and elem.bits < 6:
        need = -(-count * elem.bits // 8)
    else:
        need = count
    if have != need:
        raise ModelError(
            "tensor data of the wrong length",
            where=where,
            because=f"{dims} of {elem.name} needs {need} entries in {elem.field} and {have} are present",
            hint="the file may be truncated or damaged: copy or export it again",
        )
    if elem.code == _STRING:
        strings = np.array([s.decode("utf-8") for s in proto.string_data], dtype=object)
        return strings.reshape(dims)
    bare = TensorProto()
    bare.CopyFrom(proto)
    bare.ClearField("name")
    return from_numpy(np.asarray(numpy_helper.to_array(bare)).reshape(dims), copy=True)


def sparse_value(proto: SparseTensorProto, external: ExternalData, where: str) -> Value:
    """Decode a sparse tensor to its dense form, as every operator but a few wants it."""
    dims = [int(d) for d in proto.dims]
    count = math.prod(dims)
    if any(d < 0 for d in dims) or count > _MAX_DENSE or len(dims) > 64:
        raise ModelError("sparse tensor of absurd size", where=where, because=f"its dims are {dims}")
    values: Any = tensor_value(proto.values, external, where)
    indices: Any = tensor_value(proto.indices, external, where)
    if not isinstance(values, torch.Tensor) or not isinstance(indices, torch.Tensor) or indices.dtype != torch.int64:
        raise ModelError("sparse tensor with malformed values or indices", where=where)
    n = values.numel()
    if values.dim() != 1 or indices.shape not in ((n,), (n, len(dims))):
        raise ModelError(
            "sparse tensor whose indices do not match its values",
            where=where,
            because=f"{n} values, indices of shape {list(indices.shape)}",
        )
    if indices.dim() == 2:
        bounds = torch.tensor(dims, dtype=torch.int64)
        if n and bool(((indices < 0) | (indices >= bounds)).any()):
            raise ModelError("sparse tensor with an index out of range", where=where)
        strides = torch.tensor([math.prod(dims[i + 1 :]) for i in range(len(dims))], dtype=torch.int64)
        indices = (indices * strides).sum(1)
    if n and bool(((indices < 0) | (indices >= count)).any()):
        raise ModelError("sparse tensor with an index out of range", where=where)
    dense = torch.zeros(count, dtype=values.dtype)
    dense[indices] = values
    return dense.reshape(dims)
