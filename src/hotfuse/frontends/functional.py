"""In-place ops on intermediates become pure ops: the traced program's variables are tracked by storage.

A tensor variable of the traced program is a `Cell`: a storage and the chain of views that leads from the storage's
root to it. Reading a cell gives an up-to-date value, replaying its views if the storage was written since; writing a cell
pushes the new value up through the inverse of each view and makes it the storage's root:

    h = linear(x); h[:, 5] = 3    -->    h0 = linear(x); s = select(h0, 1, 5); s1 = fill(s, 3); h1 = select_scatter(h0, s1, 1, 5)

What belongs to the caller (inputs, parameters, buffers) may not be written: the model is then stateful. An op that changes a
tensor's shape in place (`unsqueeze_`) is one more view of its cell; one that writes its result into `out=` writes that cell.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import field
from typing import Any

import torch

from hotfuse.base.errors import CaptureError
from hotfuse.base.events import Why
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.graph import Arg, Value
from hotfuse.ir.types import TensorType

aten = torch.ops.aten
Emit = Callable[..., Any]
"""`emit(op, *args)` adds a pure node and gives its value (a tuple for several)."""


@dataclass(slots=True)
class Storage:
    """Memory of the traced program: its current contents, and whose it is."""

    root: Value
    version: int = 0
    owner: str = ""
    """Non-empty for memory of the caller, which must not be written."""
    unsure: list[Storage] = field(default_factory=list["Storage"])
    """Storages that may or may not be the same memory: none of them can be written while another one is read later."""

    def perhaps_the_same(self) -> list[Storage]:
        """All of those, and of theirs."""
        found: list[Storage] = [self]
        left = list(self.unsure)
        while left:
            storage = left.pop()
            if all(storage is not f for f in found):
                found.append(storage)
                left += storage.unsure
        return found[1:]


@dataclass(frozen=True, slots=True)
class ViewStep:
    """One step from a storage's root: a view op with its arguments after the first, and which result of it."""

    op: Any
    rest: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...]
    index: int | None


@dataclass(slots=True)
class Cell:
    """A tensor variable of the traced program."""

    storage: Storage
    chain: tuple[ViewStep, ...]
    value: Value
    version: int


def _step(emit: Emit, view: ViewStep, parent: Value) -> Value:
    out = emit(view.op, parent, *view.rest, **dict(view.kwargs))
    return out if view.index is None else out[view.index]


def read(cell: Cell, emit: Emit) -> Value:
    """The cell's value now."""
    if cell.version != cell.storage.version:
        value = cell.storage.root
        for view in cell.chain:
            value = _step(emit, view, value)
        cell.value, cell.version = value, cell.storage.version
    return cell.value


def write(cell: Cell, new: Value, emit: Emit, where: str, is_dead: Callable[[Storage], bool]) -> None:
    """Make `new` the contents of the cell, and so of every cell on the same storage.

    `is_dead`: nobody reads a storage from here on, so that it does not matter whether it changes, too.
    """
    storage = cell.storage
    if storage.owner:
        raise CaptureError(
            f"the model changes {storage.owner} in place", where=where, why=Why.STATEFUL,
            because="a captured graph has no side effects", hint="write to a copy, and return what changed",
        )
    if not all(map(is_dead, storage.perhaps_the_same())):
        raise CaptureError(
            "an in-place op writes memory that may be shared through a reshape or a conversion", where=where,
            hint="use the out-of-place form of this op",
        )
    parents: list[Value] = []
    while len(parents) < len(cell.chain):
        parents.append(storage.root if not parents else _step(emit, cell.chain[len(parents) - 1], parents[-1]))
    value = new
    for view, parent in zip(reversed(cell.chain), reversed(parents), strict=True):
        inverse = _INVERSE.get(view.op.overloadpacket)
        if inverse is None:
            raise CaptureError(f"an in-place op writes through {view.op}", where=where,
                               because="this view has no inverse here", hint="use the out-of-place form of this op")
        value = inverse(emit, parent, value, view)
    storage.root = value
    storage.version += 1
    cell.value, cell.version = (new if cell.chain else value), storage.version


