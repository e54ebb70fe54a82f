# pyright: reportPrivateUsage=false
"""`hotfuse watch`: what was seen, what is bet on it, how often that held and what it saved."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from typer.testing import CliRunner

import hotfuse
import hotfuse.profile.agent as agent_module
from hotfuse.base.structure import take_call
from hotfuse.cli import app
from hotfuse.cli.watch import watched_lines
from hotfuse.explain import Explanation
from hotfuse.ir.graph import Value
from hotfuse.ir.types import DType, TensorType
from hotfuse.runtime.observe.labels import input_labels
from tests.races import kernels_win, new_plans_win
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
    assert "input tensors_0 (image), f32[3, 12]" in shown and "input tensors_1 (text), i64[5, 7]" in shown, shown


def test_what_cannot_be_held_is_an_error() -> None:
    done = CliRunner().invoke(app, ["watch", f"{__name__}:towers", "--seconds", "1", "--hold", "7"])
    assert done.exit_code != 0 and "no input 7" in done.output


class MaskedAttention(torch.nn.Module):
    """Four heads that share a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(32, 96)

    def forward(self, x: torch.Tensor, *, keep: torch.Tensor | None = None) -> torch.Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 4, 8).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=None if keep is None else keep[:, None, None, :])


@pytest.mark.parametrize("masked", [True, False])
def test_what_kernels_leave_out_is_told_with_what_sampled_calls_showed(monkeypatch: pytest.MonkeyPatch, masked: bool) -> None:
    monkeypatch.setattr(agent_module, "BUDGET", 1e9)
    kernels_win(monkeypatch)
    new_plans_win(monkeypatch)
    model = MaskedAttention().eval()
    keep = {"keep": torch.arange(64).expand(2, 64) < 16} if masked else {}
    settings = hotfuse.Settings(capture="inline", hot_calls=2, watch_rate=2, padding="keep")
    with torch.no_grad(), hotfuse.jit(model, settings=settings) as fast:
        for _ in range(40):
            x = torch.randn(2, 64, 32)
            torch.testing.assert_close(fast(x, **keep), model(x, **keep), rtol=1e-4, atol=1e-5)
        assert fast._engine.call_sampler._shared.analyzer.flush(120)
        found = fast.explain(full=True)
        (plan,) = [p for s in found.to_dict()["sites"] for p in s["plans"]]
        if not masked:
            assert plan["inside"] == [] and "hidden keys" not in str(found)
            return
        (inside,) = plan["inside"]
        assert (inside["what"], inside["kernels"], inside["open"]) == ("hidden keys", 1, {"tensors_1": 0.25}), str(found)
        assert "decided inside kernels: hidden keys (1)" in str(found) and "25% of tensors_1 open" in str(found)
        assert "tensors_1 is keep" in str(found) and "hidden keys (1)" in "\n".join(watched_lines(found.to_dict()))


def test_inputs_are_called_as_the_models_code_calls_them() -> None:
    def code(a: torch.Tensor, b: tuple[torch.Tensor, torch.Tensor], *more: torch.Tensor, last: torch.Tensor) -> None: ...

    t = torch.ones(2)
    values = [Value(f"tensors_{i}", TensorType(DType.F32, (2,))) for i in range(5)]
    spec = take_call((t, (t, t), t), {"last": t}).spec
    assert input_labels(code, spec, values) == {"tensors_0": "a", "tensors_1": "b[0]", "tensors_2": "b[1]", "tensors_4": "last"}
    assert input_labels(code, spec, values[:3]) == {}, "a graph whose inputs are not the leaves of the call"
    assert input_labels(torch.add, take_call((t, t), {}).spec, values[:2]) == {}, "native code says nothing"


def for_nine_rows(found: Explanation) -> list[dict[str, Any]]:
    bets = [b for s in found.to_dict()["sites"] for p in s["plans"] for b in p["bets"]]
    return [b for b in bets if b["row"] == "sizes" and b["of"].endswith("=9")]


def test_versions_for_sizes_say_how_often_they_held(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels_win(monkeypatch)
    new_plans_win(monkeypatch)
    model = torch.nn.Sequential(torch.nn.Linear(12, 8), torch.nn.Tanh()).eval()
    settings = hotfuse.Settings(capture="inline", hot_calls=2, watch_rate=2)
    with torch.no_grad(), hotfuse.jit(model, settings=settings) as fast:
        for rows in (3, 5, 6, 7, *[9] * 120, 4, 8, 9):
            x = torch.randn(rows, 12)
            torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
        found = fast.explain(full=True)
        (bet,) = for_nine_rows(found)
        before = bet["held"]
        assert before > 0 and bet["missed"] >= 2 and bet["ms_saved"] is not None and bet["values"] == ["tensors_0"]
        fast(torch.randn(9, 12))
        assert [b["held"] for b in for_nine_rows(fast.explain(full=True))] == [before + 1]
        shown = "\n".join(watched_lines(found.to_dict()))
        assert f"bet: sizes ({bet['of']}): held in {before} of {before + bet['missed']} calls" in shown, shown
        assert "bet on it: sizes" in shown
