"""`OrtValue` and `IOBinding`: ONNX Runtime's holders of values, over NumPy arrays on the host."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from hotfuse.frontends.onnx.values import BY_CODE, BY_NUMPY, Elem
from hotfuse.session.errors import Unavailable, UnsupportedFeed

Array = np.ndarray[Any, Any]


def _cpu_only(device_type: str) -> None:
    if device_type.lower() != "cpu":
        raise Unavailable(f"values cannot be placed on device {device_type!r}", because="sessions run on the host",
                             hint="device_type='cpu'")


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
        """A tensor over an array's own memory."""
        _cpu_only(device_type)
        if not isinstance(numpy_obj, np.ndarray):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UnsupportedFeed("Unable to create OrtValue from the given python object",
                                  because=f"it is a {type(numpy_obj).__name__}", hint="pass a numpy array")
        if numpy_obj.dtype.kind not in "UST":
            _elem(numpy_obj.dtype.newbyteorder("="))
        return cls(numpy_obj)

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
        _cpu_only(device_type)
        return cls(np.zeros(tuple(shape), dtype=_elem(element_type).np))

    def _array(self) -> Array:
        if not isinstance(self.value, np.ndarray):
            raise UnsupportedFeed("Only OrtValues that are tensors are supported",
                                  because=f"this is {self.data_type()}")
        return cast(Array, self.value)

    def numpy(self) -> Any:
        """The array (shared, not copied)."""
        return self._array()

    def shape(self) -> list[int]:
        """The tensor's sizes."""
        return list(self._array().shape)

    def element_type(self) -> int:
        """ONNX's number of the tensor's element type."""
        return _elem(self._array().dtype.newbyteorder("=")).code

    def data_type(self) -> str:
        """The type as ONNX Runtime writes it, such as `tensor(float)`."""
        if isinstance(self.value, np.ndarray):
            return f"tensor({BY_CODE[self.element_type()].name})"
        if isinstance(self.value, list):
            items = cast(list[object], self.value)
            return f"seq({OrtValue(items[0]).data_type()})" if items else "seq(tensor(float))"
        return "undefined"

    def tensor_size_in_bytes(self) -> int:
        """The bytes the tensor's elements take."""
        return self._array().nbytes

    def data_ptr(self) -> int:
        """The address of the first element."""
        return self._array().ctypes.data

    def device_name(self) -> str:
        """Where the data lies: always `cpu`."""
        return "cpu"

    def has_value(self) -> bool:
        """False for an empty optional."""
        return self.value is not None

    def is_tensor(self) -> bool:
        """Whether this is a tensor."""
        return isinstance(self.value, np.ndarray)

    def is_sparse_tensor(self) -> bool:
        """Always False: sparse tensors are made dense when a model is loaded."""
        return False

    def is_tensor_sequence(self) -> bool:
        """Whether this is a sequence."""
        return isinstance(self.value, list)

    def update_inplace(self, np_arr: Array) -> None:
        """Overwrite the tensor's elements; shape and type must be the same."""
        mine = self._array()
        if mine.shape != np_arr.shape or mine.dtype != np_arr.dtype:
            raise UnsupportedFeed("an OrtValue keeps its shape and type",
                                  because=f"{mine.dtype}{list(mine.shape)} is not {np_arr.dtype}{list(np_arr.shape)}")
        mine[...] = np_arr


def _at(address: int, elem: Elem, shape: Sequence[int]) -> Array:
    """An array over memory the caller owns."""
    sizes = tuple(int(n) for n in shape)
    block = (ctypes.c_char * (math.prod(sizes) * elem.np.itemsize)).from_address(address)
    return np.frombuffer(memoryview(block), dtype=elem.np).reshape(sizes)


class IOBinding:
    """Inputs and outputs kept between runs; inputs are read when a run starts, outputs written when it ends."""

    def __init__(self, session: object, input_names: Sequence[str], run: Callable[..., list[Any]]) -> None:
        self.session = session
        self._known = frozenset(input_names)
        self._run = run
        self._inputs: dict[str, object] = {}
        self._outputs: dict[str, Array | None] = {}
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
        _cpu_only(device_type)
        self._bind(name, _at(buffer_ptr, _elem(element_type), shape))

    def bind_ortvalue_input(self, name: str, ortvalue: OrtValue) -> None:
        """Bind a value."""
        self._bind(name, ortvalue)

    def bind_output(self, name: str, device_type: str = "cpu", device_id: int = 0, element_type: object = None,
                    shape: Sequence[int] | None = None, buffer_ptr: int | None = None) -> None:
        """Ask for an output: in a new array, or in memory given by its address."""
        _cpu_only(device_type)
        if buffer_ptr is None:
            self._outputs[name] = None
        elif element_type is None or shape is None:
            raise UnsupportedFeed("`element_type` and `shape` are to be provided if pre-allocated memory is provided")
        else:
            self._outputs[name] = _at(buffer_ptr, _elem(element_type), shape)

    def bind_ortvalue_output(self, name: str, ortvalue: OrtValue) -> None:
        """Ask for an output in a given tensor."""
        self._outputs[name] = ortvalue.numpy()

    def execute(self, run_options: object) -> None:
        """Run the model on what is bound."""
        if not self._outputs:
            raise UnsupportedFeed("Error in execution: At least one output should be requested.")
        names = list(self._outputs)
        results = self._run(names, dict(self._inputs), run_options)
        for i, (name, target) in enumerate(self._outputs.items()):
            if target is None:
                continue
            got = results[i]
            if not isinstance(got, np.ndarray) or got.shape != target.shape or got.dtype != target.dtype:
                raise UnsupportedFeed(
                    f"Error in execution: output {name} does not fit the memory bound to it",
                    because=f"it is {getattr(got, 'dtype', type(got).__name__)}{list(np.shape(got))}, "
                    f"bound is {target.dtype}{list(target.shape)}",
                )
            target[...] = got
            results[i] = target
        self._results = results

    def get_outputs(self) -> list[OrtValue]:
        """The last run's outputs, in the order they were bound."""
        return [OrtValue(v) for v in self._results]

    def copy_outputs_to_cpu(self) -> list[Any]:
        """The last run's outputs as arrays of their own."""
        return [v.copy() if isinstance(v, np.ndarray) else v for v in self._results]

    def clear_binding_inputs(self) -> None:
        """Forget the inputs."""
        self._inputs.clear()

    def clear_binding_outputs(self) -> None:
        """Forget the outputs."""
        self._outputs.clear()
        self._results = []

    def synchronize_inputs(self) -> None:
        """Nothing to wait for on the host."""

    def synchronize_outputs(self) -> None:
        """Nothing to wait for on the host."""
