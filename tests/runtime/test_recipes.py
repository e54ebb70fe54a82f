"""Every recipe runs, with tiny sizes, and gives the results that its program gives without Hotfuse."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "recipes"
RECIPES = sorted(p.stem for p in FOLDER.glob("*.py") if p.stem not in ("__init__", "common"))


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_runs_and_its_results_are_the_same(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = importlib.import_module(f"examples.recipes.{name}").main(tiny=True)
    said = capsys.readouterr().out
    assert found.same and found.before_ms > 0 and found.after_ms > 0
    assert "results equal" in said and "serves now:" in said
