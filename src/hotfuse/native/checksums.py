"""Checksums of memory, and a rotating comparison with them: what notices writes that leave no trace in torch.

    row      a piece of memory: address, bytes, checksum
    chunk    some rows: what one step compares
    table    chunks in order; every step compares the next one, on whichever thread; a pass is one step of every chunk

A step says `SAME`, `WRITTEN` (a row has another checksum), or `OVERDUE` (no pass has begun and ended within the limit). A change
inside one word of four bytes always changes a row's checksum, since every step of it is a bijection; of others one in four billion
does not.
Rotation moves the highest bit of a word, which the multiplication alone would leave there: two changed signs would cancel.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from hotfuse.base.once import once
from hotfuse.native.function import python_symbols
from hotfuse.native.jit import Loaded, load_object
from hotfuse.native.toolchain import helper_object

SAME, WRITTEN, OVERDUE = range(3)
ROW_WORDS = 3
_COUNT, _STARTS, _ROWS, _TICKET, _VERIFIED, _BEGAN, _LIMIT, _LARGE, _FOUND, _SHIFT = range(10)
"""Words of a table. `_VERIFIED` is when the last pass that ended had begun; `_FOUND` what a step found that nobody has
asked for yet: until then every step says the same. One step in 2 ** `_SHIFT` compares."""
UNLOCKED_BYTES = 64 << 10
"""Bytes of a chunk from which on a step lets the interpreter lock go."""
_LANES, _WIDTH, _ROTATE = 4, 16, 13
_ODD = (2654435761, 2246822519, 3266489917, 668265263)
_ODD64, _ROTATE64 = 11400714785074694791, 29
_CLOCK = 6 if sys.platform.startswith("linux") else time.CLOCK_MONOTONIC
"""On Linux the coarse one, on the same axis: it is read in every call."""


def _signed(n: int, bits: int) -> int:
    return n - (1 << bits) if n >> (bits - 1) else n


def _checksum_text() -> str:
    vector = f"<{_WIDTH} x i32>"
    step, block = 4 * _WIDTH, 4 * _WIDTH * _LANES
    odd = [f"<{', '.join([f'i32 {_signed(o, 32)}'] * _WIDTH)}>" for o in _ODD]
    rotate = f"<{', '.join([f'i32 {_ROTATE}'] * _WIDTH)}>"
    phis = "".join(f"  %a{k} = phi {vector} [{odd[k]}, %entry], [%m{k}, %blocks]\n" for k in range(_LANES))
    body = "".join(
        f"  %p{k} = getelementptr i8, ptr %at, i64 {k * step}\n  %w{k} = load {vector}, ptr %p{k}, align 1\n"
        f"  %x{k} = xor {vector} %a{k}, %w{k}\n"
        f"  %r{k} = call {vector} @llvm.fshl.v{_WIDTH}i32({vector} %x{k}, {vector} %x{k}, {vector} {rotate})\n"
        f"  %m{k} = mul {vector} %r{k}, {odd[k]}\n"
        for k in range(_LANES)
    )
    ends = "".join(f"  %e{k} = phi {vector} [{odd[k]}, %entry], [%m{k}, %blocks]\n" for k in range(_LANES))
    folded, last, wide = "", "%n", f"<{_WIDTH // 2} x i64>"
    for k in range(1, _LANES):
        folded += (
            f"  %f{k} = xor {vector} {'%e0' if k == 1 else f'%fm{k - 1}'}, %e{k}\n"
            f"  %fr{k} = call {vector} @llvm.fshl.v{_WIDTH}i32({vector} %f{k}, {vector} %f{k}, {vector} {rotate})\n"
            f"  %fm{k} = mul {vector} %fr{k}, {odd[0]}\n"
        )
    folded += f"  %pairs = bitcast {vector} %fm{_LANES - 1} to {wide}\n"
    for lane in range(_WIDTH // 2):
        name = f"%h{lane}"
        folded += (
            f"  {name}.z = extractelement {wide} %pairs, i32 {lane}\n"
            f"  {name}.x = xor i64 {last}, {name}.z\n"
            f"  {name}.r = call i64 @llvm.fshl.i64(i64 {name}.x, i64 {name}.x, i64 {_ROTATE64})\n"
            f"  {name} = mul i64 {name}.r, {_signed(_ODD64, 64)}\n"
        )
        last = name
    return f"""
