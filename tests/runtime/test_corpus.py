"""The corpus: what is in it, rows that survive a broken run, causes read from explanations, and one model through all of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.corpus import ENTRIES, find, rows
from benchmarks.corpus.__main__ import chosen
from benchmarks.corpus.causes import causes, kind_of
from benchmarks.corpus.child import Contender
from benchmarks.corpus.measure import Table
from benchmarks.corpus.rows import OURS, Row
from benchmarks.zoo import ZooModel
from hotfuse.base.errors import InputError

ROOT = Path(__file__).resolve().parents[2]


def test_every_family_has_models_of_both_kinds_where_it_can() -> None:
    families = {e.family for e in ENTRIES.values()}
    wanted = {"classification", "detection", "segmentation", "speech", "audio", "text", "time series", "super-resolution", "graphs",
              "state space", "mixtures", "int8 dynamic", "int8 tensor", "int8 channel", "int8 qoperator"}  # fmt: skip
    assert wanted <= families and len(ENTRIES) >= 60
    assert {e.kind for e in ENTRIES.values() if e.family == "text"} == {"onnx", "torch"}
    assert all(e.name == name for name, e in ENTRIES.items())


class _Masked(torch.nn.Module):
    """Adds a mask that is finite in float32 and, by its own way of writing it, not in float64."""

    def __init__(self, *, least: bool) -> None:
        super().__init__()
        self.weight, self.least = torch.nn.Parameter(torch.ones(3)), least

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight + (torch.inf if self.least and x.dtype is torch.float64 else 0.0)


@pytest.mark.parametrize("least", [False, True])
def test_a_float64_that_is_not_finite_where_float32_is_judges_nobody(least: bool, tmp_path: Path) -> None:
    one = Contender("made here", "eager", 1, tmp_path)
    feed = {"x": torch.randn(3, generator=torch.Generator().manual_seed(0))}
    one.model = ZooModel("made here", "torch", 1, lambda _seed, _v: feed, module=_Masked(least=least))
    one.inputs = one.model.inputs()
    with torch.inference_mode():
        found = one.exact()
    assert found["float64"] is not least
    with np.load(found["outputs"]) as kept:
        assert kept["arr_0"].dtype == (np.float32 if least else np.float64) and np.isfinite(kept["arr_0"]).all()


def test_names_are_chosen_whole_or_by_a_part() -> None:
    assert [e.name for e in chosen("mlp", "")] == ["mlp"]
    assert {e.name for e in chosen("mlp*", "int8 t")} == {"mlp.int8-tensor"}
    with pytest.raises(InputError, match="no model 'mpl'"):
        find("mpl")


def test_a_torn_line_is_a_row_that_is_not_there_and_the_last_one_counts(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    for ms in (2.0, 3.0):
        rows.append(file, Row("a", "text", "torch", 1, ms={OURS: ms}))
    with file.open("a") as f:
        f.write('{"model": "b", "fam')
    (row,) = rows.read(file)
    assert row.ms == {OURS: 3.0}


def _explained(tier: int | None, notes: list[str], decisions: list[dict[str, Any]]) -> dict[str, Any]:
    plan = {"tier": tier, "calls": 7, "notes": notes, "partitions": [{"backend": "library", "ops": {"aten.topk": 1}}]}
    return {"sites": [{"plans": [] if tier is None else [plan]}], "decisions": decisions, "background_faults": {}}


def test_causes_are_read_from_what_was_told() -> None:
    refused = {"action": "refuse", "why": "it did not measure faster", "evidence": {"us_before": 1}}
    assert causes(_explained(None, [], [refused]))[0].startswith("not captured: it did not measure faster")
    assert causes(_explained(0, [], [])) == ["tier 1 late"]
    assert causes(_explained(0, [], [refused]))[0].startswith("tier 1 refused: it did not")
    told = causes(_explained(1, ["sort interrupts a run: 9000 numbers", "sort interrupts a run: 8000 numbers",
                                 "a group of 5 is cut before aten.cumsum: no kernel"], []))  # fmt: skip
    assert told[0] == "interrupts a run: sort: # numbers x2" and told[1].startswith("cut before: aten.cumsum")
    assert "stays with the library: topk x1" in told and told[-1] == "own kernels"
    assert [kind_of(t) for t in told[:2]] == ["interrupts a run: sort", "cut before: aten.cumsum"]


def test_lost_time_is_added_up_by_cause_and_losses_are_named() -> None:
    def row(name: str, ratio: float, *why: str) -> Row:
        return Row(name, "int8 dynamic", "onnx", 1, ms={OURS: 2.0, "ort": 2.0 * ratio}, ratios={OURS: 1.0, "ort": ratio},
                   tiers_s={"1": 2.0}, causes=list(why))  # fmt: skip

    text = "\n".join(rows.summary([row("a", 0.5, "own kernels"), row("b", 0.8, "own kernels"), row("c", 2.0)]))
    assert "| own kernels | 0.70 | a 0.50×, b 0.80× |" in text and "0.50× (a)" in text and "0.50×; 2 of 3" in text
    wrong = Row("d", "text", "torch", 1, status="wrong", why="off by 1")
    assert "d: wrong, off by 1" in "\n".join(rows.summary([wrong]))


def test_the_first_seconds_count_loading() -> None:
    row = Row("a", "text", "torch", 1, ms={"ort": 10.0}, load_s={"ort": 1.0}, first_ms={"ort": 0.0}, cold_calls=200)
    assert row.cold == pytest.approx(200 / 401)


def test_a_wrong_answer_is_a_row_that_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Ours is compared twice: at first, and with what serves in the end."""
    import numpy as np

    files = {}
    for name, value in (("exact", 1.0), ("ort", 1.0 + 1e-6), ("first", 1.0), ("now", 1.1)):
        files[name] = str(tmp_path / f"{name}.npz")
        np.savez(files[name], np.full(3, value))
    table = Table(find("mlp"), 1, ["ort"], 1.0, 1)
    table.answers = {"ort": files["ort"], OURS: files["first"]}
    answered = {"exact": {"outputs": files["exact"], "float64": True}, "about": {"outputs": files["now"]}}
    monkeypatch.setattr(table, "_ask", lambda _who, _limit, do: answered[do])
    table._compare()
    assert table.row.status == "wrong" and "1.0e-01 at the end" in table.row.why


