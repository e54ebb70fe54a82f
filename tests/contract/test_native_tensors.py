"""Native code reads tensors as Python does, and leaves alone what it cannot read."""

from __future__ import annotations

import copy
import gc
import inspect
import sys
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hotfuse.base.once import once
from hotfuse.native import tensor_layout, tensors
from hotfuse.native.jit import compile_object, load_object
from hotfuse.native.target import host
from hotfuse.native.tensors import TensorReader, dtype_code

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
          torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn]  # fmt: skip


@pytest.fixture(scope="module")
def reader() -> TensorReader:
    assert tensors.unavailable() == ""
    return TensorReader(tensors.symbols())


def agrees(reader: TensorReader, t: torch.Tensor) -> None:
    assert reader.plain(t)
    want = (tuple(t.shape), t.stride(), dtype_code(t.dtype), t.numel(), t.data_ptr(), t.is_contiguous())
    assert reader.read(t) == want


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (0,), (7,), (3, 1), (2, 0, 5), (4, 3, 2, 5), (1, 2, 1, 2, 1, 2, 1, 2)], ids=str)
def test_reads_what_python_reads(reader: TensorReader, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    t = torch.zeros(shape, dtype=dtype)
    agrees(reader, t)
    if t.dim() > 1:
        agrees(reader, t.transpose(0, -1))
        agrees(reader, t[:, :1])
        agrees(reader, t.flatten())
    agrees(reader, t.expand(3, *shape))
    agrees(reader, t[None])


def test_kinds_of_plain_tensors(reader: TensorReader) -> None:
    x = torch.randn(4, 6)
    with torch.inference_mode():
        inference = x + 1
    grown = torch.empty(2)
    grown.resize_(3, 5)
    swapped = torch.randn(2, 2)
    swapped.data = torch.randn(7)
    with_grad = torch.randn(3, requires_grad=True) * 2
    for t in (x, x[1:, ::2], nn.Parameter(x), nn.Parameter(x, requires_grad=False), inference, with_grad, with_grad.detach(),
              grown, swapped, copy.deepcopy(x), torch.from_numpy(x.numpy()), x.clone(memory_format=torch.preserve_format),
              torch.zeros(2, 3, 4, 5).contiguous(memory_format=torch.channels_last), torch._lazy_clone(x)):
        agrees(reader, t)


def test_lazy_clones_stay_shared_when_read(reader: TensorReader) -> None:
    x = torch.randn(8)
    lazy = torch._lazy_clone(x)
    reader.read(lazy)
    assert torch._C._is_cow_tensor(lazy)


def test_object_survives_its_python_wrapper(reader: TensorReader) -> None:
    """A tensor that only C++ held for a while comes back with the same or another object; both must read right."""
    linear = nn.Linear(3, 5)
    grad_holder = (linear.weight * 2).sum()
    grad_holder.backward()
    for _ in range(3):
        gc.collect()
        assert linear.weight.grad is not None
        agrees(reader, linear.weight.grad)
        agrees(reader, linear.weight)


class Subclass(torch.Tensor):
    pass


class Changed(nn.Parameter):
    pass


def not_plain() -> dict[str, Any]:
    numbers = torch.randn(4, dtype=torch.complex64)
    freed = torch.randn(5)
    freed.untyped_storage().resize_(0)
    return {
        "freed": freed, "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "negated": numbers.conj().imag, "conjugated": numbers.conj(), "zero": torch._efficientzerotensor((3,)),
        "meta": torch.empty(3, device="meta"), "sparse": torch.eye(3).to_sparse(), "csr": torch.eye(3).to_sparse_csr(),
        "mkldnn": torch.randn(3, 4).to_mkldnn(), "subclass": torch.randn(3).as_subclass(Subclass),
        "parameter subclass": Changed(torch.randn(2)), "buffer subclass": nn.Buffer(torch.ones(2)).as_subclass(Subclass),
        "number": 3, "none": None, "list": [torch.ones(1)], "string": "x", "type": torch.Tensor,
        "uninitialized": nn.UninitializedParameter(),
    }  # fmt: skip


@pytest.mark.filterwarnings("ignore")
def test_refuses_what_it_cannot_read(reader: TensorReader) -> None:
    assert [name for name, value in not_plain().items() if reader.plain(value)] == []


def test_refuses_wrappers_inside_transforms(reader: TensorReader) -> None:
    seen: list[bool] = []

    def note(x: torch.Tensor) -> torch.Tensor:
        seen.append(reader.plain(x))
        return x.sum()

    torch.func.vmap(note)(torch.randn(3, 4))
    torch.func.grad(note)(torch.randn(3))
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        seen.append(reader.plain(torch.empty(3)))
    assert seen == [False, False, False]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_makes_tensors(reader: TensorReader, dtype: torch.dtype) -> None:
    for sizes, strides in (((2, 3), (3, 1)), ((2, 3), (1, 2)), ((), ()), ((0, 4), (4, 1))):
        made = reader.empty(sizes, strides, dtype_code(dtype))
        assert type(made) is torch.Tensor and made.dtype is dtype and made.stride() == strides and tuple(made.shape) == sizes
        assert not made.requires_grad and made.is_cpu and sys.getrefcount(made) == 2
        made.zero_()
        agrees(reader, made)


def test_made_tensors_are_freed(reader: TensorReader) -> None:
    def resident() -> int:
        with open("/proc/self/statm") as f:
            return int(f.read().split()[1]) * 4096

    for _ in range(20):
        reader.empty((1 << 18,), (1,), dtype_code(torch.float32)).zero_()
    before = resident()
    for _ in range(400):
        reader.empty((1 << 18,), (1,), dtype_code(torch.float32)).zero_()
    assert resident() - before < 50 << 20  # 400 MiB were made


def test_sizes_that_cannot_be_allocated_raise(reader: TensorReader) -> None:
    with pytest.raises(MemoryError):
        reader.empty((1 << 60,), (1,), dtype_code(torch.float64))
    agrees(reader, torch.ones(2))


def test_generated_code_links_against_the_helpers() -> None:
    import ctypes

    text = tensors.DECLARATIONS + """
define i64 @last(ptr %t) {
  %rank = call i64 @hf_rank(ptr %t)
  %sizes = call ptr @hf_sizes(ptr %t)
  %d = sub i64 %rank, 1
  %at = getelementptr i64, ptr %sizes, i64 %d
  %size = load i64, ptr %at
  ret i64 %size
}
"""
    loaded = load_object(compile_object(text, host()).code, ["last"], tensors.symbols())
    last = ctypes.PYFUNCTYPE(ctypes.c_int64, ctypes.py_object)(loaded.address("last"))
    assert last(torch.empty(3, 11)) == 11


def test_modes_do_not_see_what_is_read(reader: TensorReader) -> None:
    class Loud(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise AssertionError(func)

    x = torch.randn(2, 3)
    with Loud():
        assert reader.plain(x) and reader.read(x)[0] == (2, 3)


def test_threads_read_at_once(reader: TensorReader) -> None:
    wrong: list[object] = []

    def read(seed: int) -> None:
        for i in range(2000):
            t = torch.empty((seed, i % 7, 2))
            got = reader.read(t)
            if got[0] != tuple(t.shape) or got[4] != t.data_ptr():
                wrong.append(got)

    threads = [threading.Thread(target=read, args=(i + 1,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_a_torch_that_differs_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def anew() -> None:
        monkeypatch.undo()
        monkeypatch.setattr(tensors, "_found", once(inspect.unwrap(tensors._found)))

    anew()
    monkeypatch.setattr(tensors, "_WRAP", "no_such_function")
    assert "no_such_function" in tensors.unavailable()
    with pytest.raises(tensors.InternalError):
        tensors.access()
    anew()
    right = tensor_layout.find_places(tensor_layout.specimens())
    moved = tensor_layout.Places(right.type_at, right.impl_at, right.keys_at - 8)
    monkeypatch.setattr(tensors, "find_places", lambda _t: moved)
    assert "native code" in tensors.unavailable()
    monkeypatch.undo()
    assert tensors.unavailable() == ""
