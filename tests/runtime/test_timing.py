"""The benchmarks' clockwork: contenders take turns, and nobody gets more calls than another."""

from __future__ import annotations

import gc

import pytest

from benchmarks.timing import interleave, summarize


def test_contenders_take_turns_in_turning_order() -> None:
    order: list[str] = []
    timings, ratios = interleave(
        {"a": lambda: order.append("a"), "b": lambda: order.append("b")}, rounds=3, inner=2, warm_up=1
    )
    assert "".join(order) == "aabb" + "aabb" + "bbaa" + "aabb", "warming up, then three rounds"
    assert timings["a"].calls == timings["b"].calls == 3
    assert ratios["a"] == 1.0 and ratios["b"] > 0


def test_garbage_collection_is_back_on_after_a_failure() -> None:
    with pytest.raises(ZeroDivisionError):
        interleave({"a": lambda: 1 // 0}, rounds=1, warm_up=0)
    assert gc.isenabled()


def test_spread() -> None:
    found = summarize([float(i) for i in range(1, 12)])
    assert (found.median, found.low, found.high, found.calls) == (6.0, 2.0, 10.0, 11)
    assert summarize([4.0]).low == summarize([4.0]).high == 4.0
