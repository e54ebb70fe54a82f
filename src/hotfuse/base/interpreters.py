"""Sub-interpreters are refused in words: torch and NumPy, which everything here stands on, cannot be loaded in one.

Without this an import there ends in a `SystemError` of garbled text, or crashes the process.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

MODULES = ("_interpreters", "_xxsubinterpreters")
"""Where Python says which interpreter this is: since 3.13, and before."""


def refuse_sub_interpreters() -> None:
    """Raise ImportError in any interpreter but the process's first."""
    for name in MODULES:
        try:
            found: Any = import_module(name)
        except ImportError:
            continue
        if _number(found.get_current()) != _number(found.get_main()):
            raise ImportError(
                "hotfuse cannot be imported in a sub-interpreter\n"
                "  because: torch and NumPy, which it needs, can be loaded once in a process\n"
                "  try:     threads of the main interpreter, or processes (fork and spawn both work)"
            )
        return


def _number(interpreter: Any) -> int:
    """Python 3.13 tells beside the id where an interpreter comes from."""
    return int(interpreter[0] if isinstance(interpreter, tuple) else interpreter)
