"""The later stages of `hotfuse show`: which kernels a graph gets, and each of them as tile assembly, LLVM IR or machine code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import typer

from hotfuse.base.errors import InputError
from hotfuse.base.settings import Settings
from hotfuse.cli.output import heading, print_json, rows

if TYPE_CHECKING:
    from hotfuse.ir.graph import Graph


def show_kernels(graph: Graph, shapes: Sequence[tuple[int, ...]], stage: str, wanted: str, *, as_json: bool) -> None:
    """Print the table of kernels (`kernels`), or their code at one stage."""
    header = _made(graph, shapes)
    kernels: list[dict[str, Any]] = header["kernels"]
    if stage == "kernels":
        _table(header, as_json=as_json)
        return
    from hotfuse.stages import kernel_text
    from hotfuse.tile.text import parse

    every = [(number, parse(d["kernel"]), d["ops"]) for number, d in enumerate(kernels)]
    chosen = [k for k in every if (str(k[0]) == wanted if wanted.isdecimal() else wanted in k[1].name)]
    if not every:
        raise InputError("no part of the graph has a kernel", hint="--stage kernels says what stays with the library, and why")
    if not chosen:
        names = ", ".join(f"{number} {k.name}" for number, k, _ in every)
        what = f"there is no kernel number {wanted}" if wanted.isdecimal() else f"no kernel has {wanted!r} in its name"
        raise InputError(what, hint=names)
    backend = Settings().backend
    shown = [{"number": n, "name": k.name, "ops": ops, "text": kernel_text(k, stage, backend)} for n, k, ops in chosen]
    if as_json:
        print_json({"stage": stage, "kernels": shown})
        return
    mark = ";" if stage == "llvm" else "#"
    for k in shown:
        typer.echo(f"{mark} kernel {k['number']}, {k['name']}: {k['ops']}\n{k['text']}")


def _made(graph: Graph, shapes: Sequence[tuple[int, ...]]) -> dict[str, Any]:
    """What workers make of the graph, at the sizes it was looked at with, as the settings of the environment say."""
    from hotfuse.analysis.shapes import Mismatch, bind
    from hotfuse.compile.fetch import begin
    from hotfuse.ir.text import show

    sizes = bind(graph, shapes)
    if isinstance(sizes, Mismatch):
        raise InputError("the chosen sizes do not fit the graph", because=str(sizes), hint="fix dims with --dim")
    compilation = begin(show(graph), sizes, Settings())
    compilation.run()
    return compilation.message()[0]


def _parts(body: dict[str, Any]) -> list[list[int]]:
    """The parts of a graph and, in place of one that branches, those of its branches."""
    found: list[list[int]] = []
    for i, part in enumerate(body["parts"]):
        inside: list[dict[str, Any]] = body["branches"].get(str(i), [])
        found += [p for b in inside for p in _parts(b)] if inside else [part]
    return found


def _table(header: dict[str, Any], *, as_json: bool) -> None:
    from hotfuse.tile.text import parse

    parts = _parts(header)
    uses = [kernel for _, _, kernel in parts]
    found: list[dict[str, Any]] = [
        {
            "number": i, "name": parse(k["kernel"]).name, "ops": k["ops"], "uses": uses.count(i), "compile_s": k["compile_s"],
            "kernel_us": k["kernel_us"], "library_us": k["library_us"], "sizes": _sizes(header["kernels"], i),
        }
        for i, k in enumerate(header["kernels"])
    ]  # fmt: skip
    library = sum(last - first for first, last, kernel in parts if kernel < 0)
    if as_json:
        print_json({"stage": "kernels", "kernels": found, "library_nodes": library, "notes": header["notes"]})
        return
    heading(f"{len(found)} kernels; {library} nodes stay with the library; times are the workers'")
    body = [
        (k["number"], k["name"], k["uses"], f"{k['compile_s'] * 1e3:.0f}", _us(k["kernel_us"]), _us(k["library_us"]), k["ops"])
        for k in found
    ]
    rows(("#", "kernel", "uses", "compile ms", "us", "library us", "ops"), body)
    for k in found:
        if k["sizes"]:
            typer.echo(f"# {k['number']} {k['name']}: {k['sizes']}")
    for note in header["notes"]:
        typer.echo(f"# {note}")


def _sizes(kernels: Sequence[dict[str, Any]], number: int) -> str:
    """For which sizes a kernel serves, where its group has several; empty for one that serves all."""
    from hotfuse.compile.variants.variant_table import VariantTable

    tables = (VariantTable.from_json(k.get("variants")) for k in kernels)
    return next((str(t) for t in tables if t is not None and number in t.kernels), "")


def _us(number: float | None) -> str:
    """A kernel for some sizes only has no time at the call's."""
    return "-" if number is None else f"{number:.1f}"
