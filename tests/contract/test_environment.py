"""What child processes are started with, while other threads change it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from hotfuse.base.environment import for_child


def test_a_variable_may_go_while_the_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    class Leaving(dict[str, str]):
        """As `os.environ` is when another thread takes a variable away: the names were listed before."""

        def __iter__(self) -> Iterator[str]:
            return iter([*super().__iter__(), "GONE"])

        def keys(self) -> Any:
            return list(self)

    monkeypatch.setattr(os, "environ", Leaving(KEPT="1", OTHER="2"))
    with pytest.raises(KeyError, match="GONE"):
        {**os.environ}  # pyright: ignore[reportUnusedExpression]  # noqa: B018
    found = for_child(OTHER="3")
    assert found["KEPT"] == "1" and found["OTHER"] == "3" and "GONE" not in found
    assert all(p in found["PYTHONPATH"].split(os.pathsep) for p in sys.path if p)
