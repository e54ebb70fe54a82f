"""Work is divided evenly among threads: numbers of tasks as pure functions, and kernels cut for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from hotfuse.compile.host import host_core
from hotfuse.lower import lower
from hotfuse.lower.cpu import thread_work, work_division
from hotfuse.lower.cpu.attention import tiling as attention_tiling
from hotfuse.lower.cpu.conv import winograd
from hotfuse.lower.cpu.conv.shape import Axis
from hotfuse.lower.cpu.thread_work import trips
from hotfuse.lower.cpu.tiling import Core
from hotfuse.native.target import CpuTarget, host
from hotfuse.tile.program import Instr, Kernel, Loop, LoopKind, Stmt
from tests.contract.convolving import check, text
from tests.contract.lowering import group_of, run_native

CORE = Core(16, 32, 48 << 10, 2 << 20)
EVERY = range(1, 65)


@pytest.mark.parametrize("threads", EVERY)
def test_groups_of_rows_are_shared_evenly(threads: int) -> None:
    for panels in (1, 2, 3, 5, 7, 16, 21, 24, 48, 64, 100, 1000):
        groups = work_division.groups(panels, threads)
        assert isinstance(groups, int) and groups * panels >= min(16, threads)
        if threads > 2:
            assert work_division.balance(groups * panels, threads) >= work_division.EVEN, (panels, groups)
        assert groups < 17 + threads, "no more than are needed"


@pytest.mark.parametrize("threads", EVERY)
def test_parts_of_rows_leave_nobody_with_much_more(threads: int) -> None:
    for rows in (0, 1, 2, 7, 14, 28, 56, 112, 224):
        for panels in (1, 2, 3, 6, 11, 32):
            for least in (1, 4):
                parts = work_division.parts(rows, panels, threads, least)
                assert isinstance(parts, int) and 0 <= parts <= rows and (parts > 0) == (rows > 0)
                if rows and threads > 2:
                    longest = work_division.rounds(parts * panels, threads) * -(-rows // parts)
                    finest = work_division.rounds(rows * panels, threads)
                    assert longest <= 1.1 * finest + 2, (rows, panels, parts)


def test_shares_of_unequal_tasks() -> None:
    assert work_division.largest_share(4, 2, [1, 1, 1, 1]) == 1.0
    assert work_division.largest_share(4, 2, [1, 1, 1, 3]) == pytest.approx(4 / 3)
    assert work_division.largest_share(0, 4, []) == 1.0
    assert work_division.balance(24, 16) == 0.75 and work_division.balance(48, 16) == 1.0 and work_division.balance(0, 3) == 1.0


def loops(stmts: Sequence[Stmt]) -> Iterator[Loop]:
    for s in stmts:
        if isinstance(s, Instr):
            continue
        if isinstance(s, Loop) and s.kind is LoopKind.PARALLEL:
            yield s
        yield from loops(s.body)


def tasks(kernel: Kernel) -> int:
    (loop,) = loops(kernel.body)
    count = trips(loop)
    assert isinstance(count, int)
    return count


@pytest.mark.parametrize("threads", [3, 4, 7, 8, 12, 16, 24, 32, 64])
@pytest.mark.parametrize(("n", "k"), [(768, 768), (2304, 768), (3072, 768), (768, 3072), (1000, 512), (1024, 4096)])
def test_every_thread_gets_the_same_share_of_a_product(n: int, k: int, threads: int) -> None:
    weight = torch.randn(n, k)
    found = group_of(lambda x: F.linear(x, weight), [torch.randn(128, k)], constants=True)
    kernel = lower(found.graph, replace(CORE, threads=threads)).kernel
    count = tasks(kernel)
    possible = work_division.balance(15 * -(-n // 48), threads)  # blocks of rows by panels of 48 columns
    assert work_division.balance(count, threads) >= min(work_division.EVEN, possible - 0.02), (count, threads)


@pytest.mark.parametrize("threads", EVERY)
def test_panels_of_queries_are_shared_evenly(threads: int) -> None:
    plain = attention_tiling.choose(CORE, 64)
    for heads, queries in ((12, 128), (12, 384), (16, 197), (8, 1), (96, 128), (1, 50)):
        found = attention_tiling.shared(plain, heads, queries, threads)

        def longest(vectors: int, heads: int = heads, queries: int = queries) -> int:
            return work_division.rounds(heads * -(-queries // (16 * vectors)), threads) * min(vectors, -(-queries // 16))

        assert longest(found.vectors) <= longest(plain.vectors)
    assert attention_tiling.shared(plain, 12, 128, 16).vectors == 2, "48 tasks for 16 threads, not 24"


@pytest.mark.parametrize("threads", [1, 2, 3, 8, 16, 64])
def test_transformed_convolutions_have_tasks_for_all(threads: int) -> None:
    for size, channels in ((28, 64), (56, 64), (14, 256), (7, 512)):
        axis = Axis(size, 3, padding=1, count=size)
        how = winograd.cut(replace(CORE, threads=threads), axis, axis, 1, channels, channels)
        assert how is not None
        tiles = winograd.tile_count((axis, axis), (how.down, how.across), 1)
        assert isinstance(tiles, int)
        count = -(-tiles // how.block) * how.groups
        assert count >= threads or threads == 1 or count >= tiles or how.groups >= -(-channels // how.tiling.nr) // 2, (size, how)


@pytest.fixture
def eager_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Any work is worth a thread."""
    monkeypatch.setattr(thread_work, "WORK_PER_THREAD", 1)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def attention(q: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, q, q)


