"""ONNX models: load, run at once, trace into the graph's vocabulary.

`OP_TABLES` lists the modules that fill the operator registry, one per family; importing this package fills it.
"""

from __future__ import annotations

from importlib import import_module

OP_TABLES: tuple[str, ...] = (
    "sequence",
    "ops_activation",
    "ops_cast",
    "ops_contract",
    "ops_conv",
    "ops_generate",
    "ops_index",
    "ops_logical",
    "ops_math",
    "ops_movement",
    "ops_norm",
    "ops_pad",
    "ops_pool",
    "ops_quant",
    "ops_reduce",
    "ops_select",
    "ops_text",
)

for _name in OP_TABLES:
    import_module(f"hotfuse.frontends.onnx.{_name}")
