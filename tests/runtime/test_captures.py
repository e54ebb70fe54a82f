"""Which sizes a capture leaves open, here and from process to process, and that it waits for no improvement of another plan."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hotfuse.base.errors import CaptureError
from hotfuse.base.settings import Settings
from hotfuse.compile.answer_bodies import message, refusal
from hotfuse.compile.captured_answers import answer_of
from hotfuse.compile.captures import Known, captured, known, recalled
from hotfuse.compile.workers import wire
from hotfuse.frontends.captured import CallSpec, Captured, TensorSpec
from hotfuse.ir.text import parse
from hotfuse.runtime.background import Background
from hotfuse.runtime.call_group import MAX_OPEN, MAX_SHAPE_KINDS, MIN_CALLS, CallGroup


def seen(*kinds: int, calls: int) -> CallGroup:
    group = CallGroup(((1, kinds[0]),), [set()])
    for i in range(calls):
        group.note(((1, kinds[i % len(kinds)]),))
    return group


def test_few_calls_say_only_which_sizes_vary() -> None:
    assert seen(576, 288, calls=MIN_CALLS - 1).dynamic() == [{1}]


def test_few_kinds_among_many_calls_are_captured_as_they_are() -> None:
    group = seen(576, 288, calls=MIN_CALLS)
    assert MAX_SHAPE_KINDS == 2 and group.dynamic() == [set()]
    group.note(((1, 300),))  # a third kind: sizes do vary
    assert group.dynamic() == [{1}]


def test_kinds_are_told_apart_up_to_a_bound() -> None:
    group = seen(*range(2, 200), calls=198)
    assert len(group.kinds) == MAX_SHAPE_KINDS + 1 and group.dynamic() == [{1}]


def test_a_capture_does_not_queue_behind_other_jobs() -> None:
    waiting: list[object] = []
    errors: list[Exception] = []
    done = threading.Event()
    background = Background(waiting.append, inline=False, failed=errors.append, captures=lambda job: job())
    background.start(lambda: None)
    background.begin()
    background.go_on(done.set, capture=True)
    assert done.is_set() and len(waiting) == 1 and not background.wait(0.0)
    one_queue = Background(waiting.append, inline=False, failed=errors.append)
    one_queue.begin()
    one_queue.go_on(done.clear, capture=True)
    assert done.is_set() and len(waiting) == 2 and not errors


# --- from process to process ------------------------------------------------------------------------------------------


def call(*shape: int, opened: tuple[int, ...] = (), across: bool = False) -> CallSpec:
    strides = torch.empty(shape, device="meta").stride()
    return CallSpec((TensorSpec(shape, strides, torch.float32, "cpu", frozenset(opened)),), across=across)


def answering(text: str) -> Callable[[CallSpec], wire.Message]:
    return lambda _: message(*answer_of(Captured(parse(text), {}, {})))


@pytest.fixture
def at(tmp_path: Path) -> Known:
    found = known("torch", lambda: "a model", Settings(cache_dir=tmp_path))
    assert found is not None
    return found


FIXED = "graph m(%x: f32[4, 8]) { %y: f32[4, 8] = aten.relu.default(%x) return %y }"
OPEN = "graph m(%x: f32[s0, 8]) where (s0 <= 16) { %y: f32[s0, 8] = aten.relu.default(%x) return %y }"


def test_dims_that_differ_from_process_to_process_are_left_open(at: Known) -> None:
    captured(at, "", call(4, 8), answering(FIXED), 1.0)
    others = at.other_sizes("", call(6, 8))
    assert [o.shapes for o in others] == [((4, 8),)] and not at.other_sizes("another", call(6, 8))
    for other in (call(1, 8), call(4, 8, 1), call(4, 8)):  # a size of 1 is another kind of size; another rank; the same
        assert not at.other_sizes("", other)
    group = seen(8, calls=MIN_CALLS)
    group.note_other_processes(call(1, 8), [call(1, 6), call(1, 9)])
    assert group.dynamic() == [{1}] and group.across_processes()
    group.note(((1, 9),))
    assert not group.across_processes()  # calls here show it as well


def test_dims_whose_captures_failed_stay_closed_whatever_other_processes_had() -> None:
    group = seen(8, calls=2)
    group.note(((1, 9),))
    group.note_other_processes(call(1, 8), [call(1, 6)])
    assert group.dynamic() == [{1}] and not group.across_processes()
    group.not_open = MAX_OPEN
    assert group.dynamic() == [set()]  # or it would be captured with that dim again, and fail, for as long as calls come


def test_a_graph_that_other_processes_opened_serves_sizes_that_it_was_captured_for(at: Known) -> None:
    captured(at, "", call(4, 8), answering(FIXED), 1.0)
    captured(at, "", call(6, 8, opened=(0,), across=True), answering(OPEN), 1.0)
    found = recalled(at, "", call(9, 8))
    assert found is not None and found[1].across
    assert recalled(at, "", call(17, 8)) is None  # the trace rests on at most 16
    own = recalled(at, "", call(4, 8))
    assert own is not None and not own[1].across  # whoever has these very sizes keeps its own


def test_what_could_not_be_opened_is_not_tried_by_every_process(at: Known) -> None:
    captured(at, "", call(4, 8), answering(FIXED), 1.0)
    captured(at, "", call(6, 8, opened=(0,), across=True), answering(OPEN), 1.0)
    at.fix_sizes("")
    assert recalled(at, "", call(9, 8)) is None and not at.other_sizes("", call(9, 8))
    assert recalled(at, "", call(4, 8)) is not None

    def refused(_: CallSpec) -> wire.Message:
        return refusal(CaptureError("no"))

    with pytest.raises(CaptureError):
        captured(at, "", call(9, 8), refused, 1.0)
    assert [c.shapes for _, c in at.remembered()] == [((4, 8),)]
