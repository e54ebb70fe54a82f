"""Groups that the library is a little faster at alone, in the middle of a native run: a kernel there saves leaving the run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hotfuse import Settings
from hotfuse.backends.protocol import Run
from hotfuse.compile import fetch
from hotfuse.compile.parts import KernelCode, NativeParts, body_from_json
from hotfuse.compile.request_context import text_id, used_by
from hotfuse.compile.run import runs
from hotfuse.compile.run.runs import ENTRY_US, MAX_RETRIED_ELEMENTS
from hotfuse.compile.unit.kernel_cache import kernel_cache, piece_of
from hotfuse.compile.variants import trial
from hotfuse.hpm.bottleneck import Strategy
from hotfuse.ir.graph import Graph
from hotfuse.ir.text import parse
from hotfuse.lower.common.effort import limited
from tests.races import timed as really_timed

LIBRARY_US = 20.0


def scaled(pixels: int) -> Graph:
    """An image times factors per channel, as in squeeze-and-excitation, which came to lie with the library."""
    image = f"f32[1, 64, {pixels}, 16]{{0,2,3,1}}"
    return parse(f"graph g(%x: {image}, %s: f32[1, 64, 1, 1]) {{ %y: {image} = aten.mul.Tensor(%x, %s)\n return %y }}")


Takes = float | Callable[[list[Any]], float]
"""Microseconds of a kernel's call, or what they are for its inputs."""


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[Takes]:
    """Kernels are made, compared, run in rounds and judged as ever; the clock of their rounds says what the list does."""
    says: list[Takes] = [LIBRARY_US]

    def rounds(native: Run, library: Run, inputs: list[Any]) -> trial.Outcome:
        now, takes = [0.0], says[0]

        def taking(run: Run, us: float) -> Run:
            def called(*given: Any) -> Any:
                now[0] += us * 1e-6
                return run(*given)

            return called

        own = taking(native, takes(inputs) if callable(takes) else takes)
        return really_timed(own, taking(library, LIBRARY_US), inputs, lambda: now[0])

    monkeypatch.setattr(trial, "_timed", rounds)
    return says


def bench() -> Any:
    return runs._RunKernels([], [], {}, torch.get_num_threads())  # pyright: ignore[reportPrivateUsage]


def test_a_kernel_that_is_slower_by_less_than_leaving_costs_is_taken(timed: list[Takes]) -> None:
    timed[0] = LIBRARY_US + 0.9 * ENTRY_US
    here = bench()
    assert here.bridge(scaled(100), range(1)) == 0  # 102,400 elements
    assert len(here.kernels) == len(here.codes) == 1 and not here.notes


def test_one_that_is_slower_by_more_is_not_and_says_why(timed: list[Takes]) -> None:
    timed[0] = LIBRARY_US + 1.1 * ENTRY_US
    here = bench()
    assert here.bridge(scaled(100), range(1)) == -1
    took = LIBRARY_US + 1.1 * ENTRY_US
    assert not here.kernels and here.notes == [f"mul interrupts a run: its kernel takes {took:.0f} us where the library takes 20"]


