"""Attention through the tile interpreter and as native code, against torch in float64."""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hotfuse.backends.llvm.native import compile_kernel, load_kernel
from hotfuse.backends.llvm.runs.abi import NativeKernel
from hotfuse.frontends.fx import PlaceholderRole, to_graph
from hotfuse.ir import dims
from hotfuse.ir.graph import Graph, Value
from hotfuse.ir.types import TensorType
from hotfuse.lower.common.errors import CannotLower
from hotfuse.lower.common.lowered import BufferArgument, Lowered, StrideArgument, SymbolArgument
from hotfuse.lower.common.lowered import BufferRole as Is
from hotfuse.lower.cpu.attention.attention_group import lower_attention
from hotfuse.lower.cpu.attention.tiling import AttentionTiling, choose
from hotfuse.lower.cpu.tiling import Core
from hotfuse.native.target import CpuTarget, cross_neon, host_levels, level
from hotfuse.tile import interpreter
from hotfuse.tile.program import Kernel, Loop, LoopKind

Tensor = torch.Tensor
AVX512, AVX2, GENERIC = Core(16, 32), Core(8, 16), Core(4, 16)
INF, NAN = math.inf, math.nan
CANARY = 64
"""Numbers before and behind an output that nobody may write."""


class Function(torch.nn.Module):
    """A function that can be exported."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> Tensor:
        return self.function(*args)


def graph_of(function: Callable[..., Tensor], args: Sequence[Tensor], dynamic: Sequence[dict[int, str]] = ()) -> Graph:
    """The function's graph; `dynamic` names the dims whose sizes are symbols."""
    symbols = {n: torch.export.Dim(n) for named in dynamic for n in named.values()}
    shapes = tuple({d: symbols[n] for d, n in named.items()} for named in dynamic) or tuple({} for _ in args)
    program = torch.export.export(Function(function).eval(), tuple(args), dynamic_shapes={"args": shapes}, strict=False)
    return to_graph(program.graph_module, [PlaceholderRole("input") for _ in args]).graph


def bind(graph: Graph, args: Sequence[Tensor]) -> dict[str, int]:
    """What the symbols are in a call."""
    env: dict[str, int] = {}
    for value, given in zip(graph.inputs, args, strict=True):
        assert isinstance(value.type, TensorType)
        for d, n in zip(value.type.shape, given.shape, strict=True):
            if isinstance(d, dims.Sym) and d.op == "sym":
                env[str(d.args[0])] = n
    return env


def call(graph: Graph, lowered: Lowered, args: Sequence[Tensor], execute: Callable[..., None]) -> Tensor:
    """Run a lowered group; outputs begin as a number that is hard to miss."""
    env = bind(graph, args)
    (out,) = (v for v in graph.outputs if isinstance(v, Value))
    assert isinstance(out.type, TensorType)
    shape = tuple(dims.evaluate(d, env) for d in out.type.shape)
    stride = tuple(dims.evaluate(d, env) for d in dict(lowered.strides)[out.name])
    room = torch.full((math.prod(shape) + 2 * CANARY,), 12345.0)
    result = room.as_strided(shape, stride, CANARY)
    named = {v.name: a for v, a in zip(graph.inputs, args, strict=True)}
    buffers: dict[str, Tensor] = {}
    sizes: dict[str, int] = {}
    for a in lowered.arguments:
        match a:
            case BufferArgument(buffer, role, value):
                buffers[buffer] = result if role is Is.OUTPUT else named[value]
            case SymbolArgument(size, symbol):
                sizes[size] = env[symbol]
            case StrideArgument(size, value, dim):
                sizes[size] = named[value].stride(dim)
            case _:
                raise AssertionError(a)
    execute(lowered, buffers, sizes)
    assert bool((room[:CANARY] == 12345.0).all() and (room[-CANARY:] == 12345.0).all()), "written outside the output"
    return result


def memory(t: Tensor) -> Tensor:
    """A dense tensor's elements as they lie; one with other strides is left as it is."""
    dense = sorted(zip(t.stride(), t.shape, strict=True), reverse=True)
    return t.as_strided((t.numel(),), (1,)) if all(a[0] == b[0] * b[1] for a, b in itertools.pairwise(dense)) else t


def interpreted(lowered: Lowered, buffers: dict[str, Tensor], numbers: dict[str, int]) -> None:
    interpreter.run(lowered.kernel, {n: memory(t).numpy() for n, t in buffers.items()}, numbers)


