"""What a model's code does besides computing is done in every call, served or not: as in eager, or eager answers and it is told."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import logging
import random
import sys
import time
import warnings
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hotfuse
from hotfuse import Settings
from hotfuse.base.events import Action, Why
from hotfuse.frontends.side_effects import observed
from hotfuse.frontends.watched_state import changed, watched_state

INLINE = Settings(capture="inline", hot_calls=2)
CALLS = 12
LOG = logging.getLogger("tests.side_effects")
TOTALS: Counter[str] = Counter()
SEEN: set[int] = set()
count = 0


class Effect(nn.Module):
    """A model whose `effect` happens in its forward."""

    total = 0

    def __init__(self, effect: Callable[[Effect, torch.Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.effect = effect
        self.calls, self.taken, self.recent = 0, {"n": 0}, deque[int](maxlen=100)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.effect(self, x)
        return self.linear(x)


def _counts(model: Effect, _x: torch.Tensor) -> None:
    model.calls += 1


def _class(model: Effect, _x: torch.Tensor) -> None:
    type(model).total += 1


def _global(_model: Effect, _x: torch.Tensor) -> None:
    global count
    count += 1


def _entry(model: Effect, _x: torch.Tensor) -> None:
    model.taken["n"] += 1


def _counter(_model: Effect, _x: torch.Tensor) -> None:
    TOTALS["n"] += 1


def _deque(model: Effect, _x: torch.Tensor) -> None:
    model.recent.append(len(model.recent))


def _set(_model: Effect, _x: torch.Tensor) -> None:
    SEEN.add(len(SEEN))


def _timed(model: Effect, _x: torch.Tensor) -> None:
    model.taken["n"] += int(time.perf_counter() > 0)


STATE: dict[str, tuple[Callable[[Effect, torch.Tensor], Any], Callable[[Effect], int]]] = {
    "an attribute": (_counts, lambda m: m.calls),
    "a class's attribute": (_class, lambda _: Effect.total),
    "a global variable": (_global, lambda _: count),
    "an entry": (_entry, lambda m: m.taken["n"]),
    "a counter": (_counter, lambda _: TOTALS["n"]),
    "a deque": (_deque, lambda m: len(m.recent)),
    "a set": (_set, lambda _: len(SEEN)),
    "a time that is summed": (_timed, lambda m: m.taken["n"]),
}


def served(model: nn.Module, x: torch.Tensor, calls: int = CALLS) -> hotfuse.Jit:
    fast = hotfuse.jit(model, settings=INLINE)
    for _ in range(calls):
        fast(x)
        assert fast.wait(60)
    return fast


def refused(fast: hotfuse.Jit) -> list[Any]:
    return [d for d in fast._engine.log.decisions if d.action is Action.REFUSE and d.why is Why.SIDE_EFFECT]  # pyright: ignore


@pytest.fixture(autouse=True)
def nothing_happened() -> None:
    global count
    count, Effect.total = 0, 0
    TOTALS.clear()
    SEEN.clear()


@pytest.mark.parametrize("what", STATE)
def test_state_that_a_call_changes_is_changed_by_every_call(what: str) -> None:
    effect, read = STATE[what]
    model = Effect(effect)
    with torch.no_grad(), served(model, torch.randn(3, 8)) as fast:
        assert refused(fast)
        traced = read(model) - CALLS  # a capture in this process runs the code, and globals are not copied for it
        assert 0 <= traced <= fast.stats()["captures"], what


def test_what_callbacks_close_over_counts_as_state() -> None:
    kept: list[float] = []
    model = Effect(lambda _m, x: kept.append(float(len(x))))
    with torch.no_grad(), served(model, torch.randn(3, 8)) as fast:
        assert refused(fast) and fast.stats()["graph_calls"] == 0


class GivesMemory(nn.Module):
    """`t.data = ...`, as averages of weights are written: a trace shows no write."""

    def __init__(self, gives: str) -> None:
        super().__init__()
        self.linear, self.gives = nn.Linear(8, 8), gives
        self.register_buffer("last", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.gives == "a buffer":
            self.last.data = x.sum(0)
        elif self.gives == "an argument":
            x.data = x.data * 2
        y = self.linear(x)
        if self.gives == "a value":
            y.data = y.data * 2
        return y


@pytest.mark.parametrize("gives", ["a buffer", "an argument", "a value"])
def test_memory_that_a_tensor_is_given_is_given_by_every_call(gives: str) -> None:
    model = GivesMemory(gives).eval()
    eager = copy.deepcopy(model)
    with torch.no_grad(), hotfuse.jit(model, settings=INLINE) as fast:
        for _ in range(CALLS):
            x = torch.randn(3, 8)
            twin = x.clone()
            torch.testing.assert_close(fast(x), eager(twin))
            torch.testing.assert_close(x, twin)
            torch.testing.assert_close(model.last, eager.last)
            assert fast.wait(60)
        assert refused(fast)


class Tags(nn.Module):
    """It writes attributes on tensors, as code does that hands a length or a layout on with them."""

    def __init__(self, tags: str) -> None:
        super().__init__()
        self.linear, self.tags = nn.Linear(8, 8), tags

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        y = self.linear(x)
        if self.tags != "nothing":
            marked: Any = x if self.tags == "an argument" else y
            marked.valid = len(x)
        return {"y": y, "first": y[0]}


@pytest.mark.parametrize("tags", ["an argument", "a result", "nothing"])
def test_attributes_that_a_tensor_is_given_are_there_behind_every_call(tags: str) -> None:
    model = Tags(tags).eval()
    with torch.no_grad(), hotfuse.jit(model, settings=INLINE) as fast:
        for rows in (3, 3, 4, 5, 4, 3, 6, 3, 4):
            x = torch.randn(rows, 8)
            twin = x.clone()
            got, want = fast(x), model(twin)
            torch.testing.assert_close(got, want)
            assert (vars(x), vars(got["y"])) == (vars(twin), vars(want["y"]))
            assert fast.wait(60)
        assert bool(refused(fast)) is (tags != "nothing")
        assert (fast.stats()["graph_calls"] > 0) is (tags == "nothing")


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_prints_are_printed_by_every_call(stream: str) -> None:
    model = Effect(lambda _m, x: print("here", x.shape, file=getattr(sys, stream)))
    redirect = contextlib.redirect_stdout if stream == "stdout" else contextlib.redirect_stderr
    with torch.no_grad(), redirect(io.StringIO()) as text, served(model, torch.randn(3, 8)) as fast:
        (told,) = refused(fast)
        assert "sys." + stream in str(told) and __file__ in str(told.evidence["where"])
    assert text.getvalue() == "here torch.Size([3, 8])\n" * CALLS


def test_a_file_is_written_by_every_call_and_not_by_the_capture(tmp_path: Path) -> None:
    path = tmp_path / "calls"

    def note(_model: Effect, _x: torch.Tensor) -> None:
        with path.open("a") as file:
            file.write("x")

    with torch.no_grad(), served(Effect(note), torch.randn(3, 8)) as fast:
        assert refused(fast) and path.read_text() == "x" * CALLS


_OWN = np.random.default_rng(3)
_DRAWS = {"python": random.random, "numpy": lambda: float(np.random.rand()), "numpy's method": np.random.rand, "own": _OWN.random}


@pytest.mark.parametrize("draw", _DRAWS.values(), ids=_DRAWS)
def test_numbers_of_other_generators_are_drawn_by_every_call(draw: Callable[[], float]) -> None:
    class Draws(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * (2.0 if draw() < 0.5 else 1.0)

    model, x, own = Draws(), torch.randn(3, 8), _OWN.bit_generator.state

    def seeded(call: Any) -> list[torch.Tensor]:
        random.seed(1)
        np.random.seed(1)
        _OWN.bit_generator.state = own
        return [call(x) for _ in range(24)]

    with torch.no_grad(), hotfuse.jit(model, settings=INLINE) as fast:
        fast(x)
        assert fast.wait(60)
        torch.testing.assert_close(seeded(fast), seeded(model))
        assert refused(fast)


def test_a_number_that_is_another_one_in_every_call_is_no_constant() -> None:
    class Stamped(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, float]:
            return x + 1, time.time()

    with torch.no_grad(), served(Stamped(), torch.randn(3, 8)) as fast:
        before = time.time()
        assert fast(torch.randn(3, 8))[1] >= before


def test_warnings_are_given_by_every_call_at_their_place() -> None:
    def careful(_model: Effect, _x: torch.Tensor) -> None:
        warnings.warn("careful", FutureWarning, stacklevel=1)

    model, x = Effect(careful), torch.randn(3, 8)
    with torch.no_grad(), warnings.catch_warnings(record=True) as found, served(model, x) as fast:
        warnings.simplefilter("always")
        found.clear()
        fast(x)
        model(x)
        assert fast.stats()["graph_calls"] > 0
        ours, theirs = found
        assert (str(ours.message), ours.category, ours.filename, ours.lineno) == (
            str(theirs.message), theirs.category, theirs.filename, theirs.lineno)  # fmt: skip
        warnings.simplefilter("error")
        with pytest.raises(FutureWarning):
            fast(x)
        warnings.resetwarnings()
        warnings.simplefilter("default")
        found.clear()
        fast(x)
        fast(x)
        assert len(found) == 1


def test_a_warning_of_what_a_call_brings_is_left_to_the_models_code() -> None:
    def tell(_model: Effect, x: torch.Tensor) -> None:
        warnings.warn(f"sum {x.sum()}", stacklevel=1)

    model = Effect(tell)
    with torch.no_grad(), warnings.catch_warnings(record=True) as found, served(model, torch.randn(3, 8)) as fast:
        warnings.simplefilter("always")
        found.clear()
        fast(torch.ones(3, 8))
        assert "sum 24" in str(found[0].message) and refused(fast)


def test_what_is_logged_is_heard_and_what_is_not_heard_costs_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Effect(lambda _m, x: LOG.debug("rows %s", x.shape[0])), torch.randn(3, 8)
    heard: list[str] = []
    monkeypatch.setattr(LOG, "handle", lambda record: heard.append(record.getMessage()))
    LOG.setLevel(logging.INFO)
    with torch.no_grad(), served(model, x) as fast:
        plans = fast.stats()["graph_calls"]
        assert plans > 0 and not heard
        LOG.setLevel(logging.DEBUG)
        fast(x)
        assert heard == ["rows 3"] and fast.stats()["graph_calls"] == plans
        LOG.setLevel(logging.INFO)
        fast(x)
        assert len(heard) == 1 and fast.stats()["graph_calls"] == plans + 1
    LOG.setLevel(logging.DEBUG)
    with torch.no_grad(), served(model, x) as fast:
        (told,) = refused(fast)
        assert "tests.side_effects" in str(told) and len(heard) == 1 + CALLS


@functools.lru_cache(None)
def _once(text: str) -> None:
    print(text)
    LOG.warning(text)


def test_what_runs_once_in_a_process_has_run() -> None:
    model = Effect(lambda _m, _x: _once("hello"))
    with torch.no_grad(), contextlib.redirect_stdout(io.StringIO()) as text, served(model, torch.randn(3, 8)) as fast:
        assert fast.stats()["graph_calls"] > 0
    assert text.getvalue().count("hello") <= 1
    _once.cache_clear()


TABLE: dict[str, float] = {}


class Memo(nn.Module):
    """Its first call reads a file, and keeps what is in it for the process, or for the model."""

    def __init__(self, path: Path, *, by_model: bool) -> None:
        super().__init__()
        self.linear, self.path, self.by_model = nn.Linear(8, 8), path, by_model

    @functools.lru_cache(maxsize=1)  # noqa: B019
    def read(self) -> float:
        return float(self.path.read_text())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.by_model and "" not in TABLE:
            TABLE[""] = float(self.path.read_text())
        return self.linear(x) * (self.read() if self.by_model else TABLE[""])


@pytest.mark.parametrize("by_model", [False, True])
def test_what_the_first_call_reads_for_all_others_costs_no_plan(tmp_path: Path, *, by_model: bool) -> None:
    (tmp_path / "scale").write_text("2.0")
    model, x, settings = Memo(tmp_path / "scale", by_model=by_model), torch.randn(3, 8), Settings(tiers=0, watch=False)
    TABLE.clear()
    with torch.no_grad():
        with hotfuse.jit(nn.Linear(8, 8), settings=settings) as first:  # so that a worker is there before the first call
            while not first.stats()["graph_calls"]:
                first(x)
                assert first.wait(60)
        want = model(x)
        with hotfuse.jit(model, settings=settings) as fast:
            for _ in range(8):
                assert torch.allclose(fast(x), want, atol=1e-5)
                assert fast.wait(60)
            assert fast.stats()["graph_calls"] and not refused(fast)


def test_caches_that_are_filled_by_the_first_call_are_no_effect() -> None:
    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.masks: dict[int, torch.Tensor] = {}
            self.scale: float | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.shape[1] not in self.masks:
                self.masks[x.shape[1]] = torch.ones(x.shape[1]).cumsum(0)
            self.scale = self.scale or 0.5
            return x * self.masks[x.shape[1]] * self.scale

    with torch.no_grad(), served(Lazy(), torch.randn(3, 8)) as fast:
        assert fast.stats()["graph_calls"] > 0 and not refused(fast)


def test_other_threads_and_the_time_after_go_their_way(tmp_path: Path) -> None:
    import threading

    begin = threading.Event()
    thread = threading.Thread(target=lambda: (begin.wait(60), print("other"), (tmp_path / "other").write_text("x")))
    thread.start()
    with contextlib.redirect_stdout(io.StringIO()) as text:
        with observed() as seen:
            stream = sys.stdout
            begin.set()
            thread.join()
            assert LOG.isEnabledFor(logging.CRITICAL) is False
        print("after", file=stream)  # somebody kept it
        assert LOG.isEnabledFor(logging.CRITICAL)
    assert text.getvalue() == "other\nafter\n" and not seen.done and (tmp_path / "other").exists()


def test_state_is_compared_by_identity_and_plain_values_by_equality() -> None:
    model = Effect(_counts)
    model.effect = functools.partial(_counts)
    before = watched_state(model)
    model.calls, model.recent = int("0"), model.recent
    model.taken["n"] = 0
    assert not changed(before)
    model.taken["n"] = 1
    assert changed(before) == ["a dict that it reaches, at n"]


class Tagger(nn.Module):
    """Recurrent layers, which keep their weights a second time: tracing exchanges both."""

    def __init__(self, kind: Callable[..., nn.RNNBase], counts: bool) -> None:
        super().__init__()
        self.layer: Any = kind(8, 6, batch_first=True, bidirectional=True)
        self.out, self.counts = nn.Linear(12, 3), counts
        self.layer.calls = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.counts:
            self.layer.calls += 1.0  # no count, which could be kept in an object
        return self.out(self.layer(x)[0])


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("counts", [False, True])
def test_what_torch_keeps_in_its_own_layers_is_no_effect(kind: type[nn.RNNBase], counts: bool) -> None:
    model = Tagger(kind, counts).eval()
    fast, x = hotfuse.jit(model, settings=INLINE), torch.randn(2, 5, 8)
    with torch.no_grad():
        for _ in range(CALLS):
            torch.testing.assert_close(fast(x), model.out(model.layer(x)[0]))
    assert bool(refused(fast)) == counts and (fast.stats()["graph_calls"] > 0) != counts, fast.explain()
    assert model.layer.calls == (CALLS if counts else 0)


def test_a_dict_that_makes_what_is_looked_up_holds_what_it_holds() -> None:
    class Makes(OrderedDict[str, type]):
        def __getitem__(self, key: str) -> Any:
            return super().__getitem__(key)()

    model = Effect(_counts)
    model.__dict__["layers"] = Makes(gelu=nn.GELU)
    assert not changed(watched_state(model))


def test_a_model_that_is_left_alone_is_looked_at_every_few_calls_and_captured_once_that_is_possible() -> None:
    class Talks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.aloud = nn.Linear(8, 8), True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.aloud:
                print("called")
            return self.linear(x)

    model, x = Talks().eval(), torch.randn(3, 8)
    fast: Any = hotfuse.jit(model, settings=INLINE)
    with torch.no_grad(), contextlib.redirect_stdout(io.StringIO()) as heard:
        for _ in range(40):
            fast(x)
        (site,) = fast._engine.sites.values()
        assert site.resting > 0 and heard.getvalue().count("called") == 40 and fast.stats()["calls_per_tier"]["module"] == 40
        model.aloud = False
        for _ in range(40):
            torch.testing.assert_close(fast(x), model(x), rtol=1e-5, atol=1e-6)
    served = fast.stats()["calls_per_tier"]
    assert heard.getvalue().count("called") == 40 and served["module"] < 60 and site.resting == 0, served
    fast.close()


def test_a_model_that_changes_itself_in_every_call_is_captured_ever_more_rarely() -> None:
    model: Any = Effect(_counts).eval()
    x = torch.randn(3, 8)
    model.calls = 0.0  # no count, which could be kept in an object
    fast: Any = hotfuse.jit(model, settings=INLINE)
    with torch.no_grad():
        for _ in range(1_000):
            fast(x)
    captures = [d for d in fast._engine.log.decisions if d.action is Action.CAPTURE]
    assert model.calls == 1_000 and 2 <= len(captures) <= 8, captures
    assert any("changes Effect.calls" in line for line in str(fast.explain()).splitlines()), str(fast.explain())
    fast.close()


def test_code_that_asks_for_deterministic_algorithms_is_asked_again_by_every_call() -> None:
    class Asks(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1 if torch.are_deterministic_algorithms_enabled() else x - 1

    model, x = Asks(), torch.randn(3)
    fast = served(model, x)
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    try:
        assert torch.equal(fast(x), x + 1)
    finally:
        torch.use_deterministic_algorithms(mode=False)
    assert torch.equal(fast(x), x - 1)
