"""Kernels for GPUs on a machine without one: their meaning, their text in Triton's interpreter, code for three architectures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import hotfuse
from hotfuse import Settings
from hotfuse.backends.device_code import GpuTarget
from hotfuse.backends.library import LibraryBackend
from hotfuse.backends.triton import instructions
from hotfuse.backends.triton.device_build import build, loaded, triton_missing
from hotfuse.backends.triton.emit import NAME, TritonSource, emit
from hotfuse.base.errors import HotfuseError
from hotfuse.cli.device_kernels import show_device_kernels
from hotfuse.compile.device import units
from hotfuse.compile.device.constant_masks import without_idle_masks
from hotfuse.compile.device.launch import generated, observed_strides
from hotfuse.compile.device.trial import MAX_COMPARED, sampled
from hotfuse.compile.request_bodies import DevicePlanRequest, DeviceUnitRequest
from hotfuse.ir.graph import sources
from hotfuse.ir.text import parse, show
from hotfuse.ir.types import DType
from hotfuse.lower.common.errors import CannotLower
from hotfuse.lower.common.lowered import Lowered
from hotfuse.lower.gpu import GpuTiling, gpu_tilings, lower_gpu
from hotfuse.ops import bounded_attention as _operator  # noqa: F401 - which torch knows by its name from then on
from hotfuse.tile import isa
from hotfuse.tile.build import KernelBuilder
from hotfuse.tile.interpreter import run as interpret_tiles
from hotfuse.tile.memory import NUMPY
from hotfuse.tile.program import BufferKind, Kernel, TileType
from tests.contract.lowering import Group, group_of, interpret

needs_triton = pytest.mark.skipif(bool(triton_missing()), reason=triton_missing())
TARGETS = (GpuTarget("cuda", "80"), GpuTarget("cuda", "90"), GpuTarget("hip", "gfx942", 64))
Tensor = torch.Tensor


def half(*shape: int) -> Tensor:
    return torch.randn(*shape).half()


def heads(t: Tensor, count: int) -> Tensor:
    batch, length, width = t.shape
    return t.view(batch, length, count, width // count).transpose(1, 2)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(heads(q, 3), heads(k, 3), heads(v, 3)).transpose(1, 2).reshape(q.shape)


def masked(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=m)


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


CASES: dict[str, tuple[Callable[..., Any], Callable[[], Sequence[Tensor]]]] = {
    "pointwise": (lambda x, y: F.gelu(x) * y, lambda: (torch.randn(3, 5, 70), torch.randn(70))),
    "turned": (lambda x, y: x.transpose(1, 2) + y, lambda: (torch.randn(2, 6, 20), torch.randn(2, 20, 6))),
    "layer norm": (lambda x, y, w, b: F.layer_norm(x + y, (72,), w, b),
                   lambda: (half(2, 5, 72), half(2, 5, 72), half(72), half(72))),
    "softmax": (lambda x: torch.softmax(x * 0.5, -1), lambda: (torch.randn(4, 7, 33),)),
    "means": (lambda x: x.mean((1, 2)), lambda: (torch.randn(4, 7, 33),)),
    "extremes": (lambda x: (x.amax(-1), x.amin(-1)), lambda: (torch.randn(5, 33),)),
    "product": (lambda x, w, b, r: F.gelu(F.linear(x, w, b)) + r,
                lambda: (half(1, 40, 96), half(72, 96), half(72), half(1, 40, 72))),
    "two sums": (lambda x, w, u: F.silu(F.linear(x, w)) * F.linear(x, u), lambda: (half(2, 20, 90), half(72, 90), half(72, 90))),
    "several": (lambda x, w, u: (F.linear(x, w), F.linear(x, u)), lambda: (half(2, 20, 96), half(72, 96), half(40, 96))),
    "one row": (lambda x, w, b: F.silu(F.linear(x, w, b)), lambda: (half(1, 1, 90), half(72, 90), half(72))),
    "batched": (lambda x, y: torch.bmm(x, y.transpose(1, 2)), lambda: (torch.randn(3, 20, 24), torch.randn(3, 30, 24))),
    "attention": (attention, lambda: (half(1, 18, 48), half(1, 18, 48), half(1, 18, 48))),
    "masked": (masked, lambda: (torch.randn(2, 2, 9, 20), torch.randn(2, 2, 19, 20), torch.randn(2, 2, 19, 20),
                                torch.rand(2, 1, 9, 19) > 0.3)),
    "grouped": (grouped, lambda: (torch.randn(2, 4, 37, 20), torch.randn(2, 2, 37, 20), torch.randn(2, 2, 37, 20))),
}  # fmt: skip
TEMPLATES = ("pointwise", "layer norm", "several", "two sums", "attention")
CONSTANT_BOUNDS = tuple(name for name in CASES if name != "grouped")
"""Triton's interpreter cannot count to a number that it computed, with NumPy 2.4: a causal loop ends at its block of queries."""


