"""Printing and parsing are inverse; malformed text is a ModelError with a place, and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotfuse.base.errors import ModelError
from hotfuse.ir.dims import quote, unquote
from hotfuse.ir.graph import Graph
from hotfuse.ir.hash import structural_hash
from hotfuse.ir.text import parse, show
from hotfuse.ir.verify import verify
from hotfuse.simplify import simplify
from tests.fuzz.damage import broken, read_or_refused
from tests.fuzz.graphs import ANY_TEXT, graphs

SPLINTERS = [
    "", '"', "%", "(", "}", "[", "1e999", "²", "\\", "-", "graph", "@", "#", "complex(", "9" * 5000, "\ud800", "$",
    "(2 ** -1)",
]  # fmt: skip
JUNK = [" " * 200_000, "#" * 200_000, '"' * 20_000, "%" * 20_000, "\\" * 20_000, '"\\' * 99_000]


@settings(deadline=None, max_examples=200)
@given(graphs())
def test_round_trip(graph: Graph) -> None:
    verify(graph)
    text = show(graph)
    back = parse(text)
    assert back == graph
    # Equality takes 1, 1.0 and True for the same, and -0.0 for 0.0; repr and text do not.
    assert repr(back) == repr(graph)
    assert show(back) == text
    assert text.encode("utf-8").decode("utf-8") == text


@given(ANY_TEXT)
def test_quoting_keeps_every_character_on_one_line(text: str) -> None:
    quoted = quote(text)
    assert unquote(quoted) == text
    assert len(quoted.splitlines()) == 1


@settings(deadline=None, max_examples=300)
@given(graphs(), st.data())
def test_broken_text_is_a_model_error(graph: Graph, data: st.DataObject) -> None:
    parsed = read_or_refused(broken(show(graph), SPLINTERS, data), parse, show, verify)
    if parsed is not None:
        verify(simplify(parsed)[0])
        assert structural_hash(parsed)


@pytest.mark.parametrize("opening", ["[", "(", "seq<", "graph g() { control.if() {"])
def test_deep_nesting_is_refused(opening: str) -> None:
    deep = opening * 100_000
    for text in (f"graph g() {{ aten.f({deep}", f"graph g(%x: f32[{deep}", f"graph g(%x: {deep}", deep):
        with pytest.raises(ModelError):
            parse(text)


@pytest.mark.parametrize("junk", JUNK, ids=lambda junk: repr(junk[:2]))
def test_long_junk_ends_quickly(junk: str) -> None:
    with pytest.raises(ModelError):
        parse("graph g(" + junk)