declare {vector} @llvm.fshl.v{_WIDTH}i32({vector}, {vector}, {vector})
declare i64 @llvm.fshl.i64(i64, i64, i64)

define i64 @hf_checksum(ptr %p, i64 %n) noinline {{
entry:
  %whole = and i64 %n, {-block}
  %any = icmp ne i64 %whole, 0
  br i1 %any, label %blocks, label %folding
blocks:
  %i = phi i64 [0, %entry], [%i1, %blocks]
{phis}  %at = getelementptr i8, ptr %p, i64 %i
{body}  %i1 = add i64 %i, {block}
  %more = icmp ult i64 %i1, %whole
  br i1 %more, label %blocks, label %folding
folding:
{ends}{folded}  br label %bytes
bytes:
  %b = phi i64 [%whole, %folding], [%b1, %byte]
  %h = phi i64 [{last}, %folding], [%hm, %byte]
  %end = icmp uge i64 %b, %n
  br i1 %end, label %done, label %byte
byte:
  %left = sub i64 %n, %b
  %word = icmp uge i64 %left, 4
  %byte.at = getelementptr i8, ptr %p, i64 %b
  %byte.one = load i8, ptr %byte.at
  %byte.wide = zext i8 %byte.one to i32
  %word.at = select i1 %word, ptr %byte.at, ptr @hf_no_word
  %word.four = load i32, ptr %word.at, align 1
  %w = select i1 %word, i32 %word.four, i32 %byte.wide
  %by = select i1 %word, i64 4, i64 1
  %wz = zext i32 %w to i64
  %hx = xor i64 %h, %wz
  %hr = call i64 @llvm.fshl.i64(i64 %hx, i64 %hx, i64 {_ROTATE64})
  %hm = mul i64 %hr, {_signed(_ODD64, 64)}
  %b1 = add i64 %b, %by
  br label %bytes
done:
  ret i64 %h
}}
@hf_no_word = private constant i32 0
"""


def _table_text() -> str:
    def word(name: str, at: int, kind: str = "i64") -> str:
        return f"  %{name}.at = getelementptr i64, ptr %table, i64 {at}\n  %{name} = load {kind}, ptr %{name}.at\n"

    return f"""
declare i32 @clock_gettime(i32, ptr)
declare ptr @PyEval_SaveThread()
declare void @PyEval_RestoreThread(ptr)

define void @hf_rows_take(ptr %rows, i64 %count) {{
entry:
  br label %next
next:
  %i = phi i64 [0, %entry], [%i1, %take]
  %end = icmp eq i64 %i, %count
  br i1 %end, label %done, label %take
take:
  %at = mul i64 %i, {ROW_WORDS}
  %row = getelementptr i64, ptr %rows, i64 %at
  %memory = load ptr, ptr %row
  %bytes.at = getelementptr i64, ptr %row, i64 1
  %bytes = load i64, ptr %bytes.at
  %sum = call i64 @hf_checksum(ptr %memory, i64 %bytes)
  %sum.at = getelementptr i64, ptr %row, i64 2
  store i64 %sum, ptr %sum.at
  %i1 = add i64 %i, 1
  br label %next
done:
  ret void
}}

