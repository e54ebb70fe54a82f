"""Free heap is given back after background work, within its budget."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from hotfuse.machine.heap import FIRST_S, GROWN_BYTES, SHARE, Trimmer, resident
from hotfuse.machine.primitives import CAPACITY, COMPILED, DESCRIBED

MB = 1 << 20


class Machine:
    """A process whose memory and clock are numbers."""

    def __init__(self) -> None:
        self.held, self.free, self.now, self.trim_s = 100 * MB, 0, 0.0, 0.004

    def trim(self) -> None:
        self.held -= self.free
        self.free = 0
        self.now += self.trim_s

    def trimmer(self) -> Trimmer:
        return Trimmer(self.trim, lambda: self.held, lambda: self.now, lambda: 0)


def test_trims_only_what_grew() -> None:
    m = Machine()
    t = m.trimmer()
    m.now += FIRST_S
    m.free = 30 * MB
    assert t.after_work() == 30 * MB
    m.now += 100
    m.held += GROWN_BYTES - 1
    m.free = 5 * MB
    assert t.after_work() == 0
    m.held += 1
    assert t.after_work() == 5 * MB
    assert (t.trims, t.bytes) == (2, 35 * MB)


def test_a_start_is_not_held_up() -> None:
    m = Machine()
    t = m.trimmer()
    m.held, m.free, m.now = 900 * MB, 300 * MB, FIRST_S - 0.1
    assert t.after_work() == 0 and not t.trims
    m.now = FIRST_S
    assert t.after_work() == 300 * MB


def test_takes_at_most_its_share_of_the_time() -> None:
    m = Machine()
    t = m.trimmer()
    m.now = begin = FIRST_S
    for _ in range(10_000):
        m.held += GROWN_BYTES
        m.free = m.held // 2
        t.after_work()
        m.now += 0.001
    assert t.trims > 10
    assert (t.trims - 1) * m.trim_s <= SHARE * (m.now - begin)


def test_a_second_thread_does_not_wait() -> None:
    m = Machine()
    inside, go = threading.Event(), threading.Event()

    def slow() -> None:
        inside.set()
        assert go.wait(10)
        m.trim()

    t = Trimmer(slow, lambda: m.held, lambda: m.now, lambda: 0)
    m.now += FIRST_S
    first = threading.Thread(target=t.after_work)
    first.start()
    assert inside.wait(10)
    assert t.after_work() == 0
    go.set()
    first.join(10)
    assert t.trims == 1


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="another C library")
def test_really_gives_memory_back() -> None:
    """In a process of its own: blocks of a megabyte, freed behind one that stays."""
    code = """
import ctypes, sys
from hotfuse.machine.heap import heap, resident
libc = ctypes.CDLL(None); libc.malloc.restype = ctypes.c_void_p; libc.free.argtypes = [ctypes.c_void_p]
libc.mallopt(-3, 1 << 30)  # no mappings of their own, as after many large blocks were freed
blocks = []
for _ in range(200):
    p = libc.malloc(1 << 20); ctypes.memset(p, 1, 1 << 20); blocks.append(p)
kept = libc.malloc(1 << 20)
before = resident()
for p in blocks: libc.free(p)
assert resident() > before - (20 << 20), "the heap gave it back by itself"
given = heap.when_idle()
assert given > 150 << 20, given
assert heap.bytes == given
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_the_process_has_one() -> None:
    assert resident() > 0


@pytest.mark.parametrize("said", ["", "7"])
def test_a_session_bounds_what_convolutions_keep_unless_the_user_did(said: str) -> None:
    code = """
import os, onnx
from onnx import TensorProto, helper
from hotfuse import InferenceSession
ports = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [2]) for n in "xy"]
graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", ports[:1], ports[1:])
InferenceSession(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9).SerializeToString()).close()
print(os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"], os.environ["LRU_CACHE_CAPACITY"])
"""
    both = (COMPILED, DESCRIBED)
    env = {k: v for k, v in os.environ.items() if k not in both} | (dict.fromkeys(both, said) if said else {})
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=env)
    assert done.stdout.split() == [said or str(CAPACITY)] * 2, done.stderr


def test_idle_gives_back_what_was_freed_inside_of_what_it_held() -> None:
    """Freed memory does not show as growth, so growth is no reason to leave it."""
    m = Machine()
    t = m.trimmer()
    m.now += FIRST_S
    t.after_work()
    t.spares(lambda: 0)
    m.free = 40 * MB
    assert t.after_work() == 0
    assert t.when_idle() == 40 * MB


def test_idle_frees_spares_and_trims_little_growth() -> None:
    m = Machine()
    t = m.trimmer()
    m.now += FIRST_S
    t.after_work()
    m.now += 100

    def spare() -> int:
        m.free += 6 * MB
        return 6 * MB

    t.spares(spare)
    m.held += 6 * MB  # too little for a trim while calls are served
    assert t.after_work() == 0
    assert t.when_idle() == 6 * MB


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="another C library")
def test_a_background_thread_gives_back_the_end_of_its_arena() -> None:
    """In a process of its own: glibc's trim leaves the end of every arena but the first. Blocks in use keep their data."""
    code = """
import ctypes, threading
from hotfuse.machine.heap import Trimmer, resident
libc = ctypes.CDLL(None); libc.malloc.restype = ctypes.c_void_p; libc.free.argtypes = [ctypes.c_void_p]
def filled(size, byte):
    p = libc.malloc(size); ctypes.memset(p, byte, size); return p
def work():
    libc.free(filled(30 << 20, 1))  # a large block that is freed raises glibc's thresholds: the next ones lie in the arena
    kept = [filled(50_000, i) for i in range(20)]
    blocks = [filled(1 << 20, 1) for _ in range(40)]
    for p in blocks: libc.free(p)
    before = resident()
    libc.malloc_trim(0)
    assert before - resident() < 8 << 20, "glibc gave it back by itself"
    t = Trimmer(trim=lambda: None)
    given = t.after_work()
    assert given > 32 << 20, given
    assert before - resident() > 32 << 20
    assert t.after_work() < 1 << 20  # nothing is left
    assert t.bytes >= given
    assert all(ctypes.string_at(p, 50_000) == bytes([i]) * 50_000 for i, p in enumerate(kept))
    print("done")
t = threading.Thread(target=work); t.start(); t.join()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "done\n", done.stderr


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no compiler to make an allocator with")
def test_a_preloaded_allocator_is_left_alone(tmp_path: Path) -> None:
    """Servers preload allocators whose large blocks may have no readable memory before them."""
    source, library = tmp_path / "other.c", tmp_path / "other.so"
    source.write_text("void *__libc_malloc(unsigned long); void *malloc(unsigned long n) { return __libc_malloc(n); }\n")
    subprocess.run(["gcc", "-shared", "-fPIC", "-fno-builtin", "-o", str(library), str(source)], check=True)
    code = "from hotfuse.machine import heap; print(heap._c_library() is None, heap.release_arena_end())"
    for preload, want in (("", "False"), (str(library), "True")):
        env = {**os.environ, "LD_PRELOAD": preload}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=env)
        assert done.stdout.split()[:1] == [want], done.stderr
        assert not preload or done.stdout.split()[1] == "0"
