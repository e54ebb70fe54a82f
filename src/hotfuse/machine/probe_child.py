"""The throw-away process of `machine.probe`: reads a list of code snippets, runs each in a child of its own.

It is started by path, without site packages, so nothing here may import anything but the standard library. A
snippet that traps, spins or crashes ends its child and nothing else.

    stdin   [{"code": hex, "tiles": bool}, ...]
    stdout  [{"returned": int | null, "signal": int}, ...]
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import resource
import signal
import struct
import sys

_ARCH_PRCTL, _REQ_XCOMP_PERM, _XTILEDATA = 158, 0x1023, 18
_SECONDS = 5
_NO_PERMISSION = 255


def _tile_config() -> bytes:
    """Palette 1, tiles 0 to 2 of 16 rows by 64 bytes."""
    columns = struct.pack("<16H", *([64] * 3 + [0] * 13))
    rows = struct.pack("<16B", *([16] * 3 + [0] * 13))
    return struct.pack("<BB14x", 1, 0) + columns + rows


def _execute(code: bytes, *, tiles: bool) -> int:
    """Run machine code in this process; what it returned, or 255 where the kernel refuses tile state."""
    libc = ctypes.CDLL(None, use_errno=True)
    if tiles and libc.syscall(_ARCH_PRCTL, _REQ_XCOMP_PERM, _XTILEDATA) != 0:
        return _NO_PERMISSION
    page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    page.write(code)
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    # Turning the page executable only now keeps write and execute apart, and makes the kernel
    # synchronize the instruction cache where the architecture needs that.
    if libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(mmap.PAGESIZE), mmap.PROT_READ | mmap.PROT_EXEC) != 0:
        raise OSError(ctypes.get_errno(), "cannot make a page executable")
    scratch = ctypes.create_string_buffer(_tile_config(), 64)
    return int(ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(address)(ctypes.addressof(scratch)))


def _trial(code: bytes, *, tiles: bool) -> dict[str, int | None]:
    """Fork, run, and report how the child ended."""
    pid = os.fork()
    if pid == 0:
        # A child that hangs is ended by its alarm, and one that fails must not run its parent's code.
        status = 254
        try:
            signal.alarm(_SECONDS)
            status = _execute(code, tiles=tiles) & 0xFF
        finally:
            os._exit(status)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return {"returned": None, "signal": os.WTERMSIG(status)}
    return {"returned": os.WEXITSTATUS(status), "signal": 0}


def main() -> None:
    """Answer the list on standard input."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    trials = json.load(sys.stdin)
    json.dump([_trial(bytes.fromhex(t["code"]), tiles=bool(t["tiles"])) for t in trials], sys.stdout)


if __name__ == "__main__":
    main()