define i64 @hf_rows_same(ptr %rows, i64 %first, i64 %last, i64 %moved) {{
entry:
  br label %next
next:
  %i = phi i64 [%first, %entry], [%i1, %on]
  %end = icmp uge i64 %i, %last
  br i1 %end, label %yes, label %look
look:
  %at = mul i64 %i, {ROW_WORDS}
  %row = getelementptr i64, ptr %rows, i64 %at
  %address = load i64, ptr %row
  %there = add i64 %address, %moved
  %memory = inttoptr i64 %there to ptr
  %bytes.at = getelementptr i64, ptr %row, i64 1
  %bytes = load i64, ptr %bytes.at
  %sum.at = getelementptr i64, ptr %row, i64 2
  %sum = load i64, ptr %sum.at
  %now = call i64 @hf_checksum(ptr %memory, i64 %bytes)
  %same = icmp eq i64 %now, %sum
  br i1 %same, label %on, label %no
on:
  %i1 = add i64 %i, 1
  br label %next
yes:
  ret i64 1
no:
  ret i64 0
}}

define i64 @hf_table_step(ptr %table) {{
entry:
  %time = alloca [2 x i64]
{word("told", _FOUND)}  %clear = icmp eq i64 %told, {SAME}
  br i1 %clear, label %next, label %still
still:
  ret i64 %told
next:
{word("count", _COUNT)}{word("starts", _STARTS, "ptr")}{word("rows", _ROWS, "ptr")}
  %ticket.at = getelementptr i64, ptr %table, i64 {_TICKET}
  %ticket = atomicrmw add ptr %ticket.at, i64 1 monotonic
{word("shift", _SHIFT)}  %round = lshr i64 %ticket, %shift
  %begins = shl i64 %round, %shift
  %compares = icmp eq i64 %begins, %ticket
  %chunk = urem i64 %round, %count
  %asked = call i32 @clock_gettime(i32 {_CLOCK}, ptr %time)
  %seconds = load i64, ptr %time
  %nano.at = getelementptr i64, ptr %time, i64 1
  %nano = load i64, ptr %nano.at
  %second = mul i64 %seconds, 1000000000
  %now = add i64 %second, %nano
  %began.at = getelementptr i64, ptr %table, i64 {_BEGAN}
{word("verified", _VERIFIED)}{word("limit", _LIMIT)}
  br i1 %compares, label %turn, label %judge
turn:
  %first = icmp eq i64 %chunk, 0
  br i1 %first, label %begin, label %compare
begin:
  store i64 %now, ptr %began.at
  br label %compare
compare:
  %from.at = getelementptr i64, ptr %starts, i64 %chunk
  %from = load i64, ptr %from.at
  %to.at = getelementptr i64, ptr %from.at, i64 1
  %to = load i64, ptr %to.at
  %same = call i64 @hf_rows_same(ptr %rows, i64 %from, i64 %to, i64 0)
  %good = icmp eq i64 %same, 1
  br i1 %good, label %on, label %written
written:
  store i64 {WRITTEN}, ptr %told.at
  ret i64 {WRITTEN}
on:
  %chunk1 = add i64 %chunk, 1
  %over = icmp eq i64 %chunk1, %count
  %began = load i64, ptr %began.at
  br i1 %over, label %pass, label %judge
pass:
  store i64 %began, ptr %verified.at
  br label %judge
judge:
  %since = phi i64 [%began, %pass], [%verified, %on], [%verified, %next]
  %age = sub i64 %now, %since
  %late = icmp sgt i64 %age, %limit
  br i1 %late, label %overdue, label %fine
overdue:
  store i64 {OVERDUE}, ptr %told.at
  ret i64 {OVERDUE}
fine:
  ret i64 {SAME}
}}

