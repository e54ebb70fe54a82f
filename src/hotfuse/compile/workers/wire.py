"""Messages between a process and its workers: a JSON header and raw byte blobs, length first.

Answers hold text and bytes only, so a worker can never make its parent run code.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import Any, BinaryIO

from hotfuse.base.errors import CaptureError, InternalError
from hotfuse.base.events import Why
from hotfuse.frontends.captured import (
    CallSpec,
    Captured,
    DeadDraw,
    TensorSpec,
    Warned,
    dtype_name,
    info_from,
    info_header,
)
from hotfuse.frontends.paths.reads import reads_from_json, reads_to_json
from hotfuse.ir.text import parse, show
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
    return data if call.paths is None else {**data, "paths": [reads_to_json(p) for p in call.paths]}


def call_from_json(data: dict[str, Any]) -> CallSpec:
    """The inverse of `call_to_json`."""
    inputs = tuple(
        TensorSpec(tuple(s["shape"]), tuple(s["stride"]), named_dtype(s["dtype"]), s["device"], frozenset(s["dynamic"]))
        for s in data["inputs"]
    )
    equal = tuple(tuple((i, d) for i, d in dims) for dims in data["equal"])
    paths = tuple(map(reads_from_json, data["paths"])) if data.get("paths") is not None else None
    return CallSpec(inputs, bool(data["grad_mode"]), equal, bool(data.get("across", False)), paths)


def answer_to_message(done: Captured) -> Message:
    """A captured graph as a message."""
    header = {
        "ok": True, "graph": show(done.graph), "shared": done.shared, "asks_grad_mode": done.asks_grad_mode,
        "notes": done.notes, "written": done.written, "returned": done.returned,
        "draws": [(d.op, d.shape, dtype_name(d.dtype)) for d in done.draws],
        "warned": [(w.text, w.category, w.filename, w.lineno, w.module) for w in done.warned], "logged": done.logged,
        "paths": done.paths,
        "constants": {k: info_header(c) for k, c in done.constants.items()},
    }
    return header, [c.data or b"" for c in done.constants.values()]


def error_to_message(e: CaptureError) -> Message:
    """A refusal as a message."""
    return {"ok": False, "error": e.to_dict(), "why": e.why.name}, []


def checked(message: Message) -> Message:
    """The message, or the refusal it carries raised."""
    header, _ = message
    if not header["ok"]:
        e = header["error"]
        raise CaptureError(e["what"], where=e["where"], because=e["because"], hint=e["try"], why=Why[header["why"]])
    return message


def answer_from_message(message: Message) -> Captured:
    """The captured graph, or the refusal raised."""
    header, blobs = checked(message)
    constants = {k: info_from(c, b) for (k, c), b in zip(header["constants"].items(), blobs, strict=True)}
    draws = tuple(DeadDraw(op, tuple(shape), named_dtype(dtype)) for op, shape, dtype in header.get("draws", ()))
    return Captured(parse(header["graph"]), dict(header["shared"]), constants, bool(header["asks_grad_mode"]),
                    tuple(header["notes"]), tuple(header["written"]), tuple((k, i) for k, i in header["returned"]), draws,
                    tuple(Warned(*w) for w in header.get("warned", ())), int(header.get("paths", 0)),
                    tuple((n, v) for n, v in header.get("logged", ())))
