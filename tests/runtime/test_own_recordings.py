"""When the model's own code is recorded, replayed, refused and let go; on the CPU a recording is the run on tensors of its own."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from hotfuse.api import TorchModel
from hotfuse.backends.cuda.graph_recording import Results, on_own_inputs
from hotfuse.base.errors import CaptureError, RecordingError
from hotfuse.base.events import Action, EventLog, Why
from hotfuse.base.settings import Settings
from hotfuse.machine import device_stream
from hotfuse.runtime.serve.own_kinds import MAX_PLACES
from hotfuse.runtime.serve.own_recordings import MAX_PUT_OFF, MAX_RECORDINGS, PROOFS, WARM_UPS, OwnRecordings

SETTINGS = Settings(record=False, idle=False)
RACED = 60
"""Calls in which a race is surely over that one side wins by far."""
SLEEP_S = 0.006
"""What a call of the model takes. A replay here takes what is around a recording, too, on a busy machine some milliseconds."""


class OnCpu:
    """Records by keeping the inputs, replays by running on them; the model sleeps, a replay does not.

    Of the package, as real devices are: the guard looks into other objects that a model's code reads, and this one is no part of
    what the model means.
    """

    __module__ = "hotfuse.backends"

    def __init__(self) -> None:
        self.asleep = False
        self.refuses = ""
        self.drained = 0
        self.bytes, self.left, self.shortage = 0, 1 << 40, ""
        self.spoils = 0.0
        self.told: list[bool] = []

    def record(self, run: Any, inputs: Sequence[torch.Tensor], in_place: Collection[int] = ()) -> Any:
        if self.refuses:
            raise CaptureError("no", because=self.refuses)
        static, _ = on_own_inputs(run, inputs, in_place)
        self.bytes += 1
        device = self

        class Kept:
            def replay(self, given: Sequence[torch.Tensor]) -> tuple[Any, ...]:
                for i, (mine, theirs) in enumerate(zip(static, given, strict=True)):
                    if i not in in_place:
                        mine.copy_(theirs)
                device.asleep = True
                try:
                    with torch.inference_mode(False), torch.no_grad():
                        outs = run(*static)
                    found = Results(outs, static).copied(given)
                finally:
                    device.asleep = False
                return tuple(o + device.spoils if isinstance(o, torch.Tensor) and device.spoils else o for o in found)

        return Kept()

    def may_record(self) -> bool:
        return True

    def enter(self) -> None:
        pass

    def leave(self) -> None:
        pass

    def drain(self) -> None:
        self.drained += 1

    def held(self) -> int:
        return self.bytes

    def total(self) -> int:
        return 1000

    def free(self) -> int:
        return self.left

    def short_of_memory(self) -> str:
        return self.shortage

    def random_state(self) -> int:
        return 0


class Slow(nn.Module):
    """What launching costs is sleep, which a replay does not have."""

    def __init__(self, device: OnCpu, seconds: float = SLEEP_S) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("scale", torch.full((4,), 2.0))
        self.device, self.seconds = device, seconds

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        if not self.device.asleep:
            time.sleep(self.seconds)
        y = self.inner(x) * self.scale
        return {"y": y, "again": y[:1], "sum": y.sum() if bias is None else y.sum() + bias}


def made(
    model: Any, device: OnCpu, settings: Settings = SETTINGS, disturbed: Callable[[], bool] = lambda: False
) -> tuple[OwnRecordings, EventLog]:
    log = EventLog(256)
    served = TorchModel(model, settings)
    run = OwnRecordings(served, settings, log, lambda job: job(), lambda _of: device, "cpu", lambda: True, disturbed=disturbed)
    return run, log


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def serving(model: nn.Module, device: OnCpu, make: Callable[[], torch.Tensor] = lambda: torch.randn(3, 4)) -> tuple[Any, EventLog]:
    run, log = made(model, device)
    for _ in range(RACED):
        run(make())
    return run, log


def whys(log: EventLog, action: Action) -> list[Why]:
    return [d.why for d in log.decisions if d.action is action]


def test_recorded_in_the_third_call_proven_raced_and_replayed() -> None:
    device = OnCpu()
    model = Slow(device)
    run, log = made(model, device)
    for n in range(RACED):
        x = torch.randn(3, 4)
        got, want = run(x), model(x)
        assert list(got) == list(want) and all(torch.equal(got[k], want[k]) for k in want)
        assert (run.counts["recorded"] == 1) is (n >= WARM_UPS), n
    assert whys(log, Action.DEPLOY) == [Why.FASTER]
    assert run.counts["replays"] > RACED // 2
    told = run.explain()
    assert told["kinds"][0]["state"] == "replayed" and told["kinds"][0]["race"]["us_after"] < told["kinds"][0]["race"]["us_before"]


@pytest.mark.parametrize("calls", [5, MAX_PUT_OFF + 50])
def test_calls_beside_a_job_that_is_at_work_are_recorded_behind_it_or_when_it_lasts(calls: int) -> None:
    device, ran = OnCpu(), 0
    model = Slow(device, 0.0)
    run, _ = made(model, device, disturbed=lambda: ran < WARM_UPS + calls)
    x = torch.randn(3, 4)
    while not run.counts["recorded"]:
        assert torch.equal(run(x)["y"], model(x)["y"])
        ran += 1
        assert ran < 2 * MAX_PUT_OFF
    put_off = min(calls, MAX_PUT_OFF)
    assert ran == WARM_UPS + put_off + 1
    assert run.counts["put_off"] == put_off


def test_results_are_the_callers_own_and_share_memory_as_the_models_do() -> None:
    device = OnCpu()
    run, _ = serving(Slow(device), device)
    x = torch.randn(3, 4)
    first, second = run(x), run(torch.randn(3, 4))
    assert not torch.equal(first["y"], second["y"])
    first["again"].fill_(7.0)
    assert bool((first["y"][0] == 7).all())


def test_keywords_sizes_strides_types_and_allowed_kernels_are_kinds_of_their_own() -> None:
    device = OnCpu()
    model = Slow(device)
    run, _ = serving(model, device)
    before = run.counts["replays"]
    for args, kwargs in [((torch.randn(5, 4),), {}), ((torch.randn(4, 3).t(),), {}), ((), {"x": torch.randn(3, 4)}),
                         ((torch.randn(3, 4),), {"bias": torch.tensor(1.0)}), ((torch.randn(0, 4),), {})]:
        got, want = run(*args, **kwargs), model(*args, **kwargs)
        assert all(torch.equal(got[k], want[k]) for k in want)
    torch.use_deterministic_algorithms(True)
    try:
        run(torch.randn(3, 4))
    finally:
        torch.use_deterministic_algorithms(False)
    assert run.counts["replays"] == before


class Asks(Slow):
    """Code that asks its arguments for what their memory does not hold."""

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        more = getattr(x, "more", 0.0) + 1.0 * (bias is x) + 2.0 * isinstance(x, nn.Parameter) + 4.0 * x.requires_grad
        found = super().forward(x)["y"]
        return {"y": found + more}


def test_what_code_may_ask_of_arguments_is_a_kind_of_its_own() -> None:
    device = OnCpu()
    model = Asks(device).eval()
    run, _ = made(model, device)
    for _ in range(RACED):
        run(torch.randn(3, 4), torch.randn(3, 4))
    assert run.counts["replays"] > 0
    told, x = torch.randn(3, 4), torch.randn(3, 4)
    told.more = 8.0  # type: ignore[attr-defined]
    asked = (told, told.clone()), (x, x), (nn.Parameter(x), x), (x.clone().requires_grad_(), x), (x, told)
    for args in asked:
        before = run.counts["replays"]
        assert torch.equal(run(*args)["y"], model(*args)["y"]) and run.counts["replays"] == before
    before = run.counts["replays"]
    assert torch.equal(run(x, x.clone())["y"], model(x, x.clone())["y"]) and run.counts["replays"] == before + 1


def test_gradients_autocast_and_transforms_run_the_models_own_code() -> None:
    device = OnCpu()
    run, _ = serving(Slow(device), device)
    before = run.counts["replays"]
    with torch.enable_grad():
        assert run(torch.randn(3, 4))["y"].requires_grad
    with torch.autocast("cpu", dtype=torch.bfloat16):
        run(torch.randn(3, 4))
    torch.func.vmap(lambda x: run(x)["y"])(torch.randn(2, 3, 4))
    assert run.counts["replays"] == before


def test_inference_mode_and_no_grad_share_a_recording() -> None:
    device = OnCpu()
    model = Slow(device)
    with torch.inference_mode():
        run, _ = serving(model, device)
        assert run(torch.randn(3, 4))["y"].is_inference()
    x = torch.randn(3, 4)
    got = run(x)["y"]
    assert torch.equal(got, model(x)["y"]) and not got.is_inference()


def test_written_weights_are_read_and_exchanged_ones_end_the_recording() -> None:
    device = OnCpu()
    model = Slow(device)
    run, log = serving(model, device)
    x = torch.randn(3, 4)
    model.inner.weight.mul_(-3)
    assert torch.equal(run(x)["y"], model(x)["y"])
    model.inner.weight.data = torch.randn(4, 4)
    assert torch.equal(run(x)["y"], model(x)["y"])
    assert Why.MODEL_CHANGED in whys(log, Action.DROP) and device.drained
    for _ in range(RACED):
        assert torch.equal(run(x)["y"], model(x)["y"])
    assert run.counts["recorded"] >= 2
    model.eval()
    dropped = run.counts["dropped"]
    run(x)
    assert run.counts["dropped"] == dropped + 1


class Counts(Slow):
    def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        self.calls = getattr(self, "calls", 0) + 1
        return super().forward(x)


class Appends(Slow):
    """The guard does not look into sets of objects that compare in ways of their own."""

    def __init__(self, device: OnCpu) -> None:
        super().__init__(device)
        self.seen: list[object] | set[object] = {object()}

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        self.seen.add(object()) if isinstance(self.seen, set) else self.seen.append(object())
        return super().forward(x)


class Draws(Slow):
    def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        return super().forward(x + (random.random() > 2))


class Dropped(Slow):
    def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        return super().forward(nn.functional.dropout(x, 0.0, training=True) + torch.rand(()) * 0)


class GivesWeight(Slow):
    def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        return super().forward(x)["y"], self.inner.weight


class GivesInput(Slow):
    def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        return super().forward(x)["y"], x[1:]


@pytest.mark.parametrize(
    ("cls", "why"),
    [(Appends, Why.STATEFUL), (Draws, Why.RANDOM), (Dropped, Why.RANDOM),
     (GivesWeight, Why.NOT_CAPTURABLE), (GivesInput, Why.NOT_CAPTURABLE)],
)  # fmt: skip
def test_what_a_recording_would_leave_out_is_refused_once(cls: type[Slow], why: Why) -> None:
    device = OnCpu()
    model = cls(device)
    run, log = made(model, device)
    for _ in range(12):
        run(torch.randn(3, 4))
    assert whys(log, Action.REFUSE) == [why], list(map(str, log.decisions))
    assert run.counts["replays"] == 0 and run.counts["not_recordable"] == 1
    assert run.explain()["kinds"][0]["because"]


class FixedCache:
    """A cache of a fixed size, as programs pass it around: it is written in place, and counts on the device."""

    def __init__(self, rows: int = 64, longest: int = 64) -> None:
        self.longest, self.kept, self.filled = longest, torch.zeros(rows, 4), torch.tensor(0)


class Continues(Slow):
    """Adds a row to a cache and answers with all of them."""

    def forward(self, x: torch.Tensor, cache: FixedCache) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        y = super().forward(x)["y"]
        cache.kept.index_copy_(0, cache.filled.reshape(1) % cache.longest, y[:1])
        cache.filled.add_(1)
        return {"y": y, "all": cache.kept.sum(0), "cache": cache}


@pytest.mark.parametrize("inference", [False, True], ids=["no_grad", "inference_mode"])
def test_arguments_that_a_call_writes_are_written_by_replays_where_they_lie(*, inference: bool) -> None:
    with torch.inference_mode() if inference else torch.no_grad():
        device = OnCpu()
        model = Continues(device)
        run, log = made(model, device)
        before = 0
        for again in range(3):  # each with a cache at another address
            mine, theirs = FixedCache(), FixedCache()
            version = None if inference else mine.kept._version  # pyright: ignore[reportPrivateUsage]
            for _ in range(RACED):
                x = torch.randn(3, 4)
                got, want = run(x, mine), model(x, theirs)
                assert got["cache"] is mine and torch.equal(mine.kept, theirs.kept) and torch.equal(mine.filled, theirs.filled)
                assert torch.equal(got["y"], want["y"]) and torch.equal(got["all"], want["all"])
            assert run.counts["replays"] > before, run.explain()
            before = run.counts["replays"]
            assert version is None or mine.kept._version > version  # pyright: ignore[reportPrivateUsage]
            if again:
                assert run.counts["recorded"] == again + 1 and len(whys(log, Action.DEPLOY)) == 1  # no further race
        assert whys(log, Action.REFUSE) == []
        other = FixedCache(longest=32)  # a number that kernels were launched with
        run(torch.randn(3, 4), other)
        assert run.counts["replays"] == before and int(other.filled) == 1


def test_a_model_that_changed_leaves_the_callers_memory_to_its_own_code() -> None:
    device = OnCpu()
    model = Continues(device)
    run, _ = made(model, device)
    cache = FixedCache()
    for _ in range(RACED):
        run(torch.randn(3, 4), cache)
    model.inner.weight.data = torch.randn(4, 4)
    run(torch.randn(3, 4), cache)
    assert int(cache.filled) == RACED + 1


class WritesUnseen(Slow):
    """Through an alias whose writes torch does not show."""

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        x.data.add_(1)
        return super().forward(x)


def test_writes_that_torch_does_not_show_are_seen() -> None:
    device = OnCpu()
    run, log = made(WritesUnseen(device), device)
    x = torch.zeros(3, 4)
    for n in range(RACED):
        run(x)
        assert bool((x == n + 1).all())
    assert run.counts["replays"] > 0 and Why.STATEFUL in whys(log, Action.NOTICE)


def test_written_arguments_that_never_lie_where_they_lay_are_given_up() -> None:
    device = OnCpu()
    run, log = made(Continues(device, 0.0), device)
    held = [FixedCache() for _ in range(MAX_PLACES + 8)]
    for cache in held:
        run(torch.randn(3, 4), cache)
        assert int(cache.filled) == 1
    assert whys(log, Action.REFUSE) == [Why.STATEFUL] and run.counts["replays"] == 0


def test_what_is_written_and_read_through_another_argument_runs_the_models_own_code() -> None:
    device = OnCpu()
    model = Continues(device)
    run, _ = made(model, device)
    mine, theirs = FixedCache(), FixedCache()
    for _ in range(RACED):
        run(torch.randn(3, 4), mine)
        model(torch.randn(3, 4), theirs)
    theirs.kept.copy_(mine.kept)
    before = run.counts["replays"]
    got, want = run(mine.kept[:3], mine), model(theirs.kept[:3], theirs)
    assert torch.equal(got["all"], want["all"]) and run.counts["replays"] == before


def test_a_model_that_keeps_a_list_of_its_calls_is_left_alone() -> None:
    device = OnCpu()
    model = Appends(device)
    model.seen = []
    run, log = made(model, device)
    for _ in range(40):
        run(torch.randn(3, 4))
    assert len(model.seen) == 40
    assert run.counts["replays"] == 0 and Why.STATEFUL in whys(log, Action.REFUSE)


def test_a_model_that_counts_its_calls_is_left_alone_and_counts_on() -> None:
    device = OnCpu()
    model = Counts(device)
    run, log = made(model, device)
    for _ in range(40):
        run(torch.randn(3, 4))
    assert model.calls == 40
    assert run.counts["replays"] == 0 and whys(log, Action.REFUSE)


def test_a_sync_in_the_model_is_refused_with_its_reason() -> None:
    device = OnCpu()
    device.refuses = "it synchronizes"
    run, log = made(Slow(device), device)
    for _ in range(8):
        run(torch.randn(3, 4))
    assert run.counts["not_recordable"] == 1
    assert [d.evidence["because"] for d in log.decisions if d.action is Action.REFUSE] == ["it synchronizes"]


def test_a_recording_that_is_wrong_on_other_data_never_answers() -> None:
    device = OnCpu()
    model = Slow(device)
    run, log = made(model, device)
    for n in range(RACED):
        device.spoils = 1.0 if n == WARM_UPS + PROOFS - 1 else 0.0
        x = torch.randn(3, 4)
        assert torch.equal(run(x)["y"], model(x)["y"])
    assert whys(log, Action.REFUSE) == [Why.MISMATCH]
    assert run.counts["replays"] == 0


def test_one_that_is_not_faster_is_refused() -> None:
    device = OnCpu()
    model = Slow(device, 0.0)

    class Slower(OnCpu):
        def enter(self) -> None:
            time.sleep(SLEEP_S)

    slower = Slower()
    run, log = made(model, slower)
    for _ in range(RACED):
        run(torch.randn(3, 4))
    assert Why.NOT_FASTER in whys(log, Action.REFUSE) and not whys(log, Action.DEPLOY)


def test_recordings_are_bounded_by_number_and_by_memory() -> None:
    device = OnCpu()
    run, _ = made(Slow(device, 0.0), device)
    for rows in range(1, MAX_RECORDINGS + 4):
        for _ in range(WARM_UPS + 1):
            run(torch.randn(rows, 4))
    assert run.counts["recorded"] == MAX_RECORDINGS + 3 and run.counts["dropped"] == 3
    for held, left, short in ((500, 1 << 40, ""), (100, 150, ""), (0, 0, "it is")):  # too much of all, of what is left; too little
        device = OnCpu()
        device.bytes, device.left, device.shortage = held, left, short
        run, log = made(Slow(device, 0.0), device)
        for _ in range(6):
            run(torch.randn(3, 4))
        assert whys(log, Action.REFUSE) == [Why.TOO_MUCH_MEMORY] and run.counts["recorded"] == 0


def test_hooks_are_refused_and_switched_off_means_off() -> None:
    device = OnCpu()
    model = Slow(device)
    seen: list[int] = []
    model.inner.register_forward_hook(lambda _m, _a, _o: seen.append(1))
    run, log = made(model, device)
    for _ in range(6):
        run(torch.randn(3, 4))
    assert len(seen) == 6 and whys(log, Action.REFUSE) and run.why_off
    off, _ = made(Slow(device), device, SETTINGS.with_(capture="off"))
    for _ in range(6):
        off(torch.randn(3, 4))
    assert off.counts["recorded"] == 0 and off.explain() == {}


def test_closed_ones_run_the_models_own_code() -> None:
    device = OnCpu()
    model = Slow(device)
    run, _ = serving(model, device)
    run.close()
    before = run.counts["replays"]
    x = torch.randn(3, 4)
    assert torch.equal(run(x)["y"], model(x)["y"]) and run.counts["replays"] == before and run.counts["dropped"] == 1


class AsksWhetherRecorded(nn.Module):
    """As libraries do: other kernels where a stream is recorded, a look at data where none is."""

    def __init__(self, device: OnCpu, *, looks: bool) -> None:
        super().__init__()
        self.device, self.looks = device, looks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.device.asleep:
            time.sleep(SLEEP_S)
        recorded = torch.cuda.is_current_stream_capturing()
        self.device.told.append(recorded)
        if self.looks and not recorded and self.device.recording:
            raise RuntimeError("operation not permitted when stream is capturing")
        return x * 2


class Capturing(OnCpu):
    """Says that a stream is recorded while one is."""

    __module__ = "hotfuse.backends"

    def __init__(self) -> None:
        super().__init__()
        self.recording = False

    def record(self, run: Any, inputs: Sequence[torch.Tensor], in_place: Collection[int] = ()) -> Any:
        self.recording = True
        try:
            return super().record(run, inputs, in_place)
        except RuntimeError as e:
            raise RecordingError("the kernels of a call cannot be recorded", because=str(e)) from e
        finally:
            self.recording = False


@pytest.mark.parametrize("looks", [False, True], ids=["nothing else", "a look at data"])
def test_a_model_is_not_told_that_it_is_recorded_unless_it_must_be(monkeypatch: pytest.MonkeyPatch, *, looks: bool) -> None:
    device = Capturing()
    asked = lambda: device.recording  # noqa: E731
    monkeypatch.setattr(device_stream, "being_recorded_here", asked)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", asked)
    model = AsksWhetherRecorded(device, looks=looks)
    run, log = made(model, device)
    for _ in range(RACED):
        x = torch.randn(3, 4)
        assert torch.equal(run(x), x * 2)
    assert run.counts["recorded"] == 1 and run.counts["replays"] > 0, run.explain()
    assert any(device.told) is looks
    assert (Why.NOT_CAPTURABLE in whys(log, Action.NOTICE)) is looks
    assert torch.cuda.is_current_stream_capturing is asked  # put back


def test_other_threads_are_told_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_stream, "being_recorded_here", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", device_stream.being_recorded_here)
    seen: list[bool] = []
    with device_stream.unnoticed(), device_stream.unnoticed():
        seen.append(torch.cuda.is_current_stream_capturing())
        other = threading.Thread(target=lambda: seen.append(torch.cuda.is_current_stream_capturing()))
        other.start()
        other.join()
    assert [*seen, torch.cuda.is_current_stream_capturing()] == [False, True, True]


def test_other_threads_wait_for_the_device_behind_a_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(device_stream, "_synchronize", lambda _device: asked.append(threading.current_thread().name))
    monkeypatch.setattr(torch.cuda, "synchronize", torch.cuda.synchronize)  # put back
    other = threading.Thread(target=lambda: torch.cuda.synchronize(), name="other")
    with device_stream.others_wait():
        torch.cuda.synchronize()  # what is recorded hears what the driver says
        other.start()
        other.join(0.05)
        assert asked == [threading.current_thread().name] and other.is_alive()
    other.join(5)
    assert asked[1:] == ["other"] and not other.is_alive()


class RunsShort(Slow):
    """Has no memory left until recordings are let go of."""

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        if self.device.refuses and not self.device.drained and not self.device.asleep:
            raise torch.OutOfMemoryError("no memory left")
        return super().forward(x)


def test_recordings_go_where_the_model_runs_out_of_memory() -> None:
    device = OnCpu()
    model = RunsShort(device)
    run, log = made(model, device)
    for _ in range(WARM_UPS + PROOFS + 2):  # they race now: every other call is the model's
        run(torch.randn(3, 4))
    device.refuses = "it is short of memory"
    for _ in range(4):
        x = torch.randn(3, 4)
        got = run(x)["y"]
        assert torch.equal(got, model.inner(x) * model.scale)
    assert whys(log, Action.DROP) == [Why.TOO_MUCH_MEMORY] and run.counts["recorded"] == run.counts["dropped"] == 1


def test_without_recordings_the_model_runs_out_of_memory_as_ever() -> None:
    device = OnCpu()
    device.refuses = "it is short of memory"
    run, log = made(RunsShort(device), device)
    for _ in range(6):
        with pytest.raises(torch.OutOfMemoryError):
            run(torch.randn(3, 4))
    assert not whys(log, Action.DROP)


def test_under_autocast_calls_are_of_a_kind_of_their_own_and_replayed() -> None:
    device = OnCpu()
    model = Slow(device)
    run, _ = serving(model, device)
    before = run.counts["recorded"]
    for dtype in (torch.bfloat16, torch.half):
        with torch.autocast("cpu", dtype=dtype):
            replays = run.counts["replays"]
            for _ in range(RACED):
                x = torch.randn(3, 4)
                got, want = run(x)["y"], model(x)["y"]
                assert got.dtype == want.dtype == torch.float32 and torch.equal(got, want)
            assert torch.is_autocast_cache_enabled() and run.counts["replays"] > replays
        model.inner.weight.mul_(-1)
        with torch.autocast("cpu", dtype=dtype):
            assert torch.equal(run(x)["y"], model(x)["y"])
    assert run.counts["recorded"] == before + 2


class Grows(Slow):
    """Appends to a list that it is given, as caches do that grow."""

    def forward(self, x: torch.Tensor, kept: list[torch.Tensor]) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        kept[:] = [torch.cat([kept[0], x])]
        return super().forward(x)["y"]


def test_calls_that_change_their_arguments_are_soon_not_looked_at() -> None:
    device = OnCpu()
    run, log = made(Grows(device, 0.0), device)
    kept = [torch.zeros(1, 4)]
    for _ in range(100):
        run(torch.randn(3, 4), kept)
    assert kept[0].shape == (301, 4)
    assert set(whys(log, Action.REFUSE)) == {Why.STATEFUL} and len(list(run._kinds)) <= 3  # pyright: ignore[reportPrivateUsage]
    assert run._unlooked > 0  # pyright: ignore[reportPrivateUsage]


def test_a_first_call_that_is_of_no_kind_has_the_model_looked_through() -> None:
    """A prompt may be one, and what continues it is of a kind."""
    device, jobs = OnCpu(), list[Callable[[], None]]()
    run = OwnRecordings(TorchModel(Slow(device), SETTINGS), SETTINGS, EventLog(16), jobs.append, lambda _of: device, "cpu",
                        lambda: True)  # fmt: skip
    negated = torch.zeros(3, 4, dtype=torch.complex64).conj().imag
    assert negated.is_neg()
    run(negated)
    run(negated)
    assert len(jobs) == 1
