"""Our own linker: code refers to constants, data, itself and others, and what is damaged or unknown is refused."""

from __future__ import annotations

import ctypes
import gc
import re
import struct
import sys
from pathlib import Path

import pytest

from hotfuse.base.errors import InternalError
from hotfuse.native import link
from hotfuse.native.function import entered, entry_symbols, with_entries
from hotfuse.native.jit import compile_object, load_object
from hotfuse.native.target import host

pytestmark = pytest.mark.skipif("x86_64" not in host().triple, reason="LLVM links elsewhere")

TEXT = """
@table = internal constant [4 x i64] [i64 10, i64 20, i64 30, i64 40]
@counter = internal global i64 5
@zeros = internal global [8 x i64] zeroinitializer
@shared = external global i64
declare i64 @labs(i64)
declare i64 @given(i64)
define internal i64 @inner(i64 %x) noinline { %y = mul i64 %x, 3  ret i64 %y }
define i64 @all(i64 %i) {
  %c0 = load i64, ptr @counter
  %c1 = add i64 %c0, 1
  store i64 %c1, ptr @counter
  %at = getelementptr [4 x i64], ptr @table, i64 0, i64 %i
  %t = load i64, ptr %at
  %z = load i64, ptr @zeros
  %s = load i64, ptr @shared
  %n = sub i64 0, %t
  %a = call i64 @labs(i64 %n)
  %g = call i64 @given(i64 %i)
  %m = call i64 @inner(i64 %c1)
  %r1 = add i64 %a, %m
  %r2 = add i64 %r1, %s
  %r3 = add i64 %r2, %g
  %r4 = add i64 %r3, %z
  ret i64 %r4
}
define double @scaled(double %x) { %y = fmul double %x, 0x3FF3C0CA428C59FB  ret double %y }
define i64 @choose(i64 %x) {
  switch i64 %x, label %d [i64 0, label %a i64 1, label %b i64 2, label %c i64 3, label %e i64 4, label %f]
a: ret i64 7
b: ret i64 1
c: ret i64 9
e: ret i64 4
f: ret i64 2
d: ret i64 -1
}
"""
CALL = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)


def code() -> bytes:
    return compile_object(TEXT, host()).code


def linked() -> tuple[link.LinkedImage, list[object]]:
    given = CALL(lambda i: 1000 * i)
    shared = ctypes.c_int64(100_000)
    symbols = {"given": ctypes.cast(given, ctypes.c_void_p).value or 0, "shared": ctypes.addressof(shared)}
    return link.link(code(), ["all", "scaled", "choose"], symbols), [given, shared]


def test_code_reaches_constants_data_itself_and_others() -> None:
    image, keep = linked()
    every = CALL(image["all"])
    assert [every(i) for i in range(4)] == [10 + 18 + 100_000, 20 + 21 + 101_000, 30 + 24 + 102_000, 40 + 27 + 103_000]
    assert ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_double)(image["scaled"])(2.0) == 2 * 1.2345678901234567
    assert [CALL(image["choose"])(i) for i in range(-1, 6)] == [-1, 7, 1, 9, 4, 2, -1]
    assert keep


def test_no_page_is_writable_and_executable_and_all_go() -> None:
    image, _keep = linked()

    def pages(at: int) -> list[str]:
        found = re.findall(r"^([0-9a-f]+)-([0-9a-f]+) (\S+)", Path("/proc/self/maps").read_text(), re.MULTILINE)
        return [rights for low, high, rights in found if int(low, 16) <= at < int(high, 16)]

    at = image["all"]
    assert pages(at) == ["r-xp"]
    image.close()
    assert pages(at) == []
    other, _keep = linked()
    at = other["choose"]
    del other
    gc.collect()
    assert pages(at) == []


def test_what_is_missing_is_named() -> None:
    with pytest.raises(InternalError, match="nothing is called 'given'"):
        link.link(code(), ["all"], {"shared": 4096})
    with pytest.raises(InternalError, match="does not define nowhere"):
        link.link(compile_object("define void @f() { ret void }", host()).code, ["f", "nowhere"], {})


def test_relocations_that_are_not_known_are_refused() -> None:
    data = bytearray(code())
    (sections,) = struct.unpack_from("<Q", data, 0x28)
    size, count = struct.unpack_from("<HH", data, 0x3A)
    for i in range(count):
        _, kind, _, _, at, _, _, info, _, _ = struct.unpack_from("<IIQQQQIIQQ", data, sections + i * size)
        flags = struct.unpack_from("<IIQ", data, sections + info * size)[2]
        if kind == 4 and flags & 4:  # of code
            struct.pack_into("<I", data, at + 8, 23)
            break
    with pytest.raises(InternalError, match="relocations of type 23 are not known"):
        link.link(bytes(data), ["all"], {"given": 4096, "shared": 4096})


@pytest.mark.parametrize("length", [0, 5, 63, 64, 100, 400])
def test_what_is_cut_short_is_refused(length: int) -> None:
    with pytest.raises(InternalError, match="does not link"):
        load_object(code()[:length], ["all"], {"given": 4096, "shared": 4096})


_ADDED = """define i64 @hf_added(i64 %a, i32 %b, float %c, ptr %to) {
  %wide = sext i32 %b to i64
  %sum = add i64 %a, %wide
  store float %c, ptr %to
  ret i64 %sum
}
define void @hf_cleared(ptr %to) {
  store float 0.0, ptr %to
  ret void
}"""


def test_entries_read_numbers_and_refuse_what_is_none() -> None:
    names = ("hf_added", "hf_cleared")
    code = load_object(compile_object(with_entries(_ADDED, names), host()).code, [f"py_{n}" for n in names], entry_symbols())
    added, cleared = (entered(code, name) for name in names)
    cell = ctypes.c_float(0.0)
    at = ctypes.addressof(cell)
    before = sys.getrefcount(None)
    assert added(-(2**40), -7, 1.5, at) == -(2**40) - 7
    assert cell.value == 1.5
    assert added(2, True, 3, at) == 3 and cell.value == 3.0
    for _ in range(1000):
        assert cleared(at) is None
    assert cell.value == 0.0
    assert abs(sys.getrefcount(None) - before) < 500, "None has a reference for each that is handed out"
    cell.value = 9.0
    for given in ((1, 2, 3.0), (1, 2, 3.0, at, 5), ("1", 2, 3.0, at), (1, 2, "3", at), (1, 2.0, 3.0, at), (1, 2, 3.0, None)):
        with pytest.raises(TypeError):
            added(*given)
    assert cell.value == 9.0, "a call with a wrong argument is not begun"


def test_entries_of_what_is_not_there_are_a_fault() -> None:
    with pytest.raises(InternalError, match="hf_other"):
        with_entries(_ADDED, ["hf_other"])
