"""ONNX models: load, run at once, trace into the graph's vocabulary.

`OP_TABLES` lists the modules that fill the operator registry, one per family; importing this package fills it.
"""

from __future__ import annotations

from importlib import import_module

OP_TABLES: tuple[str, ...] = (
    "sequence",
    "ops_activation",
    "ops_attention",
    "ops_cast",
    "ops_contract",
    "ops_conv",
    "ops_generate",
    "ops_image",
    "ops_index",
    "ops_logical",
    "ops_loss",
    "ops_math",
    "ops_microsoft",
    "ops_microsoft_attention",
    "ops_microsoft_quant",
    "ops_ml",
    "ops_ml_trees",
    "ops_movement",
    "ops_norm",
    "ops_pad",
    "ops_pool",
    "ops_quant",
    "ops_recurrent",
    "ops_reduce",
    "ops_resize",
    "ops_select",
    "ops_signal",
    "ops_text",
)

for _name in OP_TABLES:
    import_module(f"hotfuse.frontends.onnx.{_name}")
