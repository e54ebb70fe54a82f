"""A recurrent layer's whole sequence as a tile program.

    for block of batch rows
      for layer, direction
        state = initial state
        for chunk of time steps                 what a chunk needs stays in the second-level cache
          gx = x @ Wi + biases                  all steps of the chunk at once; a step's rows must lie behind those of the step
                                                before: else the chunk's inputs are copied first
          for step                              forwards or backwards
            for panel                           the same units of every gate side by side
              for tile of rows                  few enough that their gates fit the registers
                sums = h @ Wh
                c, h' = gates(gx + sums, c, h)  in registers; h' is a second buffer, as later panels still read h

A step takes the panels in the opposite order of the step before: what a cache kept of them is then still there, where one order for
all steps would push out every panel just before its turn. Where threads share the panels, code generation sees to it (`team`).

Threads share the blocks, where there are several and a core's cache has room for all weights: blocks never meet. Otherwise a
block has many rows, or all, and threads share the panels of every product: then each core reads its part of the weights
only, which stays in its cache, and threads meet once per step. Weights are packed by panels whose columns belong to
`lanes` units of every gate; columns beyond the hidden size are zero and so are their states.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator

from hotfuse.ir.dims import Dim, expr
from hotfuse.ir.types import DType
from hotfuse.lower.cpu.gemm.gemm import Product, let, sums
from hotfuse.lower.cpu.recurrent import cell as recurrent_cell
from hotfuse.lower.cpu.recurrent.recurrent_job import Recurrent, Weights, read, tiling, write
from hotfuse.lower.cpu.tiling import Core, balance
from hotfuse.tile.build import KernelBuilder, remaining
from hotfuse.tile.program import Buffer, Tile

MAX_CHUNK = 48
"""Most time steps of a chunk: by then the input's weights are read seldom enough."""
BLOCK_ROWS = 6
"""Most rows of a block that one thread takes from end to end: few, so that there are blocks for several threads."""
SHARED_ROWS = 48
"""Most rows of a block that threads share: more would only take memory."""
STEP_WORK = 1 << 13
"""Fewest multiply-adds of vectors in a step that threads share: a microsecond of each of two. Less is little gained, and much lost
where a thread has to be waited for at every step."""
WIDE = 4
"""How many times wider than the state inputs must be for threads to share their products where they do not share the steps: else a
second thread would wait through all steps for a small part of the whole.
"""
USUAL_ROWS = 8
"""What a batch of unknown size is taken for where only speed depends on it."""


def recur(b: KernelBuilder, job: Recurrent, core: Core) -> None:
    """Write the program."""
    _RecurrentWriter(b, job, core).write()


