"""Names and places that generated code and the process that loads it agree on."""

from __future__ import annotations

from hotfuse.tile.program import Kernel

BODY, LAYOUT, TEAM_TIMES = "hf_run_body", "hf_run_layout", "hf_run_team_times"
HEAD = 3
"""Buffers before the inputs of a run: table, arena, control."""
CONTROL_HEAD = 2


def symbol(kernel: Kernel) -> str:
    """The name of a kernel's function in object code."""
    return symbol_of(kernel.name)


def symbol_of(name: str) -> str:
    """The symbol for a kernel's name, never a name of C: a kernel called `sin` would replace the function that its code calls."""
    return "kernel." + "".join(ch if ch.isalnum() or ch in "_." else "_" for ch in name)


def outcomes_at(partitions: int) -> int:
    """Where in a run's `control` the outcomes of branches begin."""
    return CONTROL_HEAD + partitions + 1
