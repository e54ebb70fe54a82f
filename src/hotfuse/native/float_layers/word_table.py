"""What a layer in native code is told once: a table of words, 8 bytes each."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, int64, zeros

from hotfuse.native.byte_text import FunctionText

ADDRESSES = frozenset({"bias", "r_bias", "w_scale", "r_scale"})
"""Words that are addresses; others are numbers."""


class WordTable:
    """What a layer is told once; keeps alive what it points to."""

    def __init__(self, fields: Sequence[str], **values: int | Tensor) -> None:
        assert set(fields) == set(values)
        self.kept = [v for v in values.values() if isinstance(v, Tensor)]
        self.words = zeros(len(fields), dtype=int64, device="cpu")
        for at, name in enumerate(fields):
            value = values[name]
            self.words[at] = value.data_ptr() if isinstance(value, Tensor) else int(value)
        self.address = self.words.data_ptr()


def field(f: FunctionText, fields: Sequence[str], name: str) -> str:
    """A word of the table `%d`, in a function's text."""
    return f.new(f"load {'ptr' if name in ADDRESSES else 'i64'}, ptr {f.moved('%d', fields.index(name), 'i64')}")