def _up(n: int, to: int) -> int:
    return -(-n // to) * to


class _RecurrentWriter:
    def __init__(self, b: KernelBuilder, job: Recurrent, core: Core) -> None:
        self.b, self.job, self.tiling = b, job, tiling(core, job.cell)
        t, f32 = self.tiling, DType.F32
        self.panels = -(-job.hidden // t.lanes)
        self.by_panel = self._by_panel(core)
        """Whether threads share panels, not blocks of rows."""
        self.shares_steps = self.by_panel and not self._short()
        """Whether they share those of every step as well: some are over before a second thread had begun."""
        self.limit = SHARED_ROWS if self.by_panel else min(BLOCK_ROWS, t.mr)
        self.rows: Dim = (
            expr("min", self.limit, job.batch) if self.by_panel or isinstance(job.batch, int) else self.limit
        )
        """Most rows of a block."""
        self.heights = self._heights()
        self.chunk = self._chunk(core)
        taken = job.steps if isinstance(job.steps, int) and job.steps < self.chunk else self.chunk
        self.row_step = self._row_step()
        """How far apart rows of inputs lie where those of all steps can be read in place, else 0."""
        most = expr("max", 1, expr("*", taken, self.rows))
        memory = b.shared if self.by_panel else b.scratch
        self.xs = None if self.row_step else memory("xs", f32, (most, _up(job.weights[0].inputs, t.lanes)))
        self.gx = memory("gx", f32, (most, self.panels * t.nr))
        units = self.panels * t.lanes
        self.h = memory("h", f32, (2, self.rows, units))
        self.c = memory("c", f32, (self.rows, units)) if job.cell == "lstm" else None
        self.sums = b.scratch("sums", f32, (max(self.heights), t.nr)) if len(self.heights) > 1 else None
        between = len(job.weights) // job.directions - 1
        shape = (expr("*", job.steps, self.rows), job.directions * job.hidden)
        self.ys = [memory("ys", f32, shape) for _ in range(min(between, 2))]
        """What layers hand on, in turns."""
        self.row: Dim = 0
        self.height: Dim = self.rows

    def _by_panel(self, core: Core) -> bool:
        """Whether there is one block at most, or a step's weights are more than a core keeps beside everything else."""
        few = isinstance(self.job.batch, int) and self.job.batch <= min(BLOCK_ROWS, self.tiling.mr)
        return few or 4 * self.panels * self.tiling.nr * self.job.hidden > core.l2 // 2

    def _short(self) -> bool:
        """Whether a step's products are less than what a thread is woken for."""
        return (
            isinstance(self.job.batch, int)
            and self.job.batch * self.panels * self.tiling.vectors * self.job.hidden < STEP_WORK
        )

    def _heights(self) -> tuple[int, ...]:
        """How high the register tiles of a step may be."""
        tallest = self.tiling.mr if self.by_panel else self.limit
        if not isinstance(self.job.batch, int) or (self.by_panel and self.job.batch > self.limit):
            return tuple(range(tallest, 0, -1))
        blocks = balance(self.job.batch, tallest)
        return (blocks.rows + 1, blocks.rows) if blocks.extra else (blocks.rows,)

    def _row_step(self) -> int:
        """What lies between rows of inputs, if between all of them lies the same: one block, rows in the order of steps."""
        job, x = self.job, self.job.x
        if not x.flat or not isinstance(job.batch, int) or not 1 <= job.batch <= self.limit:
            return 0
        time, row = x.strides[:2] if not job.batch_first else x.strides[1::-1]
        step = time if job.batch == 1 else row
        dense = isinstance(step, int) and x.strides[2] == 1 and time == job.batch * step
        return step if dense and isinstance(step, int) else 0

    def _chunk(self, core: Core) -> int:
        """Steps of a chunk: a quarter of the second-level cache for their gates, and whole register tiles of rows."""
        t = self.tiling
        rows = max(1, self.rows) if isinstance(self.rows, int) else USUAL_ROWS
        tiles = core.l2 // 4 // (4 * t.mr * rows * self.panels * t.nr)
        return min(MAX_CHUNK, t.mr * max(2, tiles))

    def write(self) -> None:
        """The blocks of rows."""
        with self.balanced("block", self.job.batch, self.limit, parallel=not self.by_panel) as (self.row, self.height):
            self.block()

    @contextlib.contextmanager
    def balanced(self, name: str, total: Dim, limit: int, *, parallel: bool) -> Generator[tuple[Dim, Dim]]:
        """(first row, number of rows) of blocks of at most so many rows, none more than one row higher than another."""
        b = self.b
        if isinstance(total, int) and total <= limit:
            yield 0, total
            return
        count = expr("ceildiv", total, limit)
        safe = expr("max", 1, count)  # an empty batch has no blocks, and nothing to divide
        with contextlib.ExitStack() as scope:
            rows, extra = (
                scope.enter_context(let(b, n, expr(op, total, safe))) for n, op in (("rows", "//"), ("extra", "%"))
            )
            block = scope.enter_context(b.parallel(name, count) if parallel else b.loop(name, 0, count)).var
            if extra == 0:
                yield expr("*", block, rows), rows
                return
            taller = expr("min", 1, expr("max", 0, expr("+", extra, expr("*", block, -1))))
            first = expr("+", expr("*", block, rows), expr("min", block, extra))
            height = scope.enter_context(let(b, "height", expr("+", rows, taller)))
            yield scope.enter_context(let(b, "row", first)), height

    def block(self) -> None:
        """All layers and directions of a block of rows."""
        job = self.job
        for at in range(len(job.weights)):
            layer, direction = divmod(at, job.directions)
            self.sequence(layer, direction, at)

    def sequence(self, layer: int, direction: int, at: int) -> None:
        """One direction of one layer."""
        b, job, weights = self.b, self.job, self.job.weights[at]
        self.begin(at)
        with self.chunks() as (start, steps):
            earliest = expr("+", job.steps, expr("*", start, -1), expr("*", steps, -1)) if direction else start
            with let(b, "earliest", earliest) as earliest:
                rows = self.inputs(layer, weights.inputs, earliest, steps)
                self.project(weights, rows, steps)
                with b.loop("s", 0, steps) as s:
                    nth = expr("+", steps, -1, expr("*", s.var, -1)) if direction else s.var
                    parity = expr("%", expr("+", start, s.var), 2)
                    with let(b, "nth", nth) as nth, let(b, "time", expr("+", earliest, nth)) as now:
                        self.step(layer, direction, weights, nth, now, parity)
        self.end(at)

    @contextlib.contextmanager
    def chunks(self) -> Generator[tuple[Dim, Dim]]:
        """(first step, number of steps) of each chunk."""
        steps = self.job.steps
        if isinstance(steps, int) and steps <= self.chunk:
            yield 0, steps
            return
        with self.b.loop("start", 0, steps, self.chunk) as start:
            if isinstance(steps, int) and steps % self.chunk == 0:
                yield start.var, self.chunk
                return
            with let(self.b, "taken", expr("min", self.chunk, remaining(steps, start.var))) as taken:
                yield start.var, taken

    # -- states and inputs

    def _units(self, body: Callable[[Dim, Dim, Dim | None], None]) -> None:
        """Every row and vector of units of the block, with how many units there are."""
        b, hidden, lanes = self.b, self.job.hidden, self.tiling.lanes
        with b.loop("r", 0, self.height) as r, b.loop("u", 0, self.panels * lanes, lanes) as u:
            body(r.var, u.var, None if hidden % lanes == 0 else remaining(hidden, u.var))

    def begin(self, at: int) -> None:
        """Bring the initial states in."""
        b, lanes = self.b, self.tiling.lanes

        def one(r: Dim, u: Dim, left: Dim | None) -> None:
            for place, own in zip(self.job.initial, self._own(0), strict=True):
                if place is None:
                    tile = b.fill(0.0, DType.F32, (lanes,))
                else:
                    tile = read(b, place, (at, expr("+", self.row, r), u), (2,), (lanes,), (left,))
                b.store(own[0], (*own[1], r, u), tile)

        self._units(one)

    def end(self, at: int) -> None:
        """Hand the last states out."""
        b, lanes = self.b, self.tiling.lanes
        if not any(self.job.finals):
            return

        def one(r: Dim, u: Dim, left: Dim | None) -> None:
            for place, own in zip(self.job.finals, self._own(expr("%", self.job.steps, 2)), strict=True):
                if place is not None:
                    tile = b.load(own[0], (*own[1], r, u), (lanes,))
                    write(b, place, (at, expr("+", self.row, r), u), (2,), tile, (left,))

        self._units(one)

    def _own(self, parity: Dim) -> list[tuple[Buffer, tuple[Dim, ...]]]:
        """The block's own copies of the states."""
        return [(self.h, (parity,)), *([(self.c, ())] if self.c is not None else [])]

    def _sequence_at(self, time: Dim, row: Dim, element: Dim) -> tuple[Dim, Dim, Dim]:
        return (row, time, element) if self.job.batch_first else (time, row, element)

    def inputs(self, layer: int, inputs: int, earliest: Dim, steps: Dim) -> Callable[[Dim, Dim, int], Tile]:
        """A column of rows of the chunk, rows being counted from its earliest step on: where they are, or from a copy."""
        b, before = self.b, expr("*", earliest, self.height)
        if layer > 0:
            ys = self.ys[(layer - 1) % 2]
            return lambda row, k, rows: b.load(ys, (expr("+", before, row), k), (rows, 1))
        if self.xs is None:
            x, apart = self.job.x.buffer, self.row_step

            def column(row: Dim, k: Dim, rows: int) -> Tile:
                at = expr("+", expr("*", expr("+", before, row), apart), k)
                return b.load(x, (at,), (rows, 1), axes=(0, 0), step=(apart, 1))

            return column
        xs = self.xs
        self.copy(xs, inputs, earliest, steps)
        return lambda row, k, rows: b.load(xs, (row, k), (rows, 1))

    def copy(self, xs: Buffer, inputs: int, earliest: Dim, steps: Dim) -> None:
        """The chunk's inputs, step by step, row by row."""
        b, lanes = self.b, self.tiling.lanes
        with (
            b.loop("s", 0, steps) as s,
            b.loop("r", 0, self.height) as r,
            b.loop("k", 0, inputs, lanes) as k,
        ):
            left = None if inputs % lanes == 0 else remaining(inputs, k.var)
            where = self._sequence_at(expr("+", earliest, s.var), expr("+", self.row, r.var), k.var)
            tile = read(b, self.job.x, where, (2,), (lanes,), (left,))
            b.store(xs, (self._nth(s.var, r.var), k.var), tile)

    def _nth(self, step: Dim, row: Dim) -> Dim:
        """The place of a step's row where all rows of a step lie behind each other."""
        return expr("+", expr("*", step, self.height), row)

    # -- products

    def project(self, weights: Weights, rows: Callable[[Dim, Dim, int], Tile], steps: Dim) -> None:
        """What the inputs give to the gates, for all steps of the chunk."""
        b, t = self.b, self.tiling
        m = expr("*", steps, self.height)
        p = Product(rows, weights.wi, m, weights.inputs, self.panels, t)
        biases = [weights.bi, weights.bh] if self.job.cell == "lstm" else [weights.bi]
        with self.each_panel(shared=self.shares_steps or weights.inputs >= WIDE * self.job.hidden) as panel:
            bias = self._bias(biases, panel)

            def tile(row: Dim, height: int) -> None:
                acc = sums(b, p, height, row, panel)
                total = acc if bias is None else b.map("add", acc, bias)
                b.store(self.gx, (row, expr("*", panel, t.nr)), total)

            self._tiles(m, tile)

    @contextlib.contextmanager
    def each_panel(self, *, shared: bool) -> Generator[Dim]:
        """The panels, shared among threads where threads share panels and it pays, or one after the other."""
        shared = shared and self.by_panel
        with self.b.parallel("panel", self.panels) if shared else self.b.loop("panel", 0, self.panels) as panel:
            yield panel.var

    @contextlib.contextmanager
    def to_and_fro(self, parity: Dim) -> Generator[Dim]:
        """The panels of a step: shared among threads, or else from the first to the last and back in turns."""
        if self.shares_steps:
            with self.each_panel(shared=True) as panel:
                yield panel
            return
        with self.b.loop("panel", 0, self.panels) as panel:
            back = expr("*", parity, expr("+", self.panels - 1, expr("*", panel.var, -2)))
            with let(self.b, "turned", expr("+", panel.var, back)) as turned:
                yield turned

    def _bias(self, buffers: list[Buffer | None], panel: Dim) -> Tile | None:
        tiles = [self.b.load(x, (panel, 0, 0), (1, self.tiling.nr)) for x in buffers if x is not None]
        return self.b.map("add", *tiles) if len(tiles) > 1 else tiles[0] if tiles else None

    def _tiles(self, m: Dim, tile: Callable[[Dim, int], None]) -> None:
        """Cover rows with register tiles: balanced where their number is known, else high ones and then low ones."""
        b, mr = self.b, self.tiling.mr
        if isinstance(m, int):
            blocks = balance(m, mr)
            parts: list[tuple[int, Dim]] = [(blocks.rows, m)] if blocks.rows else []
            if blocks.extra:
                parts.insert(0, (blocks.rows + 1, blocks.extra * (blocks.rows + 1)))
        else:
            parts = []
            done: Dim = 0
            for h in [h for h in (mr, 2) if h <= mr]:
                done = expr("+", done, expr("*", expr("//", remaining(m, done), h), h))
                parts.append((h, done))
            parts.append((1, m))
        begin: Dim = 0
        with contextlib.ExitStack() as scope:
            for height, end in parts:
                end = scope.enter_context(let(b, "end", end))
                with b.loop("row", begin, end, height) as row:
                    tile(row.var, height)
                begin = end

    def step(self, layer: int, direction: int, weights: Weights, nth: Dim, time: Dim, parity: Dim) -> None:
        """One time step of the block, the nth of its chunk."""
        b, t, hidden = self.b, self.tiling, self.job.hidden

        def lhs(row: Dim, k: Dim, rows: int) -> Tile:
            return b.load(self.h, (parity, row, k), (rows, 1))

        p = Product(lhs, weights.wh, self.height, hidden, self.panels, t)
        with self.to_and_fro(parity) as panel, self.register_tiles() as (first, height):
            bias = self._bias([weights.bh], panel) if self.job.cell == "gru" else None

            def finish(tile: Tile, row: Dim) -> None:
                rows = tile.type.shape[0]
                gx = b.load(self.gx, (self._nth(nth, row), expr("*", panel, t.nr)), (rows, t.nr))
                new = self.cell(gx, tile if bias is None else b.map("add", tile, bias), row, panel, parity)
                self.hand_on(layer, direction, time, row, panel, new)

            for h in self.heights:
                with b.when(expr("==", height, h)) if height != h else contextlib.nullcontext():
                    acc = sums(b, p, h, first, panel)
                    if self.sums is None:
                        finish(acc, first)
                    else:
                        b.store(self.sums, (0, 0), acc)
            if self.sums is not None:
                with b.loop("r", 0, height) as r:
                    finish(b.load(self.sums, (r.var, 0), (1, t.nr)), expr("+", first, r.var))

    @contextlib.contextmanager
    def register_tiles(self) -> Generator[tuple[Dim, Dim]]:
        """(first row in the block, number of rows) of what the registers have room for."""
        if not self.by_panel:
            yield 0, self.height
            return
        with self.balanced("tile", self.height, self.tiling.mr, parallel=False) as found:
            yield found

    # -- cells

    def cell(self, gx: Tile, gh: Tile, row: Dim, panel: Dim, parity: Dim) -> Tile:
        """The new h of some rows and a panel's units; states of the block are updated."""
        b, lanes = self.b, self.tiling.lanes
        rows = gx.type.shape[0]
        unit = expr("*", panel, lanes)
        if self.c is not None:
            c, h = recurrent_cell.lstm(b, b.map("add", gx, gh), b.load(self.c, (row, unit), (rows, lanes)))
            b.store(self.c, (row, unit), c)
        else:
            h = recurrent_cell.gru(b, gx, gh, b.load(self.h, (parity, row, unit), (rows, lanes)))
        b.store(self.h, (expr("+", 1, expr("*", parity, -1)), row, unit), h)
        return h

    def hand_on(self, layer: int, direction: int, time: Dim, row: Dim, panel: Dim, h: Tile) -> None:
        """The step's output, to the next layer or out of the kernel."""
        b, job, lanes = self.b, self.job, self.tiling.lanes
        unit = expr("*", panel, lanes)
        left = None if job.hidden % lanes == 0 else remaining(job.hidden, unit)
        element = expr("+", direction * job.hidden, unit)
        if (layer + 1) * job.directions < len(job.weights):
            b.store(self.ys[layer % 2], (self._nth(time, row), element), h, valid=(None, left))
        elif job.y is not None:
            where = self._sequence_at(time, expr("+", self.row, row), element)
            write(b, job.y, where, (0 if job.batch_first else 1, 2), h, (None, left))
