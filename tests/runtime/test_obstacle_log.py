"""What users are told without asking, and what the first lines of `explain()` say."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import hotfuse
from hotfuse import Settings
from hotfuse.cli import app
from hotfuse.compile.workers.shortage import SHORT, Shortage
from hotfuse.runtime.admission import GraphAdmission
from hotfuse.runtime.observe.obstacle_log import AFTER_S, MAX_TOLD, ObstacleLog, advice, headline, logger
from hotfuse.runtime.observe.summary import speed
from hotfuse.torch_backend import explain_compiled
from tests.races import kernels_win, slow_library

INLINE = Settings(capture="inline", hot_calls=1, watch=False)


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(f"{record.levelname} {record.getMessage()}")


@pytest.fixture
def log() -> Iterator[list[str]]:
    lines = Lines()
    logger.addHandler(lines)
    yield lines.said
    logger.removeHandler(lines)


def test_a_reason_is_told_once_after_some_seconds_of_calls(log: list[str]) -> None:
    now, reasons = [100.0], list[str]()
    teller = ObstacleLog("net", lambda: reasons, clock=lambda: now[0])
    reasons.append("hotfuse.CaptureError: the model cannot be sent\n  because: cannot pickle 'lock'\n  try:     take it out")
    teller.below()
    assert not log, "the first call is no news"
    for _ in range(100):
        now[0] += AFTER_S / 20
        teller.below()
    assert log == ["WARNING net stays below its fastest plans: hotfuse.CaptureError: the model cannot be sent "
                   "(cannot pickle 'lock'); take it out"]  # fmt: skip
    reasons[:] = [f"reason {i}" for i in range(100)]
    for _ in range(100):
        now[0] += AFTER_S / 20
        teller.below()
    assert len(log) == MAX_TOLD and len(set(log)) == MAX_TOLD


def test_seldom_calls_are_no_traffic(log: list[str]) -> None:
    now = [0.0]
    teller = ObstacleLog("net", lambda: ["a reason"], clock=lambda: now[0])
    for _ in range(50):
        now[0] += 2 * AFTER_S
        teller.below()
    assert not log


def test_advice_is_what_the_error_says_or_what_helps_against_its_kind() -> None:
    assert "later" in advice("tier 1: 90.0 us instead of 99.0, not decided")
    assert "measured as fast" in advice("tier 1: 99.0 us instead of 90.0")
    assert advice("x\n  try:     no lock") == "no lock"
    assert "pickled" in advice("the model cannot be sent to a worker process") and "measured" in advice("9 us instead of 8")
    assert advice("whatever") == "explain() says more" and headline("") == "no reason is known"


def test_a_model_that_cannot_be_captured_is_told_of_with_its_reason(log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    class Sorts(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.from_numpy(np.sort(x.numpy()))

    monkeypatch.setattr("hotfuse.runtime.observe.obstacle_log.AFTER_S", 0.0)
    with torch.no_grad(), hotfuse.jit(Sorts().eval(), settings=INLINE) as fast:
        for _ in range(30):
            fast(torch.ones(4, 3))
        assert len(log) == 1 and log[0].startswith("WARNING Sorts stays below its fastest plans: "), log
        text = str(fast.explain()).splitlines()
        assert any(line.startswith("in the way: the model's own code stays for some calls") for line in text)


def test_arguments_that_cannot_be_described_are_told_of(log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    class Odd(nn.Module):
        def forward(self, x: torch.Tensor, lock: object) -> torch.Tensor:
            return x + 1

    monkeypatch.setattr("hotfuse.runtime.observe.obstacle_log.AFTER_S", 0.0)
    with torch.no_grad(), hotfuse.jit(Odd().eval(), settings=INLINE) as fast:
        for _ in range(10):
            fast(torch.ones(3), threading.Lock())
    assert len(log) == 1 and "cannot be described" in log[0] and "pass its tensors" in log[0]


def test_what_gradients_keep_in_the_models_own_code_is_told_of(log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotfuse.runtime.observe.obstacle_log.AFTER_S", 0.0)

    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = self.fc(x)
            return y, y.t()

    fast = hotfuse.jit(Views().eval(), settings=INLINE)
    for _ in range(8):
        fast(torch.randn(3, 6))
    told = "Views stays below its fastest plans: calls with gradients enabled: results 0 and 1 share memory; call it under"
    assert sum(told in line for line in log) == 1, log


def test_nothing_is_told_of_a_model_that_reaches_tier_1_or_was_switched_off(
    log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hotfuse.runtime.observe.obstacle_log.AFTER_S", 0.0)
    slow_library(monkeypatch)
    kernels_win(monkeypatch)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval(), torch.randn(4, 8)
    with torch.no_grad(), hotfuse.jit(model, settings=INLINE) as fast:
        for _ in range(40):
            fast(x)
        lines = str(fast.explain()).splitlines()
    with torch.no_grad(), hotfuse.jit(model, settings=INLINE.with_(capture="off")) as off:
        for _ in range(10):
            off(x)
    assert not log
    begins = ["Sequential: 40 calls", "serves now: tier 1", "speed: ", "being tried: ", "in the way: ", "holds: ", "weights: ",
              "noticed: "]  # fmt: skip
    assert all(any(line.startswith(b) for line in lines) for b in begins) and len(lines) <= 12, "\n".join(lines)
    assert "times as fast as" in next(line for line in lines if line.startswith("speed"))
    assert "bytes that plans have copies of are compared" in next(line for line in lines if line.startswith("weights"))


def test_the_full_text_and_the_page_begin_with_the_same_lines(tmp_path: Path) -> None:
    with torch.no_grad(), hotfuse.jit(nn.Linear(3, 3).eval(), settings=INLINE.with_(tiers=0)) as fast:
        for _ in range(3):
            fast(torch.ones(2, 3))
        found = fast.explain(full=True)
        assert str(found).startswith(found.summary()) and "decisions:" in str(found) and "decisions:" not in found.summary()
        page = found.to_html(tmp_path / "page.html").read_text()
        assert page.index("serves now") < page.index("partition")


def test_graphs_of_torch_compile_are_told_of_in_the_same_lines() -> None:
    with torch.no_grad():
        served = torch.compile(nn.Linear(4, 4).eval(), backend="hotfuse")
        served(torch.ones(2, 4))
        text = str(explain_compiled(full=True))
    assert "serves now:" in text and "decisions:" in text


SOURCE = """
import torch
from torch import nn

