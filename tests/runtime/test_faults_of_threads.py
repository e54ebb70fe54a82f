"""Native code counts faults for all threads: whose they are is told where it matters."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hotfuse.backends.llvm.runs import kernel_faults
from hotfuse.ops.own.assume import OtherPath


def in_a_thread(work: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join(60)
    return found[0]


def outcome(answer: Callable[..., Any], x: torch.Tensor) -> str:
    try:
        return str(answer(x))
    except OtherPath:
        return "another path"


def test_a_call_beside_one_that_takes_another_path_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    cell, computed = kernel_faults._cell, list[bool]()  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(cell, "value", cell.value)

    def operators(x: torch.Tensor) -> tuple[str]:
        computed.append(bool(x))
        if not x:
            raise OtherPath("checked by operators")
        return ("computed",)

    answer, yes, no = kernel_faults.not_after_faults(operators), torch.tensor(1), torch.tensor(0)
    for _ in range(kernel_faults.LATEST):  # one thread alone: whose a fault is, is known
        cell.value += 1
        assert outcome(answer, no) == "another path"
    assert not computed
    cell.value += 1
    assert in_a_thread(lambda: outcome(answer, yes)) == "('computed',)"
    cell.value += 1
    assert in_a_thread(lambda: outcome(answer, no)) == "another path" and computed == [True, False]
    cell.value += 1
    assert outcome(answer, yes) == "('computed',)", "the other thread's fault may have been the one"
    for _ in range(kernel_faults.LATEST):
        outcome(answer, no)
    computed.clear()
    cell.value += 1
    assert outcome(answer, no) == "another path" and not computed, "long ago: whose it is is known again"
