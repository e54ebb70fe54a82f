"""Which calls are replayed, recorded, or run kernel by kernel; on the CPU, where a recording is the run on tensors of its own."""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from typing import Any

import pytest
import torch

from hotfuse.backends.cuda.graph_recording import Results, on_own_inputs, unrecordable
from hotfuse.backends.cuda.graphs import AT_ONCE_S, MAX_KINDS, SHARE, GraphRun
from hotfuse.base.errors import CaptureError
from hotfuse.runtime.tierup.agreement import disagreement


class OnCpu:
    """Records by keeping the inputs, replays by running on them."""

    def __init__(self) -> None:
        self.serving, self.refuses, self.spoils, self.took_s, self.now = True, "", False, 0.0, 0.0
        self.short = False
        self.bytes, self.left, self.shortage = 0, 1 << 40, ""
        self.inside = self.most_inside = self.drained = 0

    def record(self, run: Any, inputs: Sequence[torch.Tensor], in_place: Collection[int] = ()) -> Any:
        self.now += self.took_s
        if self.refuses:
            raise CaptureError("no", because=self.refuses)
        static, _ = on_own_inputs(run, inputs, in_place)
        device = self

        class Kept:
            def replay(self, given: Sequence[torch.Tensor]) -> tuple[Any, ...]:
                if device.short:
                    raise torch.OutOfMemoryError("no memory left")
                for mine, theirs in zip(static, given, strict=True):
                    mine.copy_(theirs)
                outs = run(*static)
                return tuple(o.clone() + 1 if device.spoils else o.clone() for o in outs)

        return Kept()

    def may_record(self) -> bool:
        return self.serving

    def enter(self) -> None:
        self.inside += 1
        self.most_inside = max(self.inside, self.most_inside)

    def leave(self) -> None:
        self.inside -= 1

    def drain(self) -> None:
        self.drained += 1

    def held(self) -> int:
        return self.bytes

    def total(self) -> int:
        return 1

    def free(self) -> int:
        return self.left

    def short_of_memory(self) -> str:
        return self.shortage

    def random_state(self) -> int:
        return 0


def differ(got: tuple[Any, ...], want: tuple[Any, ...]) -> str:
    return disagreement(list(got), list(want), 1e-5)


def made(device: OnCpu, most: int = 32) -> GraphRun:
    return GraphRun(lambda x: (torch.sin(x) * 2,), device, differ, most, lambda: device.now)


def test_the_second_call_of_a_kind_records_the_third_proves_and_later_ones_replay() -> None:
    run = made(OnCpu())
    for n in range(5):
        x = torch.randn(3, 4)
        assert (run.replayed(x) is None) == (n < 3), "nothing answers before it was compared"
        run.counts["replays"] = 0
        assert torch.equal(run(x)[0], torch.sin(x) * 2)
        assert run.counts["recorded"] == int(n > 0)
    assert (run.counts["kernel_by_kernel"], run.counts["replays"]) == (3, 1)


@pytest.mark.parametrize("shape", [(0,), (1,), (2, 0, 3), (), (5, 1)])
def test_empty_and_single_sizes(shape: tuple[int, ...]) -> None:
    run = made(OnCpu())
    for _ in range(5):
        x = torch.randn(shape)
        assert torch.equal(run(x)[0], torch.sin(x) * 2)
    assert run.counts["replays"] == 2


def test_other_strides_are_another_kind() -> None:
    run = made(OnCpu())
    for x in (torch.randn(4, 6), torch.randn(6, 4).t(), torch.randn(4, 6), torch.randn(6, 4).t()):
        assert torch.equal(run(x)[0], torch.sin(x) * 2)
    assert run.counts["recorded"] == 2


def test_results_are_the_callers_own() -> None:
    run = made(OnCpu())
    xs = [torch.randn(3) for _ in range(6)]
    ys = [run(x)[0] for x in xs]
    for x, y in zip(xs, ys, strict=True):
        assert torch.equal(y, torch.sin(x) * 2)


def test_background_threads_and_streams_under_recording_run_kernel_by_kernel() -> None:
    device = OnCpu()
    run = made(device)
    device.serving = False
    for _ in range(5):
        run(torch.randn(3))
    assert run.counts["recorded"] == 0
    device.serving = True
    for _ in range(4):
        run(torch.randn(3))
    device.serving = False
    run(torch.randn(3))
    assert (run.counts["recorded"], run.counts["replays"]) == (1, 1)


def test_what_cannot_be_recorded_is_not_tried_again_and_says_why() -> None:
    device = OnCpu()
    run = made(device)
    device.refuses = "it synchronizes"
    for _ in range(6):
        run(torch.randn(3))
    assert (run.counts["not_recordable"], run.refused, run.counts["recorded"]) == (1, "it synchronizes", 0)
    device.refuses = ""
    for _ in range(3):
        run(torch.randn(4))
    assert run.counts["recorded"] == 1


def test_a_replay_that_disagrees_never_answers() -> None:
    device = OnCpu()
    run = made(device)
    device.spoils = True
    for _ in range(5):
        x = torch.randn(3)
        assert torch.equal(run(x)[0], torch.sin(x) * 2)
    assert run.counts["not_recordable"] == run.counts["dropped"] == 1
    assert run.refused and not run.counts["replays"]


