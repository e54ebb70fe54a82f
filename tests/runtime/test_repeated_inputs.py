"""What depends on repeated inputs alone is kept: right whatever changes, and given up where nothing comes again."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import hotfuse
from hotfuse import Settings
from hotfuse.ir.text import parse
from hotfuse.ir.verify import verify
from hotfuse.runtime.observe.repeats import InputRepeats
from hotfuse.runtime.serve import kept_results
from hotfuse.runtime.serve.kept_results import RepeatedInputs
from hotfuse.specialize.repeats import kept_part, work_saved
from hotfuse.specialize.table import REPEATED
from tests.races import new_plans_win

INLINE = Settings(capture="inline", hot_calls=2, watch_rate=2)


@pytest.fixture(autouse=True)
def new_plans_always_win(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    new_plans_win(monkeypatch)
    with torch.no_grad():
        yield


class TwoTowers(nn.Module):
    """Also returns what the second tower gives, and a view of it: neither may share memory with what is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 24)
        self.text = nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 16))
        self.image = nn.Sequential(nn.Linear(12, 48), nn.GELU(), nn.Linear(48, 16))

    def forward(self, image: torch.Tensor, text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        t = self.text(self.table(text).mean(1))
        return self.image(image) @ t.t(), t, t[:2].t()


def entry_of(fast: Any) -> Any:
    return next(iter(fast._engine.sites.values())).entries[0]


def layered(fast: Any) -> bool:
    return any(x.key.row == REPEATED for x in entry_of(fast).layers)


def check(fast: Any, model: nn.Module, *inputs: torch.Tensor) -> None:
    got, want = fast(*inputs), model(*inputs)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    for a in got:  # whoever gets a result may write to it
        a.mul_(3)


def test_a_fixed_text_is_encoded_once_and_every_change_of_it_is_noticed() -> None:
    model, text = TwoTowers().eval(), torch.randint(0, 50, (5, 7))
    fast = hotfuse.jit(model, settings=INLINE)
    for _ in range(400):
        check(fast, model, torch.randn(3, 12), text)
        if layered(fast):
            break
    assert layered(fast), str(fast.explain(full=True))
    counters = entry_of(fast).plan.counters
    assert counters()["repeated_misses"] == counters()["repeated_passed"] == 0, "what proofs showed says nothing of traffic"
    for _ in range(kept_results.TIMED + 1):
        check(fast, model, torch.randn(3, 12), text)
    before = counters()
    for _ in range(10):
        check(fast, model, torch.randn(3, 12), text)
    check(fast, model, torch.randn(3, 12), text.clone())  # another tensor with the same contents
    after = counters()
    assert after["repeated_hits"] == before["repeated_hits"] + 11 and after["repeated_misses"] == before["repeated_misses"]
    text[0, 0] = 49 - text[0, 0]  # in place
    check(fast, model, torch.randn(3, 12), text)
    text.numpy()[1, 1] = 49 - text.numpy()[1, 1]  # which no version shows
    check(fast, model, torch.randn(3, 12), text)
    text.data[2, 2] = 49 - text[2, 2]
    check(fast, model, torch.randn(3, 12), text)
    with torch.inference_mode():
        check(fast, model, torch.randn(3, 12), torch.randint(0, 50, (5, 7)))
    check(fast, model, torch.randn(3, 12), text.t().contiguous().t())  # lies otherwise: whoever serves it, it is right
    for _ in range(40):  # nothing comes again
        check(fast, model, torch.randn(3, 12), torch.randint(0, 50, (5, 7)))
    shown = str(fast.explain(full=True))
    assert "keeps what depends on tensors_1 alone" in shown, shown
    with torch.no_grad():
        model.text[0].weight.mul_(1.5)  # what is kept was computed with other weights
    check(fast, model, torch.randn(3, 12), text)
    fast.close()


def test_a_call_that_repeats_wholly_teaches_nothing() -> None:
    model, image, text = TwoTowers().eval(), torch.randn(3, 12), torch.randint(0, 50, (5, 7))
    fast = hotfuse.jit(model, settings=INLINE)
    for _ in range(200):
        fast(image, text)
    entry = entry_of(fast)
    assert entry.repeats.wholly > 24 and entry.repeats.pairs == 0 and not entry.layers
    fast.close()


def test_evidence_is_taken_of_calls_that_follow_each_other() -> None:
    seen, number = InputRepeats(2), 0
    for image in range(30):
        for prompt in range(10):
            number += 64 if prompt % 2 == 0 else 1
            seen.note(number, [torch.full((4,), image), torch.full((4,), 100 * image + prompt)])
    assert 64 <= seen.pairs < 150 and seen.share([0]) == 1.0 and seen.share([1]) == 0.0 == seen.share([0, 1])
    assert not InputRepeats(1).note(1, [torch.ones(2)]), "of one input nothing is to be learned"


class Parts:
    """The pieces of a plan by a clock of their own: what each takes is said, and who ran is noted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.takes, self.made = 0.0, {"kept": 2.0, "rest": 1.0, "whole": 3.0}, list[str]()
        monkeypatch.setattr(kept_results, "time", SimpleNamespace(perf_counter=lambda: self.now))
        self.run = RepeatedInputs((0,), self.kept, self.rest, self.whole)

    def _took(self, name: str) -> None:
        self.made.append(name)
        self.now += self.takes[name]

    def kept(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self._took("kept")
        return (x * 2,)

    def rest(self, x: torch.Tensor, y: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self._took("rest")
        return (k + y, k)

    def whole(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self._took("whole")
        return (x * 2 + y, x * 2)


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Parts:
    return Parts(monkeypatch)


@pytest.mark.parametrize("every", [1, 10, 1000])
def test_traffic_that_flips_is_right_and_soon_left_alone(every: int, parts: Parts) -> None:
    run, made, y = parts.run, parts.made, torch.randn(6)
    for n in range(4000):
        x = torch.full((6,), float(n // every))
        out = run(x, y)
        assert torch.equal(out[0], x * 2 + y) and torch.equal(out[1], x * 2)
        out[1].zero_()
    computed = made.count("kept")
    if every == 1:
        assert computed == kept_results.IN_VAIN and made.count("rest") == computed, "each time in vain the next try is later"
    else:
        assert computed <= 4000 / every + 1 and run.hits == 4000 - computed - run.passed
        assert run.passed == kept_results.TIMED == made.count("whole")


@pytest.mark.parametrize("every", [1, 10, 100])
def test_what_comes_once_is_not_computed_apart_and_what_comes_again_stays_kept(every: int, parts: Parts) -> None:
    """Counted: traffic that flips between contents that return and ever new ones."""
    run, made, y, same = parts.run, parts.made, torch.randn(6), torch.full((6,), -1.0)
    for n in range(4000):
        x = same if n // every % 2 == 0 else torch.full((6,), float(n))
        assert torch.equal(run(x, y)[0], x * 2 + y)
    assert made.count("kept") <= 1 + kept_results.IN_VAIN, "new contents are computed apart three times, and never again"
    assert run.hits > 2000 * {1: 0.95, 10: 0.6, 100: 0.9}[every], run.counters()
    assert made.count("whole") == 4000 - run.hits - made.count("kept")


def test_lucky_calls_of_the_plan_there_was_end_nothing(parts: Parts) -> None:
    """The least of all stood for what a call takes: keeping, which saves half of the time, was given up again and again."""
    run, y, same = parts.run, torch.randn(6), torch.full((6,), -1.0)
    parts.takes["rest"], hits, lucky = 1.5, 0, 0
    for n in range(2000):
        fresh = n % 2 == 1
        parts.takes["whole"] = 1.2 if n % 16 == 1 else 3.0
        lucky += n % 16 == 1
        x = torch.full((6,), float(n)) if fresh else same
        assert torch.equal(run(x, y)[0], x * 2 + y)
        hits += not fresh
    assert lucky > 100 and run.hits > 0.95 * hits and run.saved_s > 0, run.counters()


def test_misses_that_find_the_plan_there_was_out_of_the_caches_count(parts: Parts) -> None:
    """Traffic that flips every call: hits save half of a call, others take twice as long as they would without the layer."""
    run, y, same, spent = parts.run, torch.randn(6), torch.full((6,), -1.0), 0.0
    for n in range(4000):
        parts.takes["whole"] = 2.0 if parts.made[-1:] in ([], ["whole"]) else 4.0
        x = torch.full((6,), float(n)) if n % 2 else same
        before = parts.now
        assert torch.equal(run(x, y)[0], x * 2 + y)
        spent += parts.now - before
    assert run.hits and spent < 1.05 * 2.0 * 4000, (spent, run.counters())


def test_looking_counts_where_it_finds_nothing(monkeypatch: pytest.MonkeyPatch, parts: Parts) -> None:
    """Hits save less than calls between them lose by a look."""
    run, y, same, spent, look = parts.run, torch.randn(6), torch.full((6,), -1.0), 0.0, kept_results.contents
    parts.takes["rest"] = 2.0

    def slowly(tensors: Sequence[torch.Tensor]) -> kept_results.Contents:
        parts.now += 0.7
        return look(tensors)

    monkeypatch.setattr(kept_results, "contents", slowly)
    for n in range(4000):
        before = parts.now
        x = torch.full((6,), float(n)) if n % 2 else same
        assert torch.equal(run(x, y)[0], x * 2 + y)
        spent += parts.now - before
    assert run.hits and spent < 1.05 * 3.0 * 4000, (spent, run.counters())


def test_a_new_beginning_computes_little_in_vain(parts: Parts) -> None:
    """Calls that find something lose by it, so keeping ends again and again; what came twice brings one new try, not three."""
    run, y, same = parts.run, torch.randn(6), torch.full((6,), -1.0)
    parts.takes["rest"] = 3.1
    for n in range(6000):
        x = torch.full((6,), float(n)) if n % 2 else same
        assert torch.equal(run(x, y)[0], x * 2 + y)
    assert run.begun_again > 3 and run.misses <= kept_results.IN_VAIN + 1 + 2 * run.begun_again, run.counters()
    for n in range(6000, 12000):  # each comes ten times
        x = torch.full((6,), float(n // 10))
        parts.takes["rest"], before = 1.0, parts.made.count("rest")
        assert torch.equal(run(x, y)[0], x * 2 + y)
        assert n < 11000 or parts.made.count("rest") == before + 1, "kept when they first come, as such contents do come again"


def test_what_paid_stays_kept_through_a_while_whatever_was_in_vain_before(monkeypatch: pytest.MonkeyPatch, parts: Parts) -> None:
    """Traffic for which keeping never pays, then some that brings ten calls of the same and ten of ever new contents."""
    run, y, same, look = parts.run, torch.randn(6), torch.full((6,), -1.0), kept_results.contents

    def slowly(tensors: Sequence[torch.Tensor]) -> kept_results.Contents:
        parts.now += 0.1
        return look(tensors)

    monkeypatch.setattr(kept_results, "contents", slowly)
    parts.takes["rest"] = 3.1
    for n in range(4000):
        run(torch.full((6,), float(n)) if n % 2 else same, y)
    parts.takes["rest"] = 1.0
    for n in range(3000):  # until a while is over that began before
        if n == 1000:
            hits = run.hits
        x = torch.full((6,), float(n + 4000)) if n // 10 % 2 else same
        assert torch.equal(run(x, y)[0], x * 2 + y)
    assert run.hits - hits > 0.6 * 1000, run.counters()


def test_contents_that_differ_are_told_by_a_few_bytes(monkeypatch: pytest.MonkeyPatch, parts: Parts) -> None:
    run, y, compared, compare = parts.run, torch.randn(100), list[int](), kept_results._memcmp
    monkeypatch.setattr(kept_results, "_memcmp", lambda a, b, n: compared.append(n) or compare(a, b, n))
    same = torch.full((100,), -1.0)
    for n in range(400):
        x = torch.full((100,), float(n)) if n % 2 else same
        assert torch.equal(run(x, y)[0], x * 2 + y)
    assert run.hits > 150 and len(compared) <= run.hits + 4, (len(compared), run.counters())
    for at in (0, 50, 99):  # what few bytes do not show
        x = same.clone()
        x[at] = 7.0
        assert torch.equal(run(x, y)[0], x * 2 + y) and torch.equal(run(same, y)[0], same * 2 + y)


def test_a_call_that_is_timed_while_another_thread_gives_up_is_answered(parts: Parts) -> None:
    class Cleared(deque[float]):
        """Another thread begins a rest as soon as there is a time."""

        def append(self, x: float, /) -> None:
            super().append(x)
            self.clear()

    run, x, y = parts.run, torch.ones(6), torch.ones(6)
    run(x, y)
    run._times, run._cold = Cleared(), Cleared()  # pyright: ignore[reportPrivateUsage]
    assert torch.equal(run(x, y)[0], x * 2 + y)


def test_new_contents_that_come_again_are_kept_when_they_first_come(parts: Parts) -> None:
    run, made, y = parts.run, parts.made, torch.randn(6)
    for n in range(kept_results.TIMED + 500):  # one image, ten prompts
        x = torch.full((6,), float(max(0, n - kept_results.TIMED) // 10))
        assert torch.equal(run(x, y)[0], x * 2 + y)
    assert made.count("kept") == run.misses == 50 and run.hits == 450


@pytest.mark.parametrize(("look_s", "within"), [(0.1, 2 * 256), (0.01, 4), (0.001, 2)])  # of calls of 3 s
def test_inputs_that_come_again_after_long_are_noticed_as_soon_as_looking_allows(
    monkeypatch: pytest.MonkeyPatch, parts: Parts, look_s: float, within: int
) -> None:
    run, y, look = parts.run, torch.randn(6), kept_results.contents

    def slowly(tensors: Sequence[torch.Tensor]) -> kept_results.Contents:
        parts.now += look_s
        return look(tensors)

    monkeypatch.setattr(kept_results, "contents", slowly)
    before = parts.now
    for n in range(5000):
        run(torch.full((6,), float(n)), y)
    spent = parts.now - before
    assert run.hits == 0 and spent < 1.02 * 3.0 * 5000, (spent, run.counters())
    for _ in range(1000):
        assert torch.equal(run(torch.ones(6), y)[0], torch.ones(6) * 2 + y)
    assert run.hits >= 1000 - within, run.counters()


def test_what_takes_longer_than_it_saves_is_given_up(parts: Parts) -> None:
    run, x, y = parts.run, torch.ones(4), torch.ones(4)
    parts.takes["rest"] = 4.0
    for _ in range(2000):
        assert torch.equal(run(x, y)[0], x * 2 + y)
    looked = run.hits + run.misses
    assert looked < 2000 / 8 and run.passed == 2000 - looked, "each time that it did not pay is followed by a longer while"
    assert run.saved_s < 0
    parts.takes["rest"] = 0.5
    for _ in range(3000):
        run(x, y)
    assert run.hits > 1500 and run.saved_s > 0
    run.begin()
    for _ in range(100):
        run(x, y)
    assert run.hits == 100 - kept_results.TIMED - 1


def test_it_begins_anew_when_inputs_come_again_and_keeps_a_few(parts: Parts) -> None:
    run, y = parts.run, torch.ones(6)
    for n in range(30):  # it is given up behind the first few
        run(torch.full((6,), float(n)), y)
    some = [torch.full((6,), 100.0 + n) for n in range(kept_results.MAX_CONTENTS)]
    for _ in range(200):
        run(some[0], y)
    assert run.begun_again == 1 and run.hits > 100
    for n in range(40):
        run(some[n % len(some)], y)
    misses = run.misses
    for n in range(40):
        run(some[n % len(some)], y)
    assert run.misses == misses and 0 < run.bytes < 1000


def test_what_is_too_large_is_not_kept(monkeypatch: pytest.MonkeyPatch, parts: Parts) -> None:
    monkeypatch.setattr(kept_results, "MAX_BYTES", 40)
    run, made, x, y = parts.run, parts.made, torch.ones(6), torch.ones(6)
    for _ in range(50):
        assert torch.equal(run(x, y)[0], x * 2 + y)
    assert run.bytes == 0 and run.hits == 0 and made.count("whole") >= 40


@pytest.mark.parametrize("step", [1, 2])  # in a row, and with gaps
def test_bits_decide(parts: Parts, step: int) -> None:
    run, y = parts.run, -torch.zeros(3)  # which leaves the sign of what is added to it
    for _ in range(kept_results.TIMED):
        run(y + 7, y)
    zero, nan = torch.zeros(3), torch.full((3,), float("nan"))
    for numbers in (zero, -zero, nan, zero, -zero, nan):
        x = torch.zeros(3 * step)[::step].copy_(numbers)
        got = run(x, y)[0]
        assert torch.equal(torch.signbit(got), torch.signbit(x * 2 + y)) or got.isnan().all()
    assert run.misses == 3 and run.hits == 3
    empty = torch.zeros(0)
    assert run(empty, empty)[0].shape == (0,) and run(empty, empty)[0].shape == (0,)


GRAPH = """graph g(%x: f32[4, 8], %m: i64[4, 8], %w: f32[4, 8]) {
  %a: f32[4, 8] = aten.exp.default(%w)
  %v: f32[8, 4] = aten.t.default(%a)
  %b: f32[4, 4] = aten.mm.default(%x, %v)
  %r: f32[4, 8] = aten.rand_like.default(%w)
  %c: f32[4, 8] = aten.add.Tensor(%r, %a)
  return %b, %c, %v
}"""


def test_the_cut_keeps_no_views_and_nothing_random() -> None:
    graph = verify(parse(GRAPH))
    found = kept_part(graph, ["w"])
    assert found is not None and [n.op for n in found.kept.nodes] == ["aten.exp.default"]
    assert [v.name for v in found.rest.inputs] == ["x", "m", "w", "a"]
    assert [n.op for n in found.rest.nodes] == ["aten.t.default", "aten.mm.default", "aten.rand_like.default", "aten.add.Tensor"]
    assert kept_part(graph, ["m"]) is None and kept_part(graph, []) is None
    assert 0 < work_saved(graph, ["w"], {}) < 1 and work_saved(graph, ["m"], {}) == 0