@pytest.mark.usefixtures("eager_threads")
@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("threads", [3, 7, 16])
def test_kernels_cut_for_many_threads_are_right(threads: int, symbolic: bool) -> None:
    """Tails in every dim, one row, and none; products whose blocks are tasks of their own, and others."""
    core = replace(host_core(host()), threads=threads, l2=1 << 18)
    wide, deep, narrow, scale = torch.randn(500, 300), torch.randn(100, 2000) / 40, torch.randn(40, 24), torch.randn(96)
    cases: list[tuple[Callable[[torch.Tensor], torch.Tensor], int, int]] = [
        (lambda x: F.gelu(F.linear(x, wide)), 300, 2),
        (lambda x: F.linear(x, deep), 2000, 2),
        (lambda x: F.linear(x, narrow), 24, 2),
        (lambda x: torch.softmax(x, -1), 96, 2),
        (lambda x: F.layer_norm(x, (96,), scale), 96, 2),
        (attention, 32, 4),
    ]
    torch.set_num_threads(threads)
    for fn, width, rank in cases[: 5 if symbolic else 6]:
        sample: list[torch.Tensor] = []
        for rows in (130, 37, 2, 1, 0) if symbolic else (130, 37, 5, 1):
            x = torch.randn(rows, width) if rank == 2 else torch.randn(2, 3, rows, width)
            sample = sample if sample and symbolic else [x]
            found = group_of(fn, sample, symbolic, constants=True)
            (got,) = run_native(lower(found.graph, core), found, [x])
            torch.testing.assert_close(got, fn(x), rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("eager_threads")
@pytest.mark.parametrize("native", [None, host()], ids=["meaning", "native"])
@pytest.mark.parametrize("threads", [3, 16])
@pytest.mark.parametrize(("size", "window", "channels", "groups", "stride"), [
    ((7, 7), (3, 3), (32, 64), 1, 1), ((5, 9), (3, 3), (48, 48), 48, 1), ((14, 14), (1, 1), (32, 70), 1, 1),
    ((9, 11), (3, 3), (16, 33), 1, 2),
])  # fmt: skip
def test_convolutions_cut_for_many_threads_are_right(
    size: tuple[int, int], window: tuple[int, int], channels: tuple[int, int], groups: int, stride: int, threads: int,
    native: CpuTarget,
) -> None:
    torch.set_num_threads(threads)
    core = replace(host_core(host()), threads=threads)
    source = text(size, window, channels, groups=groups, stride=stride, padding=window[0] // 2)
    kernel = check(source, core, native).kernel
    most = max(t for t in (trips(loop) for loop in loops(kernel.body)) if isinstance(t, int))
    assert most >= 2
