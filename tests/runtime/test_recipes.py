"""Every recipe runs, with tiny sizes, and gives the results that its program gives without Hotfuse, from captured graphs.

Captures are made in the call that asks for them, so that nothing depends on how soon a worker answers; but for the three models of
rapidocr, of which `tests/models/test_ocr_client.py` says that graphs read the same.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path

import pytest

from benchmarks.zoo import ZooUnavailable

FOLDER = Path(__file__).parents[2] / "examples" / "recipes"
RECIPES = sorted(p.stem for p in FOLDER.glob("*.py") if p.stem not in ("__init__", "common"))
ONNX = ("text_in_pictures", "voice_activity")
"""Whose files come out of wheels."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.zoo] if n in ONNX else []) for n in RECIPES])
def test_a_recipe_runs_and_its_results_are_the_same(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    inline = name != "text_in_pictures"
    monkeypatch.setenv("HOTFUSE_CAPTURE", "inline" if inline else "background")
    recipe = importlib.import_module(f"examples.recipes.{name}")
    for needed in getattr(recipe, "NEEDS", ()):
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed")
    try:
        found = recipe.main(tiny=True)
    except ZooUnavailable as e:
        pytest.skip(str(e))
    said = capsys.readouterr().out
    assert found.same and found.before_ms > 0 and found.after_ms > 0 and (found.in_plans > 0 or not inline), said
    assert "results equal" in said and "serves now:" in said
