"""Every debug level prints what its row says, and includes the levels below."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hotfuse
from hotfuse import Settings
from tests.races import kernels_win, slow_library

MARKS = ["deploy ", "unit: ", "graph main", "kernel ", "define ", "\t.globl", "call "]
"""What shows that a level printed: one mark per level, from 1 on."""


@pytest.mark.parametrize("level", [0, 1, 3, 6, 7])
def test_levels(level: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    slow_library(monkeypatch)
    kernels_win(monkeypatch)
    settings = Settings(capture="inline", hot_calls=1, debug=level, watch=False)
    with torch.no_grad(), hotfuse.jit(nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval(), settings=settings) as fast:
        for _ in range(4):
            fast(torch.randn(2, 8))
    said = [line.removeprefix("hotfuse: ") for line in capsys.readouterr().err.splitlines() if line.startswith("hotfuse: ")]
    found = [any(line.startswith(mark) for line in said) for mark in MARKS]
    assert found == [i < level for i in range(len(MARKS))], (level, found)
