"""Which sizes a capture leaves open, and that it waits for no improvement of another plan."""

from __future__ import annotations

import threading

from hotfuse.runtime.background import Background
from hotfuse.runtime.site import MAX_SHAPE_KINDS, MIN_CALLS, CallGroup


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