def test_one_model_end_to_end_and_not_again(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    command = [sys.executable, "-m", "benchmarks.corpus", "run", "--only", "mlp", "--seconds", "2", "--rounds", "2",
               "--peers", "eager", "--json", str(out)]  # fmt: skip
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    first = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, timeout=240)
    assert first.returncode == 0, first.stderr
    (row,) = rows.read(out)
    assert row.status == "ok" and row.float64 and set(row.ms) == {OURS, "eager"}, row
    assert row.errors[OURS] < 1e-5 and row.grown and row.load_s and row.causes
    again = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, timeout=240)
    assert again.returncode == 0 and not again.stdout, again
    assert len([json.loads(line) for line in out.read_text().splitlines()]) == 1


@pytest.mark.parametrize(("defined", "status"), [(1.14522e-05, "ok"), (1.14739e-05, "wrong"), (None, "wrong")])
def test_where_onnx_runtime_disagrees_the_operators_definitions_judge(
    defined: float | None, status: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """ONNX Runtime's sigmoid gives 1.14739e-05 for 1.14522e-05; without a third opinion ours counts as wrong."""
    files = {}
    for name, value in (("ours", 1.14522e-05), ("ort", 1.14739e-05), ("defined", defined or 0.0)):
        files[name] = str(tmp_path / f"{name}.npz")
        np.savez(files[name], np.full(1, value, np.float32))
    table = Table(find("wake-alexa"), 1, ["ort"], 1.0, 1)
    table.answers = {"ort": files["ort"], OURS: files["ours"]}
    answered = {"exact": {"outputs": files["ort"], "float64": False}, "about": {"outputs": files["ours"]}}
    monkeypatch.setattr(table, "_ask", lambda _who, _limit, do: answered[do])

    class Judge:
        def ask(self, _limit: float, **_command: Any) -> dict[str, Any]:
            return {"absent": "no such operator"} if defined is None else {"outputs": files["defined"]}

    table.processes = {"ort": Judge(), OURS: Judge()}  # pyright: ignore[reportAttributeAccessIssue]
    table._compare()
    assert table.row.status == status and "off by 1.9e-03" in table.row.why
