"""What runs and why is told while it happens, and afterwards."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import torch
from onnx import TensorProto, helper
from torch import nn
from typer.testing import CliRunner

import hotfuse
from hotfuse.base.events import Decision, EventLog
from hotfuse.cli import app
from hotfuse.runtime.observe.call_sampler import CallSampler
from hotfuse.runtime.tierup.improve import Improver
from tests.mechanisms.table import Row, World, replaced, setting
from tests.runtime.test_tiers import race_says


def explained(read: Callable[[dict[str, Any], str], float]) -> Callable[[World], float]:
    def probe(world: World) -> float:
        race_says(world.patch, False)
        with hotfuse.jit(nn.Linear(8, 8).eval(), settings=world.settings()) as fast:
            for _ in range(12):
                fast(torch.randn(2, 8))
            found = fast.explain(full=True)
            return read(found.to_dict(), str(found))

    return probe


def unrecorded(_self: object, action: Any, why: Any, subject: str = "", **evidence: Any) -> Decision:
    return Decision(action, why, subject, evidence)


def said(world: World) -> float:
    """Lines on standard error."""
    out = io.StringIO()
    with contextlib.redirect_stderr(out), hotfuse.jit(nn.Linear(8, 8).eval(), settings=world.settings(debug=1)) as fast:
        for _ in range(3):
            fast(torch.randn(2, 8))
    return sum(line.startswith("hotfuse: ") for line in out.getvalue().splitlines())


def traced(category: str) -> Callable[[World], float]:
    """Bars of one kind in a trace file."""

    def probe(world: World) -> float:
        with tempfile.TemporaryDirectory() as folder, hotfuse.jit(nn.Linear(8, 8).eval(), settings=world.settings()) as fast:
            for _ in range(6):
                fast(torch.randn(2, 8))
            events = json.loads(fast.explain().to_trace(Path(folder) / "t.json").read_text())["traceEvents"]
        return sum(e["ph"] == "X" and e["cat"] == category for e in events)

    return probe


def by_command(world: World) -> float:
    """Plans that `hotfuse explain model.onnx --calls N` tells of."""
    if "environment" not in world.changes:
        world.patch.setenv("HOTFUSE_CAPTURE", "inline")
    node = helper.make_node("Relu", ["x"], ["y"])
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [2, 3]) for n in "xy")
    model = helper.make_model(helper.make_graph([node], "g", [x], [y]), opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.onnx"
        onnx.save(model, path)
        result = CliRunner().invoke(app, ["explain", str(path), "--calls", "5", "--json"])
    assert result.exit_code == 0, result.output
    return sum(len(s["plans"]) for s in json.loads(result.stdout)["sites"])


def captures_off(world: World) -> None:
    world.changes["environment"] = "off"
    world.patch.setenv("HOTFUSE_CAPTURE", "off")


row = functools.partial(Row, "explaining")
ROWS: tuple[Row, ...] = (
    row("decisions with their reasons", explained(lambda d, _t: len(d["decisions"])), replaced(EventLog, "decide", unrecorded)),
    row("plans with guards and hits", explained(lambda d, _t: sum(len(p["facts"]) for s in d["sites"] for p in s["plans"])),
        setting(capture="off")),
    row("why a plan is no higher", explained(lambda d, _t: sum(len(p["refused"]) for s in d["sites"] for p in s["plans"])),
        replaced(Improver, "consider", lambda *_a: None)),
    row("what was watched", explained(lambda _d, t: t.count("calls sampled")), replaced(CallSampler, "text", lambda _self: "")),
    row("HOTFUSE_DEBUG=1 prints decisions as they happen", said, setting(debug=0)),
    row("calls on the time axis of a trace", traced("calls"), replaced(EventLog, "span", lambda *_a, **_k: None)),
    row("compiles on the time axis of a trace", traced("compile"), setting(tiers=0)),
    row("hotfuse explain model.onnx --calls N", by_command, captures_off),
)  # fmt: skip
