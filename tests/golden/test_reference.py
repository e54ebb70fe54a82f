"""The reference pages are what the code says now."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "make_reference.py"


@pytest.fixture(scope="module")
def tool() -> Any:
    spec = importlib.util.spec_from_file_location("make_reference", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pages_are_current(tool: Any) -> None:
    assert tool.stale() == [], "python tools/make_reference.py writes them anew"


def test_everything_public_is_there(tool: Any) -> None:
    import hotfuse
    from hotfuse.base.events import Why

    text = tool.api()
    assert all(f"`hotfuse.{n}" in text for n in hotfuse.__all__ if n != "__version__")
    assert "`wait(timeout: float | None=None) -> bool`: Until no background work" in text
    assert all(w.value in tool.decisions() for w in Why)
    commands = tool.cli()
    assert "## `hotfuse bench`" in commands and "`--compare`" in commands and "## `hotfuse db" in commands
    assert "| `capture` | `HOTFUSE_CAPTURE` | `background` | `background`: in a worker" in tool.settings()


def test_a_changed_page_is_noticed(tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool, "FOLDER", tmp_path)
    assert tool.stale() == list(tool.PAGES)
    for name, make in tool.PAGES.items():
        (tmp_path / name).write_text(make(), encoding="utf-8")
    assert tool.stale() == []
    (tmp_path / "cli.md").write_text("old", encoding="utf-8")
    assert tool.stale() == ["cli.md"]
