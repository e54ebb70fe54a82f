"""The first run of a new kernel: in the worker, on made-up data, against the library.

A kernel that crashes takes the worker with it, not the server; one that is wrong or slower than torch's own operators never
leaves. What passes is proven again on real inputs, in place, before it serves.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from hotfuse.analysis.attention import PACKED
from hotfuse.analysis.closeness import relative_error, same_specials
from hotfuse.analysis.registers import parallel_iterations
from hotfuse.analysis.ties import Quantum, quanta, tied
from hotfuse.backends.library import LibraryBackend
from hotfuse.backends.protocol import CompiledKernel, Run
from hotfuse.base.errors import InternalError
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.base.settings import BF16_RTOL
from hotfuse.compile.request_context import kernels
from hotfuse.compile.variants.served_threads import as_served
from hotfuse.ir.dims import evaluate, symbols
from hotfuse.ir.graph import Graph, Node, Value, sources
from hotfuse.ir.types import DType, ScalarType, TensorType
from hotfuse.lower.common.errors import CannotLower
from hotfuse.lower.common.lowered import Lowered, PackArgument
from hotfuse.lower.cpu.work_division import balance
from hotfuse.lower.run.constants import Constants
from hotfuse.ops.own.assume import ASSUME, made_up_calls
from hotfuse.ops.own.experts import PRODUCT
from hotfuse.ops.schema import argument
from hotfuse.ops.table import Access, lookup, packet
from hotfuse.ops.torch_dtypes import torch_dtype

RTOL = 1e-4
"""Largest error against float32 operators, relative to the largest magnitude in the result."""
HALVES_RTOL = 2e-2
"""The same of halves, and of what is computed from them."""
ROUNDS = 7
DRAWS = 4
"""Made-up data that are tried before a group is left to the library because that refuses them."""
PROPOSED = 0.25
"""By how much a kernel may lose on one thread where calls have more."""
EVENLY = 0.75
"""Mean over longest part of the threads' work, from which on a kernel is worth a race."""
CLEARLY = 2.0
"""Times as fast as the library, from which on three rounds are enough. What seems to lose gets all of them."""
MAX_S = 0.25
"""Most seconds spent timing one kernel."""
_DIVISIONS = frozenset({"aten.div", "aten.divide", "aten.floor_divide", "aten.fmod", "aten.remainder"})
_INTEGERS = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8})
_DRAWN = 1048573
"""Numbers that are drawn for one tensor; a larger one holds them again and again. A prime, so that rows near each other differ:
drawing the table of a vocabulary takes a quarter of a second, and a plan waits for it."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A kernel's time and the library's, for the same group on the same data."""

    kernel_us: float
    library_us: float
    threads: int = 1
    """That both had."""


def attempt(
    graph: Graph, lowered: Lowered, compiled: CompiledKernel, sizes: Mapping[str, int], allowance_us: float = 0.0,
    threads: int = 1,
) -> Outcome:  # fmt: skip
    """Run a kernel; raises CannotLower when it is wrong, or slower than the library by more than the allowance.

    `threads` are those that calls will have: it is timed on as many, or on one where cores are busy. What loses narrowly on one
    is not refused then if its work can be shared evenly: which side is faster on many threads is left to the race.
    """
    data, weights, library, wanted = _taken(graph, sizes)
    inputs = [data[v.name] for v in graph.inputs]
    own = kernels()
    native = own.glue(graph, lowered, own.load_kernel(compiled), Constants(weights))
    steps = quanta(graph, lambda v: float(data[v.name]) if v.name in data and data[v.name].numel() == 1 else None)
    with torch.no_grad(), made_up_calls.tried() if assumes(graph) else nullcontext():
        allowed = max(BF16_RTOL if rounded(lowered) else RTOL, halves_rtol(graph))
        for got, want, step in zip(native(*inputs), wanted, steps, strict=True):
            agree(got, want, step, allowed)
        with as_served(threads) as measured:
            outcome = replace(_timed(native, library, inputs), threads=measured)
    slack = PROPOSED if outcome.threads < threads and shares_evenly(lowered, sizes, threads) else 0.0
    if own.competes and outcome.kernel_us >= outcome.library_us * (1 + slack) + allowance_us:
        raise CannotLower(
            f"its kernel takes {outcome.kernel_us:.0f} us where the library takes {outcome.library_us:.0f}"
        )
    return outcome


