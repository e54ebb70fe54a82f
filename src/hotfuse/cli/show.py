"""`hotfuse show`: a model's graph at one stage of its way to a plan, as text or as JSON.

The graph is captured as a session would, from declared types alone: dims the model leaves open stay symbolic,
`--dim` fixes one. A PyTorch model is named as something to import (`cli.torch_models`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hotfuse.base.errors import CaptureError, InputError
from hotfuse.base.passes import verifying
from hotfuse.base.settings import Settings
from hotfuse.cli.cost_report import show_costs
from hotfuse.cli.device_kernels import show_device_kernels
from hotfuse.cli.kernels import show_kernels
from hotfuse.cli.output import heading, pairs, print_json, reports_errors, rows
from hotfuse.cli.torch_models import CapturedModel, capture_torch, is_torch_name, load_torch

if TYPE_CHECKING:
    from hotfuse.frontends.captured import Captured, TensorSpec
    from hotfuse.frontends.onnx.model_file import OnnxModel, Port
    from hotfuse.fusion.groups import Group
    from hotfuse.ir.graph import Graph


class StageName(StrEnum):
    """What can be shown."""

    PASSES = "passes"
    SPECIALIZATIONS = "specializations"
    IR = "ir"
    FREEZE = "freeze"
    NUMBERS = "numbers"
    LAYOUTS = "layouts"
    GROUPS = "groups"
    PARTITIONS = "partitions"
    COSTS = "costs"
    KERNELS = "kernels"
    TILE = "tile"
    LLVM = "llvm"
    ASM = "asm"
    TRITON = "triton"
    PTX = "ptx"


@reports_errors
def show(
    model: Annotated[str, typer.Argument(help="An ONNX model, or package.module:name of a PyTorch one (or of what returns it).")],
    stage: Annotated[StageName, typer.Option(help="Which stage.")] = StageName.IR,
    dims: Annotated[list[str] | None, typer.Option("--dim", help="name=size: fix a dynamic dim.")] = None,
    kernel: Annotated[
        str | None, typer.Option(help="Stages tile to ptx: only kernels whose name contains this, or the one of this number.")
    ] = None,
    inputs: Annotated[
        list[str] | None, typer.Option("--input", help="PyTorch: 2?x16 or 8x128:int64, one for each input; ? leaves a size open.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Show a model behind one pass of its way to a plan: `passes` lists them, `specializations` what plans may bet on."""
    with verifying():
        _show(model, stage, dims or [], kernel or "", inputs or [], as_json=as_json)


def _show(model: str, stage: StageName, dims: list[str], kernel: str, inputs: list[str], *, as_json: bool) -> None:
    if stage is StageName.PASSES:
        _show_passes(as_json=as_json)
        return
    if stage is StageName.SPECIALIZATIONS:
        _show_specializations(as_json=as_json)
        return
    sizes = pairs(dims, "--dim")
    if is_torch_name(model):
        if sizes:
            raise InputError("--dim is for ONNX models", hint="--input 2?x16 leaves the first size of a PyTorch model's input open")
        _show_stage(capture_torch(*load_torch(model, inputs)), stage, kernel, as_json=as_json)
        return
    if inputs:
        raise InputError("--input is for PyTorch models", hint="fix an ONNX model's sizes with --dim name=size")
    from hotfuse.frontends.onnx.domains.zipped_outputs import without_dictionaries
    from hotfuse.frontends.onnx.load import load

    loaded = without_dictionaries(load(Path(model)))[0]
    with _naming_open_dims(loaded.inputs):
        _show_stage(_capture(loaded, sizes), stage, kernel, as_json=as_json)


def _show_stage(model: CapturedModel, stage: StageName, kernel: str, *, as_json: bool) -> None:
    captured, shapes = model.captured, model.shapes
    if stage is StageName.IR:
        _show_ir(captured, as_json=as_json)
    elif stage in (StageName.FREEZE, StageName.NUMBERS, StageName.LAYOUTS, StageName.GROUPS):
        _show_graph(model, stage.value, as_json=as_json)
    elif stage is StageName.PARTITIONS:
        _show_partitions(captured.graph, shapes, as_json=as_json)
    elif stage is StageName.COSTS:
        show_costs(_graph_after(model, StageName.NUMBERS.value)[0], shapes, as_json=as_json)
    elif stage in (StageName.TRITON, StageName.PTX):
        show_device_kernels(captured.graph, shapes, stage.value, kernel, as_json=as_json)
    else:
        show_kernels(_graph_after(model, StageName.NUMBERS.value)[0], shapes, stage.value, kernel, as_json=as_json)


