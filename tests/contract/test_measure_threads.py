"""A kernel that is timed on several threads has memory for all of them, whatever the process that times it has."""

from __future__ import annotations

import gc

import pytest
import torch

from hotfuse.compile.learn import measure
from hotfuse.hpm.work import Candidate
from hotfuse.ir.text import parse
from hotfuse.lower.cpu import scratch
from hotfuse.lower.cpu.tiling import core_for


@pytest.mark.parametrize("threads", [1, 4])
def test_every_thread_has_its_slice(threads: int) -> None:
    graph = parse("""graph main(%a: f32[8, 64, 600], %b: f32[8, 600, 96]) {
      %y: f32[8, 64, 96] = aten.bmm.default(%a, %b)
      return %y
    }""")
    core = core_for(16, many_registers=True)
    made = measure.make(graph, core)
    plan = scratch.plan(made.lowered.kernel)
    assert plan.arena_bytes({}, 4) > plan.arena_bytes({}, 1)  # threads have memory of their own
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        bound = measure.bind(Candidate(graph, {}, core, threads), "kernel", made)
    finally:
        torch.set_num_threads(before)
    _, (*_, asked), results, data = bound.keep
    assert asked.scratch.nbytes >= plan.arena_bytes({}, threads)
    bound.call()
    torch.testing.assert_close(results[0], torch.bmm(data["a"], data["b"]), rtol=1e-4, atol=1e-3)


def test_nothing_is_collected_before_or_within_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = parse("""graph main(%a: f32[8, 64]) {
      %y: f32[8, 64] = aten.relu.default(%a)
      return %y
    }""")
    core = core_for(16, many_registers=True)
    bound = measure.bind(Candidate(graph, {}, core, 1), "kernel", measure.make(graph, core))
    seen: list[str] = []
    monkeypatch.setattr(gc, "collect", lambda *_: seen.append("collected"))  # all that a worker holds: longer than most turns
    real = measure.BoundCall.turn
    monkeypatch.setattr(measure.BoundCall, "turn", lambda b: (seen.append("on") if gc.isenabled() else None, real(b)))
    measure.timed([bound])
    assert not seen and gc.isenabled() and bound.times
