"""The environment that child processes start with."""

from __future__ import annotations

import os
import sys

BINDING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
"""Variables that tell OpenMP runtimes to bind threads to cores: meant for calls, not for a process on one thread beside them."""


def for_child(**more: str) -> dict[str, str]:
    """This process's environment and where it imports from, with some variables set and its threads not bound to cores.

    Read name by name: another thread of the serving process may take one away meanwhile, which `{**os.environ}` dies of.
    """
    here = {n: value for n in os.environ if n not in BINDING and (value := os.environ.get(n)) is not None}
    return {**here, "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path), **more}