@functools.lru_cache(maxsize=2)
def machine_code(kernel: Kernel, target: CpuTarget) -> NativeKernel:
    return load_kernel(compile_kernel(kernel, target))


def native(target: CpuTarget) -> Callable[..., None]:
    def execute(lowered: Lowered, buffers: dict[str, Tensor], sizes: dict[str, int]) -> None:
        kernel = machine_code(lowered.kernel, target)
        kernel(list(buffers.values()), list(sizes.values()))

    return execute


def check(result: Tensor, expected: Tensor, tolerance: float = 3e-6) -> None:
    """Numbers are near; NaN and infinities stand where they should."""
    assert result.shape == expected.shape
    expected = expected.double()
    assert torch.equal(result.isnan(), expected.isnan())
    assert torch.equal(result.isinf(), expected.isinf())
    good = expected.isfinite()
    difference = (result.double() - expected)[good].abs()
    limit = tolerance * (1 + expected[good].abs())
    assert bool((difference <= limit).all()), f"off by {float((difference / limit).max()):.1f} times the tolerance"


def heads(x: Tensor, n: int) -> Tensor:
    """A projection's heads, as models take them apart."""
    b, s, w = x.shape
    return x.view(b, s, n, w // n).transpose(1, 2)


def merged(x: Tensor) -> Tensor:
    """Heads put together again."""
    b, h, s, w = x.shape
    return x.transpose(1, 2).reshape(b, s, h * w)


def block(n: int, n_kv: int | None = None, **options: Any) -> Callable[..., Tensor]:
    """Attention with the views around it."""

    def function(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        kv = n_kv or n
        return merged(F.scaled_dot_product_attention(heads(q, n), heads(k, kv), heads(v, kv), attn_mask=mask, **options))

    return function


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def inputs(b: int, sq: int, sk: int, h: int, d: int, h_kv: int | None = None, dv: int | None = None) -> list[Tensor]:
    kv = h_kv or h
    return [numbers(b, sq, h * d), numbers(b, sk, kv * d, seed=1), numbers(b, sk, kv * (dv or d), seed=2)]


def exact(function: Callable[..., Tensor], args: Sequence[Tensor]) -> Tensor:
    """The function in float64."""
    return function(*(a.double() if a.is_floating_point() else a for a in args))


ON_ANY = [{0: "b", 1: "s"}] * 3


def both(
    function: Callable[..., Tensor], args: Sequence[Tensor], *, core: Core = AVX512, tiling: AttentionTiling | None = None,
    expected: Tensor | None = None, dynamic: Sequence[dict[int, str]] = (), tolerance: float = 3e-6,
    execute: Callable[..., None] = interpreted,
) -> Tensor:  # fmt: skip
    """Lower, run, compare."""
    graph = graph_of(function, args, dynamic)
    lowered = lower_attention(graph, core, tiling=tiling)
    result = call(graph, lowered, args, execute)
    check(result, exact(function, args) if expected is None else expected, tolerance)
    return result




def executors(levels: Sequence[CpuTarget]) -> list[Any]:
    """The interpreter, and machine code of some levels."""
    found = [pytest.param(native(t), _core(t), id=f"native-{t.name}") for t in levels]
    return [pytest.param(interpreted, AVX512, id="interpreted"), *found]


def _core(t: CpuTarget) -> Core:
    return Core(t.lanes, 32 if t.name in ("avx512", "neon") else 16)


EVERYWHERE = pytest.mark.parametrize(("execute", "core"), executors(host_levels()))
BOTH_WAYS = pytest.mark.parametrize(("execute", "core"), executors(host_levels()[:1]))


# --- shapes


@pytest.mark.parametrize("d", [2, 8, 15, 16, 31, 32, 64, 80])
@pytest.mark.parametrize("s", [1, 2, 5, 16, 33, 70])
def test_lengths_and_widths(s: int, d: int) -> None:
    both(block(2), inputs(1, s, s, 2, d))


@EVERYWHERE
@pytest.mark.parametrize("s", [1, 5, 17, 70, 130])
def test_lengths_on_every_level(s: int, execute: Callable[..., None], core: Core) -> None:
    if execute is not interpreted or s < 100:
        both(block(2), inputs(2, s, s, 2, 32), core=core, execute=execute)


@pytest.mark.parametrize("core", [AVX512, AVX2, GENERIC], ids=["avx512", "avx2", "generic"])
def test_one_kernel_for_all_lengths(core: Core) -> None:
    example = inputs(3, 37, 37, 2, 24)
    graph = graph_of(block(2), example, ON_ANY)
    lowered = lower_attention(graph, core)
    assert lowered.kernel.sizes
    for b, s in ((1, 1), (2, 3), (1, 16), (1, 19), (1, 70), (0, 4)):
        args = inputs(b, s, s, 2, 24)
        check(call(graph, lowered, args, interpreted), exact(block(2), args))


@EVERYWHERE
def test_one_kernel_for_all_lengths_with_running_softmax(execute: Callable[..., None], core: Core) -> None:
    """Blocks of 16 keys stand for the hundreds that real ones have."""
    tiling = replace(choose(core, 16), block=16)
    graph = graph_of(block(2), inputs(3, 37, 37, 2, 16), ON_ANY)
    lowered = lower_attention(graph, core, tiling=tiling)
    for b, s in ((1, 1), (2, 15), (1, 16), (1, 17), (2, 35), (1, 70), (0, 40)):
        args = inputs(b, s, s, 2, 16)
        check(call(graph, lowered, args, execute), exact(block(2), args))


def test_blocks_of_keys_when_the_length_is_a_number() -> None:
    for s in (32, 41):
        both(block(1), inputs(1, s, s, 1, 16), tiling=replace(choose(AVX512, 16), block=16))


@BOTH_WAYS
@pytest.mark.parametrize(("sq", "sk"), [(1, 40), (7, 3), (20, 65), (65, 20), (3, 1), (4, 0)])
def test_other_keys_than_queries(sq: int, sk: int, execute: Callable[..., None], core: Core) -> None:
    args = inputs(2, sq, sk, 2, 16)
    both(block(2), args, core=core, execute=execute, expected=torch.zeros(2, sq, 32) if sk == 0 else None)


@pytest.mark.parametrize(("d", "dv"), [(16, 32), (64, 8), (32, 80), (256, 16)])
def test_values_of_another_width(d: int, dv: int) -> None:
    both(block(2), inputs(1, 9, 9, 2, d, dv=dv))


def test_cross_attention_with_lengths_known_at_run_time() -> None:
    dynamic = [{1: "q"}, {1: "k"}, {1: "k"}]
    graph = graph_of(block(2), inputs(1, 37, 41, 2, 16), dynamic)
    lowered = lower_attention(graph, AVX2)
    for sq, sk in ((1, 9), (20, 3), (3, 20)):
        args = inputs(1, sq, sk, 2, 16)
        check(call(graph, lowered, args, interpreted), exact(block(2), args))


@BOTH_WAYS
@pytest.mark.parametrize("sq", [1, 2, 3, 4])
@pytest.mark.parametrize("d", [8, 40, 64])
def test_few_queries(sq: int, d: int, execute: Callable[..., None], core: Core) -> None:
    for sk in (1, 5, 16, 33):
        both(block(2), inputs(2, sq, sk, 2, d, dv=24), core=core, execute=execute)
    masks = (numbers(2, 1, 1, 21) > 0, numbers(1, 2, sq, 21), torch.full((1, 1, sq, 21), -INF))
    for mask in masks:
        args = [*inputs(2, sq, 21, 2, d), mask]
        both(block(2), args, core=core, execute=execute, expected=block(2)(*args))


@EVERYWHERE
def test_one_query_of_a_decoder(execute: Callable[..., None], core: Core) -> None:
    """Keys grow from call to call, heads are grouped."""
    function = block(4, 2, enable_gqa=True)
    example = inputs(2, 1, 37, 4, 16, h_kv=2)
    graph = graph_of(function, example, [{}, {1: "k"}, {1: "k"}])
    lowered = lower_attention(graph, core)
    for sk in (2, 7, 16, 17, 70):
        args = inputs(2, 1, sk, 4, 16, h_kv=2)
        check(call(graph, lowered, args, execute), exact(function, args))


@pytest.mark.parametrize("which", [0, 1, 2])
def test_special_inputs_of_one_query(which: int) -> None:
    for value in (NAN, INF, -INF):
        args = inputs(1, 1, 20, 2, 16)
        args[which][0, 7 if which else 0, 3] = value
        both(block(2), args, expected=block(2)(*args))


# --- options


@pytest.mark.parametrize("scale", [0.3, -1.0, 0.0])
def test_scales(scale: float) -> None:
    both(block(2, scale=scale), inputs(1, 9, 9, 2, 16))


@BOTH_WAYS
@pytest.mark.parametrize(("sq", "sk"), [(1, 1), (9, 9), (33, 33), (70, 70), (20, 50), (50, 20)])
def test_causal(sq: int, sk: int, execute: Callable[..., None], core: Core) -> None:
    both(block(2, is_causal=True), inputs(1, sq, sk, 2, 16), core=core, execute=execute)


@EVERYWHERE
def test_causal_with_blocks_of_keys(execute: Callable[..., None], core: Core) -> None:
    tiling = replace(choose(core, 16), block=16)
    causal = block(2, is_causal=True)
    graph = graph_of(causal, inputs(3, 37, 37, 2, 16), ON_ANY)
    lowered = lower_attention(graph, core, tiling=tiling)
    for s in (1, 17, 70):
        args = inputs(2, s, s, 2, 16)
        check(call(graph, lowered, args, execute), exact(causal, args))


@EVERYWHERE
@pytest.mark.parametrize("kv", [1, 2, 6])
def test_grouped_heads(kv: int, execute: Callable[..., None], core: Core) -> None:
    both(block(6, kv, enable_gqa=True), inputs(1, 9, 12, 6, 16, h_kv=kv), core=core, execute=execute)


def repeated(x: Tensor, times: int) -> Tensor:
    """Heads repeated as decoder models do it."""
    b, h, s, w = x.shape
    return x[:, :, None].expand(b, h, times, s, w).reshape(b, h * times, s, w)


@pytest.mark.parametrize("how", [repeated, lambda x, n: x.repeat_interleave(n, 1)], ids=["expand", "interleave"])
def test_repeated_heads_are_not_copied(how: Callable[[Tensor, int], Tensor]) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return merged(F.scaled_dot_product_attention(heads(q, 6), how(heads(k, 2), 3), how(heads(v, 2), 3)))

    both(function, inputs(2, 7, 7, 6, 16, h_kv=2))


# --- masks

MASKS = {
    "keys": (2, 1, 1, 19), "one for all": (1, 1, 1, 19), "queries": (1, 1, 21, 19), "all": (2, 3, 21, 19), "heads": (1, 3, 21, 19),
    "two dims": (21, 19), "queries only": (1, 1, 21, 1), "heads and keys": (2, 3, 1, 19),
}  # fmt: skip


@BOTH_WAYS
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32], ids=["bool", "float"])
@pytest.mark.parametrize("shape", MASKS.values(), ids=MASKS)
def test_masks(shape: tuple[int, ...], dtype: torch.dtype, execute: Callable[..., None], core: Core) -> None:
    mask = numbers(*shape) > -0.3 if dtype is torch.bool else numbers(*shape) * 3
    both(block(3), [*inputs(2, 21, 19, 3, 16), mask], core=core, execute=execute)


