"""The process that compiles for a serving one: `python -m hotfuse.native.compiler`, asked by `native.toolchain`.

    request  8 bytes of length, then JSON: the text and its target
    answer   0, a length and object code; or 1, a length and why there is none

It ends when its parent does, or when nobody has asked for a while: LLVM takes a hundred megabytes.
"""

from __future__ import annotations

import json
import os
import select
import struct
import sys

from hotfuse.base.errors import HotfuseError
from hotfuse.native.jit import compile_object
from hotfuse.native.target import CpuTarget

IDLE_S = 3.0
_LENGTH = struct.Struct("<qI")


def _read(source: int, size: int) -> bytes | None:
    """So many bytes; None where nobody asks any more."""
    found = b""
    while len(found) < size:
        if not select.select([source], [], [], IDLE_S)[0]:
            return None
        more = os.read(source, size - len(found))
        if not more:
            return None
        found += more
    return found


def _answer(request: bytes) -> bytes:
    asked = json.loads(request)
    target = CpuTarget(asked["triple"], asked["cpu"], tuple(asked["features"]), int(asked["vl_bytes"]), asked["name"])
    try:
        code = compile_object(asked["text"], target).code
    except HotfuseError as e:
        why = str(e.because or e.what).encode()
        return _LENGTH.pack(1, len(why)) + why
    return _LENGTH.pack(0, len(code)) + code


def main() -> None:
    """Answer until nobody asks."""
    while (length := _read(0, 8)) is not None:
        request = _read(0, int.from_bytes(length, "little"))
        if request is None:
            return
        left = memoryview(_answer(request))
        try:
            while left:
                left = left[os.write(1, left) :]
        except BrokenPipeError:  # the process that asked has ended
            return


if __name__ == "__main__":
    sys.exit(main())
