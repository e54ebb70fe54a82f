"""Object code linked into this process without LLVM: a process that only runs generated code loads no compiler.

    bytes --read--> sections, symbols, relocations --place--> one mapping: code | constants and addresses | data --> LinkedImage

LLVM's linker brings LLVM with it, 75 MB of a serving process. What our code generator emits needs little of it: code of the large,
position-independent model refers to its own constants by their distance from a table of addresses, and to everything else through
that table. The relocations known here are those, and their short relatives; any other is refused by its number, as is what does not
fit its field. Pages are never writable and executable at once. Frames of generated code are not registered for unwinding: its
functions raise nothing, and what they call reports errors as values.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import struct
import weakref
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from typing import Any

from hotfuse.base.errors import InternalError
from hotfuse.base.lazy_dataclass import dataclass

X86_64 = 62
_MAGIC = b"\x7fELF\x02\x01"
_RELOCATABLE = 1
_HEADER = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_RELOCATION = struct.Struct("<QQq")
_NOBITS, _SYMTAB, _RELA, _REL = 8, 2, 4, 9
_UNWIND = 0x7000_0001
_WRITE, _ALLOC, _EXECUTE = 1, 2, 4
_UNDEFINED, _ABSOLUTE, _RESERVED = 0, 0xFFF1, 0xFF00
_WEAK = 2
_TABLE = "_GLOBAL_OFFSET_TABLE_"
_PAGE = mmap.PAGESIZE


class Relocation(IntEnum):
    """What is written where code refers to something: S symbol, A addend, P place, G its entry in the table, T the table."""

    ABSOLUTE_64 = 1  # S + A
    PC32 = 2  # S + A - P
    PLT32 = 4  # the same: nothing is called through stubs
    GOTPCREL = 9  # G + A - P
    PC64 = 24  # S + A - P
    GOTOFF64 = 25  # S + A - T
    GOT64 = 27  # G + A - T
    GOTPCREL64 = 28  # G + A - P
    GOTPC64 = 29  # T + A - P
    PLTOFF64 = 31  # S + A - T
    GOTPCRELX = 41  # G + A - P
    REX_GOTPCRELX = 42  # G + A - P


_KNOWN = frozenset(int(r) for r in Relocation)
_THROUGH_TABLE = frozenset({
    Relocation.GOTPCREL, Relocation.GOT64, Relocation.GOTPCREL64, Relocation.GOTPCRELX, Relocation.REX_GOTPCRELX,
})  # fmt: skip
_FROM_PLACE = frozenset({
    Relocation.PC32, Relocation.PLT32, Relocation.GOTPCREL, Relocation.PC64, Relocation.GOTPCREL64, Relocation.GOTPC64,
    Relocation.GOTPCRELX, Relocation.REX_GOTPCRELX,
})  # fmt: skip
_FROM_TABLE = frozenset({Relocation.GOTOFF64, Relocation.GOT64, Relocation.PLTOFF64})
_SHORT = frozenset({
    Relocation.PC32, Relocation.PLT32, Relocation.GOTPCREL, Relocation.GOTPCRELX, Relocation.REX_GOTPCRELX,
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Section:
    kind: int
    flags: int
    at: int
    size: int
    link: int
    info: int
    align: int
    entry: int

    @property
    def placed(self) -> bool:
        return bool(self.flags & _ALLOC) and self.kind != _UNWIND


@dataclass(frozen=True, slots=True)
class _Symbol:
    name: str
    section: int
    value: int
    weak: bool


@dataclass(frozen=True, slots=True)
class _Reference:
    section: int
    at: int
    kind: Relocation
    symbol: int
    addend: int


def machine_of(code: bytes) -> int:
    """Which machine an ELF object is for, by ELF's number."""
    if code[:6] != _MAGIC or len(code) < 64:
        raise InternalError("object code does not link", because="it is no 64-bit little-endian ELF object")
    return int.from_bytes(code[18:20], "little")


