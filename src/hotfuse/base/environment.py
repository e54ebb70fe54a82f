"""The environment that child processes start with."""

from __future__ import annotations

import os
import sys


def for_child(**more: str) -> dict[str, str]:
    """This process's environment and where it imports from, with some variables set.

    Read name by name: another thread of the serving process may take one away meanwhile, which `{**os.environ}` dies of.
    """
    here = {name: value for name in os.environ if (value := os.environ.get(name)) is not None}
    return {**here, "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path), **more}