@BOTH_WAYS
@pytest.mark.parametrize("least", [-INF, torch.finfo(torch.float32).min, -1e9, -1e4])
@pytest.mark.parametrize("keys_only", [True, False])
def test_additive_masks_that_forbid(keys_only: bool, least: float, execute: Callable[..., None], core: Core) -> None:
    """Rows where everything is forbidden by -inf are 0; by a finite number, they are what eager gives."""
    shape = (2, 1, 1, 20) if keys_only else (2, 1, 20, 20)
    mask = torch.where(numbers(*shape) > 0, 0.0, least)
    mask[1] = least
    args = [*inputs(2, 20, 20, 2, 16), mask]
    both(block(2), args, core=core, execute=execute, expected=block(2)(*args))


@BOTH_WAYS
@pytest.mark.parametrize("size", [16, 512])
def test_masks_with_lengths_known_at_run_time(size: int, execute: Callable[..., None], core: Core) -> None:
    tiling = replace(choose(core, 16), block=size)
    for shape, named in (((3, 1, 1, 37), {0: "b", 3: "s"}), ((3, 1, 37, 37), {0: "b", 2: "s", 3: "s"})):
        example = [*inputs(3, 37, 37, 2, 16), numbers(*shape) > 0]
        graph = graph_of(block(2), example, [*ON_ANY, named])
        lowered = lower_attention(graph, core, tiling=tiling)
        for b, s in ((2, 1), (1, 5), (2, 18), (1, 70)):
            mask = numbers(b, 1, s if shape[2] > 1 else 1, s) > 0
            args = [*inputs(b, s, s, 2, 16), mask]
            check(call(graph, lowered, args, execute), exact(block(2), args))


