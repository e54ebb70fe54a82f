"""Weights whose packed copies serve give their memory back, and are what they were whenever somebody reads them."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

import hotfuse
from hotfuse import Settings
from hotfuse.machine import pages
from tests.races import kernels_win, slow_library

INLINE = Settings(capture="inline", hot_calls=1, release_weights=True)
WIDTH = 768


@pytest.fixture(autouse=True)
def kernels_always_win(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Clocks decide nothing here."""
    slow_library(monkeypatch)
    kernels_win(monkeypatch)
    with torch.no_grad():
        yield


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * pages.PAGE


def test_pages_come_back_as_they_were(tmp_path: Path) -> None:
    array = np.random.default_rng(0).integers(0, 255, 64 * pages.PAGE + 777, dtype=np.uint8)
    wanted, begin = array.copy(), array.ctypes.data
    ranges = pages.whole_pages([(begin, begin + array.nbytes)])
    assert sum(b - a for a, b in ranges) >= 63 * pages.PAGE
    done = pages.release(ranges, tmp_path)
    assert done == ranges and pages.resident(done) == 0
    assert not list(tmp_path.iterdir())  # the file has no name
    assert np.array_equal(array, wanted) and pages.resident(done) > 0
    array[5 * pages.PAGE + 3] ^= 255  # written pages are the process's own, and stay
    pages.release_unwritten(done)
    wanted[5 * pages.PAGE + 3] ^= 255
    assert np.array_equal(array, wanted)


def test_memory_that_was_given_back_before_may_be_again(tmp_path: Path) -> None:
    """An allocator hands out the memory of a model that is gone; files of others stay where they are."""
    array = np.random.default_rng(0).integers(0, 255, 64 * pages.PAGE, dtype=np.uint8)
    begin = array.ctypes.data
    ranges = pages.whole_pages([(begin, begin + array.nbytes)])
    assert pages.release(ranges, tmp_path) == ranges
    array[:] = np.random.default_rng(1).integers(0, 255, array.size, dtype=np.uint8)
    wanted = array.copy()
    assert pages.release(ranges, tmp_path) == ranges and pages.resident(ranges) == 0
    assert np.array_equal(array, wanted)
    (tmp_path / "else").write_bytes(bytes(4 * pages.PAGE))
    with (tmp_path / "else").open("r+b") as file:
        other = np.frombuffer(mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE), np.uint8)
    assert pages.release([(other.ctypes.data, other.ctypes.data + other.nbytes)], tmp_path) == []


def test_pages_that_somebody_reads_stay() -> None:
    page = pages.PAGE
    assert pages.whole_pages([(10, 10 * page)], [(3 * page + 5, 4 * page + 1)]) == [(page, 3 * page), (5 * page, 10 * page)]
    assert pages.whole_pages([(page, 2 * page), (2 * page, 5 * page)], []) == [(page, 5 * page)]
    assert pages.whole_pages([(page, 2 * page - 1)]) == []


def test_shared_memory_is_left_alone(tmp_path: Path) -> None:
    shared = torch.zeros(1 << 20).share_memory_()
    begin = shared.data_ptr()
    assert pages.release(pages.whole_pages([(begin, begin + shared.nbytes)]), tmp_path) == []
    assert ctypes.c_float.from_address(begin).value == 0.0


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.b(torch.relu(self.a(x)))


def test_memory_falls_and_weights_stay_right(tmp_path: Path) -> None:
    model = Layers().eval()
    kept = {k: v.clone() for k, v in model.state_dict().items()}
    x = torch.randn(4, WIDTH)
    want = model(x)
    fast = hotfuse.jit(model, settings=INLINE.with_(cache_dir=tmp_path))
    for _ in range(4):
        torch.testing.assert_close(fast(x), want, rtol=1e-4, atol=1e-4)
    fast.wait(60)
    memory = fast.stats()["memory"]
    matrices = 2 * 4 * WIDTH * WIDTH * 4
    assert memory["packed"] >= matrices and memory["released"] >= 0.98 * matrices, (memory, str(fast.explain(full=True)))
    assert memory["came_back"] <= 0.02 * matrices, memory
    assert "packed copies" in str(fast.explain(full=True))
    before = resident()
    for name, value in model.state_dict().items():  # whoever reads finds what was there, bit by bit
        assert torch.equal(value, kept[name]), name
    assert resident() - before >= 0.9 * matrices  # so much had really been given back
    assert fast.stats()["memory"]["came_back"] >= 0.98 * matrices
    model.a.weight.mul_(2.0)  # noticed, and served by the live weights
    torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-4)
    assert torch.equal(model.a.weight, kept["a.weight"] * 2)


def test_without_the_setting_nothing_goes() -> None:
    model = Layers().eval()
    fast = hotfuse.jit(model, settings=INLINE.with_(release_weights=False))
    x = torch.randn(4, WIDTH)
    for _ in range(4):
        fast(x)
    assert "released" not in fast.stats()["memory"]


def test_a_session_owns_its_weights(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    w = [(rng.standard_normal((WIDTH, WIDTH)) / WIDTH**0.5).astype(np.float32) for _ in range(2)]
    nodes = [helper.make_node("MatMul", ["x", "w0"], ["h"]), helper.make_node("Relu", ["h"], ["r"]),
             helper.make_node("MatMul", ["r", "w1"], ["y"])]  # fmt: skip
    f = TensorProto.FLOAT
    graph = helper.make_graph(
        nodes, "m", [helper.make_tensor_value_info("x", f, ["n", WIDTH])], [helper.make_tensor_value_info("y", f, ["n", WIDTH])],
        [numpy_helper.from_array(a, f"w{i}") for i, a in enumerate(w)],
    )  # fmt: skip
    model = onnx.helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    session = hotfuse.InferenceSession(model.SerializeToString(), settings=INLINE.with_(cache_dir=tmp_path))
    x = rng.standard_normal((4, WIDTH)).astype(np.float32)
    want = np.maximum(x @ w[0], 0) @ w[1]
    for _ in range(5):
        np.testing.assert_allclose(session.run(None, {"x": x})[0], want, rtol=1e-3, atol=1e-3)
    memory = session.stats()["memory"]
    assert memory["released"] >= 0.98 * 2 * w[0].nbytes, (memory, str(session.explain(full=True)))
    for n in (1, 4, 9):  # other sizes, other plans, perhaps the interpreter
        x = rng.standard_normal((n, WIDTH)).astype(np.float32)
        np.testing.assert_allclose(session.run(None, {"x": x})[0], np.maximum(x @ w[0], 0) @ w[1], rtol=1e-3, atol=1e-3)
