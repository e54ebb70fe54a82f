"""Means and sums of images whose channels lie innermost, over all of their pixels: blocks of pixels, then the blocks.

    for block of 64 pixels (parallel)             part[block] = the sum of its pixels, as wide as some pixels are in memory
    y = sum of part over blocks and pixels        (and of the few pixels that fill no such width)

Channel by channel (an ordinary group) the lanes are results of their own, and nobody shares the pixels: one thread goes through
the image once for every strip of channels, each addition waiting for the one before. Here threads share the pixels, an image is
read once from its beginning to its end, and few channels (24, say) make whole vectors because neighbouring pixels follow each
other. The sum of a block is short, so the result is also closer to the exact one.
"""

from __future__ import annotations

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.dims import Dim, expr
from hotfuse.ir.graph import Graph, Node, Value, output_values
from hotfuse.ir.types import DType, Layout, TensorType
from hotfuse.lower.common.algebra import product
from hotfuse.lower.common.lowered import KernelBuffers, Lowered, tensor_type
from hotfuse.lower.cpu.tiling import Core
from hotfuse.lower.ops.views import shape_of
from hotfuse.ops.schema import argument
from hotfuse.ops.table import packet
from hotfuse.tile.build import KernelBuilder
from hotfuse.tile.program import Tile

OPS = frozenset({"aten.mean", "aten.sum"})
BLOCK_PIXELS = 64
"""What a thread takes at once: parts are one 64th of the image."""
MAX_VECTORS = 12
"""Sums side by side, so that none waits for the one before; twice as many would leave no registers to load into."""
MIN_VECTORS = 3
"""Fewer would wait for each other most of the time."""


@dataclass(frozen=True, slots=True)
class PoolTiling:
    """How pixels are put together."""

    pixels: int
    """Neighbours that are summed side by side: a power of two, so that blocks hold whole numbers of them."""
    vectors: int
    """Of their width, how many are in hand at a time."""


def cut(channels: int, lanes: int) -> PoolTiling | None:
    """The fewest pixels that fill whole vectors, enough of them at a time; None where no few pixels do."""
    tilings: list[PoolTiling] = []
    for pixels in (1, 2, 4, 8, 16):
        vectors, rest = divmod(pixels * channels, lanes)
        if vectors and not rest:
            tilings.append(PoolTiling(pixels, max(n for n in range(1, MAX_VECTORS + 1) if vectors % n == 0)))
    enough = [w for w in tilings if w.vectors >= MAX_VECTORS // 2] or sorted(tilings, key=lambda w: -w.vectors)
    return enough[0] if enough and enough[0].vectors >= MIN_VECTORS else None


def is_average(graph: Graph, core: Core) -> bool:
    """Whether a group is one mean or sum of fp32 images over all dims but the first two, channels innermost and known."""
    if len(graph.nodes) != 1 or packet(graph.nodes[0].op) not in OPS:
        return False
    (node,) = graph.nodes
    x, y = argument(node, "self"), node.outs[0]
    if not isinstance(x, Value) or not isinstance(x.type, TensorType) or output_values(graph) != (y,):
        return False
    rank, types = len(x.type.shape), (tensor_type(x), tensor_type(y))
    last = Layout((0, *range(2, rank), 1))
    if rank < 3 or any(t.dtype is not DType.F32 for t in types) or x.type.layout != last or types[1].layout.strided:
        return False
    channels, dims = x.type.shape[1], argument(node, "dim")
    if not isinstance(channels, int) or not isinstance(dims, tuple):
        return False
    found = [d % rank for d in dims if isinstance(d, int)]
    return sorted(found) == list(range(2, rank)) and cut(channels, core.lanes) is not None


def lower_average(graph: Graph, core: Core, *, name: str = "mean") -> Lowered:
    """The kernel of a group that `is_average`."""
    (node,) = graph.nodes
    builder = KernelBuilder(name, node.loc)
    memory = KernelBuffers(builder, graph)
    _Average(builder, memory, node, core).write()
    return memory.finish(builder.finish())


class _Average:
    """One kernel while it is written."""

    def __init__(self, b: KernelBuilder, memory: KernelBuffers, node: Node, core: Core) -> None:
        (x,), (y,) = node.ins, node.outs
        images, channels, *inner = shape_of(x)
        assert isinstance(channels, int)
        found = cut(channels, core.lanes)
        assert found is not None
        self.b, self.lanes, self.mean = b, core.lanes, packet(node.op) == "aten.mean"
        self.images, self.channels, self.pixels = images, channels, product(tuple(inner))
        self.together, self.step = found.pixels, found.vectors * core.lanes
        self.width = found.pixels * channels
        self.x, self.y = memory.place(x).buffer, memory.output(y).buffer
        self.blocks = expr("ceildiv", self.pixels, BLOCK_PIXELS)
        self.groups = expr("//", self.pixels, self.together)
        """Of pixels side by side; those behind the last are added at the end."""
        self.part = b.shared("part", DType.F32, (expr("*", images, self.blocks), self.width))

    def write(self) -> None:
        """Blocks of pixels, which threads share, and what they come to."""
        b = self.b
        with b.parallel("block", expr("*", self.images, self.blocks)) as block:
            image, at = expr("//", block.var, self.blocks), expr("%", block.var, self.blocks)
            each = BLOCK_PIXELS // self.together
            first = expr("*", at, each)
            last = expr("min", self.groups, expr("+", first, each))
            with b.loop("c", 0, self.width, self.step) as c:
                with b.loop("g", first, last, carry=[b.fill(0.0, DType.F32, (self.step,))]) as g:
                    at_group = self._pixel(image, expr("*", g.var, self.together))
                    read = b.load(self.x, (expr("+", at_group, c.var),), (self.step,))
                    g.yields(b.map("add", read, g.carried[0]))
                b.store(self.part, (block.var, c.var), g.outs[0])
        whole = self.channels // self.lanes * self.lanes
        with b.parallel("image", self.images) as image:
            if whole:
                with b.loop("c", 0, whole, self.lanes) as c:
                    self._finished(image.var, c.var, None)
            if self.channels > whole:
                self._finished(image.var, whole, self.channels - whole)

    def _finished(self, image: Dim, c: Dim, valid: int | None) -> None:
        """Some channels of an image's result."""
        b = self.b
        begin = expr("*", image, self.blocks)
        zero = b.fill(0.0, DType.F32, (self.lanes,))
        with b.loop("part", begin, expr("+", begin, self.blocks), carry=[zero]) as part:
            total = part.carried[0]
            for n in range(self.together):
                at = (part.var, expr("+", c, n * self.channels))
                total = b.map("add", b.load(self.part, at, (self.lanes,), valid=(valid,)), total)
            part.yields(total)
        (total,) = part.outs
        if self.together > 1:
            with b.loop("p", expr("*", self.groups, self.together), self.pixels, carry=[total]) as p:
                at = (expr("+", self._pixel(image, p.var), c),)
                p.yields(b.map("add", b.load(self.x, at, (self.lanes,), valid=(valid,)), p.carried[0]))
            (total,) = p.outs
        if self.mean:
            total = b.map("div", total, self._count())
        b.store(self.y, (expr("+", expr("*", image, self.channels), c),), total, valid=(valid,))

    def _count(self) -> Tile:
        return self.b.cast(self.b.index(self.pixels), DType.F32)

    def _pixel(self, image: Dim, pixel: Dim) -> Dim:
        """Where a pixel begins."""
        return expr("*", expr("+", expr("*", image, self.pixels), pixel), self.channels)
