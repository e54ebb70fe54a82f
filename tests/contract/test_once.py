"""What exists once in a process is made once, also where several threads ask for it first."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from typing import Any

import pytest

from hotfuse.base.once import once

THREADS = 4


def together(ask: Any) -> list[Any]:
    """What several threads get that ask at the same time."""
    got: list[Any] = [None] * THREADS
    start = threading.Barrier(THREADS)

    def run(at: int) -> None:
        start.wait(60)
        got[at] = ask()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(THREADS)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    return got


def test_all_threads_get_the_same() -> None:
    inside, made = threading.Event(), list[object]()

    @once
    def thing() -> object:
        made.append(object())
        inside.wait(0.2)  # the others come meanwhile
        return made[-1]

    got = together(thing)
    assert len(made) == 1 and all(g is made[0] for g in got) and thing() is made[0]


def test_one_that_raises_is_asked_again_and_may_need_others() -> None:
    tries: list[int] = []

    @once
    def deep() -> int:
        return 7

    @once
    def thing() -> int:
        tries.append(1)
        if len(tries) == 1:
            raise ValueError("not yet")
        return deep() + 1

    with pytest.raises(ValueError, match="not yet"):
        thing()
    assert thing() == thing() == 8 and len(tries) == 2


def test_a_child_does_not_wait_for_who_was_at_it_in_the_parent() -> None:
    inside, leave = threading.Event(), threading.Event()

    @once
    def slow() -> int:
        inside.set()
        leave.wait(60)
        return 1

    thread = threading.Thread(target=slow)
    thread.start()
    assert inside.wait(60)
    if (pid := os.fork()) == 0:
        leave.set()
        os._exit(0 if slow() == 1 else 1)
    _, status = os.waitpid(pid, 0)
    leave.set()
    thread.join(60)
    assert os.waitstatus_to_exitcode(status) == 0


def test_native_code_that_others_link_against_is_made_once() -> None:
    """In a fresh process, where nothing of it exists yet."""
    text = (
        "from hotfuse.backends.llvm.runs import abi, run_entry\n"
        "from hotfuse.backends.llvm.threads import parallel\n"
        "from hotfuse.native import tensors\n"
        "from tests.contract.test_once import together\n"
        "for ask in (parallel.runtime, tensors._found, run_entry.stub, abi._stub):\n"
        "    assert len({id(g) for g in together(ask)}) == 1, ask.__name__\n"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
