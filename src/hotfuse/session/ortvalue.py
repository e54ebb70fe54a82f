"""`OrtValue` and `IOBinding`: ONNX Runtime's holders of values, over NumPy arrays on the host and tensors on a device."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.frontends.onnx.values import BY_CODE, BY_NUMPY, Elem, from_numpy
from hotfuse.session.ort_errors import Unavailable, UnsupportedFeed
from hotfuse.session.providers import devices

Array = np.ndarray[Any, Any]


def _place(device_type: str, device_id: int) -> torch.device | None:
    """A device by ONNX Runtime's name; None is the host."""
    kind = device_type.lower()
    if kind == "cpu":
        return None
    if kind not in ("cuda", "gpu"):
        raise Unavailable(f"values cannot be placed on device {device_type!r}", because="it is neither the host nor a CUDA device",
                          hint="device_type='cpu' or 'cuda'")  # fmt: skip
    if not 0 <= device_id < (there := devices()):
        raise Unavailable(f"values cannot be placed on cuda device {device_id}", because=f"torch sees {there} CUDA devices",
                          hint="device_type='cpu'")  # fmt: skip
    return torch.device("cuda", device_id)


def _elem(element_type: object) -> Elem:
    """An element type given as a NumPy type or as ONNX's number."""
    if isinstance(element_type, int):
        found = BY_CODE.get(element_type)
    else:
        dtype = np.dtype(cast(Any, element_type))
        found = BY_CODE[8] if dtype.kind in "UST" else BY_NUMPY.get(dtype)
    if found is None:
        raise UnsupportedFeed(f"element type {element_type!r} has no ONNX counterpart")
    return found


class OrtValue:
    """A tensor, a sequence of tensors or nothing; a tensor made from an array shares its memory."""

    def __init__(self, value: object) -> None:
        self.value = value

    @classmethod
    def ortvalue_from_numpy(cls, numpy_obj: Array, /, device_type: str = "cpu", device_id: int = 0,
                            vendor_id: int = -1) -> OrtValue:
        """A tensor over an array's own memory, or a copy of it on a device."""
        device = _place(device_type, device_id)
        if not isinstance(numpy_obj, np.ndarray):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UnsupportedFeed("Unable to create OrtValue from the given python object",
                                  because=f"it is a {type(numpy_obj).__name__}", hint="pass a numpy array")
        if numpy_obj.dtype.kind not in "UST":
            _elem(numpy_obj.dtype.newbyteorder("="))
        return cls(numpy_obj if device is None else _moved(numpy_obj, device))

    @classmethod
    def ortvalue_from_numpy_with_onnx_type(cls, data: Array, /, onnx_element_type: int) -> OrtValue:
        """A tensor over an array's memory whose bits are read as another element type of the same size."""
        elem = _elem(onnx_element_type)
        if elem.np.itemsize != data.dtype.itemsize:
            raise UnsupportedFeed(f"{data.dtype} cannot be read as {elem.name}", because="their sizes differ")
        return cls(data.view(elem.np))

    @classmethod
    def ortvalue_from_shape_and_type(cls, shape: Sequence[int], element_type: object, device_type: str = "cpu",
                                     device_id: int = 0, vendor_id: int = -1) -> OrtValue:
        """A new tensor of zeros."""
        device = _place(device_type, device_id)
        array = np.zeros(tuple(shape), dtype=_elem(element_type).np)
        return cls(array if device is None else _moved(array, device))

    @property
    def _there(self) -> torch.Tensor | None:
        """The tensor, where it is on a device."""
        return self.value if isinstance(self.value, torch.Tensor) else None

    def _array(self) -> Array:
        if not isinstance(self.value, np.ndarray):
            raise UnsupportedFeed("Only OrtValues that are tensors are supported",
                                  because=f"this is {self.data_type()}")
        return cast(Array, self.value)

    def numpy(self) -> Any:
        """The array (shared, not copied); a copy of what is on a device."""
        return self._array() if self._there is None else self._there.cpu().numpy()

    def shape(self) -> list[int]:
        """The tensor's sizes."""
        return list(self._array().shape if self._there is None else self._there.shape)

    def element_type(self) -> int:
        """ONNX's number of the tensor's element type."""
        if self._there is not None:
            return next(e.code for e in BY_CODE.values() if e.torch is self._there.dtype)
        return _elem(self._array().dtype.newbyteorder("=")).code

    def data_type(self) -> str:
        """The type as ONNX Runtime writes it, such as `tensor(float)`."""
        if self.is_tensor():
            return f"tensor({BY_CODE[self.element_type()].name})"
        if isinstance(self.value, list):
            items = cast(list[object], self.value)
            return f"seq({OrtValue(items[0]).data_type()})" if items else "seq(tensor(float))"
        return "undefined"

    def tensor_size_in_bytes(self) -> int:
        """The bytes the tensor's elements take."""
        return self._array().nbytes if self._there is None else self._there.nbytes

    def data_ptr(self) -> int:
        """The address of the first element."""
        return self._array().ctypes.data if self._there is None else self._there.data_ptr()

    def device_name(self) -> str:
        """Where the data lies: `cpu` or `cuda`."""
        return "cpu" if self._there is None else self._there.device.type

    def has_value(self) -> bool:
        """False for an empty optional."""
        return self.value is not None

    def is_tensor(self) -> bool:
        """Whether this is a tensor."""
        return isinstance(self.value, np.ndarray | torch.Tensor)

    def is_sparse_tensor(self) -> bool:
        """Always False: sparse tensors are made dense when a model is loaded."""
        return False

    def is_tensor_sequence(self) -> bool:
        """Whether this is a sequence."""
        return isinstance(self.value, list)

    def update_inplace(self, np_arr: Array) -> None:
        """Overwrite the tensor's elements; shape and type must be the same."""
        code = _elem(np_arr.dtype.newbyteorder("=")).code
        if self.shape() != list(np_arr.shape) or self.element_type() != code:
            raise UnsupportedFeed("an OrtValue keeps its shape and type",
                                  because=f"{self.data_type()}{self.shape()} is not {np_arr.dtype}{list(np_arr.shape)}")
        if self._there is not None:
            self._there.copy_(_moved(np_arr, self._there.device))
        else:
            self._array()[...] = np_arr


