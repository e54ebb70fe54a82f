"""Buffers on huge pages, now or later: contents stay, memory that is gone is left out, and slow pages are noticed."""

from __future__ import annotations

import mmap
import time

import pytest

from hotfuse.machine import huge_pages as module
from hotfuse.machine.huge_pages import SIZE, HugePages


def _buffer(pages: HugePages, size: int) -> tuple[mmap.mmap, int]:
    import ctypes

    memory = mmap.mmap(-1, size + SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    first = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % SIZE
    pages.prefer(memory, first, size)
    return memory, first


def test_pages_that_come_late_are_gathered_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LATE_S", 0.0)  # whatever it takes is late
    pages = HugePages()
    kept, first = _buffer(pages, 2 * SIZE + 5)
    gone, _ = _buffer(pages, SIZE)
    assert pages.late == 1  # the second one was not asked for
    assert pages.waiting == 3
    kept[first : first + 2 * SIZE + 5] = bytes(range(256)) * (2 * SIZE // 256) + b"tail!"
    del gone
    assert pages.waiting == 2
    pages.gather()
    assert pages.waiting == 0
    assert kept[first : first + 2 * SIZE + 5] == bytes(range(256)) * (2 * SIZE // 256) + b"tail!"


def test_pages_at_hand_are_taken_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LATE_S", 3600.0)
    pages = HugePages()
    memory, first = _buffer(pages, SIZE)
    assert (pages.late, pages.waiting, memory[first]) == (0, 0, 0)


def test_less_than_a_page_stays_as_it_is() -> None:
    pages = HugePages()
    memory = mmap.mmap(-1, SIZE)
    pages.prefer(memory, 0, SIZE - 1)
    assert (pages.late, pages.waiting) == (0, 0)
    assert time.monotonic() >= pages._rests_until


def test_a_system_without_huge_pages_gives_ordinary_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_HUGE", 9999)  # an advice that the system refuses
    pages = HugePages()
    memory, first = _buffer(pages, SIZE)
    memory[first] = 7
    assert (pages.late, pages.waiting, memory[first]) == (0, 0, 7)
