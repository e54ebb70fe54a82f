"""Every numbered example runs as it stands, from the first to the last, and checks what it tells."""

from __future__ import annotations

import ast
import runpy
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).resolve().parents[2] / "examples").glob("[0-9][0-9]_*.py"))


def test_they_are_numbered_without_gaps() -> None:
    assert [int(p.name[:2]) for p in EXAMPLES] == list(range(1, len(EXAMPLES) + 1)) and len(EXAMPLES) >= 5


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_runs(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = path.read_text(encoding="utf-8")
    assert (ast.get_docstring(ast.parse(text)) or "").startswith(f"Tutorial {int(path.name[:2])}: ")
    assert "assert" in text, "an example that checks nothing cannot fail"
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out.strip()
