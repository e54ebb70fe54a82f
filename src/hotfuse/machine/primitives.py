"""What oneDNN and torch's bridge to it keep of convolutions, bounded for processes that serve ONNX files.

torch's convolutions are compiled by oneDNN for every shape, up to half a megabyte each, and 1,024 of them are kept; torch's bridge
to it keeps 1,024 descriptions of them, some 20 KiB each, for every thread that calls. Under mixed sizes a text recognizer of 60
convolutions meets thousands of shapes: both answer next to nothing, and hold 280 MB, and 24 MB a thread. Programs that open an ONNX
session do not know that torch runs beneath it, so the session bounds both; who uses torch directly keeps what torch does. The
variables are read with the first convolution: after that this changes nothing.
"""

from __future__ import annotations

import os

COMPILED = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
DESCRIBED = "LRU_CACHE_CAPACITY"
CAPACITY = 128
"""Primitives: convolutions of equal shapes share one, and most of those over single pixels take none, so a network of 60
convolutions fits in three sizes, or three such networks do. Twice as many held some 30 MB more under mixed sizes. A description
whose primitive is gone saves little, so there are as many."""


def bound_primitive_caches() -> None:
    """Bound the caches, unless the environment says otherwise."""
    for variable in (COMPILED, DESCRIBED):
        os.environ.setdefault(variable, str(CAPACITY))
