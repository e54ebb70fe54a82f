"""Nothing is freed under a call, everything afterwards, and never on a thread that serves."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref

import pytest
import torch

from hotfuse.backends.llvm.native import compile_kernel, load_kernel
from hotfuse.base.faults import faults
from hotfuse.native.jit import Loaded
from hotfuse.runtime.epochs import PAUSE_S, Epochs
from hotfuse.tile.program import Kernel
from hotfuse.tile.text import parse as parse_kernel

KERNEL = """kernel add_one(N) {
  input x: f32[N]
  output y: f32[N]
  for n in 0..N step 16 {
    %c: f32[16] = fill 1.0
    %0: f32[16] = load x[n] axes(0) valid((N + (n * -1)))
    %1: f32[16] = map.add %0, %c
    store y[n] axes(0) valid((N + (n * -1))), %1
  }
}
"""


class Thing:
    pass


def manual() -> tuple[Epochs, list[float]]:
    now = [0.0]
    return Epochs(clock=lambda: now[0], background=False), now


def settle(e: Epochs, now: list[float]) -> int:
    freed = 0
    for _ in range(3):
        now[0] += PAUSE_S
        freed += e.drain()
    return freed


def test_what_nobody_is_in_goes_after_a_pause() -> None:
    e, now = manual()
    freed: list[str] = []
    e.retire("a", lambda: freed.append("a"))
    now[0] += PAUSE_S
    assert e.drain() == 0  # once out of reach is not enough
    now[0] += PAUSE_S
    assert e.drain() == 1 and freed == ["a"]
    assert e.counts() == {"retired": 1, "freed": 1, "failed": 0}


def test_a_call_that_began_before_holds_it_and_one_that_began_after_does_not() -> None:
    e, now = manual()
    slot = e.slot()
    slot.epoch = e.now
    e.retire("a")
    assert settle(e, now) == 0 and e.waiting == 1
    slot.epoch = 0
    slot.epoch = e.now  # the next call
    assert settle(e, now) == 1
    slot.epoch = 0


def test_a_call_inside_a_call_keeps_the_outer_mark() -> None:
    e, now = manual()
    slot = e.slot()
    slot.epoch = slot.epoch or e.now
    e.retire("a")
    outer = slot.epoch
    slot.epoch = outer or e.now
    slot.epoch = outer  # the inner call ended
    assert settle(e, now) == 0
    slot.epoch = 0
    assert settle(e, now) == 1


def test_order_is_by_reach_not_by_age() -> None:
    e, now = manual()
    slot = e.slot()
    e.retire("a")
    slot.epoch = e.now
    e.retire("b")
    assert settle(e, now) == 1 and e.waiting == 1
    slot.epoch = 0
    assert settle(e, now) == 1


def test_threads_that_ended_hold_nothing() -> None:
    e, now = manual()

    def serve() -> None:
        e.slot().epoch = e.now  # and it dies inside the call

    for _ in range(5):
        t = threading.Thread(target=serve)
        t.start()
        t.join()
    del t
    gc.collect()
    e.retire("a")
    assert settle(e, now) == 1
    e.slot()
    assert len(e._slots) <= 2


def test_an_error_while_freeing_is_counted_and_the_rest_goes_on() -> None:
    e, now = manual()

    def broken() -> None:
        raise ValueError("no")

    e.retire("a", broken)
    e.retire("b")
    assert settle(e, now) == 2
    assert e.failed == 1 and faults.counts() == {"freeing what is out of reach: ValueError: no": 1}  # what explain() shows
    faults.clear()


def test_the_background_thread_frees_and_ends() -> None:
    e = Epochs()
    names: list[str] = []
    thing = Thing()
    alive = weakref.ref(thing)
    e.retire(thing, lambda: names.append(threading.current_thread().name))
    del thing
    assert e.quiesce(60) and alive() is None and names == ["hotfuse-epochs"]
    until = time.monotonic() + 60
    while e._thread is not None and time.monotonic() < until:
        time.sleep(0.01)
    assert e._thread is None
    e.retire(Thing())
    assert e.quiesce(60)
    e.stop()
    e.retire(Thing())  # at the end of the process nothing is freed any more
    assert not e.quiesce(0.05)


def test_a_forked_child_begins_anew() -> None:
    e = Epochs()
    stuck, ready = threading.Event(), threading.Event()

    def serve() -> None:
        e.slot().epoch = e.now
        ready.set()
        stuck.wait()
        e.slot().epoch = 0

    t = threading.Thread(target=serve)
    t.start()
    ready.wait()
    e.retire(Thing())
    r, w = os.pipe()
    pid = os.fork()
    if pid == 0:
        e.after_fork()
        e.retire(Thing())
        os.write(w, b"y" if e.quiesce(60) and e.counts()["freed"] == 2 else b"n")
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(r, 1) == b"y"
    assert not e.quiesce(0.1)  # here the other thread is still in its call
    stuck.set()
    t.join()
    assert e.quiesce(60)


def code_bytes() -> int:
    """Of memory that holds generated code: of no file, and executable."""
    with open("/proc/self/maps") as f:
        fields = [line.split() for line in f]
    ranges = [x[0].split("-") for x in fields if "x" in x[1] and len(x) == 5]
    return sum(int(end, 16) - int(begin, 16) for begin, end in ranges)


def kernel() -> Kernel:
    return parse_kernel(KERNEL)


def test_plans_swapped_a_thousand_times_under_calls() -> None:
    """Native code is unmapped, and never under a call: a call into freed code would crash the process."""
    compiled = compile_kernel(kernel())
    e = Epochs()
    current = [load_kernel(compiled)]
    stop, calls, wrong = threading.Event(), [0] * 4, list[object]()

    def serve(me: int) -> None:
        x, y = torch.arange(100.0), torch.zeros(100)
        slot = e.slot()
        while not stop.is_set():
            slot.epoch = e.now
            try:
                current[0]([x, y], [100], 1)
            except Exception as error:
                wrong.append(error)
            finally:
                slot.epoch = 0
            calls[me] += 1
            if y[99] != 100:
                wrong.append(float(y[99]))

    threads = [threading.Thread(target=serve, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    swaps, before = 0, code_bytes()
    while swaps < 1000 or min(calls) == 0:
        old, current[0] = current[0], load_kernel(compiled)
        e.retire(old, old.release)
        swaps += 1
    stop.set()
    for t in threads:
        t.join()
    assert not wrong
    assert e.quiesce(120)
    assert e.counts() == {"retired": swaps, "freed": swaps, "failed": 0}
    assert code_bytes() - before < 100 * 4096  # a page each, at least, would be a thousand


def test_dropping_a_handle_frees_its_code() -> None:
    compiled = compile_kernel(kernel())
    native = load_kernel(compiled)
    loaded = next(o for o in gc.get_referents(native.__dict__) if isinstance(o, Loaded))
    alive = weakref.ref(loaded)
    del loaded, native
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("held", [True, False])
def test_a_released_kernel_refuses(held: bool) -> None:
    native = load_kernel(compile_kernel(kernel()))
    e, now = manual()
    slot = e.slot()
    slot.epoch = e.now if held else 0
    e.retire(native, native.release)
    settle(e, now)
    x, y = torch.arange(4.0), torch.zeros(4)
    if held:
        native([x, y], [4], 1)
        assert y.tolist() == [1, 2, 3, 4]
    else:
        with pytest.raises(Exception, match="released"):
            native([x, y], [4], 1)
