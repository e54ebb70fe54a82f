"""Kernels chosen inside a whole plan: the search alone, on plans whose times are made up. Real ones are measured in `tests/gpu`."""

from __future__ import annotations

import random
from pathlib import Path

from hotfuse import Settings
from hotfuse.compile.device.remembered import STAYS, remembered_kernels
from hotfuse.compile.device.trial import DeviceTrial
from hotfuse.compile.device.tuning import LIBRARY, MAX_OTHERS, Choice, alternatives, descended


def test_only_right_kernels_that_are_near_the_best_are_tried() -> None:
    us = (5.0, None, 4.0, 9.0, 4.4, 4.1, 4.2)
    assert alternatives(us, 2, 8.0) == [5, 6, 4] and len(alternatives(us, 2, 8.0)) == MAX_OTHERS
    assert alternatives(us, LIBRARY, 3.9) == [2, 5, 6], "one that lost narrowly may win beside others"
    assert alternatives(us, LIBRARY, 1.0) == [] and alternatives((None,), LIBRARY, 1.0) == []


def together(choice: Choice) -> float:
    """The second kernel is slower beside kernel 0 of the first group."""
    alone = {"a": (3.0, 3.4), "b": (2.0, 1.9), "c": (1.0, 1.2)}
    beside = 0.3 if choice["a"] == 0 and choice["b"] == 1 else 0.0
    return 1e-6 * (sum(alone[g][i] if i != LIBRARY else 2.0 for g, i in choice.items()) + beside)


def test_what_is_best_together_is_found_and_the_first_choice_may_stay() -> None:
    rng, measured = random.Random(3), list[float]()

    def measure(choice: Choice) -> float:
        measured.append(together(choice) * (1.3 if rng.random() < 0.1 else 1.0))  # calls beside make any of them slower, sometimes
        return measured[-1]

    first = {"a": 0, "b": 1, "c": LIBRARY}
    found = descended(first, {"a": [1], "b": [0], "c": [0, 1]}, measure, lambda: False)
    assert found.chosen == {"a": 0, "b": 0, "c": 0} and found.complete and found.exchanged >= 2
    assert found.after_us < found.before_us and len(measured) < 200
    again = descended(found.chosen, {"a": [1], "b": [1], "c": [1]}, together, lambda: False)
    assert again.chosen == found.chosen and again.exchanged == 0 and again.before_us == again.after_us


def test_time_that_is_over_ends_the_search_with_what_was_found() -> None:
    turns = iter(range(1000))
    found = descended({"a": 1, "b": 1, "c": 1}, {"a": [0], "b": [0], "c": [0]}, together, lambda: next(turns) > 2)
    assert not found.complete and found.chosen["c"] == 1
    assert descended({}, {}, lambda _: 1.0, lambda: False).complete


def test_what_won_is_known_to_the_next_process_on_such_a_device(tmp_path: Path) -> None:
    settings = Settings(cache_dir=tmp_path)
    first = remembered_kernels("a graph", "H200 90", settings, tf32=False)
    assert first.tiling("group 1") == ""
    first.keep({"group 1": "64x64x64, 4 warps, 4 stages", "group 2": STAYS})
    second = remembered_kernels("a graph", "H200 90", settings, tf32=False)
    assert second.tiling("group 1") == "64x64x64, 4 warps, 4 stages" and second.tiling("group 2") == STAYS
    assert second.tiling("group 3") == ""
    for graph, machine, tf32 in (("another", "H200 90", False), ("a graph", "A100 80", False), ("a graph", "H200 90", True)):
        assert not remembered_kernels(graph, machine, settings, tf32=tf32).tilings
    nowhere = remembered_kernels("a graph", "H200 90", Settings(capture="inline"), tf32=False)
    nowhere.keep({"group 1": STAYS})
    assert not remembered_kernels("a graph", "H200 90", Settings(capture="inline"), tf32=False).tilings


def test_what_a_chosen_kernel_took_is_its_own_or_the_librarys() -> None:
    found = DeviceTrial(9.0, (4.0, None, 3.0))
    assert [found.chosen_us(i) for i in (0, 2, 1, -1)] == [4.0, 3.0, 9.0, 9.0]
