# pyright: reportPrivateUsage=false
"""Arenas that a native run keeps between calls are freed with it, also when the process ends around it."""

from __future__ import annotations

import builtins
from collections.abc import Callable
from types import FunctionType
from typing import Any

import pytest

from hotfuse.backends.llvm.runs import enter
from hotfuse.backends.llvm.runs.run_entry import AT_ARENAS, KEPT, WORDS


class Freed:
    """Notes what would have been given back."""

    def __init__(self) -> None:
        self.at: list[int] = []

    def __call__(self, at: int) -> None:
        self.at.append(at)


def without_names(function: Any) -> Any:
    """A function as it is when its module's names are gone, as at exit."""
    return FunctionType(function.__code__, {"__builtins__": builtins}, function.__name__, function.__defaults__)


@pytest.mark.parametrize("left", [lambda f: f, without_names], ids=["while it runs", "at exit"])
def test_arenas_are_freed_once(left: Callable[[Any], Any]) -> None:
    kept, freed = enter._Kept([0] * WORDS, ()), Freed()
    kept.words[AT_ARENAS], kept.words[AT_ARENAS + KEPT - 1] = 4096, 8192
    end = left(enter._Kept.__del__)
    end(kept, freed)
    end(kept, freed)
    assert freed.at == [4096, 8192]
    assert not any(kept.words[AT_ARENAS : AT_ARENAS + KEPT])
