"""oneDNN's cache of compiled primitives, bounded for processes that serve ONNX files.

torch's convolutions are compiled by oneDNN for every shape, a quarter of a megabyte each, and 1,024 of them are kept. Under mixed
sizes a text recognizer of 60 convolutions meets thousands of shapes: the cache holds 280 MB and answers next to nothing. Programs
that open an ONNX session do not know that torch runs beneath it, so the session bounds the cache; who uses torch directly keeps
what torch does. oneDNN reads the variable when it compiles its first primitive: after that this changes nothing.
"""

from __future__ import annotations

import os

VARIABLE = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
CAPACITY = 128
"""Primitives: convolutions of equal shapes share one, and most of those over single pixels take none, so a network of 60
convolutions fits in three sizes, or three such networks do. Twice as many held some 30 MB more under mixed sizes."""


def bound_primitive_cache() -> None:
    """Bound the cache, unless the environment says otherwise."""
    os.environ.setdefault(VARIABLE, str(CAPACITY))
