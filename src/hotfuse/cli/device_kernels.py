"""`hotfuse show --stage triton|ptx`: the kernels that a model's groups get on a GPU, at the sizes it was looked at with.

No device is needed: kernels are written and compiled as a worker does, in the tiling that is tried first. Whether one serves is
decided by its trial on a device, which `explain()` shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import typer

from hotfuse.base.errors import HotfuseError, InputError
from hotfuse.cli.output import print_json

if TYPE_CHECKING:
    from hotfuse.ir.graph import Graph

ARCH = "90"
"""What code is shown for."""


def show_device_kernels(graph: Graph, shapes: Sequence[tuple[int, ...]], stage: str, wanted: str, *, as_json: bool) -> None:
    """Print each distinct group's kernel, or why it has none."""
    from hotfuse.backends import registry

    if stage == "ptx" and (why := registry.device_kernels().unavailable()):
        raise InputError("kernels for a GPU cannot be compiled here", because=why)
    found = [k for k in _kernels(graph, shapes, stage) if wanted in k["name"] or wanted == str(k["number"])]
    if not found:
        if wanted:
            raise InputError(f"no kernel has {wanted!r} in its name", hint="all of them are shown without --kernel")
        raise InputError("no part of the graph could be a kernel on a GPU", hint="--stage groups shows what it consists of")
    if as_json:
        print_json({"stage": stage, "kernels": found})
        return
    for k in found:
        typer.echo(f"# kernel {k['number']}, {k['name']}: {k['uses']} x, {k['about']}\n{k['text']}")


def _kernels(graph: Graph, shapes: Sequence[tuple[int, ...]], stage: str) -> list[dict[str, Any]]:
    from hotfuse.analysis.shapes import Mismatch, bind
    from hotfuse.compile.device import units
    from hotfuse.compile.request_bodies import DevicePlanRequest
    from hotfuse.ir.normal import normalized
    from hotfuse.ir.subgraph import extract
    from hotfuse.ir.text import parse, show
    from hotfuse.specialize.recurring_sizes import at_sizes

    sizes = bind(graph, shapes)
    if isinstance(sizes, Mismatch):
        raise InputError("the chosen sizes do not fit the graph", because=str(sizes), hint="fix dims with --dim")
    answer, _ = units.plan(DevicePlanRequest(show(at_sizes(graph, dict(sizes)))))
    ordered, at = parse(answer.graph), 0
    groups: dict[str, list[Any]] = {}
    for count, kind in answer.groups:
        if kind != "library":
            piece = normalized(extract(ordered, range(at, at + count), "group"))
            groups.setdefault(show(piece), [piece, 0])[1] += 1
        at += count
    return [{"number": i, "uses": uses, **_one(piece, stage)} for i, (piece, uses) in enumerate(groups.values())]


def _one(piece: Graph, stage: str) -> dict[str, Any]:
    from hotfuse.backends import registry
    from hotfuse.backends.device_code import GpuTarget
    from hotfuse.compile.device.units import launch_shape
    from hotfuse.lower.gpu import gpu_tilings, lower_gpu
    from hotfuse.ops.table import packet

    ops = "_".join(dict.fromkeys(packet(n.op).partition(".")[2] for n in piece.nodes))
    try:
        target = GpuTarget("cuda", ARCH)
        tiling = gpu_tilings(piece, bulk=target.bulk)[0]
        kernel, how = lower_gpu(piece, tiling).kernel, launch_shape(tiling, tiling.stages, tf32=False)
        text, programs = registry.device_kernels().source(kernel, target, how)
        if stage != "triton":
            text = registry.device_kernels().compile(kernel, target, how).texts["ptx"]
    except HotfuseError as e:
        return {"name": ops, "about": f"no kernel: {e.because or e.what}", "text": ""}
    return {"name": ops, "about": f"{programs} programs of {tiling}", "text": text}