def _arg(view: ViewStep, index: int, name: str, default: Arg) -> Arg:
    return view.rest[index] if index < len(view.rest) else dict(view.kwargs).get(name, default)


def _reshape(emit: Emit, parent: Value, value: Value, _view: ViewStep) -> Value:
    return emit(aten.reshape_as.default, value, parent)


def _transpose(emit: Emit, _parent: Value, value: Value, view: ViewStep) -> Value:
    return emit(view.op, value, *view.rest)


def _permute(emit: Emit, _parent: Value, value: Value, view: ViewStep) -> Value:
    dims = [int(d) for d in view.rest[0]]  # type: ignore[union-attr, arg-type]
    dims = [d % len(dims) for d in dims]
    return emit(aten.permute.default, value, tuple(dims.index(i) for i in range(len(dims))))


def _same(_emit: Emit, _parent: Value, value: Value, _view: ViewStep) -> Value:
    return value


def _select(emit: Emit, parent: Value, value: Value, view: ViewStep) -> Value:
    return emit(aten.select_scatter.default, parent, value, *view.rest)


def _slice(emit: Emit, parent: Value, value: Value, view: ViewStep) -> Value:
    return emit(aten.slice_scatter.default, parent, value, *view.rest)


def _diagonal(emit: Emit, parent: Value, value: Value, view: ViewStep) -> Value:
    return emit(aten.diagonal_scatter.default, parent, value, *view.rest)


def _unbind(emit: Emit, parent: Value, value: Value, view: ViewStep) -> Value:
    return emit(aten.select_scatter.default, parent, value, _arg(view, 0, "dim", 0), view.index)


def _split(emit: Emit, parent: Value, value: Value, view: ViewStep) -> Value:
    size, dim = view.rest[0], _arg(view, 1, "dim", 0)
    assert view.index is not None
    if isinstance(size, tuple):
        if not all(isinstance(s, int) for s in size):
            raise CaptureError("an in-place op writes through a split of symbolic sizes")
        start = sum(size[: view.index])  # type: ignore[arg-type]
        stop = start + size[view.index]  # type: ignore[operator]
    elif isinstance(size, int):
        start, stop = size * view.index, size * (view.index + 1)
    else:
        raise CaptureError("an in-place op writes through a split of symbolic size")
    return emit(aten.slice_scatter.default, parent, value, dim, start, stop)


