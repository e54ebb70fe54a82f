"""Outputs that are lists of dictionaries: what a classical model's last node makes of a tensor of scores.

Exporters of classifiers end a file with `ZipMap`, which turns each row of scores into a dictionary from labels to numbers. No graph
holds such values, so a file with one would stay in the interpreter for good. It is served without that node instead, and a
session makes the dictionaries of what the call gave:

    labels, ZipMap(scores)        served as  labels, scores
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from hotfuse.base.errors import ModelError
from hotfuse.frontends.onnx.model_file import OnnxModel, OnnxNode, Port
from hotfuse.frontends.onnx.registry import Ctx, onnx_op
from hotfuse.frontends.onnx.values import Value

Labels = Sequence[int] | Sequence[str]
ZippedOutputs = Mapping[int, Labels]
"""Places of outputs that are served as the scores of their rows, and what the numbers of a row belong to."""

_ML = "ai.onnx.ml"


def without_dictionaries(model: OnnxModel) -> tuple[OnnxModel, ZippedOutputs]:
    """A model whose outputs are the tensors that its outermost `ZipMap` nodes read, and which outputs those are."""
    made = {n.outputs[0]: n for n in model.graph.nodes if n.op == "ZipMap" and n.domain == _ML and n.inputs[0]}
    found = {k: made[p.name] for k, p in enumerate(model.graph.outputs) if p.name in made}
    if not found:
        return model, {}
    outputs = [Port(found[k].inputs[0]) if k in found else p for k, p in enumerate(model.graph.outputs)]
    elsewhere = {name for n in model.graph.nodes for name in n.inputs}  # nobody reads a dictionary but other odd nodes
    gone = {n.outputs[0] for n in found.values()} - elsewhere
    nodes = tuple(n for n in model.graph.nodes if not (n.outputs and n.outputs[0] in gone))
    graph = replace(model.graph, outputs=tuple(outputs), nodes=nodes)
    return replace(model, graph=graph), {k: _labels(n) for k, n in found.items()}


def _labels(node: OnnxNode) -> Labels:
    ints, strings = node.attrs.get("classlabels_int64s"), node.attrs.get("classlabels_strings")
    if bool(ints) == bool(strings):
        raise ModelError("ZipMap without labels", where=f"node {node.title!r}",
                         because="one of classlabels_int64s and classlabels_strings has to be given")  # fmt: skip
    return ints or strings or ()


def zipped(scores: torch.Tensor, labels: Labels) -> list[dict[int, float]] | list[dict[str, float]]:
    """A dictionary for each row of scores; a single row may come without its own axis."""
    rows = scores if scores.dim() == 2 else scores.reshape(1, -1)
    if scores.dim() not in (1, 2) or rows.shape[1] != len(labels):
        raise ValueError(f"ZipMap of {list(scores.shape)} numbers to {len(labels)} labels")
    found: list[list[float]] = rows.tolist()
    return [dict(zip(labels, row, strict=True)) for row in found]  # type: ignore[arg-type]


def with_dictionaries(results: Sequence[Value], outputs: ZippedOutputs) -> list[Value]:
    """The results of a model that `without_dictionaries` made, as the file's own outputs."""
    return [zipped(v, outputs[k]) if k in outputs else v for k, v in enumerate(results)]


@onnx_op("ZipMap", domain=_ML)
def zip_map(
    ctx: Ctx, x: torch.Tensor, *, classlabels_int64s: Sequence[int] = (), classlabels_strings: Sequence[str] = ()
) -> list[dict[int, float]] | list[dict[str, float]]:
    """Where it is not a file's outermost: in a branch, or of a function's result."""
    return zipped(x, classlabels_int64s or classlabels_strings)
