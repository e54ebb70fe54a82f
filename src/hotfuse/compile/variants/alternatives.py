"""The variants in which a group whose sizes only a call tells could be computed, and the size that decides between them.

    any size     the kernel that there is
    few rows     a product of two activations that reads its right side where it lies: at most so many rows, nothing is laid out
    cut for ...  the same loops for a core with fewer registers, narrower vectors, a smaller cache: other tiles, of attention too
    one thread   the same loops on the calling thread, where waking others takes longer than they save
    library      the library's kernels

Which of them is best where is a question for `fusion.crossover`, first by prediction and then by measurement.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from hotfuse.analysis.attention import FUSED
from hotfuse.analysis.cost import value_bytes
from hotfuse.analysis.resources import CorePeaks, roofline_seconds, work_of
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.compile.variants import precision_variants
from hotfuse.fusion.crossover import Variant
from hotfuse.ir.dims import Dim, Sym, dims_in, evaluate, symbols
from hotfuse.ir.graph import Graph, Node, Value, sources
from hotfuse.ir.types import TensorType, dims_of
from hotfuse.lower.common.activation_products import PRODUCTS, is_product
from hotfuse.lower.common.algebra import product
from hotfuse.lower.common.bounds import bounded
from hotfuse.lower.cpu.attention import tiling as attention_tiling
from hotfuse.lower.cpu.gemm.bmm import rows_at_once
from hotfuse.lower.cpu.thread_work import WORK_PER_THREAD
from hotfuse.lower.cpu.tiling import Core
from hotfuse.ops.schema import argument
from hotfuse.ops.table import packet

ANY_SIZE, FEW_ROWS, ONE_THREAD, LIBRARY = "any size", "few rows", "one thread", "library"
WAKE_S = 20e-6
"""What it takes until other threads have begun and all have ended, as a rule: a microsecond after work, some 60 after a rest."""
REACH_FACTOR = 8
"""Where nobody bounds a size, calls are thought to bring up to so many times what was seen, and at least `MIN_REACH`."""
MIN_REACH = 256
TILE_ROWS, TILE_PACE = 16, 8
"""Rows of a matrix unit's tile, and how many times faster than vectors it takes each of them."""
PAIRS_WASTE, PLAIN_WASTE = 0.5, 0.75
"""How much longer products take without a matrix unit, beside what is predicted for all kinds alike."""


@dataclass(frozen=True, slots=True)
class VariantQuestion:
    """A group, the size that decides, and its variants, of which the first is the one that there is."""

    size: Sym
    variants: tuple[Variant, ...]
    env: Callable[[int], Mapping[str, int]]
    """Sizes of a call that make the deciding size so large, or the next larger that is possible."""
    turns: tuple[int, ...] = ()
    """Sizes at which a variant is likely to become worse than another."""