def test_recording_takes_at_most_its_share_of_the_time() -> None:
    device = OnCpu()
    run = made(device, most=4)
    device.took_s = 0.02
    for i in range(4000):  # kinds that come in turns, more than are kept
        run(torch.randn(1 + i % 50))
        device.now += 0.001
    spent = run.counts["recorded"] * device.took_s
    assert 0.1 < spent <= AT_ONCE_S + SHARE * device.now + device.took_s
    assert run.counts["dropped"] == run.counts["recorded"] - 4 == device.drained


def test_kinds_that_never_recur_are_forgotten() -> None:
    run = made(OnCpu())
    for n in range(3 * MAX_KINDS):
        run(torch.randn(n))
    assert len(run._met) <= MAX_KINDS  # pyright: ignore[reportPrivateUsage]
    assert run.counts["recorded"] == 0


def test_threads_replay_one_at_a_time_and_get_their_own_results() -> None:
    device = OnCpu()
    run = made(device)
    for _ in range(3):
        run(torch.randn(64))
    wrong: list[int] = []

    def go(seed: int) -> None:
        g = torch.Generator().manual_seed(seed)
        for _ in range(200):
            x = torch.randn(64, generator=g)
            if not torch.equal(run(x)[0], torch.sin(x) * 2):
                wrong.append(seed)

    threads = [threading.Thread(target=go, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong
    assert device.most_inside == 1


def test_results_that_share_memory_share_it_in_every_copy_and_inputs_given_back_are_the_callers() -> None:
    x, y = torch.randn(4), torch.randn(3, 4)
    with pytest.raises(CaptureError, match="view of an input"):
        Results([x[1:]], [x])
    with pytest.raises(CaptureError, match="different types"):
        Results([y, y.view(torch.int32)], [x])
    kept = Results([x, 7, [y], y.t(), y[1:, 2], y[:, :0]], [x])
    given = torch.randn(4)
    mine, number, (whole,), turned, part, empty = kept.copied([given])
    assert mine is given and number == 7 and tuple(empty.shape) == (3, 0)
    assert torch.equal(whole, y) and torch.equal(turned, y.t()) and torch.equal(part, y[1:, 2])
    whole.fill_(3.0)
    assert bool((turned == 3).all()) and bool((part == 3).all()) and turned.stride() == y.t().stride()
    assert not bool((y == 3).any())
    assert torch.equal(kept.copied([given])[3], y.t())


def test_inputs_that_cannot_be_copied_into() -> None:
    cpu = torch.device("cpu")
    assert unrecordable([torch.randn(3, 4), torch.randn(())], cpu) == ""
    assert "repeats" in unrecordable([torch.randn(1, 4).expand(3, 4)], cpu)
    assert "on cpu" in unrecordable([torch.randn(3)], torch.device("cuda:0"))


def test_a_replay_that_is_asked_for_ahead_records_and_runs_nothing() -> None:
    device, ran = OnCpu(), 0

    def run(x: torch.Tensor) -> tuple[torch.Tensor]:
        nonlocal ran
        ran += 1
        return (x * 2,)

    made = GraphRun(run, device, lambda got, want: disagreement(got, want, 0.0))
    x = torch.randn(3)
    assert made.replayed(x) is None and not ran and not made.counts["kernel_by_kernel"]
    for _ in range(3):
        made(x)
    assert made.counts["recorded"] == 1
    found = made.replayed(x + 1)
    assert found is not None and torch.equal(found[0], (x + 1) * 2) and made.counts["replays"] == 1
    assert made.replayed(torch.randn(4)) is None
    device.serving = False
    assert made.replayed(x) is None


def test_without_memory_for_results_recordings_go_and_kernels_answer() -> None:
    device = OnCpu()
    run = made(device)
    for _ in range(4):
        run(torch.randn(3))
    device.short = True
    x = torch.randn(3)
    assert torch.equal(run(x)[0], torch.sin(x) * 2)
    assert (run.counts["dropped"], run.counts["kernel_by_kernel"]) == (1, 4) and device.drained
    for _ in range(4):  # not again for a while
        run(torch.randn(3))
    assert run.counts["recorded"] == 1
    device.now += 120.0
    device.short = False
    for _ in range(3):
        run(torch.randn(3))
    assert run.counts["recorded"] == 2


def test_a_call_whose_recording_finds_no_memory_has_its_answer() -> None:
    device = OnCpu()
    run = made(device)
    for _ in range(2):
        run(torch.randn(3))
    device.short = True
    x = torch.randn(3)
    assert torch.equal(run(x)[0], torch.sin(x) * 2)
    assert run.counts["not_recordable"] == 1 and "OutOfMemory" in run.refused


@pytest.mark.parametrize(("held", "left", "recorded"), [(100, 200, 1), (100, 199, 0), (0, 0, 1)])
def test_recordings_leave_memory_to_the_program(held: int, left: int, recorded: int) -> None:
    device = OnCpu()
    device.bytes, device.left = held, left
    run = GraphRun(lambda x: (x + 1,), device, differ)
    for _ in range(4):
        assert torch.equal(run(torch.ones(2))[0], torch.full((2,), 2.0))
    assert run.counts["recorded"] == recorded and run.counts["not_recordable"] == 1 - recorded
    assert ("leave 0 MiB" in run.refused) == (not recorded)


def test_nothing_is_recorded_where_memory_is_short() -> None:
    device = OnCpu()
    device.shortage = "calls need all of it"
    run = GraphRun(lambda x: (x + 1,), device, differ)
    for _ in range(4):
        assert torch.equal(run(torch.ones(2))[0], torch.full((2,), 2.0))
    assert not run.counts["recorded"] and run.refused == "calls need all of it"
