"""ONNX models: load, run at once, trace into the graph's vocabulary.

`OP_TABLES` lists the modules that fill the operator registry, one per family; importing this package fills it.
"""

from __future__ import annotations

from importlib import import_module

OP_TABLES: tuple[str, ...] = (
    "sequence",
    "ops.activation",
    "ops.attention",
    "ops.cast",
    "ops.contract",
    "ops.conv",
    "ops.generate",
    "ops.image",
    "ops.index",
    "ops.logical",
    "ops.loss",
    "ops.math",
    "domains.microsoft",
    "domains.microsoft_attention",
    "domains.microsoft_nhwc",
    "domains.microsoft_quant",
    "domains.microsoft_blocks",
    "domains.ml",
    "domains.ml_svm",
    "domains.ml_trees",
    "domains.zipped_outputs",
    "ops.movement",
    "ops.norm",
    "ops.older",
    "ops.pad",
    "ops.pool",
    "ops.quant",
    "ops.recurrent",
    "ops.reduce",
    "ops.resize",
    "ops.select",
    "ops.signal",
    "ops.strings",
)

for _name in OP_TABLES:
    import_module(f"hotfuse.frontends.onnx.{_name}")
