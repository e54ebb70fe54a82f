"""The CUDA driver as generated kernels need it: device code in the context that torch uses, launched on torch's streams.

Loading waits until the device's queue is empty and holds up other threads' launches meanwhile, so it happens where the queue was
just seen empty (`when_idle`). Code is never unloaded while the process lives: recordings hold functions by address.
"""

from __future__ import annotations

import ctypes
import threading
import time
from dataclasses import field
from typing import Any, ClassVar

import torch

from hotfuse.backends.device_code import BuiltDeviceKernel, TensorDescriptor
from hotfuse.base.errors import CaptureError
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.machine.device_stream import being_recorded_here

_SHARED_LIMIT = 8
"""CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES."""
_PLAIN_SHARED = 48 << 10
_DEPENDENT = 6
"""CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION."""
IDLE_S = 0.25
"""Longest wait for an empty queue before code is loaded anyway."""
POLL_S = 0.0005


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60))


class _Config(ctypes.Structure):
    _fields_ = (
        ("grid_x", ctypes.c_uint), ("grid_y", ctypes.c_uint), ("grid_z", ctypes.c_uint), ("block_x", ctypes.c_uint),
        ("block_y", ctypes.c_uint), ("block_z", ctypes.c_uint), ("shared", ctypes.c_uint), ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)), ("count", ctypes.c_uint),
    )  # fmt: skip


@dataclass(slots=True)
class _Driver:
    """The library, opened once."""

    library: Any = None
    trouble: str = ""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def open(self) -> Any:
        with self._lock:
            if self.library is None and not self.trouble:
                try:
                    self.library = ctypes.CDLL("libcuda.so.1")
                except OSError as e:
                    self.trouble = str(e)
        if self.library is None:
            raise CaptureError("the CUDA driver cannot be used", because=self.trouble)
        return self.library

    def check(self, code: int, what: str) -> None:
        if code:
            text = ctypes.c_char_p()
            self.library.cuGetErrorString(code, ctypes.byref(text))
            said = text.value.decode() if text.value else f"error {code}"
            raise CaptureError(f"{what} failed", because=said)


_driver = _Driver()


def when_idle(device: torch.device) -> bool:
    """Wait until the default stream, on which most programs serve, has nothing queued, a bounded time; whether it had nothing."""
    until = time.monotonic() + IDLE_S
    stream = torch.cuda.default_stream(device)
    while not stream.query():
        if time.monotonic() > until:
            return False
        time.sleep(POLL_S)
    return True


_TENSOR_MAP_BYTES = 128
_TENSOR_MAP_ALIGNED = 64
_TYPES = {"fp16": (6, 2), "fp32": (7, 4), "bf16": (9, 2)}
"""CU_TENSOR_MAP_DATA_TYPE_…, and bytes."""
_L2_PROMOTION = 2
"""CU_TENSOR_MAP_L2_PROMOTION_L2_128B."""


def tensor_map(d: TensorDescriptor, address: int) -> Any:
    """A matrix as the copy engine reads it; raises CaptureError where the driver refuses it."""
    library = _driver.open()
    room = ctypes.create_string_buffer(_TENSOR_MAP_BYTES + _TENSOR_MAP_ALIGNED)
    skip = -ctypes.addressof(room) % _TENSOR_MAP_ALIGNED
    made = (ctypes.c_char * _TENSOR_MAP_BYTES).from_buffer(room, skip)
    kind, size = _TYPES[d.dtype]
    extents = (ctypes.c_uint64 * 2)(d.shape[1], d.shape[0])
    strides = (ctypes.c_uint64 * 1)(d.stride * size)
    block, ones = (ctypes.c_uint32 * 2)(d.block[1], d.block[0]), (ctypes.c_uint32 * 2)(1, 1)
    code = library.cuTensorMapEncodeTiled(
        made, kind, 2, ctypes.c_void_p(address), extents, strides, block, ones, 0, d.swizzle, _L2_PROMOTION, 0
    )
    _driver.check(code, "describing a matrix to the copy engine")
    return made


