"""What a worker has at hand: which of it a request sees follows from that request alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from hotfuse.base.errors import CaptureError, InternalError
from hotfuse.base.settings import Settings
from hotfuse.compile import request_context, requests
from hotfuse.compile.answer_bodies import checked
from hotfuse.compile.request_context import RequestSettings, settings_of, used_by
from hotfuse.compile.run import runs
from hotfuse.compile.unit.kernel_cache import kernel_cache
from hotfuse.pipeline import compile_tier1
from tests.contract.lowering import group_of

GRAPH = """graph main(%x: f32[4, 8]) {
  %y: f32[4, 8] = aten.relu.default(%x)
  return %y
}
"""


@pytest.mark.parametrize("asked", [{"precision": "bf16"}, {"objective": "memory"}], ids=str)
def test_a_request_decides_for_itself_alone(asked: dict[str, str]) -> None:
    """In a process that answers its own requests, what comes next would otherwise be lowered as the last one wanted it."""
    plain = kernel_cache()
    with used_by(asked):
        assert kernel_cache() is not plain
        with used_by({}):
            assert kernel_cache() is plain
    assert kernel_cache() is plain
    checked(requests.answer({"kind": "plan", "graph": GRAPH, "dims": {}, **asked}, []))
    assert kernel_cache() is plain


def test_a_request_that_fails_leaves_nothing_either() -> None:
    plain = kernel_cache()
    with pytest.raises(ValueError, match="of no use"), used_by({"precision": "bf16"}):
        raise ValueError("of no use")
    assert kernel_cache() is plain


def test_settings_travel_as_a_whole() -> None:
    every = RequestSettings("bf16", "memory", 7, "interp", ("library",), "*")
    assert RequestSettings.from_header(every.header()) == every
    assert all(getattr(every, f.name) != f.default for f in dataclasses.fields(RequestSettings)), "a field is not told apart here"
    made = settings_of(Settings(precision="bf16", objective="memory", threads=7, backend="interp"), ("library",), "*")
    assert made == every


@pytest.mark.parametrize("bad", [{"version": 0}, {"precision": "fp7"}, {"objective": "glory"}], ids=str)
def test_a_request_that_says_what_nobody_understands_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(InternalError, match="a request"), used_by(bad):
        pass
    with pytest.raises(CaptureError, match="a request"):
        checked(requests.answer({"kind": "plan", "graph": GRAPH, "dims": {}, **bad}, []))


def test_kernels_between_runs_are_made_as_the_settings_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs need kernels besides those that units had: precision and objective hold for them as well."""
    seen: list[tuple[str, bool, int]] = []
    plain = runs._planned  # pyright: ignore[reportPrivateUsage]

    def noted(*args: Any) -> Any:
        core = kernel_cache().core
        seen.append((request_context.request_settings().precision, core.lean, core.threads))
        return plain(*args)

    monkeypatch.setattr(runs, "_planned", noted)
    x = torch.randn(64, 512)
    made = group_of(lambda t: torch.softmax(t * 2, -1) + t.mean(-1, keepdim=True), [x])
    settings = Settings(capture="inline", record=False, precision="bf16", objective="memory", threads=3)
    compile_tier1(made.graph, {}, [x], settings)
    assert seen and set(seen) == {("bf16", True, 3)}