def lowered(name: str) -> tuple[Group, Sequence[Tensor], Sequence[GpuTiling]]:
    fn, make = CASES[name]
    tensors = make()
    made = group_of(fn, tensors)
    return made, tensors, gpu_tilings(made.graph)


def reference(name: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    found = CASES[name][0](*(t.double() if t.is_floating_point() else t for t in tensors))
    return list(found) if isinstance(found, tuple) else [found]


def close(got: Sequence[Tensor], want: Sequence[Tensor]) -> None:
    assert len(got) == len(want)
    for g, w in zip(got, want, strict=True):
        allowed = 5e-3 if g.dtype is torch.half else 1e-5
        assert g.shape == w.shape
        assert float((g.double() - w).abs().max()) <= allowed * float(w.abs().max())


@pytest.mark.parametrize("name", CASES)
def test_kernels_mean_what_the_group_does(name: str) -> None:
    made, tensors, tilings = lowered(name)
    for tiling in tilings[:2]:
        close(interpret(lower_gpu(made.graph, tiling), made, tensors), reference(name, tensors))


def counting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Triton's interpreter count from and to numbers that it computed: since NumPy 2.4 an array of one element is no number."""
    from triton.runtime import interpreter

    patched: Any = interpreter._patch_lang_tensor  # pyright: ignore[reportPrivateUsage]

    def patch(tensor: Any, scope: Any) -> None:
        patched(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch)


class Interpreted:
    """A kernel's text in Triton's interpreter, on memory of the host."""

    def __init__(self, source: TritonSource, folder: Path) -> None:
        import triton

        self.grid, self.blocks, self.workspace, self.counters = source.grid, source.blocks, source.workspace, source.counters
        with triton.knobs.runtime.scope():
            triton.knobs.runtime.interpret = True
            self.function = vars(loaded(source, folder))[NAME]

    def __call__(self, *tensors: Tensor) -> None:
        import triton
        from triton.tools.tensor_descriptor import TensorDescriptor

        matrices = [TensorDescriptor(tensors[b.argument], list(b.shape), [b.stride, 1], list(b.block)) for b in self.blocks]
        with triton.knobs.runtime.scope():
            triton.knobs.runtime.interpret = True
            shared = [torch.full((self.workspace,), float("nan")), torch.zeros(self.counters, dtype=torch.int32)]
            self.function[(self.grid,)](*tensors, *(shared if self.counters else []), *matrices)
            assert not shared[1].any()


class ByAddress:
    """The same behind a launch: whose memory it is shows by its address."""

    def __init__(self, run: Interpreted, tensors: Sequence[Tensor]) -> None:
        self.run, self.known = run, {t.data_ptr(): t for t in tensors}
        self.launched = 0

    def launch(self, pointers: list[int], stream: int) -> None:
        self.launched += 1
        self.run(*(self.known[p] for p in pointers))


def interpreted(made: Group, low: Lowered, tiling: GpuTiling, tensors: Sequence[Tensor], folder: Path) -> list[Tensor]:
    """Run by `compile.device.launch`, with strides as they are."""
    graph = made.graph
    strides = observed_strides(sources(graph), {v.name: t for v, t in zip(sources(graph), tensors, strict=True)})
    run = Interpreted(emit(low.kernel, tiling.stages, bulk=tiling.bulk, split=tiling.split, programs=tiling.programs), folder)
    behind = ByAddress(run, tensors)
    kernel = generated(graph, low, strides, behind, torch.device("cpu"))
    room: list[Tensor] = []

    def launch(pointers: list[int], stream: int) -> None:
        behind.known |= {t.data_ptr(): t for t in room}
        ByAddress.launch(behind, pointers, stream)

    behind.launch = launch
    empty = torch.empty_strided

    def poisoned(*args: Any, **named: Any) -> Tensor:
        room.append(empty(*args, **named).fill_(77))
        return room[-1]

    torch.empty_strided = poisoned
    try:
        outs = kernel(*tensors)
    finally:
        torch.empty_strided = empty
    assert behind.launched == 1
    return list(outs)


@needs_triton
@pytest.mark.parametrize("name", CONSTANT_BOUNDS)
def test_their_text_computes_the_same_in_the_interpreter(name: str, tmp_path: Path) -> None:
    made, tensors, tilings = lowered(name)
    low = lower_gpu(made.graph, tilings[0])
    close(interpreted(made, low, tilings[0], tensors, tmp_path), reference(name, tensors))


BULK = {
    "tails of rows and columns": (lambda x, w, b: F.gelu(F.linear(x, w, b)), lambda: (half(1, 70, 96), half(40, 96), half(40))),
    "a tail of steps": (lambda x, w: F.linear(x, w), lambda: (half(64, 104), half(32, 104))),
    "not turned": (lambda x, w: torch.matmul(x, w), lambda: (half(64, 64), half(64, 48))),
    "two matrices": (lambda x, w, u: (F.linear(x, w), F.linear(x, u)), lambda: (half(64, 64), half(72, 64), half(40, 64))),
}  # fmt: skip


@needs_triton
@pytest.mark.parametrize("name", BULK)
def test_bulk_copies_read_the_same(name: str, tmp_path: Path) -> None:
    fn, make = BULK[name]
    tensors = make()
    made = group_of(fn, tensors)
    tiling = GpuTiling(64, 16, 64, 4, 2, bulk=True)
    source = emit(lower_gpu(made.graph, tiling).kernel, 2, dependent=True, bulk=True)
    assert len(source.blocks) == (3 if name == "two matrices" else 2) and "tl.load(p0" not in source.text, source.text
    found = fn(*(t.double() for t in tensors))
    got = interpreted(made, lower_gpu(made.graph, tiling), tiling, tensors, tmp_path)
    close(got, found if isinstance(found, tuple) else [found])
    built = build(source, GpuTarget("cuda", "90"), 4, dependent=True)
    assert "cp.async.bulk.tensor" in built.texts["ptx"] and len(built.descriptors) == len(source.blocks)


@needs_triton
@pytest.mark.parametrize("bulk", [False, True])
def test_programs_that_share_a_product_add_its_parts_up(bulk: bool, tmp_path: Path) -> None:
    def gated(x: Tensor, w: Tensor, u: Tensor, r: Tensor) -> Tensor:
        return F.silu(F.linear(x, w)) * F.linear(x, u) + r

    tensors = (half(40, 256), half(48, 256) / 8, half(48, 256) / 8, half(40, 48))
    made = group_of(gated, tensors)
    tiling = GpuTiling(64, 16, 32, 4, 2, bulk=bulk, split=4)
    low = lower_gpu(made.graph, tiling)
    close(interpreted(made, low, tiling, tensors, tmp_path), [gated(*(t.double() for t in tensors))])
    built = build(emit(low.kernel, 2, dependent=True, bulk=bulk, split=4), GpuTarget("cuda", "90"), 4, dependent=True)
    assert built.counters == 3 and built.grid == 12 and built.workspace == 12 * 2 * 64 * 16 and "atom." in built.texts["ptx"]


TURNS = {
    "one product": (lambda x, w, b, r: F.gelu(F.linear(x, w, b)) + r,
                    lambda: (half(150, 64), half(80, 64), half(80), half(150, 80))),
    "three": (lambda x, w, u, v: (F.linear(x, w), F.linear(x, u), F.relu(F.linear(x, v))),
              lambda: (half(150, 64), half(80, 64), half(32, 64), half(96, 64))),
}  # fmt: skip


@needs_triton
@pytest.mark.parametrize("name", TURNS)
@pytest.mark.parametrize("bulk", [False, True])
def test_programs_that_make_tiles_in_turns(name: str, bulk: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counting(monkeypatch)
    fn, make = TURNS[name]
    tensors = make()
    made = group_of(fn, tensors)
    tiling = GpuTiling(64, 32, 32, 4, 2, bulk=bulk, programs=4)  # 9 tiles, or 9 and 3 and 9
    low = lower_gpu(made.graph, tiling)
    found = fn(*(t.double() for t in tensors))
    close(interpreted(made, low, tiling, tensors, tmp_path), found if isinstance(found, tuple) else [found])
    source = emit(low.kernel, 2, dependent=True, bulk=bulk, programs=4)
    built = build(source, GpuTarget("cuda", "90"), 4, dependent=True)
    stores = "cp.async.bulk.tensor.2d.global" in built.texts["ptx"]
    assert built.grid == 4 and stores is bulk
    with pytest.raises(CannotLower, match="take turns"):
        emit(low.kernel, 2, programs=21)


@needs_triton
def test_wide_tiles_are_stored_in_halves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counting(monkeypatch)
    tensors = (half(300, 64), half(264, 64), half(264))
    made = group_of(lambda x, w, b: F.gelu(F.linear(x, w, b)), tensors)
    tiling = GpuTiling(64, 128, 64, 4, 2, bulk=True, programs=4)
    low = lower_gpu(made.graph, tiling)
    close(interpreted(made, low, tiling, tensors, tmp_path), [F.gelu(F.linear(*(t.double() for t in tensors)))])
    assert "tl.split(" in emit(low.kernel, 2, bulk=True, programs=4).text


@needs_triton
def test_gelu_of_16_bits_is_off_by_less_than_their_rounding(tmp_path: Path) -> None:
    x = torch.cat([torch.linspace(-12, 12, 4090), torch.tensor([float("nan"), float("inf"), 0.0, -0.0, 1e-7, -3e4])]).half()[None]
    made = group_of(lambda x: F.gelu(x), (x,))
    tiling = gpu_tilings(made.graph)[0]
    low = lower_gpu(made.graph, tiling)
    assert "_normal_of_16_bits(t" in emit(low.kernel).text
    (got,) = interpreted(made, low, tiling, (x,), tmp_path)
    want = F.gelu(x.double())
    assert torch.equal(got.isnan(), want.isnan()) and got[0, 4091] == float("inf")
    finite = want.isfinite()
    assert bool(((got.double() - want).abs()[finite] <= 2.6e-5 + 2.0**-11 * want.abs()[finite]).all())
    wide = lower_gpu(group_of(lambda x: F.gelu(x), (x.float(),)).graph, tiling)
    assert "_normal_of_16_bits(t" not in emit(wide.kernel).text


def packed_rows(lengths: Sequence[int], room: int, kv_heads: int = 4) -> tuple[Tensor, ...]:
    """Queries, keys, values of sequences one behind the other, and rows of none; offsets."""
    return half(room, 64), half(room, 16 * kv_heads), half(room, 16 * kv_heads), torch.tensor([0, *lengths]).cumsum(0)


def packed_attention(causal: bool, kv_heads: int = 4) -> Callable[..., Tensor]:
    def fn(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor) -> Tensor:
        q, k, v = q.view(-1, 4, 16), k.view(-1, kv_heads, 16), v.view(-1, kv_heads, 16)
        return torch.ops.hotfuse.bounded_packed_attention(q, k, v, offsets, None, 0.3, 40, causal).reshape(-1, 64)

    return fn


@needs_triton
@pytest.mark.parametrize(("causal", "kv_heads"), [(False, 4), (True, 2)])
def test_packed_attention_reads_where_sequences_lie(
    causal: bool, kv_heads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counting(monkeypatch)
    fn = packed_attention(causal, kv_heads)
    tensors = packed_rows((3, 1, 37, 40, 0, 20), 128, kv_heads)
    made = group_of(fn, tensors)
    tiling = replace(gpu_tilings(made.graph)[1], rows=16, depth=32)
    low = lower_gpu(made.graph, tiling)
    run = Interpreted(emit(low.kernel, 2), tmp_path)
    for lengths in ((3, 1, 37, 40, 0, 20), (40, 40, 40, 8, 0, 0), (0, 0, 0, 0, 0, 1)):  # one kernel for every mask
        tensors = packed_rows(lengths, 128, kv_heads)
        live, want = sum(lengths), fn(*(t.double() if t.is_floating_point() else t for t in tensors))
        (meant,) = interpret(low, made, tensors)
        out = torch.full((128, 64), 77.0).half()
        given = {v.name: t for v, t in zip(sources(made.graph), tensors, strict=True)}
        run(*(given.get(a.value, out) for a in low.arguments))
        close([meant[:live], out[:live]], [want[:live], want[:live]])
        assert bool((out[live:] == 77).all()), "rows of no sequence are not written"
    for target in TARGETS:
        source = emit(low.kernel, 2, dependent=target.dependent)
        assert build(source, target, 4, dependent=target.dependent).code[:4] == b"\x7fELF"


def test_places_far_from_the_beginning_are_computed_in_64_bits() -> None:
    near = group_of(packed_attention(causal=False), packed_rows((3, 5), 16)).graph
    far = parse(show(near).replace("[16, ", f"[{1 << 25}, "))
    for graph, narrow in ((near, True), (far, False)):
        head = emit(lower_gpu(graph, GpuTiling(16, 16, 16)).kernel).text.split("def kernel")[1].split("tl.range")[0]
        assert ("tl.load(p0 + (i1) * 1).to(tl.int32)" in head) is narrow and ("to(tl.int64)" in head) is not narrow


def test_packed_attention_that_is_left_to_the_library() -> None:
    tensors = packed_rows((3, 5), 16)
    narrow = group_of(packed_attention(causal=False), (*tensors[:3], tensors[3].int())).graph
    with pytest.raises(CannotLower, match="types"):
        lower_gpu(narrow, GpuTiling(16, 16, 16))


def test_sums_that_cannot_be_shared_are_refused() -> None:
    product = lower_gpu(group_of(lambda x, w: F.linear(x, w), (half(32, 96), half(32, 96))).graph, GpuTiling(32, 32, 32)).kernel
    with pytest.raises(CannotLower, match="cannot be shared"):
        emit(product, split=2)
    norm = lowered("layer norm")
    with pytest.raises(CannotLower, match="no one loop"):
        emit(lower_gpu(norm[0].graph, norm[2][0]).kernel, split=2)


def test_trials_compare_a_bounded_part_of_large_results() -> None:
    large, small = torch.arange(1 << 21).reshape(4, 512, 1024), torch.randn(3, 5)
    some, same, word = sampled([large, small, "x"])
    assert same is small and word == "x" and some.shape[1] == 1024 and some.numel() <= MAX_COMPARED + 4096
    assert torch.equal(some[0], large[0, 0]) and torch.equal(some[-1], large[-1, -1])


@needs_triton
def test_weights_are_asked_for_before_the_wait_and_other_operands_before_the_loop() -> None:
    tensors = (half(32, 96), half(64, 96), half(64), half(32, 64))
    kernel = lower_gpu(group_of(lambda x, w, b, r: F.linear(x, w, b) + r, tensors).graph, GpuTiling(32, 32, 32, 4, 2)).kernel
    weight = next(b for b in kernel.buffers if b.shape == (64 * 96,))
    kernel = replace(kernel, buffers=tuple(replace(b, kind=BufferKind.CONST) if b is weight else b for b in kernel.buffers))
    source = emit(kernel, 2, dependent=True)
    order = [source.text.rindex(part) for part in ("_prefetch(p1", "gdc_wait()", "tl.load(p3", "tl.range(", "tl.load(p1")]
    assert order == sorted(order), source.text
    assert "prefetch.global.L2" in build(source, GpuTarget("cuda", "90"), 4, dependent=True).texts["ptx"]
    assert "_prefetch(p" not in emit(kernel, 2).text


def test_what_is_no_block_of_a_matrix_is_loaded_by_threads() -> None:
    def windows(x: Tensor, w: Tensor) -> Tensor:  # rows that overlap: 8 elements further each, 64 long
        return F.linear(x.as_strided((32, 64), (8, 1)), w)

    tensors = (half(512), half(32, 64))
    try:
        low = lower_gpu(group_of(windows, tensors).graph, GpuTiling(32, 32, 64, 4, 2))
    except CannotLower:
        return
    assert "p0" not in "".join(line for line in emit(low.kernel, 2, bulk=True).text.splitlines() if ".load([" in line)


@needs_triton
def test_rows_that_see_no_key_and_numbers_that_are_not_finite(tmp_path: Path) -> None:
    _, (q, k, v, m), _ = lowered("masked")
    m[0, 0, 3] = False
    v[1, 1, 7, 5] = float("nan")
    tensors = (q, k, v, m)
    made = group_of(masked, tensors)
    tiling = gpu_tilings(made.graph)[0]
    (got,) = interpreted(made, lower_gpu(made.graph, tiling), tiling, tensors, tmp_path)
    want = masked(q.double(), k.double(), v.double(), m)
    assert torch.equal(got[0, :, 3], torch.zeros_like(got[0, :, 3]))
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.allclose(got.double().nan_to_num(), want.nan_to_num(), rtol=1e-4, atol=1e-5)


@needs_triton
@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.arch)
def test_device_code_for_every_architecture(name: str, target: GpuTarget) -> None:
    made, _, tilings = lowered(name)
    tiling = tilings[-1]
    source = emit(lower_gpu(made.graph, tiling).kernel, tiling.stages, dependent=target.dependent)
    built = build(source, target, tiling.warps, dependent=target.dependent)
    assert built.code[:4] == b"\x7fELF" and built.grid == source.grid and built.dependent is (target.arch == "90")
    assert ("griddepcontrol.wait" in built.texts.get("ptx", "")) is target.dependent


def one_instruction(name: str, dtype: DType, out: DType, arity: int) -> Kernel:
    b = KernelBuilder(name)
    places = [b.input(f"x{i}", dtype, (64,)) for i in range(arity)]
    y = b.output("y", out, (64,))
    with b.parallel("i", 64, 64):
        tiles = [b.load(p, (0,), (64,)) for p in places]
        if name == "select":
            tiles[0] = b.map("gt", tiles[0], b.fill(0, dtype))
        b.store(y, (0,), b.cast(b.map(name, *tiles), out))
    return b.finish()



@needs_triton
@pytest.mark.parametrize("name", instructions.MAPS)
def test_each_function_is_what_the_isa_says(name: str, tmp_path: Path) -> None:
    row = isa.row(f"map.{name}")
    for dtype in (DType.F32, DType.I32):
        if dtype not in row.dtypes:
            continue
        tiles = tuple(_tile(dtype if i or name != "select" else DType.BOOL) for i in range(row.arity))
        (made,) = isa.out_types(f"map.{name}", tiles)
        out = DType.I8 if made.dtype is DType.BOOL else made.dtype
        kernel = one_instruction(name, dtype, out, row.arity)
        given = [_numbers(name, dtype) for _ in range(row.arity)]
        want, got = (torch.zeros(64, dtype=getattr(torch, instructions.TYPES[out])) for _ in range(2))
        interpret_tiles(kernel, {**{f"x{i}": t.numpy() for i, t in enumerate(given)}, "y": want.numpy()}, {})
        Interpreted(emit(kernel), tmp_path)(*given, got)
        assert torch.allclose(got.double(), want.double(), rtol=2e-6, atol=1e-6, equal_nan=True), (name, dtype)


def _tile(dtype: DType) -> Any:
    return KernelBuilder("t").tile(TileType(dtype, (64,)))


def _numbers(name: str, dtype: DType) -> Tensor:
    if dtype is DType.I32:
        x = torch.randint(-50, 50, (64,), dtype=torch.int32)
        return torch.where(x == 0, 7, x).int()
    x = torch.randn(64) * 3
    if name in ("log", "log2", "log1p", "sqrt", "rsqrt"):
        x = x.abs() + 1e-3
    elif name not in ("rem", "mod", "div", "recip", "sin", "cos"):
        x[:6] = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), float("nan"), 0.5])
    return x