class _Object:
    """An object file, read; every offset in it is checked before it is used."""

    def __init__(self, code: bytes) -> None:
        self.code = code
        kind, machine = struct.unpack_from("<HH", code, 16)
        if (kind, machine) != (_RELOCATABLE, X86_64):
            raise _refused("it is not a relocatable object for x86-64")
        (at,) = struct.unpack_from("<Q", code, 0x28)
        size, count = struct.unpack_from("<HH", code, 0x3A)
        if size != _HEADER.size or at + size * count > len(code):
            raise _refused("its table of sections is cut short")
        self.sections = [self._section(at + i * size) for i in range(count)]
        self.symbols = self._symbols()
        self.references = list(self._references())

    def _section(self, at: int) -> _Section:
        _, kind, flags, _, offset, size, link, info, align, entry = _HEADER.unpack_from(self.code, at)
        if kind != _NOBITS and offset + size > len(self.code):
            raise _refused("a section is cut short")
        if align > _PAGE:
            raise _refused(f"a section is aligned to {align} bytes")
        return _Section(kind, flags, offset, size, link, info, max(1, align), entry)

    def _symbols(self) -> list[_Symbol]:
        table = next((s for s in self.sections if s.kind == _SYMTAB), None)
        if table is None:
            return []
        if table.link >= len(self.sections):
            raise _refused("its symbols have no names")
        strings = self.sections[table.link]
        names = self.code[strings.at : strings.at + strings.size]
        found: list[_Symbol] = []
        for name, info, _, section, value, _ in _SYMBOL.iter_unpack(self.code[table.at : table.at + table.size]):
            if name >= len(names) or (section >= len(self.sections) and section < _RESERVED):
                raise _refused("a symbol points outside")
            found.append(_Symbol(names[name : names.index(b"\0", name)].decode(), section, value, info >> 4 == _WEAK))
        return found

    def _references(self) -> Iterator[_Reference]:
        for table in self.sections:
            if table.kind == _REL:
                raise _refused("its relocations have no addends")
            if table.kind != _RELA or table.info >= len(self.sections) or not self.sections[table.info].placed:
                continue
            for at, info, addend in _RELOCATION.iter_unpack(self.code[table.at : table.at + table.size]):
                number, symbol = info & 0xFFFF_FFFF, info >> 32
                if number not in _KNOWN:
                    raise _refused(f"relocations of type {number} are not known")
                kind = Relocation(number)
                if symbol >= len(self.symbols) or at + (4 if kind in _SHORT else 8) > self.sections[table.info].size:
                    raise _refused("a relocation points outside")
                yield _Reference(table.info, at, kind, symbol, addend)


def _refused(why: str) -> InternalError:
    return InternalError("object code does not link", because=why)


@functools.cache
def _libc() -> Any:
    lib = ctypes.CDLL(None, use_errno=True)
    lib.mmap.restype = ctypes.c_void_p
    lib.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    lib.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    lib.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    lib.dlsym.restype = ctypes.c_void_p
    lib.dlsym.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
    return lib


def _mapped(size: int) -> int:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    at = _libc().mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    if at in (None, ctypes.c_void_p(-1).value):
        raise InternalError("no memory for object code", because=f"errno {ctypes.get_errno()} for {size} bytes")
    return int(at)


