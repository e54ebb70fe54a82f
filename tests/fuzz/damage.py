"""Texts that are broken in a few places, and what may become of them: an error with its place, or a text like any other."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import strategies as st

from hotfuse.base.errors import InternalError, ModelError
from tests.fuzz.graphs import ANY_TEXT


def broken(text: str, splinters: Sequence[str], data: st.DataObject) -> str:
    """One to three places are replaced by splinters of the language, by another part of the text, or by anything."""
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(text)))
        end = min(len(text), at + data.draw(st.integers(0, 12)))
        other = data.draw(st.integers(0, max(len(text) - 8, 0)))
        new = data.draw(st.sampled_from([*splinters, text[other : other + 8]]) | ANY_TEXT)
        text = text[:at] + new + text[end:]
    return text


def read_or_refused(
    text: str, parse: Callable[[str], Any], show: Callable[[Any], str], verify: Callable[[Any], object]
) -> Any | None:
    """What a broken text is read as, where that is well-formed; None where it was refused in words."""
    try:
        parsed = parse(text)
    except ModelError as e:
        assert re.fullmatch(r"line \d+, column \d+", e.where)
        return None
    assert show(parse(show(parsed))) == show(parsed)
    try:
        verify(parsed)
    except InternalError as e:
        assert "breaks invariant" in e.what
        return None
    return parsed
