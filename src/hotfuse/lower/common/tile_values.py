"""Any value of a group at any position, as a tile: the core of fusion.

    space = Space.of((M, N))                                   the loops' own shape
    at = Evaluator(memory, graph, space)
    with at.loops({0: m.var, 1: n.var}, axes=(TileAxis(0, 9), TileAxis(1, 48, valid=...))):
        at.give(linear_out, (space.root(0), space.root(1)), accumulator)
        at.store(out, position, at.tile(out, position))

Loads, views and pointwise ops are followed backwards from the value that is wanted; what has been computed at a position is not
computed again as long as the loops around it last. A reduction's result must have been given: the code that writes the loops
decides when it is computed. Tiles have one axis for every tiled counter; extents along which a value does not change are 1, and
leading ones are left out, so that tiles broadcast against each other.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.dims import Dim, dims_in, expr
from hotfuse.ir.graph import Graph, Value
from hotfuse.ir.types import DType
from hotfuse.lower.common.algebra import add, mul, not_negative, sub
from hotfuse.lower.common.errors import CannotLower
from hotfuse.lower.common.lowered import BufferView, KernelBuffers, tensor_type
from hotfuse.lower.common.positions import Coord, Position, Space
from hotfuse.lower.common.steps import Apply, Definitions, Fold, Key, Load, choose
from hotfuse.lower.ops import expand
from hotfuse.lower.ops.views import Alias, MaskedElement, Pick, Picked, Pieces
from hotfuse.tile.build import KernelBuilder
from hotfuse.tile.program import Tile


@dataclass(frozen=True, slots=True)
class TileAxis:
    """A tile axis: the counter it walks, how many elements at once, and how many of these exist (None: all)."""

    counter: int
    extent: int
    valid: Dim | None = None


@dataclass(slots=True)
class _ValueScope:
    axes: tuple[int, ...] = ()
    """The counters that tiles made here have axes for."""
    tiles: dict[Key, Tile] = field(default_factory=dict[Key, Tile])
    kept: dict[Key, tuple[BufferView, Position]] = field(default_factory=dict[Key, tuple[BufferView, Position]])


class Evaluator:
    """Writes the instructions that compute values at positions."""

    def __init__(
        self, memory: KernelBuffers, graph: Graph, space: Space, merged: Mapping[int, int] | None = None,
        definitions: Definitions | None = None,
    ) -> None:  # fmt: skip
        self.memory = memory
        self.builder: KernelBuilder = memory.builder
        self.space = space
        self.definitions = definitions or Definitions(graph)
        self.merged = merged or {}
        """Counters that have no loop of their own, with the one whose loop runs over both."""
        self.at: dict[int, Dim] = {}
        self.running: dict[int, int] = {}
        self.axes: tuple[TileAxis, ...] = ()
        self._scopes: list[_ValueScope] = [_ValueScope()]

    @property
    def graph(self) -> Graph:
        """The group whose values are computed."""
        return self.definitions.graph

    @contextmanager
    def loops(
        self, at: Mapping[int, Dim], axes: Sequence[TileAxis] | None = None, segments: Mapping[int, int] | None = None
    ) -> Generator[None]:
        """Inside the loops of some more counters; tiles computed here are forgotten at the end."""
        before = (self.at, self.axes, self.running)
        self.at = {**self.at, **at}
        self.running = {**self.running, **(segments or {})}
        if axes is not None:
            self.axes = tuple(axes)
        self._scopes.append(_ValueScope(tuple(a.counter for a in self.axes)))
        yield
        self._scopes.pop()
        self.at, self.axes, self.running = before

    def give(self, value: Value, position: Position, tile: Tile) -> None:
        """Declare what a value is at a position."""
        self._scopes[-1].tiles[value.name, position] = tile

    def keep(self, value: Value, position: Position, place: BufferView, at: Position) -> None:
        """Declare that a value's element has been stored, to be loaded instead of computed again."""
        self._scopes[-1].kept[value.name, position] = (place, at)

    def known(self, value: Value, position: Position) -> Tile | None:
        """The tile, if it has been computed."""
        return self.known_key((value.name, position))

    def known_key(self, key: Key) -> Tile | None:
        """Like `known`, by key."""
        axes = tuple(a.counter for a in self.axes)
        for scope in reversed(self._scopes):
            if key in scope.tiles and (scope.axes == axes or not scope.tiles[key].type.shape):
                return scope.tiles[key]
        return None

    def stored(self, key: Key) -> bool:
        """Whether it would be loaded, having been kept."""
        return any(key in s.kept for s in self._scopes)

    # -- computing

    def tile(self, value: Value, position: Position) -> Tile:
        """The value's elements at a position."""
        found = self.known(value, position)
        if found is None:
            found = self._compute(value, position)
            self._scopes[-1].tiles[value.name, position] = found
        return found

    def _compute(self, value: Value, position: Position) -> Tile:
        key = (value.name, position)
        for scope in reversed(self._scopes):
            if key in scope.kept:
                return self.load(*scope.kept[key])
        step = self.definitions.step(value, position, self.space)
        match step:
            case Load(source, where):
                return self.load(self.memory.place(source), where)
            case Alias(other, where):
                return self.tile(other, where)
            case Pieces():
                content = choose(step, self.space, self.running)
                if content is None:
                    raise CannotLower("a piece depends on a loop that is not running")
                if isinstance(content, Alias):
                    return self.tile(content.value, content.position)
                return expand.literal(self.builder, content, tensor_type(value).dtype)
            case MaskedElement(along, extent, content, number):
                x = self.tile(content.value, content.position)
                outside = expand.literal(self.builder, number, x.type.dtype)
                return self.builder.map("select", self.inside(along, extent), x, outside)
            case Picked():
                return self.picked(step)
            case Fold(node):
                raise CannotLower(f"{node.op} is not available where it is wanted")
            case Apply(node, operands):
                tiles = {o.value.name: self.tile(o.value, o.position) for o in operands}
                self.builder.loc = node.loc
                out = self.definitions.nodes[value.name][1]
                return expand.expand(node, out, tiles, self, position)

    def number(self, d: Dim) -> Dim:
        """An expression over counters as one over loop variables."""
        if isinstance(d, int):
            return d
        if d.op == "sym":
            name = str(d.args[0])
            if not name.startswith("%"):
                return d
            counter = int(name[1:])
            if counter in self.merged.values() or counter in self.merged:
                raise CannotLower("the position matters along a loop that runs over several dims")
            if any(a.counter == counter for a in self.axes):
                raise CannotLower("an index is not a sum along the dim that is worked on in vectors")
            return self.at[counter]
        return expr(d.op, *(self.number(a) for a in dims_in(d)))

    def index_tile(self, c: Coord) -> Tile:
        """A place along a dim as 64-bit integers."""
        base, steps = self._base(c.offset, dict(c.terms))
        for k, _ in c.terms:
            if k in self.merged or k in self.merged.values():
                raise CannotLower("the position matters along a loop that runs over several dims")
        b = self.builder
        result: Tile | None = None
        rank = len(self.axes)
        for a, (along, step) in enumerate(zip(self.axes, steps, strict=True)):
            if step == 0 or along.extent == 1:
                continue
            shape = _trimmed([along.extent if i == a else 1 for i in range(rank)])
            one = b.iota(base if result is None and step == 1 else 0, shape, len(shape) - (rank - a))
            if step != 1:
                one = b.map("mul", one, b.index(step))
            if result is None and step != 1 and base != 0:
                one = b.map("add", one, b.index(base))
            result = one if result is None else b.map("add", result, one)
        return b.index(base) if result is None else result

    def _base(self, offset: Dim, terms: Mapping[int, Dim]) -> tuple[Dim, tuple[Dim, ...]]:
        """Where the tile's first element lies along a dim, and the step along each tile axis."""
        at = self.number(offset)
        for k, f in terms.items():
            if k in self.at:
                at = add(at, mul(self.at[k], f))
            elif k not in self.merged:
                raise CannotLower("a value is wanted outside the loop that it depends on")
        return at, tuple(terms.get(a.counter, 0) for a in self.axes)

    def inside(self, c: Coord, extent: Dim) -> Tile:
        """Whether a place along a dim exists."""
        b = self.builder
        base, steps = self._base(c.offset, dict(c.terms))
        if all(step == 0 for step in steps):
            fits = expr("and", expr("<=", 0, base), expr("<", base, self.number(extent)))
            return b.map("ne", b.index(fits), 0)
        at = self.index_tile(c)
        return b.map("and", b.map("ge", at, 0), b.map("lt", at, b.index(self.number(extent))))

    # -- places that are data

    def pick(self, p: Pick) -> Tile:
        """Where an index tensor points, limited to what exists; anything else is a fault of the call."""
        key = (f"{p.index.value.name} picks {p.extent}{' or wraps' if p.wraps else ''}", p.index.position)
        found = self.known_key(key)
        if found is not None:
            return found
        b = self.builder
        at = b.cast(self.tile(p.index.value, p.index.position), DType.I64)
        if not p.trusted:
            if p.wraps:
                extent = b.index(self.number(p.extent))
                at = b.map("select", b.map("lt", at, 0), b.map("add", at, extent), at)
            at = self.checked(at, self.number(p.extent))
        self._scopes[-1].tiles[key] = at
        return at

    def checked(self, at: Tile, extent: Dim) -> Tile:
        """Indexes limited to what exists; one outside is a fault of the call."""
        b = self.builder
        fits = b.map("lt", b.bitcast(at, DType.U64), b.bitcast(b.index(extent), DType.U64))
        self.require(fits)
        return b.map("select", fits, at, 0)

    def require(self, holds: Tile) -> None:
        """What must be true of every element that exists; anything else is a fault of the call."""
        missing = self._missing(holds.type.shape)
        self.builder.effect("require", holds if missing is None else self.builder.map("or", holds, missing))

    def _missing(self, shape: Sequence[int]) -> Tile | None:
        """Where a tile's elements do not exist; None where all of them do."""
        b, rank, found = self.builder, len(self.axes), None
        for a, along in enumerate(self.axes):
            at = len(shape) - (rank - a)
            if along.valid is not None and at >= 0 and shape[at] != 1:
                one = b.map("ge", b.iota(0, [along.extent if i == at else 1 for i in range(at, len(shape))], 0),
                            b.index(along.valid))  # fmt: skip
                found = one if found is None else b.map("or", found, one)
        return found

    def picked(self, step: Picked) -> Tile:
        """Elements whose place along some dims is data."""
        b, place = self.builder, self.memory.place(step.value)
        index, axes, steps = self._access(place, step.position)
        total: Tile | None = None
        along = 0
        for p in step.picks:
            along = 0 if place.flat else p.dim
            at = self.pick(p)
            if place.flat and place.strides[p.dim] != 1:
                at = b.map("mul", at, b.index(place.strides[p.dim]))
            total = at if total is None else b.map("add", total, at)
        if total is None or (len(step.picks) > 1 and not place.flat):
            raise CannotLower("several indexes into a strided tensor")
        own = (1,) * (len(axes) - len(total.type.shape)) + total.type.shape
        shape = _trimmed([a.extent if d >= 0 or n != 1 else 1 for a, d, n in zip(self.axes, axes, own, strict=True)])
        unknown = [p.extent for p in step.picks if not not_negative(sub(p.extent, 1), self.space.positive)]
        if unknown and not shape:
            shape = (1,) * min(1, len(axes))
        skip = len(axes) - len(shape)
        if len(total.type.shape) > len(shape):  # an axis of one element, along which nothing else goes
            total = b.reshape(total, total.type.shape[len(total.type.shape) - len(shape):])
        valid = [a.valid if d >= 0 or n != 1 else None for a, d, n in zip(self.axes, axes, own, strict=True)][skip:]
        if unknown and not shape:
            raise CannotLower(f"whether an indexed dim of {unknown[0]} has any element is not known")
        if unknown:  # nothing is read from a tensor without elements
            valid[-1] = expr("min", shape[-1] if valid[-1] is None else valid[-1], mul(shape[-1], *unknown))
        return b.gather(place.buffer, index, total, shape, dim=along, axes=axes[skip:], step=steps[skip:], valid=valid)

    # -- memory

    def load(self, place: BufferView, position: Position) -> Tile:
        """A tile from memory; one whose fast axis is not the last is loaded turned, then turned back."""
        index, axes, steps = self._access(place, position)
        vary = [i for i, d in enumerate(axes) if d >= 0]
        shape = _trimmed([along.extent if i in vary else 1 for i, along in enumerate(self.axes)])
        skip = len(self.axes) - len(shape)
        axes, steps, valid = axes[skip:], steps[skip:], self._valid(axes)[skip:]
        b = self.builder
        if len(shape) == 2 and self._turned(place, axes, steps):
            tile = b.load(place.buffer, index, shape[::-1], axes=axes[::-1], step=steps[::-1], valid=valid[::-1])
            return b.transpose(tile, (1, 0))
        return b.load(place.buffer, index, shape, axes=axes, step=steps, valid=valid)

    def store(self, value: Value, position: Position, tile: Tile, place: BufferView | None = None) -> None:
        """A tile to an output's memory."""
        place = place or self.memory.output(value)
        index, axes, steps = self._access(place, position)
        if -1 in axes:
            raise CannotLower(f"several elements would be stored in one of %{value.name}")
        b = self.builder
        tile = b.bcast(tile, [a.extent for a in self.axes])
        valid = self._valid(axes)
        if len(axes) == 2 and self._turned(place, axes, steps):
            turned = b.transpose(tile, (1, 0))
            b.store(place.buffer, index, turned, axes=axes[::-1], step=steps[::-1], valid=valid[::-1])
        else:
            b.store(place.buffer, index, tile, axes=axes, step=steps, valid=valid)

    def _valid(self, axes: Sequence[int]) -> list[Dim | None]:
        valid = [a.valid if d >= 0 else None for a, d in zip(self.axes, axes, strict=True)]
        return valid if any(v is not None for v in valid) else [None] * len(valid)

    @staticmethod
    def _turned(place: BufferView, axes: Sequence[int], steps: Sequence[Dim]) -> bool:
        walk = [0 if d < 0 else mul(s, place.buffer.stride[d]) for d, s in zip(axes, steps, strict=True)]
        return walk[0] in (1, -1) and walk[1] not in (0, 1, -1)

    def _access(self, place: BufferView, position: Position) -> tuple[list[Dim], list[int], list[Dim]]:
        """Index, and per tile axis the buffer dim (-1: none) and the step along it."""
        if place.flat:
            offset: Dim = add(*(mul(c.offset, s) for c, s in zip(position, place.strides, strict=True)))
            terms: dict[int, Dim] = {}
            for c, s in zip(position, place.strides, strict=True):
                for k, f in c.terms:
                    terms[k] = add(terms.get(k, 0), mul(f, s))
            base, steps = self._base(offset, terms)
            return [base], [0 if s != 0 else -1 for s in steps], [s if s != 0 else 1 for s in steps]
        index: list[Dim] = []
        axes, walk = [-1] * len(self.axes), list[Dim]([1] * len(self.axes))
        for d, c in enumerate(position):
            base, steps = self._base(c.offset, dict(c.terms))
            index.append(base)
            for a, s in enumerate(steps):
                if s != 0 and axes[a] >= 0:
                    raise CannotLower("a tile would run along two dims of a strided tensor at once")
                if s != 0:
                    axes[a], walk[a] = d, s
        return index, axes, walk


def _trimmed(shape: list[int]) -> tuple[int, ...]:
    """Without leading extents of 1; an axis of extent 1 that is walked stays only for its place."""
    skip = 0
    while skip < len(shape) and shape[skip] == 1:
        skip += 1
    return tuple(shape[skip:])