def test_what_has_no_emission_is_listed_and_refused() -> None:
    absent = instructions.missing()
    assert "scatter" in absent and "require" in absent and "map.add" not in absent and "mma" not in absent
    b = KernelBuilder("count")
    x, y = b.input("x", DType.F32, (16,)), b.output("y", DType.F32, (16,))
    with b.parallel("i", 16, 16):
        b.store(y, (0,), b.scan("sum", b.load(x, (0,), (16,)), 0))
    with pytest.raises(CannotLower, match=r"scan\.sum"):
        emit(b.finish())


@pytest.mark.parametrize(("fn", "tensors"), [
    (lambda x: x + 1, (torch.empty(0, 3),)),
    (lambda x: x.cumsum(-1), (torch.randn(3, 5),)),
    (lambda x: torch.cat([x, x], -1) * 2, (torch.randn(3, 5),)),
    (lambda x, y: x @ y, (torch.randn(4, 5, dtype=torch.double), torch.randn(5, 6, dtype=torch.double))),
], ids=["empty", "running sum", "pieces", "f64"])  # fmt: skip
def test_what_is_left_to_the_library_says_why(fn: Callable[..., Any], tensors: Sequence[Tensor]) -> None:
    made = group_of(fn, tensors)
    with pytest.raises(CannotLower) as refused:
        for tiling in gpu_tilings(made.graph):
            emit(lower_gpu(made.graph, tiling).kernel)
    assert refused.value.because


