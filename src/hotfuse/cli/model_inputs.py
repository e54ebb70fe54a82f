"""Inputs for a model from the command line: `.npy` files, numbers, or random values by declared shape."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import ml_dtypes
import numpy as np
import numpy.typing as npt
import typer

from hotfuse.base.errors import HotfuseError, InputError
from hotfuse.base.lazy_dataclass import dataclass

Array = npt.NDArray[Any]

_DTYPES: dict[str, Any] = {
    "float": np.float32,
    "double": np.float64,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float8e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8e5m2": ml_dtypes.float8_e5m2,
    "bool": np.bool_,
    "string": np.object_,
    "complex64": np.complex64,
    "complex128": np.complex128,
    **{name: np.dtype(name) for name in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")},
}
_MAX_ELEMENTS = 1 << 31
_SEGMENTS = ("token_type", "segment")
"""What exporters call the input that says which of two texts a token belongs to."""


class Declared(Protocol):
    """An input as ONNX Runtime's interface describes it."""

    @property
    def name(self) -> str:
        """The input's name."""
        ...

    @property
    def type(self) -> str:
        """Such as `tensor(float)`."""
        ...

    @property
    def shape(self) -> Sequence[int | str | None]:
        """Numbers, names of dynamic dims, or None."""
        ...


@dataclass(frozen=True, slots=True)
class Feeds:
    """What the model is run with, and how it came about."""

    arrays: dict[str, Array]
    dims: dict[str, int]
    """Dynamic dims by name; an unnamed one is called `input.axis`, and every one may be."""
    chosen: frozenset[str]
    """The dims among them that nobody gave: shown, so that the user can give them."""
    sources: dict[str, str]
    """`random`, a file's name or a number, per input."""


@contextmanager
def owning_up(feeds: Feeds) -> Generator[None]:
    """A call that fails may do so for sizes and values that nobody gave: they are named, and how to give them."""
    try:
        yield
    except HotfuseError:
        sizes = ", ".join(f"{name}={feeds.dims[name]}" for name in sorted(feeds.chosen))
        values = ", ".join(name for name, source in feeds.sources.items() if source == "random")
        if sizes:
            typer.echo(f"sizes made up for this call: {sizes} (give them with --dim name=size)", err=True)
        if values:
            typer.echo(f"values made up for this call: {values} (give them with --input name=number or name=file.npy)", err=True)
        raise


def make_feeds(declared: Sequence[Declared], given: Mapping[str, str], dims: Mapping[str, str], seed: int) -> Feeds:
    """One array per declared input."""
    names = [d.name for d in declared]
    for name in given:
        if name not in names:
            raise InputError(f"the model has no input {name!r}", hint="one of " + ", ".join(names))
    numbers = {name: _dim(name, text) for name, text in dims.items()}
    _check_dims(declared, numbers)
    loaded = {name: _load(name, text) for name, text in given.items() if text.endswith(".npy")}
    bound = _dims_of_files(declared, loaded)
    for name, number in numbers.items():
        if bound.setdefault(name, number) != number:
            raise InputError(f"--dim {name}={number} contradicts a file, where it is {bound[name]}",
                             hint=f"leave --dim {name} out")
    rng = np.random.default_rng(seed)
    chosen: set[str] = set()
    arrays: dict[str, Array] = {}
    sources: dict[str, str] = {}
    for d in declared:
        if d.name in loaded:
            arrays[d.name], sources[d.name] = loaded[d.name], given[d.name]
            continue
        shape = tuple(_extent(d.name, axis, dim, bound, chosen) for axis, dim in enumerate(d.shape))
        if math.prod(shape) > _MAX_ELEMENTS:
            raise InputError(f"input {d.name!r} of shape {shape} is too large to make up", hint="give smaller --dim")
        dtype = _dtype(d)
        if d.name in given:
            arrays[d.name], sources[d.name] = _filled(d.name, given[d.name], shape, dtype), given[d.name]
        else:
            arrays[d.name], sources[d.name] = _random(rng, d.name.lower(), shape, dtype), "random"
    return Feeds(arrays, bound, frozenset(chosen), sources)


