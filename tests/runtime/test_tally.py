"""Counters of threads that come and go."""

from __future__ import annotations

import threading

from hotfuse.runtime.tally import MIN_SETS, Everyone, Tally


def test_ended_threads_are_counted_in_one_set() -> None:
    everyone = Everyone()
    tally = Tally(everyone)
    tally.mine.module_calls += 1

    def work() -> None:
        for _ in range(3):
            tally.mine.tier1_calls += 1

    for _ in range(10 * MIN_SETS):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert everyone.sets <= MIN_SETS
    assert everyone.total()["calls"] == 30 * MIN_SETS + 1 and everyone.total()["graph_calls"] == 30 * MIN_SETS


def test_running_threads_keep_their_own() -> None:
    everyone = Everyone()
    tally = Tally(everyone)
    ready, go = threading.Barrier(3 * MIN_SETS + 1), threading.Event()

    def work() -> None:
        tally.mine.module_calls += 1
        ready.wait()
        go.wait()
        tally.mine.module_calls += 1  # a set that was folded too early would lose this

    threads = [threading.Thread(target=work) for _ in range(3 * MIN_SETS)]
    for t in threads:
        t.start()
    ready.wait()
    assert everyone.total()["calls"] == 3 * MIN_SETS and everyone.sets >= 3 * MIN_SETS
    go.set()
    for t in threads:
        t.join()
    assert everyone.total()["calls"] == 6 * MIN_SETS