@BOTH_WAYS
def test_masks_that_are_repeated(execute: Callable[..., None], core: Core) -> None:
    """Inside the group as a view, from outside with strides that only the call knows."""
    args = inputs(2, 18, 18, 2, 16)
    mask = numbers(2, 1, 1, 18) > 0

    def expanded(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return block(2)(q, k, v, mask.expand(2, 2, 18, 18))

    both(expanded, [*args, mask], core=core, execute=execute)
    both(block(2), [*args, mask.expand(2, 2, 18, 18)], core=core, execute=execute)


def test_a_row_without_keys_is_zero() -> None:
    mask = torch.ones(1, 1, 18, 18, dtype=torch.bool)
    mask[:, :, 3] = False
    result = both(block(1), [*inputs(1, 18, 18, 1, 16), mask])
    assert not result[0, 3].any() and result[0, 4].any()


# --- special values


@BOTH_WAYS
@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("size", [16, 512])
def test_special_inputs(which: int, value: float, size: int, execute: Callable[..., None], core: Core) -> None:
    """NaN and infinities come out where eager has them."""
    args = inputs(1, 20, 20, 2, 16)
    args[which][0, 7, 3] = value
    tiling = replace(choose(core, 16), block=size)
    both(block(2), args, core=core, execute=execute, expected=block(2)(*args), tiling=tiling)


@BOTH_WAYS
def test_a_mask_of_plus_infinity_is_nan(execute: Callable[..., None], core: Core) -> None:
    mask = torch.zeros(1, 1, 20, 20)
    mask[0, 0, 2, 5] = INF
    args = [*inputs(1, 20, 20, 1, 16), mask]
    both(block(1), args, core=core, execute=execute, expected=block(1)(*args))


@BOTH_WAYS
def test_a_forbidden_key_that_is_nan(execute: Callable[..., None], core: Core) -> None:
    """A bool mask adds -inf, so NaN stays; what lies ahead is not looked at."""
    args = inputs(1, 20, 20, 1, 16)
    args[1][0, 7] = NAN
    mask = torch.ones(20, 20, dtype=torch.bool)
    mask[:, 7] = False
    both(block(1), [*args, mask], core=core, execute=execute, expected=block(1)(*args, mask))
    causal = block(1, is_causal=True)
    both(causal, args, core=core, execute=execute, expected=causal(*args))


@EVERYWHERE
def test_great_scores_do_not_overflow(execute: Callable[..., None], core: Core) -> None:
    args = inputs(1, 20, 20, 1, 16)
    args[0] *= 30
    args[1] *= 30
    graph = graph_of(block(1), args)
    result = call(graph, lower_attention(graph, core), args, execute)
    check(result, exact(block(1), args), tolerance=3e-4)  # scores of a thousand have that many digits


# --- layouts


def test_queries_keys_and_values_of_one_projection() -> None:
    def by_split(x: Tensor) -> Tensor:
        q, k, v = x.split(32, -1)
        return merged(F.scaled_dot_product_attention(heads(q, 2), heads(k, 2), heads(v, 2)))

    def by_unbind(x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = x.view(b, s, 3, 2, 16).permute(2, 0, 3, 1, 4).unbind(0)
        return merged(F.scaled_dot_product_attention(q, k, v))

    def by_slices(x: Tensor) -> Tensor:
        q, k, v = (heads(x[..., i * 32 : (i + 1) * 32].contiguous(), 2) for i in range(3))
        return merged(F.scaled_dot_product_attention(q, k, v))

    for function in (by_split, by_unbind, by_slices):
        both(function, [numbers(2, 7, 96)])


def test_plain_heads_in_and_out() -> None:
    args = [numbers(2, 3, 9, 16, seed=i) for i in range(3)]
    both(F.scaled_dot_product_attention, args)
    both(F.scaled_dot_product_attention, [a[0] for a in args])
    both(lambda q, k, v: F.scaled_dot_product_attention(q, k, v).transpose(1, 2), args)
    both(lambda q, k, v: F.scaled_dot_product_attention(q, k, v).permute(2, 0, 1, 3).reshape(9, 2, 48), args)


def test_single_batch_and_head() -> None:
    both(block(1), inputs(1, 9, 9, 1, 16))
    both(F.scaled_dot_product_attention, [numbers(1, 1, 1, 16, seed=i) for i in range(3)])


@BOTH_WAYS
def test_empty_batch(execute: Callable[..., None], core: Core) -> None:
    result = both(block(2), inputs(0, 5, 5, 2, 16), core=core, execute=execute)
    assert result.shape == (0, 5, 32)


# --- any of it together


@pytest.mark.parametrize("seed", range(12))
def test_random_attention(seed: int) -> None:
    """Everything may meet everything; a failing seed can be run alone."""
    rng = random.Random(seed)
    groups, kv = rng.choice([1, 1, 2, 3]), rng.choice([1, 2, 3])
    b, h, d, dv = rng.randint(1, 3), groups * kv, 8 * rng.randint(1, 16), 8 * rng.randint(1, 16)
    sq = rng.choice([1, rng.randint(1, 8), rng.randint(9, 150)])
    sk = rng.choice([sq, rng.randint(1, 200)])
    args = inputs(b, sq, sk, h, d, h_kv=kv, dv=dv)
    options: dict[str, Any] = {"enable_gqa": True, "scale": rng.choice([None, 0.2])}
    if rng.random() < 0.3:
        options["is_causal"] = True
    elif rng.random() < 0.7:
        shape = (rng.choice([1, b]), rng.choice([1, h]), rng.choice([1, sq]), sk)
        args.append(numbers(*shape) > -0.5 if rng.random() < 0.5 else numbers(*shape) * 4)
    function = block(h, kv, **options)
    target = rng.choice(host_levels())
    tiling = replace(choose(_core(target), d), block=rng.choice([16, 48, 512]), unroll=rng.choice([1, 2, 4]))
    dynamic: list[dict[int, str]] = []
    if sq > 4 and b > 1 and len(args) == 3 and sk > 1:
        dynamic = [{0: "b", 1: "q"}, {0: "b", 1: "k"}, {0: "b", 1: "k"}] if sq != sk else ON_ANY
    both(function, args, core=_core(target), tiling=tiling, dynamic=dynamic, execute=native(target), tolerance=1e-5)


# --- what is refused


def refused(function: Callable[..., Tensor], args: Sequence[Tensor]) -> str:
    with pytest.raises(CannotLower) as e:
        lower_attention(graph_of(function, args), AVX512)
    return e.value.because


def test_refusals_say_why() -> None:
    assert "width 264" in refused(block(2), inputs(1, 5, 5, 2, 264))
    assert "is f64" in refused(block(2), [a.double() for a in inputs(1, 5, 5, 2, 16)])
    assert "computed by aten.relu" in refused(lambda q, k, v: block(2)(q.relu(), k, v), inputs(1, 5, 5, 2, 16))
    assert "goes through aten.relu" in refused(lambda q, k, v: block(2)(q, k, v).relu(), inputs(1, 5, 5, 2, 16))
    columns = [numbers(1, 2, 16, 5, seed=i) for i in range(3)]
    turned = [lambda q, k, v: F.scaled_dot_product_attention(q.mT, k.mT, v.mT)]
    assert "next to each other" in refused(turned[0], columns)


# --- how the work is cut


@pytest.mark.parametrize("core", [AVX512, AVX2, GENERIC, Core(4, 32)], ids=["avx512", "avx2", "generic", "neon"])
@pytest.mark.parametrize("width", [8, 16, 64, 80, 128, 256])
def test_tiles_fit_the_registers(core: Core, width: int) -> None:
    t = choose(core, width)
    for v in range(1, t.vectors + 1):
        assert v * t.key_rows(v) + v + 1 <= core.registers
    assert t.out_rows * t.out_vectors + t.out_vectors + 1 <= core.registers
    assert sum(t.out_widths(width)) == width and min(t.out_widths(width)) > 0
    assert width % t.unroll == 0
    assert 4 * width * t.panel <= core.l1


def test_code_for_another_machine() -> None:
    graph = graph_of(block(2), inputs(3, 37, 37, 2, 16), ON_ANY)
    for core, target in ((Core(4, 32), cross_neon()), (GENERIC, level("generic", set()))):
        assert compile_kernel(lower_attention(graph, core).kernel, target).code.startswith(b"\x7fELF")


def test_threads_share_heads_and_panels() -> None:
    lowered = lower_attention(graph_of(block(2), inputs(2, 200, 200, 2, 16)), AVX512)
    (loop,) = lowered.kernel.body
    assert isinstance(loop, Loop) and loop.kind is LoopKind.PARALLEL
    assert loop.hi == 2 * 2 * math.ceil(200 / 64)