define i64 @hf_table_turn(ptr %table) {{
entry:
{word("large", _LARGE)}  %short = icmp eq i64 %large, 0
  br i1 %short, label %held, label %free
held:
  %one = call i64 @hf_table_step(ptr %table)
  ret i64 %one
free:
  %state = call ptr @PyEval_SaveThread()
  %two = call i64 @hf_table_step(ptr %table)
  call void @PyEval_RestoreThread(ptr %state)
  ret i64 %two
}}
"""


@once
def _loaded() -> Loaded:
    clock = ctypes.cast(ctypes.CDLL(None).clock_gettime, ctypes.c_void_p).value or 0
    symbols = {**python_symbols("PyEval_SaveThread", "PyEval_RestoreThread"), "clock_gettime": clock}
    names = ["hf_checksum", "hf_rows_take", "hf_rows_same", "hf_table_step", "hf_table_turn"]
    return load_object(helper_object(_checksum_text() + _table_text()), names, symbols)


def turn_symbol() -> dict[str, int]:
    """A step, for native code that holds the interpreter lock."""
    return {"hf_table_turn": _loaded().address("hf_table_turn")}


@functools.cache
def _native(name: str, arguments: int, *, result: bool) -> Callable[..., Any]:
    """As a function that lets the interpreter lock go."""
    kind = ctypes.CFUNCTYPE(ctypes.c_int64 if result else None, *[ctypes.c_int64] * arguments)
    return kind(_loaded().address(name))


def checksum(address: int, size: int) -> int:
    """The checksum of some memory."""
    return _native("hf_checksum", 2, result=True)(address, size)


class ChecksumRows:
    """Pieces of memory with the checksums they had."""

    def __init__(self, pieces: Sequence[tuple[int, int]]) -> None:
        self.pieces = tuple(pieces)
        """Address and bytes of each."""
        self.words = (ctypes.c_int64 * max(1, ROW_WORDS * len(pieces)))(*[w for a, n in pieces for w in (a, n, 0)])
        self.bytes = sum(n for _, n in pieces)

    def take(self) -> None:
        """Take the current contents as the expected ones."""
        _native("hf_rows_take", 2, result=False)(ctypes.addressof(self.words), len(self.pieces))

    def same(self, first: int = 0, last: int | None = None, moved: int = 0) -> bool:
        """Whether rows hold what they should; `moved`: read so many bytes behind their address, from a copy."""
        until = len(self.pieces) if last is None else last
        return bool(_native("hf_rows_same", 4, result=True)(ctypes.addressof(self.words), first, until, moved))


class ChecksumTable:
    """Rows in at most so many chunks of like bytes, one of which a step compares; `keep` owns the memory; `shift`: see `_SHIFT`."""

    def __init__(self, groups: Sequence[ChecksumRows], most: int, limit_ns: int, now_ns: int, keep: Any, shift: int = 0) -> None:
        self.rows = ChecksumRows([p for g in groups for p in g.pieces])
        ctypes.memmove(self.rows.words, b"".join(bytes(g.words) for g in groups if g.pieces), self._bytes())
        starts, before, chunk = list[int](), 0, -1
        for i, (_, n) in enumerate(self.rows.pieces):
            if before * most // max(1, self.rows.bytes) > chunk:
                chunk = before * most // max(1, self.rows.bytes)
                starts.append(i)
            before += n
        self.chunks = len(starts)
        self.keep = keep
        self._starts = (ctypes.c_int64 * (len(starts) + 1))(*starts, len(self.rows.pieces))
        large = int(self.rows.bytes / self.chunks > UNLOCKED_BYTES)
        self._words = (ctypes.c_int64 * 10)(
            self.chunks, ctypes.addressof(self._starts), ctypes.addressof(self.rows.words), 0, now_ns, now_ns, limit_ns, large,
            SAME, shift,
        )  # fmt: skip
        self.steps = self.chunks << shift
        """Of a pass."""
        self.address = ctypes.addressof(self._words)

    def _bytes(self) -> int:
        return 8 * ROW_WORDS * len(self.rows.pieces)

    def step(self) -> int:
        """Compare the next chunk; without the interpreter lock."""
        return int(_native("hf_table_step", 1, result=True)(self.address))

    def found(self) -> int:
        """What a step found since this was last asked, if it found anything."""
        found, self._words[_FOUND] = int(self._words[_FOUND]), SAME
        return found

    @property
    def verified_ns(self) -> int:
        """Everything was found to be as it should at this time or later."""
        return int(self._words[_VERIFIED])

    @verified_ns.setter
    def verified_ns(self, ns: int) -> None:
        self._words[_VERIFIED] = max(self.verified_ns, ns)