def _up(n: int, to: int) -> int:
    return -(-n // to) * to


class LinkedImage:
    """Code in this process: addresses by exported name. Closing it, or letting it go, unmaps the code."""

    def __init__(self, base: int, size: int, addresses: Mapping[str, int]) -> None:
        self._addresses = addresses
        self._unmap = weakref.finalize(self, _libc().munmap, base, size)
        self._unmap.atexit = False  # a thread may be in it when the interpreter ends

    def __getitem__(self, name: str) -> int:
        """Where a function or a variable starts."""
        return self._addresses[name]

    def close(self) -> None:
        """Unmap the code; no call may be in it."""
        self._unmap()


def link(code: bytes, names: Sequence[str], symbols: Mapping[str, int]) -> LinkedImage:
    """Link an object for x86-64; what it refers to is among `symbols`, or a function of the process."""
    obj = _Object(code)
    offsets, ends = _layout(obj)
    entries = {r.symbol: i for i, r in enumerate({r.symbol: r for r in obj.references if r.kind in _THROUGH_TABLE}.values())}
    table = _up(ends[1], 8)
    constants = table + 8 * max(1, len(entries))
    data = _up(constants, _PAGE)
    size = max(_PAGE, _up(data + ends[2], _PAGE))
    base = _mapped(size)
    try:
        places = {i: base + (data if obj.sections[i].flags & _WRITE else 0) + at for i, at in offsets.items()}
        where = functools.partial(_address, obj, places, symbols, base + table)
        for i, at in places.items():
            section = obj.sections[i]
            if section.kind != _NOBITS and section.size:
                ctypes.memmove(at, code[section.at : section.at + section.size], section.size)
        known: dict[int, int] = {}
        for r in obj.references:
            if r.symbol not in known:
                known[r.symbol] = where(r.symbol)
        for symbol, i in entries.items():
            ctypes.c_uint64.from_address(base + table + 8 * i).value = known[symbol]
        for r in obj.references:
            _write(places[r.section] + r.at, r, known[r.symbol], base + table, entries.get(r.symbol, 0))
        exported = _exported(obj, names, places)
        executable = _up(ends[0], _PAGE)
        _protect(base, executable, mmap.PROT_READ | mmap.PROT_EXEC)
        _protect(base + executable, data - executable, mmap.PROT_READ)
    except BaseException:
        _libc().munmap(base, size)
        raise
    return LinkedImage(base, size, exported)


def _layout(obj: _Object) -> tuple[dict[int, int], tuple[int, int, int]]:
    """Where sections lie: code from the beginning, constants on the pages behind it, data from a beginning of its own; and where
    each of the three ends."""
    offsets: dict[int, int] = {}

    def place(wanted: int, at: int) -> int:
        for i, s in enumerate(obj.sections):
            if s.placed and (s.flags & (_WRITE | _EXECUTE)) == wanted:
                offsets[i] = _up(at, s.align)
                at = offsets[i] + s.size
        return at

    if any(s.placed and s.flags & _WRITE and s.flags & _EXECUTE for s in obj.sections):
        raise _refused("a section is writable and executable")
    code = place(_EXECUTE, 0)
    return offsets, (code, place(0, _up(code, _PAGE)), place(_WRITE, 0))


def _address(obj: _Object, places: Mapping[int, int], symbols: Mapping[str, int], table: int, number: int) -> int:
    """What a symbol stands for."""
    symbol = obj.symbols[number]
    if symbol.section == _ABSOLUTE:
        return symbol.value
    if symbol.section != _UNDEFINED:
        if symbol.section not in places:
            raise _refused(f"{symbol.name or 'a symbol'} lies in a section that is not loaded")
        return places[symbol.section] + symbol.value
    if symbol.name == _TABLE:
        return table
    found = symbols.get(symbol.name) or _libc().dlsym(None, symbol.name.encode())
    if not found and not symbol.weak:
        raise _refused(f"nothing is called {symbol.name!r}")
    return int(found or 0)


def _write(place: int, r: _Reference, symbol: int, table: int, entry: int) -> None:
    value = table + 8 * entry if r.kind in _THROUGH_TABLE else table if r.kind is Relocation.GOTPC64 else symbol
    value += r.addend
    if r.kind in _FROM_PLACE:
        value -= place
    elif r.kind in _FROM_TABLE:
        value -= table
    if r.kind not in _SHORT:
        ctypes.c_uint64.from_address(place).value = value & (1 << 64) - 1
    elif -(1 << 31) <= value < 1 << 31:
        ctypes.c_int32.from_address(place).value = value
    else:
        raise _refused(f"a {r.kind.name} relocation reaches further than its 32 bits")


def _exported(obj: _Object, names: Sequence[str], places: Mapping[int, int]) -> dict[str, int]:
    defined = {s.name: places[s.section] + s.value for s in obj.symbols if s.name and s.section in places}
    if missing := [n for n in names if n not in defined]:
        raise _refused(f"it does not define {', '.join(missing)}")
    return {n: defined[n] for n in names}


def _protect(at: int, size: int, allowed: int) -> None:
    if size and _libc().mprotect(at, size, allowed):
        raise InternalError("object code may not run here", because=f"the system refuses it: errno {ctypes.get_errno()}")
