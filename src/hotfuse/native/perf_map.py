"""Names for profilers: every function of generated code in the file that `perf` reads for code it finds in no library.

    7f31c2a41000 5c0 hotfuse linear+gelu 9x48 (encoder.layer.0.intermediate, and 11 more)
    7f31c2a41600 2e0 hotfuse linear+gelu 9x48 (encoder.layer.0.intermediate, and 11 more): task

An object's table of symbols says where in its code each function lies and how long it is; one address in this process tells
where that code was put. Lines are only ever added: code that is freed may leave its name behind until other code lies there.
"""

from __future__ import annotations

import os
import struct
import threading
from pathlib import Path

from hotfuse.base.errors import InternalError
from hotfuse.base.lazy_dataclass import dataclass

_lock = threading.Lock()
_SYMTAB, _FUNCTION = 2, 2


@dataclass(frozen=True, slots=True)
class CodeSymbol:
    """A function in object code."""

    name: str
    section: int
    at: int
    size: int


def place() -> Path:
    """Where `perf` looks for names of this process's code."""
    return Path("/tmp") / f"perf-{os.getpid()}.map"  # where the profiler looks


def functions(code: bytes) -> list[CodeSymbol]:
    """The functions of a 64-bit little-endian ELF object."""
    if code[:6] != b"\x7fELF\x02\x01":
        raise InternalError("object code in a format without a known table of symbols")
    (sections_at,) = struct.unpack_from("<Q", code, 0x28)
    size, count = struct.unpack_from("<HH", code, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", code, sections_at + i * size) for i in range(count)]
    found: list[CodeSymbol] = []
    for header in headers:
        _, kind, _, _, offset, length, link, _, _, entry = header
        if kind != _SYMTAB:
            continue
        names = headers[link][4]
        for at in range(offset, offset + length, entry):
            name, info, _, section, value, size_ = struct.unpack_from("<IBBHQQ", code, at)
            if info & 0xF == _FUNCTION and size_:
                end = code.index(b"\0", names + name)
                found.append(CodeSymbol(code[names + name : end].decode(errors="replace"), section, value, size_))
    return found


def note(code: bytes, symbol: str, address: int, label: str) -> int:
    """Add the functions of loaded code, of which `symbol` lies at `address`; how many."""
    known = functions(code)
    anchor = next((f for f in known if f.name == symbol), None)
    if anchor is None:
        return 0
    plain = " ".join(label.split())
    lines: list[str] = []
    for f in known:
        if f.section == anchor.section:
            part = "" if f is anchor else f": {f.name.removeprefix(symbol).strip('._') or f.name}"
            lines.append(f"{address - anchor.at + f.at:x} {f.size:x} hotfuse {plain}{part}\n")
    with _lock, place().open("a", encoding="utf-8") as file:
        file.write("".join(lines))
    return len(lines)
