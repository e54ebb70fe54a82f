"""Getting the probes: compiled by the worker, once per process, linked here.

Loading takes a fraction of a millisecond each; compiling takes some two hundred in all, which is the worker's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hotfuse.backends.llvm.probe import Probes, compile_all
from hotfuse.base.settings import Settings
from hotfuse.compile.workers.service import ask


def handle(_header: dict[str, Any], _blobs: Sequence[bytes]) -> tuple[dict[str, Any], list[bytes]]:
    """The request of kind `probes`."""
    made = compile_all()
    return {"ok": True, "names": list(made)}, list(made.values())


def fetch(settings: Settings) -> Probes:
    """Have the worker compile the probes, and link them; from a background job."""
    header, codes = ask({"kind": "probes"}, [], settings)
    return Probes(dict(zip(header["names"], codes, strict=True)))