def _taken(graph: Graph, sizes: Mapping[str, int]) -> tuple[dict[str, Any], dict[str, torch.Tensor], Run, Sequence[Any]]:
    """Made-up data that the library takes: by name, the weights among them by key, its code, and its results.

    A group may hold a check of what calls bring (a batch in which something is real), which one draw fails and another passes.
    What calls bring may be better than all of them, but nobody would know the kernel to be right.
    """
    refusal: Exception | None = None
    for draw in range(DRAWS):
        data = drawn(graph, sizes, draw)
        weights = {p.key: tamed(data[p.value.name]) for p in graph.params}
        library = LibraryBackend().compile(graph, weights).run
        with torch.no_grad(), made_up_calls.tried() if assumes(graph) else nullcontext():
            try:
                return data, weights, library, library(*[data[v.name] for v in graph.inputs])
            except (RuntimeError, IndexError) as e:
                refusal = e
    raise CannotLower(f"the library refuses made-up data: {str(refusal).splitlines()[0][:100]}") from refusal


def assumes(graph: Graph) -> bool:
    """Whether a graph is for calls that made-up data are none of."""
    return any(n.op == ASSUME for n in graph.nodes)


def shares_evenly(lowered: Lowered, sizes: Mapping[str, int], threads: int) -> bool:
    """Whether a kernel has tasks enough for so many threads."""
    return balance(parallel_iterations(lowered.kernel, sizes), threads) >= EVENLY


def drawn(graph: Graph, sizes: Mapping[str, int], draw: int = 0) -> dict[str, Any]:
    """Made-up data of what a graph reads, by name, the same every time; other numbers for another draw."""
    generator, places = torch.Generator().manual_seed(draw), places_of(graph, sizes)
    data = {v.name: made_up(v, sizes, generator, places) for v in sources(graph)}
    if places > 1 and any(_divides_integers(n) for n in graph.nodes):
        for made in (t for t in data.values() if isinstance(t, torch.Tensor) and t.dtype in _INTEGERS):
            made.masked_fill_(made == 0, 1)
    return data | offsets_in(graph, sizes)


def _divides_integers(node: Node) -> bool:
    """Whether a zero among the divisors would be an error, as it is none of floats."""
    by = node.args[1] if packet(node.op) in _DIVISIONS and len(node.args) > 1 else None
    return isinstance(by, Value) and isinstance(by.type, TensorType) and torch_dtype(by.type.dtype) in _INTEGERS


def places_of(graph: Graph, sizes: Mapping[str, int]) -> int:
    """How many places made-up integers may name: the second one is outside a dim of size 1 (a batch of one) that is indexed."""
    indexed = (n.ins[0] for n in graph.nodes if n.ins and lookup(n.op).access is Access.INDEXING)
    return 1 if any(d == 1 or (not symbols(d) - set(sizes) and evaluate(d, sizes) == 1)
                    for v in indexed if isinstance(v.type, TensorType) for d in v.type.shape) else 2  # fmt: skip


def made_up(v: Value, sizes: Mapping[str, int], generator: torch.Generator, places: int = 2) -> Any:
    """Data of a value's type; raises CannotLower where its size depends on data."""
    if isinstance(v.type, ScalarType) and v.type.expr is not None and not symbols(v.type.expr) - set(sizes):
        return evaluate(v.type.expr, sizes)
    if not isinstance(v.type, TensorType):
        raise CannotLower(f"%{v.name} is not a tensor")
    if any(symbols(d) - set(sizes) for d in v.type.shape):
        raise CannotLower(f"a size of %{v.name} depends on data")
    shape = [evaluate(d, sizes) for d in v.type.shape]
    dtype = torch_dtype(v.type.dtype)
    if dtype.is_floating_point:
        made = _noise(shape, generator).to(dtype)
    elif dtype in (torch.int8, torch.uint8):  # quantized numbers, over their whole range
        limits = torch.iinfo(dtype)
        made = torch.randint(limits.min, limits.max + 1, shape, generator=generator).to(dtype)
    else:  # these may index something
        made = torch.randint(0, 2 if dtype is torch.bool else places, shape, generator=generator).to(dtype)
    order = v.type.layout.order
    if order is None:
        return made
    back = [order.index(d) for d in range(len(order))]
    return made.permute(order).contiguous().permute(back)