class ArrivalCounters:
    """Words of a device's memory that are 0 whenever no kernel runs: with them programs tell which of them is the last.

    Kernels of one stream follow each other, so a kernel has one place per stream. What is recorded may be replayed on any stream,
    so each launch in a recording has a place of its own. Places are not given back: a recording holds them by address.
    """

    WORDS = 1 << 22
    _all: ClassVar[dict[torch.device, ArrivalCounters]] = {}
    _making: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, device: torch.device) -> None:
        self._words = torch.zeros(self.WORDS, dtype=torch.int32, device=device)
        torch.cuda.current_stream(device).synchronize()  # other streams use them
        self._lock = threading.Lock()
        self._used = 0
        self._places: dict[tuple[int, int], int] = {}

    @classmethod
    def on(cls, device: torch.device) -> ArrivalCounters:
        """A device's own; made outside of recordings, when the first kernel is loaded."""
        with cls._making:
            if device not in cls._all:
                cls._all[device] = cls(device)
            return cls._all[device]

    def place(self, count: int, who: tuple[int, int]) -> int:
        """The address of so many words for a kernel on a stream; raises CaptureError where none are left."""
        recording = being_recorded_here()
        with self._lock:
            if not recording and who in self._places:
                return self._places[who]
            at = self._used
            if at + count > self.WORDS:
                raise CaptureError("a kernel cannot be launched", because="no counters are left on the device")
            self._used += count
            address = self._words.data_ptr() + 4 * at
            if not recording:
                self._places[who] = address
            return address


class DeviceFunction:
    """A kernel's function on one device."""

    def __init__(self, built: BuiltDeviceKernel, device: torch.device) -> None:
        """Load; raises CaptureError where the driver refuses."""
        library = _driver.open()
        self.built = built
        self._library = library
        with torch.cuda.device(device):
            torch.cuda.current_stream(device).query()  # the calling thread gets torch's context
            torch.empty(1, device=device)
            when_idle(device)
            module, function = ctypes.c_void_p(), ctypes.c_void_p()
            _driver.check(library.cuModuleLoadData(ctypes.byref(module), built.code), "loading device code")
            _driver.check(library.cuModuleGetFunction(ctypes.byref(function), module, built.name.encode()), "finding a kernel")
            if built.shared > _PLAIN_SHARED:
                _driver.check(library.cuFuncSetAttribute(function, _SHARED_LIMIT, built.shared), "taking shared memory")
        self._function = function
        self._device = device
        self._zeros = ArrivalCounters.on(device)
        self._attribute = _Attribute(_DEPENDENT, 0, 1)

    def launch(self, pointers: list[int], stream: int) -> None:
        """On a stream; two more pointers are scratch memory that such kernels do not use."""
        b = self.built
        values: list[Any] = [ctypes.c_void_p(p) for p in pointers]
        parts: torch.Tensor | None = None
        if b.workspace:
            parts = torch.empty(b.workspace, dtype=torch.float32, device=self._device)  # of the stream that is launched on
            values += [ctypes.c_void_p(parts.data_ptr()), ctypes.c_void_p(self._zeros.place(b.counters, (id(self), stream)))]
        for d in b.descriptors:  # by the matrix, its extents and its strides, as Triton has them
            rows, columns = d.shape
            values += [tensor_map(d, pointers[d.argument]), ctypes.c_int32(rows), ctypes.c_int32(columns), ctypes.c_int64(d.stride),
                       ctypes.c_int64(1)]  # fmt: skip
        values += [ctypes.c_void_p(None), ctypes.c_void_p(None)]
        args = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
        attributes = ctypes.pointer(self._attribute)
        config = _Config(b.grid, 1, 1, b.warps * b.warp, 1, 1, b.shared, stream, attributes, 1 if b.dependent else 0)
        _driver.check(self._library.cuLaunchKernelEx(ctypes.byref(config), self._function, args, None), "launching a kernel")
