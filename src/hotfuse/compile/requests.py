"""What a worker can be asked for: one row per kind of request. Every captured graph leaves simplified and verified."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hotfuse.base.errors import InternalError
from hotfuse.compile import wire
from hotfuse.frontends.captured import Captured
from hotfuse.frontends.torch_module import capture_shipment
from hotfuse.ir.verify import verify
from hotfuse.simplify import simplify


def _torch(header: dict[str, Any], blobs: list[bytes]) -> Captured:
    return capture_shipment(blobs[0], wire.call_from_json(header["call"]))


def _onnx(header: dict[str, Any], blobs: list[bytes]) -> Captured:
    from hotfuse.frontends.onnx.capture import capture_shipment as capture_onnx  # a PyTorch user never pays for ONNX

    return capture_onnx(blobs[0], wire.call_from_json(header["call"]))


_KINDS: dict[str, Callable[[dict[str, Any], list[bytes]], Captured]] = {"torch": _torch, "onnx": _onnx}


def handle(header: dict[str, Any], blobs: list[bytes]) -> Captured:
    """Do what the request asks for."""
    kind = str(header.get("kind"))
    if kind not in _KINDS:
        raise InternalError(f"no request of kind {kind!r}")
    done = _KINDS[kind](header, blobs)
    graph, _ = simplify(verify(done.graph))
    used = {p.key for p in verify(graph).params}
    return replace(
        done, graph=graph, shared={k: n for k, n in done.shared.items() if k in used},
        constants={k: c for k, c in done.constants.items() if k in used},
    )
