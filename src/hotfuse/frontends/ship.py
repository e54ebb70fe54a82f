# pyright: reportPrivateUsage=false
# Torch keeps what a front end needs private.
"""How a module travels to a worker process: code and structure whole, tensors as descriptions.

cloudpickle carries classes and functions of `__main__` by value, so a script needs no import guard. Weights never
travel: each tensor becomes a number and a description, and the worker builds a fake tensor from it. Only small tensors
that are neither parameters nor buffers travel with their data, because tracing may need their values.

What does something when it is deleted (`NamedTemporaryFile`, a connection) does not travel: a copy would do it, too. Nor does a
text file, which cloudpickle reads from its beginning, under a thread that writes to it.

The blob goes through a pipe between a process and its own child, and nowhere else: it is never written to a file or database.
"""

from __future__ import annotations

import inspect
import io
import pickle
import sys
import types
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import torch
from torch import nn

from hotfuse.base.errors import CaptureError, HotfuseError
from hotfuse.base.events import Why
from hotfuse.base.faults import error_text
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.base.raw_bytes import raw_bytes

MAX_SHIPPED_ELEMENTS = 256
"""Most elements of a plain tensor that travels with its data."""
PLAIN_TYPES = frozenset({str, int, float, bool, type(None), bytes, dict, list, tuple})
"""Types of most objects that a pickler meets: neither modules nor tensors."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What a worker needs to know of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    device: str
    parameter: bool
    requires_grad: bool
    data: bytes | None = None


@dataclass(frozen=True, slots=True)
class Shipment:
    """A blob for the worker, and what was found on the way, numbered as in the blob."""

    blob: bytes
    tensors: tuple[torch.Tensor, ...]
    modules: tuple[nn.Module, ...]


def ship(target: Any, extra: Any = None) -> Shipment:
    """Pack a module or function (and plain data) for a worker."""
    out = io.BytesIO()
    packer = _Packer(out)
    try:
        with _by_value(target):
            packer.dump((target, extra))
    except CaptureError:
        raise
    except Exception as e:
        raise CaptureError(
            "the model cannot be sent to a worker process", why=Why.NOT_SENDABLE,
            because=error_text(e),
            hint="keep locks, files and handles out of the module's attributes",
        ) from e
    return Shipment(out.getvalue(), tuple(packer.tensors), tuple(packer.modules))


def unship(blob: bytes, mode: Any) -> tuple[Any, Any, list[torch.Tensor]]:
    """Rebuild (target, extra) with fake tensors of the given mode; also all the tensors by number. Raises CaptureError where this
    process lacks what the model's has: modules or operators that a program made while it ran."""
    reader = _Unpacker(io.BytesIO(blob), mode)
    try:
        target, extra = reader.load()
    except HotfuseError:
        raise
    except Exception as e:
        raise CaptureError("a worker process cannot load the model", because=error_text(e), why=Why.NOT_SENDABLE) from e
    return target, extra, reader.tensors


def describe(t: torch.Tensor, *, with_data: bool = False) -> TensorInfo:
    """The description of one tensor."""
    if t.layout is not torch.strided or t.is_quantized or type(t) not in (torch.Tensor, nn.Parameter, nn.Buffer):
        raise CaptureError(f"a {type(t).__name__} with layout {t.layout} cannot be described", why=Why.NOT_SENDABLE)
    data = None
    if with_data:
        data = raw_bytes(t.detach().cpu()).numpy().tobytes() if t.numel() else b""
    return TensorInfo(t.dtype, tuple(t.shape), tuple(t.stride()), str(t.device), isinstance(t, nn.Parameter),
                      t.requires_grad, data)


def restore(info: TensorInfo) -> torch.Tensor:
    """A real tensor from a description with data."""
    assert info.data is not None
    if not info.data:
        return torch.empty(info.shape, dtype=info.dtype, device=info.device)
    flat = torch.frombuffer(bytearray(info.data), dtype=torch.uint8).view(info.dtype)
    return flat.view(info.shape).to(info.device)