def _chunk(emit: Emit, parent: Value, value: Value, view: ViewStep) -> Value:
    chunks, dim = view.rest[0], _arg(view, 1, "dim", 0)
    size = parent.type.shape[dim] if isinstance(parent.type, TensorType) and isinstance(dim, int) else None
    if not (isinstance(size, int) and isinstance(chunks, int) and view.index is not None):
        raise CaptureError("an in-place op writes through a chunk of symbolic size")
    each = -(-size // chunks)
    return emit(aten.slice_scatter.default, parent, value, dim, each * view.index, each * (view.index + 1))


def _narrow(emit: Emit, parent: Value, value: Value, view: ViewStep) -> Value:
    dim, start, length = view.rest
    if not (isinstance(start, int) and isinstance(length, int) and start >= 0):
        raise CaptureError("an in-place op writes through a part whose place is not known")
    return emit(aten.slice_scatter.default, parent, value, dim, start, start + length)


_INVERSE: dict[Any, Callable[[Emit, Value, Value, ViewStep], Value]] = {
    aten.view: _reshape, aten.reshape: _reshape, aten._unsafe_view: _reshape, aten.flatten: _reshape,
    aten.unflatten: _reshape, aten.squeeze: _reshape, aten.unsqueeze: _reshape, aten.view_as: _reshape,
    aten.ravel: _reshape,
    aten.transpose: _transpose, aten.t: _transpose, aten.permute: _permute,
    aten.detach: _same, aten.alias: _same, aten.contiguous: _same, aten.to: _same,
    aten.select: _select, aten.slice: _slice, aten.diagonal: _diagonal,
    aten.unbind: _unbind, aten.split: _split, aten.split_with_sizes: _split,
    aten.chunk: _chunk, aten.narrow: _narrow,
}

_MAYBE = {aten.reshape, aten.flatten, aten.unflatten, aten.ravel}


_ITSELF = _MAYBE | {aten.contiguous, aten.to, aten.type_as}


def may_be_itself(op: Any) -> bool:
    """Whether the result of an op may be the very tensor it was given, so that changing one's shape changes the other's."""
    return op.overloadpacket in _ITSELF


def aliases(op: Any, source: torch.Tensor, result: torch.Tensor) -> bool | None:
    """Whether the result of an op that may alias its first input does; None when it cannot be told."""
    packet = op.overloadpacket
    if packet in (aten.to, aten.type_as):
        return source.dtype == result.dtype and source.device == result.device and source.stride() == result.stride()
    if packet is aten.contiguous:
        return source.is_contiguous()
    if packet in _MAYBE:
        return True if source.is_contiguous() else None
    return True


def composed(op: Any) -> Callable[..., Value] | None:
    """What computes with other ops what an in-place op leaves in its first argument, given the same arguments; None where an op
    that writes nothing does."""
    return _COMPOSED.get(op.overloadpacket)


def _fill_diagonal(emit: Emit, x: Value, fill_value: Arg, wrap: Arg = False) -> Value:  # noqa: FBT002  (the operator's own)
    if wrap or not isinstance(x.type, TensorType) or len(x.type.shape) != 2:
        raise CaptureError("fill_diagonal_ of more than a matrix's one diagonal", hint="use diagonal_scatter")
    return emit(aten.diagonal_scatter.default, x, emit(aten.fill.Scalar, emit(aten.diagonal.default, x), fill_value))


_COMPOSED: dict[Any, Callable[..., Value]] = {aten.fill_diagonal_: _fill_diagonal}


def pure_variant(op: Any, where: str) -> tuple[Any, str]:
    """The op that computes what another writes, and the name of the argument that it writes.

        aten.add_.Tensor -> aten.add.Tensor, self         aten.__iand__.Tensor (Python's `&=`) -> aten.__and__.Tensor, self
        aten.pow_.Scalar -> aten.pow.Tensor_Scalar, self  aten.mul.out -> aten.mul.Tensor, out

    Overloads are found by what they take: those of the same name may take something else.
    """
    arguments = op._schema.arguments
    written = [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    if len(written) == 1:
        in_place = written[0] == arguments[0].name
        found = _overload(op, in_place=in_place, without=() if in_place else written)
        if found is not None:
            return found, written[0]
    raise CaptureError(f"{op} writes memory and has no pure form here", where=where,
                       hint="use the out-of-place form of this op")


def view_variant(op: Any, where: str) -> Any:
    """The view of an op that changes the shape of a tensor in place: `aten.unsqueeze_.default` -> `aten.unsqueeze.default`."""
    found = _overload(op, in_place=True)
    if found is None or found.overloadpacket not in _INVERSE:
        raise CaptureError(f"{op} changes the shape of a tensor in place", where=where,
                           hint="use the out-of-place form of this op")
    return found


def _overload(op: Any, *, in_place: bool, without: Sequence[str] = ()) -> Any:
    """The overload that writes nothing and takes what `op` takes, or else has its name; None where there is none."""
    name = op.overloadpacket.__name__
    if in_place:
        name = name.replace("__i", "__", 1) if name.startswith("__i") else name[:-1] if name.endswith("_") else ""
    packet = getattr(getattr(torch.ops, op.namespace), name, None) if name else None
    if packet is None:
        return None
    taken = [(a.name, str(a.type)) for a in op._schema.arguments if a.name not in without]
    pure = [f for f in (getattr(packet, n) for n in packet.overloads()) if not f._schema.is_mutable and f._schema.returns]
    same = [f for f in pure if [(a.name, str(a.type)) for a in f._schema.arguments] == taken]
    named = [f for f in pure if in_place and f._overloadname == op._overloadname and str(f._schema.arguments[0].type) == "Tensor"]
    return next(iter((*same, *named)), None)
