"""Bytecode as an installed package has it: pip compiles what it installs, and an environment may forbid Python to do so later.

Without it every process of a measurement compiles our files, and its workers do once more: a third of what a second start takes.
A folder of bytecode for each home (`PYTHONPYCACHEPREFIX`) is no way out: torch's own files, which have theirs, were compiled again
in the first process of every home, which took as long as all else that it did.
"""

from __future__ import annotations

import compileall
from pathlib import Path

import hotfuse


def as_installed() -> None:
    """Compile what has changed of the package since it was compiled; raises OSError where bytecode cannot be written."""
    folder = Path(hotfuse.__file__).parent
    if not compileall.compile_dir(folder, quiet=2):
        raise OSError(f"bytecode cannot be written beside {folder}: figures would be of Python's compiler")