class _Packer(cloudpickle.Pickler):
    """Replaces tensors by numbers and notes the modules it passes."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []
        self.modules: list[nn.Module] = []
        self._numbers: dict[int, int] = {}
        self._seen: set[int] = set()
        self._registered: set[int] = set()

    def reducer_override(self, obj: Any) -> Any:
        refuse_files(obj)
        if hasattr(type(obj), "__del__") and not isinstance(obj, io.BytesIO | io.StringIO):
            raise pickle.PicklingError(f"a {type(obj).__name__} does something when it is deleted, which a copy would do, too")
        if isinstance(obj, torch._ops.OpOverload):
            return operator_named, (obj.namespace, obj._opname, obj._overloadname)
        if isinstance(obj, torch._ops.OpOverloadPacket):
            return operator_named, (*obj._qualified_op_name.split("::"), None)
        return super().reducer_override(obj)

    def persistent_id(self, obj: Any) -> Any:
        if type(obj) in PLAIN_TYPES:
            return None
        if isinstance(obj, nn.Module):
            if id(obj) not in self._seen:
                self._seen.add(id(obj))
                self.modules.append(obj)
                self._registered.update(id(b) for b in obj._buffers.values() if b is not None)
            return None
        if not isinstance(obj, torch.Tensor):
            return None
        if id(obj) not in self._numbers:
            self._numbers[id(obj)] = len(self.tensors)
            self.tensors.append(obj)
        plain = not isinstance(obj, nn.Parameter) and id(obj) not in self._registered
        return self._numbers[id(obj)], describe(obj, with_data=plain and obj.numel() <= MAX_SHIPPED_ELEMENTS)


def refuse_files(obj: Any) -> None:
    """Raise PicklingError for an open text file, which to write down moves where it stands."""
    if isinstance(obj, io.TextIOWrapper) and obj not in (sys.stdout, sys.stderr):
        raise pickle.PicklingError("a text file is open")


def operator_named(namespace: str, name: str, overload: str | None) -> Any:
    """A torch operator by its name, which is how it travels."""
    packet = getattr(getattr(torch.ops, namespace), name)
    return packet if overload is None else getattr(packet, overload)


class _Unpacker(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, mode: Any) -> None:
        super().__init__(file)
        self.mode = mode
        self.tensors: list[torch.Tensor] = []
        self._made: dict[int, torch.Tensor] = {}

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        found = super().find_class(module_name, global_name)
        return _untracked(found) if global_name in ("_make_skeleton_class", "_make_skeleton_enum") else found

    def persistent_load(self, pid: Any) -> torch.Tensor:
        number, info = pid
        if number not in self._made:
            made = self._made[number] = self._make(info)
            while len(self.tensors) <= number:
                self.tensors.append(made)
            self.tensors[number] = made
        return self._made[number]

    def _make(self, info: TensorInfo) -> torch.Tensor:
        if info.data is not None:
            return restore(info)
        with self.mode:
            t = torch.empty_strided(info.shape, info.stride, dtype=info.dtype, device=info.device)
            return nn.Parameter(t, requires_grad=info.requires_grad) if info.parameter else t


def _untracked(make: Any) -> Any:
    """Makes a class that travels by value anew, also where it is known: in the process that sent it, it would get copies of its own
    methods, which close over copies of what the user's code reads and writes.
    """
    place = list(inspect.signature(make).parameters).index("class_tracker_id")
    return lambda *args: make(*(None if i == place else a for i, a in enumerate(args)))


@contextmanager
def _by_value(target: Any) -> Generator[None]:
    """Carry a function by value when it leans on tensors or modules of its own file.

    Importing that file again in the worker would build those anew, with other weights.
    """
    module = sys.modules.get(getattr(target, "__module__", "") or "")
    if (
        not isinstance(target, types.FunctionType)
        or module is None
        or module.__name__ == "__main__"
        or not any(isinstance(target.__globals__.get(n), nn.Module | torch.Tensor) for n in target.__code__.co_names)
        or module.__name__ in cloudpickle.list_registry_pickle_by_value()
    ):
        yield
        return
    cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(module)