def _moved(array: Array, device: torch.device) -> torch.Tensor:
    """A copy of an array on a device."""
    value = from_numpy(np.ascontiguousarray(array).reshape(array.shape))
    if not isinstance(value, torch.Tensor):
        raise UnsupportedFeed(f"values of type {array.dtype} cannot be placed on {device}")
    return value.to(device)


@dataclass(frozen=True, slots=True)
class _DeviceMemory:
    """Memory of a device by its address, as torch takes it."""

    __cuda_array_interface__: dict[str, Any]


def _at(address: int, elem: Elem, shape: Sequence[int], device: torch.device | None = None) -> Array | torch.Tensor:
    """An array, or a tensor on a device, over memory the caller owns."""
    sizes = tuple(int(n) for n in shape)
    if device is not None:
        described = {"shape": sizes, "typestr": elem.np.str, "data": (address, False), "version": 3, "strides": None}
        return torch.as_tensor(_DeviceMemory(described), device=device)
    block = (ctypes.c_char * (math.prod(sizes) * elem.np.itemsize)).from_address(address)
    return np.frombuffer(memoryview(block), dtype=elem.np).reshape(sizes)


class IOBinding:
    """Inputs and outputs kept between runs; inputs are read when a run starts, outputs written when it ends."""

    def __init__(self, session: object, input_names: Sequence[str], run: Callable[..., list[Any]]) -> None:
        self.session = session
        self._known = frozenset(input_names)
        self._run = run
        self._inputs: dict[str, object] = {}
        self._outputs: dict[str, Array | torch.Tensor | torch.device | None] = {}
        """Memory to write to; else the device of new memory, None is the host."""
        self._results: list[Any] = []

    def _bind(self, name: str, value: object) -> None:
        if name not in self._known:
            raise UnsupportedFeed(f"Failed to find NodeArg with name: {name} in the def list")
        self._inputs[name] = value

    def bind_cpu_input(self, name: str, arr_on_cpu: Array) -> None:
        """Bind an array; later changes to it are seen by the next run."""
        if not isinstance(arr_on_cpu, np.ndarray):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UnsupportedFeed("Unable to create OrtValue from the given python object",
                                  because=f"it is a {type(arr_on_cpu).__name__}", hint="pass a numpy array")
        self._bind(name, arr_on_cpu)

    def bind_input(self, name: str, device_type: str, device_id: int, element_type: object, shape: Sequence[int],
                   buffer_ptr: int) -> None:
        """Bind memory by its address; the caller keeps it alive."""
        device = _place(device_type, device_id)
        self._bind(name, OrtValue(_at(buffer_ptr, _elem(element_type), shape, device)))

    def bind_ortvalue_input(self, name: str, ortvalue: OrtValue) -> None:
        """Bind a value."""
        self._bind(name, ortvalue)

    def bind_output(self, name: str, device_type: str = "cpu", device_id: int = 0, element_type: object = None,
                    shape: Sequence[int] | None = None, buffer_ptr: int | None = None) -> None:
        """Ask for an output: in a new array, or in memory given by its address."""
        device = _place(device_type, device_id)
        if buffer_ptr is None:
            self._outputs[name] = device
        elif element_type is None or shape is None:
            raise UnsupportedFeed("`element_type` and `shape` are to be provided if pre-allocated memory is provided")
        else:
            self._outputs[name] = _at(buffer_ptr, _elem(element_type), shape, device)

    def bind_ortvalue_output(self, name: str, ortvalue: OrtValue) -> None:
        """Ask for an output in a given tensor."""
        there = ortvalue.value
        self._outputs[name] = there if isinstance(there, torch.Tensor) else ortvalue.numpy()

    def execute(self, run_options: object) -> None:
        """Run the model on what is bound."""
        if not self._outputs:
            raise UnsupportedFeed("Error in execution: At least one output should be requested.")
        names = list(self._outputs)
        places = [_device_of(target) for target in self._outputs.values()]
        results = self._run(names, dict(self._inputs), run_options, places)
        for i, (name, target) in enumerate(self._outputs.items()):
            if target is None or isinstance(target, torch.device):
                continue
            got: Any = results[i]
            if type(got) is not type(target) or got.shape != target.shape or got.dtype != target.dtype:
                raise UnsupportedFeed(
                    f"Error in execution: output {name} does not fit the memory bound to it",
                    because=f"it is {getattr(got, 'dtype', type(got).__name__)}{list(np.shape(got))}, "
                    f"bound is {target.dtype}{list(target.shape)}",
                )
            if isinstance(target, torch.Tensor):
                target.copy_(cast(torch.Tensor, results[i]))
            else:
                target[...] = got
            results[i] = target
        self._results = results

    def get_outputs(self) -> list[OrtValue]:
        """The last run's outputs, in the order they were bound."""
        return [OrtValue(v) for v in self._results]

    def copy_outputs_to_cpu(self) -> list[Any]:
        """The last run's outputs as arrays of their own."""
        return [v.copy() if isinstance(v, np.ndarray) else OrtValue(v).numpy() if isinstance(v, torch.Tensor) else v
                for v in self._results]

    def clear_binding_inputs(self) -> None:
        """Forget the inputs."""
        self._inputs.clear()

    def clear_binding_outputs(self) -> None:
        """Forget the outputs."""
        self._outputs.clear()
        self._results = []

    def synchronize_inputs(self) -> None:
        """Until what is bound is there."""
        _synchronize([v.value if isinstance(v, OrtValue) else v for v in self._inputs.values()])

    def synchronize_outputs(self) -> None:
        """Until the last run's results are there."""
        _synchronize(self._results)


def _device_of(target: Array | torch.Tensor | torch.device | None) -> torch.device | None:
    return target.device if isinstance(target, torch.Tensor) else target if isinstance(target, torch.device) else None


def _synchronize(values: Sequence[object]) -> None:
    for device in {v.device for v in values if isinstance(v, torch.Tensor) and v.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
