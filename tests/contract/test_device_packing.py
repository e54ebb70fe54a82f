"""Packed rows as a device has them, on the host: what is made of a mask without a look at it, in buckets of more rows than live."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn

import hotfuse
from hotfuse import Settings
from hotfuse.analysis.shapes import Mismatch, bind
from hotfuse.compile.device import units
from hotfuse.compile.request_bodies import DevicePlanRequest
from hotfuse.fusion.kinds import GroupKind
from hotfuse.ir.graph import Graph, Value, map_node, sources
from hotfuse.ir.normal import normalized
from hotfuse.ir.subgraph import extract
from hotfuse.ir.text import parse, show
from hotfuse.ir.types import TensorType
from hotfuse.lower.gpu import gpu_tilings, lower_gpu, placeless
from hotfuse.ops.bounded_attention import NAME as BOUNDED
from hotfuse.ops.packed import NAME as PACKED
from hotfuse.ops.table import packet
from hotfuse.pipeline import compile_tier0
from hotfuse.runtime.serve.device_packing import REMEMBERED, DevicePackedRun, DevicePacker, capacity, usual_capacity
from hotfuse.runtime.serve.packing import MaskPacker, Padded
from hotfuse.runtime.tierup.padding import padded_traffic
from hotfuse.specialize.packing import PackedInput
from hotfuse.specialize.recurring_sizes import at_sizes
from hotfuse.tile.program import Loop
from tests.padded import PaddedEncoder, batch

CAPTURED = Settings(capture="inline", tiers=0)


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def on_device(graph: Graph, device: str = "cuda:0") -> Graph:
    """A graph as it is captured from a model there."""
    values = [*sources(graph), *(v for n in graph.nodes for v in n.outs)]
    there = {v.name: Value(v.name, replace(v.type, device=device)) if isinstance(v.type, TensorType) else v for v in values}
    nodes = tuple(map_node(n, dict(there), tuple(there[v.name] for v in n.outs)) for n in graph.nodes)
    params = tuple(replace(p, value=there[p.value.name]) for p in graph.params)
    outputs = tuple(there[o.name] if isinstance(o, Value) else o for o in graph.outputs)
    return replace(graph, inputs=tuple(there[v.name] for v in graph.inputs), params=params, nodes=nodes, outputs=outputs)


def packed(model: nn.Module, dynamic: bool = False) -> tuple[MaskPacker, Any]:
    """What packs, and the packed graph's run on the host."""
    fast: Any = hotfuse.jit(model.eval(), settings=CAPTURED)
    for i in range(12 if dynamic else 2):
        fast(*batch(*((2 + i % 3, 20 + i) if dynamic else (3, 16))))
    (site,) = fast._engine.sites.values()
    entry = next(e for e in site.entries if bool(e.symbols) is dynamic)
    fast.close()
    found = padded_traffic(on_device(entry.baseline.graph), entry.weights, [batch(3, 16) for _ in range(4)], ignore_outputs=False)
    graph = found.packing.graph
    made = [v.type for v in (*graph.inputs, *(v for n in graph.nodes for v in n.outs))]
    assert {t.device for t in made if isinstance(t, TensorType)} == {"cuda:0"}
    ops = [n.op for n in graph.nodes]
    assert f"{BOUNDED}.default" in ops and f"{PACKED}.default" not in ops
    return found.packer, compile_tier0(placeless(graph), entry.weights, CAPTURED)