def _capture(loaded: OnnxModel, sizes: dict[str, str]) -> CapturedModel:
    """The graph as a worker captures it, and the sizes it was looked at with."""
    from hotfuse.compile.captured_answers import captured_from
    from hotfuse.compile.request_bodies import OnnxCapture
    from hotfuse.compile.workers import wire
    from hotfuse.compile.workers.service import ask
    from hotfuse.frontends.captured import CallSpec
    from hotfuse.frontends.onnx.interp import OnnxModule
    from hotfuse.frontends.ship import restore, ship

    specs = specs_of(loaded.inputs, sizes)
    request = OnnxCapture(wire.call_to_json(CallSpec(tuple(specs))))
    done = captured_from(ask(request, [ship(loaded).blob], Settings()))
    weights = {**OnnxModule(loaded).weights, **{k: restore(info) for k, info in done.constants.items()}}
    return CapturedModel(done, [s.shape for s in specs], weights)


def _graph_after(model: CapturedModel, name: str) -> tuple[Graph, tuple[Group, ...]]:
    """The graph behind a pass, with its groups where it has some."""
    from hotfuse.analysis.shapes import Mismatch, bind
    from hotfuse.compile.freeze import WeightedGraph
    from hotfuse.pipeline import graph_after

    graph = model.captured.graph
    sizes = bind(graph, model.shapes)
    if isinstance(sizes, Mismatch):
        raise InputError("the chosen sizes do not fit the graph", because=str(sizes), hint="fix dims with --dim")
    return graph_after(name, WeightedGraph(graph, model.weights), sizes, Settings())


def _show_graph(model: CapturedModel, name: str, *, as_json: bool) -> None:
    from hotfuse.ir.text import show as show_graph

    graph, groups = _graph_after(model, name)
    if as_json:
        grouped = [{"kind": g.kind, "nodes": list(g.nodes)} for g in groups]
        print_json({"stage": name, "graph": show_graph(graph), "groups": grouped})
        return
    typer.echo(show_graph(graph))
    for g in groups:
        typer.echo(f"# {g.kind}: {' '.join(f'%{v.name}' for i in g.nodes for v in graph.nodes[i].outs)}")


def _show_passes(*, as_json: bool) -> None:
    from hotfuse.base.passes import flattened
    from hotfuse.pipeline import BRANCHES

    found = [
        {"pass": p.name, "within": depth > 0, "takes": p.takes.__name__, "gives": p.gives.__name__, "runs in": p.where.value,
         "for": target}
        for target, steps in BRANCHES.items() for depth, p in flattened(steps)
    ]  # fmt: skip
    if as_json:
        print_json({"stage": "passes", "passes": found})
        return
    body = [(("  " if f["within"] else "") + str(f["pass"]), f["takes"], f["gives"], f["runs in"], f["for"]) for f in found]
    rows(("pass", "takes", "gives", "runs in", "for"), body)


def _show_specializations(*, as_json: bool) -> None:
    from hotfuse.specialize.table import ROWS

    if as_json:
        found = [{"name": r.name, "needs": r.needs, "proposes": r.proposes, "guard": r.guard, "when wrong": r.when_wrong,
                  "prior": r.prior} for r in ROWS]  # fmt: skip
        print_json({"stage": "specializations", "specializations": found})
        return
    for r in ROWS:
        print(f"{r.name} (wins {r.prior:.0%} of its races, before any was run)")
        for what, text in (("needs", r.needs), ("proposes", r.proposes), ("guard", r.guard), ("when wrong", r.when_wrong)):
            print(f"  {what + ':':<12}{text}")


@contextmanager
def _naming_open_dims(ports: Sequence[Port]) -> Generator[None]:
    """What cannot be done with a model whose sizes are open may be possible with some of them fixed."""
    try:
        yield
    except CaptureError as e:
        open_dims = ", ".join(_open_dims(ports))
        hint = f"fix some of its open dims with --dim name=size: {open_dims}" if open_dims else e.hint
        raise CaptureError(e.what, where=e.where, because=e.because, hint=hint, why=e.why) from e


def _dim_name(port: Port, axis: int) -> str:
    """Exporters write `?` for a dim they know nothing about: two of those need not be equal."""
    dim = (port.type.shape or ())[axis]
    return dim if isinstance(dim, str) and dim not in ("", "?") else f"{port.name}.{axis}"


def _open_dims(ports: Sequence[Port]) -> list[str]:
    """The names `--dim` takes, each dim that is not a number once."""
    found = [_dim_name(p, i) for p in ports for i, d in enumerate(p.type.shape or ()) if not _is_size(d)]
    return list(dict.fromkeys(found))


def _is_size(dim: object) -> bool:
    return isinstance(dim, int) and dim >= 0


