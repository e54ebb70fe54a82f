"""The system's permission for a process to use the tiles of a matrix unit (AMX).

Tiles are 8 KiB of state for every thread, so Linux hands them out only to processes that ask, and ends others at their first use
of one. A permission holds for all threads of a process, is passed on to its forks, and is lost with a new program. The probe asks
for it in its throw-away process; a process that links code with tiles asks for it itself.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import sys

_ARCH_PRCTL, _REQ_XCOMP_PERM, _XTILEDATA = 158, 0x1023, 18


@functools.cache
def refused() -> str:
    """Why this process may not use tiles; empty if it may. Asked once: a permission is never taken back."""
    if sys.platform != "linux" or platform.machine().lower() not in ("x86_64", "amd64"):
        return "only Linux on x86-64 has tiles to give"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(ctypes.c_long(_ARCH_PRCTL), ctypes.c_long(_REQ_XCOMP_PERM), ctypes.c_long(_XTILEDATA)) != 0:
        return f"the system refuses tiles to this process: {os.strerror(ctypes.get_errno())}"
    return ""
