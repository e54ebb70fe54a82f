"""Each rule as text: a graph before, the graph after, and the steps taken. `pytest --update` writes the lower part."""

from __future__ import annotations

from pathlib import Path

import pytest

from hotfuse.ir.text import parse, show
from hotfuse.ir.verify import verify
from hotfuse.simplify import TIER0, simplify

CASES = sorted((Path(__file__).parent / "simplify").glob("*.txt"))
MARK = "\n# ---- after\n"


@pytest.mark.parametrize("path", CASES, ids=lambda p: p.stem)
def test_golden(path: Path, update_golden: bool) -> None:
    before, _, expected = path.read_text(encoding="utf-8").partition(MARK)
    graph, trace = simplify(verify(parse(before)))
    verify(graph)
    found = show(graph) + "".join(f"# {step}\n" for step in trace)
    if update_golden:
        path.write_text(before + MARK + found, encoding="utf-8")
        return
    assert expected == found
    again, more = simplify(graph)
    assert again is graph
    assert more == ()


def test_every_rule_fires_in_some_case() -> None:
    text = "".join(path.read_text(encoding="utf-8").partition(MARK)[2] for path in CASES)
    assert [rule.name for rule in TIER0 if f"# {rule.name}:" not in text] == []