def offsets_in(graph: Graph, sizes: Mapping[str, int]) -> dict[str, torch.Tensor]:
    """Offsets that packed sequences or the rows of experts can have, where others would be a fault: all are about as long."""
    found: dict[str, torch.Tensor] = {}
    for node in (n for n in graph.nodes if packet(n.op) == PACKED):
        for name, of in (("offsets_k", "key"), ("offsets", "query")):
            given, rows = argument(node, name), argument(node, of)
            if isinstance(given, Value) and isinstance(rows, Value):
                (count,), last = _sizes(given, sizes), _sizes(rows, sizes)[0]
                last = min(last, int(found[given.name][-1])) if given.name in found else last  # one for queries and keys
                assert isinstance(given.type, TensorType)
                found[given.name] = torch.linspace(0, last, max(count, 1)).to(torch_dtype(given.type.dtype))[:count]
    for node in (n for n in graph.nodes if packet(n.op) == PRODUCT):
        ends, rows = argument(node, "ends"), argument(node, "x")
        if isinstance(ends, Value) and isinstance(rows, Value):
            (count,), last = _sizes(ends, sizes), _sizes(rows, sizes)[0]
            assert isinstance(ends.type, TensorType)
            found[ends.name] = torch.linspace(0, last, count + 1).to(torch_dtype(ends.type.dtype))[1:]
    return {v.name: found[v.name] for v in sources(graph) if v.name in found}


def _sizes(v: Value, sizes: Mapping[str, int]) -> list[int]:
    return [evaluate(d, sizes) for d in v.type.shape] if isinstance(v.type, TensorType) else []


def _noise(shape: list[int], generator: torch.Generator) -> torch.Tensor:
    """Normal numbers."""
    count = math.prod(shape)
    if count <= _DRAWN:
        return torch.randn(shape, generator=generator)
    drawn = torch.randn(_DRAWN, generator=generator)
    made = torch.empty(count)
    whole = count // _DRAWN * _DRAWN
    made[:whole].view(-1, _DRAWN).copy_(drawn)
    made[whole:] = drawn[: count - whole]
    return made.view(shape)


def tamed(weight: torch.Tensor) -> torch.Tensor:
    """A weight whose products stay near 1: a recurrence over larger ones is chaotic, and no two ways to compute it agree."""
    if not weight.dtype.is_floating_point or weight.dim() < 2:
        return weight
    return weight / max(1, weight.shape[-1]) ** 0.5


def rounded(lowered: Lowered) -> bool:
    """Whether a kernel multiplies operands rounded to bf16, which only the user's setting allows."""
    return any(isinstance(a, PackArgument) and a.spec.paired for a in lowered.arguments)


def halves_rtol(graph: Graph) -> float:
    """What results may differ by where numbers are halves on the way to them: the library rounds where a kernel need not. Whether
    a plan of such kernels is as near to the truth as the library is, its proof says."""
    made = (v.type for n in graph.nodes for v in (*n.ins, *n.outs))
    return HALVES_RTOL if any(isinstance(t, TensorType) and t.dtype in (DType.F16, DType.BF16) for t in made) else 0.0


def agree(got: Any, want: Any, step: Quantum = None, rtol: float = RTOL) -> None:
    """Whether results agree; what comes from rounding may fall to the other side of a tie here and there."""
    if got.dtype != want.dtype or got.shape != want.shape:
        raise InternalError(f"a kernel gives {got.dtype}{list(got.shape)} instead of {want.dtype}{list(want.shape)}")
    if tied(got, want, step):
        return
    if not want.dtype.is_floating_point:
        if not torch.equal(got, want):
            raise InternalError("a kernel gives other integers than the library")
        return
    if not same_specials(got, want):
        raise InternalError("a kernel gives NaN or infinity elsewhere than the library")
    finite = torch.isfinite(want)
    if not bool(finite.all()):
        got, want = got[finite], want[finite]
    allowed = rtol if want.dtype in (torch.float32, torch.float64) else HALVES_RTOL
    if want.dtype is torch.float32 and relative_error(got, want) < allowed / 2:  # rounding is a thousandth of that
        return
    error = relative_error(got.double(), want.double())
    if error > allowed:
        raise InternalError(f"a kernel differs from the library by {error:.1e}")


def _timed(native: Run, library: Run, inputs: list[Any], clock: Callable[[], float] = time.perf_counter) -> Outcome:
    """Least times over interleaved rounds: the worker runs at the lowest priority, so most rounds are disturbed. The kernel finds
    threads awake, as inside a native run."""
    best = [float("inf"), float("inf")]
    start = clock()
    for n in range(ROUNDS):
        for side, run in enumerate((native, library)):
            with kernels().awake(1 if side else torch.get_num_threads()):
                begin = clock()
                run(*inputs)
                best[side] = min(best[side], clock() - begin)
        if n >= 2 and (clock() - start > MAX_S or best[0] * CLEARLY < best[1]):
            break
    return Outcome(best[0] * 1e6, best[1] * 1e6)