def truth(model: nn.Module, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    return copy.deepcopy(model).double()(*(t.double() if t.is_floating_point() else t for t in inputs))


@pytest.mark.parametrize(("attends", "pools", "dynamic"), [
    ("expanded", "expanded mean", False), ("lowest", "last", True), ("filled", "largest", False), ("indexed", "weighed", True),
    ("causal", "mean", False),
])  # fmt: skip
def test_any_bucket_gives_what_the_model_gives(attends: str, pools: str, dynamic: bool) -> None:
    model = PaddedEncoder(attends, pools=pools)
    packer, plan = packed(model, dynamic)
    asks = DevicePacker(packer)
    for share in (0.1, 0.5, 1.0):
        inputs = batch(3, 16, share)
        mask = inputs[packer.mask]
        live = int(asks.facts(*inputs)[0][0])
        assert live == round(packer.share(inputs) * mask.numel())
        for bucket in sorted({live, min(live + 5, mask.numel()), mask.numel()}):
            given = asks.made(mask, torch.zeros(bucket, dtype=torch.uint8))
            torch.testing.assert_close(plan.run(*inputs, *given)[0].double(), truth(model, inputs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("attends", ["expanded", "causal"])
def test_attention_of_packed_rows_is_a_kernel(attends: str) -> None:
    packer, _ = packed(PaddedEncoder(attends))
    inputs = batch(3, 16, 0.5)
    given = [*inputs, *DevicePacker(packer).made(inputs[packer.mask], torch.zeros(40, dtype=torch.uint8))]
    sizes = bind(packer.packing.graph, [tuple(t.shape) for t in given])
    assert not isinstance(sizes, Mismatch)
    answer, _ = units.plan(DevicePlanRequest(show(at_sizes(packer.packing.graph, dict(sizes)))))
    graph, at, found = parse(answer.graph), 0, 0
    for count, kind in answer.groups:
        piece = extract(graph, range(at, at + count), "group")
        at += count
        if any(packet(n.op) == BOUNDED for n in piece.nodes):
            found += 1
            assert kind == GroupKind.ATTENTION
            kernel = lower_gpu(normalized(piece), gpu_tilings(piece)[1]).kernel
            assert any(isinstance(s, Loop) and s.given is not None for s in statements(kernel.body))
    assert found == 2


def statements(body: Sequence[Any]) -> Iterator[Any]:
    for s in body:
        yield s
        yield from statements(getattr(s, "body", ()))


def test_what_is_made_is_what_the_host_makes() -> None:
    packer, _ = packed(PaddedEncoder())
    made = tuple(what for what in PackedInput if what is not PackedInput.TOLD)  # asked on the host alone
    packer = replace(packer, packing=replace(packer.packing, inputs=made))
    for _ in range(20):
        inputs = batch(5, 13, float(torch.rand(())))
        want = packer(inputs)
        assert isinstance(want, tuple)
        mask = inputs[packer.mask]
        live = int((mask == packer.packing.mask.live).sum())
        got = DevicePacker(packer).made(mask, torch.zeros(live, dtype=torch.uint8))
        for a, b, what in zip(got, want, packer.packing.inputs, strict=True):
            assert torch.equal(a, b), what


@dataclass
class Counting:
    """A recorded run on the host."""

    buckets: list[int]

    def __call__(self, *given: torch.Tensor) -> tuple[Any, ...]:
        self.buckets.append(given[-1].shape[0])
        return ("packed",)

    @property
    def kernel_by_kernel(self) -> Any:
        return self

    def counters(self) -> Mapping[str, int]:
        return {}


def test_each_call_decides_by_its_own_mask() -> None:
    packer, _ = packed(PaddedEncoder(pools="last"))
    asks = DevicePacker(packer)
    fast: Any = Counting([])
    run = DevicePackedRun(asks, 0.6, asks.facts, fast, lambda *_: ("padded",))
    ids, mask = batch(4, 40, 0.3)
    assert run(ids, mask) == ("packed",) and run.live == int(mask.sum()) <= run.computed == fast.buckets[0] == 64
    full = torch.ones_like(mask)
    odd, empty, far = mask.clone(), mask.clone(), ids.clone()
    odd[0, 0] = 7
    empty[1] = 0
    far[0, 0] = 10**6
    refused = ((ids, full, Padded.SHARE), (ids, odd, Padded.NUMBERS), (ids, empty, Padded.EMPTY), (far, mask, Padded.INDEX))
    for *call, why in refused:
        before = run.why_not[why]
        assert run(*call) == ("padded",)
        assert run.why_not[why] == before + 1, (why, run.why_not)
    assert run.calls == 1 and isinstance(packer((ids, odd)), Padded)


def test_a_bucket_that_is_recorded_serves_slightly_smaller_calls() -> None:
    packer, _ = packed(PaddedEncoder(pools="last"))
    run = DevicePackedRun(DevicePacker(packer), 1.0, lambda *_: ("asked",), Counting([]), lambda *_: ("padded",))  # type: ignore[arg-type]
    assert [run.usual_bucket(n) for n in (1024, 960)] == [1024, 960]  # nothing is recorded yet
    assert [run.usual_bucket(n) for n in (1024, 960)] == [1024, 1024]  # now the larger one is
    assert [run.usual_bucket(n) for n in (896, 1088, 960)] == [896, 1088, 1024]  # too far, too small
    assert [run.usual_bucket(n) for n in (896, 896)] == [896, 896]  # a capacity of its own all the same


def test_the_bucket_of_generated_kernels_serves_calls_that_need_somewhat_less() -> None:
    packer, _ = packed(PaddedEncoder(pools="last"))
    run = DevicePackedRun(
        DevicePacker(packer), 1.0, lambda *_: ("asked",), Counting([]), lambda *_: ("padded",), generated=1152  # type: ignore[arg-type]
    )
    assert [run.usual_bucket(n) for n in (1152, 1088, 960, 960, 896, 1216)] == [1152, 1152, 1152, 1152, 896, 1216]
    assert usual_capacity([1024, 1152, 2048, 896]) == 1152 and usual_capacity([1024]) == 1024


def test_calls_like_the_last_ones_are_launched_before_their_masks_are_known() -> None:
    packer, _ = packed(PaddedEncoder(pools="last"))
    asks, order = DevicePacker(packer), list[str]()

    def ask(*given: torch.Tensor) -> tuple[torch.Tensor]:
        order.append("asked")
        return asks.facts(*given)

    class Packed(Counting):
        def __call__(self, *given: torch.Tensor) -> tuple[Any, ...]:
            order.append("packed")
            super().__call__(*given)
            return (given[1].sum().item(), given[-1].shape[0])

    fast: Any = Packed([])
    run = DevicePackedRun(asks, 0.8, ask, fast, lambda *_: ("padded",))
    ids = torch.randint(0, 20, (8, 200))
    full = torch.ones_like(ids)

    def mask(length: int) -> torch.Tensor:
        return (torch.arange(200)[None] >= 200 - length).long().expand(8, 200).contiguous()

    for length in (60, 63) * (REMEMBERED // 2):
        assert run(ids, mask(length)) == (8 * length, 512)
    assert (run.guessed, run.wrong) == (0, 0)
    assert run(ids, mask(61)) == (8 * 61, 512) and (run.guessed, run.wrong) == (1, 0)
    assert run(ids, mask(70)) == (8 * 70, 576) and (run.guessed, run.wrong) == (1, 1), "it needs a larger bucket"
    assert all(run(ids, mask(61))[1] == 512 for _ in range(2 * REMEMBERED)) and run.guessed > 1, "later there are guesses again"
    before = run.calls
    assert run(ids, full) == ("padded",) and run.calls == before and run.wrong == 2
    assert order.count("asked") == len(run.why_not) + run.calls


def test_what_is_made_of_a_mask_stays_within_any_bucket() -> None:
    packer, _ = packed(PaddedEncoder())
    made = tuple(what for what in PackedInput if what is not PackedInput.TOLD)  # asked on the host alone
    packer = replace(packer, packing=replace(packer.packing, inputs=made))
    for mask in (torch.ones(5, 13), torch.zeros(5, 13), torch.eye(5, 13)):
        for t in (1, 7, 20, 65):
            made = DevicePacker(packer).made(mask.to(torch.int64), torch.zeros(t, dtype=torch.uint8))
            for what, got in zip(packer.packing.inputs, made, strict=True):
                most = {PackedInput.ROWS: 64, PackedInput.OFFSETS: t, PackedInput.INVERSE: t - 1, PackedInput.FIRST: t - 1,
                        PackedInput.LAST: t - 1, PackedInput.POSITIONS: 12, PackedInput.KEY_PLACES: 12}.get(what)  # fmt: skip
                assert most is None or (int(got.min()) >= 0 and int(got.max()) <= most), (what, t)


def test_capacities_are_few_and_near() -> None:
    rows = 64 * 512
    found = {live: capacity(live, rows) for live in range(1, rows + 1, 7)}
    assert all(live <= bucket <= max(live + 63, live * 17 / 16 + 1) and bucket <= rows for live, bucket in found.items())
    assert len({bucket for live, bucket in found.items() if live >= rows // 2}) <= 17
    assert capacity(0, 0) == 1 and capacity(5, 5) == 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bounded_attention_is_packed_attention(dtype: torch.dtype) -> None:
    lengths = [3, 1, 7, 5]
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    q, k, v = torch.randn(20, 4, 8, dtype=dtype), torch.randn(20, 2, 8, dtype=dtype), torch.randn(20, 2, 6, dtype=dtype)
    for longest, causal in ((7, False), (9, False), (9, True)):
        want = hotfuse.packed_attention(q, k, v, offsets, scale=0.3, causal=causal)
        got = torch.ops.hotfuse.bounded_packed_attention(q, k, v, offsets, None, 0.3, longest, causal)
        torch.testing.assert_close(got[:16], want[:16])
    one = torch.arange(5)
    got = torch.ops.hotfuse.bounded_packed_attention(q[:4], k, v, one, offsets, None, 7, True)
    torch.testing.assert_close(got, hotfuse.packed_attention(q[:4], k, v, one, offsets, causal=True))


def test_first_calls_of_many_capacities_share_the_bucket_that_kept_calls_fit_in() -> None:
    """Each would have two calls kernel by kernel otherwise, which lost the race of a packed plan before any was recorded."""
    packer, _ = packed(PaddedEncoder(pools="last"))
    run = DevicePackedRun(
        DevicePacker(packer), 1.0, lambda *_: ("asked",), Counting([]), lambda *_: ("padded",), usual=1088  # type: ignore[arg-type]
    )
    assert [run.usual_bucket(n) for n in (1024, 1088, 992, 1056)] == [1088] * 4
    assert [run.usual_bucket(n) for n in (1152, 896)] == [1152, 896]  # too small, too far
    assert run.used[1088] == 4
