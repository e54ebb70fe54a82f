"""What objects hold that are not made of Python's attributes: text and bytes in memory, files, arrays, iterators, connections.

A model's code may change them (`self.log.write(...)`, `self.counts[i] += 1` in a NumPy array, `next(self.turns)`), and no dict
shows it. Of each kind something is read that is another one behind every change. Reading changes nothing, not even a file's buffer:
in a fork, what waits there is the serving process's to write.
"""

from __future__ import annotations

import array
import collections
import ctypes
import gc
import io
import itertools
import mmap
import operator
import queue
import sys
import types
import warnings
import zlib
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np

MAX_BYTES = 1 << 28
"""Of one object: larger ones are told by their size alone."""
_ITERABLES: list[Any] = [[], (), range(0), {}, {}.values(), {}.items(), set[int](), "", b""]
_ITERATORS = (*(type(iter(kind)) for kind in _ITERABLES), type(reversed([])), type(iter(collections.deque())))
_OF_OTHERS = (enumerate, zip, map, filter, type(iter(list, [])), *(c for c in vars(itertools).values() if isinstance(c, type)))
"""Iterators that go through others."""
_C_DATA = (ctypes.Structure, ctypes.Union, ctypes.Array, type(ctypes.c_int()).__mro__[1])
_ATTRIBUTES_ARE_STATE = ("threading", "multiprocessing", "weakref", "asyncio.locks", "asyncio.queues", "configparser", "sched",
                         "shelve", "tarfile", "tempfile", "zipfile")  # fmt: skip
"""Modules of the standard library whose objects are Python's own and change when they are used: events, shared values, queues."""
_WRITERS = ("_csv", "_pickle")
"""Modules whose objects write to what they were made for."""
_HASHES = ("_hashlib", "_md5", "_sha1", "_sha2", "_sha256", "_sha512", "_sha3", "_blake2", "hmac")


def native_state(obj: Any) -> Callable[[], dict[Any, Any]] | None:
    """How to read what an object holds; None where it holds nothing of that kind."""
    for kinds, read in _READ.items():
        if isinstance(obj, kinds):
            return lambda: _read(read, obj)
    if (sqlite := sys.modules.get("sqlite3")) is not None and isinstance(obj, sqlite.Connection):
        return lambda: _read(lambda c: {"": c.total_changes}, obj)
    if type(obj).__module__ in _HASHES:
        return lambda: _read(lambda h: {"": h.digest()}, obj)
    return None


def led_to(obj: Any) -> list[Any]:
    """What an object of native code writes to or reads from, where that is to be looked at."""
    if isinstance(obj, memoryview):
        return [obj.obj]
    return gc.get_referents(obj) if isinstance(obj, _OF_OTHERS) or type(obj).__module__ in _WRITERS else []


def attributes_are_state(kind: type) -> bool:
    """Whether objects of the standard library's class hold in their attributes what their methods change."""
    return f"{kind.__module__}.".startswith(tuple(f"{name}." for name in _ATTRIBUTES_ARE_STATE))


def _read(read: Callable[[Any], dict[Any, Any]], obj: Any) -> dict[Any, Any]:
    try:
        return read(obj)
    except Exception:  # closed, of another thread, of no such kind after all: it says so before and after
        return {"": None}


def _bytes(obj: Any) -> dict[Any, Any]:
    with memoryview(obj) as view:
        return {"": (view.nbytes, zlib.crc32(view.cast("B")) if 0 < view.nbytes <= MAX_BYTES else 0)}


def _array(obj: np.ndarray) -> dict[Any, Any]:
    if isinstance(obj, np.ma.MaskedArray):
        return {"": (*_array(np.asarray(obj)).values(), *_array(np.ma.getmaskarray(obj)).values())}
    if obj.dtype.hasobject:
        return dict(enumerate(obj.flat))
    if not obj.flags.c_contiguous:
        return {"": zlib.crc32(obj.tobytes()) if obj.nbytes <= MAX_BYTES else 0}
    return _bytes(obj.reshape(-1).view(np.uint8)) if obj.size else {"": 0}


def _in_memory(obj: io.StringIO | io.BytesIO) -> dict[Any, Any]:
    held = obj.getvalue()
    return {"": (obj.tell(), zlib.crc32(held.encode("utf-8", "surrogatepass") if isinstance(held, str) else held))}


def _text_file(obj: io.TextIOWrapper) -> dict[Any, Any]:
    """What is not written yet, and where the bytes below are: `tell` would write the former."""
    waiting = [r for r in gc.get_referents(obj) if isinstance(r, list | bytes | str)]
    pieces = itertools.chain.from_iterable(r if isinstance(r, list) else (r,) for r in cast("list[Any]", waiting))
    return {"": (sum(map(len, pieces)), obj.closed, *_read(_file, obj.buffer).values())}


def _file(obj: Any) -> dict[Any, Any]:
    return {"": obj.closed or obj.tell()}


def _iterator(obj: Iterator[Any]) -> dict[Any, Any]:
    return {"": operator.length_hint(obj, -1)}


def _itertool(obj: Any) -> dict[Any, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return {"": _position(obj)}


def _position(value: Any) -> Any:
    """Where an iterator made of others stands; what they go through by identity."""
    if isinstance(value, tuple | list):
        return tuple(map(_position, cast("list[Any]", value)))
    if isinstance(value, _ITERATORS):
        return operator.length_hint(cast("Iterator[Any]", value), -1)
    if isinstance(value, _OF_OTHERS):
        return _position(value.__reduce__()[1:])
    return value if isinstance(value, int | float | str | None) else id(value)


def _generator(obj: types.GeneratorType[Any, Any, Any]) -> dict[Any, Any]:
    frame = obj.gi_frame
    return {"": None} if frame is None else {"": frame.f_lasti, **frame.f_locals}


def _ordered(obj: collections.OrderedDict[Any, Any]) -> dict[Any, Any]:
    """Whatever its class makes of look-ups; a cache that forgets what was used least changes the order alone."""
    return {**dict(dict.items(obj)), "the order of": tuple(map(id, collections.OrderedDict.__iter__(obj)))}


_READ: dict[tuple[type, ...], Callable[[Any], dict[Any, Any]]] = {
    (np.ndarray,): _array,
    (array.array, bytearray, mmap.mmap, *_C_DATA): _bytes,
    (io.StringIO, io.BytesIO): _in_memory,
    (io.TextIOWrapper,): _text_file,
    (io.IOBase,): _file,
    _OF_OTHERS: _itertool,
    _ITERATORS: _iterator,
    (np.flatiter,): lambda f: {"": f.index},
    (types.GeneratorType,): _generator,
    (queue.SimpleQueue,): lambda q: {"": q.qsize()},
    (collections.OrderedDict,): _ordered,
}