def specs_of(ports: Sequence[Port], sizes: dict[str, str]) -> list[TensorSpec]:
    """What a call with these declared inputs looks like; open dims get sizes of their own and stay dynamic."""
    from hotfuse.frontends.captured import TensorSpec
    from hotfuse.frontends.onnx.elements import torch_dtype

    places = {f"{p.name}.{i}" for p in ports for i, d in enumerate(p.type.shape or ()) if not _is_size(d)}
    for name, text in sizes.items():
        if not text.isdecimal():
            raise InputError(f"--dim {name}={text} is not a size", hint=f"--dim {name}=64")
        if name not in places and name not in _open_dims(ports):
            names = ", ".join(_open_dims(ports)) or "the model has no dynamic dims"
            raise InputError(f"no input has a dynamic dim {name!r}", hint=names)
    chosen: dict[str, int] = {}
    specs: list[TensorSpec] = []
    for p in ports:
        if p.type.kind != "tensor" or p.type.shape is None:
            raise InputError(
                f"input {p.name!r} is declared as {p.type}" + ("" if p.type.kind != "tensor" else " of any rank"),
                because="a graph is captured for tensors of known rank",
                hint="run the model with hotfuse.InferenceSession, and see its explain()",
            )
        shape: list[int] = []
        dynamic: set[int] = set()
        for axis, dim in enumerate(p.type.shape):
            name, place = _dim_name(p, axis), f"{p.name}.{axis}"
            if isinstance(dim, int) and dim >= 0:
                shape.append(dim)
            elif (given := sizes.get(place, sizes.get(name))) is not None:
                shape.append(int(given))
            else:
                # Sizes of their own keep unrelated dims apart; a batch is small, the rest suits a network's strides.
                step = len(chosen)
                shape.append(chosen.setdefault(name, 2 + step if axis == 0 else 64 + 32 * step))
                dynamic.add(axis)
        stride = tuple(_strides(shape))
        specs.append(TensorSpec(tuple(shape), stride, torch_dtype(p.type.elem), "cpu", frozenset(dynamic)))
    return specs


def _strides(shape: Sequence[int]) -> list[int]:
    strides, step = [0] * len(shape), 1
    for axis in reversed(range(len(shape))):
        strides[axis] = step
        step *= max(shape[axis], 1)
    return strides


def _show_ir(captured: Captured, *, as_json: bool) -> None:
    from hotfuse.ir.dims import show as show_dim
    from hotfuse.ir.text import show as show_graph
    from hotfuse.ir.text import show_value

    graph = captured.graph
    text = show_graph(graph)
    if as_json:
        print_json(
            {
                "stage": "ir",
                "graph": text,
                "inputs": [show_value(v) for v in graph.inputs],
                "guards": [show_dim(g) for g in graph.guards],
                "nodes": len(graph.nodes),
                "params": len(graph.params),
                "notes": captured.notes,
            }
        )
        return
    typer.echo(text)
    for note in captured.notes:
        typer.echo(f"# {note}")


def _show_partitions(graph: Graph, shapes: list[tuple[int, ...]], *, as_json: bool) -> None:
    parts = partition_report(graph, shapes)
    if as_json:
        print_json({"stage": "partitions", "graph": graph.name, "nodes": len(graph.nodes), "partitions": parts})
        return
    heading(f"{graph.name}: {len(graph.nodes)} nodes in {len(parts)} partitions, costs at {_sizes(graph, shapes)}")
    body = [
        (p["index"], p["nodes"], p["begins"], p["device"], p["inputs"], p["outputs"], _si(p["flops"]), _si(p["bytes"]),
         ", ".join(f"{op} x{n}" for op, n in list(p["ops"].items())[:4]))
        for p in parts
    ]  # fmt: skip
    rows(("#", "nodes", "begins at", "device", "in", "out", "flops", "bytes", "ops"), body)


def _sizes(graph: Graph, shapes: list[tuple[int, ...]]) -> str:
    listed = [f"{v.name} {'x'.join(map(str, s)) or 'scalar'}" for v, s in zip(graph.inputs, shapes, strict=True)]
    return ", ".join(listed) or "no inputs"


def _si(number: int | None) -> str:
    """`1.2 M`; a figure that depends on data is `?`."""
    if number is None:
        return "?"
    value, units = float(number), ["", "k", "M", "G", "T"]
    while value >= 1000 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{value:.3g} {units[0]}".rstrip()


def partition_report(graph: Graph, shapes: Sequence[tuple[int, ...]]) -> list[dict[str, Any]]:
    """One plain dict per partition: size, why it begins, what crosses its border, what it costs at these sizes."""
    from hotfuse.analysis.cost import graph_cost
    from hotfuse.analysis.shapes import Mismatch, bind
    from hotfuse.ir.subgraph import extract
    from hotfuse.ops.table import packet
    from hotfuse.partition.cut import cut

    env = bind(graph, shapes)
    found: list[dict[str, Any]] = []
    for part in cut(graph, Settings().partition_nodes).parts:
        piece = extract(graph, range(part.first, part.last), f"{graph.name}.p{part.index}")
        cost = None if isinstance(env, Mismatch) else graph_cost(piece, env)
        ops = Counter(packet(n.op) for n in piece.nodes)
        found.append(
            {
                "index": part.index,
                "nodes": len(piece.nodes),
                "begins": part.cut.value,
                "device": part.device,
                "inputs": len(piece.inputs),
                "outputs": len(piece.outputs),
                "params": len(piece.params),
                "flops": cost.flops if cost else None,
                "bytes": cost.bytes if cost else None,
                "ops": dict(ops.most_common()),
            }
        )
    return found