def test_a_graph_is_grouped_and_a_unit_compiled_as_a_worker_does() -> None:
    def block(x: Tensor, w: Tensor, g: Tensor) -> Tensor:
        y = F.linear(x, w) + x
        z = y.float()
        return (z * torch.rsqrt(z.pow(2).mean(-1, keepdim=True) + 1e-6)).half() * g

    tensors = (half(1, 24, 32), half(32, 32), half(32))
    made = group_of(block, tensors)
    answer, _ = units.plan(DevicePlanRequest(show(made.graph)))
    graph, at = parse(answer.graph), 0
    kinds: list[tuple[str, list[str]]] = []
    for count, kind in answer.groups:
        kinds.append((kind, [n.op.split(".")[1] for n in graph.nodes[at : at + count]]))
        at += count
    assert [ops[0] for kind, ops in kinds if kind != "library"] == ["linear", "to"], kinds  # f32 is made where the norm reads it
    if triton_missing():
        return
    request = DeviceUnitRequest(show(made.graph), {}, ("cuda", "90", 32), tf32=False, share=(0, 1))
    made_of, codes = units.unit(request)
    assert not codes and made_of.because  # the whole block is no one kernel
    made_of, codes = units.unit(replace(request, graph=show(group_of(lambda x: F.relu(x) * 2, (half(8, 16),)).graph)))
    assert codes and all(code[:4] == b"\x7fELF" for code in codes)
    assert all(k.built["grid"] == 1 and k.tiling for k in made_of.kernels)


