"""LLVM's name of the CPU we run on. Importing this module loads LLVM."""

from __future__ import annotations

import functools

import llvmlite.binding as llvm


@functools.cache
def host_cpu() -> str:
    """The name to schedule for; it never allows an instruction."""
    return str(llvm.get_host_cpu_name())
