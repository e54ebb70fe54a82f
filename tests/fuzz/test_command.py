"""The command that runs many random graphs: it prints its seed, counts what became kernels, and keeps what fails."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.fuzz import test_lower
from tests.fuzz.__main__ import main


def test_a_few_graphs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--graphs", "6", "--seed", "40", "--save", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("seed 40\n") and "6 graphs from seed 40 became kernels" in said and "0 failed" in said
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_result_is_kept_with_its_seed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = test_lower.run_native
    monkeypatch.setattr(
        test_lower, "run_native", lambda *a: [t + 1 if t.is_floating_point() else torch.bitwise_xor(t, t + 1) for t in real(*a)]
    )
    assert main(["--graphs", "3", "--seed", "41", "--save", str(tmp_path)]) == 1
    said = capsys.readouterr()
    saved = sorted(tmp_path.glob("group_*.txt"))
    assert saved and "failed" in said.out and f"saved as {saved[0]}" in said.err
    assert "graph main(" in saved[0].read_text() and "kernel " in saved[0].read_text()