def pair():
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU()).eval(), (torch.zeros(3, 16),)
"""


def test_the_command_explains_pytorch_models_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "told_models.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOTFUSE_CAPTURE", "inline")

    def invoke(*args: Any) -> str:
        done = CliRunner().invoke(app, ["explain", "told_models:pair", "--calls", "4", *map(str, args)])
        assert done.exit_code == 0, done.output
        return done.output

    short, full = invoke(), invoke("--full")
    assert "serves now:" in short and "decisions:" not in short and "decisions:" in full
    assert '"sites"' in invoke("--json")


def test_few_rounds_claim_nothing() -> None:
    """One round of live calls may have met anything: the first line of explain() once read "500 times as fast"."""
    audit = {"rounds": 1, "ratio": 0.002, "low": 0.0, "high": None, "against": "tier 0", "plan_us": 1.0, "reference_us": 500.0}
    race = {"action": "deploy", "evidence": {"us_before": 30.0, "us_after": 20.0}}
    plans = [{"tier": 1, "audits": [audit]}]
    assert speed(plans, []).startswith("not known yet: 1 rounds")
    assert speed(plans, [race]).startswith("1.50 times as fast as what it replaced, by the race")
    known = {**audit, "rounds": 40, "ratio": 0.5, "low": 0.4, "high": 0.8}
    assert speed([{"tier": 1, "audits": [audit, known]}], [race]).startswith("2.00 times as fast as tier 0 (between 1.25 and 2.50")


def test_plans_that_come_late_because_others_have_the_cores_are_told_of(log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotfuse.runtime.observe.obstacle_log.AFTER_S", 0.0)
    starved = Shortage(cores=2)
    for _ in range(400):
        starved.step(0.05, 0.0, 0.0, 0.3, 1.0)
    monkeypatch.setattr("hotfuse.runtime.call_limits.short_of_time", lambda: starved.text)
    begun, go = threading.Event(), threading.Event()

    class Waits(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    def held(self: GraphAdmission, *args: Any) -> None:
        begun.set()
        go.wait(30.0)

    monkeypatch.setattr(GraphAdmission, "_capture_and_deploy", held)
    with torch.no_grad(), hotfuse.jit(Waits().eval()) as fast:
        try:
            while not begun.is_set():
                fast(torch.ones(3))
            for _ in range(200):
                fast(torch.ones(3))
            assert f"in the way: {starved.text}" in str(fast.explain())
        finally:
            go.set()
    assert [line for line in log if SHORT in line and "leave it a core" in line] == log and len(log) == 1