def variant_question(
    graph: Graph, core: Core, others: Sequence[Core], sizes: Mapping[str, int], peaks: CorePeaks, threads: int = 1
) -> VariantQuestion | str:
    """The question for a group in its normal form; or why there is none. `threads` are those that calls have."""
    anchor = next((n for n in graph.nodes if is_product(n)), None)
    attention = next((n for n in graph.nodes if packet(n.op) == FUSED), None)
    size = _deciding(graph, anchor) if attention is None else _length(attention)
    if isinstance(size, str):
        return size
    first, *rest = sorted(symbols(size))
    ones = dict.fromkeys(rest, 1)
    step = evaluate(size, {first: 1, **ones})

    def env(n: int) -> Mapping[str, int]:
        return {**ones, first: -(-n // step)}

    turns: list[int] = []
    laying, sharing = _laying_out(graph, anchor, sizes, env, peaks), _sharing(graph, core, sizes, env, peaks, threads)

    def any_waste(n: int) -> float:
        return laying(n) + sharing(n)

    variants = [Variant(ANY_SIZE, ((graph, core),), any_waste)]
    if threads > 1:
        variants.append(Variant(ONE_THREAD, ((graph, core),), laying, threads=1))
    if attention is not None:
        panels = [attention_tiling.choose(c, _width(attention)).panel for c in (core, *others)]
        turns += [p for p in dict.fromkeys(panels)]
        empty = _empty(attention, panels[0], sizes, env, peaks, threads)
        variants[0] = Variant(ANY_SIZE, ((graph, core),), _both(any_waste, empty))
        variants += [
            Variant(_cut(c), ((graph, c),), _both(any_waste, _empty(attention, p, sizes, env, peaks, threads)))
            for c, p in zip(others, panels[1:], strict=True)
            if c != core and p < panels[0]
        ]
    if anchor is not None:
        if not _constant(graph, anchor):
            few = rows_at_once(graph, core)
            turns.append(few)
            variants.append(
                Variant(FEW_ROWS, ((bounded(graph, size, few), core),), _read_again(graph, anchor, few, sizes, env, peaks))
            )
        rounding = _kind(graph, anchor, core, (core, *others), sizes, env, peaks)
        variants[0] = replace(variants[0], waste=_both(variants[0].waste, rounding))
        variants += [
            Variant(_cut(c), ((graph, c),), _both(any_waste, _kind(graph, anchor, c, (core, *others), sizes, env, peaks)))
            for c in others
            if c != core
        ]
    return VariantQuestion(size, (*variants, Variant(LIBRARY, ((graph, None),))), env, tuple(turns))


def _both(one: Callable[[int], float], two: Callable[[int], float]) -> Callable[[int], float]:
    return lambda n: one(n) + two(n)


def _length(attention: Node) -> Sym | str:
    """The queries of an attention."""
    query = attention.args[0]
    shape = query.type.shape if isinstance(query, Value) and isinstance(query.type, TensorType) else ()
    rows = shape[-2] if len(shape) > 1 else 1
    if isinstance(rows, int):
        return "its queries are known"
    return rows if _grows(rows) else "its queries are not a product of sizes"


def _width(attention: Node) -> int:
    query = attention.args[0]
    last = query.type.shape[-1] if isinstance(query, Value) and isinstance(query.type, TensorType) else 1
    return last if isinstance(last, int) else 64


def _empty(
    attention: Node, panel: int, sizes: Mapping[str, int], env: Callable[[int], Mapping[str, int]], peaks: CorePeaks, threads: int
) -> Callable[[int], float]:  # fmt: skip
    """What is computed for places of the last panel of queries that no query fills; wider panels need fewer loads."""

    def waste(n: int) -> float:
        work = work_of(Graph("anchor", attention.ins, (), (attention,), attention.outs), {**sizes, **env(n)})
        each = (work.flops or 0) / max(1, n) / peaks.flops_per_s / threads
        return each * (-(-n // panel) * panel - n + n * attention_tiling.NARROWER * (64 / panel - 1))

    return waste


def _sharing(
    graph: Graph, core: Core, sizes: Mapping[str, int], env: Callable[[int], Mapping[str, int]], peaks: CorePeaks, threads: int
) -> Callable[[int], float]:  # fmt: skip
    """What a kernel that may wake other threads takes beside its share of the work: all of it where it deserves only one."""

    def waste(n: int) -> float:
        if threads < 2:
            return 0.0
        work = work_of(graph, {**sizes, **env(n)})
        if work.flops is None:
            return 0.0
        if work.flops / (2 * core.lanes) >= 2 * WORK_PER_THREAD:
            return WAKE_S
        alone = roofline_seconds(work, peaks) or 0.0
        return alone * (1 - 1 / threads)

    return waste


def _kind(
    graph: Graph, anchor: Node, core: Core, all_: Sequence[Core], sizes: Mapping[str, int], env: Callable[[int], Mapping[str, int]],
    peaks: CorePeaks,
) -> Callable[[int], float]:  # fmt: skip
    """How much longer products of rounded operands take by instructions other than the best: of a guess, which is measured.

    A matrix unit computes whole tiles of rows, at a fraction of the time that vectors take for each.
    """

    def waste(n: int) -> float:
        if all(c.precision == "fp32" for c in all_) or not _constant(graph, anchor):
            return 0.0
        work = work_of(graph, {**sizes, **env(n)})
        row = (work.flops or 0) / max(1, n) / peaks.flops_per_s
        if core.tiles:
            return row * (-n % TILE_ROWS) / TILE_PACE
        return row * n * (PAIRS_WASTE if core.precision == "bf16" else PLAIN_WASTE)

    return waste


def _cut(core: Core) -> str:
    kind = f", {precision_variants.name(core)}" if core.precision != "fp32" else ""
    return f"cut for {core.registers} registers of {core.lanes}, {core.l2 >> 10} KiB{kind}"


def _deciding(graph: Graph, anchor: Node | None) -> Sym | str:
    """The rows of a product; else the only size that a call tells."""
    if anchor is not None:
        left = argument(anchor, PRODUCTS[packet(anchor.op)][0])
        shape = left.type.shape if isinstance(left, Value) and isinstance(left.type, TensorType) else ()
        rows: Dim = product(shape[:-1]) if _constant(graph, anchor) else shape[-2] if len(shape) > 1 else 1
        if isinstance(rows, int):
            return "its rows are known"
        return rows if _grows(rows) else "its rows are not a product of sizes"
    named = frozenset[str]().union(*(symbols(d) for v in sources(graph) for d in dims_of(v.type)))
    if len(named) != 1:
        return f"{len(named)} sizes are known only at run time"
    (name,) = named
    return Sym("sym", (name,))


def _grows(d: Dim) -> bool:
    """Whether a size is a symbol, or a product of symbols and numbers: then making one symbol larger makes it larger."""
    if isinstance(d, int):
        return d > 0
    return d.op == "sym" or (d.op == "*" and all(_grows(a) for a in dims_in(d)))


def _constant(graph: Graph, anchor: Node) -> bool:
    right = argument(anchor, PRODUCTS[packet(anchor.op)][1])
    return isinstance(right, Value) and right.name in {p.value.name for p in graph.params}


def _right_bytes(anchor: Node, sizes: Mapping[str, int], env: Callable[[int], Mapping[str, int]], n: int) -> int:
    right = argument(anchor, PRODUCTS[packet(anchor.op)][1])
    return (value_bytes(right, {**sizes, **env(n)}) or 0) if isinstance(right, Value) else 0


def _laying_out(
    graph: Graph, anchor: Node | None, sizes: Mapping[str, int], env: Callable[[int], Mapping[str, int]], peaks: CorePeaks
) -> Callable[[int], float]:
    """What it takes to lay the right side out in panels: it is written once more and read from the nearest cache."""

    def waste(n: int) -> float:
        if anchor is None or _constant(graph, anchor):
            return 0.0
        return 2 * _right_bytes(anchor, sizes, env, n) / peaks.cache_bytes_per_s

    return waste


def _read_again(
    graph: Graph, anchor: Node, few: int, sizes: Mapping[str, int], env: Callable[[int], Mapping[str, int]], peaks: CorePeaks
) -> Callable[[int], float]:
    """What it takes to read the right side, line by line of a matrix, for every further block of rows."""

    def waste(n: int) -> float:
        again = -(-n // few) - 1
        return 2 * again * _right_bytes(anchor, sizes, env, n) / peaks.cache_bytes_per_s

    return waste


# --- which sizes --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SizeRange:
    """Sizes that calls may bring."""

    least: int
    most: int

    def points(self, *more: int) -> list[int]:
        """Sizes to look at, rising: powers of two, the ends, and others that matter; each with its successor."""
        found = {self.least, self.most}
        n = max(1, self.least)
        while n < self.most:
            found.add(n)
            n *= 2
        for m in more:
            found |= {m, m + 1}
        return sorted(n for n in found if max(1, self.least) <= n <= self.most)


def allowed(size: Dim, guards: Sequence[Dim], seen: Mapping[str, int]) -> SizeRange:
    """The sizes that a graph's guards let through; where they set no end, some times what was seen."""
    least, most = dict.fromkeys(symbols(size), 0), dict[str, int]()
    for guard in guards:
        if not isinstance(guard, Sym) or guard.op not in ("<=", "<") or len(guard.args) != 2:
            continue
        a, b = guard.args
        strict = guard.op == "<"
        if isinstance(a, int) and isinstance(b, Sym) and b.op == "sym" and (name := str(b.args[0])) in least:
            least[name] = max(least[name], a + strict)
        elif isinstance(b, int) and isinstance(a, Sym) and a.op == "sym" and (name := str(a.args[0])) in least:
            most[name] = min(most.get(name, b), b - strict)
    far = {n: most.get(n, max(REACH_FACTOR * seen.get(n, 1), MIN_REACH)) for n in least}
    return SizeRange(max(0, evaluate(size, least)), evaluate(size, far))