@pytest.mark.parametrize(("hides", "kept"), [(False, False), (True, True)])
def test_a_mask_that_hides_nothing_by_itself_is_left_out(hides: bool, kept: bool) -> None:
    def attend(q: Tensor) -> Tensor:
        mask = (torch.arange(6) >= (3 if hides else 0))[None, None, None].expand(1, 1, 6, 6)
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask)

    q = torch.randn(1, 2, 6, 8)
    before = group_of(attend, (q,)).graph
    after = without_idle_masks(before)
    assert any("arange" in n.op for n in after.nodes) is kept
    (got,), (want,) = (LibraryBackend().compile(g, {}).run(q) for g in (after, before))
    assert torch.allclose(got, want, atol=1e-6)


def test_a_mask_that_hides_nothing_at_any_size_is_left_out() -> None:
    class Attends(torch.nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            rows = torch.arange(q.shape[2])
            mask = ((rows >= 0) & (rows + 3 > -1))[None, None, :, None].expand(q.shape[0], -1, -1, q.shape[2])
            return F.scaled_dot_product_attention(q, q, q, attn_mask=mask | (rows > 1))

    fast: Any = hotfuse.jit(Attends(), settings=Settings(capture="inline", tiers=0))
    for n in (6, 9, 12, 6, 9, 7):
        fast(torch.randn(1, 2, n, 8))
    (site,) = fast._engine.sites.values()
    before = next(e for e in site.entries if e.symbols).baseline.graph
    after = without_idle_masks(before)
    assert any("arange" in n.op for n in before.nodes) and not any("arange" in n.op for n in after.nodes)
    q = torch.randn(1, 2, 5, 8)
    (got,), (want,) = (LibraryBackend().compile(g, {}).run(q) for g in (after, before))
    assert torch.allclose(got, want, atol=1e-6)
    fast.close()


@needs_triton
def test_a_kernel_that_triton_cannot_compile_is_an_error_in_words() -> None:
    with pytest.raises(HotfuseError, match="cannot compile"):
        build(TritonSource("import triton\n\n\n@triton.jit\ndef kernel(p0):\n    nothing\n", ("*fp32",), 1), TARGETS[0], 4)


def test_numbers_of_every_type_have_a_name() -> None:
    assert set(NUMPY) == set(instructions.TYPES) == set(instructions.POINTERS)
    assert np.dtype(np.float32).name == instructions.TYPES[DType.F32]


def test_the_command_line_shows_kernels_and_why_there_are_none(capsys: pytest.CaptureFixture[str]) -> None:
    x = torch.randn(4, 16)
    graph = group_of(lambda x: F.gelu(x).cumsum(-1), (x,)).graph
    show_device_kernels(graph, [(4, 16)], "triton", "", as_json=False)
    said = capsys.readouterr().out
    assert "no kernel: " in said or "def kernel(" in said
    graph = group_of(lambda x: F.gelu(x) + 1, (x,)).graph
    show_device_kernels(graph, [(4, 16)], "triton", "gelu", as_json=False)
    assert "def kernel(p0, p1):" in capsys.readouterr().out
    with pytest.raises(HotfuseError, match="no kernel has"):
        show_device_kernels(graph, [(4, 16)], "triton", "attention", as_json=False)
    if not triton_missing():
        show_device_kernels(graph, [(4, 16)], "ptx", "", as_json=False)
        assert ".target sm_90a" in capsys.readouterr().out


@pytest.mark.parametrize(("fn", "shapes"), [
    (torch.matmul, ((1, 32, 1), (1, 1, 20))),
    (lambda x, w: F.linear(x, w), ((4, 20), (1, 20))),
    (lambda q, k: F.scaled_dot_product_attention(q, k, k), ((1, 2, 5, 1), (1, 2, 7, 1))),
], ids=["one step", "one column", "heads of one element"])  # fmt: skip
def test_extents_of_one_that_no_tile_has_an_axis_for_are_refused(fn: Callable[..., Any], shapes: Sequence[Sequence[int]]) -> None:
    made = group_of(fn, [torch.randn(*s) for s in shapes])
    with pytest.raises(CannotLower):
        lower_gpu(made.graph, (gpu_tilings(made.graph) or [GpuTiling(16, 16, 16)])[0])
