"""Messages between a process and its workers: a JSON header and raw byte blobs, length first.

Answers hold text and bytes only, so a worker can never make its parent run code.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import Any, BinaryIO

from hotfuse.base.errors import InternalError
from hotfuse.frontends.captured import CallSpec, TensorSpec, dtype_name
from hotfuse.frontends.paths.reads import reads_from_json, reads_to_json
from hotfuse.ops.torch_dtypes import named_dtype

_MAX_HEADER = 64 << 20
Message = tuple[dict[str, Any], list[bytes]]


def send(pipe: BinaryIO, header: dict[str, Any], blobs: Sequence[bytes] = ()) -> None:
    """Write one message."""
    text = json.dumps({**header, "sizes": [len(b) for b in blobs]}).encode()
    for data in (struct.pack("<I", len(text)) + text, *blobs):
        left = memoryview(data)
        while left:  # an unbuffered pipe may take a part
            left = left[pipe.write(left) :]
    pipe.flush()


def receive(pipe: BinaryIO) -> Message:
    """Read one message; raises EOFError when the other side is gone."""
    (length,) = struct.unpack("<I", _exactly(pipe, 4))
    if length > _MAX_HEADER:
        raise InternalError(f"a message header of {length} bytes")
    header = json.loads(_exactly(pipe, length))
    return header, [_exactly(pipe, size) for size in header.pop("sizes")]


def _exactly(pipe: BinaryIO, size: int) -> bytes:
    parts: list[bytes] = []
    while size:
        part = pipe.read(size)
        if not part:
            raise EOFError
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def call_to_json(call: CallSpec) -> dict[str, Any]:
    """A call as JSON."""
    inputs = [
        {"shape": s.shape, "stride": s.stride, "dtype": dtype_name(s.dtype), "device": s.device,
         "dynamic": sorted(s.dynamic)}
        for s in call.inputs
    ]
    data = {"inputs": inputs, "grad_mode": call.grad_mode, "equal": call.equal, "across": call.across}
    data |= {"same": call.same} if call.same else {}
    return data if call.paths is None else {**data, "paths": [reads_to_json(p) for p in call.paths]}


def call_from_json(data: dict[str, Any]) -> CallSpec:
    """The inverse of `call_to_json`."""
    inputs = tuple(
        TensorSpec(tuple(s["shape"]), tuple(s["stride"]), named_dtype(s["dtype"]), s["device"], frozenset(s["dynamic"]))
        for s in data["inputs"]
    )
    equal = tuple(tuple((i, d) for i, d in dims) for dims in data["equal"])
    paths = tuple(map(reads_from_json, data["paths"])) if data.get("paths") is not None else None
    across, same = bool(data.get("across", False)), tuple(data.get("same", ()))
    return CallSpec(inputs, bool(data["grad_mode"]), equal, across, paths, same)
