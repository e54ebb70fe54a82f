"""Which level a case of a kernel runs on, where a test has it on several: one, drawn from the case's name.

    test_masks[heads-interpreted]   test_masks[heads-native-avx2]   test_masks[heads-native-generic]       one of the three

What a kernel computes is the same on every level, so a mistake in lowering shows on any of them. A mistake in how a level emits an
instruction shows in some of the many cases drawn for that level. `make test-all` runs every case on every level.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable

LEVEL = re.compile(r"(?<![a-z0-9])(?:native-)?(?:generic|avx2|avx512|amx|neon|interpreted)(?![a-z0-9])")


def one_level_each(names: Iterable[str]) -> set[str]:
    """The tests to run, by name: of those that differ in nothing but levels, one."""
    cases: dict[str, list[str]] = {}
    for name in names:
        test, bracket, case = name.partition("[")
        cases.setdefault(test + bracket + LEVEL.sub("*", case), []).append(name)
    return {drawn(key, found) for key, found in cases.items()}


def drawn(key: str, found: list[str]) -> str:
    """The same one whatever else runs, and in whichever order."""
    return sorted(found)[int(hashlib.sha256(key.encode()).hexdigest()[:8], 16) % len(found)]
