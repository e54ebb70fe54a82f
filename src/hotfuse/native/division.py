"""Division of sizes as Python has it: rounded down, the remainder with the divisor's sign."""

from __future__ import annotations

from collections.abc import Callable


def floored(val: Callable[[str], str], op: str, a: str, b: str) -> str:
    """`a // b` or `a % b`, written by `val`, which names what an instruction gives; the divisor must not be zero."""
    q = val(f"sdiv i64 {a}, {b}")
    product = val(f"mul i64 {q}, {b}")
    r = val(f"sub i64 {a}, {product}")
    mixed = val(f"xor i64 {r}, {b}")
    other_sign = val(f"icmp slt i64 {mixed}, 0")
    inexact = val(f"icmp ne i64 {r}, 0")
    fix = val(f"and i1 {other_sign}, {inexact}")
    if op == "//":
        return val(f"add i64 {q}, {val(f'sext i1 {fix} to i64')}")
    return val(f"add i64 {r}, {val(f'select i1 {fix}, i64 {b}, i64 0')}")
