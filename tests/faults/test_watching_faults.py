"""Watching must survive what happens to it: a killed analyzer, a ring nobody drains."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hotfuse.profile.analyzer import MAX_RESTARTS, Analyzer
from hotfuse.profile.records import Batch, Subject
from hotfuse.profile.snapshot import EMPTY


def calls(n: int) -> Batch:
    batch = Batch(n)
    for i in range(n):
        batch.call(Subject(0, 1, i, i), 0, 5, 1)
    return batch


def until(condition: Callable[[], object], seconds: float = 120) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return False


def test_a_killed_analyzer_is_started_again() -> None:
    analyzer = Analyzer()
    try:
        analyzer.publish(calls(10))
        assert analyzer.flush(120)
        before = analyzer.snapshot
        first = analyzer.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        assert until(lambda: analyzer.pid not in (None, first))
        assert analyzer.snapshot is before  # the last one stays until there is a new one
        analyzer.publish(calls(7))
        assert analyzer.flush(120)
        assert analyzer.snapshot.records == 7 and analyzer.stats()["analyzer_restarts"] == 1
        assert analyzer.stats()["records_dropped"] == 0
    finally:
        analyzer.stop()


def test_an_analyzer_that_keeps_dying_is_given_up() -> None:
    analyzer = Analyzer()
    try:
        analyzer.publish(calls(1))
        killed: set[int] = set()

        def kill() -> bool:
            pid = analyzer.pid
            if pid is not None and pid not in killed:
                killed.add(pid)
                os.kill(pid, signal.SIGKILL)
            return bool(analyzer.given_up)

        assert until(kill) and len(killed) == MAX_RESTARTS + 1
        assert "times within a minute" in analyzer.given_up
        before = analyzer.stats()["records"]
        analyzer.publish(calls(5))
        assert analyzer.stats()["records"] == before and not analyzer.flush(0.2)
    finally:
        analyzer.stop()


def test_an_analyzer_killed_in_the_middle_of_a_line_said_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a snapshot was kept as the latest one, and whoever read it got an error."""
    dying = "import sys; sys.stdout.write('F3\\nS{')"

    def spawned(self: Analyzer) -> subprocess.Popen[bytes]:
        self.started += 1
        return subprocess.Popen([sys.executable, "-S", "-c", dying], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    monkeypatch.setattr(Analyzer, "_spawn", spawned)
    analyzer = Analyzer()
    try:
        analyzer.publish(calls(3))
        assert until(lambda: analyzer.given_up) and analyzer.started == MAX_RESTARTS + 1
        assert analyzer.snapshot is EMPTY, "whole lines are all that is believed"
    finally:
        analyzer.stop()


def test_a_stopped_analyzer_never_blocks_a_producer() -> None:
    analyzer = Analyzer(slots=64)
    try:
        analyzer.publish(calls(1))
        assert analyzer.flush(120)
        pid = analyzer.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        assert until(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
        for _ in range(50):
            analyzer.publish(calls(10))
        assert analyzer.stats()["records_dropped"] == 500 - 64
        os.kill(pid, signal.SIGCONT)
        assert analyzer.flush(120) and analyzer.snapshot.records == 65
        analyzer.publish(calls(3))  # room again
        assert analyzer.flush(120) and analyzer.snapshot.records == 68
    finally:
        analyzer.stop()
