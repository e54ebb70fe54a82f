"""Object code of the few pieces that a serving process needs for itself, compiled without LLVM in that process.

    text --kept?--> bytes                 an earlier process had it compiled (`keep_in`)
         --compiler process--> bytes      otherwise: `native.compiler`, which ends when it has had nothing to do for a while

Entries, guards and stubs are a dozen small texts in the life of a process. For these LLVM took 75 MB of it for good. Who compiles
anyway (workers, tools that do everything in the call) does it in place, as does a process whose compiler process cannot be had:
that is counted.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import IO

from hotfuse.base.environment import for_child
from hotfuse.base.errors import InternalError
from hotfuse.base.faults import faults
from hotfuse.cache.address import Address, digest, machine_text, toolchain, versions
from hotfuse.cache.folder import Folder
from hotfuse.machine.cores import unbind
from hotfuse.native import jit
from hotfuse.native.target import CpuTarget, host

ANSWER_S = 60.0
"""Longest wait for one answer, on however busy a machine."""
_LENGTH = struct.Struct("<qI")
"""Before an answer: 0, or 1 where it is a reason; and how long it is."""

_lock = threading.Lock()
_place: Callable[[], Folder | None] | None = None
_in_place = False
_process: subprocess.Popen[bytes] | None = None


def keep_in(place: Callable[[], Folder | None]) -> None:
    """Where object code is kept for later processes; the last call decides."""
    global _place
    _place = place


def compile_in_place() -> None:
    """This process compiles all the time: LLVM is loaded into it."""
    global _in_place
    _in_place = True


def helper_object(text: str, target: CpuTarget | None = None) -> bytes:
    """Object code of a module's text, for this machine unless another one is asked for."""
    target = target or host()
    if _in_place or "hotfuse.native.codegen" in sys.modules:
        return jit.compile_object(text, target).code
    folder = None if _place is None else _place()
    basis = {**versions(), "toolchain": toolchain(), "machine": machine_text(target.features)}
    address = Address("helper", digest(text), basis)
    if folder is not None and (found := folder.get(address)) is not None and len(found[1]) == 1:
        return found[1][0]
    try:
        code = _asked(text, target)
    except (OSError, EOFError, TimeoutError) as e:
        faults.note("compiling outside of the serving process", e)
        return jit.compile_object(text, target).code
    if folder is not None:
        folder.put(address, {}, [code], target.features)
    return code


def _asked(text: str, target: CpuTarget) -> bytes:
    request = json.dumps({
        "text": text, "triple": target.triple, "cpu": target.cpu, "features": target.features,
        "vl_bytes": target.vl_bytes, "name": target.name,
    }).encode()  # fmt: skip
    with _lock:
        for last in (False, True):
            child = _running()
            assert child.stdin is not None and child.stdout is not None
            try:
                child.stdin.write(len(request).to_bytes(8, "little") + request)
                child.stdin.flush()
                refused, length = _LENGTH.unpack(_read(child.stdout, _LENGTH.size))
                answer = _read(child.stdout, length)
                break
            except (OSError, EOFError, TimeoutError):
                _forget()
                if last:  # one that was about to end is not asked again
                    raise
        else:
            raise InternalError("a loop that ends without an answer")
    if refused:
        raise InternalError("generated LLVM IR does not compile", because=answer.decode(errors="replace"))
    return answer


def _running() -> subprocess.Popen[bytes]:
    global _process
    if _process is None or _process.poll() is not None:
        _forget()  # its pipes would stay open until something collects them, with a warning
        _process = subprocess.Popen(
            [sys.executable, "-m", "hotfuse.native.compiler"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=for_child()
        )
        unbind(_process.pid)
        threading.Thread(target=_process.wait, name="hotfuse-compiler", daemon=True).start()  # it ends by itself: no zombie stays
    return _process


def _read(source: IO[bytes], size: int) -> bytes:
    found = b""
    while len(found) < size:
        if not select.select([source], [], [], ANSWER_S)[0]:
            raise TimeoutError(f"no answer within {ANSWER_S:g} s")
        more = os.read(source.fileno(), size - len(found))
        if not more:
            raise EOFError("the compiler process has ended")
        found += more
    return found


def _forget() -> None:
    """End the compiler process, whatever state it is in."""
    global _process
    child, _process = _process, None
    if child is not None:
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        child.kill()
        child.wait()


def _after_fork() -> None:
    """In a forked child: the compiler process is the parent's, and who held the lock is there, too."""
    global _lock, _process
    _lock, _process = threading.Lock(), None


os.register_at_fork(after_in_child=_after_fork)