def test_large_groups_are_not_tried_again(timed: list[Takes]) -> None:
    timed[0] = 1.0
    here = bench()
    assert here.bridge(scaled(MAX_RETRIED_ELEMENTS // (64 * 16) + 1), range(1)) == -1
    assert not here.kernels
    assert here.bridge(scaled(MAX_RETRIED_ELEMENTS // (64 * 16)), range(1)) == 0


def test_a_copy_between_kernels_joins_the_run(timed: list[Takes]) -> None:
    """What only moves data gets no kernel of its own, since views cost nothing; a concatenation is none."""
    timed[0] = LIBRARY_US + 1
    half = "f32[1, 480, 1, 40]{0,2,3,1}"
    graph = parse(
        f"graph g(%a: {half}, %b: {half}) {{ %y: f32[1, 960, 1, 40]{{0,2,3,1}} = aten.cat.default([%a, %b], 1)\n return %y }}"
    )
    assert bench().bridge(graph, range(1)) == 0


def test_what_is_to_be_tried_with_the_library_stays_there(timed: list[Takes]) -> None:
    timed[0] = 1.0
    here, graph = bench(), scaled(100)
    text = text_id(piece_of(graph, [0], {}).text)
    with used_by({"strategies": [Strategy.LIBRARY.value], "focus": text}):
        assert here.bridge(graph, range(1)) == -1
    assert here.notes == ["mul interrupts a run: the library is to be tried alone"]
    with used_by({"strategies": [Strategy.LIBRARY.value], "focus": "another"}):
        assert here.bridge(graph, range(1)) == 0


def test_what_is_one_group_to_the_library_becomes_several_kernels(timed: list[Takes]) -> None:
    """Two convolutions of one pixel, as the library came to have them, and the image that their result is multiplied with."""
    timed[0] = LIBRARY_US
    graph = parse("""graph g(%x: f32[1, 64, 20, 20]{0,2,3,1}, %m: f32[1, 64, 1, 1]) {
      param %a: f32[16, 64, 1, 1] = "a"
      param %b: f32[64, 16, 1, 1] = "b"
      %c: f32[1, 16, 1, 1] = aten.conv2d.default(%m, %a)
      %r: f32[1, 16, 1, 1] = aten.relu.default(%c)
      %d: f32[1, 64, 1, 1] = aten.conv2d.default(%r, %b)
      %s: f32[1, 64, 1, 1] = aten.sigmoid.default(%d)
      %y: f32[1, 64, 20, 20]{0,2,3,1} = aten.mul.Tensor(%x, %s)
      return %y }""")
    here = bench()
    parts = runs._segments(graph, 0, 5, here)  # pyright: ignore[reportPrivateUsage]
    assert [(a, b) for a, b, _ in parts] == [(0, 2), (2, 4), (4, 5)]
    assert [k for _, _, k in parts] == [0, 1, 2] and len(here.kernels) == 3 and not here.notes


def test_a_part_that_does_not_pay_leaves_the_others_their_kernels(timed: list[Takes]) -> None:
    graph = parse("""graph g(%m: f32[1, 64, 4, 4]{0,2,3,1}) {
      param %a: f32[16, 64, 1, 1] = "a"
      param %b: f32[64, 16, 1, 1] = "b"
      %c: f32[1, 16, 4, 4]{0,2,3,1} = aten.conv2d.default(%m, %a)
      %d: f32[1, 64, 4, 4]{0,2,3,1} = aten.conv2d.default(%c, %b)
      return %d }""")
    timed[0] = lambda inputs: 2 * LIBRARY_US if inputs[0].shape[1] == 64 else LIBRARY_US
    here = bench()
    parts = runs._segments(graph, 0, 2, here)  # pyright: ignore[reportPrivateUsage]
    assert [(a, b) for a, b, _ in parts] == [(0, 1), (1, 2)]
    assert [k for _, _, k in parts] == [-1, 0]
    assert here.notes == ["conv2d interrupts a run: its kernel takes 40 us where the library takes 20"]


def test_without_time_nothing_is_tried_and_that_is_said(timed: list[Takes]) -> None:
    timed[0] = 1.0
    here = bench()
    here.until = 0.0
    assert here.bridge(scaled(100), range(1)) == -1 and not here.kernels
    assert here.notes == ["mul interrupts a run: no time is left for kernels between runs"]


GLUED = """graph g(%x: f32[64, 256]) {
    %a: f32[64, 256] = aten.relu.default(%x)
    %b: f32[64, 256] = aten.exp.default(%a)
    return %b
}"""


@pytest.mark.parametrize("unfinished", [False, True])
def test_an_unfinished_plan_tries_nothing_for_the_sake_of_its_runs(unfinished: bool, timed: list[Takes]) -> None:
    timed[0] = 1.0
    made = kernel_cache().kernel(piece_of(parse(GLUED), range(1), {}))
    kernel = KernelCode(made.lowered, made.compiled.code, "relu")
    parts = NativeParts(body_from_json({"graph": GLUED, "parts": [[0, 1, 0], [1, 2, -1]], "branches": {}}), (kernel,), ())
    found = fetch.fetch_runs(parts, {}, Settings(capture="inline"), unfinished=unfinished)
    assert len(found.kernels) == (1 if unfinished else 2)
    said = "exp interrupts a run: the plan is unfinished: nodes without a kernel may still get one"
    assert (said in found.notes) is unfinished


def test_what_was_tried_for_one_plan_is_not_tried_for_the_next(timed: list[Takes], monkeypatch: pytest.MonkeyPatch) -> None:
    timed[0], graph = 1.0, scaled(100)
    assert bench().bridge(graph, range(1)) == 0
    tried: list[Any] = []
    monkeypatch.setattr(runs, "attempt", lambda *args: tried.append(args))
    again = bench()
    assert again.bridge(graph, range(1)) == 0 and len(again.codes) == 1 and not tried


def test_a_request_out_of_steps_leaves_groups_to_the_library_but_not_for_ever(timed: list[Takes]) -> None:
    timed[0], graph = 1.0, scaled(100)
    with limited(3):
        here = bench()
        assert here.bridge(graph, range(1)) == -1
        assert here.notes == ["mul interrupts a run: the request has taken the 3 steps that it may"]
    assert bench().bridge(graph, range(1)) == 0