def _dim(name: str, text: str) -> int:
    if not text.isdecimal():
        raise InputError(f"--dim {name}={text} is not a size", hint=f"--dim {name}=64")
    return int(text)


def _dim_name(input_name: str, axis: int, dim: int | str | None) -> str:
    """Exporters write `?` for a dim they know nothing about: two of those need not be equal."""
    return dim if isinstance(dim, str) and dim not in ("", "?") else f"{input_name}.{axis}"


def _check_dims(declared: Sequence[Declared], given: Mapping[str, int]) -> None:
    dynamic = [(d.name, axis, dim) for d in declared for axis, dim in enumerate(d.shape) if not isinstance(dim, int)]
    names = [_dim_name(*place) for place in dynamic]
    for name in given:
        if name not in names and name not in [f"{place[0]}.{place[1]}" for place in dynamic]:
            hint = "one of " + ", ".join(dict.fromkeys(names)) if names else "the model has no dynamic dims"
            raise InputError(f"no input has a dynamic dim {name!r}", hint=hint)


def _dims_of_files(declared: Sequence[Declared], loaded: Mapping[str, Array]) -> dict[str, int]:
    """Dynamic dims that the given files fix, so that made-up inputs agree with them."""
    bound: dict[str, int] = {}
    for d in declared:
        if (array := loaded.get(d.name)) is None or array.ndim != len(d.shape):
            continue
        for axis, dim in enumerate(d.shape):
            if not isinstance(dim, int):
                bound.setdefault(_dim_name(d.name, axis, dim), array.shape[axis])
    return bound


def _extent(input_name: str, axis: int, dim: int | str | None, bound: dict[str, int], chosen: set[str]) -> int:
    if isinstance(dim, int) and dim >= 0:
        return dim
    if (place := f"{input_name}.{axis}") in bound:
        return bound[place]
    name = _dim_name(input_name, axis, dim)
    if name not in bound:
        # The first axis is a batch nearly always; 64 suits a sequence and divides by a network's strides.
        bound[name] = 1 if axis == 0 else 64
        chosen.add(name)
    return bound[name]


def _dtype(d: Declared) -> Any:
    inner = d.type.removeprefix("tensor(").removesuffix(")")
    if not d.type.startswith("tensor(") or inner not in _DTYPES:
        raise InputError(
            f"input {d.name!r} is a {d.type}, which the command line cannot make up",
            hint="run the model from Python with hotfuse.InferenceSession",
        )
    return _DTYPES[inner]


def _load(name: str, text: str) -> Array:
    try:
        # Pickled arrays could run code while loading.
        array: Array = np.load(Path(text), allow_pickle=False)
    except (OSError, ValueError, EOFError) as e:
        raise InputError(
            f"cannot read {text} for input {name!r}", because=str(e), hint="a .npy file written by numpy.save"
        ) from e
    return array


def _filled(name: str, text: str, shape: tuple[int, ...], dtype: Any) -> Array:
    try:
        return np.full(shape, float(text) if "." in text or "e" in text.lower() else int(text)).astype(dtype)
    except (ValueError, OverflowError) as e:
        raise InputError(
            f"--input {name}={text} is neither a .npy file nor a number", hint=f"--input {name}=file.npy"
        ) from e


def _random(rng: np.random.Generator, name: str, shape: tuple[int, ...], dtype: Any) -> Array:
    """Normal floats; small non-negative integers, which are safe as indices; coin flips.

    Integers of a text model mean something by their names: a mask has ones and then padding, and segments are two, of which
    a table has no more rows.
    """
    if dtype is np.bool_:
        return np.asarray(rng.integers(0, 2, shape)).astype(np.bool_)
    if dtype is np.object_:
        return np.full(shape, "hotfuse", dtype=object)
    if np.dtype(dtype).kind in "iu":
        if "mask" in name and shape:
            lengths = rng.integers(1, max(2, shape[-1] + 1), (*shape[:-1], 1))
            return np.broadcast_to(np.arange(shape[-1]) < lengths, shape).astype(dtype)
        most = 2 if any(word in name for word in _SEGMENTS) else 8
        return np.asarray(rng.integers(0, most, shape)).astype(dtype)
    return np.asarray(rng.standard_normal(shape)).astype(dtype)
