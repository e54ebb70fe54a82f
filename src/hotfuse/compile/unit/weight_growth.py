"""Weights that a kernel would keep in a form that takes more memory: what is given up where the user asked for little memory.

    leave transformed weights of conv2d+relu x3: 147456 -> 589824 bytes; memory was asked for

The fastest convolutions transform their weights once, which makes them two to four times as large (`lower.cpu.conv.winograd`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from hotfuse.lower.common.lowered import Lowered, PackArgument


def packed_bytes(lowered: Lowered) -> int:
    """What a kernel's own copies of weights take."""
    return sum(a.spec.bytes for a in lowered.arguments if isinstance(a, PackArgument))


def lines(found: Iterable[tuple[str, Callable[[], tuple[Lowered | str, Lowered | str]]]]) -> list[str]:
    """A line for each kind of group that would be faster with larger weights: its ops, and its kernel without and with them."""
    saved: Counter[tuple[str, int, int]] = Counter()
    for ops, both in found:
        lean, free = both()
        if isinstance(lean, str) or isinstance(free, str):
            continue
        before, after = packed_bytes(lean), packed_bytes(free)
        if after > before:
            saved[ops, before, after] += 1
    return [
        f"leave transformed weights of {ops}{f' x{n}' if n > 1 else ''}: {before} -> {after} bytes; memory was asked for"
        for (ops, before, after), n in saved.items()
    ]
