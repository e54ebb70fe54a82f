"""`hotfuse watch`: what was seen, what is bet on it, how often that held and what it saved."""

from __future__ import annotations

import json

import torch
from typer.testing import CliRunner

from hotfuse.cli import app
from hotfuse.cli.watch import watched_lines
from tests.runtime.test_repeated_inputs import TwoTowers


def towers() -> tuple[TwoTowers, tuple[torch.Tensor, torch.Tensor]]:
    return TwoTowers().eval(), (torch.randn(3, 12), torch.randint(0, 50, (5, 7)))


def test_a_held_input_is_seen_to_come_again() -> None:
    done = CliRunner().invoke(app, ["watch", f"{__name__}:towers", "--seconds", "300", "--calls", "60", "--hold", "1", "--json"])
    assert done.exit_code == 0, done.output
    data = json.loads(done.stdout)
    (plan,) = [p for s in data["sites"] for p in s["plans"]]
    image, text = (i["came_again"] for i in plan["inputs_again"])
    assert text == 1.0 and image < 0.5
    shown = "\n".join(watched_lines(data))
    assert "came again in 100%" in shown and "bet: " in shown


def test_what_cannot_be_held_is_an_error() -> None:
    done = CliRunner().invoke(app, ["watch", f"{__name__}:towers", "--seconds", "1", "--hold", "7"])
    assert done.exit_code != 0 and "no input 7" in done.output
