"""Checksums of memory: one changed word always shows, and a table of them comes round to every byte."""

from __future__ import annotations

import random
import time

import pytest
import torch

from hotfuse.machine.copied import SIZE, Copied
from hotfuse.native.checksums import OVERDUE, SAME, WRITTEN, ChecksumRows, ChecksumTable, checksum
from hotfuse.runtime.weights.originals import MAX_PIECES, _slices, pieces

FOREVER = 1 << 62


@pytest.mark.parametrize("size", [0, 1, 3, 4, 5, 63, 255, 256, 257, 511, 512, 1000, 4099])
def test_every_bit_of_every_byte_counts_and_none_behind_the_last(size: int) -> None:
    memory = torch.randint(0, 256, (size + 1,), dtype=torch.uint8)
    before = checksum(memory.data_ptr(), size)
    for at in range(size):
        bit = random.randrange(8)
        memory[at] ^= 1 << bit
        assert checksum(memory.data_ptr(), size) != before, (at, bit)
        memory[at] ^= 1 << bit
    memory[size] ^= 255
    assert checksum(memory.data_ptr(), size) == before


def test_changes_of_everything_at_once_do_not_cancel() -> None:
    w = torch.randn(512, 64)
    before = checksum(w.data_ptr(), w.nbytes)
    for change in (torch.neg_, lambda t: t.mul_(2), lambda t: t.zero_(), lambda t: t.copy_(torch.randn_like(t))):
        kept = w.clone()
        change(w)
        assert checksum(w.data_ptr(), w.nbytes) != before
        w.copy_(kept)
    rows = w[[1, 0, *range(2, 512)]]  # two rows change places
    assert checksum(rows.data_ptr(), rows.nbytes) != before and checksum(w.data_ptr(), w.nbytes) == before


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(3, 4, 5), lambda: torch.randn(()), lambda: torch.randn(0, 3), lambda: torch.randn(1, 7, 1),
        lambda: torch.randn(6, 7).t(), lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        lambda: torch.randn(9, 10)[:, 2:5], lambda: torch.randn(9, 10)[::2], lambda: torch.randn(9, 10, 4)[1:4, ::3, 1:3],
        lambda: torch.randn(5, 1).expand(5, 6), lambda: torch.randint(0, 9, (7, 3), dtype=torch.int8)[:, 1:],
    ],
)  # fmt: skip
def test_pieces_are_where_a_tensor_has_numbers_and_nowhere_else(make: object) -> None:
    t: torch.Tensor = make()  # pyright: ignore[reportCallIssue]
    inside = {b for begin, end in pieces(t) for b in range(begin, end)}
    size = t.element_size()
    index = torch.cartesian_prod(*[torch.arange(n) for n in t.shape]).reshape(-1, t.dim()) if t.dim() else torch.zeros(1, 0)
    places = {t.data_ptr() + int(sum(i * s for i, s in zip(row.tolist(), t.stride(), strict=True))) * size for row in index}
    wanted = {p + k for p in places for k in range(size)} if t.numel() else set()
    assert inside == wanted


def test_very_many_pieces_become_one_with_what_lies_between() -> None:
    t = torch.randn(MAX_PIECES + 1, 4)[:, :1]
    ((begin, end),) = pieces(t)
    assert begin == t.data_ptr() and end == t.data_ptr() + MAX_PIECES * 16 + 4


def table(memory: torch.Tensor, row: int, most: int, limit: int = FOREVER, shift: int = 0) -> ChecksumTable:
    rows = ChecksumRows([(memory.data_ptr() + a, min(row, memory.nbytes - a)) for a in range(0, memory.nbytes, row)])
    rows.take()
    return ChecksumTable([rows], most, limit, time.monotonic_ns(), memory, shift)


@pytest.mark.parametrize("shift", [0, 2])
@pytest.mark.parametrize(("row", "most"), [(64, 1000), (64, 20), (64, 7), (256, 1), (100_000, 64), (64, 64), (64, 63)])
def test_a_table_comes_round_to_every_byte(row: int, most: int, shift: int) -> None:
    memory = torch.randn(1013)
    made = table(memory, row, most, shift=shift)
    assert 1 <= made.chunks <= most
    for _ in range(20):
        for _ in range(random.randrange(made.steps + 1)):
            assert made.step() == SAME
        at, kept = random.randrange(1013), memory.clone()
        memory[at] += 1
        found = [made.step() for _ in range(made.steps)]
        assert found[-1] == WRITTEN and sorted(found) == found, "said until somebody has asked"
        assert made.found() == WRITTEN and made.found() == SAME and made.step() in (SAME, WRITTEN)
        made.found()
        memory.copy_(kept)


def test_a_table_says_that_no_pass_ended_in_time() -> None:
    memory = torch.randn(64)
    made = table(memory, 64, 4, limit=-(10**12))
    assert made.chunks == 4 and [made.step() for _ in range(3)] == [OVERDUE] * 3 and made.found() == OVERDUE
    ended = table(memory, 64, 4, limit=10**15)
    before = ended.verified_ns
    time.sleep(0.02)  # the clock is coarse
    assert [ended.step() for _ in range(4)] == [SAME] * 4 and ended.verified_ns > before


def test_copies_are_compared_and_memory_that_is_gone_is_no_fault() -> None:
    memory = torch.randn(3 * SIZE // 4 + 5)
    made = table(memory, 4096, 4096)
    room = Copied()
    seen = 0
    for first, last in _slices(made.rows.pieces):
        begin, end = made.rows.pieces[first][0], sum(made.rows.pieces[last - 1])
        assert end - begin <= SIZE and room.copy(begin, end - begin)
        assert made.rows.same(first, last, room.address - begin)
        seen += end - begin
    assert seen == memory.nbytes
    assert not room.copy(4096, 100)
    room.close()
