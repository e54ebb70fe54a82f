"""Callers in front of a program: never more than allowed, none left behind."""

from __future__ import annotations

import copy
import os
import threading
import time

import numpy as np
import onnx
import onnx.helper
import pytest

import hotfuse
from hotfuse.machine.turnstile import FIRST_CALLERS, MIN_CALLERS, UNMEASURED, Turnstile


def _busy(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def test_all_get_their_turn_and_never_too_many_at_once() -> None:
    turnstile, inside, seen, done = Turnstile(), [0], [0], [0]
    lock = threading.Lock()

    def calls() -> None:
        for _ in range(20):
            turnstile.enter(measurable=False)
            with lock:
                inside[0] += 1
                seen[0] = max(seen[0], inside[0])
            time.sleep(0.001)
            with lock:
                inside[0] -= 1
                done[0] += 1
            turnstile.leave()

    threads = [threading.Thread(target=calls) for _ in range(12)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert done[0] == 240 and seen[0] <= FIRST_CALLERS and turnstile.waited > 0


def test_what_operators_take_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few callers where operators are short, one for every core where each takes a millisecond."""
    monkeypatch.setattr("hotfuse.machine.turnstile.usable_cores", lambda: 16)
    short, long = Turnstile(), Turnstile()
    for _ in range(3):
        short.measure(short.enter(measurable=True), 1000)
        short.leave()
        since = long.enter(measurable=True)
        _busy(0.004)
        long.measure(since, 4)
        long.leave()
    assert short.most == MIN_CALLERS and long.most == 16


def test_few_calls_are_measured() -> None:
    turnstile, measured = Turnstile(), 0
    for _ in range(160):
        measured += turnstile.enter(measurable=True) != UNMEASURED
        turnstile.leave()
    assert 0 < measured < 40 and turnstile.enter(measurable=False) == UNMEASURED


def test_waiting_callers_enter_when_more_are_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotfuse.machine.turnstile.usable_cores", lambda: 16)
    turnstile = Turnstile()
    held = [turnstile.enter(measurable=True) for _ in range(FIRST_CALLERS)]
    entered = threading.Semaphore(0)
    threads = [threading.Thread(target=lambda: (turnstile.enter(measurable=False), entered.release())) for _ in range(6)]
    for t in threads:
        t.start()
    assert not entered.acquire(timeout=0.05)
    _busy(0.002)
    turnstile.measure(held[0], 1)
    turnstile.leave()
    assert all(entered.acquire(timeout=30) for _ in threads)


def test_a_forked_child_has_callers_of_its_own() -> None:
    turnstile = Turnstile()
    for _ in range(turnstile.most):
        turnstile.enter(measurable=False)
    child = os.fork()
    if child == 0:
        turnstile.enter(measurable=False)
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_copies_have_callers_of_their_own() -> None:
    turnstile = Turnstile()
    for _ in range(turnstile.most):
        turnstile.enter(measurable=False)
    copied = copy.deepcopy(turnstile)
    for _ in range(copied.most):
        copied.enter(measurable=False)
    assert (copied.most, copied.waited, turnstile.waited) == (turnstile.most, 0, 0)


def test_sessions_tell_of_callers_that_waited() -> None:
    """Eight threads in the interpreter of a file: the same results, and `explain()` says how many run at once."""
    helper = onnx.helper
    info = [helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, [64, 64]) for n in ("v0", "v30")]
    nodes = [helper.make_node("Sin", [f"v{i}"], [f"v{i + 1}"]) for i in range(30)]
    model = helper.make_model(helper.make_graph(nodes, "g", info[:1], info[1:]), opset_imports=[helper.make_opsetid("", 17)])
    x = np.random.randn(64, 64).astype(np.float32)
    wrong: list[int] = []
    with hotfuse.InferenceSession(model.SerializeToString(), settings=hotfuse.Settings(hot_calls=10**6)) as session:
        (want,) = session.run(None, {"v0": x})

        def calls() -> None:
            for i in range(40):
                if not np.allclose(session.run(None, {"v0": x})[0], want, atol=1e-6):
                    wrong.append(i)

        threads = [threading.Thread(target=calls) for _ in range(8)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        told = str(session.explain(full=True))
    assert not wrong and "calls run in it at once" in told
